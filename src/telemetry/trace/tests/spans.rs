//! Parents, attributes, ends.

use opentelemetry::trace::{SpanId, SpanKind, Status, TraceId};
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider, SpanData};
use uuid::Uuid;

use super::super::export::tracer_of;
use super::super::logging::subscriber;
use super::super::*;
use super::{Captured, Lines, headers};
use crate::clock::Tick;
use crate::knobs::{LogFormat, LogKnobs};
use crate::response::Usage;
use crate::telemetry::{Outcome, PodLabels, RequestRecord, Timings};

const CLIENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const CLIENT_UNSAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
const ENVOY_SAME_TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-1111111111111111-01";
const ENVOY_SAME_TRACE_UNSAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-1111111111111111-00";
const ENVOY_OTHER_TRACE: &str = "00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-2222222222222222-01";
const PATH: &str = "/v1/completions";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

fn log_knobs() -> LogKnobs {
    LogKnobs { filter: "info".into(), format: LogFormat::Text }
}

/// Runs with a tracer, once with its layer installed and once without, and hands over what was exported.
fn exported(sampler: &Sampler, run: impl Fn(&Tracer)) -> Vec<Captured> {
    [true, false]
        .map(|layered| {
            let captured = Captured::default();
            let provider = SdkTracerProvider::builder()
                .with_simple_exporter(captured.clone())
                .with_sampler(sampler.clone())
                .build();
            let sdk = tracer_of(&provider);
            let layer = layered.then(|| sdk.clone());
            let subscriber = subscriber(&log_knobs(), layer, std::io::sink).unwrap();
            tracing::subscriber::with_default(subscriber, || run(&Tracer::on(sdk)));
            captured
        })
        .into()
}

fn parent_based() -> Sampler {
    Sampler::ParentBased(Box::new(Sampler::AlwaysOn))
}

fn parent(client: &[(&'static str, &str)], metadata: &[(&'static str, &str)]) -> TraceParent {
    TraceParent::extract(&headers(client), &headers(metadata))
}

fn pod(name: &str) -> PodLabels {
    PodLabels { namespace: "ns".into(), pod: name.into(), model: "llama".into(), ..PodLabels::default() }
}

fn record(outcome: Outcome) -> RequestRecord {
    RequestRecord {
        request_id: TRACE.into(),
        client_request_id: None,
        endpoint: "/v1/completions",
        model: Some("llama".into()),
        strategy: Some("pd".into()),
        policies: None,
        decision: None,
        single_reason: None,
        roleset: String::new(),
        prefill_pod: None,
        target_pod: None,
        target_host: "10.0.0.2".to_owned(),
        candidate_pods: 2,
        ready_pods: 4,
        outstanding_at_start: 0,
        handoff: "relayed",
        retry: None,
        stream: true,
        body_bytes: 0,
        answer_bytes: 0,
        status: 200,
        outcome,
        usage: Some(Usage { prompt_tokens: 5, completion_tokens: 7, total_tokens: 12 }),
        ttft_threshold: None,
        timings: Timings {
            received: Tick::from_millis(1000),
            first_chunk: Some(Tick::from_millis(1200)),
            ..Timings::default()
        },
    }
}

fn attribute(span: &SpanData, name: &str) -> Option<String> {
    let mut values = span.attributes.iter().filter(|pair| pair.key.as_str() == name);
    let value = values.next().map(|pair| pair.value.to_string());
    assert!(values.next().is_none(), "{name} twice");
    value
}

