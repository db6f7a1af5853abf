//! A scripted ext_proc server: the other side of Envoy in tests of the Envoy file alone.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::service::ext_proc::v3 as pb;
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use envoy_types::pb::google::protobuf::Duration as PbDuration;
use futures_util::Stream;
use pb::external_processor_server::{ExternalProcessor, ExternalProcessorServer};
use pb::processing_request::Request as Message;
use pb::processing_response::Response as Reply;
use tokio::sync::mpsc;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::Task;
use super::http::{Call, base};

/// The gRPC health service under which Envoy checks a replica.
pub const HEALTH_SERVICE: &str = "gateway-plugin";

/// What to do with a request once its body is there.
#[derive(Clone, Debug)]
pub enum Action {
    /// Let Envoy send it to this pod.
    Route(SocketAddr),
    /// Ask for `more` time, then route after `wait`.
    RouteLate { pod: SocketAddr, more: Duration, wait: Duration },
    /// Route, and cut the answer after its first chunk.
    RouteThenCut(SocketAddr),
    /// Answer at once.
    Answer(u32, &'static str),
    /// Let it pass without a target.
    Pass,
    /// Say nothing.
    Hang,
}

/// What arrived with one request.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Request headers as Envoy sent them.
    pub headers: Vec<(String, String)>,
    /// The request body.
    pub body: Vec<u8>,
    /// `traceparent` of the gRPC metadata.
    pub traceparent: Option<String>,
}

/// The running server.
#[derive(Debug)]
pub struct Processor {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    _task: Task,
}

#[derive(Debug)]
struct Service {
    actions: Arc<Mutex<VecDeque<Action>>>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Processor {
    /// Starts it; request `n` gets action `n`, further requests the last one.
    pub async fn start(actions: Vec<Action>) -> Processor {
        let incoming = TcpIncoming::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("bind").with_nodelay(Some(true));
        let address = incoming.local_addr().expect("address");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let service = Service { actions: Arc::new(Mutex::new(actions.into())), seen: Arc::clone(&seen) };
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_service_status(HEALTH_SERVICE, tonic_health::ServingStatus::Serving).await;
        let service = ExternalProcessorServer::new(service)
            .max_decoding_message_size(128 << 20)
            .max_encoding_message_size(128 << 20);
        let server = tonic::transport::Server::builder().add_service(health).add_service(service);
        let task = Task::spawn(async move {
            server.serve_with_incoming(incoming).await.expect("serve ext_proc");
        });
        Processor { address, seen, _task: task }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The requests so far, in the order of their heads.
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("seen").clone()
    }
}

#[tonic::async_trait]
impl ExternalProcessor for Service {
    type ProcessStream = Pin<Box<dyn Stream<Item = Result<pb::ProcessingResponse, Status>> + Send>>;

    async fn process(
        &self,
        request: Request<Streaming<pb::ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let traceparent = request.metadata().get("traceparent").and_then(|v| v.to_str().ok()).map(str::to_owned);
        let action = {
            let mut actions = self.actions.lock().expect("actions");
            if actions.len() > 1 { actions.pop_front() } else { actions.front().cloned() }.expect("an action")
        };
        let index = {
            let mut seen = self.seen.lock().expect("seen");
            seen.push(Seen { traceparent, ..Seen::default() });
            seen.len() - 1
        };
        let (replies, receiver) = mpsc::channel(4);
        let exchange = Exchange { action, index, seen: Arc::clone(&self.seen), replies };
        tokio::spawn(exchange.run(request.into_inner()));
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(receiver))))
    }
}

struct Exchange {
    action: Action,
    index: usize,
    seen: Arc<Mutex<Vec<Seen>>>,
    replies: mpsc::Sender<Result<pb::ProcessingResponse, Status>>,
}

