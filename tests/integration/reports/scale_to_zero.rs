//! Models that are scaled to zero: known, and without a pod until an autoscaler has seen that somebody asks.

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig};

use crate::harness::engines::{MODEL, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::{Answer, Call};
use crate::harness::oracle::oracle;
use crate::harness::pods::PodManifest;
use crate::harness::raw::{RawServer, Step};
use crate::harness::{SOON, eventually};

async fn ask(path: &str, model: &str, strategy: &str) -> Answer {
    let body = json!({"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2});
    let call = Call::post(path, "/v1/chat/completions", body.to_string());
    let call = if strategy.is_empty() { call } else { call.header("routing-strategy", strategy) };
    call.send().await
}

async fn models(fleet: &Fleet, what: &str, condition: impl Fn(&Value) -> bool) {
    for tandem in &fleet.tandems {
        let probe = async || condition(&tandem.admin_json("/debug/fleet").await["models"]).then_some(());
        eventually(SOON, what, probe).await;
    }
}

/// Sum over the replicas, as an autoscaler asks for it.
async fn unserved(fleet: &Fleet, model: &str) -> f64 {
    let mut sum = 0.0;
    for tandem in &fleet.tandems {
        sum += tandem.metrics().await.sum("tandem_unserved_requests", &[("model", model)]);
    }
    sum
}

/// Each way in and each strategy: unavailable, and when to come back.
async fn unavailable(fleet: &Fleet, model: &str, why: &str) {
    for path in fleet.paths() {
        for strategy in ["", "pd", "least-request", "session-affinity"] {
            let answer = ask(&path, model, strategy).await;
            assert_eq!(
                (answer.status.as_u16(), answer.header("retry-after"), answer.header("x-error-no-model-backends")),
                (503, "10", "true"),
                "{why}: {model} {strategy}"
            );
            assert_eq!(answer.json().await["error"]["code"], "service_unavailable");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_is_scaled_to_zero_is_unavailable_until_it_has_pods_again() {
    let engine = start_engine(EngineConfig::combined(MODEL)).await;
    let other = start_engine(EngineConfig::combined("other")).await;
    let pod = |ready: bool| PodManifest::new("c0", MODEL, Engine::address(&engine)).ready(ready);
    let always = PodManifest::new("o0", "other", Engine::address(&other));
    let mut fleet = Fleet::start([pod(true), always], FleetOptions::default()).await;
    for round in 1..=2 {
        let answer = ask(&fleet.paths()[0], MODEL, "random").await;
        assert_eq!(answer.status, 200, "it serves, round {round}");
        assert!(answer.body().await.complete);
        // Its last pod gets unready, goes, and comes back unready.
        fleet.pods.put([pod(false)]);
        models(&fleet, "the pod to be unready", |models| models[MODEL]["routable_pods"] == 0).await;
        unavailable(&fleet, MODEL, "unready").await;
        fleet.pods.remove("c0");
        models(&fleet, "the model to have no pod", |models| models[MODEL].is_null()).await;
        unavailable(&fleet, MODEL, "gone").await;
        assert!(unserved(&fleet, MODEL).await >= 16.0, "what an autoscaler waits for");
        // A name that was never known is a mistake, and no label.
        let answer = ask(&fleet.paths()[0], "nonsense", "random").await;
        assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (400, ""));
        assert_eq!(
            fleet.tandems[0].metrics().await.matching("tandem_unserved_requests", &[("model", "nonsense")]).count(),
            0
        );
        fleet.pods.put([pod(true)]);
        models(&fleet, "the pod to be ready again", |models| models[MODEL]["routable_pods"] == 1).await;
    }
    let answer = ask(&fleet.paths()[0], MODEL, "random").await;
    assert_eq!(answer.status, 200);
    assert!(answer.body().await.complete);
    oracle(&fleet.tandems, &[&engine, &other]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_forgotten_in_time() {
    for (seconds, status) in [("0", 400), ("86400", 503)] {
        let engine = start_engine(EngineConfig::combined(MODEL)).await;
        let env = vec![("TANDEM_MODEL_MEMORY_SECONDS".to_owned(), seconds.to_owned())];
        let options = FleetOptions { replicas: 1, env, ..FleetOptions::default() };
        let mut fleet = Fleet::start([PodManifest::new("c0", MODEL, Engine::address(&engine))], options).await;
        fleet.pods.remove("c0");
        models(&fleet, "the model to have no pod", |models| models[MODEL].is_null()).await;
        assert_eq!(ask(&fleet.paths()[0], MODEL, "random").await.status, status, "{seconds}");
        oracle(&fleet.tandems, &[&engine]).await;
    }
}

/// A replica that has just started has seen no pod; AIBrix's route of the model outlives them.
#[tokio::test(flavor = "multi_thread")]
async fn a_route_makes_a_model_known_to_a_replica_that_never_saw_its_pods() {
    let engine = start_engine(EngineConfig::combined("other")).await;
    let options = FleetOptions { kubernetes: true, replicas: 1, ..FleetOptions::default() };
    let fleet = Fleet::start([PodManifest::new("o0", "other", Engine::address(&engine))], options).await;
    assert_eq!(ask(&fleet.paths()[0], "Org/Big-1", "pd").await.status, 400);
    let api = fleet.pods.api().expect("an API");
    for name in ["small-router", "org-big-1-"] {
        // Names that no object can have are hashed.
        let name = if name.ends_with('-') { format!("{name}{}-router", hash_of("Org/Big-1")) } else { name.to_owned() };
        api.put(
            "httproutes",
            &json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
                "metadata": {"namespace": "aibrix-system", "name": name}}),
        );
    }
    eventually(SOON, "the routes to be seen", async || {
        let (first, second) =
            (ask(&fleet.paths()[0], "small", "pd").await, ask(&fleet.paths()[0], "Org/Big-1", "").await);
        (first.status == 503 && second.status == 503).then_some(())
    })
    .await;
    unavailable(&fleet, "small", "a route").await;
    unavailable(&fleet, "Org/Big-1", "a route").await;
    assert!(unserved(&fleet, "Org/Big-1").await >= 8.0);
    assert_eq!(ask(&fleet.paths()[0], "medium", "pd").await.status, 400);
    oracle(&fleet.tandems, &[&engine]).await;
}

/// `printf Org/Big-1 | sha256sum`.
fn hash_of(model: &str) -> &'static str {
    assert_eq!(model, "Org/Big-1");
    "78246a3036b7"
}

/// Where AIBrix makes no routes, the workloads themselves are watched, if a setting asks for that.
#[tokio::test(flavor = "multi_thread")]
async fn a_workload_without_replicas_makes_its_model_known() {
    let kinds = [
        ("deployments", "apps/v1", "Deployment"),
        ("statefulsets", "apps/v1", "StatefulSet"),
        ("stormservices", "orchestration.aibrix.ai/v1alpha1", "StormService"),
        ("rayclusterfleets", "orchestration.aibrix.ai/v1alpha1", "RayClusterFleet"),
    ];
    for watched in [true, false] {
        let engine = start_engine(EngineConfig::combined("other")).await;
        let env =
            if watched { vec![("TANDEM_KUBERNETES_WORKLOADS".to_owned(), "true".to_owned())] } else { Vec::new() };
        let options = FleetOptions { kubernetes: true, replicas: 1, env, ..FleetOptions::default() };
        let fleet = Fleet::start([PodManifest::new("o0", "other", Engine::address(&engine))], options).await;
        let api = fleet.pods.api().expect("an API");
        for (plural, version, kind) in kinds {
            let model = format!("of-{plural}");
            let workload = json!({
                "apiVersion": version, "kind": kind, "spec": {"replicas": 0},
                "metadata": {"namespace": "default", "name": plural, "labels": {"model.aibrix.ai/name": model}},
            });
            api.put(plural, &workload);
            if !watched {
                assert_eq!(api.count("list", plural), 0, "no right is asked for that is not needed");
                continue;
            }
            eventually(SOON, "the workload to be seen", async || {
                (ask(&fleet.paths()[0], &model, "pd").await.status == 503).then_some(())
            })
            .await;
            unavailable(&fleet, &model, kind).await;
            assert!(unserved(&fleet, &model).await >= 8.0);
        }
        // One that is gone is remembered like pods that are.
        if watched {
            api.delete("deployments", "default", "deployments");
            assert_eq!(ask(&fleet.paths()[0], "of-deployments", "pd").await.status, 503);
        } else {
            assert_eq!(ask(&fleet.paths()[0], "of-deployments", "pd").await.status, 400);
        }
        assert_eq!(ask(&fleet.paths()[0], "nonsense", "pd").await.status, 400);
        oracle(&fleet.tandems, &[&engine]).await;
    }
}

/// As the reference gateway does: the runtime in the pod is told, once, however many ask.
#[tokio::test(flavor = "multi_thread")]
async fn a_sleeping_model_is_woken_by_who_asks_for_it() {
    let own = start_engine(EngineConfig::combined(MODEL)).await;
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let runtime = RawServer::start(vec![vec![
        Step::ReadRequest,
        Step::Gate(std::sync::Arc::clone(&gate)),
        Step::Send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}".to_vec()),
    ]])
    .await;
    let claim = |state: &str| json!({"model": "side", "port": 0, "state": state}).to_string();
    let pod = |state: &str| {
        PodManifest::new("c0", MODEL, Engine::address(&own)).annotation("modelclaim.aibrix.ai/side", &claim(state))
    };
    let env = vec![("TANDEM_MODEL_RUNTIME_PORT".to_owned(), runtime.address().port().to_string())];
    let options = FleetOptions { replicas: 1, env, ..FleetOptions::default() };
    let mut fleet = Fleet::start([pod("activating")], options).await;
    let path = fleet.paths()[0].clone();
    assert_eq!(ask(&path, "side", "pd").await.status, 503);
    assert_eq!(runtime.connections().len(), 0, "it is on its way");
    fleet.pods.put([pod("sleeping")]);
    models(&fleet, "the model to sleep", |models| models["side"]["not_up"] == "sleeping").await;
    for path in fleet.paths() {
        for strategy in ["", "pd", "random"] {
            let answer = ask(&path, "side", strategy).await;
            assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, "10"));
        }
    }
    eventually(SOON, "the runtime to be told", async || {
        runtime.connections().first().is_some_and(|connection| connection.body().ends_with(b"}")).then_some(())
    })
    .await;
    let [told] = &runtime.connections()[..] else { panic!("once: {:?}", runtime.connections()) };
    assert!(told.head().starts_with("POST /v1/runtime/models/wake HTTP/1.1\r\n"), "{}", told.head());
    assert_eq!(told.header("content-type").as_deref(), Some("application/json"));
    let body: Value = serde_json::from_slice(told.body()).expect("JSON");
    assert_eq!(body["model_name"], "side");
    assert!(body["operation_id"].as_str().is_some_and(|id| id.starts_with("gateway-wake/uid-of-c0/side/")), "{body}");
    assert_eq!(unserved(&fleet, "side").await, 7.0);
    gate.add_permits(100);
    fleet.tandems[0]
        .wait_metrics(SOON, "the call to be counted", |metrics| {
            metrics.sum("tandem_model_wakes_total", &[("result", "ok")]) == 1.0
        })
        .await;
    oracle(&fleet.tandems, &[&own, &runtime]).await;
}
