//! One front request as the driver sees it.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming as HyperBody};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Sleep;

use super::body::{AnswerBody, AnswerSender, FrontBody, full};
use crate::drive::{Incoming, Peer};
use crate::engines::leg::{EngineClient, LegError};
use crate::error::{ApiError, Reason};
use crate::exchange::{Adapter, AnswerHead, Effect, Event, OwnAnswer, RoutePlan, strip_hop_by_hop};

/// Chunks on their way to a slow client before the decode pod is no longer read.
const CHUNK_QUEUE: usize = 4;

/// What the front answers.
pub struct Reply {
    /// The response.
    pub response: Response<FrontBody>,
    /// The rest of a request whose client was answered before it had sent everything.
    pub unread: Option<HyperBody>,
}

/// An error as an HTTP response.
pub fn error_response(error: &ApiError) -> Response<FrontBody> {
    let mut response = Response::new(full(error.body()));
    *response.status_mut() = error.status;
    *response.headers_mut() = error.headers();
    response
}

/// A decode request whose client leaves goes on for this long since it was started, so that its pod sees it: the prefill
/// pod holds KV blocks until then. Far below what an engine needs for an answer, and well within the 100 ms in which a
/// pod has to learn that nobody waits.
const DELIVERY: Duration = Duration::from_millis(50);

type Connecting = Pin<Box<dyn Future<Output = Result<Response<HyperBody>, LegError>> + Send>>;

enum Decode {
    NotYet,
    /// The request is on its way; until the second is over, its pod may not have it whole.
    Connecting(Connecting, Pin<Box<Sleep>>),
    Streaming(HyperBody),
    /// It ended as it should.
    Complete,
    Broken,
}

/// A client connection and the decode leg that serves it.
pub struct FrontPeer {
    request: Option<Request<()>>,
    body: Option<HyperBody>,
    /// When the body has to be here.
    body_limit: Pin<Box<Sleep>>,
    client: EngineClient,
    respond: Option<oneshot::Sender<Reply>>,
    chunks: Option<AnswerSender>,
    decode: Decode,
    answer: Option<Response<()>>,
    chunk: Bytes,
}

impl FrontPeer {
    /// A request that has just arrived; its body has `body_timeout` to do so, its response goes to `respond`.
    pub fn new(
        request: Request<HyperBody>,
        body_timeout: Duration,
        client: EngineClient,
        respond: oneshot::Sender<Reply>,
    ) -> FrontPeer {
        let (head, body) = request.into_parts();
        FrontPeer {
            request: Some(Request::from_parts(head, ())),
            body: Some(body),
            body_limit: Box::pin(tokio::time::sleep(body_timeout)),
            client,
            respond: Some(respond),
            chunks: None,
            decode: Decode::NotYet,
            answer: None,
            chunk: Bytes::new(),
        }
    }

    async fn next_body(body: &mut HyperBody) -> Event {
        loop {
            match body.frame().await {
                None => return Event::Body { data: Bytes::new(), end: true },
                Some(Err(_)) => return Event::Gone,
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Event::Body { data, end: false };
                    }
                }
            }
        }
    }

    async fn next_of_decode(decode: &mut Decode, answer: &mut Option<Response<()>>, chunk: &mut Bytes) -> Event {
        match decode {
            Decode::NotYet | Decode::Complete | Decode::Broken => std::future::pending().await,
            Decode::Connecting(connecting, _) => match connecting.as_mut().await {
                Err(error) => {
                    *decode = Decode::Broken;
                    Event::DecodeFailed { unreachable: !error.sent, detail: error.to_string() }
                }
                // Nobody asked for another protocol, and this connection could not carry it.
                Ok(response) if response.status().is_informational() => {
                    *decode = Decode::Broken;
                    let detail = format!("it answered {}", response.status());
                    Event::DecodeFailed { detail, unreachable: false }
                }
                Ok(response) => {
                    let (head, body) = response.into_parts();
                    let event = AnswerHead { status: head.status, headers: head.headers.clone(), end: false };
                    *answer = Some(Response::from_parts(head, ()));
                    *decode = Decode::Streaming(body);
                    Event::AnswerHead(event)
                }
            },
            Decode::Streaming(body) => loop {
                match body.frame().await {
                    None => {
                        *decode = Decode::Complete;
                        *chunk = Bytes::new();
                        return Event::AnswerChunk { data: Bytes::new(), end: true };
                    }
                    Some(Err(error)) => {
                        *decode = Decode::Broken;
                        return Event::DecodeFailed { detail: error.to_string(), unreachable: false };
                    }
                    Some(Ok(frame)) => {
                        if let Ok(data) = frame.into_data() {
                            *chunk = data.clone();
                            return Event::AnswerChunk { data, end: false };
                        }
                    }
                }
            },
        }
    }

    fn send_head(&mut self, add: &HeaderMap) {
        let (Some(respond), Some(answer)) = (self.respond.take(), self.answer.take()) else { return };
        let (sender, receiver) = mpsc::channel(CHUNK_QUEUE);
        let (chunks, body) = AnswerBody::new(sender, receiver);
        let (mut head, ()) = answer.into_parts();
        strip_hop_by_hop(&mut head.headers);
        for (name, value) in add {
            head.headers.insert(name.clone(), value.clone());
        }
        self.chunks = Some(chunks);
        // The receiver is gone when the client is; the next event says so.
        let _ = respond.send(Reply { response: Response::from_parts(head, body.boxed_unsync()), unread: None });
    }

    /// Answers with an error, unless an answer is under way.
    fn refuse(&mut self, error: &ApiError) {
        if let Some(respond) = self.respond.take() {
            let unread = self.body.take().filter(|body| !body.is_end_stream());
            let _ = respond.send(Reply { response: error_response(error), unread });
        }
    }
}

