//! A scripted Envoy: opens ext_proc streams to a replica and says exactly what a test wants to say.

use std::net::SocketAddr;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, HeaderValueOption};
pub use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3 as pb;
use pb::external_processor_client::ExternalProcessorClient;
use pb::processing_request::Request as Message;
use pb::processing_response::Response as PbReply;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{MetadataKey, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::{Task, within};

/// Largest message in either direction, above the gateway's own limit.
const MAX_MESSAGE: usize = 128 << 20;

/// A connection to a replica's ext_proc port.
#[derive(Clone, Debug)]
pub struct ExtProcClient {
    client: ExternalProcessorClient<Channel>,
}

/// Headers of a message, each in the form a test chooses.
#[derive(Clone, Debug, Default)]
pub struct Head(Vec<HeaderValue>);

/// One ext_proc stream, from Envoy's side. Dropping it resets the stream.
#[derive(Debug)]
pub struct ExtProcStream {
    messages: Option<mpsc::Sender<pb::ProcessingRequest>>,
    replies: mpsc::Receiver<Reply>,
    _task: Task,
}

/// What the replica said.
#[derive(Clone, Debug)]
pub enum Reply {
    /// To the request's head.
    RequestHeaders(Mutation),
    /// To a piece of the request's body.
    RequestBody(Mutation),
    /// To the answer's head.
    ResponseHeaders(Mutation),
    /// To a piece of the answer's body.
    ResponseBody(Mutation),
    /// End the request with this answer.
    Immediate(Immediate),
    /// Give me more time for the current message.
    MoreTime(Duration),
    /// Something else that Envoy could get: trailers, streamed answers.
    Other(Box<pb::ProcessingResponse>),
    /// The stream ended; `Ok` code for a clean end.
    End(Code, String),
}

/// A change of headers and body.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mutation {
    /// Headers to set: name, value.
    pub set: Vec<(String, Vec<u8>)>,
    /// Headers to remove.
    pub remove: Vec<String>,
    /// The new body, when it is replaced.
    pub body: Option<Vec<u8>>,
    /// Choose the route again.
    pub clear_route_cache: bool,
    /// `CONTINUE` (false) or `CONTINUE_AND_REPLACE` (true).
    pub replace: bool,
    /// The body mode for the answer was changed: the protocol's number.
    pub response_body_mode: Option<i32>,
}

/// An answer made by the gateway.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Immediate {
    /// HTTP status.
    pub status: i32,
    /// Headers.
    pub headers: Vec<(String, Vec<u8>)>,
    /// Body.
    pub body: Vec<u8>,
    /// Text for Envoy's log.
    pub details: String,
}

impl Head {
    /// The pseudo headers of a POST, as Envoy sends them.
    pub fn post(path: &str) -> Head {
        Head::default()
            .raw(":method", b"POST")
            .raw(":path", path.as_bytes())
            .raw(":scheme", b"http")
            .raw(":authority", b"gateway.test")
    }

    /// The pseudo header of an answer.
    pub fn status(status: u16) -> Head {
        Head::default().raw(":status", status.to_string().as_bytes())
    }

    /// A header in `raw_value`, as current Envoys send it.
    #[must_use]
    pub fn raw(mut self, name: &str, value: &[u8]) -> Head {
        self.0.push(HeaderValue { key: name.to_owned(), raw_value: value.to_vec(), ..Default::default() });
        self
    }

    /// A header in `value`, as older Envoys send it.
    #[must_use]
    pub fn value(mut self, name: &str, value: &str) -> Head {
        self.0.push(HeaderValue { key: name.to_owned(), value: value.to_owned(), ..Default::default() });
        self
    }

    /// The message.
    pub fn message(self, end_of_stream: bool) -> pb::HttpHeaders {
        pb::HttpHeaders { headers: Some(HeaderMap { headers: self.0 }), end_of_stream, ..Default::default() }
    }
}