impl Exchange {
    async fn run(self, mut messages: Streaming<pb::ProcessingRequest>) {
        while let Ok(Some(message)) = messages.message().await {
            let reply = match message.request {
                Some(Message::RequestHeaders(head)) => {
                    self.note(|seen| seen.headers = texts(head.headers.unwrap_or_default()));
                    // Without a body there will be no second message to decide on.
                    if head.end_of_stream { self.decide(Vec::new(), true).await } else { Some(headers_reply(None)) }
                }
                Some(Message::RequestBody(body)) => {
                    self.note(|seen| seen.body.clone_from(&body.body));
                    self.decide(body.body, false).await
                }
                Some(Message::ResponseHeaders(_)) => {
                    Some(Reply::ResponseHeaders(pb::HeadersResponse { response: Some(pb::CommonResponse::default()) }))
                }
                Some(Message::ResponseBody(_)) => {
                    if matches!(self.action, Action::RouteThenCut(_)) {
                        let _ = self.replies.send(Err(Status::aborted("cut"))).await;
                        return;
                    }
                    Some(Reply::ResponseBody(pb::BodyResponse { response: Some(pb::CommonResponse::default()) }))
                }
                _ => None,
            };
            if let Some(reply) = reply {
                let reply = pb::ProcessingResponse { response: Some(reply), ..Default::default() };
                if self.replies.send(Ok(reply)).await.is_err() {
                    return;
                }
            }
        }
    }

    fn note(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.seen.lock().expect("seen")[self.index]);
    }

    async fn decide(&self, body: Vec<u8>, headers_only: bool) -> Option<Reply> {
        let route = |pod: SocketAddr| {
            let length = body.len().to_string();
            let common = pb::CommonResponse {
                header_mutation: Some(set_headers(&[("target-pod", &pod.to_string()), ("content-length", &length)])),
                body_mutation: (!headers_only)
                    .then(|| pb::BodyMutation { mutation: Some(pb::body_mutation::Mutation::Body(body.clone())) }),
                clear_route_cache: true,
                ..Default::default()
            };
            if headers_only {
                headers_reply(Some(common))
            } else {
                Reply::RequestBody(pb::BodyResponse { response: Some(common) })
            }
        };
        match self.action {
            Action::Route(pod) | Action::RouteThenCut(pod) => Some(route(pod)),
            Action::RouteLate { pod, more, wait } => {
                let seconds = i64::try_from(more.as_secs()).expect("seconds");
                let ask = pb::ProcessingResponse {
                    override_message_timeout: Some(PbDuration { seconds, nanos: 0 }),
                    ..Default::default()
                };
                self.replies.send(Ok(ask)).await.ok()?;
                tokio::time::sleep(wait).await;
                Some(route(pod))
            }
            Action::Answer(status, text) => Some(Reply::ImmediateResponse(pb::ImmediateResponse {
                status: Some(HttpStatus { code: i32::try_from(status).expect("status") }),
                headers: Some(set_headers(&[("content-type", "application/json")])),
                body: text.into(),
                ..Default::default()
            })),
            Action::Pass if headers_only => Some(headers_reply(None)),
            Action::Pass => Some(Reply::RequestBody(pb::BodyResponse::default())),
            Action::Hang => None,
        }
    }
}

fn headers_reply(common: Option<pb::CommonResponse>) -> Reply {
    let common = common.unwrap_or(pb::CommonResponse { clear_route_cache: true, ..Default::default() });
    Reply::RequestHeaders(pb::HeadersResponse { response: Some(common) })
}

fn set_headers(headers: &[(&str, &str)]) -> pb::HeaderMutation {
    let set = |(name, value): &(&str, &str)| HeaderValueOption {
        header: Some(HeaderValue { key: (*name).into(), raw_value: (*value).into(), ..Default::default() }),
        append_action: 2,
        ..Default::default()
    };
    pb::HeaderMutation { set_headers: headers.iter().map(set).collect(), remove_headers: Vec::new() }
}

fn texts(headers: HeaderMap) -> Vec<(String, String)> {
    let text = |header: HeaderValue| {
        let value = if header.raw_value.is_empty() { header.value.into_bytes() } else { header.raw_value };
        (header.key, String::from_utf8_lossy(&value).into_owned())
    };
    headers.headers.into_iter().map(text).collect()
}

/// An address on which nothing listens.
pub fn closed_port() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    listener.local_addr().expect("address")
}

/// POSTs a small chat request.
pub fn chat(address: SocketAddr) -> Call {
    Call::post(&base(address), "/v1/chat/completions", r#"{"model":"m","messages":[]}"#)
}