/// R88: one trace over all legs; retries are siblings.
#[test]
fn r88_one_trace_with_exact_parents() {
    for captured in exported(&parent_based(), |tracer| {
        let trace = tracer.begin(parent(&[("traceparent", CLIENT), ("tracestate", "a=1,b=2")], &[]));
        assert_eq!(trace.trace_id().unwrap().to_string(), TRACE);
        trace.set_request_id("id-1");
        trace.arrived(&http::Method::POST, true);
        let select = trace.step("process.select_target_pod").unwrap();
        select.succeed();
        trace.prefill(&pod("p-0"), "10.0.0.2:8000", PATH, 0).fail("transport");
        let prefill = trace.prefill(&pod("p-1"), "10.0.0.3:8000", PATH, 1);
        let prefill_header = prefill.headers()["traceparent"].to_str().unwrap().to_owned();
        assert!(prefill_header.starts_with(&format!("00-{TRACE}-")) && prefill_header.ends_with("-01"));
        assert_eq!(prefill.headers()["tracestate"], "a=1,b=2");
        prefill.succeed();
        let mut decode = trace.decode(&pod("d-0"), "10.0.0.1:8000", PATH, 0);
        assert_ne!(decode.headers()["traceparent"].to_str().unwrap(), prefill_header);
        decode.first_chunk();
        decode.usage(Usage { prompt_tokens: 5, completion_tokens: 7, total_tokens: 12 });
        decode.succeed();
        let routed = Some(Tick::from_millis(1002));
        let mut record = record(Outcome::Success);
        (record.candidate_pods, record.ready_pods, record.outstanding_at_start) = (4, 5, 3);
        record.target_host = "10.0.0.1".to_owned();
        record.target_pod = Some(std::sync::Arc::new(pod("d-0")));
        record.timings = Timings { routed, ..record.timings };
        trace.finish(&record);
    }) {
        let root = captured.one("tandem.request");
        assert_eq!(root.parent_span_id, SpanId::from_hex("00f067aa0ba902b7").unwrap());
        assert_eq!(root.span_kind, SpanKind::Server);
        assert_eq!(root.status, Status::Ok);
        let expected = [
            ("request_id", "id-1"),
            ("request_path", "/v1/completions"),
            ("model", "llama"),
            ("gen_ai.request.model", "llama"),
            ("stream", "true"),
            ("routing_strategy", "pd"),
            ("candidate_pods", "4"),
            ("ready_pods", "5"),
            ("target_pod", "d-0"),
            ("target_pod_ip", "10.0.0.1"),
            ("outstanding_requests_at_start", "3"),
            ("routing_time_taken_ms", "2"),
            ("http.request.method", "POST"),
            ("rpc.system.name", "grpc"),
            ("url.path", "/v1/completions"),
            ("gen_ai.operation.name", "text_completion"),
            ("gen_ai.usage.input_tokens", "5"),
            ("completion_tokens", "7"),
            ("total_tokens", "12"),
            ("ttft", "200ms"),
            ("http.response.status_code", "200"),
        ];
        for (name, value) in expected {
            assert_eq!(attribute(&root, name).as_deref(), Some(value), "{name}");
        }
        let spans = captured.spans();
        assert_eq!(spans.len(), 5);
        for span in &spans {
            assert_eq!(span.span_context.trace_id(), TraceId::from_hex(TRACE).unwrap());
            if span.name != "tandem.request" {
                assert_eq!(span.parent_span_id, root.span_context.span_id(), "{}", span.name);
            }
        }
        let prefills = captured.named("tandem.prefill");
        assert_eq!(prefills.len(), 2);
        assert_eq!(prefills[0].status, Status::error("transport"));
        assert_eq!(attribute(&prefills[0], "error.type").as_deref(), Some("transport"));
        assert_eq!(attribute(&prefills[0], "http.request.resend_count"), None);
        assert_eq!(attribute(&prefills[1], "http.request.resend_count").as_deref(), Some("1"));
        assert_eq!(attribute(&prefills[1], "server.port").as_deref(), Some("8000"));
        assert_eq!(prefills[1].status, Status::Unset);
        assert_eq!(prefills[1].span_kind, SpanKind::Client);
        assert_eq!(attribute(&prefills[1], "k8s.pod.name").as_deref(), Some("p-1"));
        let decode = captured.one("tandem.decode");
        assert_eq!(decode.events.events.iter().map(|event| &*event.name).collect::<Vec<_>>(), ["first_chunk"]);
        assert_eq!(attribute(&decode, "gen_ai.usage.output_tokens").as_deref(), Some("7"));
        assert_eq!(captured.one("process.select_target_pod").span_kind, SpanKind::Internal);
    }
}

