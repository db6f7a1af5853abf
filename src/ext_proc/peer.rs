//! One ext_proc stream as the driver sees it.

use bytes::Bytes;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Message;
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse, ProtocolConfiguration};
use http::{HeaderMap, Method, StatusCode};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use super::{convert, reply};
use crate::drive::{Incoming, Peer};
use crate::error::{ApiError, Reason};
use crate::exchange::{Adapter, AnswerHead, Effect, Event, RoutePlan, is_connect_failure};

/// Envoy on the other side of one stream.
#[derive(Debug)]
pub struct EnvoyPeer {
    messages: Streaming<ProcessingRequest>,
    replies: mpsc::Sender<Result<ProcessingResponse, Status>>,
    /// The answer ended with trailers: its last (empty) chunk is no message that waits for a reply.
    trailers: bool,
    /// The head is all there is of the request, and Envoy waits for the reply to it.
    head_only: bool,
    /// The request is on its way to its pod: Envoy has had its reply to the body.
    routed: bool,
    /// The next event, of a message that made two.
    next: Option<Event>,
    /// Envoy sends one body message for each request. It says "end of stream" there only when no trailers follow.
    one_body_message: bool,
}

impl EnvoyPeer {
    /// A stream that has just been opened.
    pub fn new(
        messages: Streaming<ProcessingRequest>,
        replies: mpsc::Sender<Result<ProcessingResponse, Status>>,
    ) -> EnvoyPeer {
        EnvoyPeer {
            messages,
            replies,
            trailers: false,
            head_only: false,
            routed: false,
            next: None,
            one_body_message: false,
        }
    }

    async fn reply(&self, reply: ProcessingResponse) {
        // A failed send means that Envoy has reset the stream; the next read says so too.
        let _ = self.replies.send(Ok(reply)).await;
    }
}

/// A request-body mode in which the request would leave Envoy before it is routed.
fn unsupported_mode(config: Option<&ProtocolConfiguration>) -> Option<&'static str> {
    match config.map(ProtocolConfiguration::request_body_mode) {
        Some(BodySendMode::None) => Some("NONE"),
        Some(BodySendMode::Streamed) => Some("STREAMED"),
        Some(BodySendMode::FullDuplexStreamed) => Some("FULL_DUPLEX_STREAMED"),
        _ => None,
    }
}

