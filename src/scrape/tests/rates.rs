use proptest::prelude::*;

use crate::clock::Tick;
use crate::scrape::{DrainRate, Throughput};

const fn ms(millis: u64) -> Tick {
    Tick::from_millis(millis)
}

/// Feeds (milliseconds, value) pairs and returns the last answer.
fn throughput(samples: &[(u64, f64)]) -> Option<f64> {
    let mut rate = Throughput::default();
    samples.iter().map(|&(at, value)| rate.push(ms(at), value)).last().flatten()
}

fn drain(samples: impl IntoIterator<Item = (u64, u64)>) -> Option<f64> {
    let mut rate = DrainRate::default();
    samples.into_iter().map(|(at, value)| rate.push(ms(at), value)).last().flatten()
}

#[test]
fn throughput_needs_two_samples_some_time_apart() {
    assert_eq!(throughput(&[]), None);
    assert_eq!(throughput(&[(0, 5.0)]), None);
    assert_eq!(throughput(&[(0, 5.0), (249, 9.0)]), None);
    assert_eq!(throughput(&[(0, 5.0), (250, 9.0)]), Some(16.0));
    assert_eq!(throughput(&[(0, 5.0), (0, 9.0)]), None);
    assert_eq!(throughput(&[(0, 5.0), (1000, 5.0)]), Some(0.0));
}

#[test]
fn a_counter_that_falls_begins_anew() {
    let rate = |samples: &[(u64, f64)]| throughput(samples);
    // By how little it fell does not matter, nor how large it is: it is no growth.
    for fallen in [30.0, 0.0, 999.0, 999.9] {
        assert_eq!(rate(&[(0, 1000.0), (1000, fallen)]), None, "{fallen}");
        assert_eq!(rate(&[(0, 1000.0), (1000, fallen), (1249, fallen + 5.0)]), None, "{fallen}");
        assert_eq!(rate(&[(0, 1000.0), (1000, fallen), (1500, fallen + 5.0)]).map(f64::round), Some(10.0), "{fallen}");
    }
    let large = 1e9;
    assert_eq!(rate(&[(0, large), (1000, large + 500.0), (2000, large + 499.0)]), None);
    assert_eq!(rate(&[(0, large), (1000, large - 1.0), (2000, large + 99.0)]), Some(100.0));
    // What came before the fall does not count.
    assert_eq!(rate(&[(0, 0.0), (1000, 9000.0), (2000, 10.0), (3000, 60.0)]), Some(50.0));
}

#[test]
fn throughput_forgets_what_is_older_than_its_window() {
    let mut rate = Throughput::default();
    let mut last = None;
    for step in 0..400u64 {
        // 100 tokens/s for ten seconds, then silence.
        last = rate.push(ms(step * 50), (step.min(200) * 5) as f64);
        if step == 199 {
            assert!((last.unwrap() - 100.0).abs() < 1e-9, "{last:?}");
        }
    }
    assert_eq!(last, Some(0.0));
}

#[test]
fn throughput_works_with_long_intervals_and_after_gaps() {
    assert_eq!(throughput(&[(0, 0.0), (10_000, 100.0), (20_000, 300.0)]), Some(20.0));
    assert_eq!(throughput(&[(0, 0.0), (50, 1.0), (60_000, 61.0)]).map(f64::round), Some(1.0));
}

#[test]
fn drain_rate_needs_ten_seconds() {
    assert_eq!(drain([]), None);
    assert_eq!(drain([(0, 0)]), None);
    assert_eq!(drain([(0, 0), (4_999, 9)]), None, "within the spacing there is one sample");
    assert_eq!(drain([(0, 0), (5_000, 5)]), None);
    assert_eq!(drain([(0, 0), (5_000, 5), (9_999, 9)]), None);
    assert_eq!(drain([(0, 0), (5_000, 5), (10_000, 10)]), Some(1.0));
    assert_eq!(drain([(0, 0), (10_000, 0)]), Some(0.0));
}

#[test]
fn drain_rate_looks_back_a_minute() {
    // One a second for two minutes, then two a second: the base is the sample 60 s before.
    let count = |second: u64| if second <= 120 { second } else { 120 + 2 * (second - 120) };
    let run = |until: u64| drain((0..=until).map(|second| (second * 1000, count(second))));
    assert_eq!(run(60), Some(1.0));
    assert_eq!(run(120), Some(1.0));
    assert_eq!(run(150), Some(1.5));
    assert_eq!(run(180), Some(2.0));
    assert_eq!(run(182), Some(2.0), "between two samples the newest sample counts");
    // Only one sample, a long time ago: nearest to a minute ago is that one, until it is too old.
    assert_eq!(drain([(0, 0), (170_000, 170)]), Some(1.0));
    assert_eq!(drain([(0, 0), (180_001, 170)]), None);
}

#[test]
fn drain_rate_begins_anew_when_its_count_falls() {
    assert_eq!(drain([(0, 500), (10_000, 20)]), None);
    assert_eq!(drain([(0, 500), (10_000, 499), (20_000, 509)]), Some(1.0));
    // Between two samples, too: a count that came back is not seen as one that grew.
    assert_eq!(drain([(0, 500), (5_000, 505), (7_000, 1), (17_000, 11)]), Some(1.0));
}

proptest! {
    #[test]
    fn rates_are_never_negative_nor_infinite(
        samples in proptest::collection::vec((0..20_000u64, 0..1_000_000u32), 0..200)
    ) {
        let (mut throughput, mut drain, mut now) = (Throughput::default(), DrainRate::default(), 0);
        for (after, value) in samples {
            now += after;
            for rate in [throughput.push(ms(now), f64::from(value)), drain.push(ms(now), u64::from(value))].into_iter().flatten() {
                prop_assert!(rate.is_finite() && rate >= 0.0);
            }
        }
    }
}
