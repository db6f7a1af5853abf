//! Plans over time.

use super::*;
use crate::knobs::BucketServeMode::{Rps, Throughput};
use crate::rng::Rng;

fn groups() -> Vec<Group> {
    vec![group("a", 0, OPEN, 1), group("b", 0, OPEN, 2), group("c", 500, OPEN, 1)]
}

/// Lengths that are uniform in the logarithm around a centre.
fn some(rng: &mut Rng, centre: f64, count: usize) -> Vec<u64> {
    (0..count).map(|_| (centre.log2() + 2.0 * (rng.unit() - 0.5)).exp2() as u64).collect()
}

fn absorbed(picture: &mut Picture, lengths: &[u64]) {
    let sketch = super::super::Sketch::default();
    sketch.replace(Some(Arc::new(Bins::new(Arc::clone(picture.layout())))));
    for length in lengths {
        sketch.observe(*length);
    }
    let mut increments = Increments::default();
    sketch.drain_into(&mut increments);
    picture.absorb(&increments);
}

#[test]
fn the_same_traffic_keeps_the_same_plan() {
    let groups = groups();
    let mut rng = Rng::new(3);
    let second = some(&mut rng, 700.0, 50);
    let mut picture = picture(&groups, &Lengths::new());
    absorbed(&mut picture, &second);
    let plan = Plan::new(&groups, Throughput, &picture).unwrap();
    for i in 1..200 {
        picture.decay(Tick::from_millis(i * 1000));
        absorbed(&mut picture, &second);
        let fresh = Plan::new(&groups, Throughput, &picture).unwrap();
        assert!(plan.still_good(&fresh, &picture), "second {i}");
    }
}

#[test]
fn a_plan_that_is_kept_stays_within_the_tolerance() {
    let groups = groups();
    let mut rng = Rng::new(5);
    let mut picture = picture(&groups, &Lengths::new());
    let mut kept: Option<Plan> = None;
    let (mut replaced, steps) = (0, 400u64);
    for i in 0..steps {
        picture.decay(Tick::from_millis(i * 5000));
        // The centre wanders from 300 to 3000 and back.
        let phase = (i as f64 / steps as f64 * std::f64::consts::TAU).cos();
        absorbed(&mut picture, &some(&mut rng, 300.0 * 10f64.powf(0.5 - phase / 2.0), 400));
        let fresh = Plan::new(&groups, Throughput, &picture).unwrap();
        let best = fresh.loads(&picture).into_iter().fold(0.0, f64::max);
        kept = match kept {
            Some(plan) if plan.still_good(&fresh, &picture) => Some(plan),
            _ => {
                replaced += 1;
                Some(fresh)
            }
        };
        let largest = kept.as_ref().unwrap().loads(&picture).into_iter().fold(0.0, f64::max);
        assert!(largest <= best * 1.03, "step {i}: {largest} instead of {best}");
    }
    assert!((2..steps).contains(&replaced), "{replaced}");
}

#[test]
fn a_plan_without_a_band_for_new_traffic_is_replaced() {
    let groups = vec![group("a", 0, 100, 1), group("b", 0, OPEN, 1)];
    let before = picture(&groups, &Lengths::from([(50, 1000)]));
    let old = Plan::new(&groups, Rps, &before).unwrap();
    let now = picture(&groups, &Lengths::from([(50, 1000), (500, 1)]));
    let fresh = Plan::new(&groups, Rps, &now).unwrap();
    assert!(!old.still_good(&fresh, &now));
    assert!(fresh.still_good(&fresh, &now));
    // And one with a band for traffic that is gone is not.
    let fresh = Plan::new(&groups, Rps, &before).unwrap();
    let old = Plan::new(&groups, Rps, &now).unwrap();
    assert!(old.still_good(&fresh, &before));
}

#[test]
fn plans_for_other_questions_are_never_kept() {
    let before = groups();
    let lengths = Lengths::from([(700, 100), (5000, 20)]);
    let seen = picture(&before, &lengths);
    let plan = Plan::new(&before, Rps, &seen).unwrap();
    let mut more = before.clone();
    more[0].replicas += 1;
    assert!(!plan.still_good(&Plan::new(&more, Rps, &seen).unwrap(), &seen));
    assert!(!plan.still_good(&Plan::new(&before, Throughput, &seen).unwrap(), &seen));
    let mut wider = before.clone();
    wider[2].min = 400;
    let seen = picture(&wider, &lengths);
    assert!(!plan.still_good(&Plan::new(&wider, Rps, &seen).unwrap(), &seen));
}
