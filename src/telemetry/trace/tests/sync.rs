//! Which syncs are recorded, and what they are linked to.

use std::sync::Arc;

use opentelemetry::trace::{SpanContext, SpanId, SpanKind, TraceFlags, TraceId, TraceState};
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};

use super::super::export::tracer_of;
use super::super::sync::WithSyncs;
use super::super::*;
use super::Captured;
use crate::clock::Tick;

/// A charge of the request `number` on a pod.
fn carried(number: u64, pod: u64) -> Carried {
    let request = SpanContext::new(
        TraceId::from_bytes(u128::from(number + 1).to_be_bytes()),
        SpanId::from_bytes((number + 1).to_be_bytes()),
        TraceFlags::SAMPLED,
        false,
        TraceState::default(),
    );
    Carried { request, pods: [Some(pod), None] }
}

fn facts() -> SyncFacts<'static> {
    SyncFacts { model: "m", shares: 1, bytes: 100 }
}

struct Stage {
    captured: Captured,
    left: Arc<LeftCharges>,
    syncs: SyncTracer,
    _provider: SdkTracerProvider,
}

fn stage(sampler: Sampler) -> Stage {
    let captured = Captured::default();
    let provider =
        SdkTracerProvider::builder().with_simple_exporter(captured.clone()).with_sampler(WithSyncs(sampler)).build();
    let left = Arc::new(LeftCharges::default());
    let syncs = SyncTracer::new(Tracer::on(tracer_of(&provider)), Arc::clone(&left));
    Stage { captured, left, syncs, _provider: provider }
}

fn at(millis: u64) -> Tick {
    Tick::from_millis(millis)
}

#[test]
fn only_what_carries_a_sampled_charge_is_recorded() {
    for sampler in [Sampler::AlwaysOn, Sampler::AlwaysOff, Sampler::ParentBased(Box::new(Sampler::AlwaysOff))] {
        let mut stage = stage(sampler);
        assert!(stage.syncs.start(at(0), |_| true, facts).is_none(), "nothing to link to");
        stage.left.leave(carried(1, 7));
        stage.left.leave(carried(2, 8));
        assert!(stage.syncs.start(at(1), |pod| pod == 9, facts).is_none(), "another pod's");
        stage.syncs.start(at(2), |pod| pod == 7, facts).unwrap().answered("done", 3);
        stage.syncs.start(at(3), |pod| pod == 8, facts).unwrap().failed("timeout");
        assert!(stage.syncs.start(at(4), |_| true, facts).is_none(), "linked once");
        let spans = stage.captured.named("tandem.state_sync");
        assert_eq!(spans.len(), 2);
        for (span, number) in spans.iter().zip(1..) {
            assert_eq!((span.parent_span_id, &span.span_kind), (SpanId::INVALID, &SpanKind::Client));
            let links: Vec<_> = span.links.iter().map(|link| link.span_context.clone()).collect();
            assert_eq!(links, [carried(number, 0).request]);
            assert_ne!(span.span_context.trace_id(), links[0].trace_id());
        }
    }
}

#[test]
fn a_charge_that_was_published_before_it_could_be_linked_is_forgotten() {
    let mut stage = stage(Sampler::AlwaysOn);
    stage.left.leave(carried(1, 7));
    assert!(stage.syncs.start(at(0), |_| false, facts).is_none());
    assert!(stage.syncs.start(at(999), |_| false, facts).is_none());
    assert!(stage.syncs.start(at(1000), |_| false, facts).is_none());
    assert!(stage.syncs.start(at(1001), |_| true, facts).is_none());
}

#[test]
fn links_spans_and_memory_are_bounded() {
    let mut stage = stage(Sampler::AlwaysOn);
    for number in 0..1000 {
        stage.left.leave(carried(number, 7));
    }
    // Sixty-four fit; sixteen are linked at a time.
    for sync in 0..4 {
        stage.syncs.start(at(sync), |_| true, facts).unwrap().answered("done", 0);
    }
    assert!(stage.syncs.start(at(5), |_| true, facts).is_none());
    let spans = stage.captured.spans();
    let links: Vec<usize> = spans.iter().map(|span| span.links.len()).collect();
    assert_eq!(links, [16; 4]);
    let lost = |index: usize| {
        let attributes = &spans[index].attributes;
        attributes.iter().find(|pair| pair.key.as_str() == "tandem.sync.links_lost").unwrap().value.to_string()
    };
    assert_eq!((lost(0).as_str(), lost(1).as_str()), ("936", "0"));
    // Ten a second: six are left of this one.
    let mut recorded = 0;
    for millis in 10..999 {
        stage.left.leave(carried(millis, 7));
        recorded += usize::from(stage.syncs.start(at(millis), |_| true, facts).is_some());
    }
    assert_eq!(recorded, 6);
    // What is recorded next is of the next second, and still recent.
    assert!(stage.syncs.start(at(1000), |_| true, facts).is_some());
}

#[test]
fn without_tracing_nothing_is_made() {
    let left = Arc::new(LeftCharges::default());
    left.leave(carried(1, 7));
    assert!(SyncTracer::new(Tracer::off(), left).start(at(0), |_| true, facts).is_none());
}
