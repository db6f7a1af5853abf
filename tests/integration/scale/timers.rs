//! R81, R82: no timer of the shipped file ends a long prefill or a long answer.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_sim::{EngineConfig, Timing};

use crate::harness::engines::{MODEL, Sandbox, SandboxOptions};
use crate::harness::envoy::{SHIPPED_FILE, shipped_text};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::Call;
use crate::harness::within_time;

/// Set it to let the answer take as long as in the report.
const SLOW_TESTS: &str = "TANDEM_SLOW_TESTS";
/// Longer than Envoy's default for the silence of a stream (300 s).
const REPORTED: Duration = Duration::from_secs(310);
/// Longer than Envoy's default for a route (15 s).
const EVERY_DAY: Duration = Duration::from_secs(17);

fn shipped() -> Value {
    serde_saphyr::from_str(&shipped_text(SHIPPED_FILE, false)).expect("parse the YAML")
}

/// The HTTP connection manager of the shipped file.
fn manager(shipped: &Value) -> &Value {
    &shipped["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
}

fn seconds(value: &Value) -> f64 {
    let text = value.as_str().unwrap_or_else(|| panic!("no duration: {value}"));
    text.strip_suffix('s').and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no duration: {text}"))
}

fn question() -> String {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "think hard"}], "max_tokens": 4}).to_string()
}

#[test]
fn r82_the_shipped_file_sets_every_timer_that_has_a_default() {
    let shipped = shipped();
    let manager = manager(&shipped);
    let twenty_minutes = 20.0 * 60.0;
    // Envoy's defaults: 300 s of silence, 15 s for a route. Zero switches off.
    assert!(seconds(&manager["stream_idle_timeout"]) > twenty_minutes);
    let routes = manager["route_config"]["virtual_hosts"][0]["routes"].as_array().expect("routes");
    let routed = routes.iter().find(|route| route["name"] == "routed").expect("the route to the pods");
    assert_eq!(seconds(&routed["route"]["timeout"]), 0.0);
    assert!(seconds(&routed["route"]["idle_timeout"]) > twenty_minutes);
    assert!(manager["common_http_protocol_options"]["max_stream_duration"].is_null());
    let filters = manager["http_filters"].as_array().expect("filters");
    let ext_proc = filters.iter().map(|filter| &filter["typed_config"]).find(|one| !one["grpc_service"].is_null());
    let ext_proc = ext_proc.expect("the filter of the gateway");
    // It would bound the stream to the gateway, and with it the answer.
    assert!(ext_proc["grpc_service"]["timeout"].is_null());
    // R81: short for a frozen replica, and room for what the gateway asks for.
    assert!(seconds(&ext_proc["message_timeout"]) <= 5.0);
    assert!(seconds(&ext_proc["max_message_timeout"]) >= 600.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn r81_a_prefill_may_outlast_the_message_timeout() {
    const PREFILL: Duration = Duration::from_secs(6);
    let shipped = shipped();
    let filters = manager(&shipped)["http_filters"].as_array().expect("filters");
    let message_timeout = filters.iter().find_map(|one| one["typed_config"].get("message_timeout"));
    assert!(PREFILL.as_secs_f64() > seconds(message_timeout.expect("a message timeout")));

    let engine = |config: EngineConfig| config.timing(Timing { prefill_base: PREFILL, ..Timing::instant() });
    let pod = |pod: crate::harness::pods::PodManifest| {
        let profile = json!({"routingStrategy": "pd", "routingConfig": {"pd": {"prefillRequestTimeout": 30}}});
        pod.config(&json!({"profiles": {"default": profile}}))
    };
    // Two pairs, as a prefill engine computes one prompt at a time; and the process's own bound is too short.
    let env = vec![("AIBRIX_PREFILL_REQUEST_TIMEOUT".to_owned(), "2".to_owned())];
    let fleet = FleetOptions { env, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { pairs: 2, engine, pod, fleet, ..SandboxOptions::default() }).await;
    let calls = sandbox.paths().into_iter().map(|path| async move {
        let started = Instant::now();
        let answer = Call::post(&path, "/v1/chat/completions", question()).send().await;
        assert_eq!(answer.status, 200, "{path}");
        assert_eq!(answer.json().await["usage"]["completion_tokens"], 4, "{path}");
        assert!(started.elapsed() >= PREFILL, "{path}: the prefill took its time");
    });
    futures_util::future::join_all(calls).await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r82_an_answer_may_be_silent_for_long() {
    let silence = if std::env::var_os(SLOW_TESTS).is_some() { REPORTED } else { EVERY_DAY };
    // The hand-off must not run out before the decode pod takes it up.
    let engine = |config: EngineConfig| config.lease(2 * REPORTED);
    let sandbox = Sandbox::start(SandboxOptions { engine, ..SandboxOptions::default() }).await;
    let gate = sandbox.decode[0].hold();
    let calls: Vec<_> = sandbox
        .paths()
        .into_iter()
        .map(|path| {
            tokio::spawn(async move {
                let call = Call::post(&path, "/v1/chat/completions", question());
                let answer = within_time(2 * REPORTED, "the answer", call.try_send()).await.expect("an answer");
                assert_eq!(answer.status, 200, "{path}");
                assert_eq!(answer.json().await["usage"]["completion_tokens"], 4, "{path}");
            })
        })
        .collect();
    gate.wait_for(calls.len()).await;
    // Real time, because the timers are in other processes.
    tokio::time::sleep(silence).await;
    assert_eq!(gate.waiting(), calls.len(), "nobody has given up");
    gate.release();
    for call in calls {
        call.await.expect("a call");
    }
    sandbox.close().await;
}
