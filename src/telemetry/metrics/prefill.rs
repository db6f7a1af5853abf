//! Metrics of the prefill leg (the reference gateway, sections 4.1, 5.5 and 9.2).

use std::borrow::Cow;
use std::sync::Arc;

use super::{Metrics, UNKNOWN_MODEL};
use crate::telemetry::family::Cell;
use crate::telemetry::legs::{AbortResult, AbortTrigger, RetryReason, WatchdogPhase};
use crate::telemetry::names::Metric;

/// How a prefill call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillOutcome {
    /// 200 with a usable answer.
    Success,
    /// The pod answered with this status.
    HttpError(u16),
    /// The client left, or the request ended for another reason.
    Canceled,
    /// The time for the whole exchange ran out.
    DeadlineExceeded,
    /// The network timed out.
    Timeout,
    /// Anything else: refused, broken off, an answer that cannot be used.
    Error,
}

impl PrefillOutcome {
    /// Labels `status` and `status_code`.
    fn labels(self) -> (&'static str, Cow<'static, str>) {
        match self {
            PrefillOutcome::Success => ("pd-prefill-request-success", "200".into()),
            PrefillOutcome::HttpError(code) => ("http_error", status_code(code)),
            PrefillOutcome::Canceled => ("context_canceled", "499".into()),
            PrefillOutcome::DeadlineExceeded => ("deadline_exceeded", "504".into()),
            PrefillOutcome::Timeout => ("timeout", "504".into()),
            PrefillOutcome::Error => ("error", "502".into()),
        }
    }
}

/// A status code as a label: only codes that exist, since engines choose them.
pub(super) fn status_code(code: u16) -> Cow<'static, str> {
    match code {
        200 => "200".into(),
        100..=599 => code.to_string().into(),
        _ => "other".into(),
    }
}

/// Why a prefill leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillFailureClass {
    /// The call could not be made up.
    RequestSetup,
    /// Deadline or network time-out.
    Timeout,
    /// Cancelled.
    Canceled,
    /// Refused or broken off.
    Transport,
    /// A status other than 200.
    HttpStatus,
    /// 200 with a body that cannot be used.
    BadResponse,
}

impl PrefillFailureClass {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            PrefillFailureClass::RequestSetup => "request_setup",
            PrefillFailureClass::Timeout => "timeout",
            PrefillFailureClass::Canceled => "canceled",
            PrefillFailureClass::Transport => "transport",
            PrefillFailureClass::HttpStatus => "http_status",
            PrefillFailureClass::BadResponse => "bad_response",
        }
    }
}

/// Had the decode pod begun to answer when the prefill leg failed?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillStage {
    /// No.
    BeforeResponse,
    /// Yes.
    AfterResponse,
}

/// A prefill leg under way: in the gauge until it is dropped, counted once. Dropped without an outcome, it counts as
/// cancelled.
#[derive(Debug)]
pub struct PrefillLeg {
    metrics: Arc<Metrics>,
    model: Option<Arc<str>>,
    outstanding: Cell,
    finished: bool,
}

impl PrefillLeg {
    /// The call ended.
    pub fn finish(mut self, outcome: PrefillOutcome) {
        self.count(outcome);
    }

    fn count(&mut self, outcome: PrefillOutcome) {
        self.finished = true;
        let model = self.model.as_deref().unwrap_or(UNKNOWN_MODEL);
        let (status, code) = outcome.labels();
        if outcome == PrefillOutcome::Success {
            self.metrics.count(Metric::PrefillSuccess, &[model, status, &code], 1);
        } else {
            self.metrics.count(Metric::PrefillFail, &[model, status, &code], 1);
            self.metrics.count(Metric::PrefillFail, &[model, "pd-do-prefill-request-error", "500"], 1);
        }
    }
}

impl Drop for PrefillLeg {
    fn drop(&mut self) {
        self.outstanding.subtract(1);
        if !self.finished {
            self.count(PrefillOutcome::Canceled);
        }
    }
}

impl Metrics {
    /// A prefill leg of a request of this model starts.
    pub fn prefill_leg(self: &Arc<Self>, model: Option<Arc<str>>) -> PrefillLeg {
        let outstanding = self.series(Metric::PrefillOutstanding, &[]);
        outstanding.add(1);
        PrefillLeg { metrics: Arc::clone(self), model, outstanding, finished: false }
    }

    /// A prefill leg failed for good.
    pub fn pd_prefill_failed(&self, class: PrefillFailureClass, stage: PrefillStage) {
        let stage = match stage {
            PrefillStage::BeforeResponse => "before_response",
            PrefillStage::AfterResponse => "after_response",
        };
        self.count(Metric::PdPrefillFailure, &[class.label(), stage], 1);
    }

    /// An abort call ended, or was not made, like this. `trigger` is why it was to be made.
    pub fn decode_aborted(&self, result: AbortResult, trigger: AbortTrigger) {
        self.count(Metric::PdDecodeAbort, &[result.label(), trigger.label()], 1);
    }

    /// The decode watchdog ended a request.
    pub fn decode_watchdog(&self, phase: WatchdogPhase) {
        self.count(Metric::PdDecodeWatchdog, &[phase.label()], 1);
    }

    /// A request starts over.
    pub fn retried(&self, reason: RetryReason) {
        self.count(Metric::Retries, &[reason.label()], 1);
    }

    /// Another decode pod takes a request over.
    pub fn decode_failover(&self) {
        self.count(Metric::DecodeFailovers, &[], 1);
    }
}
