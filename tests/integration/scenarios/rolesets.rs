//! Which rolesets and pods may serve a request at all.

use serde_json::json;
use tandem_sim::{Engine, EngineConfig};

use super::{Pair, ask, chat, routable, settle, words};
use crate::harness::engines::{MODEL, pd_by_default, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::pods::PodManifest;

/// A profile whose `routingConfig` is this.
fn pd_with(config: &serde_json::Value) -> serde_json::Value {
    json!({"profiles": {"default": {"routingStrategy": "pd", "routingConfig": config}}})
}

/// Without a complete roleset the answer says what is missing, and nobody is asked; a combined pod takes over.
#[tokio::test(flavor = "multi_thread")]
async fn r37_incomplete_rolesets_are_named_and_a_combined_pod_takes_over() {
    let mut pairs = Vec::new();
    for number in 0..2 {
        pairs.push(Pair::start(number, MODEL, |config| config).await);
    }
    let combined = start_engine(EngineConfig::combined(MODEL)).await;
    let engines: Vec<&Engine> = pairs.iter().flat_map(Pair::engines).chain([&combined]).collect();
    let all: Vec<PodManifest> = pairs.iter().flat_map(|pair| pair.pods(&pd_by_default())).collect();
    let [p0, d0, p1, d1] = all.try_into().expect("four pods");
    let mut fleet = Fleet::start([p0.clone()], FleetOptions::default()).await;

    let cases = [
        (vec![p0.clone()], vec!["decode pods are not ready: prefill=1, decode=0", "roleset rs0 lacks decode"]),
        (vec![d0.clone()], vec!["prefill pods are not ready: prefill=0, decode=1", "roleset rs0 lacks prefill"]),
        (
            vec![p0.clone(), d1.clone()],
            vec!["prefill=1, decode=1", "roleset rs0 lacks decode", "roleset rs1 lacks prefill"],
        ),
        // There, but not ready.
        (vec![p0.clone(), d0.clone().ready(false)], vec!["prefill=1, decode=0", "roleset rs0 lacks decode"]),
    ];
    let mut present = vec![p0.name().to_owned()];
    for (pods, expected) in &cases {
        fleet.pods.put(pods.iter().cloned());
        for gone in present.iter().filter(|name| pods.iter().all(|pod| pod.name() != *name)) {
            fleet.pods.remove(gone);
        }
        present = pods.iter().map(|pod| pod.name().to_owned()).collect();
        let ready = |pod: &&PodManifest| pod.manifest()["status"]["conditions"].is_null();
        let names: Vec<&str> = pods.iter().filter(ready).map(PodManifest::name).collect();
        routable(&fleet.tandems, &names).await;
        for path in fleet.paths() {
            for stream in [false, true] {
                let answer = ask(&path, chat(MODEL, "anybody there?", 2, stream)).send().await;
                assert_eq!((answer.status.as_u16(), answer.header("x-error-routing")), (503, "true"));
                let error = answer.json().await;
                let message = error["error"]["message"].as_str().expect("a message");
                assert!(expected.iter().all(|part| message.contains(part)), "{message:?} lacks one of {expected:?}");
            }
        }
        assert!(engines.iter().all(|engine| engine.records().is_empty()), "no engine is asked");
    }

    // The last case, and a pod that does both.
    let both = PodManifest::new("c0", MODEL, Engine::address(&combined)).config(&pd_with(&json!({"combined": true})));
    fleet.pods.put([both]);
    routable(&fleet.tandems, &["p0", "c0"]).await;
    for path in fleet.paths() {
        let answer = ask(&path, chat(MODEL, "anybody there?", 2, false)).send().await;
        assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "c0"));
        assert_eq!(answer.header("prefill-target-pod"), "");
        assert_eq!(answer.json().await["usage"]["completion_tokens"], 2);
    }
    // And a complete roleset is preferred to it again.
    fleet.pods.put([p1, d1]);
    routable(&fleet.tandems, &["p0", "p1", "d1", "c0"]).await;
    for path in fleet.paths() {
        let answer = ask(&path, chat(MODEL, "anybody there?", 2, false)).send().await;
        assert_eq!((answer.header("prefill-target-pod"), answer.header("target-pod")), ("p1", "d1"));
        assert!(answer.body().await.complete);
    }
    settle(&fleet.tandems, &engines).await;
}

/// Short prompts go to the pair, long ones to the combined pod, and the bounds belong to their range.
#[tokio::test(flavor = "multi_thread")]
async fn prompt_lengths_choose_between_a_pair_and_a_combined_pod() {
    let pair = Pair::start(0, MODEL, |config| config).await;
    let combined = start_engine(EngineConfig::combined(MODEL)).await;
    let engines: Vec<&Engine> = pair.engines().into_iter().chain([&combined]).collect();
    let long = json!({"combined": true, "promptLenBucketMinLength": 65, "promptLenBucketMaxLength": 200});
    let pods = pair
        .pods(&pd_with(&json!({"promptLenBucketMinLength": 0, "promptLenBucketMaxLength": 64})))
        .into_iter()
        .chain([PodManifest::new("c0", MODEL, Engine::address(&combined)).config(&pd_with(&long))]);
    let env = vec![("AIBRIX_PROMPT_LENGTH_BUCKETING".to_owned(), "true".to_owned())];
    let mut fleet = Fleet::start(pods, FleetOptions { env, ..FleetOptions::default() }).await;
    for path in fleet.paths() {
        for (tokens, target) in [(1, "d0"), (64, "d0"), (65, "c0"), (200, "c0")] {
            let answer = ask(&path, chat(MODEL, &words(tokens), 2, false)).send().await;
            assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, target), "{tokens} tokens");
            assert!(answer.body().await.complete);
        }
        let answer = ask(&path, chat(MODEL, &words(201), 2, false)).send().await;
        assert_eq!(answer.status, 503, "{:?}", answer.headers);
        let error = answer.json().await;
        let message = error["error"]["message"].as_str().expect("a message");
        assert!(message.contains("no prompt-length bucket matches"), "{message}");
    }
    // Without its decode pod the bucket is incomplete: nobody else takes short prompts.
    fleet.pods.remove("d0");
    routable(&fleet.tandems, &["p0", "c0"]).await;
    for path in fleet.paths() {
        for (tokens, status) in [(64, 503), (65, 200)] {
            let answer = ask(&path, chat(MODEL, &words(tokens), 2, false)).send().await;
            assert_eq!(answer.status, status, "{tokens} tokens");
            assert!(answer.body().await.complete);
        }
    }
    settle(&fleet.tandems, &engines).await;
}
