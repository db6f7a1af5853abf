//! From the queue to a collector.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use super::super::export::testing;
use super::super::*;
use super::Captured;
use crate::knobs::{Environment, Knobs, OtelKnobs};

struct Map<'a>(&'a [(&'a str, String)]);

impl Environment for Map<'_> {
    fn get(&self, name: &str) -> Option<String> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
    }
}

fn knobs(pairs: &[(&str, String)]) -> OtelKnobs {
    Knobs::read(&Map(pairs)).unwrap().0.otel
}

fn span(tracer: &Tracer) {
    drop(tracer.begin(TraceParent::default()));
}

const PATIENCE: Duration = Duration::from_secs(20);

/// An exporter that waits until it is let through.
#[derive(Debug)]
struct Gated {
    started: tokio::sync::mpsc::UnboundedSender<usize>,
    gate: Arc<tokio::sync::Semaphore>,
}

impl SpanExporter for Gated {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.started.send(batch.len()).unwrap();
        let _pass = self.gate.acquire().await.unwrap();
        Err(OTelSdkError::InternalFailure("refused".into()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn spans_that_find_the_queue_full_are_counted() {
    let (started, mut batches) = tokio::sync::mpsc::unbounded_channel();
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let knobs = OtelKnobs { queue_size: 8, batch_size: 4, ..knobs(&[]) };
    let tracing = testing::start(&knobs, Gated { started, gate: Arc::clone(&gate) });
    let tracer = tracing.tracer();
    for _ in 0..4 {
        span(&tracer);
    }
    // The first batch is with the exporter and out of the queue.
    assert_eq!(batches.recv().await, Some(4));
    for _ in 0..11 {
        span(&tracer);
    }
    assert_eq!(tracing.dropped_spans(), 3);
    gate.add_permits(100);
    let dropped = tracing.dropped_counter();
    tracing.shutdown(PATIENCE).await.unwrap();
    // Exports that fail lose their spans as well: 3 + 4 + 8.
    assert_eq!(dropped(), 15);
}

#[tokio::test]
async fn shutdown_sends_what_is_queued() {
    let captured = Captured::default();
    let tracing = testing::start(&knobs(&[]), captured.clone());
    for _ in 0..3 {
        span(&tracing.tracer());
    }
    let tracer = tracing.tracer();
    tracing.shutdown(PATIENCE).await.unwrap();
    assert_eq!(captured.named("tandem.request").len(), 3);
    // Late spans do no harm.
    span(&tracer);
}

#[tokio::test]
async fn tracing_is_opt_in() {
    assert!(Tracing::start(&knobs(&[])).unwrap().is_none());
    let secure = knobs(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c:4317".into()),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem".into()),
    ]);
    let error = Tracing::start(&secure).unwrap_err().to_string();
    assert_eq!(error, "TLS towards the OTLP collector: /nowhere/ca.pem cannot be read: entity not found");
    let half = knobs(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c:4317".into()),
        ("OTEL_EXPORTER_OTLP_INSECURE_SKIP_VERIFY", "true".into()),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/some/key.pem".into()),
    ]);
    let error = Tracing::start(&half).unwrap_err().to_string();
    assert!(error.contains("/some/key.pem has no counterpart"), "{error}");
    let bad = knobs(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317".into()),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a b=hunter2".into()),
    ]);
    let error = Tracing::start(&bad).unwrap_err();
    assert!(matches!(error, TracingError::Header(_)) && !error.to_string().contains("hunter2"));
}

#[test]
fn tracing_needs_the_runtime() {
    let knobs = knobs(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317".into())]);
    assert!(matches!(Tracing::start(&knobs), Err(TracingError::NoRuntime)));
}

type Requests = Arc<Mutex<Vec<(http::HeaderMap, Vec<u8>)>>>;

async fn http_sink(tasks: &TaskTracker) -> (SocketAddr, Requests) {
    let requests = Requests::default();
    let sink = Arc::clone(&requests);
    let receive = move |headers: http::HeaderMap, body: Bytes| async move {
        sink.lock().unwrap().push((headers, body.to_vec()));
        ""
    };
    let router = axum::Router::new().route("/v1/traces", axum::routing::post(receive));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tasks.spawn(async move { axum::serve(listener, router).await.unwrap() });
    (address, requests)
}

#[tokio::test]
async fn spans_arrive_over_http() {
    let tasks = TaskTracker::new();
    let (address, requests) = http_sink(&tasks).await;
    let knobs = knobs(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{address}")),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf".into()),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=hunter2".into()),
    ]);
    let tracing = Tracing::start(&knobs).unwrap().unwrap();
    span(&tracing.tracer());
    let dropped = tracing.dropped_counter();
    tracing.shutdown(PATIENCE).await.unwrap();
    let requests = requests.lock().unwrap();
    assert_eq!(requests.len(), 1);
    let (headers, body) = &requests[0];
    assert_eq!(headers["x-key"], "hunter2");
    assert_eq!(headers["content-type"], "application/x-protobuf");
    for text in ["tandem.request", "aibrix-gateway-plugin", "envoy-ext-proc-server"] {
        assert!(body.windows(text.len()).any(|window| window == text.as_bytes()), "{text}");
    }
    assert_eq!(dropped(), 0);
}

type Exports = Vec<(Option<String>, ExportTraceServiceRequest)>;

#[derive(Clone, Default)]
struct GrpcSink(Arc<Mutex<Exports>>);

#[tonic::async_trait]
impl TraceService for GrpcSink {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let key = request.metadata().get("x-key").map(|value| value.to_str().unwrap().to_owned());
        self.0.lock().unwrap().push((key, request.into_inner()));
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tokio::test]
async fn spans_arrive_over_grpc() {
    let tasks = TaskTracker::new();
    let sink = GrpcSink::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(sink.clone()));
    tasks.spawn(server.serve_with_incoming(tonic::transport::server::TcpIncoming::from(listener)));
    let knobs = knobs(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{address}")),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=hunter2".into()),
        ("OTEL_RESOURCE_ATTRIBUTES", "team=serving".into()),
    ]);
    let tracing = Tracing::start(&knobs).unwrap().unwrap();
    span(&tracing.tracer());
    tracing.shutdown(PATIENCE).await.unwrap();
    let exports = sink.0.lock().unwrap();
    assert_eq!(exports.len(), 1);
    let (key, request) = &exports[0];
    assert_eq!(key.as_deref(), Some("hunter2"));
    let resource = request.resource_spans[0].resource.as_ref().unwrap();
    assert!(resource.attributes.iter().any(|pair| pair.key == "team"));
    assert_eq!(request.resource_spans[0].scope_spans[0].spans[0].name, "tandem.request");
}
