//! OpenMetrics by the judgement of its Python parser.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::harness::engines::{MODEL, Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, base};
use crate::harness::otlp::Collector;
use crate::harness::process::{Start, tool};
use crate::harness::tandem::Tandem;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/observability/openmetrics.py");
const CHAT: &str = "/v1/chat/completions";
const SAMPLED: &str = "0af7651916cd43dd8448eb211c80319c";
const UNSAMPLED: &str = "11111111111111111111111111111111";

/// What the Python parser makes of a replica's page.
async fn parsed(tandem: &Tandem) -> Value {
    let mut start = Start::new("openmetrics", tool("TANDEM_TEST_PYTHON", "python"));
    start.arg(SCRIPT).arg(format!("{}/metrics", base(tandem.http())));
    let process = start.spawn();
    let status = process.exited(Duration::from_mins(1)).await;
    assert!(status.success(), "{}", process.logs());
    serde_json::from_str(&process.stdout()).expect("the script's answer")
}

fn chat(model: &str, stream: bool) -> String {
    let mut body = json!({"model": model, "messages": [{"role": "user", "content": "tell me"}], "max_tokens": 8});
    if stream {
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
    }
    body.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_strict_parser_reads_the_page_and_its_exemplars() {
    let collector = Collector::start().await;
    let endpoint = base(collector.grpc());
    // Only who asks for it is traced.
    let env = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_TRACES_SAMPLER", "parentbased_always_off"),
        ("OTEL_BSP_SCHEDULE_DELAY", "20"),
    ];
    let fleet = FleetOptions { replicas: 1, envoy: false, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }.env(&env)).await;
    let (tandem, front) = (&sandbox.fleet.tandems[0], sandbox.paths().remove(0));
    let ask = async |parent: Option<String>, stream: bool| {
        let mut call = Call::post(&front, CHAT, chat(MODEL, stream));
        if let Some(parent) = parent {
            call = call.header("traceparent", &parent);
        }
        let answer = call.send().await;
        assert_eq!(answer.status, 200);
        answer.body().await;
    };
    ask(None, true).await;
    ask(Some(format!("00-{UNSAMPLED}-b7ad6b7169203331-00")), true).await;
    let before = parsed(tandem).await;
    assert_eq!(before["exemplars"], json!([]), "nobody keeps these traces");
    assert_eq!(before["content_type"], "application/openmetrics-text; version=1.0.0; charset=utf-8");

    ask(Some(format!("00-{SAMPLED}-b7ad6b7169203331-01")), true).await;
    ask(None, true).await;
    let hostile = "no \"such\" \\ model\n".to_owned();
    let refused = Call::post(&front, CHAT, chat(&hostile, false)).send().await;
    assert_eq!(refused.status, 400);
    collector
        .wait_for("the trace that exemplars name", |spans| {
            spans.iter().any(|span| span.trace_id == SAMPLED && span.name == "tandem.request").then_some(())
        })
        .await;
    let page = parsed(tandem).await;
    let exemplars = page["exemplars"].as_array().expect("exemplars");
    let families: BTreeSet<&str> = exemplars.iter().map(|one| one["family"].as_str().unwrap()).collect();
    let expected =
        ["decode", "kv_transfer", "prefill", "request", "routing", "time_per_output_token", "time_to_first_token"];
    let expected: Vec<String> = expected.iter().map(|part| format!("tandem_{part}_seconds")).collect();
    assert_eq!(families.into_iter().collect::<Vec<_>>(), expected, "{page:#}");
    assert_eq!(exemplars.len(), expected.len(), "one bucket of each");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
    for exemplar in exemplars {
        assert_eq!((&exemplar["labels"], &exemplar["model"]), (&json!({"trace_id": SAMPLED}), &json!(MODEL)));
        let at = exemplar["timestamp"].as_f64().expect("a moment");
        assert!((now - 300.0..now + 1.0).contains(&at), "{at} is not lately");
    }
    let kinds = &page["families"];
    for (family, kind) in [
        ("gateway_request_model_success", "counter"),
        ("gateway_ttft_bucket", "counter"),
        ("gateway_in_flight_requests", "gauge"),
        ("tandem_state_plane_sync_seconds", "histogram"),
        ("process_cpu_seconds", "counter"),
    ] {
        assert_eq!(kinds[family], kind, "{family}");
    }

    // Exemplars leave with their model; and whoever does not ask for them gets the old format.
    let mut sandbox = sandbox;
    for pod in ["p0", "d0"] {
        sandbox.fleet.pods.remove(pod);
    }
    let tandem = &sandbox.fleet.tandems[0];
    tandem.wait_metrics(crate::harness::SOON, "the model goes", |metrics| !metrics.has("tandem_routable_pods")).await;
    assert_eq!(parsed(tandem).await["exemplars"], json!([]));
    let plain = Call::get(&base(tandem.http()), "/metrics").header("accept", "text/plain").send().await;
    assert_eq!(plain.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    sandbox.close().await;
}
