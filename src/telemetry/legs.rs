//! Closed sets of names about legs: labels of metrics and attributes of spans (reference gateway, sections 1.10 and 5.5).

use super::PrefillFailureClass;

/// What the decode watchdog waited for in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchdogPhase {
    /// The first event of a stream.
    FirstResponse,
    /// The end of an answer that is no stream.
    Response,
    /// The next event of a stream.
    StreamIdle,
}

impl WatchdogPhase {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            WatchdogPhase::FirstResponse => "first_response",
            WatchdogPhase::Response => "response",
            WatchdogPhase::StreamIdle => "stream_idle",
        }
    }
}

/// Why engines are told to drop a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbortTrigger {
    /// The prefill leg failed.
    Prefill(PrefillFailureClass),
    /// The decode pod failed, so that the prefill pod waits for nobody.
    DecodeFailed,
    /// The watchdog fired.
    Watchdog(WatchdogPhase),
    /// The client left.
    ClientGone,
}

impl AbortTrigger {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            AbortTrigger::Prefill(class) => class.label(),
            AbortTrigger::DecodeFailed => "decode_failed",
            AbortTrigger::Watchdog(WatchdogPhase::FirstResponse) => "watchdog_first_response",
            AbortTrigger::Watchdog(WatchdogPhase::Response) => "watchdog_response",
            AbortTrigger::Watchdog(WatchdogPhase::StreamIdle) => "watchdog_stream_idle",
            AbortTrigger::ClientGone => "client_gone",
        }
    }
}

/// How an abort call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbortResult {
    /// The pod took it.
    Ok,
    /// It did not.
    Error,
    /// The decode pod was answering already: it has what it needs.
    SkippedStreaming,
    /// Aborts are switched off.
    SkippedDisabled,
}

impl AbortResult {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            AbortResult::Ok => "ok",
            AbortResult::Error => "error",
            AbortResult::SkippedStreaming => "skipped_streaming",
            AbortResult::SkippedDisabled => "skipped_disabled",
        }
    }
}

/// Why a request started over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryReason {
    /// No connection to the prefill pod, so nothing can have run.
    PrefillUnreachable,
    /// No connection to the pod that was to answer.
    DecodeUnreachable,
    /// An error inside a stream that had brought nothing yet.
    ErrorBeforeContent,
    /// The hand-off had become too old.
    HandoffExpired,
}

impl RetryReason {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            RetryReason::PrefillUnreachable => "prefill_unreachable",
            RetryReason::DecodeUnreachable => "decode_unreachable",
            RetryReason::ErrorBeforeContent => "error_before_content",
            RetryReason::HandoffExpired => "handoff_expired",
        }
    }
}
