//! The exact tree of spans for each kind of request, over both protocols.

use tandem_sim::Fault;

use super::{
    ANSWER, BODY, CHAT, CLIENT, DECODE, ERROR, HEAD, INFERENCE, INTERNAL, OK, OTHERS, PARENT, PREFILL, Protocol,
    SELECT, SERVER, STREAMED, TRACE, UNSET, assert_attributes, assert_shape, chat, exporting, received, rendered,
    traceparent, tree,
};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;
use crate::harness::otlp::Collector;
use crate::harness::within;

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
    assert_shape(&tree, PARENT, &[&STREAMED[..], &[PREFILL, DECODE]].concat());
    for (name, span) in &tree {
        let (kind, status) = match name.as_str() {
            "tandem.request" => (SERVER, OK),
            PREFILL | DECODE => (CLIENT, UNSET),
            _ => (INTERNAL, UNSET),
        };
        assert_eq!((span.kind, span.status), (kind, status), "{span:?}");
        assert!(span.start <= span.end && span.links.is_empty(), "{span:?}");
    }
    steps_in_order(&tree);
    let statuses = [SELECT, "tandem.prefill", "tandem.decode", "tandem.request"].map(|name| tree[name].status);
    assert_eq!(statuses, [UNSET, UNSET, UNSET, OK]);
    let legs = [("tandem.prefill", &sandbox.prefill[0], "p0"), ("tandem.decode", &sandbox.decode[0], "d0")];
    for (name, engine, pod) in legs {
        let record = only(engine);
        let span = &tree[name];
        assert_eq!(received(&record), (TRACE.to_owned(), span.span_id.clone(), "01".to_owned()), "{name}");
        assert_eq!(record.header("tracestate"), Some("vendor=1"));
        let url = format!("http://{}{CHAT}", engine.address());
        let port = engine.address().port().to_string();
        assert!(!span.attributes.contains_key("http.request.resend_count"));
        assert_attributes(
            span,
            &[
                ("k8s.pod.name", pod),
                ("k8s.namespace.name", "default"),
                ("server.address", "127.0.0.1"),
                ("server.port", &port),
                ("url.full", &url),
                ("http.request.method", "POST"),
                ("http.response.status_code", "200"),
                ("gen_ai.operation.name", "chat"),
                ("gen_ai.provider.name", "vllm"),
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
            ("url.path", CHAT),
            ("http.route", CHAT),
            ("http.request.method", "POST"),
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.request.model", "m"),
            ("gen_ai.provider.name", "vllm"),
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
    assert!(!root.attributes.contains_key("error.type") && !root.attributes.contains_key("rpc.system.name"));
    assert_eq!(root.events, ["parsed", "hand_over", "released"]);
    assert_eq!(root.resource["service.instance.id"], "gateway-0");
    assert_eq!(root.resource["k8s.pod.name"], "gateway-0");
    assert_eq!(root.resource["service.version"], env!("CARGO_PKG_VERSION"));
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

/// Each step where it belongs in time.
fn steps_in_order(tree: &std::collections::BTreeMap<String, crate::harness::otlp::Span>) {
    let (start, end) = (|name: &str| tree[name].start, |name: &str| tree[name].end);
    let text = || rendered(&tree.values().cloned().collect::<Vec<_>>());
    assert!(end(HEAD) <= start(BODY) && start(BODY) <= start(SELECT), "{}", text());
    assert!(end(SELECT) <= start(PREFILL) && end(PREFILL) <= start(DECODE), "{}", text());
    assert!(start(DECODE) <= end(BODY), "the body's step ends with the hand-over:\n{}", text());
    assert!(start(DECODE) <= start(INFERENCE) && start(INFERENCE) <= start(ANSWER), "{}", text());
    let root = &tree["tandem.request"];
    let at = |name: &str| root.moments.iter().find(|moment| moment.name == name).map(|moment| moment.at).unwrap();
    assert!(start(SELECT) <= at("parsed") && at("parsed") <= end(SELECT), "{}", text());
    assert!(end(PREFILL) <= at("hand_over") && at("hand_over") <= at("released"), "{}", text());
    let first = tree[DECODE].moments[0].at;
    assert!(first <= tree[super::FIRST].end && tree[super::FIRST].end <= start(OTHERS), "{}", text());
}

async fn combined(collector: &Collector, sandbox: &Sandbox, path: &str) {
    // Several choices cannot be handed from pod to pod.
    let body = chat(false).replace("\"max_tokens\"", "\"n\":2,\"max_tokens\"");
    let answer = Call::post(path, CHAT, body).send().await;
    assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "c0"));
    let trace = answer.header("request-id").to_owned();
    answer.json().await;
    let tree = tree(collector, &trace).await;
    assert_shape(&tree, "", &[HEAD, BODY, SELECT, ANSWER, INFERENCE, DECODE]);
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
        assert_shape(&tree, "", &[HEAD, BODY, SELECT, PREFILL]);
        let status = status.to_string();
        assert_attributes(&tree["tandem.request"], &[("outcome", outcome), ("http.response.status_code", &status)]);
        let statuses = [SELECT, "tandem.prefill", "tandem.request"].map(|name| tree[name].status);
        assert_eq!(statuses, [UNSET, ERROR, ERROR]);
        let said = said.to_string();
        assert_attributes(&tree[PREFILL], &[("http.response.status_code", &said), ("error.type", "http_status")]);
        assert_attributes(&tree["tandem.request"], &[("error.type", outcome)]);
        let record = only(&sandbox.prefill[0]);
        assert_eq!(received(&record).1, tree["tandem.prefill"].span_id, "the failed leg carried its span");
        sandbox.clear();
    }
}

async fn refused(collector: &Collector, path: &str) {
    let answer = Call::post(path, CHAT, "{").send().await;
    assert_eq!(answer.status, 400);
    let spans = tree(collector, answer.header("request-id")).await;
    assert_shape(&spans, "", &[HEAD, BODY, SELECT]);
    // Nothing was selected.
    assert!(spans.values().all(|span| span.status == if span.name == HEAD { UNSET } else { ERROR }), "{spans:?}");
    let answer = Call::post(path, "/v1/nothing", "{}").send().await;
    let spans = tree(collector, answer.header("request-id")).await;
    assert_shape(&spans, "", &[HEAD]);
    assert_attributes(&spans["tandem.request"], &[("outcome", "unknown_request_path")]);
    assert!(!spans["tandem.request"].attributes.contains_key("url.path"), "a client's own words");
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
    assert_shape(&spans, PARENT, &[HEAD, BODY, SELECT, PREFILL]);
    assert_attributes(&spans[PREFILL], &[("error.type", "canceled")]);
    assert!(spans["tandem.request"].events.contains(&"client_gone".to_owned()));
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
    assert_shape(&spans, PARENT, &[&STREAMED[..], &[PREFILL, DECODE]].concat());
    assert_attributes(&spans["tandem.request"], &gone);
    let decode = &spans["tandem.decode"];
    assert_eq!((decode.status, decode.events.as_slice()), (ERROR, &["first_chunk".to_owned()][..]));
    assert_eq!(spans["tandem.prefill"].status, UNSET);
    sandbox.clear();
}
