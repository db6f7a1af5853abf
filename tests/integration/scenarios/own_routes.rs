//! Requests without a strategy, with discovery from Kubernetes: Envoy's own routes serve them, if they are ready.

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig};

use super::{ask, chat, settle};
use crate::harness::engines::{MODEL, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::pods::PodManifest;
use crate::harness::{SOON, eventually};

/// Stands for the route that the reference's controller makes for a model: it matches the header that Tandem sets.
fn with_a_route(config: &mut Value) {
    let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let routes = manager["route_config"]["virtual_hosts"][0]["routes"].as_array_mut().expect("routes");
    let header = json!({"name": "model", "string_match": {"exact": MODEL}});
    routes.insert(
        0,
        json!({
            "name": "own",
            "match": {"prefix": "/", "headers": [header]},
            "direct_response": {"status": 203, "body": {"inline_string": "the model's own route"}},
        }),
    );
}

fn route(parents: &Value) -> Value {
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"namespace": "aibrix-system", "name": format!("{MODEL}-router")},
        "status": {"parents": parents},
    })
}

fn parent(accepted: &str, resolved_refs: &str) -> Value {
    let conditions = json!([
        {"type": "Accepted", "status": accepted},
        {"type": "ResolvedRefs", "status": resolved_refs},
    ]);
    json!({"controllerName": "gateway.envoyproxy.io/gatewayclass-controller", "conditions": conditions})
}

/// Status, `x-error-routing`, and the body.
async fn answered(path: &str, strategy: Option<&str>) -> (u16, String, String) {
    let call = ask(path, chat(MODEL, "hello", 2, false));
    let call = strategy.map_or(call.clone(), |strategy| call.header("routing-strategy", strategy));
    let answer = call.send().await;
    let (status, marker) = (answer.status.as_u16(), answer.header("x-error-routing").to_owned());
    (status, marker, String::from_utf8_lossy(&answer.body().await.bytes).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_strategy_envoys_own_route_serves_what_it_can() {
    let engine = start_engine(EngineConfig::combined(MODEL)).await;
    let pod = PodManifest::new("plain", MODEL, Engine::address(&engine));
    let options =
        FleetOptions { kubernetes: true, replicas: 1, edit_envoy: Some(with_a_route), ..FleetOptions::default() };
    let fleet = Fleet::start([pod], options).await;
    let [envoy, front] = fleet.paths().try_into().expect("two ways in");
    let api = fleet.pods.api().expect("the API");
    for (object, missing) in [
        (None, "does not exist"),
        (Some(route(&json!([]))), "has no status"),
        (Some(route(&json!([parent("False", "True")]))), "condition Accepted is not True"),
        (Some(route(&json!([parent("True", "Unknown")]))), "condition ResolvedRefs is not True"),
        (Some(route(&json!([parent("False", "False"), parent("True", "True")]))), ""),
        (Some(route(&json!([parent("True", "False")]))), "condition ResolvedRefs is not True"),
        (Some(route(&json!([parent("True", "True")]))), ""),
    ] {
        if let Some(object) = &object {
            api.put("httproutes", object);
        }
        let expected = async || {
            let (status, marker, body) = answered(&envoy, None).await;
            match missing {
                "" => (status == 203 && body == "the model's own route").then_some(()),
                missing => (status == 503
                    && marker == "true"
                    && body.contains("service_unavailable")
                    && body.contains(&format!("aibrix-system/{MODEL}-router"))
                    && body.contains(missing))
                .then_some(()),
            }
        };
        eventually(SOON, &format!("the answer to {object:?}"), expected).await;
        // Whoever names a strategy, and the front, do without Envoy's routes.
        let (status, ..) = answered(&envoy, Some("least-request")).await;
        assert_eq!(status, 200);
        assert_eq!(answered(&front, None).await.0, 200);
    }
    settle(&fleet.tandems, &[&engine]).await;
}
