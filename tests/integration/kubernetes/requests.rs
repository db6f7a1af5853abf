//! Requests through the real process while the API server says that pods change.

use serde_json::{Value, json};
use tandem_sim::EngineConfig;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::SECOND;
use crate::harness::engines::{MODEL, Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Answer, Call};
use crate::harness::pods::PodManifest;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually, within};

fn options(replicas: usize) -> SandboxOptions {
    let fleet = FleetOptions { kubernetes: true, replicas, ..FleetOptions::default() };
    SandboxOptions { fleet, ..SandboxOptions::default() }
}

fn ask(path: &str, text: &str, stream: bool) -> Call {
    let messages = json!([{"role": "user", "content": text}]);
    let body = json!({"model": MODEL, "messages": messages, "max_tokens": 4, "stream": stream});
    Call::post(path, "/v1/chat/completions", body.to_string())
}

fn pod<'a>(page: &'a Value, name: &str) -> Option<&'a Value> {
    page["models"][MODEL]["pods"].as_array()?.iter().find(|pod| pod["name"] == format!("default/{name}"))
}

async fn shows(tandem: &Tandem, what: &str, condition: impl Fn(&Value) -> bool) {
    let probe = async || condition(&tandem.admin_json("/debug/fleet").await).then_some(());
    eventually(SOON, what, probe).await;
}

fn counts(page: &Value, name: &str) -> [u64; 3] {
    let pod = pod(page, name).unwrap_or_else(|| panic!("no pod {name}"));
    ["prefills", "decodes_pending", "decodes_running"].map(|count| pod["in_flight"][count].as_u64().expect("a count"))
}

/// A running stream of a pod that is told to end goes on to its end; new requests go elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn r46_a_terminating_pod_finishes_its_streams_and_gets_no_more() {
    let mut sandbox = Sandbox::start(SandboxOptions { pairs: 2, ..options(2) }).await;
    for path in sandbox.paths() {
        sandbox.clear();
        for pair in 0..2 {
            for name in [format!("p{pair}"), format!("d{pair}")] {
                sandbox.fleet.pods.change(&name, |pod| pod.set(&["metadata", "deletionTimestamp"], Value::Null));
            }
        }
        for tandem in &sandbox.fleet.tandems {
            shows(tandem, "all are routable", |page| {
                ["p0", "d0", "p1", "d1"].iter().all(|name| pod(page, name).is_some_and(|pod| pod["routable"] == true))
            })
            .await;
        }
        let holds = [sandbox.decode[0].hold(), sandbox.decode[1].hold()];
        let first = tokio::spawn(ask(&path, "first", true).send());
        let held = async || holds.iter().position(|hold| hold.waiting() == 1);
        let ending = eventually(SOON, "it is held", held).await;
        for name in [format!("p{ending}"), format!("d{ending}")] {
            sandbox.fleet.pods.change(&name, PodManifest::terminating);
        }
        for tandem in &sandbox.fleet.tandems {
            shows(tandem, "it ends", |page| {
                pod(page, &format!("d{ending}")).is_some_and(|pod| pod["routable"] == false)
            })
            .await;
        }
        let [zero, one] = holds;
        let (ending_hold, other) = if ending == 0 { (zero, one) } else { (one, zero) };
        other.release();
        for number in 0..10 {
            let answer = ask(&path, &format!("later {number}"), false).send().await;
            assert_eq!(answer.status, 200);
            assert!(answer.body().await.complete);
        }
        assert_eq!(sandbox.decode[ending].records().len(), 1, "nothing new");
        assert_eq!(sandbox.decode[1 - ending].records().len(), 10);
        ending_hold.release();
        let answer = first.await.expect("the first");
        assert_eq!(answer.status, 200);
        let (events, whole) = answer.events().collect().await;
        assert!(whole && events.last().is_some_and(|last| last == "[DONE]"), "{events:?}");
    }
    sandbox.close().await;
}

/// A release belongs to the incarnation that was charged. The harness looks for counts below zero all the time.
#[tokio::test(flavor = "multi_thread")]
async fn r48_a_pod_that_is_deleted_and_made_anew_never_counts_below_zero() {
    let sandbox = Sandbox::start(options(1)).await;
    for (round, path) in sandbox.paths().into_iter().enumerate() {
        let hold = sandbox.decode[0].hold();
        let mut requests: JoinSet<Answer> = JoinSet::new();
        for number in 0..5 {
            requests.spawn(ask(&path, &format!("{number}"), number % 2 == 0).send());
        }
        within("five at the decode engine", hold.wait_for(5)).await;
        let tandem = &sandbox.fleet.tandems[0];
        assert_eq!(counts(&tandem.admin_json("/debug/fleet").await, "d0"), [0, 0, 5]);
        let api = std::sync::Arc::clone(sandbox.fleet.pods.api().expect("the API"));
        let again = ["p0", "d0"].map(|name| {
            let mut pod = api.get("pods", "default", name).expect("a pod");
            api.delete("pods", "default", name);
            pod["metadata"]["uid"] = format!("another {name}, {round}").into();
            pod
        });
        let began = Instant::now();
        for pod in &again {
            api.put("pods", pod);
        }
        let fresh = |page: &Value| pod(page, "d0").is_some() && counts(page, "d0") == [0, 0, 0];
        shows(tandem, "the new incarnation", fresh).await;
        println!("the new incarnation after {:?}", began.elapsed());
        for number in 5..8 {
            requests.spawn(ask(&path, &format!("{number}"), number % 2 == 0).send());
        }
        within("eight at the decode engine", hold.wait_for(8)).await;
        assert_eq!(counts(&tandem.admin_json("/debug/fleet").await, "d0"), [0, 0, 3]);
        hold.release();
        for answer in requests.join_all().await {
            assert_eq!(answer.status, 200);
            assert!(answer.body().await.complete);
        }
        shows(tandem, "nothing is left", |page| counts(page, "d0") == [0, 0, 0]).await;
    }
    sandbox.close().await;
}

