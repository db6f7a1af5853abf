//! The spans of one exchange: which begin and end at which of its events.

use http::HeaderMap;
use opentelemetry::trace::TraceId;

use crate::clock::Clock;
use crate::exchange::Event;
use crate::telemetry::{
    DecisionEssentials, LegSpan, Outcome, PodLabels, RequestRecord, RequestTrace, SampledTrace, SelectedTarget,
    TraceParent, Tracer,
};

/// The root span and the legs that are open. All of them end when this is dropped.
#[derive(Debug, Default)]
pub struct Spans {
    selection: Option<LegSpan>,
    prefill: Option<LegSpan>,
    decode: Option<LegSpan>,
    /// Last, so that the legs end first.
    root: Option<RequestTrace>,
}

/// The essentials of the decision, on the span of the selection.
fn decided(span: &mut LegSpan, decision: &DecisionEssentials) {
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let version = i64::try_from(decision.snapshot_version).unwrap_or(i64::MAX);
    span.attribute("tandem.decision.snapshot_version", version);
    span.attribute("tandem.decision.prefill_candidates", count(decision.candidates.0));
    span.attribute("tandem.decision.decode_candidates", count(decision.candidates.1));
    span.attribute("tandem.decision.steps", decision.steps.clone());
    span.attribute("tandem.decision.tied", count(decision.tied));
    span.attribute("tandem.decision.conflicts", i64::from(decision.conflicts));
    let scores = [
        ("tandem.decision.prefill_score", decision.prefill_score),
        ("tandem.decision.decode_score", decision.decode_score),
        ("tandem.decision.total_score", decision.total_score),
        ("tandem.decision.prefix_match_pct", decision.prefix_match_pct.map(f64::from)),
    ];
    for (name, score) in scores {
        if let Some(score) = score {
            span.attribute(name, score);
        }
    }
}

impl Spans {
    /// The head arrived.
    pub fn begin(&mut self, tracer: &Tracer, client: &HeaderMap, metadata: &HeaderMap) {
        self.root = Some(tracer.begin(TraceParent::extract(client, metadata)));
    }

    /// The trace id of the root span.
    pub fn trace_id(&self) -> Option<TraceId> {
        self.root.as_ref().and_then(RequestTrace::trace_id)
    }

    /// The trace that exemplars may name, until the end: nobody keeps one that is not sampled.
    pub fn sampled(&self, clock: Clock) -> Option<SampledTrace> {
        let id = self.root.as_ref().and_then(RequestTrace::sampled_trace_id)?;
        Some(SampledTrace { id, at: clock.wall_at(clock.now()) })
    }

    /// The request got its id.
    pub fn set_request_id(&self, request_id: &str) {
        if let Some(root) = &self.root {
            root.set_request_id(request_id);
        }
    }

    /// Runs something inside the request's log span.
    pub fn in_scope(&self, action: impl FnOnce()) {
        match &self.root {
            Some(root) => root.log_span().in_scope(action),
            None => action(),
        }
    }

    /// Before the machine hears of an event: `record` is what was known until then.
    pub fn before(&mut self, event: &Event, record: &RequestRecord) {
        match event {
            Event::Body { end: true, .. } if self.selection.is_none() => {
                self.selection = self.root.as_ref().map(RequestTrace::select);
            }
            Event::Prefill(outcome) | Event::GoneAfterPrefill(outcome) => {
                if let Some(span) = self.prefill.take() {
                    match crate::engines::accept_prefill(outcome) {
                        Ok(_) => span.succeed(),
                        Err(_) => span.fail(outcome.failure_class().label()),
                    }
                }
            }
            Event::AnswerChunk { data, .. } if !data.is_empty() && record.timings.first_chunk.is_none() => {
                if let Some(span) = &mut self.decode {
                    span.first_chunk();
                }
            }
            _ => {}
        }
    }

    /// The prefill leg starts; the headers to send with it.
    pub fn prefill(&mut self, record: &RequestRecord, address: &str) -> HeaderMap {
        self.selected(record);
        let (Some(root), Some(pod)) = (&self.root, &record.prefill_pod) else { return HeaderMap::new() };
        let span = root.prefill(pod, address);
        let headers = span.headers().clone();
        self.prefill = Some(span);
        headers
    }

    /// The request goes on to its pod; the headers to send with it.
    pub fn hand_over(&mut self, record: &RequestRecord, address: Option<&str>) -> HeaderMap {
        self.selected(record);
        let Some(root) = &self.root else { return HeaderMap::new() };
        let unknown = PodLabels::default();
        let pod = record.target_pod.as_deref().unwrap_or(&unknown);
        let mut span = root.decode(pod, address.unwrap_or_default());
        if !record.handoff.is_empty() {
            span.attribute("tandem.handoff", record.handoff);
        }
        let headers = span.headers().clone();
        self.decode = Some(span);
        headers
    }

    fn selected(&mut self, record: &RequestRecord) {
        let (Some(mut span), Some(root)) = (self.selection.take(), &self.root) else { return };
        if let Some(decision) = &record.decision {
            decided(&mut span, decision);
        }
        span.succeed();
        root.understood(record.endpoint, record.model.as_deref().unwrap_or_default(), record.stream);
        if let (Some(strategy), Some(pod), Some(routed)) = (&record.strategy, &record.target_pod, record.timings.routed)
        {
            root.selected(&SelectedTarget {
                strategy,
                candidate_pods: record.candidate_pods,
                ready_pods: record.ready_pods,
                pod,
                host: &record.target_host,
                outstanding: record.outstanding_at_start,
                took: routed.since(record.timings.received),
            });
        }
    }

    /// The request ended.
    pub fn finish(&mut self, record: &RequestRecord) {
        let reason = record.outcome.label();
        if let (Some(span), Some(usage)) = (&mut self.decode, record.usage) {
            span.usage(usage);
        }
        for span in [self.selection.take(), self.prefill.take(), self.decode.take()].into_iter().flatten() {
            match record.outcome {
                Outcome::Success => span.succeed(),
                _ => span.fail(reason),
            }
        }
        if let Some(root) = self.root.take() {
            root.finish(record);
        }
    }
}
