//! The spans of one exchange: which begin and end at which of its events.
//!
//! A request that is sampled has a span for each of its legs and for each step that can take time, and events for
//! moments. One that is not has those of its legs only, for the headers that go to the engines. The names of the steps are
//! those of the reference gateway (its section 9.4) where it has them.

use std::sync::Arc;

use http::{HeaderMap, Method};
use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanContext, TraceId};

use crate::clock::Clock;
use crate::engines::leg::LegOutcome;
use crate::engines::lookup::{LookedUp, LookupError};
use crate::exchange::{AbortPlan, Event, Exchange, LookupCall};
use crate::state::plane::Claimed;
use crate::telemetry::{
    Branch, Carried, DecisionEssentials, LegSpan, Outcome, PodLabels, RequestRecord, RequestTrace, SampledTrace,
    TraceParent, Tracer,
};

/// The root span and what is open below it. All of them end when this is dropped.
#[derive(Debug, Default)]
pub struct Spans {
    prefill: Option<LegSpan>,
    decode: Option<LegSpan>,
    /// Only there while a sampled request runs.
    steps: Option<Box<Steps>>,
    /// Last, so that the others end first.
    root: Option<RequestTrace>,
}

/// What a sampled request has beside its legs.
#[derive(Debug, Default)]
struct Steps {
    head: Option<LegSpan>,
    body: Option<LegSpan>,
    selection: Option<LegSpan>,
    limits: Option<LegSpan>,
    claim: Option<LegSpan>,
    lookup: Option<LegSpan>,
    answer_head: Option<LegSpan>,
    inference: Option<LegSpan>,
    first_chunk: Option<LegSpan>,
    other_chunks: Option<LegSpan>,
    /// Legs of each kind that have begun, and where the last one went.
    prefills: Begun,
    decodes: Begun,
    /// Why the decode leg at hand is of no use any more.
    lost: Option<&'static str>,
    retried: bool,
    routed: bool,
    /// The state plane has been told whose charge it carries.
    carried: bool,
    /// The pod that the decode leg went to.
    decode_pod: Option<Arc<PodLabels>>,
}

/// The legs of one kind.
#[derive(Debug, Default)]
struct Begun {
    count: u32,
    last: Option<(Arc<str>, SpanContext)>,
}

impl Begun {
    fn note(&mut self, address: &str, span: &LegSpan) {
        self.count += 1;
        self.last = span.context().map(|context| (Arc::from(address), context));
    }
}

impl Steps {
    fn all(&mut self) -> [&mut Option<LegSpan>; 10] {
        [
            &mut self.head,
            &mut self.selection,
            &mut self.limits,
            &mut self.claim,
            &mut self.lookup,
            &mut self.body,
            &mut self.answer_head,
            &mut self.first_chunk,
            &mut self.other_chunks,
            &mut self.inference,
        ]
    }

    /// The answer at hand, if any, is not the one that counts.
    fn drop_answer(&mut self, reason: &'static str) {
        for span in [&mut self.answer_head, &mut self.first_chunk, &mut self.other_chunks, &mut self.inference] {
            if let Some(span) = span.take() {
                span.fail(reason);
            }
        }
    }
}

