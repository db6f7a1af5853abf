//! An OTLP collector for traces, over gRPC and over HTTP with protobuf.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::extract::{DefaultBodyLimit, State};
use axum::response::IntoResponse;
use bytes::Bytes;
use http::StatusCode;
use http_body_util::{BodyExt, Full};
use opentelemetry_proto::tonic::collector::trace::v1 as pb;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span as PbSpan;
use pb::trace_service_server::{TraceService, TraceServiceServer};
use tonic::codegen::Service;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};
use tonic::{Request, Response, Status};

use super::tls::{Authority, SecureListener};
use super::{SOON, Task, eventually};

/// One span, in a form that is easy to compare.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(clippy::struct_field_names, reason = "the names of the protocol")]
pub struct Span {
    /// `service.name` of its resource.
    pub service: String,
    pub name: String,
    /// 32 hex digits.
    pub trace_id: String,
    /// 16 hex digits.
    pub span_id: String,
    /// 16 hex digits, or empty for a root.
    pub parent_id: String,
    pub attributes: BTreeMap<String, String>,
    /// Names of its events.
    pub events: Vec<String>,
    /// The same with what is known of each.
    pub moments: Vec<Moment>,
    /// Trace and span id of each link.
    pub links: Vec<(String, String)>,
    /// 1 internal, 2 server, 3 client.
    pub kind: i32,
    /// Nanoseconds since the Unix epoch.
    pub start: u64,
    pub end: u64,
    /// Name of its instrumentation scope.
    pub scope: String,
    pub resource: Arc<BTreeMap<String, String>>,
    /// Status code: 0 unset, 1 ok, 2 error.
    pub status: i32,
}

/// One event of a span.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moment {
    pub name: String,
    /// Nanoseconds since the Unix epoch.
    pub at: u64,
    pub attributes: BTreeMap<String, String>,
}

type Spans = Arc<Mutex<Vec<Span>>>;

/// The running collector.
#[derive(Debug)]
pub struct Collector {
    grpc: SocketAddr,
    http: SocketAddr,
    spans: Spans,
    _tasks: [Task; 2],
}

#[derive(Clone, Debug)]
struct Sink(Spans);

impl Collector {
    /// Starts both endpoints.
    pub async fn start() -> Collector {
        Collector::start_with(None).await
    }

    /// The same behind TLS, for clients with a certificate of the authority.
    pub async fn secure(authority: &Authority, name: &str) -> Collector {
        Collector::start_with(Some((authority, name))).await
    }

    async fn start_with(tls: Option<(&Authority, &str)>) -> Collector {
        let spans = Spans::default();
        let incoming = TcpIncoming::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("bind");
        let grpc = incoming.local_addr().expect("address");
        let mut server = tonic::transport::Server::builder();
        if let Some((authority, name)) = tls {
            let [cert, key, ca] = [authority.cert(name), authority.key(name), authority.ca()]
                .map(|file| std::fs::read(file).expect("read"));
            let tls = ServerTlsConfig::new().identity(Identity::from_pem(cert, key));
            server = server.tls_config(tls.client_ca_root(Certificate::from_pem(ca))).expect("TLS");
        }
        let server = server.add_service(TraceServiceServer::new(Sink(Arc::clone(&spans))));
        let grpc_task = Task::spawn(async move {
            server.serve_with_incoming(incoming).await.expect("serve OTLP over gRPC");
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let http = listener.local_addr().expect("address");
        let router = axum::Router::new()
            .route("/v1/traces", axum::routing::post(over_http))
            .layer(DefaultBodyLimit::max(64 << 20))
            .with_state(Sink(Arc::clone(&spans)));
        let tls = tls.map(|(authority, name)| authority.server(name));
        let http_task = Task::spawn(async move {
            match tls {
                None => axum::serve(listener, router).await,
                Some(tls) => axum::serve(SecureListener::new(listener, tls), router).await,
            }
            .expect("serve OTLP over HTTP");
        });
        Collector { grpc, http, spans, _tasks: [grpc_task, http_task] }
    }

    /// The gRPC port.
    pub fn grpc(&self) -> SocketAddr {
        self.grpc
    }

    /// The HTTP port.
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// All spans so far.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().expect("spans").clone()
    }

    /// Waits until `find` finds what it wants among the spans.
    pub async fn wait_for<T>(&self, what: &str, find: impl Fn(&[Span]) -> Option<T>) -> T {
        eventually(SOON, what, async || find(&self.spans())).await
    }
}

#[tonic::async_trait]
impl TraceService for Sink {
    async fn export(
        &self,
        request: Request<pb::ExportTraceServiceRequest>,
    ) -> Result<Response<pb::ExportTraceServiceResponse>, Status> {
        let mut spans = self.0.lock().expect("spans");
        for resource in request.into_inner().resource_spans {
            let attributes = Arc::new(texts(&resource.resource.unwrap_or_default().attributes));
            for scope in resource.scope_spans {
                let name = scope.scope.map(|scope| scope.name).unwrap_or_default();
                spans.extend(scope.spans.iter().map(|span| plain(&attributes, &name, span)));
            }
        }
        Ok(Response::new(pb::ExportTraceServiceResponse::default()))
    }
}

/// OTLP/HTTP carries the same message without gRPC's five bytes of framing: add them and use the same service.
async fn over_http(State(sink): State<Sink>, body: Bytes) -> impl IntoResponse {
    let length = u32::try_from(body.len()).expect("body length");
    let framed = [&[0], &length.to_be_bytes()[..], &body].concat();
    let request = http::Request::post("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        .header("content-type", "application/grpc")
        .body(Full::new(Bytes::from(framed)))
        .expect("request");
    let Ok(answer) = TraceServiceServer::new(sink).call(request).await;
    let collected = answer.into_body().collect().await;
    let fine = collected.is_ok_and(|body| !body.to_bytes().is_empty());
    let status = if fine { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    (status, [("content-type", "application/x-protobuf")], Bytes::new())
}

fn plain(resource: &Arc<BTreeMap<String, String>>, scope: &str, span: &PbSpan) -> Span {
    Span {
        service: resource.get("service.name").cloned().unwrap_or_default(),
        name: span.name.clone(),
        trace_id: hex(&span.trace_id),
        span_id: hex(&span.span_id),
        parent_id: hex(&span.parent_span_id),
        attributes: texts(&span.attributes),
        events: span.events.iter().map(|event| event.name.clone()).collect(),
        moments: span
            .events
            .iter()
            .map(|event| Moment {
                name: event.name.clone(),
                at: event.time_unix_nano,
                attributes: texts(&event.attributes),
            })
            .collect(),
        links: span.links.iter().map(|link| (hex(&link.trace_id), hex(&link.span_id))).collect(),
        kind: span.kind,
        start: span.start_time_unix_nano,
        end: span.end_time_unix_nano,
        scope: scope.to_owned(),
        resource: Arc::clone(resource),
        status: span.status.as_ref().map_or(0, |status| status.code),
    }
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |attribute: &KeyValue| {
        let value = attribute.value.as_ref().and_then(|value| value.value.as_ref());
        let value = match value {
            Some(Value::StringValue(text)) => text.clone(),
            Some(Value::IntValue(number)) => number.to_string(),
            Some(Value::DoubleValue(number)) => number.to_string(),
            Some(Value::BoolValue(truth)) => truth.to_string(),
            other => format!("{other:?}"),
        };
        (attribute.key.clone(), value)
    };
    attributes.iter().map(text).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}