/// R88: the client's header if sampled, else what Envoy's call brings; Envoy's span if it lies below the client's.
#[test]
fn r88_the_parent_comes_from_either_source() {
    let table = [
        (None, None, None),
        (Some(CLIENT), None, Some(CLIENT)),
        (None, Some(ENVOY_OTHER_TRACE), Some(ENVOY_OTHER_TRACE)),
        (Some(CLIENT), Some(ENVOY_SAME_TRACE), Some(ENVOY_SAME_TRACE)),
        (Some(CLIENT), Some(ENVOY_SAME_TRACE_UNSAMPLED), Some(CLIENT)),
        (Some(CLIENT), Some(ENVOY_OTHER_TRACE), Some(CLIENT)),
        (Some(CLIENT_UNSAMPLED), Some(ENVOY_OTHER_TRACE), Some(ENVOY_OTHER_TRACE)),
        (Some(CLIENT_UNSAMPLED), Some(ENVOY_SAME_TRACE_UNSAMPLED), Some(ENVOY_SAME_TRACE_UNSAMPLED)),
        (Some(CLIENT_UNSAMPLED), None, Some(CLIENT_UNSAMPLED)),
        (Some("garbage"), Some(ENVOY_OTHER_TRACE), Some(ENVOY_OTHER_TRACE)),
        (Some(CLIENT), Some("garbage"), Some(CLIENT)),
        (Some("garbage"), Some("garbage"), None),
    ];
    for (client, envoy, expected) in table {
        let pair = |value: Option<&'static str>| value.map(|value| ("traceparent", value));
        let chosen = TraceParent::extract(&headers(pair(client).as_slice()), &headers(pair(envoy).as_slice()));
        let text = chosen.remote.map(|remote| leg::inject(&remote)["traceparent"].to_str().unwrap().to_owned());
        assert_eq!(text.as_deref(), expected, "{client:?} {envoy:?}");
    }
}

#[test]
fn r88_malformed_trace_context_starts_a_new_trace() {
    let b3 = "80f198ee56343ba864fe8b2a57d3eff7-e457b5a2e4d86bd1-1";
    let table = [
        "",
        "00",
        b3,
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "00-4bf92f3577b34da6a3ce929d0e0e47360-0f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-zz",
    ];
    for text in table {
        assert!(parent(&[("traceparent", text)], &[]).remote.is_none(), "{text}");
    }
    assert!(parent(&[("traceparent", CLIENT), ("traceparent", CLIENT)], &[]).remote.is_none());
    // A later version may have more fields; an unusable tracestate is left out.
    let later = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-future";
    let remote = parent(&[("traceparent", later), ("tracestate", "no pairs")], &[]).remote.unwrap();
    assert_eq!((remote.is_sampled(), remote.trace_state().header().as_str()), (true, ""));
    for captured in exported(&parent_based(), |tracer| {
        tracer.begin(parent(&[("traceparent", b3)], &[])).finish(&record(Outcome::Success));
    }) {
        assert_eq!(captured.one("tandem.request").parent_span_id, SpanId::INVALID);
    }
}

#[test]
fn what_is_not_sampled_is_not_exported_but_keeps_its_trace() {
    for captured in exported(&parent_based(), |tracer| {
        let trace = tracer.begin(parent(&[("traceparent", CLIENT_UNSAMPLED)], &[]));
        assert_eq!(trace.trace_id().unwrap().to_string(), TRACE);
        let leg = trace.prefill(&pod("p"), "a:1", PATH, 0);
        let header = leg.headers()["traceparent"].to_str().unwrap();
        assert!(header.starts_with(&format!("00-{TRACE}-")) && header.ends_with("-00"), "{header}");
        leg.succeed();
        trace.finish(&record(Outcome::Success));
    }) {
        assert!(captured.spans().is_empty());
    }
}