impl ExtProcClient {
    /// Connects.
    pub async fn connect(address: SocketAddr) -> ExtProcClient {
        let endpoint = Channel::from_shared(format!("http://{address}")).expect("address");
        let channel = within("connect to ext_proc", endpoint.connect()).await.expect("connect to ext_proc");
        let client = ExternalProcessorClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        ExtProcClient { client }
    }

    /// Opens a stream with gRPC metadata (trace context).
    pub fn open(&self, metadata: &[(&'static str, &str)]) -> ExtProcStream {
        let (messages, outgoing) = mpsc::channel(64);
        let (incoming, replies) = mpsc::channel(1024);
        let mut request = tonic::Request::new(ReceiverStream::new(outgoing));
        for (name, value) in metadata {
            let value = MetadataValue::try_from(*value).expect("metadata value");
            request.metadata_mut().insert(MetadataKey::from_static(name), value);
        }
        let mut client = self.client.clone();
        let task = Task::spawn(async move {
            let end = |status: Status| Reply::End(status.code(), status.message().to_owned());
            let mut stream = match client.process(request).await {
                Ok(response) => response.into_inner(),
                Err(status) => return incoming.send(end(status)).await.unwrap_or(()),
            };
            loop {
                let reply = match stream.message().await {
                    Ok(Some(reply)) => typed(reply),
                    Ok(None) => Reply::End(Code::Ok, String::new()),
                    Err(status) => end(status),
                };
                let last = matches!(reply, Reply::End(..));
                if incoming.send(reply).await.is_err() || last {
                    return;
                }
            }
        });
        ExtProcStream { messages: Some(messages), replies, _task: task }
    }
}

impl ExtProcStream {
    /// Sends the request's head.
    pub async fn request_headers(&self, head: Head, end_of_stream: bool) {
        self.send(Message::RequestHeaders(head.message(end_of_stream))).await;
    }

    /// Sends the request's head, and with it, as Envoy does, the mode in which request bodies will come.
    pub async fn request_headers_in_mode(&self, head: Head, mode: BodySendMode) {
        let config = pb::ProtocolConfiguration { request_body_mode: mode as i32, ..Default::default() };
        let request = Some(Message::RequestHeaders(head.message(false)));
        self.send_whole(pb::ProcessingRequest { request, protocol_config: Some(config), ..Default::default() }).await;
    }

    /// Sends request body bytes.
    pub async fn request_body(&self, body: &[u8], end_of_stream: bool) {
        let body = pb::HttpBody { body: body.to_vec(), end_of_stream, ..Default::default() };
        self.send(Message::RequestBody(body)).await;
    }

    /// Sends the answer's head.
    pub async fn response_headers(&self, head: Head, end_of_stream: bool) {
        self.send(Message::ResponseHeaders(head.message(end_of_stream))).await;
    }

    /// Sends answer body bytes.
    pub async fn response_body(&self, body: &[u8], end_of_stream: bool) {
        let body = pb::HttpBody { body: body.to_vec(), end_of_stream, ..Default::default() };
        self.send(Message::ResponseBody(body)).await;
    }

    /// Sends any message.
    pub async fn send(&self, message: Message) {
        self.send_whole(pb::ProcessingRequest { request: Some(message), ..Default::default() }).await;
    }

    /// Sends a message with all that surrounds it.
    pub async fn send_whole(&self, message: pb::ProcessingRequest) {
        let messages = self.messages.as_ref().expect("the stream was half-closed before");
        // A replica that has ended the stream no longer reads; the test sees that in `next`.
        let _ = within("send to ext_proc", messages.send(message)).await;
    }

    /// Ends our direction cleanly: what Envoy does when its client has gone.
    pub fn half_close(&mut self) {
        self.messages = None;
    }

    /// Resets the stream: what Envoy does after a complete answer.
    pub fn reset(self) {
        drop(self);
    }

    /// The next reply.
    pub async fn next(&mut self) -> Reply {
        within("reply of ext_proc", self.replies.recv()).await.expect("nothing follows the end of the stream")
    }

    /// A reply that has already arrived.
    pub fn try_next(&mut self) -> Option<Reply> {
        self.replies.try_recv().ok()
    }
}

impl Reply {
    /// The mutation of a body or headers reply; panics on anything else.
    pub fn mutation(self) -> Mutation {
        match self {
            Reply::RequestHeaders(mutation)
            | Reply::RequestBody(mutation)
            | Reply::ResponseHeaders(mutation)
            | Reply::ResponseBody(mutation) => mutation,
            other => panic!("expected a mutation, got {other:?}"),
        }
    }

    /// The immediate answer; panics on anything else.
    pub fn immediate(self) -> Immediate {
        match self {
            Reply::Immediate(immediate) => immediate,
            other => panic!("expected an immediate answer, got {other:?}"),
        }
    }
}

impl Mutation {
    /// The value that a header is set to, as text.
    pub fn header(&self, name: &str) -> Option<String> {
        header(&self.set, name)
    }
}

impl Immediate {
    /// A header as text.
    pub fn header(&self, name: &str) -> Option<String> {
        header(&self.headers, name)
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("JSON body")
    }
}

fn header(headers: &[(String, Vec<u8>)], name: &str) -> Option<String> {
    let found = headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name))?;
    Some(String::from_utf8_lossy(&found.1).into_owned())
}

