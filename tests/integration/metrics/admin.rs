//! Readiness, health, the list of models; series that leave with their pod.

use serde_json::{Value, json};
use tandem_sim::EngineConfig;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::{CHAT, all, chat, fleet_shows, front};
use crate::harness::engines::{Backend, Sandbox, SandboxOptions, start_engine};
use crate::harness::fleet::Fleet;
use crate::harness::http::{Call, base};
use crate::harness::metrics::Metrics;
use crate::harness::oracle::oracle;
use crate::harness::pods::PodManifest;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually, within};

/// What the gRPC health service says to each of the two names that probes ask for.
async fn health(tandem: &Tandem) -> [ServingStatus; 2] {
    let channel =
        tonic::transport::Channel::from_shared(base(tandem.grpc())).unwrap().connect().await.expect("connect");
    let mut client = HealthClient::new(channel);
    let mut statuses = [ServingStatus::Unknown; 2];
    for (status, service) in statuses.iter_mut().zip(["", "gateway-plugin"]) {
        let request = HealthCheckRequest { service: service.to_owned() };
        *status = within("health", client.check(request)).await.expect("an answer").into_inner().status();
    }
    statuses
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_follows_draining_while_requests_go_on() {
    // Long enough that everything below happens while the replica still serves; it is killed at the end.
    let env = [("TANDEM_DRAIN_PROPAGATION_SECONDS", "600")];
    let sandbox = Sandbox::start(SandboxOptions { fleet: front(&env), ..SandboxOptions::default() }).await;
    let (tandem, path) = (&sandbox.fleet.tandems[0], sandbox.paths().remove(0));
    let ready = tandem.admin_json("/readyz").await;
    assert_eq!(
        (tandem.readiness().await, &ready["ready"], &ready["draining"]),
        (Some(200), &json!(true), &json!(false))
    );
    assert_eq!((&ready["models"], &ready["routable_pods"], &ready["reasons"]), (&json!(1), &json!(2), &json!([])));
    assert_eq!(health(tandem).await, [ServingStatus::Serving; 2]);
    tandem.sigterm();
    eventually(SOON, "readiness goes", async || (tandem.readiness().await? == 503).then_some(())).await;
    let ready = tandem.admin_json("/readyz").await;
    assert_eq!((&ready["ready"], &ready["reasons"]), (&json!(false), &json!(["draining"])));
    eventually(SOON, "health goes", async || (health(tandem).await == [ServingStatus::NotServing; 2]).then_some(()))
        .await;
    let alive = Call::get(&base(tandem.http()), "/healthz").send().await;
    assert_eq!(alive.status, 200, "not ready is not dead");
    assert_eq!(
        Call::post(&path, CHAT, chat(false, 4)).send().await.status,
        200,
        "it serves on until Envoy has noticed"
    );
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_fleet_is_ready_and_says_so() {
    let fleet = Fleet::start([], front(&[])).await;
    let tandem = &fleet.tandems[0];
    let ready = tandem.admin_json("/readyz").await;
    assert_eq!((&ready["ready"], &ready["notes"]), (&json!(true), &json!(["no routable pods"])));
    assert_eq!(tandem.admin_json("/v1/models").await, json!({"object": "list", "data": []}));
    let answer = Call::post(&fleet.paths()[0], CHAT, chat(false, 4)).send().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-error-no-model-backends")), (400, "m"));
    oracle(&fleet.tandems, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed_and_series_leave_with_their_pods() {
    let mut sandbox = Sandbox::start(SandboxOptions { fleet: front(&[]), ..SandboxOptions::default() }).await;
    let (other, other_pair) = (start_engine(EngineConfig::combined("org/other")).await, "org/other");
    sandbox.fleet.pods.put([PodManifest::new("x0", other_pair, other.address())]);
    let tandem = &sandbox.fleet.tandems[0];
    fleet_shows(tandem, "the second model", |page| page["models"][other_pair].is_object()).await;
    let model = |name: &str| json!({"id": name, "object": "model", "created": 0, "owned_by": "aibrix"});
    let list = json!({"object": "list", "data": [model("m"), model(other_pair)]});
    let front_path = sandbox.paths().remove(0);
    for path in [base(tandem.http()), front_path.clone()] {
        let answer = Call::get(&path, "/v1/models").send().await;
        assert_eq!((answer.status.as_u16(), answer.header("content-type")), (200, "application/json"));
        assert_eq!(answer.json().await, list);
    }
    let refused = Call::post(&base(tandem.http()), "/v1/models", "{}").send().await;
    assert_eq!(refused.status, 405);
    assert_eq!(refused.json().await, json!({"error": "method not allowed"}));

    // Both pods and both models have series; then one pod goes.
    let body: Value = serde_json::from_str(&chat(false, 4)).unwrap();
    let mut foreign = body.clone();
    foreign["model"] = other_pair.into();
    for body in [body, foreign] {
        assert_eq!(Call::post(&front_path, CHAT, body.to_string()).send().await.status, 200);
    }
    let scraped = |metrics: &Metrics| metrics.matching("tandem_pod_metrics_age_seconds", &[]).count() == 3;
    let metrics = tandem.wait_metrics(SOON, "all pods are scraped", scraped).await;
    assert_eq!(
        all(&metrics, "tandem_routable_pods"),
        [("model=m".to_owned(), 2.0), (format!("model={other_pair}"), 1.0)].into()
    );
    let about = |metrics: &Metrics, pod: &str| -> Vec<String> {
        let ours = |sample: &&crate::harness::metrics::Sample| {
            sample.labels.get("pod").or(sample.labels.get("pod_name")).is_some_and(|name| name == pod)
        };
        metrics.0.iter().filter(ours).map(|sample| sample.name.clone()).collect()
    };
    let (p0, x0) = (about(&metrics, "p0"), about(&metrics, "x0"));
    for name in ["tandem_pod_prefill_outstanding", "tandem_pod_metrics_age_seconds", "pd_selected_prefill_pod_total"] {
        assert!(p0.iter().any(|found| found == name), "{name} in {p0:?}");
    }
    assert!(x0.iter().any(|found| found == "gateway_request_total"), "{x0:?}");
    for pod in ["p0", "x0"] {
        sandbox.fleet.pods.remove(pod);
    }
    let tandem = &sandbox.fleet.tandems[0];
    let gone = |metrics: &Metrics| about(metrics, "p0").is_empty() && about(metrics, "x0").is_empty();
    let metrics = tandem.wait_metrics(SOON, "their series are gone", gone).await;
    assert_eq!(all(&metrics, "tandem_routable_pods"), [("model=m".to_owned(), 1.0)].into());
    assert_eq!(
        metrics.sum("gateway_request_model_success_total", &[("model", other_pair)]),
        1.0,
        "what was counted stays"
    );
    assert!(!about(&metrics, "d0").is_empty(), "the others keep theirs");
    assert_eq!(tandem.admin_json("/v1/models").await["data"], json!([model("m")]));
    oracle(&sandbox.fleet.tandems, &[&other as &dyn Backend]).await;
    sandbox.close().await;
}

/// A Job or an eviction leaves pods behind whose phase is Failed: nobody deletes them, and nothing is asked of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_failed_and_was_not_deleted_has_no_series() {
    let options = SandboxOptions { pairs: 2, fleet: front(&[]), ..SandboxOptions::default() };
    let mut sandbox = Sandbox::start(options).await;
    let ages = |metrics: &Metrics| metrics.matching("tandem_pod_metrics_age_seconds", &[]).count();
    sandbox.fleet.tandems[0].wait_metrics(SOON, "all pods are scraped", |metrics| ages(metrics) == 4).await;
    sandbox.fleet.pods.change("d1", |pod| pod.set(&["status", "phase"], "Failed".into()));
    let about =
        |metrics: &Metrics| metrics.0.iter().filter(|one| one.labels.values().any(|value| value == "d1")).count();
    let gone = |metrics: &Metrics| ages(metrics) == 3 && about(metrics) == 0;
    sandbox.fleet.tandems[0].wait_metrics(SOON, "the series of the failed pod go", gone).await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_need_the_token_and_probes_do_not() {
    const TOKEN: &str = "operators-only-7f3a";
    let sandbox = Sandbox::start(SandboxOptions { fleet: front(&[]), ..SandboxOptions::default() }).await;
    let fleet = Fleet::start([], front(&[("TANDEM_ADMIN_TOKEN", TOKEN)])).await;
    let guarded = base(fleet.tandems[0].http());
    let open = base(sandbox.fleet.tandems[0].http());
    let bearer = format!("Bearer {TOKEN}");
    for path in ["/metrics", "/debug/fleet", "/debug/decisions", "/debug/state"] {
        assert_eq!(Call::get(&open, path).send().await.status, 200, "{path} without a token to know");
        let refused = Call::get(&guarded, path).send().await;
        assert_eq!((refused.status.as_u16(), refused.header("www-authenticate")), (401, "Bearer"), "{path}");
        assert_eq!(Call::get(&guarded, path).header("authorization", "Bearer x").send().await.status, 401, "{path}");
        let passed = Call::get(&guarded, path).header("authorization", &bearer).send().await;
        assert_eq!(passed.status, 200, "{path}");
        let body = passed.body().await.bytes;
        assert!(!String::from_utf8_lossy(&body).contains(TOKEN), "{path} tells the token");
    }
    for path in ["/healthz", "/readyz", "/v1/models"] {
        assert_eq!(Call::get(&guarded, path).send().await.status, 200, "{path}");
    }
    assert!(!fleet.tandems[0].process().logs().contains(TOKEN), "the log tells the token");
    sandbox.close().await;
}
