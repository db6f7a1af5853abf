//! What is known about a request when it ends: the source of its metrics and of its log line.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use super::{PodLabels, RetryReason};
use crate::clock::Tick;
use crate::error::Reason;
use crate::response::Usage;

/// How a request ended. Decided once; a completed answer beats a client that leaves right after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The client got a complete 2xx answer.
    Success,
    /// It was none of the gateway's business: Envoy's own routes have it, and the gateway does not see its answer.
    Passed,
    /// The gateway ended it.
    Failed(Reason),
    /// The engine answered with this error status, passed on unchanged.
    EngineStatus(u16),
    /// An error event or an abort inside a 200 stream.
    EngineErrorEvent,
    /// The answer broke off after its head.
    AnswerCut,
    /// The client left before the answer was complete (499).
    ClientGone,
    /// This replica's shutdown cut it.
    Shutdown,
}

impl Outcome {
    /// Label `status` of the success and fail counters (reference section 9.1 names where one fits).
    pub fn label(self) -> &'static str {
        match self {
            Outcome::Success => "gateway_request_success",
            Outcome::Passed => "passed",
            Outcome::Failed(reason) => reason.label(),
            Outcome::EngineStatus(_) => "gateway_rsp_headers_fail",
            Outcome::EngineErrorEvent => "engine_error_event",
            Outcome::AnswerCut => "gateway_rsp_body_fail",
            Outcome::ClientGone => "client_cancelled_eof",
            Outcome::Shutdown => "aibrix_gateway_server_shutdown",
        }
    }
}

/// The moments of a request. `None` = did not happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// The request's head arrived.
    pub received: Tick,
    /// The target was selected.
    pub routed: Option<Tick>,
    /// The prefill call started.
    pub prefill_start: Option<Tick>,
    /// The prefill call ended.
    pub prefill_end: Option<Tick>,
    /// The request was handed to the decode (or single) pod.
    pub handed_over: Option<Tick>,
    /// The answer's head arrived.
    pub answer_head: Option<Tick>,
    /// The answer's first body byte arrived.
    pub first_chunk: Option<Tick>,
    /// The answer's last body byte arrived.
    pub last_chunk: Option<Tick>,
    /// The request ended.
    pub ended: Option<Tick>,
}

/// What spans tell about a selection; `/debug/decisions` has the rest. Lower scores are better.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DecisionEssentials {
    /// Version of the fleet snapshot.
    pub snapshot_version: u64,
    /// Prefill pods and decode (or single) pods that were candidates.
    pub candidates: (usize, usize),
    /// The steps that narrowed them, `none` if none did.
    pub steps: String,
    /// The prefill pod's score.
    pub prefill_score: Option<f64>,
    /// The decode or single pod's score.
    pub decode_score: Option<f64>,
    /// The pair's score.
    pub total_score: Option<f64>,
    /// Prefix match of the prefill pod, percent.
    pub prefix_match_pct: Option<u8>,
    /// Rolesets or pods that shared the best score.
    pub tied: usize,
    /// How often it was decided again because another request was charged in between.
    pub conflicts: u32,
}

/// A finished request.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// The id the client sees as `request-id`.
    pub request_id: String,
    /// The id by which the caller knows it, when that can be shown.
    pub client_request_id: Option<Arc<str>>,
    /// `/v1/...` of a known endpoint, else empty.
    pub endpoint: &'static str,
    /// The model, when the fleet knows it; `None` folds to one label value, so that clients cannot make series.
    pub model: Option<Arc<str>>,
    /// The strategy, when one was in force.
    pub strategy: Option<Cow<'static, str>>,
    /// Prefill and decode policy names (PD).
    pub policies: Option<(&'static str, &'static str)>,
    /// The essentials of the selection.
    pub decision: Option<Box<DecisionEssentials>>,
    /// Why a single pod served it, when one did.
    pub single_reason: Option<&'static str>,
    /// The roleset, or empty.
    pub roleset: String,
    /// The prefill pod.
    pub prefill_pod: Option<Arc<PodLabels>>,
    /// The decode, combined or only pod.
    pub target_pod: Option<Arc<PodLabels>>,
    /// Host of the target pod, without its port.
    pub target_host: String,
    /// Pods that were candidates for the target.
    pub candidate_pods: usize,
    /// Routable pods of the model.
    pub ready_pods: usize,
    /// Requests that this replica had on the target before this one.
    pub outstanding_at_start: u64,
    /// What became of the KV hand-off: `relayed`, `absent`, `unusable`, or empty when there was none to do.
    pub handoff: &'static str,
    /// Why it has started over, if it has.
    pub retry: Option<RetryReason>,
    /// The client asked for a stream.
    pub stream: bool,
    /// Size of the request body, bytes.
    pub body_bytes: usize,
    /// Body bytes of the answer.
    pub answer_bytes: u64,
    /// Status the client saw (499 when it left).
    pub status: u16,
    /// How it ended.
    pub outcome: Outcome,
    /// Token usage, when the engine reported it.
    pub usage: Option<Usage>,
    /// A first token later than this is slow; `None` = by the gateway's own threshold.
    pub ttft_threshold: Option<Duration>,
    /// Moments.
    pub timings: Timings,
}

impl RequestRecord {
    /// A request of which nothing is known yet.
    pub fn empty() -> RequestRecord {
        RequestRecord {
            request_id: String::new(),
            client_request_id: None,
            endpoint: "",
            model: None,
            strategy: None,
            policies: None,
            decision: None,
            single_reason: None,
            roleset: String::new(),
            prefill_pod: None,
            target_pod: None,
            target_host: String::new(),
            candidate_pods: 0,
            ready_pods: 0,
            outstanding_at_start: 0,
            handoff: "",
            retry: None,
            stream: false,
            body_bytes: 0,
            answer_bytes: 0,
            status: 499,
            outcome: Outcome::ClientGone,
            usage: None,
            ttft_threshold: None,
            timings: Timings::default(),
        }
    }
}
