//! R88: whose child a request is, with every kind of trace context that a client or Envoy may bring.

use std::collections::BTreeSet;

use super::{CHAT, PARENT, Protocol, TRACE, chat, exporting, received, traceparent, tree};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::ext_proc::{ExtProcClient, Head, Reply};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::Call;
use crate::harness::otlp::Collector;

/// The span of Envoy, which it puts into the metadata of the ext_proc call.
const ENVOY: &str = "00f067aa0ba902b7";

#[tokio::test(flavor = "multi_thread")]
async fn r88_what_clients_bring() {
    let collector = Collector::start().await;
    let fleet = exporting(&collector, Protocol::Grpc, &[]);
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let path = sandbox.paths().remove(0);
    let b3 = format!("{TRACE}-{PARENT}-1");
    // Headers, and whether they name a parent.
    let cases: [(&[(&str, &str)], bool); 9] = [
        (&[("traceparent", &traceparent(TRACE, PARENT))], true),
        (&[("traceparent", &traceparent(TRACE, PARENT)), ("b3", &b3)], true),
        (&[], false),
        (&[("b3", &b3), ("x-b3-traceid", TRACE), ("x-b3-spanid", PARENT), ("x-b3-sampled", "1")], false),
        (&[("traceparent", "nonsense")], false),
        (&[("traceparent", "")], false),
        (&[("traceparent", &traceparent(&"0".repeat(32), PARENT))], false),
        (&[("traceparent", &traceparent(TRACE, &"0".repeat(16)))], false),
        (&[("traceparent", &traceparent(TRACE, PARENT)), ("traceparent", &traceparent(TRACE, PARENT))], false),
    ];
    let mut traces = BTreeSet::new();
    for (headers, has_parent) in cases {
        sandbox.clear();
        let call = Call::post(&path, CHAT, chat(true));
        let answer = headers.iter().fold(call, |call, (name, value)| call.header(name, value)).send().await;
        assert_eq!(answer.status, 200, "{headers:?}");
        let request_id = answer.header("request-id").to_owned();
        assert!(answer.events().collect().await.1);
        let (prefill, decode) = (received(&only(&sandbox.prefill[0])), received(&only(&sandbox.decode[0])));
        let trace = prefill.0.clone();
        assert_eq!((&decode.0, &request_id), (&trace, &trace), "one trace over both legs: {headers:?}");
        assert_eq!(trace == TRACE, has_parent, "{headers:?}");
        if trace == TRACE {
            continue;
        }
        assert!(traces.insert(trace.clone()), "a trace of its own: {headers:?}");
        let spans = tree(&collector, &trace).await;
        assert_eq!(spans["tandem.request"].parent_id, "", "{headers:?}");
        assert_eq!(
            (prefill.1, decode.1),
            (spans["tandem.prefill"].span_id.clone(), spans["tandem.decode"].span_id.clone())
        );
    }
    let of_client = |spans: &[crate::harness::otlp::Span]| {
        let roots = spans.iter().filter(|span| span.trace_id == TRACE && span.parent_id == PARENT).count();
        (roots == 2).then_some(())
    };
    collector.wait_for("both requests of the client's trace", of_client).await;

    // A caller that does not record is followed: its trace goes on without spans of ours.
    sandbox.clear();
    let quiet = "ffffffffffffffffffffffffffffffff";
    let call = Call::post(&path, CHAT, chat(true)).header("traceparent", &format!("00-{quiet}-{PARENT}-00"));
    assert!(call.send().await.events().collect().await.1);
    for engine in [&sandbox.prefill[0], &sandbox.decode[0]] {
        let (trace, span, flags) = received(&only(engine));
        assert_eq!((trace.as_str(), flags.as_str()), (quiet, "00"));
        assert_ne!(span, "0".repeat(16));
    }
    // The next sampled request comes after it through the same queue.
    let answer = Call::post(&path, CHAT, chat(true)).send().await;
    let next = answer.header("request-id").to_owned();
    assert!(answer.events().collect().await.1);
    tree(&collector, &next).await;
    assert!(collector.spans().iter().all(|span| span.trace_id != quiet));
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r88_envoys_span_comes_in_the_metadata_of_the_call() {
    let collector = Collector::start().await;
    let fleet = FleetOptions { front: false, ..exporting(&collector, Protocol::Grpc, &[]) };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let client = ExtProcClient::connect(sandbox.fleet.tandems[0].grpc()).await;
    let trace = |number: u8| format!("{number:032x}");
    let unsampled = |trace: &str| format!("00-{trace}-{PARENT}-00");
    // The client's context, Envoy's, and the trace and parent that the request then has.
    let cases: [(Option<String>, Option<String>, String, &str); 4] = [
        (None, Some(traceparent(&trace(1), ENVOY)), trace(1), ENVOY),
        // Of one trace: Envoy's span lies between the client's and ours.
        (Some(traceparent(&trace(2), PARENT)), Some(traceparent(&trace(2), ENVOY)), trace(2), ENVOY),
        // Of two: the client's wins if it is sampled.
        (Some(traceparent(&trace(3), PARENT)), Some(traceparent(&trace(4), ENVOY)), trace(3), PARENT),
        (Some(unsampled(&trace(5))), Some(traceparent(&trace(6), ENVOY)), trace(6), ENVOY),
    ];
    for (of_client, of_envoy, trace, parent) in cases {
        sandbox.clear();
        let metadata: Vec<(&'static str, &str)> =
            of_envoy.iter().map(|value| ("traceparent", value.as_str())).collect();
        let mut stream = client.open(&metadata);
        let head = of_client.iter().fold(Head::post(CHAT), |head, value| head.raw("Traceparent", value.as_bytes()));
        stream.request_headers(head.raw("content-type", b"application/json"), false).await;
        stream.next().await.mutation();
        stream.request_body(chat(true).as_bytes(), true).await;
        let Reply::MoreTime(_) = stream.next().await else { panic!("a prefill leg") };
        let reply = stream.next().await.mutation();
        stream.response_headers(Head::status(200).raw("content-type", b"application/json"), false).await;
        let marks = stream.next().await.mutation();
        assert_eq!(marks.header("request-id").as_ref(), Some(&trace), "{of_client:?} {of_envoy:?}");
        stream.response_body(b"{}", true).await;
        stream.next().await.mutation();
        let spans = tree(&collector, &trace).await;
        assert_eq!(spans["tandem.request"].parent_id, parent, "{of_client:?} {of_envoy:?}");
        // Envoy sends the decode leg: it is told which span that is.
        let told = reply.header("traceparent").expect("a traceparent for the decode leg");
        assert_eq!(told, traceparent(&trace, &spans["tandem.decode"].span_id));
        assert_eq!(received(&only(&sandbox.prefill[0])).1, spans["tandem.prefill"].span_id);
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r88_without_tracing_the_clients_context_goes_through() {
    let fleet = FleetOptions { replicas: 1, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    for path in sandbox.paths() {
        sandbox.clear();
        let call = Call::post(&path, CHAT, chat(true)).header("traceparent", &traceparent(TRACE, PARENT));
        let answer = call.header("tracestate", "vendor=1").header("b3", "0").send().await;
        assert_eq!(answer.header("request-id"), TRACE);
        assert!(answer.events().collect().await.1);
        let ids: BTreeSet<_> = [&sandbox.prefill[0], &sandbox.decode[0]]
            .map(|engine| {
                let record = only(engine);
                assert_eq!(received(&record), (TRACE.to_owned(), PARENT.to_owned(), "01".to_owned()));
                assert_eq!((record.header("tracestate"), record.header("b3")), (Some("vendor=1"), Some("0")));
                record.header("x-request-id").expect("an id").to_owned()
            })
            .into();
        // Other requests may share the trace; the engines' id is this request's alone.
        assert_eq!(ids.len(), 1);
        assert!(ids.first().is_some_and(|id| id.starts_with(TRACE) && id.len() > TRACE.len()));
    }
    sandbox.close().await;
}

/// Without the propagator, callers' context is left alone, and the engines get it as it came.
#[tokio::test(flavor = "multi_thread")]
async fn r88_propagation_can_be_switched_off() {
    let collector = Collector::start().await;
    let fleet = exporting(&collector, Protocol::Http, &[("OTEL_PROPAGATORS", "none")]);
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let path = sandbox.paths().remove(0);
    let call = Call::post(&path, CHAT, chat(true)).header("traceparent", &traceparent(TRACE, PARENT));
    let answer = call.send().await;
    let trace = answer.header("request-id").to_owned();
    assert!(answer.events().collect().await.1);
    assert_ne!(trace, TRACE);
    assert_eq!(tree(&collector, &trace).await["tandem.request"].parent_id, "");
    for engine in [&sandbox.prefill[0], &sandbox.decode[0]] {
        assert_eq!(received(&only(engine)), (TRACE.to_owned(), PARENT.to_owned(), "01".to_owned()));
    }
    sandbox.close().await;
}
