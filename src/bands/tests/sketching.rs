//! Bins, counters, merging, fading.

use proptest::prelude::*;

use super::super::sketch::{HALF_LIFE, Tally};
use super::*;
use crate::knobs::BucketServeMode::{Rps, Throughput};

#[test]
fn every_length_has_one_bin_and_bins_join() {
    let layout = Layout::new([0, 100, 2048, 2049, 1 << 30]);
    assert_eq!(layout.first(0), 0);
    assert_eq!(layout.last(layout.len() - 1), u64::MAX);
    for bin in 1..layout.len() {
        assert_eq!(layout.last(bin - 1) + 1, layout.first(bin));
        assert_eq!((layout.bin(layout.first(bin)), layout.bin(layout.last(bin))), (bin, bin));
    }
    for length in 0..64 {
        assert_eq!((layout.first(layout.bin(length)), layout.last(layout.bin(length))), (length, length));
    }
    for length in [64, 65, 1000, 65_536, 1_000_000, (1 << 24) - 1] {
        let bin = layout.bin(length);
        let width = layout.last(bin) - layout.first(bin) + 1;
        assert!(width as f64 <= length as f64 / 31.0, "{length}: {width}");
    }
    for border in [100, 2048, 2049, 1 << 30] {
        assert_eq!(layout.begins(border), Some(layout.bin(border)), "{border}");
        assert_eq!(layout.last(layout.bin(border - 1)), border - 1);
    }
    assert_eq!(layout.begins(1000), None);
    assert_eq!(layout.bin(u64::MAX), layout.len() - 1);
}

#[test]
fn off_until_it_has_bins() {
    let sketch = super::super::Sketch::default();
    sketch.observe(10);
    let mut increments = Increments::default();
    sketch.drain_into(&mut increments);
    assert_eq!(increments, Increments::default());
    assert!(!sketch.is_on());
}

#[test]
fn a_drain_takes_everything_once() {
    let layout = Arc::new(Layout::new([]));
    let bins = Bins::new(layout);
    let sketch = super::super::Sketch::default();
    sketch.replace(Some(Arc::new(bins)));
    for length in [0, 1, 1, 5000, u64::MAX] {
        sketch.observe(length);
    }
    let mut increments = Increments::default();
    sketch.drain_into(&mut increments);
    assert_eq!(increments.total(), Tally { requests: 5, tokens: 5002 + (1 << 32) });
    let before = increments.clone();
    sketch.drain_into(&mut increments);
    assert_eq!(increments, before);
}

#[test]
fn observations_from_many_threads_all_count() {
    let sketch = super::super::Sketch::default();
    sketch.replace(Some(Arc::new(Bins::new(Arc::new(Layout::new([]))))));
    let mut increments = Increments::default();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let sketch = &sketch;
            scope.spawn(move || (0..1000).for_each(|i| sketch.observe(thread * 1000 + i)));
        }
        // Draining beside them loses nothing either.
        for _ in 0..100 {
            sketch.drain_into(&mut increments);
        }
    });
    sketch.drain_into(&mut increments);
    assert_eq!(increments.total(), Tally { requests: 4000, tokens: (0..4000).sum() });
}

#[test]
fn weight_halves_every_half_life_and_is_forgotten_in_the_end() {
    let groups = [group("a", 0, OPEN, 1)];
    let mut picture = picture(&groups, &Lengths::from([(100, 8)]));
    let bin = picture.layout().bin(100);
    let at = |halves: u32| Tick(0).plus(HALF_LIFE * halves);
    for (halves, expected) in [(0, 8.0), (1, 4.0), (2, 2.0), (2, 2.0), (1, 2.0), (3, 1.0)] {
        picture.decay(at(halves));
        assert!((picture.weights(Rps)[bin] - expected).abs() < 1e-9, "{halves}");
        assert!((picture.weights(Throughput)[bin] - expected * 100.0).abs() < 1e-6, "{halves}");
    }
    picture.decay(at(22));
    assert!(picture.weights(Rps)[bin] > 0.0);
    picture.decay(at(24));
    assert_eq!((picture.weights(Rps)[bin], picture.weights(Throughput)[bin]), (0.0, 0.0));
}

