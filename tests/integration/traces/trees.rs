//! The exact tree of spans for each kind of request, over both protocols.

use tandem_sim::Fault;

use super::{CHAT, PARENT, Protocol, TRACE, assert_shape, chat, exporting, received, traceparent, tree};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;
use crate::harness::otlp::{Collector, Span};
use crate::harness::within;

const SELECT: &str = "process.select_target_pod";
/// A leg that ended well says nothing; the root says so, since the log layer would call it failed.
const UNSET: i32 = 0;
const OK: i32 = 1;
const ERROR: i32 = 2;

fn assert_attributes(span: &Span, expected: &[(&str, &str)]) {
    for (name, value) in expected {
        assert_eq!(span.attributes.get(*name).map(String::as_str), Some(*value), "{name} of {span:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r88_the_tree_of_every_kind_of_request() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let collector = Collector::start().await;
        let fleet = exporting(&collector, protocol, &[]);
        let sandbox = Sandbox::start(SandboxOptions { combined: 1, fleet, ..SandboxOptions::default() }).await;
        let path = sandbox.paths().remove(0);
        pair(&collector, &sandbox, &path).await;
        combined(&collector, &sandbox, &path).await;
        failed_prefill(&collector, &sandbox, &path).await;
        refused(&collector, &path).await;
        client_gone(&collector, &sandbox, &path).await;
        let metrics = sandbox.fleet.tandems[0].metrics().await;
        assert_eq!(metrics.sum("tandem_spans_dropped_total", &[]), 0.0);
        sandbox.close().await;
    }
}

async fn pair(collector: &Collector, sandbox: &Sandbox, path: &str) {
    let call = Call::post(path, CHAT, chat(true)).header("traceparent", &traceparent(TRACE, PARENT));
    let answer = call.header("tracestate", "vendor=1").send().await;
    assert_eq!(answer.header("request-id"), TRACE);
    assert!(answer.events().collect().await.1);
    let tree = tree(collector, TRACE).await;
    assert_shape(&tree, PARENT, &[SELECT, "tandem.prefill", "tandem.decode"]);
    let statuses = [SELECT, "tandem.prefill", "tandem.decode", "tandem.request"].map(|name| tree[name].status);
    assert_eq!(statuses, [UNSET, UNSET, UNSET, OK]);
    let legs = [("tandem.prefill", &sandbox.prefill[0], "p0"), ("tandem.decode", &sandbox.decode[0], "d0")];
    for (name, engine, pod) in legs {
        let record = only(engine);
        let span = &tree[name];
        assert_eq!(received(&record), (TRACE.to_owned(), span.span_id.clone(), "01".to_owned()), "{name}");
        assert_eq!(record.header("tracestate"), Some("vendor=1"));
        let address = engine.address().to_string();
        assert_attributes(
            span,
            &[
                ("k8s.pod.name", pod),
                ("k8s.namespace.name", "default"),
                ("server.address", &address),
                ("roleset", "rs0"),
                ("gen_ai.request.model", "m"),
            ],
        );
    }
    let decode = &tree["tandem.decode"];
    assert_eq!(decode.events, ["first_chunk"]);
    assert_attributes(decode, &[("tandem.handoff", "relayed"), ("gen_ai.usage.output_tokens", "8")]);
    assert!(decode.attributes["gen_ai.usage.input_tokens"].parse::<u64>().expect("a number") > 0);
    // The reference gateway's names on its root.
    let root = &tree["tandem.request"];
    assert_attributes(
        root,
        &[
            ("request_id", TRACE),
            ("request_path", CHAT),
            ("model", "m"),
            ("model_name", "m"),
            ("stream", "true"),
            ("routing_strategy", "pd"),
            ("target_pod", "d0"),
            ("target_pod_ip", "127.0.0.1"),
            ("ready_pods", "3"),
            ("outstanding_requests_at_start", "0"),
            ("completion_tokens", "8"),
            ("gen_ai.usage.output_tokens", "8"),
            ("http.response.status_code", "200"),
            ("outcome", "gateway_request_success"),
        ],
    );
    for name in [
        "candidate_pods",
        "routing_time_taken_ms",
        "prompt_tokens",
        "total_tokens",
        "routing_time_taken",
        "ttft",
        "prefill_time_taken",
        "kv_transfer_time_taken",
        "decode_time_taken",
        "total_time_taken",
    ] {
        assert!(root.attributes.contains_key(name), "{name} of {root:?}");
    }
    sandbox.clear();
}

async fn combined(collector: &Collector, sandbox: &Sandbox, path: &str) {
    // Several choices cannot be handed from pod to pod.
    let body = chat(false).replace("\"max_tokens\"", "\"n\":2,\"max_tokens\"");
    let answer = Call::post(path, CHAT, body).send().await;
    assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "c0"));
    let trace = answer.header("request-id").to_owned();
    answer.json().await;
    let tree = tree(collector, &trace).await;
    assert_shape(&tree, "", &[SELECT, "tandem.decode"]);
    let decode = &tree["tandem.decode"];
    assert_eq!(received(&only(&sandbox.combined[0])), (trace, decode.span_id.clone(), "01".to_owned()));
    assert_eq!((decode.status, decode.events.as_slice()), (UNSET, &["first_chunk".to_owned()][..]));
    assert!(!decode.attributes.contains_key("tandem.handoff"));
    sandbox.clear();
}

