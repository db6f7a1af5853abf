//! What the machine hears and what it asks for.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};

use super::{PrepareJob, Prepared};
use crate::engines::leg::{LegOutcome, LegRequest};
use crate::error::ApiError;
use crate::telemetry::RequestRecord;

/// Which adapter drives the machine: they differ in who reaches the decode pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adapter {
    /// Envoy carries the request on to the pod that we name.
    Envoy,
    /// The HTTP front carries it itself.
    Front,
}

/// The head of a client request.
#[derive(Clone, Debug)]
pub struct RequestHead {
    /// The id that the client will see as `request-id`.
    pub request_id: String,
    /// True when the id is this request's alone (not taken from a trace that other requests may share).
    pub id_is_unique: bool,
    /// The method.
    pub method: Method,
    /// Path with query.
    pub path: String,
    /// All headers but the pseudo headers.
    pub headers: HeaderMap,
    /// No body follows.
    pub end: bool,
}

impl RequestHead {
    /// What it costs to keep, bytes, about.
    pub fn size(&self) -> usize {
        /// Of a header, beside its text: the map's entry and index, two reference-counted buffers.
        const OVERHEAD: usize = 160;
        let header =
            |(name, value): (&http::HeaderName, &http::HeaderValue)| name.as_str().len() + value.len() + OVERHEAD;
        self.path.len() + self.request_id.len() + self.headers.iter().map(header).sum::<usize>()
    }
}

/// The head of the answer of a decode (or single) pod.
#[derive(Clone, Debug)]
pub struct AnswerHead {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// No body follows.
    pub end: bool,
}

/// What happens to a request.
#[derive(Debug)]
pub enum Event {
    /// The head arrived.
    Head(RequestHead),
    /// Body bytes arrived.
    Body {
        /// The bytes.
        data: Bytes,
        /// They are the last ones.
        end: bool,
    },
    /// [`Effect::Prepare`] is done.
    Prepared(Prepared),
    /// The prefill leg ended.
    Prefill(LegOutcome),
    /// The answer's head arrived.
    AnswerHead(AnswerHead),
    /// Answer bytes arrived.
    AnswerChunk {
        /// The bytes.
        data: Bytes,
        /// They are the last ones.
        end: bool,
    },
    /// The decode leg broke: not reachable, or cut (front only; Envoy answers for itself).
    DecodeFailed {
        /// For the log.
        detail: String,
    },
    /// The body does not arrive within the time that an upload may take (front only; Envoy has a timer of its own).
    BodyTimeout,
    /// A body message was longer than the transport takes; its bytes are lost.
    BodyTooLarge,
    /// The client, or the Envoy stream that stands for it, is gone.
    Gone,
    /// The same, when the prefill leg has just ended: its outcome, of which nobody has heard yet.
    GoneAfterPrefill(LegOutcome),
    /// The drain timeout of a shutdown has passed.
    Shutdown,
    /// The peer is set up in a way in which requests cannot be served; the text says how to mend it.
    Misconfigured(String),
}

/// How a request goes on to its pod.
#[derive(Clone, Debug)]
pub struct RoutePlan {
    /// `host:port`; `None` when no strategy is in force and Envoy's own per-model routes decide.
    pub address: Option<Arc<str>>,
    /// Path with query.
    pub path: String,
    /// Headers to set on the request.
    pub set_headers: Vec<(&'static str, String)>,
    /// All headers of the request for an adapter that sends it itself, complete but for trace context.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

/// What the machine wants done, in order.
#[derive(Debug)]
pub enum Effect {
    /// Go on to the body, without these headers.
    AcceptHead {
        /// Names of headers to take away.
        remove: Vec<String>,
    },
    /// Compute this off the event loop and come back with [`Event::Prepared`].
    Prepare(Box<PrepareJob>),
    /// The answer to the body takes up to this long: ask the peer to wait.
    ExtendTimeout(Duration),
    /// Start the prefill leg and come back with [`Event::Prefill`]. Dropping the call cancels it.
    StartPrefill(Box<LegRequest>),
    /// Stop the prefill leg.
    CancelPrefill,
    /// Nobody waits for this decode request, but its pod must see it: only then does the prefill pod let go of the KV
    /// blocks that it holds for it (`engine-protocols`, section 8). Send it, and hang up.
    Deliver(Box<LegRequest>),
    /// Send the request on.
    Route(Box<RoutePlan>),
    /// Answer the client with an error. Nothing of an answer was sent before.
    Refuse(Box<ApiError>),
    /// Pass the answer's head on with these headers added.
    ForwardHead(HeaderMap),
    /// Pass the chunk of the event on.
    ForwardChunk,
    /// Break the answer off so that the client can tell: part of it was sent.
    Cut,
    /// The request is over and everything is released.
    End(Box<RequestRecord>),
}
