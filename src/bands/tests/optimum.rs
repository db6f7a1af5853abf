//! Plans against the exhaustive optimum, and against the conditions that only an optimum fulfils.

use proptest::prelude::*;

use super::*;
use crate::knobs::BucketServeMode::{Rps, Throughput};

/// Lengths where ranges and traffic like to meet.
fn length() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..200,
        prop::sample::select(vec![127u64, 128, 2047, 2048, 2049, 4096, 8192, 32_768]),
        // Uniform in the logarithm.
        (0.0f64..17.0).prop_map(|exponent| exponent.exp2() as u64),
    ]
}

fn groups() -> impl Strategy<Value = Vec<Group>> {
    let one = (length(), prop::option::of(length()), 0usize..7);
    prop::collection::vec(one, 1..9).prop_map(|rolesets| {
        let group = |(id, (one, other, replicas)): (usize, (u64, Option<u64>, usize))| Group {
            name: format!("rs-{id}").into(),
            min: other.map_or(one, |other| one.min(other)),
            max: other.map_or(OPEN, |other| one.max(other)),
            replicas,
        };
        rolesets.into_iter().enumerate().map(group).collect()
    })
}

fn lengths() -> impl Strategy<Value = Lengths> {
    prop_oneof![
        // Many lengths, few lengths, and everything at the same one.
        prop::collection::btree_map(length(), 1u64..50, 1..120),
        prop::collection::btree_map(length(), 1u64..5000, 1..4),
    ]
}

fn mode() -> impl Strategy<Value = BucketServeMode> {
    prop::sample::select(vec![Throughput, Rps])
}

