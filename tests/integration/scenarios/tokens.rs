//! Token ledgers and decisions as an operator sees them: metrics, `/debug/decisions`, and the explaining header.

use std::time::Duration;

use serde_json::{Value, json};
use tandem_sim::{EngineConfig, Fault};

use super::{Pair, ask, chat, engine_shows, settle_pairs};
use crate::harness::engines::MODEL;
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually};

fn by_tokens() -> Value {
    let policies = json!({"prefillScorePolicy": "token_load", "decodeScorePolicy": "token_load"});
    json!({"profiles": {"default": {"routingStrategy": "pd", "routingConfig": policies}}})
}

async fn start(count: usize, env: &[(&str, &str)]) -> (Fleet, Vec<Pair>) {
    let mut pairs = Vec::new();
    for number in 0..count {
        pairs.push(Pair::start(number, MODEL, |config: EngineConfig| config).await);
    }
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let options = FleetOptions { replicas: 1, env, ..FleetOptions::default() };
    let fleet = Fleet::start(pairs.iter().flat_map(|pair| pair.pods(&by_tokens())), options).await;
    (fleet, pairs)
}

async fn gauge(tandem: &Tandem, name: &str, pod: &str) -> Option<f64> {
    let metrics = tandem.metrics().await;
    metrics.matching(name, &[("namespace", "default"), ("pod_name", pod)]).map(|sample| sample.value).next()
}

/// A request is charged where it runs, part by part, and the series go with their pods.
#[tokio::test(flavor = "multi_thread")]
async fn token_gauges_follow_a_request_and_leave_with_their_pod() {
    let (mut fleet, pairs) = start(1, &[("TANDEM_EXPLAIN", "1")]).await;
    let text = chat(MODEL, &"word ".repeat(2_000), 4, false);
    let (prompt, cost) = ((text.len() / 4) as f64, (3_500 + text.len() / 4) as f64);
    for path in fleet.paths() {
        let tandem = &fleet.tandems[0];
        let (prefill, decode) = (pairs[0].prefill.hold(), pairs[0].decode.hold());
        let call = ask(&path, text.clone()).header("x-tandem-explain", "1");
        let answer = tokio::spawn(async move { call.send().await });
        engine_shows("the prefill leg is held", &pairs[0].prefill, |_| prefill.waiting() == 1).await;
        assert_eq!(gauge(tandem, "pd_token_load_active_tokens", "p0").await, Some(cost), "{path}");
        assert_eq!(gauge(tandem, "pd_token_load_kv_tokens", "p0").await, Some(cost));
        assert_eq!(gauge(tandem, "pd_token_load_decode_tokens", "d0").await, Some(prompt));
        prefill.release();
        engine_shows("the decode leg is held", &pairs[0].decode, |_| decode.waiting() == 1).await;
        assert_eq!(gauge(tandem, "pd_token_load_active_tokens", "p0").await, Some(0.0));
        assert_eq!(gauge(tandem, "pd_token_load_kv_tokens", "p0").await, Some(cost));
        decode.release();
        let answer = answer.await.expect("an answer");
        let summary = answer.headers["x-tandem-explain"].to_str().expect("text").to_owned();
        assert!(summary.contains("policies=token_load/token_load; prefill=default/p0; decode=default/d0"), "{summary}");
        assert!(answer.body().await.complete);
        for leg in [&pairs[0].prefill, &pairs[0].decode] {
            assert!(
                leg.records().iter().all(|record| record.headers.iter().all(|(name, _)| name != "x-tandem-explain"))
            );
        }
        let page = tandem.admin_json("/debug/decisions").await;
        let newest = &page["decisions"][0];
        assert_eq!(newest["charged_tokens"], json!({"prefill": cost as u64, "decode": prompt as u64}));
        assert_eq!(newest["prefill_pods"][0]["pod"], "default/p0");
    }
    settle_pairs(&fleet, &pairs).await;
    fleet.pods.remove("p0");
    let tandem = &fleet.tandems[0];
    let gone = async || gauge(tandem, "pd_token_load_kv_tokens", "p0").await.is_none().then_some(());
    eventually(SOON, "the series leave with their pod", gone).await;
}

/// R42: a decode side that turns requests away leaves blocks on its prefill pod. They are counted, new prefills go
/// elsewhere, and after the lease they are gone.
#[tokio::test(flavor = "multi_thread")]
async fn r42_stranded_blocks_keep_new_work_away_until_their_lease_ends() {
    let (fleet, pairs) = start(2, &[("TANDEM_KV_LEASE_SECONDS", "20")]).await;
    let tandem = &fleet.tandems[0];
    let path = fleet.paths().remove(0);
    // Pair 1 refuses what it is handed; pair 0 serves.
    pairs[1].decode.script(Fault::on("/v1/").answer(503, "application/json", r#"{"error":"overloaded"}"#).always());
    let begun = tokio::time::Instant::now();
    let mut refused = 0;
    for n in 0..20 {
        let answer = ask(&path, chat(MODEL, &format!("{n}: {}", "word ".repeat(500)), 4, false)).send().await;
        refused += usize::from(answer.status == 503);
        answer.body().await;
    }
    if begun.elapsed() < Duration::from_secs(15) {
        // The first one that drew pair 1 left its blocks there, and they kept all others away.
        assert!(refused <= 1, "{refused} of 20 went to the pod that is full of stranded blocks");
        let stranded = gauge(tandem, "tandem_token_load_stranded_tokens", "p1").await.unwrap_or(0.0);
        assert_eq!(stranded > 4_000.0, refused == 1, "{stranded} tokens after {refused} refusals");
    }
    let quiet = async || {
        let left = gauge(tandem, "tandem_token_load_stranded_tokens", "p1").await.unwrap_or(0.0);
        (left == 0.0).then_some(())
    };
    eventually(Duration::from_mins(1), "the lease ends", quiet).await;
    settle_pairs(&fleet, &pairs).await;
}
