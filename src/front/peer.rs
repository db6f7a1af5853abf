//! One front request as the driver sees it.

use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;
use http::header::{CONNECTION, HeaderName, TRANSFER_ENCODING};
use http::{HeaderMap, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body as _, Frame, Incoming as HyperBody};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;

use crate::drive::{Incoming, Peer};
use crate::engines::leg::{EngineClient, LegError};
use crate::error::{ApiError, Reason};
use crate::exchange::{Adapter, AnswerHead, Effect, Event, RoutePlan};

/// Chunks on their way to a slow client before the decode pod is no longer read.
const CHUNK_QUEUE: usize = 4;

/// The answer breaks off: hyper then closes the connection without the closing chunk.
#[derive(Debug, thiserror::Error)]
#[error("the answer is cut short")]
pub struct Cut;

/// Bodies that the front sends.
pub type FrontBody = UnsyncBoxBody<Bytes, Cut>;

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

/// A whole body.
pub fn full(bytes: Bytes) -> FrontBody {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

type Connecting = Pin<Box<dyn Future<Output = Result<Response<HyperBody>, LegError>> + Send>>;

enum Decode {
    NotYet,
    Connecting(Connecting),
    Streaming(HyperBody),
    Over,
}

/// A client connection and the decode leg that serves it.
pub struct FrontPeer {
    request: Option<Request<()>>,
    body: Option<HyperBody>,
    client: EngineClient,
    respond: Option<oneshot::Sender<Reply>>,
    chunks: Option<mpsc::Sender<Result<Frame<Bytes>, Cut>>>,
    decode: Decode,
    answer: Option<Response<()>>,
    chunk: Bytes,
}

impl FrontPeer {
    /// A request that has just arrived; its response goes to `respond`.
    pub fn new(request: Request<HyperBody>, client: EngineClient, respond: oneshot::Sender<Reply>) -> FrontPeer {
        let (head, body) = request.into_parts();
        FrontPeer {
            request: Some(Request::from_parts(head, ())),
            body: Some(body),
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
            Decode::NotYet | Decode::Over => std::future::pending().await,
            Decode::Connecting(connecting) => match connecting.as_mut().await {
                Err(error) => {
                    *decode = Decode::Over;
                    Event::DecodeFailed { detail: error.to_string() }
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
                        *decode = Decode::Over;
                        *chunk = Bytes::new();
                        return Event::AnswerChunk { data: Bytes::new(), end: true };
                    }
                    Some(Err(error)) => {
                        *decode = Decode::Over;
                        return Event::DecodeFailed { detail: error.to_string() };
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
        let (mut head, ()) = answer.into_parts();
        for name in [CONNECTION, TRANSFER_ENCODING, HeaderName::from_static("keep-alive")] {
            head.headers.remove(name);
        }
        for (name, value) in add {
            head.headers.insert(name.clone(), value.clone());
        }
        let body = StreamBody::new(ReceiverStream::new(receiver)).boxed_unsync();
        self.chunks = Some(sender);
        // The receiver is gone when the client is; the next event says so.
        let _ = respond.send(Reply { response: Response::from_parts(head, body), unread: None });
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
            let event = Self::next_body(body).await;
            if matches!(event, Event::Gone | Event::Body { end: true, .. }) {
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
            Effect::ForwardChunk => {
                let chunk = std::mem::take(&mut self.chunk);
                if let (Some(chunks), false) = (&self.chunks, chunk.is_empty()) {
                    let _ = chunks.send(Ok(Frame::data(chunk))).await;
                }
            }
            Effect::Refuse(error) => self.refuse(&error),
            Effect::Cut => {
                if let Some(chunks) = self.chunks.take() {
                    let _ = chunks.send(Err(Cut)).await;
                }
            }
            _ => {}
        }
    }

    async fn route(&mut self, plan: RoutePlan, _trace_headers: HeaderMap) {
        let Some(address) = plan.address else {
            // Cannot be: the front always has a strategy. The client is told rather than left waiting.
            return self.crashed().await;
        };
        let client = self.client.clone();
        self.decode =
            Decode::Connecting(Box::pin(
                async move { client.post(&address, &plan.path, plan.headers, plan.body).await },
            ));
    }

    async fn crashed(&mut self) {
        if self.respond.is_some() {
            self.refuse(&ApiError::new(Reason::Internal, "internal error"));
        } else {
            self.apply(Effect::Cut).await;
        }
    }
}