/// Ends a span that went well.
fn done(span: &mut Option<LegSpan>) {
    if let Some(span) = span.take() {
        span.succeed();
    }
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

/// Ends the span of a prefill leg.
pub(super) fn end_prefill(mut span: LegSpan, outcome: &LegOutcome) {
    if let LegOutcome::Answered { status, .. } = outcome {
        span.answered(status.as_u16());
    }
    match crate::engines::accept_prefill(outcome) {
        Ok(_) => span.succeed(),
        Err(_) => span.fail(outcome.failure_class().label()),
    }
}

impl Spans {
    /// The head arrived.
    pub fn begin(&mut self, tracer: &Tracer, client: &HeaderMap, metadata: &HeaderMap, method: &Method, grpc: bool) {
        let root = tracer.begin(TraceParent::extract(client, metadata));
        if root.records() {
            root.arrived(method, grpc);
            let head = root.step("process.handle_request_headers");
            self.steps = Some(Box::new(Steps { head, ..Steps::default() }));
        }
        self.root = Some(root);
    }

    /// The trace id of the root span.
    pub fn trace_id(&self) -> Option<TraceId> {
        self.root.as_ref().and_then(RequestTrace::trace_id)
    }

    /// The trace is sampled.
    pub fn records(&self) -> bool {
        self.steps.is_some()
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
        if let Event::Prefill(outcome) | Event::GoneAfterPrefill(outcome) = event
            && let Some(span) = self.prefill.take()
        {
            end_prefill(span, outcome);
        }
        let (Some(steps), Some(root)) = (&mut self.steps, &self.root) else { return };
        match event {
            Event::Head(head) if head.end => steps.begin_body(root),
            Event::Body { end: true, .. } if steps.body.is_none() => steps.begin_body(root),
            Event::Prepared(_) => {
                if let Some(span) = &mut steps.selection {
                    span.event("prompt_prepared");
                }
            }
            Event::LimitsCharged(verdict) => match (steps.limits.take(), verdict) {
                (Some(span), Ok(_)) => span.succeed(),
                (Some(span), Err(_)) => span.fail("refused"),
                (None, _) => {}
            },
            Event::Claimed(claimed) => steps.claimed(root, *claimed),
            Event::LookedUp(found) => steps.looked_up(found),
            Event::AnswerHead(head) => {
                done(&mut steps.answer_head);
                steps.answer_head = root.step("process.handle_response_headers");
                if let Some(span) = &mut self.decode {
                    span.answered(head.status.as_u16());
                }
            }
            Event::AnswerChunk { data, .. } if !data.is_empty() && record.timings.first_chunk.is_none() => {
                if let Some(span) = &mut self.decode {
                    span.first_chunk();
                }
                if steps.first_chunk.is_some() {
                    done(&mut steps.first_chunk);
                    steps.other_chunks = root.step("llm.time_from_first_to_last_response_chunk");
                }
            }
            Event::NotAnswered => {
                if let Some(span) = &mut self.decode {
                    span.event("not_answered");
                }
            }
            Event::DecodeFailed { unreachable, .. } => {
                steps.lost = Some(if *unreachable { "decode_unreachable" } else { "decode_failed" });
            }
            Event::Gone | Event::GoneAfterPrefill(_) => root.event("client_gone", Vec::new),
            Event::Shutdown => root.event("shutdown", Vec::new),
            _ => {}
        }
    }

    /// After the machine has heard of it: what has become of the request. The charge that the state plane is to link to.
    pub fn after(&mut self, exchange: &Exchange) -> Option<Carried> {
        let (Some(steps), Some(root)) = (&mut self.steps, &self.root) else { return None };
        let record = exchange.record();
        if let Some(reason) = record.retry.filter(|_| !steps.retried) {
            steps.retried = true;
            root.event("retry", || vec![KeyValue::new("reason", reason.label())]);
            if let Some(span) = self.decode.take() {
                span.fail(reason.label());
            }
            steps.drop_answer(reason.label());
        }
        // Envoy says that another pod took the request.
        if let (Some(span), Some(pod), Some(was)) = (&mut self.decode, &record.target_pod, &steps.decode_pod)
            && pod != was
            && steps.lost.is_none()
        {
            span.event_with("served_by", || vec![KeyValue::new("k8s.pod.name", pod.pod.clone())]);
            steps.decode_pod = Some(Arc::clone(pod));
        }
        if steps.carried {
            return None;
        }
        let (pods, request) = (exchange.charged_pods()?, root.context()?);
        steps.carried = true;
        Some(Carried { request, pods })
    }

    /// The request asks for its places in limits that replicas share.
    pub fn charge_limits(&mut self) {
        if let (Some(steps), Some(root)) = (&mut self.steps, &self.root) {
            steps.limits = root.script("tandem.limits", "rate");
        }
    }

    /// The decision is to be claimed.
    pub fn claim(&mut self, record: &RequestRecord) {
        if let (Some(steps), Some(root)) = (&mut self.steps, &self.root) {
            steps.selected(record);
            steps.claim = root.script("tandem.claim", "claim");
        }
    }

    /// A pod is to be asked something; `known`: the answer is remembered.
    pub fn look_up(&mut self, record: &RequestRecord, call: &LookupCall, known: bool) {
        if let (Some(steps), Some(root)) = (&mut self.steps, &self.root) {
            steps.selected(record);
            if !known {
                let address = call.kind.address(&call.key.address);
                steps.lookup = root.question("tandem.lookup", &address, call.kind.path());
            }
        }
    }

    /// The prefill leg starts; the headers to send with it.
    pub fn prefill(&mut self, record: &RequestRecord, address: &str) -> HeaderMap {
        let (Some(root), Some(pod)) = (&self.root, &record.prefill_pod) else { return HeaderMap::new() };
        let mut resent = 0;
        if let Some(steps) = &mut self.steps {
            steps.selected(record);
            resent = steps.prefills.count;
        }
        let span = root.prefill(pod, address, record.endpoint, resent);
        if let Some(steps) = &mut self.steps {
            steps.prefills.note(address, &span);
        }
        let headers = span.headers().clone();
        self.prefill = Some(span);
        headers
    }

    /// The prefill leg goes on without anybody waiting: its span goes with it.
    pub fn detach_prefill(&mut self) -> Option<LegSpan> {
        self.prefill.take()
    }

    /// The prefill leg is given up.
    pub fn cancel_prefill(&mut self) {
        if let Some(span) = self.prefill.take() {
            span.fail("canceled");
        }
    }

    /// The request goes on to its pod; the headers to send with it.
    pub fn hand_over(&mut self, record: &RequestRecord, address: Option<&str>) -> HeaderMap {
        let span = self.begin_decode(record, address.unwrap_or_default());
        let (Some(span), Some(root)) = (span, &self.root) else { return HeaderMap::new() };
        if let Some(steps) = &mut self.steps {
            steps.routed = true;
            steps.decode_pod.clone_from(&record.target_pod);
            root.event("hand_over", || vec![KeyValue::new("handoff", record.handoff)]);
            steps.inference = root.step("llm.inference");
            if record.stream {
                steps.first_chunk = root.step("llm.time_to_first_response_chunk");
            }
        }
        let headers = span.headers().clone();
        self.decode = Some(span);
        headers
    }

    /// A decode leg of which only its engine will hear: the span and the headers to send.
    pub fn deliver(&mut self, record: &RequestRecord, address: &str) -> Option<LegSpan> {
        let mut span = self.begin_decode(record, address)?;
        span.attribute("tandem.nobody_waits", true);
        Some(span)
    }

    fn begin_decode(&mut self, record: &RequestRecord, address: &str) -> Option<LegSpan> {
        let root = self.root.as_ref()?;
        let mut resent = 0;
        if let Some(steps) = &mut self.steps {
            steps.selected(record);
            let reason = steps.lost.take().unwrap_or("decode_failed");
            if let Some(span) = self.decode.take() {
                span.fail(reason);
            }
            steps.drop_answer(reason);
            resent = steps.decodes.count;
        }
        let unknown = PodLabels::default();
        let pod = record.target_pod.as_deref().unwrap_or(&unknown);
        let mut span = root.decode(pod, address, record.endpoint, resent);
        if !record.handoff.is_empty() {
            span.attribute("tandem.handoff", record.handoff);
        }
        if let Some(steps) = &mut self.steps {
            steps.decodes.note(address, &span);
        }
        Some(span)
    }

    /// For the abort calls to these pods: what makes their spans, and the legs that they are about, in the plan's order.
    pub fn aborts(&self, plan: &AbortPlan) -> (Branch, Vec<Option<SpanContext>>) {
        let (Some(steps), Some(root)) = (&self.steps, &self.root) else { return Default::default() };
        let leg = |target: &Arc<str>| {
            let legs = [&steps.decodes.last, &steps.prefills.last];
            legs.into_iter().flatten().find(|(address, _)| address == target).map(|(_, span)| span.clone())
        };
        (root.branch(), plan.targets.iter().map(leg).collect())
    }

    /// Everything that the machine wanted for the event is done.
    pub fn handled(&mut self) {
        let Some(steps) = &mut self.steps else { return };
        done(&mut steps.head);
        done(&mut steps.answer_head);
        if steps.routed {
            done(&mut steps.body);
        }
    }

    /// The request ended, and everything that it was charged is given back.
    pub fn finish(&mut self, record: &RequestRecord) {
        let reason = record.outcome.label();
        if let (Some(span), Some(usage)) = (&mut self.decode, record.usage) {
            span.usage(usage);
        }
        let steps = self.steps.take();
        let mut steps = steps.map(|steps| *steps).unwrap_or_default();
        let legs = [&mut self.prefill, &mut self.decode];
        for span in steps.all().into_iter().chain(legs).filter_map(Option::take) {
            match record.outcome {
                Outcome::Success => span.succeed(),
                _ => span.fail(reason),
            }
        }
        if let Some(root) = self.root.take() {
            root.event("released", Vec::new);
            root.finish(record);
        }
    }
}

impl Steps {
    /// The body is complete.
    fn begin_body(&mut self, root: &RequestTrace) {
        self.body = root.step("process.handle_request_body");
        self.selection = root.step("process.select_target_pod");
    }

    /// The selection is over.
    fn selected(&mut self, record: &RequestRecord) {
        let Some(mut span) = self.selection.take() else { return };
        if let Some(decision) = &record.decision {
            decided(&mut span, decision);
        }
        span.succeed();
    }

    fn claimed(&mut self, root: &RequestTrace, claimed: Claimed) {
        let Some(mut span) = self.claim.take() else { return };
        let (label, again) = match claimed {
            Claimed::Granted => ("granted", false),
            Claimed::Again => ("again", true),
            Claimed::Unsure => ("unsure", false),
        };
        span.attribute("tandem.claim.outcome", label);
        span.succeed();
        if again {
            self.selection = root.step("process.select_target_pod");
        }
    }

    fn looked_up(&mut self, found: &Result<Arc<LookedUp>, LookupError>) {
        let Some(mut span) = self.lookup.take() else { return };
        match found {
            Ok(_) => {
                span.answered(200);
                span.succeed();
            }
            Err(error) => {
                if let LookupError::Status(status) = error {
                    span.answered(status.as_u16());
                }
                span.fail(error.class().label());
            }
        }
    }
}
