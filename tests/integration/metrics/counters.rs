//! The counters of the reference gateway's sections 9.1 and 9.2, by exact name and label, for each way a request ends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tandem_sim::{Engine, Fault, Role, Timing};

use super::{CHAT, all, chat, front};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;
use crate::harness::metrics::Metrics;
use crate::harness::{SOON, within};

/// What each counter holds: labels other than the replica's, and the count.
type Expected<'a> = [(&'static str, &'a [(&'a str, f64)])];

fn check(metrics: &Metrics, expected: &Expected<'_>) {
    for (name, series) in expected {
        let wanted: BTreeMap<String, f64> =
            series.iter().map(|(labels, value)| ((*labels).to_owned(), *value)).collect();
        assert_eq!(all(metrics, name), wanted, "{name}");
        for sample in metrics.matching(name, &[]) {
            let replica = sample.labels.get("gateway_pod").map(String::as_str);
            let without = ["gateway_pd_prefill_failure_total", "tandem_handoff_total"].contains(name);
            assert_eq!(replica, (!without).then_some("gateway-0"), "{name}");
        }
    }
}

const PREFILL_POD: &str =
    "engine_type=vllm,model=m,namespace=default,pod=p0,role=prefill,role_replica_index=,roleset=rs0";
const DECODE_POD: &str =
    "engine_type=vllm,model=m,namespace=default,pod=d0,role=decode,role_replica_index=,roleset=rs0";
const FAIL: &str = "gateway_request_model_fail_total";
const PREFILL_FAIL: &str = "gateway_prefill_request_fail_total";