async fn failed_prefill(collector: &Collector, sandbox: &Sandbox, path: &str) {
    let cases = [(500, 503, "pd_prefill_failure"), (400, 400, "pd_prefill_rejected")];
    for (said, status, outcome) in cases {
        sandbox.prefill[0].script(Fault::on("/v1/").answer(said, "text/plain", "no"));
        let answer = Call::post(path, CHAT, chat(true)).send().await;
        assert_eq!(answer.status, status);
        let tree = tree(collector, answer.header("request-id")).await;
        assert_shape(&tree, "", &[SELECT, "tandem.prefill"]);
        let status = status.to_string();
        assert_attributes(&tree["tandem.request"], &[("outcome", outcome), ("http.response.status_code", &status)]);
        let statuses = [SELECT, "tandem.prefill", "tandem.request"].map(|name| tree[name].status);
        assert_eq!(statuses, [UNSET, ERROR, ERROR]);
        let record = only(&sandbox.prefill[0]);
        assert_eq!(received(&record).1, tree["tandem.prefill"].span_id, "the failed leg carried its span");
        sandbox.clear();
    }
}

async fn refused(collector: &Collector, path: &str) {
    let answer = Call::post(path, CHAT, "{").send().await;
    assert_eq!(answer.status, 400);
    let spans = tree(collector, answer.header("request-id")).await;
    // Whether the selection began depends on when the body ended; nothing was selected.
    assert!(spans.keys().all(|name| ["tandem.request", SELECT].contains(&name.as_str())), "{spans:?}");
    assert!(spans.values().all(|span| span.status == ERROR));
    let answer = Call::post(path, "/v1/nothing", "{}").send().await;
    let spans = tree(collector, answer.header("request-id")).await;
    assert_shape(&spans, "", &[]);
    assert_attributes(&spans["tandem.request"], &[("outcome", "unknown_request_path")]);
}

async fn client_gone(collector: &Collector, sandbox: &Sandbox, path: &str) {
    let trace = |number: u8| format!("{number:032x}");
    // During the prefill leg.
    let hold = sandbox.prefill[0].hold();
    let call = Call::post(path, CHAT, chat(true)).header("traceparent", &traceparent(&trace(1), PARENT));
    let leaving = tokio::spawn(call.try_send());
    within("the leg", hold.wait_for(1)).await;
    leaving.abort();
    let spans = tree(collector, &trace(1)).await;
    hold.release();
    assert_shape(&spans, PARENT, &[SELECT, "tandem.prefill"]);
    let gone = [("outcome", "client_cancelled_eof"), ("http.response.status_code", "499")];
    assert_attributes(&spans["tandem.request"], &gone);
    assert_eq!((spans["tandem.prefill"].status, spans["tandem.request"].status), (ERROR, ERROR));
    // In the middle of the answer: what was seen of it is there.
    sandbox.decode[0].script(Fault::on("/v1/").stall_after(2));
    let call = Call::post(path, CHAT, chat(true)).header("traceparent", &traceparent(&trace(2), PARENT));
    let mut events = call.send().await.events();
    events.next().await.expect("an event");
    events.abandon();
    let spans = tree(collector, &trace(2)).await;
    assert_shape(&spans, PARENT, &[SELECT, "tandem.prefill", "tandem.decode"]);
    assert_attributes(&spans["tandem.request"], &gone);
    let decode = &spans["tandem.decode"];
    assert_eq!((decode.status, decode.events.as_slice()), (ERROR, &["first_chunk".to_owned()][..]));
    assert_eq!(spans["tandem.prefill"].status, UNSET);
    sandbox.clear();
}
