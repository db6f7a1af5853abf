//! The shipped Envoy file does what it says, shown without the gateway: a scripted processor stands in for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::harness::envoy::{Envoy, EnvoyOptions, FAILOVER_FILE, SHIPPED_FILE, shipped_text, validate};
use crate::harness::http::{Call, RawConnection, base};
use crate::harness::otlp::Collector;
use crate::harness::processor::{Action, Processor, chat, closed_port};
use crate::harness::raw::{RawServer, Step};
use crate::harness::{SOON, eventually};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

async fn envoy_before(processor: &Processor) -> Envoy {
    Envoy::start(&[processor.address()], closed_port()).await
}

/// One error object of the API, with something in it.
fn assert_error(body: &Value, kind: &str) {
    assert_eq!(body["error"]["type"], kind, "{body}");
    assert!(body["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
    assert!(body["error"].get("code").is_some() && body["error"].get("param").is_some(), "{body}");
}

/// Takes out of the configuration what the file with fail-over may say otherwise.
fn common_part(file: &str) -> (Value, Value) {
    let mut config: Value = serde_saphyr::from_str(&shipped_text(file, true)).expect("parse the YAML");
    let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let filter = manager["http_filters"][0]["typed_config"].as_object_mut().expect("ext_proc");
    filter.remove("response_attributes");
    let route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"].as_object_mut().expect("a route");
    assert_eq!(
        (route.remove("retry_policy").is_some(), route.remove("cluster").is_some()),
        (file == FAILOVER_FILE, true)
    );
    let clusters = config["static_resources"]["clusters"].as_array_mut().expect("clusters");
    let pods =
        |cluster: &Value| ["original_destination_cluster", "model_pods"].iter().any(|name| cluster["name"] == *name);
    let at = clusters.iter().position(pods).expect("the cluster of pods");
    let mut pods = clusters.remove(at);
    pods["circuit_breakers"]["thresholds"][0]["max_retries"] = Value::Null;
    let kept =
        ["connect_timeout", "circuit_breakers", "upstream_connection_options", "typed_extension_protocol_options"];
    pods.as_object_mut().expect("a cluster").retain(|key, _| kept.contains(&key.as_str()));
    (config, pods)
}

#[test]
fn the_file_with_failover_differs_only_where_it_says() {
    assert_eq!(common_part(FAILOVER_FILE), common_part(SHIPPED_FILE));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("envoy.yaml");
    std::fs::write(&file, shipped_text(FAILOVER_FILE, false)).unwrap();
    let (accepted, said) = validate(&file);
    assert!(accepted, "{said}");
}

#[test]
fn envoy_accepts_the_file_with_and_without_tracing() {
    let directory = tempfile::tempdir().unwrap();
    for tracing in [false, true] {
        let file = directory.path().join("envoy.yaml");
        std::fs::write(&file, shipped_text(SHIPPED_FILE, tracing)).unwrap();
        let (accepted, output) = validate(&file);
        assert!(accepted, "{output}");
        // A deprecated option is the next release's failure.
        assert!(!output.to_ascii_lowercase().contains("deprecated"), "{output}");
        assert_eq!(output.contains("instantiating a new tracer"), tracing, "{output}");
    }
    let broken = directory.path().join("broken.yaml");
    std::fs::write(&broken, shipped_text(SHIPPED_FILE, false).replace("failure_mode_allow", "failure_mode_alow"))
        .unwrap();
    assert!(!validate(&broken).0, "validation notices a misspelt option");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_cannot_choose_the_pod() {
    let secret = RawServer::answering(OK).await;
    let processor = Processor::start(vec![Action::Pass]).await;
    let envoy = envoy_before(&processor).await;
    let target = secret.address().to_string();
    let names = [
        "target-pod",
        "Target-Pod",
        "target-pod-ip",
        "prefill-target-pod",
        "x-gateway-destination-endpoint",
        "x-envoy-original-dst-host",
        "x-data-parallel-rank",
    ];
    for name in names {
        let call = chat(envoy.address()).header("routing-strategy", "pd").header(name, &target).header(name, "again");
        let answer = call.send().await;
        assert_eq!(answer.status, 404, "{name}");
        assert_eq!(answer.header("content-type"), "application/json");
        assert_error(&answer.json().await, "invalid_request_error");
    }
    // On the one route without the processor, too.
    let models = Call::get(&envoy.base(), "/v1/models").header("target-pod", &target).send().await;
    assert_eq!(models.status, 503);
    assert!(secret.connections().is_empty());
    for seen in processor.seen() {
        let leaked = seen.headers.iter().find(|(key, _)| names.iter().any(|name| key.eq_ignore_ascii_case(name)));
        assert_eq!(leaked, None);
        assert!(seen.headers.iter().any(|(key, value)| key == "routing-strategy" && value == "pd"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r07_bodies_of_every_size_arrive_unchanged() {
    const KIB: usize = 1024;
    let engine = RawServer::answering(OK).await;
    let processor = Processor::start(vec![Action::Route(engine.address())]).await;
    let envoy = envoy_before(&processor).await;
    for (index, size) in [1, 31 * KIB, 33 * KIB, 1100 * KIB, 4200 * KIB, 20 * 1024 * KIB].into_iter().enumerate() {
        let body: Vec<u8> = (0..size).map(|at| b'a' + u8::try_from(at % 23).unwrap()).collect();
        let answer = Call::post(&envoy.base(), "/v1/completions", body.clone()).send().await;
        assert_eq!(answer.status, 200, "{size} bytes");
        let connection = engine.wait_for(index, |connection| connection.done).await;
        assert!(connection.body() == body, "{size} bytes changed on their way");
        assert!(processor.seen()[index].body == body, "{size} bytes changed before the processor");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r07_a_body_over_the_limit_gets_one_json_error() {
    const GATEWAY_LIMIT: usize = 64 << 20;
    let processor = Processor::start(vec![Action::Answer(413, r#"{"error":"the gateway's own"}"#)]).await;
    let envoy = envoy_before(&processor).await;
    // Just above the gateway's limit, the gateway answers.
    let over = Call::post(&envoy.base(), "/v1/completions", Bytes::from(vec![b'x'; GATEWAY_LIMIT + 1])).send().await;
    assert_eq!(over.status, 413);
    assert_eq!(over.json().await["error"], "the gateway's own");
    // Far above it, Envoy does, in the same shape.
    let far = Call::post(&envoy.base(), "/v1/completions", Bytes::from(vec![b'x'; GATEWAY_LIMIT + (4 << 20)]));
    let far = far.send().await;
    assert_eq!(far.status, 413);
    assert_eq!(far.header("content-type"), "application/json");
    assert_error(&far.json().await, "invalid_request_error");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_gone_or_breaks_off_is_a_json_503() {
    let breaks = RawServer::start(vec![vec![Step::ReadRequest, Step::Reset]]).await;
    let actions = vec![Action::Route(closed_port()), Action::Route(breaks.address())];
    let processor = Processor::start(actions).await;
    let envoy = envoy_before(&processor).await;
    for _ in 0..2 {
        let answer = chat(envoy.address()).send().await;
        assert_eq!(answer.status, 503);
        assert_eq!(answer.header("content-type"), "application/json");
        assert_error(&answer.json().await, "overloaded_error");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_the_processor_and_of_engines_pass_unchanged() {
    let text = r#"{"error":{"message":"mine"}}"#;
    let head = format!("HTTP/1.1 503 Busy\r\ncontent-type: text/x-odd\r\ncontent-length: {}\r\n\r\n", text.len());
    let engine = RawServer::answering(head + text).await;
    let processor = Processor::start(vec![Action::Answer(503, text), Action::Route(engine.address())]).await;
    let envoy = envoy_before(&processor).await;
    for content_type in ["application/json", "text/x-odd"] {
        let answer = chat(envoy.address()).send().await;
        assert_eq!(answer.status, 503);
        assert_eq!(answer.header("content-type"), content_type);
        assert_eq!(answer.body().await.bytes, text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r86_envoy_never_sends_a_request_twice() {
    let busy = "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n";
    let engine = RawServer::answering(busy).await;
    let breaks = RawServer::start(vec![vec![Step::ReadRequest, Step::Reset]]).await;
    let processor = Processor::start(vec![Action::Route(engine.address()), Action::Route(breaks.address())]).await;
    let envoy = envoy_before(&processor).await;
    for _ in 0..2 {
        let call = chat(envoy.address())
            .header("x-envoy-retry-on", "5xx,reset,connect-failure")
            .header("x-envoy-max-retries", "3")
            .header("x-envoy-upstream-rq-timeout-ms", "1");
        assert_eq!(call.send().await.status, 503);
    }
    assert_eq!((engine.connections().len(), breaks.connections().len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn r81_a_silent_processor_is_given_up_unless_it_asked_for_time() {
    let engine = RawServer::answering(OK).await;
    let patient = Processor::start(vec![Action::RouteLate {
        pod: engine.address(),
        more: Duration::from_secs(30),
        wait: Duration::from_secs(6),
    }])
    .await;
    let silent = Processor::start(vec![Action::Hang]).await;
    let (before_patient, before_silent) = tokio::join!(envoy_before(&patient), envoy_before(&silent));
    let late = async {
        let started = Instant::now();
        assert_eq!(chat(before_patient.address()).send().await.status, 200);
        assert!(started.elapsed() >= Duration::from_secs(6), "waited past the shipped message timeout");
    };
    let given_up = async {
        let answer = chat(before_silent.address()).send().await;
        assert_eq!(answer.status, 504);
        assert_error(&answer.json().await, "overloaded_error");
    };
    tokio::join!(late, given_up);
}

#[tokio::test(flavor = "multi_thread")]
async fn r81_the_request_timeout_bounds_the_upload_but_not_the_prefill() {
    let engine = RawServer::answering(OK).await;
    let processor = Processor::start(vec![Action::RouteLate {
        pod: engine.address(),
        more: Duration::from_secs(30),
        wait: Duration::from_secs(3),
    }])
    .await;
    // The shipped value would take minutes to show.
    let edit = |config: &mut Value| {
        let filters = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"];
        filters[0]["typed_config"]["request_timeout"] = "1s".into();
    };
    let envoy = Envoy::start_with(EnvoyOptions {
        failover: None,
        tandem_grpc: vec![processor.address()],
        tandem_http: closed_port(),
        healthy: None,
        otel: None,
        edit: Some(edit),
    })
    .await;
    assert_eq!(chat(envoy.address()).send().await.status, 200);

    let mut upload = RawConnection::open(&envoy.base()).await;
    upload.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{").await;
    let answer = String::from_utf8(upload.read_to_end().await).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    // The body is one chunk.
    let body = answer.lines().find(|line| line.starts_with('{')).expect("a JSON object");
    assert_error(&serde_json::from_str(body).unwrap(), "api_error");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_stream_is_seen_as_cut_and_does_not_eject_the_replica() {
    const CUTS: usize = 8;
    let chunk = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
    let engine = RawServer::start(vec![vec![Step::ReadRequest, Step::Send(chunk.into()), Step::AwaitClose]]).await;
    let processor = Processor::start(vec![Action::RouteThenCut(engine.address())]).await;
    let envoy = envoy_before(&processor).await;
    for index in 0..CUTS {
        let answer = chat(envoy.address()).send().await;
        assert_eq!(answer.status, 200);
        assert!(!answer.body().await.complete);
        engine.wait_for(index, |connection| connection.closed_by_peer).await;
    }
    assert_eq!(envoy.stat("cluster.tandem.outlier_detection.ejections_enforced_total").await, Some(0));
    assert_eq!(envoy.healthy_replicas().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_replica_costs_nothing_once_it_is_noticed() {
    let engine = RawServer::answering(OK).await;
    let living = Processor::start(vec![Action::Route(engine.address())]).await;
    let dying = Processor::start(vec![Action::Route(engine.address())]).await;
    let envoy = Envoy::start(&[living.address(), dying.address()], closed_port()).await;
    drop(dying);
    let mut failed = 0;
    for _ in 0..20 {
        let answer = chat(envoy.address()).send().await;
        if answer.status != 200 {
            assert_eq!(answer.status, 503);
            assert_error(&answer.json().await, "overloaded_error");
            failed += 1;
        }
    }
    assert!(failed <= 2, "{failed} of 20 requests failed");
    eventually(SOON, "one replica is left", async || (envoy.healthy_replicas().await == 1).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_no_replica_left_requests_fail_at_once() {
    let options = EnvoyOptions {
        failover: None,
        tandem_grpc: vec![closed_port()],
        tandem_http: closed_port(),
        healthy: Some(0),
        otel: None,
        edit: None,
    };
    let envoy = Envoy::start_with(options).await;
    let started = Instant::now();
    let answer = chat(envoy.address()).send().await;
    assert_eq!(answer.status, 503);
    assert_error(&answer.json().await, "overloaded_error");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_list_comes_from_the_admin_port_without_the_processor() {
    let admin = RawServer::answering(OK).await;
    let processor = Processor::start(vec![Action::Pass]).await;
    let envoy = Envoy::start(&[processor.address()], admin.address()).await;
    for (index, path) in ["/v1/models", "/v1/models/org%2Fname"].into_iter().enumerate() {
        assert_eq!(Call::get(&envoy.base(), path).send().await.status, 200);
        let head = admin.wait_for(index, |connection| connection.done).await.head();
        assert!(head.starts_with(&format!("GET {path} HTTP/1.1")), "{head}");
    }
    assert!(processor.seen().is_empty());
    // Only that path, not everything that starts like it.
    assert_eq!(Call::get(&envoy.base(), "/v1/modelsX").send().await.status, 404);
    assert_eq!(processor.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn r82_the_answer_may_take_longer_than_the_usual_fifteen_seconds() {
    let gate = Arc::new(Semaphore::new(0));
    let script = vec![Step::ReadRequest, Step::Gate(Arc::clone(&gate)), Step::Send(OK.into())];
    let engine = RawServer::start(vec![script]).await;
    let processor = Processor::start(vec![Action::Route(engine.address())]).await;
    let envoy = envoy_before(&processor).await;
    let answer = tokio::spawn(chat(envoy.address()).send());
    engine.wait_for(0, |connection| !connection.body().is_empty()).await;
    // Envoy's default for a route is 15 s. Real time, because the timer is in another process.
    tokio::time::sleep(Duration::from_secs(17)).await;
    gate.add_permits(1);
    assert_eq!(answer.await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_access_log_names_the_pod_and_keeps_secrets_out() {
    let engine = RawServer::answering(OK).await;
    let processor = Processor::start(vec![Action::Route(engine.address())]).await;
    let envoy = envoy_before(&processor).await;
    let call = Call::post(&envoy.base(), "/v1/completions?key=hunter2", r#"{"prompt":"hunter2"}"#)
        .header("authorization", "Bearer hunter2");
    assert_eq!(call.send().await.status, 200);
    let line = eventually(SOON, "an access log line", async || envoy.access_log().first().cloned()).await;
    assert_eq!(line["path"], "/v1/completions");
    assert_eq!(line["status"], 200);
    assert_eq!(line["target_pod"], engine.address().to_string());
    assert!(!envoy.process().stdout().contains("hunter2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn r88_with_tracing_on_the_processor_gets_the_span_in_its_metadata() {
    let collector = Collector::start().await;
    let engine = RawServer::answering(OK).await;
    let processor = Processor::start(vec![Action::Route(engine.address())]).await;
    let envoy = Envoy::start_with(EnvoyOptions {
        failover: None,
        tandem_grpc: vec![processor.address()],
        tandem_http: closed_port(),
        healthy: None,
        otel: Some(collector.grpc()),
        edit: None,
    })
    .await;
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let parent = format!("00-{trace}-b7ad6b7169203331-01");
    assert_eq!(
        Call::post(&base(envoy.address()), "/v1/completions", "{}").header("traceparent", &parent).send().await.status,
        200
    );
    let metadata = processor.seen()[0].traceparent.clone().expect("traceparent in the metadata");
    let connection = engine.wait_for(0, |connection| connection.done).await;
    let forwarded = connection.header("traceparent").expect("traceparent at the engine");
    for context in [&metadata, &forwarded] {
        assert_eq!(context.split('-').nth(1), Some(trace), "{context}");
        assert_ne!(*context, parent);
    }
    let parents = collector
        .wait_for("the spans of Envoy", |spans| {
            let ours: Vec<_> = spans.iter().filter(|span| span.trace_id == trace).cloned().collect();
            (ours.len() >= 2).then_some(ours)
        })
        .await;
    assert!(parents.iter().any(|span| span.parent_id == "b7ad6b7169203331"), "{parents:?}");
}