#[test]
fn without_tracing_the_clients_headers_go_on_unchanged() {
    for text in [CLIENT, CLIENT_UNSAMPLED, "whatever it is"] {
        let client = headers(&[("traceparent", text), ("tracestate", "a=1"), ("tracestate", "b=2"), ("x", "y")]);
        let trace = Tracer::off().begin(TraceParent::extract(&client, &headers(&[("traceparent", ENVOY_OTHER_TRACE)])));
        assert_eq!(trace.trace_id(), None);
        for leg in [trace.prefill(&pod("p"), "a:1", PATH, 0), trace.decode(&pod("d"), "b:1", PATH, 0)] {
            assert_eq!(leg.headers()["traceparent"], text);
            assert_eq!(leg.headers().get_all("tracestate").iter().count(), 2);
            assert!(!leg.headers().contains_key("x"));
        }
    }
    let trace = Tracer::off().begin(TraceParent::default());
    assert!(trace.decode(&pod("d"), "b:1", PATH, 0).headers().is_empty());
}

#[test]
fn a_dropped_span_ends_and_says_so() {
    for captured in exported(&parent_based(), |tracer| {
        let trace = tracer.begin(TraceParent::default());
        let leg = trace.prefill(&pod("p"), "a:1", PATH, 0);
        drop(trace);
        drop(leg);
    }) {
        assert_eq!(captured.one("tandem.request").status, Status::error("abandoned"));
        assert_eq!(captured.one("tandem.prefill").status, Status::error("abandoned"));
    }
    for captured in exported(&parent_based(), |tracer| {
        tracer.begin(TraceParent::default()).finish(&record(Outcome::ClientGone));
    }) {
        assert_eq!(captured.one("tandem.request").status, Status::error("client_cancelled_eof"));
    }
}

#[test]
fn warnings_become_events_and_lines_carry_the_request_id() {
    let captured = Captured::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(captured.clone()).build();
    let sdk = tracer_of(&provider);
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = subscriber(&log_knobs(), Some(sdk.clone()), move || writer.clone()).unwrap();
    tracing::subscriber::with_default(subscriber, || {
        let trace = Tracer::on(sdk).begin(TraceParent::default());
        trace.set_request_id("id-7");
        trace.log_span().in_scope(|| {
            tracing::info!(target: "tandem::request", "an ordinary line");
            tracing::error!(target: "tandem::drive", "a leg broke");
            tracing::warn!(target: "tandem::drive", "it goes on");
            tracing::error!(target: "h2::codec", "not ours");
        });
        trace.finish(&record(Outcome::Success));
    });
    let root = captured.one("tandem.request");
    let events: Vec<_> = root.events.events.iter().map(|event| event.name.to_string()).collect();
    assert_eq!(events, ["a leg broke", "it goes on"]);
    // The request went well, whatever was logged on its way.
    assert_eq!(root.status, Status::Ok);
    let text = lines.text();
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.lines().all(|line| line.contains("request_id=\"id-7\"")), "{text}");
}

#[test]
fn the_request_id_has_three_sources() {
    let random = Uuid::from_u128(0x1234_5678_9abc_4def_8123_4567_89ab_cdef);
    let random_text = "12345678-9abc-4def-8123-456789abcdef";
    let span = TraceId::from_hex("0123456789abcdef0123456789abcdef").unwrap();
    let table = [
        (Some(span), Some(CLIENT), "0123456789abcdef0123456789abcdef"),
        (Some(TraceId::INVALID), Some(CLIENT), TRACE),
        (None, Some(CLIENT), TRACE),
        (None, Some("  00-4BF92F3577B34DA6A3CE929D0E0E4736-x-y "), "4BF92F3577B34DA6A3CE929D0E0E4736"),
        (None, Some("00-4bf92f3577b34da6a3ce929d0e0e4736-1"), random_text),
        (None, Some("00-4bf92f3577b34da6a3ce929d0e0e473-1-2"), random_text),
        (None, Some("00-<script>alert(1)</script>xxxxxxxx-1-2"), random_text),
        (None, Some("00-00000000000000000000000000000000-1-2"), random_text),
        (None, Some(""), random_text),
        (None, None, random_text),
    ];
    for (span, header, expected) in table {
        let header = header.map(|text| http::HeaderValue::from_str(text).unwrap());
        assert_eq!(request_id(span, header.as_ref(), random), expected, "{header:?}");
    }
}
