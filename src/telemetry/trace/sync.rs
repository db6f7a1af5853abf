//! Spans of what the state plane publishes, each in a trace of its own, with links to the requests whose charges it
//! carries.
//!
//! Syncs are hundreds a second and belong to no request. One is recorded only when it carries the charge of a sampled
//! request, and not often. A sampled request leaves its span and the pods that it is charged to in a bounded queue
//! without locks; what finds it full is not linked, which costs nothing but the link.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use opentelemetry::trace::{Link, SpanContext, SpanKind, TraceId, TraceState};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{Sampler, SamplingDecision, SamplingResult, ShouldSample};

use super::leg::{Birth, LegSpan, count};
use super::{Tracer, attributes};
use crate::clock::Tick;

const NAME: &str = "tandem.state_sync";
/// Requests that one sync links to.
pub const MAX_LINKS: usize = 16;
/// Charges that may wait for the task that publishes them.
const MAX_LEFT: usize = 64;
/// Syncs of one model that are recorded in a second.
const PER_SECOND: u32 = 10;
/// A charge that no sync has carried for so long was carried before it could be linked.
const PATIENCE: Duration = Duration::from_secs(1);

/// The charge of a sampled request.
#[derive(Clone, Debug)]
pub struct Carried {
    /// The request's span.
    pub request: SpanContext,
    /// The pods that it is charged to, by the numbers that replicas know them by.
    pub pods: [Option<u64>; 2],
}

/// Where requests leave their charges for the task of their model.
#[derive(Debug)]
pub struct LeftCharges {
    queue: ArrayQueue<Carried>,
    lost: AtomicU64,
}

impl Default for LeftCharges {
    fn default() -> LeftCharges {
        LeftCharges { queue: ArrayQueue::new(MAX_LEFT), lost: AtomicU64::new(0) }
    }
}

impl LeftCharges {
    /// Leaves one. Never waits; a full queue does not take it.
    pub fn leave(&self, carried: Carried) {
        if self.queue.push(carried).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What one sync is about to say and ask.
#[derive(Clone, Copy, Debug)]
pub struct SyncFacts<'a> {
    /// The model.
    pub model: &'a str,
    /// Pods whose shares it publishes.
    pub shares: usize,
    /// Bytes of its arguments.
    pub bytes: usize,
}

/// Makes the spans of one model's syncs. Owned by the task that publishes.
#[derive(Debug, Default)]
pub struct SyncTracer {
    tracer: Tracer,
    left: Arc<LeftCharges>,
    waiting: Vec<(Tick, Carried)>,
    /// The second that is being counted, and what was recorded in it.
    second: u64,
    recorded: u32,
}

impl SyncTracer {
    /// One that serves this queue.
    pub fn new(tracer: Tracer, left: Arc<LeftCharges>) -> SyncTracer {
        SyncTracer { tracer, left, ..SyncTracer::default() }
    }

    /// The span of a sync that starts now, if it carries the charge of a sampled request: `carries` says which pods'
    /// shares it publishes. Shares are absolute, so that whichever sync names the pod carries the charge.
    pub fn start<'a>(
        &mut self,
        now: Tick,
        carries: impl Fn(u64) -> bool,
        facts: impl FnOnce() -> SyncFacts<'a>,
    ) -> Option<SyncSpan> {
        if self.waiting.is_empty() && self.left.queue.is_empty() {
            return None;
        }
        let sdk = self.tracer.sdk.clone()?;
        while self.waiting.len() < MAX_LEFT
            && let Some(carried) = self.left.queue.pop()
        {
            self.waiting.push((now, carried));
        }
        let second = now.0 / 1_000_000_000;
        if second != self.second {
            (self.second, self.recorded) = (second, 0);
        }
        let mut links = Vec::new();
        if self.recorded < PER_SECOND {
            self.waiting.retain(|(_, carried)| {
                let carried_here = links.len() < MAX_LINKS && carried.pods.iter().flatten().any(|pod| carries(*pod));
                if carried_here {
                    links.push(Link::with_context(carried.request.clone()));
                }
                !carried_here
            });
        }
        self.waiting.retain(|(since, _)| now.since(*since) < PATIENCE);
        if links.is_empty() {
            return None;
        }
        self.recorded += 1;
        let mut attributes = attributes::script("ledger_sync");
        attributes.push(KeyValue::new("tandem.sync.links_lost", count(self.left.lost.swap(0, Ordering::Relaxed))));
        let facts = facts();
        attributes.extend([
            KeyValue::new("model", facts.model.to_owned()),
            KeyValue::new("tandem.sync.shares", count(facts.shares as u64)),
            KeyValue::new("tandem.sync.sent_bytes", count(facts.bytes as u64)),
        ]);
        let birth = Birth { name: NAME, kind: SpanKind::Client, attributes, links };
        Some(SyncSpan(LegSpan::inside(&sdk, &Context::new(), birth)))
    }
}

/// The span of one sync.
#[derive(Debug)]
pub struct SyncSpan(LegSpan);

impl SyncSpan {
    /// It was answered: with this status, and so many pods that others have changed.
    pub fn answered(mut self, status: &'static str, changes: usize) {
        self.0.attribute("tandem.sync.result", status);
        self.0.attribute("tandem.sync.changes", count(changes as u64));
        self.0.succeed();
    }

    /// It was not, for this reason.
    pub fn failed(self, reason: &'static str) {
        self.0.fail(reason);
    }
}

/// Samples what the operator's sampler samples, and syncs that are linked to what it sampled. These have no parent, so
/// that a share of one in a hundred would record one in a hundred of them.
#[derive(Clone, Debug)]
pub(super) struct WithSyncs(pub(super) Sampler);

impl ShouldSample for WithSyncs {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace_id: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        if name == NAME && !links.is_empty() {
            return SamplingResult {
                decision: SamplingDecision::RecordAndSample,
                attributes: Vec::new(),
                trace_state: TraceState::default(),
            };
        }
        self.0.should_sample(parent, trace_id, name, kind, attributes, links)
    }
}
