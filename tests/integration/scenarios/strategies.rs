//! Single-pod strategies, sessions and filters over real engines, through Envoy and through the front.

use std::collections::BTreeSet;

use serde_json::json;
use tandem_sim::{Engine, EngineConfig};

use super::{Pair, ask, chat, fleet_shows, pods_of, settle};
use crate::harness::engines::{MODEL, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::Call;
use crate::harness::pods::PodManifest;
use crate::harness::raw::RawServer;
use crate::harness::{SOON, eventually};

struct Plain {
    engines: Vec<Engine>,
    fleet: Fleet,
}

/// Four combined engines `plain0` to `plain3`; 0 and 1 in zone a, 2 in zone b, 3 in none.
async fn plain() -> Plain {
    let (mut engines, mut pods) = (Vec::new(), Vec::new());
    for (number, zone) in [Some("a"), Some("a"), Some("b"), None].into_iter().enumerate() {
        let engine = start_engine(EngineConfig::combined(MODEL)).await;
        let pod = PodManifest::new(&format!("plain{number}"), MODEL, Engine::address(&engine));
        pods.push(zone.map_or(pod.clone(), |zone| pod.label("zone", zone)));
        engines.push(engine);
    }
    let fleet = Fleet::start(pods, FleetOptions { replicas: 1, ..FleetOptions::default() }).await;
    let scraped = |page: &serde_json::Value| pods_of(page).iter().all(|pod| pod["signals"]["fresh"] == true);
    fleet_shows(&fleet.tandems, "all engines are scraped", scraped).await;
    Plain { engines, fleet }
}

impl Plain {
    async fn close(self) {
        settle(&self.fleet.tandems, &self.engines.iter().collect::<Vec<_>>()).await;
    }
}

fn call(path: &str, headers: &[(&str, &str)]) -> Call {
    headers.iter().fold(ask(path, chat(MODEL, "hello", 2, false)), |call, (name, value)| call.header(name, value))
}

/// The pod that answered, and the session it issued.
async fn served(path: &str, headers: &[(&str, &str)]) -> (String, String) {
    let answer = call(path, headers).send().await;
    assert_eq!(answer.status, 200, "{headers:?}");
    let seen = (answer.header("target-pod").to_owned(), answer.header("x-session-id").to_owned());
    assert!(answer.body().await.complete);
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_stay_and_a_forged_one_is_never_dialled() {
    let plain = plain().await;
    // Somebody that no pod stands for: whoever can make the gateway dial it has a way into the cluster.
    let outsider = RawServer::start(Vec::new()).await;
    for path in plain.fleet.paths() {
        let strategy = ("routing-strategy", "session-affinity");
        let (first, id) = served(&path, &[strategy]).await;
        assert!(!id.is_empty());
        for _ in 0..8 {
            assert_eq!(served(&path, &[strategy, ("x-session-id", &id)]).await, (first.clone(), id.clone()));
        }
        // The client's own key, on every way in and in a list as well.
        let key = ("x-aibrix-session-key", "conversation 7");
        let (by_key, _) = served(&path, &[strategy, key]).await;
        for strategy in ["session-affinity", "session-affinity:9,least-request"] {
            assert_eq!(served(&path, &[("routing-strategy", strategy), key]).await.0, by_key);
        }
        let address = outsider.address().to_string();
        for forged in [base64(&address), base64("localhost:1"), address, "!".to_owned()] {
            let (pod, issued) = served(&path, &[strategy, ("x-session-id", &forged)]).await;
            assert!(pod.starts_with("plain"), "{pod}");
            assert_ne!(issued, forged);
        }
        let (_, issued) = served(&path, &[("routing-strategy", "random"), ("x-session-id", &id)]).await;
        assert_eq!(issued, "", "only session-affinity issues ids");
    }
    assert!(outsider.connections().is_empty(), "{:?}", outsider.connections());
    plain.close().await;
}

/// Standard base64, for ids that no gateway issued.
fn base64(text: &str) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut coded = String::new();
    for chunk in text.as_bytes().chunks(3) {
        let byte = |i: usize| u32::from(chunk.get(i).copied().unwrap_or(0));
        let word = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            let digit = ALPHABET[(word >> (18 - 6 * i) & 63) as usize] as char;
            coded.push(if i <= chunk.len() { digit } else { '=' });
        }
    }
    coded
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_choose_among_the_pods() {
    let plain = plain().await;
    for path in plain.fleet.paths() {
        for (filter, expected) in [
            ("zone=b", vec!["plain2"]),
            ("zone in (a, b), zone != b", vec!["plain0", "plain1"]),
            ("!zone", vec!["plain3"]),
        ] {
            let mut seen = BTreeSet::new();
            for _ in 0..30 {
                seen.insert(served(&path, &[("routing-strategy", "random"), ("external-filter", filter)]).await.0);
            }
            assert_eq!(seen.iter().map(String::as_str).collect::<Vec<_>>(), expected, "{filter}");
        }
        for (filter, status, text) in [
            ("zone=nowhere", 503, "external-filter matches none of 4 ready pods"),
            ("zone in ()", 400, "external-filter is not a label selector"),
        ] {
            let answer = call(&path, &[("routing-strategy", "random"), ("external-filter", filter)]).send().await;
            assert_eq!((answer.status.as_u16(), answer.header("x-error-routing")), (status, "true"), "{filter}");
            let body = answer.json().await;
            assert!(body["error"]["message"].as_str().is_some_and(|message| message.contains(text)), "{body}");
        }
    }
    for record in plain.engines.iter().flat_map(Engine::records) {
        assert_eq!(record.header("external-filter"), None, "engines are not told");
    }
    plain.close().await;
}

/// `pd` under a filter: a roleset of which one side is filtered out is none.
#[tokio::test(flavor = "multi_thread")]
async fn filters_keep_rolesets_whole() {
    let pairs = [Pair::start(0, MODEL, |c| c).await, Pair::start(1, MODEL, |c| c).await];
    let config = json!({"profiles": {"default": {"routingStrategy": "pd"}}});
    let [p0, d0] = pairs[0].pods(&config);
    let [p1, d1] = pairs[1].pods(&config);
    let pods = [p0.label("gpu", "new"), d0.label("gpu", "old"), p1.label("gpu", "new"), d1.label("gpu", "new")];
    let fleet = Fleet::start(pods, FleetOptions { replicas: 1, ..FleetOptions::default() }).await;
    for path in fleet.paths() {
        for _ in 0..10 {
            let answer = call(&path, &[("external-filter", "gpu=new")]).send().await;
            assert_eq!(answer.status, 200);
            assert_eq!((answer.header("prefill-target-pod"), answer.header("target-pod")), ("p1", "d1"));
            assert!(answer.body().await.complete);
        }
        let answer = call(&path, &[("external-filter", "gpu=old")]).send().await;
        assert_eq!(answer.status, 503);
        let body = answer.json().await;
        let expected = "external-filter matches 1 of 4 ready pods";
        assert!(body["error"]["message"].as_str().is_some_and(|message| message.contains(expected)), "{body}");
    }
    settle(&fleet.tandems, &pairs.iter().flat_map(Pair::engines).collect::<Vec<_>>()).await;
}

/// Every strategy serves, says what it is called, and a list weighs what it says.
#[tokio::test(flavor = "multi_thread")]
async fn every_strategy_and_a_list_serve() {
    let plain = plain().await;
    for path in plain.fleet.paths() {
        for strategy in tandem::knobs::STRATEGIES.into_iter().filter(|strategy| *strategy != "pd") {
            let answer = call(&path, &[("routing-strategy", strategy)]).send().await;
            assert_eq!((answer.status.as_u16(), answer.header("routing-strategy")), (200, strategy));
            assert!(answer.body().await.complete);
        }
        let answer = call(&path, &[("routing-strategy", "prefix-cache:2, least-request,random:0")]).send().await;
        assert_eq!(answer.header("routing-strategy"), "least-request,prefix-cache:2");
        let first = answer.header("target-pod").to_owned();
        assert!(answer.body().await.complete);

        // Who holds the prompt wins by the list, while it is as idle as the others.
        let long = "the same long prompt again and again ".repeat(40);
        let ask_long = |strategy: &'static str| {
            ask(&path, chat(MODEL, &long, 2, false)).header("routing-strategy", strategy).send()
        };
        let answer = ask_long("prefix-cache,least-request").await;
        let holder = answer.header("target-pod").to_owned();
        assert!(answer.body().await.complete);
        let known = async || {
            (plain.fleet.tandems[0].metrics().await.sum("tandem_prefix_index_entries", &[]) > 0.0).then_some(())
        };
        eventually(SOON, "the index has the prompt", known).await;
        for _ in 0..5 {
            let answer = ask_long("prefix-cache:2,least-request").await;
            assert_eq!(answer.header("target-pod"), holder, "after {first}");
            assert!(answer.body().await.complete);
        }
        for bad in ["random,", "least-request:x", "round-robin"] {
            let answer = call(&path, &[("routing-strategy", bad)]).send().await;
            assert_eq!((answer.status.as_u16(), answer.header("x-error-invalid-routing-strategy")), (400, "true"));
        }
    }
    plain.close().await;
}
