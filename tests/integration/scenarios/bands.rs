//! Adaptive bucket serving, end to end.

use serde_json::{Value, json};

use super::{Pair, ask, chat, fleet_shows, routable, settle_pairs, words};
use crate::harness::engines::{MODEL, pd_by_default};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::{SOON, eventually};

const SHORT: usize = 20;
const MIDDLE: usize = 100;
const LONG: usize = 400;
const METRICS: [&str; 3] =
    ["pd_bucket_serve_band_total", "pd_bucket_serve_prompt_tokens_total", "pd_bucket_serve_band_max"];

async fn start(serve: bool) -> (Fleet, Vec<Pair>) {
    let mut pairs = Vec::new();
    for number in 0..2 {
        pairs.push(Pair::start(number, MODEL, |config| config).await);
    }
    let pods = pairs.iter().flat_map(|pair| pair.pods(&pd_by_default()));
    let env = [
        ("AIBRIX_PROMPT_LENGTH_BUCKETING", "true"),
        ("AIBRIX_BUCKET_SERVE", if serve { "true" } else { "false" }),
        // Prompts that begin alike must not be a reason of their own to stay together.
        ("AIBRIX_PREFILL_SCORE_POLICY", "least_request"),
    ];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let fleet = Fleet::start(pods, FleetOptions { env, replicas: 1, envoy: false, ..FleetOptions::default() }).await;
    (fleet, pairs)
}

/// Sends a prompt of so many tokens through the way in; the decode pod that answered.
async fn target(path: &str, tokens: usize) -> String {
    let answer = ask(path, chat(MODEL, &words(tokens), 2, false)).send().await;
    assert_eq!(answer.status, 200, "{:?}", answer.headers);
    let target = answer.header("target-pod").to_owned();
    assert!(answer.body().await.complete);
    target
}

/// Each kind is a third of the tokens, so that halves are cut in the middle one, however the traffic is caught.
async fn traffic(path: &str) {
    for tokens in [SHORT, MIDDLE, LONG] {
        for _ in 0..LONG / tokens {
            target(path, tokens).await;
        }
    }
}

fn bands(page: &Value) -> &[Value] {
    page["models"][MODEL]["bands"].as_array().map_or(&[], Vec::as_slice)
}

/// Two rolesets that take any length get a band each. When the roleset of a band has no decode pod any more, the other
/// one takes its prompts.
#[tokio::test(flavor = "multi_thread")]
async fn rolesets_of_equal_range_get_a_band_each_which_only_advises() {
    let (mut fleet, pairs) = start(true).await;
    let paths = fleet.paths();
    let path = paths.last().expect("the front of the first replica");
    let tandem = &fleet.tandems[0];
    eventually(SOON, "a plan with two bands", async || {
        traffic(path).await;
        let page = tandem.admin_json("/debug/fleet").await;
        // The first plan may have seen a part of the first traffic only; its successor takes some seconds.
        let ends = bands(&page).first().map(|live| live["bands"].as_array().cloned().unwrap_or_default())?;
        let [low, high] = ends.as_slice() else { return None };
        assert_eq!((&low["min"], &high["max"]), (&json!(0), &Value::Null));
        let near = |end: &Value| end.as_u64().is_some_and(|end| end.abs_diff(MIDDLE as u64) < 4);
        (near(&low["max"]) && near(&high["min"])).then_some(())
    })
    .await;
    for _ in 0..8 {
        assert_eq!((target(path, SHORT).await, target(path, LONG).await), ("d0".to_owned(), "d1".to_owned()));
        // A plan that is made meanwhile must see the same mixture, or its cut moves.
        traffic(path).await;
    }
    let page = tandem.admin_json("/debug/fleet").await;
    assert_eq!((&bands(&page)[0]["profile"], &bands(&page)[0]["mode"]), (&json!("default"), &json!("throughput")));
    let metrics = tandem.metrics().await;
    for roleset in ["rs0", "rs1"] {
        for name in METRICS {
            assert!(metrics.sum(name, &[("roleset", roleset)]) > 0.0, "{name} of {roleset}");
        }
    }

    fleet.pods.remove("d0");
    routable(&fleet.tandems, &["p0", "p1", "d1"]).await;
    for tokens in [SHORT, LONG] {
        assert_eq!(target(path, tokens).await, "d1");
    }
    // And the next plan has no band for it.
    fleet_shows(&fleet.tandems[..1], "a plan of one roleset", |page| {
        let all = bands(page).iter().flat_map(|live| live["bands"].as_array().into_iter().flatten());
        all.map(|band| band["roleset"].as_str()).eq([Some("rs1")])
    })
    .await;
    let metrics = fleet.tandems[0].metrics().await;
    assert_eq!(metrics.matching("pd_bucket_serve_band_max", &[("roleset", "rs0")]).count(), 0);
    assert_eq!(metrics.matching("pd_bucket_serve_band_max", &[("roleset", "rs1")]).count(), 1);
    settle_pairs(&fleet, &pairs).await;
}

/// Without the switch nothing is planned and nothing published.
#[tokio::test(flavor = "multi_thread")]
async fn with_bucket_serving_off_nothing_is_published() {
    let (fleet, pairs) = start(false).await;
    let paths = fleet.paths();
    let path = paths.last().expect("the front of the first replica");
    traffic(path).await;
    // Longer than the beat of the planner: it has looked at the traffic, if it ever would.
    tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
    traffic(path).await;
    let page = fleet.tandems[0].admin_json("/debug/fleet").await;
    assert_eq!(bands(&page), &[] as &[Value]);
    let metrics = fleet.tandems[0].metrics().await;
    assert!(METRICS.iter().all(|name| !metrics.has(name)));
    settle_pairs(&fleet, &pairs).await;
}