fn typed(reply: pb::ProcessingResponse) -> Reply {
    if let (Some(more), None) = (&reply.override_message_timeout, &reply.response) {
        let seconds = u64::try_from(more.seconds).expect("seconds");
        return Reply::MoreTime(Duration::new(seconds, u32::try_from(more.nanos).expect("nanos")));
    }
    let mode = reply.mode_override.as_ref().map(|mode| mode.response_body_mode);
    match reply.response {
        Some(PbReply::RequestHeaders(r)) => Reply::RequestHeaders(mutation(r.response, mode)),
        Some(PbReply::RequestBody(r)) => Reply::RequestBody(mutation(r.response, mode)),
        Some(PbReply::ResponseHeaders(r)) => Reply::ResponseHeaders(mutation(r.response, mode)),
        Some(PbReply::ResponseBody(r)) => Reply::ResponseBody(mutation(r.response, mode)),
        Some(PbReply::ImmediateResponse(r)) => Reply::Immediate(Immediate {
            status: r.status.map_or(0, |status| status.code),
            headers: r.headers.map(|headers| pairs(headers.set_headers)).unwrap_or_default(),
            body: r.body,
            details: r.details,
        }),
        other => Reply::Other(Box::new(pb::ProcessingResponse { response: other, ..Default::default() })),
    }
}

fn mutation(common: Option<pb::CommonResponse>, response_body_mode: Option<i32>) -> Mutation {
    let common = common.unwrap_or_default();
    let headers = common.header_mutation.unwrap_or_default();
    let body = match common.body_mutation.and_then(|body| body.mutation) {
        Some(pb::body_mutation::Mutation::Body(body)) => Some(body),
        Some(pb::body_mutation::Mutation::ClearBody(true)) => Some(Vec::new()),
        _ => None,
    };
    Mutation {
        set: pairs(headers.set_headers),
        remove: headers.remove_headers,
        body,
        clear_route_cache: common.clear_route_cache,
        replace: common.status == pb::common_response::ResponseStatus::ContinueAndReplace as i32,
        response_body_mode,
    }
}

fn pairs(options: Vec<HeaderValueOption>) -> Vec<(String, Vec<u8>)> {
    let pair = |header: HeaderValue| {
        (header.key, if header.raw_value.is_empty() { header.value.into_bytes() } else { header.raw_value })
    };
    options.into_iter().filter_map(|option| option.header.map(pair)).collect()
}