#[test]
fn other_bins_show_the_same_traffic() {
    let groups = [group("a", 0, OPEN, 1)];
    let lengths = Lengths::from([(10, 5), (1000, 64), (1 << 25, 2)]);
    let before = picture(&groups, &lengths);
    let bin = before.layout().bin(1000);
    let (first, last) = (before.layout().first(bin), before.layout().last(bin));
    // A border in the middle of a bin, and one in the endless bin above the only traffic there.
    let middle = first + (last - first).div_ceil(2);
    let after = before.in_layout(Arc::new(Layout::new([middle, 1 << 26])));
    let requests = after.weights(Rps);
    assert_eq!(requests[after.layout().bin(10)], 5.0);
    assert_eq!(requests[after.layout().bin(first)] + requests[after.layout().bin(last)], 64.0);
    assert_eq!(requests[after.layout().bin(first)], 32.0);
    assert_eq!(requests[after.layout().bin(1 << 25)], 2.0);
    for mode in [Rps, Throughput] {
        let sum = |picture: &Picture| picture.weights(mode).iter().sum::<f64>();
        assert!((sum(&before) - sum(&after)).abs() < 1e-6);
    }
}

/// Increments of random lengths in a layout with one random border.
fn increments() -> impl Strategy<Value = Increments> {
    (prop::collection::vec(0u64..100_000, 0..40), 1u64..100_000).prop_map(|(lengths, border)| {
        let sketch = super::super::Sketch::default();
        sketch.replace(Some(Arc::new(Bins::new(Arc::new(Layout::new([border]))))));
        for length in &lengths {
            sketch.observe(*length);
        }
        let mut increments = Increments::default();
        sketch.drain_into(&mut increments);
        increments
    })
}

fn merged(parts: &[&Increments]) -> Increments {
    let mut sum = Increments::default();
    for part in parts {
        sum.merge(part);
    }
    sum
}

proptest! {
    #[test]
    fn merging_is_exact_and_its_order_does_not_matter(a in increments(), b in increments(), c in increments()) {
        prop_assert_eq!(merged(&[&a, &b]), merged(&[&b, &a]));
        prop_assert_eq!(merged(&[&merged(&[&a, &b]), &c]), merged(&[&a, &merged(&[&b, &c])]));
        prop_assert_eq!(merged(&[&a, &Increments::default()]), a.clone());
        let all = merged(&[&a, &b, &c]).total();
        let (a, b, c) = (a.total(), b.total(), c.total());
        prop_assert_eq!(all.requests, a.requests + b.requests + c.requests);
        prop_assert_eq!(all.tokens, a.tokens + b.tokens + c.tokens);
    }

    #[test]
    fn two_replicas_see_what_one_would_have(lengths in prop::collection::vec(0u64..100_000, 0..60), every in 1usize..5) {
        let layout = Arc::new(Layout::new([777]));
        let drained = |lengths: &mut dyn Iterator<Item = u64>| {
            let sketch = super::super::Sketch::default();
            sketch.replace(Some(Arc::new(Bins::new(Arc::clone(&layout)))));
            lengths.for_each(|length| sketch.observe(length));
            let mut increments = Increments::default();
            sketch.drain_into(&mut increments);
            increments
        };
        let pick = |mine: bool| {
            lengths.iter().enumerate().filter(move |(i, _)| (i % every == 0) == mine).map(|(_, length)| *length)
        };
        let whole = drained(&mut lengths.iter().copied());
        prop_assert_eq!(merged(&[&drained(&mut pick(true)), &drained(&mut pick(false))]), whole);
    }
}