#[tokio::test(flavor = "multi_thread")]
async fn every_end_of_a_request_is_counted_by_its_name() {
    let fleet = front(&[("AIBRIX_PREFILL_REQUEST_TIMEOUT", "1"), ("TANDEM_METRIC_LABELS", "lean")]);
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let (tandem, path) = (&sandbox.fleet.tandems[0], sandbox.paths().remove(0));
    let prefill = &sandbox.prefill[0];
    let on = || Fault::on("/v1/");
    let ended = async |count: usize| {
        let all = |metrics: &Metrics| metrics.sum("gateway_request_total", &[]) > count as f64 - 0.5;
        tandem.wait_metrics(SOON, "it is counted", all).await
    };
    // Labels stand in the order of their names.
    let request_total = DECODE_POD.replace("pod=d0,", "pod=d0,pod_name=gateway-0,");

    // A success: 8 tokens, usage reported.
    let answer = Call::post(&path, CHAT, chat(true, 8)).send().await;
    assert_eq!(answer.status, 200);
    assert!(answer.events().collect().await.1);
    let metrics = ended(1).await;
    let prompt_tokens = metrics.sum("gateway_input_tokens_total", &[]);
    assert!((1.0..256.0).contains(&prompt_tokens));
    check(
        &metrics,
        &[
            ("gateway_request_total", &[(&request_total, 1.0)]),
            (
                "gateway_request_model_success_total",
                &[("model=m,pod_name=gateway-0,status=gateway_request_success,status_code=200", 1.0)],
            ),
            (FAIL, &[]),
            ("gateway_requests_with_usage_total", &[("has_usage=true,model=m", 1.0)]),
            ("gateway_prompt_token_bucket_total", &[("bucket=0-256,model=m", 1.0)]),
            ("gateway_completion_token_bucket_total", &[("bucket=0-256,model=m", 1.0)]),
            ("gateway_input_tokens_total", &[("model=m", prompt_tokens)]),
            ("gateway_output_tokens_total", &[("model=m", 8.0)]),
            (
                "gateway_prefill_request_success_total",
                &[("model=m,status=pd-prefill-request-success,status_code=200", 1.0)],
            ),
            (PREFILL_FAIL, &[]),
            ("gateway_prefill_outstanding_requests", &[("", 0.0)]),
            ("pd_selected_prefill_pod_total", &[(PREFILL_POD, 1.0)]),
            ("pd_selected_decode_pod_total", &[(DECODE_POD, 1.0)]),
            ("tandem_handoff_total", &[("model=m,outcome=relayed", 1.0)]),
            ("gateway_in_flight_requests", &[("", 0.0)]),
            ("gateway_model_in_flight_requests", &[("model=m", 0.0)]),
        ],
    );
    // One bucket each; which one is a matter of speed.
    for part in ["routing_time", "prefill_time", "kv_transfer_time", "ttft", "tpot", "decode_time", "total_time"] {
        assert_eq!(metrics.sum(&format!("gateway_{part}_bucket_total"), &[("model", "m")]), 1.0, "{part}");
    }

    // A prefill pod's 4xx, its 5xx, its silence; then a client that leaves during the leg.
    prefill.script(on().answer(400, "application/json", r#"{"error":{"message":"no"}}"#));
    assert_eq!(Call::post(&path, CHAT, chat(true, 8)).send().await.status, 400);
    prefill.script(on().answer(500, "text/plain", "boom"));
    assert_eq!(Call::post(&path, CHAT, chat(true, 8)).send().await.status, 503);
    let hold = prefill.hold();
    assert_eq!(Call::post(&path, CHAT, chat(true, 8)).send().await.status, 503);
    hold.release();
    ended(4).await;
    let hold = prefill.hold();
    let leaving = tokio::spawn(Call::post(&path, CHAT, chat(true, 8)).try_send());
    within("the leg", hold.wait_for(1)).await;
    let during = tandem.metrics().await;
    for gauge in
        ["gateway_in_flight_requests", "gateway_model_in_flight_requests", "gateway_prefill_outstanding_requests"]
    {
        assert_eq!(during.sum(gauge, &[]), 1.0, "{gauge}");
    }
    assert_eq!(during.sum("tandem_pod_prefill_outstanding", &[("pod_name", "p0")]), 1.0);
    assert_eq!(during.sum("tandem_pod_decode_pending", &[("pod_name", "d0")]), 1.0);
    leaving.abort();
    let metrics = ended(5).await;
    hold.release();
    check(
        &metrics,
        &[
            ("gateway_request_total", &[(&request_total, 5.0)]),
            (
                FAIL,
                &[
                    ("model=m,pod_name=gateway-0,status=client_cancelled_eof,status_code=499", 1.0),
                    ("model=m,pod_name=gateway-0,status=pd_prefill_failure,status_code=503", 2.0),
                    ("model=m,pod_name=gateway-0,status=pd_prefill_rejected,status_code=400", 1.0),
                ],
            ),
            (
                PREFILL_FAIL,
                &[
                    ("model=m,status=context_canceled,status_code=499", 1.0),
                    ("model=m,status=deadline_exceeded,status_code=504", 1.0),
                    ("model=m,status=http_error,status_code=400", 1.0),
                    ("model=m,status=http_error,status_code=500", 1.0),
                    ("model=m,status=pd-do-prefill-request-error,status_code=500", 4.0),
                ],
            ),
            (
                "gateway_pd_prefill_failure_total",
                &[("class=http_status,stage=before_response", 2.0), ("class=timeout,stage=before_response", 1.0)],
            ),
            ("pd_selected_prefill_pod_total", &[(PREFILL_POD, 5.0)]),
            ("gateway_requests_with_usage_total", &[("has_usage=true,model=m", 1.0)]),
        ],
    );

    // The decode side: its error passes through, it breaks off, the client leaves it; and an answer without usage.
    let decode = &sandbox.decode[0];
    decode.script(on().answer(429, "application/json", r#"{"error":{"message":"slow down"}}"#));
    let refused = Call::post(&path, CHAT, chat(true, 8)).send().await;
    // Read to its end: a client that leaves before counts as gone.
    assert_eq!((refused.status.as_u16(), refused.body().await.complete), (429, true));
    decode.script(on().error_event_after(2));
    let (_, complete) = Call::post(&path, CHAT, chat(true, 8)).send().await.events().collect().await;
    assert!(!complete, "nothing after an error looks like a good end");
    decode.script(on().cut_after(3, tandem_sim::Cut::Reset));
    assert!(!Call::post(&path, CHAT, chat(true, 8)).send().await.events().collect().await.1);
    decode.script(on().stall_after(2));
    let mut left = Call::post(&path, CHAT, chat(true, 8)).send().await.events();
    left.next().await.expect("an event");
    left.abandon();
    let plain = chat(true, 8).replace(r#""include_usage":true"#, r#""include_usage":false"#);
    assert!(Call::post(&path, CHAT, plain).send().await.events().collect().await.1);
    let metrics = ended(10).await;
    check(
        &metrics,
        &[
            (
                FAIL,
                &[
                    ("model=m,pod_name=gateway-0,status=client_cancelled_eof,status_code=499", 2.0),
                    ("model=m,pod_name=gateway-0,status=engine_error_event,status_code=200", 1.0),
                    ("model=m,pod_name=gateway-0,status=gateway_rsp_body_fail,status_code=200", 1.0),
                    ("model=m,pod_name=gateway-0,status=gateway_rsp_headers_fail,status_code=429", 1.0),
                    ("model=m,pod_name=gateway-0,status=pd_prefill_failure,status_code=503", 2.0),
                    ("model=m,pod_name=gateway-0,status=pd_prefill_rejected,status_code=400", 1.0),
                ],
            ),
            ("gateway_requests_with_usage_total", &[("has_usage=false,model=m", 1.0), ("has_usage=true,model=m", 1.0)]),
            (
                "gateway_request_model_success_total",
                &[("model=m,pod_name=gateway-0,status=gateway_request_success,status_code=200", 2.0)],
            ),
        ],
    );
    sandbox.close().await;
}

/// Lower borders of the duration buckets, milliseconds.
const BORDERS: [u64; 13] = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];

/// The one bucket that a metric counted in: its lower and upper border.
fn bucket(metrics: &Metrics, name: &str) -> (Duration, Duration) {
    let name = format!("gateway_{name}_bucket_total");
    let samples: Vec<_> = metrics.matching(&name, &[]).collect();
    assert_eq!((samples.len(), samples[0].value), (1, 1.0), "{name}: {samples:?}");
    let label = samples[0].labels["bucket"].trim_end_matches("ms").trim_end_matches("ms+");
    let lower: u64 = label.split('-').next().unwrap().parse().expect("a border");
    let place = BORDERS.iter().position(|border| *border == lower).expect("a border of the table");
    let upper = BORDERS.get(place + 1).copied().unwrap_or(u64::MAX);
    (Duration::from_millis(lower), Duration::from_millis(upper))
}

#[tokio::test(flavor = "multi_thread")]
async fn r19_the_first_chunk_decides_the_time_to_the_first_token() {
    const FIRST: Duration = Duration::from_millis(200);
    const STEP: Duration = Duration::from_millis(20);
    const TOKENS: u32 = 21;
    let engine = |config: tandem_sim::EngineConfig| match config.role {
        Role::Decode => config.timing(Timing { decode_base: STEP, ..Timing::instant() }),
        _ => config,
    };
    let fleet = front(&[("TANDEM_METRIC_LABELS", "lean")]);
    let sandbox = Sandbox::start(SandboxOptions { engine, fleet, ..SandboxOptions::default() }).await;
    let (tandem, path) = (&sandbox.fleet.tandems[0], sandbox.paths().remove(0));
    sandbox.decode[0].script(Fault::on("/v1/").head_delay(FIRST));
    let sent = Instant::now();
    let mut events = Call::post(&path, CHAT, chat(true, TOKENS)).send().await.events();
    events.next().await.expect("the first event");
    let first = sent.elapsed();
    assert!(events.collect().await.1);
    let total = sent.elapsed();
    let done = |metrics: &Metrics| metrics.has("gateway_request_model_success_total");
    let metrics = tandem.wait_metrics(SOON, "it is counted", done).await;
    let (rest, other) = (total.saturating_sub(FIRST), first.saturating_sub(FIRST));
    // Bounds that hold on any machine: the engine's own delays from below, what the client saw from above.
    let within = |name: &str, least: Duration, most: Duration| {
        let (lower, upper) = bucket(&metrics, name);
        assert!(lower <= most && upper > least, "{name} in {lower:?}..{upper:?}, but it took {least:?} to {most:?}");
        (lower, upper)
    };
    let ttft = within("ttft", FIRST, first);
    within("kv_transfer_time", FIRST, first);
    let decode = within("decode_time", STEP * (TOKENS - 2), rest);
    within("tpot", STEP * (TOKENS - 2) / TOKENS, rest / TOKENS);
    within("prefill_time", Duration::ZERO, other);
    within("routing_time", Duration::ZERO, other);
    // Whole requests have coarser buckets: 400 ms of tokens after 200 ms are beyond the first three.
    let totals = all(&metrics, "gateway_total_time_bucket_total");
    assert_eq!(totals.len(), 1);
    assert!(
        !["0-100ms", "100-250ms", "250-500ms"]
            .iter()
            .any(|low| totals.keys().any(|key| key.contains(&format!("={low},"))))
    );
    // On a machine that keeps up, these are the buckets that the report names.
    if first < Duration::from_millis(450) {
        assert_eq!(ttft, (Duration::from_millis(200), Duration::from_millis(500)));
    }
    assert!(decode.1 >= Duration::from_millis(500), "the decode time is the time of the tokens");
    assert_eq!(metrics.sum("gateway_output_tokens_total", &[]), f64::from(TOKENS));
    let idle = |engine: &Engine| engine.stats().live_requests == 0;
    crate::harness::within("the engine is done", sandbox.decode[0].wait_until(idle)).await;
    sandbox.close().await;
}
