//! The tools of the harness, tried on each other.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tonic::Code;

use crate::harness::engines::Backend;
use crate::harness::ext_proc::{ExtProcClient, Head, Reply};
use crate::harness::http::{Call, RawConnection, base, first_event};
use crate::harness::otlp::Collector;
use crate::harness::pods::{PodManifest, PodsFile};
use crate::harness::process::Start;
use crate::harness::processor::{Action, Processor, closed_port};
use crate::harness::raw::{RawServer, Step, request_end};
use crate::harness::redis::Redis;
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::{SOON, eventually, within_time};

#[tokio::test(flavor = "multi_thread")]
async fn redis_starts_answers_dies_and_comes_back_empty() {
    let redis = Redis::start().await;
    assert_eq!(redis.command(&["SET", "key", "value"]).await, "+OK");
    assert_eq!(redis.command(&["GET", "key"]).await, "value");
    assert_eq!(redis.command(&["INCR", "n"]).await, ":1");
    assert_eq!(redis.url(), format!("redis://{}", redis.address()));
    let address = redis.address();
    redis.process().kill();
    assert!(redis.process().status().is_some());
    let again = Redis::start_on(address).await.expect("the same port");
    assert_eq!(again.command(&["GET", "key"]).await, "$-1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_does_not_start_is_reported_at_once() {
    let options = TandemOptions { args: vec!["--no-such-flag".into()], ..TandemOptions::default() };
    let failure = Tandem::try_start(options).await.expect_err("no such flag");
    assert!(failure.contains("tandem ended with"), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_stopped_and_logged() {
    let mut start = Start::new("shell", "/bin/sh");
    start.args(["-c", "echo out; echo \"err $SECRET$NAME\" >&2; exec sleep 600"]).env("NAME", "x");
    let process = start.spawn();
    eventually(SOON, "output", async || process.stderr().contains('\n').then_some(())).await;
    assert_eq!((process.stdout().as_str(), process.stderr().as_str()), ("out\n", "err x\n"));
    assert!(process.logs().contains("err x"));
    assert!(process.status().is_none());
    process.signal("STOP");
    process.signal("CONT");
    process.signal("TERM");
    assert!(!process.exited(SOON).await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_collector_takes_spans_over_grpc_and_http() {
    use opentelemetry_otlp::{Protocol, WithExportConfig};
    use opentelemetry_sdk::trace::SdkTracerProvider;

    let collector = Collector::start().await;
    let grpc =
        opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(base(collector.grpc())).build().unwrap();
    let http = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(format!("{}/v1/traces", base(collector.http())))
        .build()
        .unwrap();
    let grpc = SdkTracerProvider::builder().with_batch_exporter(grpc).build();
    let http = SdkTracerProvider::builder().with_simple_exporter(http).build();
    send_span(&grpc, "over grpc").await;
    send_span(&http, "over http").await;
    for name in ["over grpc", "over http"] {
        let span = collector.wait_for(name, |spans| spans.iter().find(|span| span.name == name).cloned()).await;
        assert_eq!((span.trace_id.len(), span.span_id.len(), span.parent_id.as_str()), (32, 16, ""));
        assert_eq!(span.attributes["answer"], "42");
    }
    let nonsense = Call::post(&base(collector.http()), "/v1/traces", "nonsense").send().await;
    assert_eq!(nonsense.status, 400);
}

async fn send_span(provider: &opentelemetry_sdk::trace::SdkTracerProvider, name: &'static str) {
    use opentelemetry::KeyValue;
    use opentelemetry::trace::{Span, Tracer, TracerProvider};

    let mut span = provider.tracer("test").start(name);
    span.set_attribute(KeyValue::new("answer", 42));
    span.end();
    let provider = provider.clone();
    tokio::task::spawn_blocking(move || provider.force_flush()).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_scripted_envoy_speaks_ext_proc() {
    let pod = closed_port();
    let actions = vec![Action::Route(pod), Action::Answer(503, r#"{"a":1}"#), Action::Hang, Action::RouteThenCut(pod)];
    let processor = Processor::start(actions).await;
    let client = ExtProcClient::connect(processor.address()).await;

    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let mut stream = client.open(&[("traceparent", trace)]);
    let head = Head::post("/v1/completions").value("X-Mixed-Case", "text").raw("x-odd", b"\xffz");
    stream.request_headers(head, false).await;
    assert!(stream.next().await.mutation().clear_route_cache);
    stream.request_body(b"body", true).await;
    let reply = stream.next().await;
    assert!(matches!(reply, Reply::RequestBody(_)), "{reply:?}");
    let mutation = reply.mutation();
    assert_eq!(mutation.header("target-pod"), Some(pod.to_string()));
    assert_eq!(mutation.body.as_deref(), Some(&b"body"[..]));
    stream.response_headers(Head::status(200), false).await;
    assert!(matches!(stream.next().await, Reply::ResponseHeaders(_)));
    stream.response_body(b"x", true).await;
    assert!(matches!(stream.next().await, Reply::ResponseBody(_)));
    stream.half_close();
    assert!(matches!(stream.next().await, Reply::End(Code::Ok, _)));

    let seen = &processor.seen()[0];
    assert_eq!(seen.traceparent.as_deref(), Some(trace));
    for expected in [("X-Mixed-Case", "text"), ("x-odd", "\u{fffd}z"), (":path", "/v1/completions")] {
        assert!(seen.headers.iter().any(|(key, value)| (key.as_str(), value.as_str()) == expected), "{seen:?}");
    }

    let mut stream = client.open(&[]);
    stream.request_headers(Head::post("/"), true).await;
    let immediate = stream.next().await.immediate();
    assert_eq!((immediate.status, immediate.json()["a"].as_u64()), (503, Some(1)));
    assert_eq!(immediate.header("content-type").as_deref(), Some("application/json"));

    let mut silent = client.open(&[]);
    silent.request_headers(Head::post("/"), true).await;
    eventually(SOON, "the silent request", async || (processor.seen().len() == 3).then_some(())).await;
    assert!(silent.try_next().is_none());
    silent.reset();

    let mut cut = client.open(&[]);
    cut.request_headers(Head::post("/"), true).await;
    cut.next().await.mutation();
    cut.response_body(b"x", false).await;
    assert!(matches!(cut.next().await, Reply::End(Code::Aborted, text) if text == "cut"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_sees_chunks_events_cuts_and_can_leave() {
    let gate = Arc::new(Semaphore::new(0));
    let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let events = "b\r\ndata: one\n\n\r\n14\r\n: note\n\ndata:two\r\n\r\n\r\n";
    let script =
        |last: Vec<Step>| [vec![Step::ReadRequest, Step::Send(format!("{head}{events}").into())], last].concat();
    let server = RawServer::start(vec![
        script(vec![Step::Gate(Arc::clone(&gate)), Step::Send(b"0\r\n\r\n".to_vec())]),
        script(vec![]),
        script(vec![Step::AwaitClose]),
        script(vec![Step::Reset]),
    ])
    .await;
    let call = Call::post(&base(server.address()), "/v1/x", "{}");

    let mut stream = call.clone().send().await.events();
    assert_eq!(stream.next().await.as_deref(), Some("one"));
    assert_eq!(stream.next().await.as_deref(), Some("two"));
    assert_eq!(server.open_requests(), 1);
    gate.add_permits(1);
    assert_eq!(stream.collect().await, (vec![], true));

    let cut = call.clone().send().await.events().collect().await;
    assert_eq!(cut, (vec!["one".to_owned(), "two".to_owned()], false));

    let mut left = call.clone().send().await.events();
    left.next().await.unwrap();
    left.abandon();
    let third = server.wait_for(2, |connection| connection.closed_by_peer && connection.done).await;
    assert!(third.head().starts_with("POST /v1/x HTTP/1.1"), "{}", third.head());
    assert_eq!((third.body(), third.header("content-length").as_deref()), (&b"{}"[..], Some("2")));
    assert_eq!(server.open_requests(), 0);

    assert!(!call.send().await.body().await.complete);
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_bytes_go_and_come() {
    let server = RawServer::start(vec![vec![Step::ReadRequest, Step::Send(b"bye".to_vec())]]).await;
    let mut connection = RawConnection::open(&base(server.address())).await;
    connection.send(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n").await;
    connection.send(b"0\r\n\r\n").await;
    assert_eq!(connection.read_to_end().await, b"bye");
    let mut connection = RawConnection::open(&base(server.address())).await;
    connection.send(b"POST").await;
    connection.reset();
    let second = server.wait_for(1, |connection| connection.closed_by_peer).await;
    assert!(second.received.is_empty() || second.received == b"POST");
    let refused = within_time(Duration::from_secs(5), "refusal", Call::get(&base(closed_port()), "/").try_send()).await;
    assert!(refused.is_err());
}

#[test]
fn requests_and_events_are_found_only_when_complete() {
    let requests: [(&[u8], Option<usize>); 6] = [
        (b"GET / HTTP/1.1\r\n", None),
        (b"GET / HTTP/1.1\r\n\r\n", Some(18)),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\na", None),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nabc", Some(40)),
        (b"P\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n", None),
        (b"P\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", Some(38)),
    ];
    for (bytes, expected) in requests {
        assert_eq!(request_end(bytes), expected, "{:?}", String::from_utf8_lossy(bytes));
    }
    let data = |text: &str| Some(text.to_owned());
    assert_eq!(first_event(b"data: a\n"), None);
    assert_eq!(first_event(b"data: a\ndata:b\n\nrest"), Some((data("a\nb"), 16)));
    assert_eq!(first_event(b": c\r\n\r\n"), Some((None, 7)));
}

#[test]
fn pods_are_written_and_rewritten() {
    let address = "127.0.0.1:8123".parse().unwrap();
    let pod = |name: &str| PodManifest::new(name, "m", address).role("r0", "prefill").engine("vllm");
    let read = |path: &std::path::Path| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    };

    let mut file = PodsFile::file([pod("a"), pod("b")]);
    file.remove("b");
    file.change("a", |pod| pod.ready(false).uid("u2").terminating().annotation("k", "v").ip("").namespace("n"));
    let list = read(&file.path());
    assert_eq!(list["items"].as_array().unwrap().len(), 1);
    let item = &list["items"][0];
    assert_eq!(item["metadata"]["labels"]["model.aibrix.ai/port"], "8123");
    assert_eq!(item["metadata"]["labels"]["role-name"], "prefill");
    assert_eq!((&item["metadata"]["uid"], &item["status"]["podIP"]), (&"u2".into(), &"".into()));
    assert_eq!(item["status"]["conditions"][0]["status"], "False");
    assert!(item["metadata"]["deletionTimestamp"].is_string());

    let mut directory = PodsFile::directory([pod("a"), pod("b")]);
    directory.put([pod("c").config(&serde_json::json!({"defaultProfile": "pd"}))]);
    directory.remove("a");
    let mut names: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["b.json", "c.json"]);
    let config = &read(&directory.path().join("c.json"))["metadata"]["annotations"]["model.aibrix.ai/config"];
    assert_eq!(config, r#"{"defaultProfile":"pd"}"#);
}