/// Every roleset that gets part of a length has the least load of all that take this length. Exactly one division of
/// loads fulfils this: the fair one.
fn assert_fair(plan: &Plan, groups: &[Group], lengths: &Lengths, tolerance: f64) {
    let loads = measured(plan, groups, lengths);
    let largest = loads.values().copied().fold(0.0, f64::max);
    for length in lengths.keys() {
        let takers = groups.iter().filter(|group| (group.min..=group.max).contains(length));
        let least = takers.map(|group| loads[&*group.name]).fold(f64::INFINITY, f64::min);
        for (name, _) in parts(plan, *length) {
            let Some(name) = name else { continue };
            assert!(loads[&*name] <= least + tolerance * largest, "{length} goes to {name} of {loads:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn as_good_as_the_optimum(groups in groups(), lengths in lengths(), mode in mode()) {
        let best = optimum(&groups, mode, &lengths);
        let Some(plan) = Plan::new(&groups, mode, &picture(&groups, &lengths)) else {
            prop_assert_eq!(best, 0.0);
            return Ok(());
        };
        let loads = measured(&plan, &groups, &lengths);
        let largest = loads.values().copied().fold(0.0, f64::max);
        prop_assert!(largest <= best * 1.000_001, "{} instead of {}: {:?}", largest, best, loads);
        // Everything that somebody takes was divided, so it cannot be less than the optimum either.
        prop_assert!(largest >= best * 0.999_999, "{} instead of {}: {:?}", largest, best, loads);
        assert_fair(&plan, &groups, &lengths, 1e-6);
    }

    #[test]
    fn bands_cover_their_segment_without_gap_or_overlap(groups in groups(), lengths in lengths(), mode in mode()) {
        let picture = picture(&groups, &lengths);
        let Some(plan) = Plan::new(&groups, mode, &picture) else { return Ok(()) };
        let layout = picture.layout();
        let mut borders: Vec<u64> = borders(&groups).collect();
        borders.sort_unstable();
        borders.dedup();
        let ends = borders.iter().skip(1).map(|next| next - 1).chain([OPEN]);
        for (first, last) in borders.iter().copied().zip(ends) {
            let bins = layout.bin(first)..=layout.bin(last);
            let taken = groups.iter().any(|group| group.min <= first && last <= group.max);
            let weighs = picture.weights(mode)[bins.clone()].iter().sum::<f64>() > 0.0;
            // In a segment with traffic, a walk through its lengths and draws meets each roleset in one piece, and
            // never nobody; in one without, it meets nobody.
            let mut met: Vec<Arc<str>> = Vec::new();
            for bin in bins {
                for draw in [0.0, 0.25, 0.5, 0.75, 1.0 - f64::EPSILON] {
                    let low = plan.at(layout.first(bin), draw);
                    prop_assert_eq!(low, plan.at(layout.last(bin), draw));
                    prop_assert_eq!(low.is_some(), taken && weighs, "{} to {}", first, last);
                    if let Some(band) = low && met.last() != Some(band.roleset) {
                        prop_assert!(!met.contains(band.roleset), "{:?} twice in {}..={}", band, first, last);
                        met.push(Arc::clone(band.roleset));
                    }
                }
            }
        }
        let bands: Vec<_> = plan.bands().collect();
        for pair in bands.windows(2) {
            prop_assert!(pair[0].min <= pair[1].min && pair[0].max <= pair[1].max, "{:?}", pair);
        }
    }

    #[test]
    fn a_plan_knows_its_loads(groups in groups(), lengths in lengths(), mode in mode()) {
        let picture = picture(&groups, &lengths);
        let Some(plan) = Plan::new(&groups, mode, &picture) else { return Ok(()) };
        let measured = measured(&plan, &groups, &lengths);
        let mut sorted = groups.clone();
        sorted.sort();
        let largest = measured.values().copied().fold(0.0, f64::max);
        for (group, load) in sorted.iter().zip(plan.loads(&picture)) {
            // A bin that is cut may hold several lengths; each goes to both sides in the same proportion.
            prop_assert!((measured[&*group.name] - load).abs() <= 1e-6 * largest, "{:?} {}", measured, load);
        }
        prop_assert!(plan.still_good(&plan, &picture));
    }
}

#[test]
fn hundreds_of_rolesets_are_divided_fairly_too() {
    // A chain of overlapping ranges, each with its own load level; besides, a hundred rolesets of one range.
    let chain = (0..300u64).map(|i| group(&format!("c{i}"), i * 50, i * 50 + 180 + i, 1 + (i % 3) as usize));
    let same = (0..100).map(|i| group(&format!("s{i}"), 0, OPEN, 1 + i % 2));
    let lengths: Lengths = (0..3000u64).map(|i| (i * 7 % 16_000, 1 + i * i % 11)).collect();
    for groups in [chain.clone().collect::<Vec<_>>(), chain.chain(same).collect()] {
        let picture = picture(&groups, &lengths);
        for mode in [Rps, Throughput] {
            let plan = Plan::new(&groups, mode, &picture).unwrap();
            let loads = plan.loads(&picture);
            let divided: f64 = {
                let mut sorted = groups.clone();
                sorted.sort();
                loads.iter().zip(&sorted).map(|(load, group)| load * group.replicas as f64).sum()
            };
            let all: f64 = lengths
                .iter()
                .filter(|(length, _)| groups.iter().any(|group| (group.min..=group.max).contains(*length)))
                .map(|(length, requests)| weight(mode, *length) * *requests as f64)
                .sum();
            assert!((divided / all - 1.0).abs() < 1e-6, "{divided} of {all}");
            let by_name: BTreeMap<&str, f64> = {
                let mut sorted: Vec<&Group> = groups.iter().collect();
                sorted.sort();
                sorted.into_iter().map(|group| &*group.name).zip(loads.iter().copied()).collect()
            };
            let largest = loads.iter().copied().fold(0.0, f64::max);
            for length in lengths.keys() {
                let takers = groups.iter().filter(|group| (group.min..=group.max).contains(length));
                let least = takers.map(|group| by_name[&*group.name]).fold(f64::INFINITY, f64::min);
                for draw in [0.1, 0.3, 0.5, 0.7, 0.9] {
                    if let Some(band) = plan.at(*length, draw) {
                        assert!(by_name[&**band.roleset] <= least + 1e-6 * largest, "{length}: {band:?}");
                    }
                }
            }
        }
    }
}