/// A changed port is used by the next request after it shows, which is within a second.
#[tokio::test(flavor = "multi_thread")]
async fn r51_a_changed_port_is_used_within_a_second() {
    let mut sandbox = Sandbox::start(SandboxOptions { pairs: 2, ..options(1) }).await;
    for name in ["p1", "d1"] {
        sandbox.fleet.pods.remove(name);
    }
    let tandem = &sandbox.fleet.tandems[0];
    shows(tandem, "one pair", |page| pod(page, "d1").is_none() && pod(page, "p1").is_none()).await;
    let mut fastest = SOON;
    for round in 0..4 {
        let target = (round + 1) % 2;
        let [prefill, decode] = [&sandbox.prefill[target], &sandbox.decode[target]].map(tandem_sim::Engine::address);
        let began = Instant::now();
        sandbox.fleet.pods.change("p0", |pod| pod.label("model.aibrix.ai/port", &prefill.port().to_string()));
        sandbox.fleet.pods.change("d0", |pod| pod.label("model.aibrix.ai/port", &decode.port().to_string()));
        shows(&sandbox.fleet.tandems[0], "the ports", |page| {
            [("p0", prefill), ("d0", decode)]
                .iter()
                .all(|(name, address)| pod(page, name).is_some_and(|pod| pod["address"] == address.to_string()))
        })
        .await;
        fastest = fastest.min(began.elapsed());
        sandbox.clear();
        for path in sandbox.paths() {
            let answer = ask(&path, "hello", false).send().await;
            assert_eq!(answer.status, 200);
            assert!(answer.body().await.complete);
        }
        assert_eq!(sandbox.decode[target].records().len(), sandbox.paths().len());
        assert_eq!(sandbox.decode[1 - target].records().len(), 0);
    }
    println!("the ports after {fastest:?}");
    assert!(fastest < SECOND, "{fastest:?}");
    sandbox.close().await;
}

/// The API server goes: requests do not notice.
#[tokio::test(flavor = "multi_thread")]
async fn r89_requests_are_served_while_the_api_server_is_away() {
    let sandbox = Sandbox::start(options(1)).await;
    let api = sandbox.fleet.pods.api().expect("the API");
    for verb in ["list", "watch"] {
        api.refuse(verb, "pods", None, 503);
    }
    api.end_watches("pods", true);
    let tandem = &sandbox.fleet.tandems[0];
    let noted = async || {
        let page = tandem.admin_json("/readyz").await;
        page["notes"].to_string().contains("serving on what was known").then_some(page)
    };
    let page = eventually(SOON, "the note", noted).await;
    assert_eq!(page["ready"], true);
    for path in sandbox.paths() {
        let answer = ask(&path, "hello", false).send().await;
        assert_eq!(answer.status, 200);
        assert!(answer.body().await.complete);
    }
    sandbox.close().await;
}

/// An adapter that shows up in the API is a model from then on, which is within a second.
#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_is_served_within_a_second() {
    let engine = |config| EngineConfig { aliases: vec!["lora".to_owned()], ..config };
    let mut sandbox = Sandbox::start(SandboxOptions { engine, ..options(1) }).await;
    let knows = |page: &Value| page["models"]["lora"]["alias_of"] == MODEL;
    let mut fastest = SOON;
    for _ in 0..3 {
        let began = Instant::now();
        sandbox.fleet.pods.put([PodManifest::adapter("lora", &["p0", "d0"])]);
        shows(&sandbox.fleet.tandems[0], "the adapter", knows).await;
        fastest = fastest.min(began.elapsed());
        for path in sandbox.paths() {
            let body = json!({"model": "lora", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2});
            let answer = Call::post(&path, "/v1/chat/completions", body.to_string()).send().await;
            assert_eq!(answer.status, 200);
            assert!(answer.body().await.complete);
        }
        sandbox.fleet.pods.remove("lora");
        shows(&sandbox.fleet.tandems[0], "its end", |page| page["models"]["lora"].is_null()).await;
    }
    println!("the adapter after {fastest:?}");
    assert!(fastest < SECOND, "{fastest:?}");
    sandbox.close().await;
}
