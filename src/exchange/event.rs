//! What the machine hears and what it asks for.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode};

use super::{DecodeJob, Decoded, PrepareJob, Prepared};
use crate::engines::leg::{LegOutcome, LegRequest};
use crate::engines::lookup::{LookedUp, LookupError, LookupKey, LookupKind};
use crate::error::{ApiError, Reason};
use crate::state::limits::{LimitCall, LimitVerdict};
use crate::state::plane::{ClaimOrder, Claimed};
use crate::state::responses::Home;
use crate::telemetry::{AbortTrigger, PrefillLeg, RequestRecord};

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
    /// [`Effect::Decode`] is done.
    Decoded(Decoded),
    /// [`Effect::Prepare`] is done.
    Prepared(Prepared),
    /// [`Effect::ChargeLimits`] is done. Dropped unheard, it gives the places back.
    LimitsCharged(LimitVerdict),
    /// [`Effect::FindResponse`] is done; `None` = nobody knows.
    ResponseFound(Option<Home>),
    /// [`Effect::Claim`] is done.
    Claimed(Claimed),
    /// [`Effect::LookUp`] is done.
    LookedUp(Result<Arc<LookedUp>, LookupError>),
    /// The prefill leg ended.
    Prefill(LegOutcome),
    /// The address of the pod that answers, where the peer can tell: not that of the plan, when another one took over.
    ServedBy(String),
    /// What follows is no answer of the pod, but Envoy's own: the pod could not be reached, or broke off before its head.
    NotAnswered,
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
        /// No connection came about: the pod knows nothing of the request.
        unreachable: bool,
    },
    /// The time that [`Exchange::deadline`](super::Exchange::deadline) named has come.
    Timer,
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
    /// `host:port`, over TLS with `https://` before it; `None` when no strategy is in force and Envoy's own per-model routes decide.
    pub address: Option<Arc<str>>,
    /// The method.
    pub method: Method,
    /// Path with query.
    pub path: String,
    /// Headers to take away, where the head of the request has not been answered before.
    pub remove_headers: Vec<String>,
    /// Headers to set on the request.
    pub set_headers: Vec<(&'static str, String)>,
    /// What the engine is shown in place of the client's `authorization`; `headers` have it too.
    pub authorization: Option<HeaderValue>,
    /// All headers of the request for an adapter that sends it itself, complete but for trace context.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

/// A question to a prefill pod.
#[derive(Clone, Debug)]
pub struct LookupCall {
    /// Whose answer it is.
    pub key: LookupKey,
    /// What is asked.
    pub kind: LookupKind,
}

/// A call to the runtime of a pod: one of its models sleeps, and somebody asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WakeCall {
    /// `host:port` of the runtime.
    pub address: String,
    /// The pod's UID.
    pub pod: Arc<str>,
    /// The model.
    pub model: Arc<str>,
}

/// Calls of `/abort_request` (`engine-protocols`, section 3.6).
#[derive(Clone, Debug)]
pub struct AbortPlan {
    /// `host:port` of the pods.
    pub targets: Vec<Arc<str>>,
    /// The body of each call.
    pub body: Bytes,
    /// Bound on each call.
    pub timeout: Duration,
    /// Until each is called once more: the first call can overtake the request that it is about.
    pub retry_delay: Option<Duration>,
    /// Why.
    pub trigger: AbortTrigger,
}

/// An answer that the gateway itself makes from a prefill pod's.
#[derive(Clone, Debug)]
pub struct OwnAnswer {
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
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
    /// The request is not for the gateway: go on without it, by the peer's own routes, without these headers (Envoy only).
    Pass {
        /// Names of headers to take away.
        remove: Vec<String>,
    },
    /// Decode the body off the event loop and come back with [`Event::Decoded`].
    Decode(Box<DecodeJob>),
    /// Compute this off the event loop and come back with [`Event::Prepared`].
    Prepare(Box<PrepareJob>),
    /// Take places in the limits that replicas share, and come back with [`Event::LimitsCharged`] soon
    /// (`TANDEM_RATE_LIMIT_WAIT_MS`).
    ChargeLimits(Box<LimitCall>),
    /// The answer to the body takes up to this long: ask the peer to wait.
    ExtendTimeout(Duration),
    /// Commit in the state plane what was charged, and come back with [`Event::Claimed`].
    Claim(Box<ClaimOrder>),
    /// Ask the other replicas where this stored response is, and come back with [`Event::ResponseFound`] soon.
    FindResponse(Arc<str>),
    /// Ask the prefill pod, or the cache of what it said, what its dialect needs to know before a leg; come back with
    /// [`Event::LookedUp`].
    LookUp(Box<LookupCall>),
    /// Start the prefill leg and come back with [`Event::Prefill`]. Dropping the call cancels it.
    StartPrefill(Box<LegRequest>),
    /// Stop the prefill leg by closing its connection.
    CancelPrefill,
    /// The process was stopped for a while: use none of the connections to engines again that there are.
    ForgetConnections,
    /// Let the prefill leg go on until it ends by itself: nobody waits for its outcome, which only counts.
    DetachPrefill(Box<PrefillLeg>),
    /// Tell pods to drop the request; nobody waits for that.
    Abort(Box<AbortPlan>),
    /// Nobody waits for this decode request, but its pod must see it: only then does the prefill pod let go of the KV
    /// blocks that it holds for it (`engine-protocols`, section 8). Send it, and hang up.
    Deliver(Box<LegRequest>),
    /// Tell a pod to wake a model; nobody waits for that.
    Wake(Box<WakeCall>),
    /// Send the request on.
    Route(Box<RoutePlan>),
    /// Answer the client with an error. Nothing of an answer was sent before.
    Refuse(Box<ApiError>),
    /// Answer the client with this: the prefill pod had the whole answer.
    Answer(Box<OwnAnswer>),
    /// Pass the answer's head on with these headers added.
    ForwardHead(HeaderMap),
    /// Pass these bytes on, which were held back since their event (front only).
    ForwardHeld(Bytes),
    /// Pass the chunk of the event on.
    ForwardChunk,
    /// Pass these bytes on in place of the chunk of the event: what follows an error must not look like a good end.
    ReplaceChunk(Bytes),
    /// The answer is complete here, whatever its pod has still to say (front only).
    CompleteAnswer,
    /// Give the answer up of which nothing was passed on (front only).
    DropAnswer,
    /// Break the answer off so that the client can tell: part of it was sent. Why, for whoever passes it on.
    Cut(Reason),
    /// The request is over and everything is released.
    End(Box<RequestRecord>),
}