fn status(code: Option<u16>) -> StatusCode {
    code.and_then(|code| StatusCode::from_u16(code).ok()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// How a stream ends that breaks a request off (reference gateway, section 1.10).
fn cut(reason: Reason, text: &str) -> Status {
    match reason {
        Reason::DecodeTimeout => Status::deadline_exceeded(text),
        _ => Status::aborted(text),
    }
}

impl Peer for EnvoyPeer {
    const ADAPTER: Adapter = Adapter::Envoy;

    async fn next(&mut self) -> Incoming {
        if let Some(event) = self.next.take() {
            return Incoming::Event(event);
        }
        loop {
            let message = match self.messages.message().await {
                Ok(Some(message)) => message,
                // The one message that can be too long is a body.
                Err(status) if status.code() == Code::OutOfRange => return Incoming::Event(Event::BodyTooLarge),
                // A clean end or a reset before the exchange is over: the client, or Envoy itself, is gone.
                Ok(None) | Err(_) => return Incoming::Event(Event::Gone),
            };
            let mode = unsupported_mode(message.protocol_config.as_ref());
            if let Some(config) = &message.protocol_config {
                use BodySendMode::{Buffered, BufferedPartial};
                self.one_body_message = matches!(config.request_body_mode(), Buffered | BufferedPartial);
            }
            match message.request {
                Some(Message::RequestHeaders(headers)) => {
                    let head = convert::head(headers.headers.unwrap_or_default());
                    if let Some(mode) = mode
                        && !headers.end_of_stream
                    {
                        return Incoming::Event(Event::Misconfigured(format!(
                            "request_body_mode {mode} of the ext_proc filter is not supported; use BUFFERED"
                        )));
                    }
                    self.head_only = headers.end_of_stream;
                    return Incoming::Head {
                        method: Method::from_bytes(head.method.as_bytes()).unwrap_or(Method::GET),
                        path: head.path,
                        headers: head.headers,
                        end: headers.end_of_stream,
                    };
                }
                Some(Message::RequestBody(body)) => {
                    let end = body.end_of_stream || self.one_body_message;
                    return Incoming::Event(Event::Body { data: Bytes::from(body.body), end });
                }
                Some(Message::ResponseHeaders(headers)) => {
                    let head = convert::head(headers.headers.unwrap_or_default());
                    let head =
                        AnswerHead { status: status(head.status), headers: head.headers, end: headers.end_of_stream };
                    // Envoy's own details know best, where the filter is set up to send them.
                    let unanswered =
                        convert::pod_did_not_answer(&message.attributes).unwrap_or_else(|| is_connect_failure(&head));
                    let event = Event::AnswerHead(head);
                    let before = if unanswered {
                        Some(Event::NotAnswered)
                    } else {
                        convert::upstream_address(&message.attributes).map(Event::ServedBy)
                    };
                    let Some(before) = before else { return Incoming::Event(event) };
                    self.next = Some(event);
                    return Incoming::Event(before);
                }
                Some(Message::ResponseBody(body)) => {
                    return Incoming::Event(Event::AnswerChunk {
                        data: Bytes::from(body.body),
                        end: body.end_of_stream,
                    });
                }
                // Trailers end a body whose last chunk did not say so.
                Some(Message::RequestTrailers(_)) => {
                    self.reply(reply::request_trailers()).await;
                }
                Some(Message::ResponseTrailers(_)) => {
                    self.reply(reply::response_trailers()).await;
                    self.trailers = true;
                    return Incoming::Event(Event::AnswerChunk { data: Bytes::new(), end: true });
                }
                None => {
                    let text = "an ext_proc message without content";
                    return Incoming::Event(Event::Misconfigured(text.to_owned()));
                }
            }
        }
    }

    async fn apply(&mut self, effect: Effect) {
        match effect {
            // After a request that passes the stream ends well, and Envoy goes on without asking about the answer.
            Effect::AcceptHead { remove } | Effect::Pass { remove } => self.reply(reply::accept_head(remove)).await,
            Effect::ExtendTimeout(wait) => self.reply(reply::extend_timeout(wait)).await,
            Effect::ForwardHead(add) => self.reply(reply::forward_head(&add)).await,
            Effect::ForwardChunk | Effect::ReplaceChunk(_) if self.trailers => {}
            Effect::ForwardChunk => self.reply(reply::forward_chunk()).await,
            Effect::ReplaceChunk(bytes) => self.reply(reply::replace_chunk(bytes)).await,
            Effect::Answer(own) => self.reply(reply::answer(*own)).await,
            Effect::Refuse(error) => {
                self.reply(reply::refuse(&error)).await;
                if self.routed && error.reason != Reason::ShuttingDown {
                    // Envoy waits for no reply now, and may take this one for a mistake. The stream's end leaves no doubt.
                    let _ = self.replies.send(Err(cut(error.reason, error.reason.label()))).await;
                }
                if error.reason == Reason::ShuttingDown {
                    let _ = self.replies.send(Err(Status::unavailable("server shutdown in progress"))).await;
                }
            }
            // Failing the stream is what makes Envoy break off an answer whose head is out.
            Effect::Cut(reason) => {
                let _ = self.replies.send(Err(cut(reason, "the answer is cut short"))).await;
            }
            Effect::Deliver(_)
            | Effect::Claim(_)
            | Effect::LookUp(_)
            | Effect::DetachPrefill(_)
            | Effect::Abort(_)
            | Effect::Wake(_)
            | Effect::ForwardHeld(_)
            | Effect::CompleteAnswer
            | Effect::DropAnswer
            | Effect::Route(_)
            | Effect::Prepare(_)
            | Effect::Decode(_)
            | Effect::FindResponse(_)
            | Effect::ChargeLimits(_)
            | Effect::StartPrefill(_)
            | Effect::CancelPrefill
            | Effect::ForgetConnections
            | Effect::End(_) => {}
        }
    }

    async fn route(&mut self, plan: RoutePlan, trace_headers: HeaderMap) {
        self.routed = true;
        let reply =
            if self.head_only { reply::route_head(plan, &trace_headers) } else { reply::route(plan, &trace_headers) };
        self.reply(reply).await;
    }

    async fn crashed(&mut self) {
        let error = ApiError::new(Reason::Internal, "internal error");
        self.reply(reply::refuse(&error)).await;
        let _ = self.replies.send(Err(Status::internal("internal error"))).await;
    }
}
