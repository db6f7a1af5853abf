//! LoRA adapters and model claims: further models on the pods that are there.

use serde_json::json;
use tandem_sim::{Engine, EngineConfig, Hold};

use super::{Pair, ask, chat, fleet_shows, settle};
use crate::harness::engines::{MODEL, pd_by_default, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::{Call, base};
use crate::harness::pods::PodManifest;
use crate::harness::{SOON, within};

/// The model that the last request of an engine asked for; it must have been the only one.
fn model_asked_of(engine: &Engine) -> String {
    let records: Vec<_> = engine.records().into_iter().filter(|record| record.path.starts_with("/v1/chat")).collect();
    assert_eq!(records.len(), 1, "{records:?}");
    records[0].json()["model"].as_str().unwrap_or_default().to_owned()
}

/// Each engine knows its own adapter only and answers 404 for the other one, so a request that goes astray fails.
async fn pairs_with_adapters() -> Vec<Pair> {
    let mut pairs = Vec::new();
    for number in 0..2 {
        let aliases = vec![format!("lora-{number}")];
        let change = move |config: EngineConfig| EngineConfig { aliases: aliases.clone(), ..config };
        pairs.push(Pair::start(number, MODEL, change).await);
    }
    pairs
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_are_served_by_their_instances_prefill_and_decode() {
    let pairs = pairs_with_adapters().await;
    let mut pods: Vec<PodManifest> = pairs.iter().flat_map(|pair| pair.pods(&pd_by_default())).collect();
    pods.push(PodManifest::adapter("lora-0", &["p0", "d0"]));
    pods.push(PodManifest::adapter("lora-1", &["d1", "p1"]));
    let mut fleet = Fleet::start(pods, FleetOptions::default()).await;
    for path in fleet.paths() {
        for stream in [false, true] {
            for number in [0, 1, 0, 1] {
                pairs.iter().flat_map(Pair::engines).for_each(Engine::clear_records);
                let name = format!("lora-{number}");
                // The profile of the base model makes it PD.
                let answer = ask(&path, chat(&name, "hello there", 3, stream)).send().await;
                assert_eq!(answer.status, 200, "{name}");
                assert_eq!(answer.header("target-pod"), format!("d{number}"));
                assert_eq!(answer.header("prefill-target-pod"), format!("p{number}"));
                assert!(answer.body().await.complete);
                for engine in pairs[number].engines() {
                    assert_eq!(model_asked_of(engine), name, "both legs carry the adapter's name");
                }
                assert!(pairs[1 - number].engines().iter().all(|engine| engine.records().is_empty()));
            }
        }
    }

    // One request under each name: the load is one.
    let hold: Hold = pairs[1].decode.hold();
    let path = base(fleet.tandems[0].front().expect("a front"));
    let busy = tokio::spawn(ask(&path, chat("lora-1", "stays", 2, true)).send());
    within("the held request", hold.wait_for(1)).await;
    let metrics = fleet.tandems[0].metrics().await;
    for name in ["d0", "d1", "p0", "p1"] {
        let labels = [("pod_name", name)];
        let series: Vec<_> = metrics.matching("tandem_pod_decode_running", &labels).collect();
        assert_eq!(series.len(), 1, "{series:?}");
        assert_eq!(series[0].value, f64::from(u8::from(name == "d1")), "{name}");
    }
    // The other pair is the less busy one for the base model.
    for _ in 0..4 {
        let answer = ask(&path, chat(MODEL, "elsewhere", 2, false)).send().await;
        assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "d0"));
        assert!(answer.body().await.complete);
    }
    hold.release();
    assert!(busy.await.expect("an answer").body().await.complete);

    let listed = Call::get(&path, "/v1/models").send().await.json().await;
    let names: Vec<&str> = listed["data"].as_array().expect("models").iter().filter_map(|m| m["id"].as_str()).collect();
    assert_eq!(names, ["lora-0", "lora-1", MODEL]);

    // The adapter moves, loses its instances, and goes.
    let moved = |instances: &'static [&'static str]| PodManifest::adapter("lora-0", instances);
    let shows = |page: &serde_json::Value, instances: &[&str]| {
        let wanted: Vec<String> = instances.iter().map(|name| format!("default/{name}")).collect();
        page["models"]["lora-0"]["instances"] == json!(wanted)
    };
    fleet.pods.put([moved(&["p1", "d1"])]);
    fleet_shows(&fleet.tandems, "the adapter to move", |page| shows(page, &["d1", "p1"])).await;
    let answer = ask(&path, chat("lora-0", "not loaded there", 2, false)).send().await;
    assert_eq!(answer.status, 404, "the engine has the last word: {}", answer.header("target-pod"));
    assert!(answer.body().await.complete);
    fleet.pods.put([moved(&[])]);
    fleet_shows(&fleet.tandems, "the adapter to lose its instances", |page| shows(page, &[])).await;
    let answer = ask(&path, chat("lora-0", "nobody", 2, false)).send().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-error-no-model-backends")), (503, "true"));
    fleet.pods.remove("lora-0");
    fleet_shows(&fleet.tandems, "the adapter to go", |page| page["models"]["lora-0"].is_null()).await;
    let answer = ask(&path, chat("lora-0", "nobody", 2, false)).send().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-error-no-model-backends")), (400, "lora-0"));
    // A name of a base model: the base model wins, and one sentence says so.
    fleet.pods.put([PodManifest::adapter(MODEL, &["p0"])]);
    fleet_shows(&fleet.tandems, "the collision to be told", |page| {
        page["problems"].as_array().is_some_and(|problems| problems.len() == 1)
            && page["models"][MODEL]["alias_of"].is_null()
    })
    .await;
    let engines: Vec<&Engine> = pairs.iter().flat_map(Pair::engines).collect();
    settle(&fleet.tandems, &engines).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn claimed_models_are_served_on_their_ports_and_say_when_they_are_not_up() {
    let own = start_engine(EngineConfig::combined(MODEL)).await;
    let side = start_engine(EngineConfig::combined("side")).await;
    let port = Engine::address(&side).port();
    let claim = |state: &str, port: u16| json!({"model": "side", "port": port, "state": state}).to_string();
    let pod = |state: &str, port: u16| {
        PodManifest::new("c0", MODEL, Engine::address(&own))
            .annotation("modelclaim.aibrix.ai/side", &claim(state, port))
    };
    let mut fleet = Fleet::start([pod("active", port)], FleetOptions { replicas: 1, ..FleetOptions::default() }).await;
    let least = |path: &str, model: &str| {
        ask(path, chat(model, "hello", 2, false)).header("routing-strategy", "least-request").send()
    };
    for path in fleet.paths() {
        for (model, pod, engine) in [(MODEL, "c0", &own), ("side", "c0:side", &side)] {
            [&own, &side].into_iter().for_each(Engine::clear_records);
            let answer = least(&path, model).await;
            assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, pod));
            assert!(answer.body().await.complete);
            assert_eq!(model_asked_of(engine), model);
        }
    }
    for (state, port, retry) in
        [("sleeping", 0, "10"), ("activating", 0, "10"), ("failed", 0, ""), ("sleeping", port, "10")]
    {
        fleet.pods.put([pod(state, port)]);
        fleet_shows(&fleet.tandems, state, |page| page["models"]["side"]["not_up"] == state).await;
        for path in fleet.paths() {
            for strategy in ["least-request", "pd", ""] {
                let mut call = ask(&path, chat("side", "hello", 2, false));
                if !strategy.is_empty() {
                    call = call.header("routing-strategy", strategy);
                }
                let answer = call.send().await;
                assert_eq!(answer.status, 503, "{state} {strategy}");
                assert_eq!(answer.header("x-error-no-model-backends"), "side");
                assert_eq!(answer.header("retry-after"), retry, "{state}");
                let error = answer.json().await;
                assert_eq!(
                    (&error["error"]["code"], &error["error"]["param"]),
                    (&json!("service_unavailable"), &json!("model"))
                );
            }
            let answer = least(&path, MODEL).await;
            assert_eq!(answer.status, 200, "the pod's own model is up");
            assert!(answer.body().await.complete);
        }
    }
    fleet.pods.put([pod("active", port)]);
    let up = |page: &serde_json::Value| page["models"]["side"]["routable_pods"] == 1;
    fleet_shows(&fleet.tandems, "the model to be up again", up).await;
    let answer = least(&fleet.paths()[0], "side").await;
    assert_eq!(answer.status, 200);
    assert!(answer.body().await.complete);
    let metrics = fleet.tandems[0].metrics().await;
    assert_eq!(metrics.matching("tandem_pod_decode_running", &[("pod_name", "c0:side")]).count(), 1);
    // What cannot be read harms nobody.
    let broken = PodManifest::new("c0", MODEL, Engine::address(&own)).annotation("modelclaim.aibrix.ai/side", "{");
    fleet.pods.put([broken]);
    fleet_shows(&fleet.tandems, "the problem to be told", |page| {
        page["models"]["side"].is_null() && page["problems"].as_array().is_some_and(|problems| problems.len() == 1)
    })
    .await;
    fleet.tandems[0]
        .wait_metrics(SOON, "its series to go", |metrics| {
            metrics.matching("tandem_pod_decode_running", &[("pod_name", "c0:side")]).count() == 0
        })
        .await;
    assert_eq!(least(&fleet.paths()[0], "side").await.status, 503, "it was served a moment ago");
    settle(&fleet.tandems, &[&own, &side]).await;
}