impl Peer for FrontPeer {
    const ADAPTER: Adapter = Adapter::Front;

    async fn next(&mut self) -> Incoming {
        if let Some(request) = self.request.take() {
            let (head, ()) = request.into_parts();
            let path = head.uri.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string);
            return Incoming::Head { method: head.method, path, headers: head.headers, end: false };
        }
        if let Some(body) = &mut self.body {
            let event = tokio::select! {
                biased;
                event = Self::next_body(body) => event,
                () = self.body_limit.as_mut() => Event::BodyTimeout,
            };
            if !matches!(event, Event::Body { end: false, .. }) {
                self.body = None;
            }
            return Incoming::Event(event);
        }
        let gone = async {
            match (&mut self.respond, &self.chunks) {
                (Some(respond), _) => respond.closed().await,
                (None, Some(chunks)) => chunks.closed().await,
                (None, None) => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = gone => Incoming::Event(Event::Gone),
            event = Self::next_of_decode(&mut self.decode, &mut self.answer, &mut self.chunk) => Incoming::Event(event),
        }
    }

    async fn apply(&mut self, effect: Effect) {
        match effect {
            Effect::ForwardHead(add) => self.send_head(&add),
            Effect::ForwardHeld(chunk) | Effect::ReplaceChunk(chunk) => {
                if let Some(chunks) = &self.chunks {
                    chunks.send(chunk).await;
                }
            }
            Effect::ForwardChunk => {
                let chunk = std::mem::take(&mut self.chunk);
                if let Some(chunks) = &self.chunks {
                    chunks.send(chunk).await;
                }
                if matches!(self.decode, Decode::Complete)
                    && let Some(chunks) = self.chunks.take()
                {
                    chunks.complete();
                }
            }
            Effect::Refuse(error) => self.refuse(&error),
            Effect::CompleteAnswer => {
                self.decode = Decode::Complete;
                if let Some(chunks) = self.chunks.take() {
                    chunks.complete();
                }
            }
            Effect::DropAnswer => {
                self.answer = None;
                self.decode = Decode::Broken;
            }
            Effect::Answer(own) => {
                if let Some(respond) = self.respond.take() {
                    let OwnAnswer { headers, body } = *own;
                    let mut response = Response::new(full(body));
                    *response.headers_mut() = headers;
                    let _ = respond.send(Reply { response, unread: None });
                }
            }
            // An answer whose sender goes before it is complete is cut.
            Effect::Cut(_) => self.chunks = None,
            _ => {}
        }
    }

    async fn route(&mut self, plan: RoutePlan, _trace_headers: HeaderMap) {
        let Some(address) = plan.address else {
            // Cannot be: the front always has a strategy. The client is told rather than left waiting.
            return self.crashed().await;
        };
        let client = self.client.clone();
        let call = async move { client.call(plan.method, &address, &plan.path, plan.headers, plan.body).await };
        self.decode = Decode::Connecting(Box::pin(call), Box::pin(tokio::time::sleep(DELIVERY)));
    }

    fn undelivered(&mut self) -> Option<BoxFuture<'static, ()>> {
        let Decode::Connecting(call, grace) = std::mem::replace(&mut self.decode, Decode::Broken) else { return None };
        Some(Box::pin(async move {
            tokio::select! {
                _ = call => {}
                () = grace => {}
            }
        }))
    }

    async fn crashed(&mut self) {
        self.refuse(&ApiError::new(Reason::Internal, "internal error"));
        self.chunks = None;
    }
}
