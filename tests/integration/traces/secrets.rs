//! One structured log line for each request, and nothing in logs, metrics or spans that only the client and the
//! engines may know.

use serde_json::{Value, json};
use tandem_sim::Fault;

use super::{CHAT, Protocol, exporting};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::{Call, base};
use crate::harness::otlp::Collector;
use crate::harness::within;
use crate::harness::{SOON, eventually};

const TOKEN: &str = "token-3141592653";
const PROMPT: &str = "prompt-2718281828";
const HANDOFF: &str = "handoff-1618033988";
const OF_CLIENT: &str = "client-handoff-1414213562";
const COLLECTOR: &str = "collector-1732050807";
const QUERY: &str = "query-2236067977";
const SECRETS: [&str; 6] = [TOKEN, PROMPT, HANDOFF, OF_CLIENT, COLLECTOR, QUERY];

fn body(stream: bool) -> Value {
    json!({
        "model": "m",
        "messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": PROMPT}],
        "max_tokens": 4,
        "stream": stream,
        "kv_transfer_params": {"remote_host": OF_CLIENT, "remote_engine_id": OF_CLIENT},
    })
}

/// The lines of the request log so far.
fn request_lines(sandbox: &Sandbox) -> Vec<Value> {
    let log = sandbox.fleet.tandems[0].process().stderr();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["target"] == "tandem::request").collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_log_line_each_and_no_secret_anywhere() {
    let collector = Collector::start().await;
    let header = format!("x-collector-key={COLLECTOR}");
    let env = [
        ("TANDEM_LOG_FORMAT", "json"),
        ("TANDEM_LOG", "info,tandem=trace"),
        ("AIBRIX_AUTH_BEARER_TOKEN", TOKEN),
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "1"),
        ("OTEL_EXPORTER_OTLP_HEADERS", header.as_str()),
    ];
    let fleet = exporting(&collector, Protocol::Grpc, &env);
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let path = sandbox.paths().remove(0);
    let target = format!("{CHAT}?key={QUERY}");
    let call =
        |body: &Value| Call::post(&path, &target, body.to_string()).header("authorization", &format!("Bearer {TOKEN}"));
    let extra = json!({"note": HANDOFF}).to_string();
    let on = || Fault::on("/v1/");

    // Each kind of end, with its outcome and status.
    sandbox.prefill[0].script(on().kv_transfer_params_extra(&extra).expect("JSON").times(2));
    let whole = call(&body(false)).send().await;
    let request_id = whole.header("request-id").to_owned();
    assert_eq!(whole.json().await["usage"]["completion_tokens"], 4);
    assert!(call(&body(true)).send().await.events().collect().await.1);
    let relayed = sandbox.decode[0].records().into_iter().next().expect("a record");
    assert_eq!(relayed.json()["kv_transfer_params"]["note"], HANDOFF, "the engines do see it");
    sandbox.prefill[0].script(on().answer(400, "text/plain", format!("bad prompt: {PROMPT}")));
    assert_eq!(call(&body(true)).send().await.status, 400);
    sandbox.prefill[0].script(on().answer(500, "text/plain", format!("failed on: {PROMPT}")));
    assert_eq!(call(&body(true)).send().await.status, 503);
    let hold = sandbox.prefill[0].hold();
    assert_eq!(call(&body(true)).send().await.status, 503);
    // The engine may notice only later that nobody waits for that one any more.
    let left = |engine: &tandem_sim::Engine| engine.stats().held == 0;
    within("the leg is closed", sandbox.prefill[0].wait_until(left)).await;
    let leaving = tokio::spawn(call(&body(true)).try_send());
    within("the leg", hold.wait_for(1)).await;
    leaving.abort();
    within("the leg is closed", sandbox.prefill[0].wait_until(left)).await;
    hold.release();
    sandbox.decode[0].script(on().cut_before_head(tandem_sim::Cut::Reset));
    assert_eq!(call(&body(true)).send().await.status, 503);
    let wrong = Call::post(&path, &target, body(true).to_string()).header("authorization", &format!("Basic {TOKEN}"));
    assert_eq!(wrong.send().await.status, 401);
    let broken = body(true).to_string().replace("\"stream\":true", "\"stream\":");
    let broken = Call::post(&path, &target, broken).header("authorization", &format!("Bearer {TOKEN}"));
    assert_eq!(broken.send().await.status, 400);
    let mut unknown = body(true);
    unknown["model"] = PROMPT.into();
    assert_eq!(call(&unknown).send().await.status, 400);
    let nowhere = Call::post(&path, &format!("/v1/{QUERY}"), "{}").header("authorization", &format!("Bearer {TOKEN}"));
    assert_eq!(nowhere.send().await.status, 501);

    let expected = [
        ("gateway_request_success", 200),
        ("gateway_request_success", 200),
        ("pd_prefill_rejected", 400),
        ("pd_prefill_failure", 503),
        ("pd_prefill_failure", 503),
        ("client_cancelled_eof", 499),
        ("pd_decode_failure", 503),
        ("gateway_req_headers_fail", 401),
        ("x-error-request-body-processing_fail", 400),
        ("x-error-no-model-backends_fail", 400),
        ("unknown_request_path", 501),
    ];
    let lines = eventually(SOON, "all lines are written", async || {
        Some(request_lines(&sandbox)).filter(|lines| lines.len() >= expected.len())
    })
    .await;
    let ends: Vec<_> = lines
        .iter()
        .map(|line| {
            (line["fields"]["outcome"].as_str().unwrap_or_default(), line["fields"]["status"].as_i64().unwrap_or(0))
        })
        .collect();
    assert_eq!(ends, expected, "one line each, in order");
    let first = &lines[0]["fields"];
    let size = body(false).to_string().len();
    for (name, value) in [
        ("request_id", json!(request_id)),
        ("endpoint", json!(CHAT)),
        ("model", json!("m")),
        ("strategy", json!("pd")),
        ("roleset", json!("rs0")),
        ("prefill_pod", json!("default/p0")),
        ("target_pod", json!("default/d0")),
        ("prefill_policy", json!("prefix_cache")),
        ("decode_policy", json!("load_balancing")),
        ("handoff", json!("relayed")),
        ("stream", json!(false)),
        ("body_bytes", json!(size)),
        ("completion_tokens", json!(4)),
    ] {
        assert_eq!(first[name], value, "{name}");
    }
    for name in ["routing_ms", "prefill_ms", "kv_transfer_ms", "ttft_ms", "decode_ms", "total_ms"] {
        assert!(first[name].as_f64().is_some_and(|millis| millis >= 0.0), "{name} of {first}");
    }

    // Whatever leaves the process: its log, its pages, its spans.
    let tandem = &sandbox.fleet.tandems[0];
    let roots = |spans: &[crate::harness::otlp::Span]| {
        let roots = spans.iter().filter(|span| span.name == "tandem.request").count();
        (roots >= expected.len()).then_some(())
    };
    collector.wait_for("all roots", roots).await;
    let mut places = vec![
        ("the log", format!("{}{}", tandem.process().stderr(), tandem.process().stdout())),
        ("the spans", format!("{:?}", collector.spans())),
    ];
    for page in ["/metrics", "/debug/fleet", "/readyz", "/v1/models"] {
        let bytes = Call::get(&base(tandem.http()), page).send().await.body().await.bytes;
        places.push((page, String::from_utf8_lossy(&bytes).into_owned()));
    }
    for (place, text) in places {
        assert!(text.len() > 10, "{place} is empty");
        for secret in SECRETS {
            let found = text.lines().find(|line| line.contains(secret));
            assert!(found.is_none(), "{secret} in {place}: {found:?}");
        }
    }
    sandbox.close().await;
}
