//! Plans by hand: borders, shares, what has no plan.

use super::*;
use crate::knobs::BucketServeMode::{Rps, Throughput};

fn plan(groups: &[Group], mode: BucketServeMode, lengths: &[(u64, u64)]) -> Plan {
    Plan::new(groups, mode, &picture(groups, &lengths.iter().copied().collect())).unwrap()
}

/// The roleset at the lower and at the upper end of the draws.
fn ends(plan: &Plan, length: u64) -> (Option<String>, Option<String>) {
    let at = |draw| plan.at(length, draw).map(|band| band.roleset.to_string());
    (at(0.0), at(1.0 - f64::EPSILON))
}

fn both(name: &str) -> (Option<String>, Option<String>) {
    (Some(name.to_owned()), Some(name.to_owned()))
}

fn shown(plan: &Plan) -> Vec<(&str, u64, u64)> {
    plan.bands().map(|band| (&**band.roleset, band.min, band.max)).collect()
}

#[test]
fn no_weight_no_plan() {
    for groups in [vec![], vec![group("a", 0, OPEN, 1)], vec![group("a", 0, 100, 1), group("b", 50, 200, 1)]] {
        for mode in [Rps, Throughput] {
            assert!(Plan::new(&groups, mode, &picture(&groups, &Lengths::new())).is_none());
        }
    }
    // Traffic that no roleset takes, ranges that take nothing, prompts without a token.
    for (groups, length) in [
        (vec![group("a", 10, 20, 1)], 21),
        (vec![group("a", 10, 20, 1)], 9),
        (vec![group("a", 20, 10, 1)], 15),
        (vec![group("a", 0, OPEN, 1)], 0),
    ] {
        assert!(Plan::new(&groups, Throughput, &picture(&groups, &Lengths::from([(length, 5)]))).is_none());
    }
    let groups = [group("a", 0, OPEN, 1)];
    assert_eq!(ends(&plan(&groups, Rps, &[(0, 5)]), 0), both("a"));
}

#[test]
fn disjoint_ranges_stay_as_they_are() {
    let groups = [group("short", 0, 100, 1), group("long", 101, OPEN, 1)];
    let plan = plan(&groups, Throughput, &[(100, 3), (101, 7)]);
    assert_eq!(shown(&plan), [("short", 0, 100), ("long", 101, OPEN)]);
    for (length, name) in [(0, "short"), (100, "short"), (101, "long"), (OPEN, "long")] {
        assert_eq!(ends(&plan, length), both(name), "{length}");
    }
}

#[test]
fn equal_ranges_are_cut_at_a_quantile() {
    let groups = [group("a", 0, OPEN, 1), group("b", 0, OPEN, 1)];
    // By tokens one long prompt weighs as much as ten short ones; by requests half of the short ones go to each.
    let lengths = [(10, 10), (100, 1)];
    let tokens = plan(&groups, Throughput, &lengths);
    assert_eq!((ends(&tokens, 10), ends(&tokens, 100)), (both("a"), both("b")));
    assert_eq!((ends(&tokens, 0), ends(&tokens, OPEN)), (both("a"), both("b")));
    let requests = plan(&groups, Rps, &lengths);
    assert_eq!(ends(&requests, 10), (Some("a".into()), Some("b".into())));
    assert_eq!((ends(&requests, 9), ends(&requests, 100)), (both("a"), both("b")));
    let loads = measured(&requests, &groups, &lengths.into());
    assert!((loads["a"] - 5.5).abs() < 1e-6 && (loads["b"] - 5.5).abs() < 1e-6, "{loads:?}");
}

#[test]
fn traffic_of_one_length_is_divided_by_replicas() {
    let groups = [group("a", 0, OPEN, 3), group("b", 0, 4096, 1), group("c", 2000, OPEN, 0)];
    let plan = plan(&groups, Throughput, &[(2048, 500)]);
    let mut got: BTreeMap<String, u32> = BTreeMap::new();
    for seed in 0..20_000 {
        *got.entry(plan.band(2048, seed).unwrap().roleset.to_string()).or_default() += 1;
    }
    for (name, expected) in [("a", 12_000.0), ("b", 4_000.0), ("c", 4_000.0)] {
        assert!((f64::from(got[name]) / expected - 1.0).abs() < 0.03, "{got:?}");
    }
    assert_eq!(plan.band(2048, 7), plan.band(2048, 7));
}

#[test]
fn traffic_at_the_border_of_a_range_is_on_the_right_side() {
    // All traffic at the last length that `short` takes, in the middle of what would be a bin of 64 lengths.
    for (border, inside) in [(2080u64, true), (2079, false)] {
        let groups = [group("open", 0, OPEN, 1), group("short", 0, border, 1)];
        let lengths = Lengths::from([(2080, 1000)]);
        let plan = Plan::new(&groups, Throughput, &picture(&groups, &lengths)).unwrap();
        let loads = measured(&plan, &groups, &lengths);
        let expected = if inside { 0.5 } else { 0.0 };
        assert!((loads["short"] / 2_080_000.0 - expected).abs() < 0.001, "{border}: {loads:?}");
        assert!((loads["open"] / 2_080_000.0 - (1.0 - expected)).abs() < 0.001, "{border}: {loads:?}");
    }
}

#[test]
fn a_roleset_is_charged_with_what_only_it_can_serve() {
    // `long` has 600 of its own, `short` 200: of the 400 that both take, `short` gets all.
    let groups = [group("short", 0, 199, 1), group("long", 100, OPEN, 1)];
    let lengths = Lengths::from([(50, 200), (150, 400), (500, 600)]);
    let plan = Plan::new(&groups, Rps, &picture(&groups, &lengths)).unwrap();
    let loads = measured(&plan, &groups, &lengths);
    assert_eq!((loads["short"].round(), loads["long"].round()), (600.0, 600.0));
    // A roleset that is overloaded by its own share gets nothing of what others can take, and those divide it fairly.
    let groups = [group("a", 0, 99, 1), group("b", 50, OPEN, 1), group("c", 50, OPEN, 3)];
    let lengths = Lengths::from([(10, 1000), (70, 100), (300, 100)]);
    let plan = Plan::new(&groups, Rps, &picture(&groups, &lengths)).unwrap();
    let loads = measured(&plan, &groups, &lengths);
    for (name, expected) in [("a", 1000.0), ("b", 50.0), ("c", 50.0)] {
        assert!((loads[name] - expected).abs() < 0.5, "{loads:?}");
    }
}

#[test]
fn a_little_that_is_left_over_counts_as_much_as_a_lot() {
    // What is left over of 2048 tokens is far less than of 416, and both are overloaded.
    let groups = [group("a", 0, 1, 2), group("b", 0, OPEN, 1), group("c", 0, 2047, 1)];
    let lengths = Lengths::from([(416, 15), (2048, 1)]);
    let plan = Plan::new(&groups, Rps, &picture(&groups, &lengths)).unwrap();
    let loads = measured(&plan, &groups, &lengths);
    assert!((loads["b"] - 8.0).abs() < 1e-6 && (loads["c"] - 8.0).abs() < 1e-6, "{loads:?}");
}

#[test]
fn lengths_like_none_before_have_no_band() {
    let groups = [group("a", 0, 100, 1), group("b", 0, OPEN, 1), group("c", 200, OPEN, 1)];
    let plan = plan(&groups, Rps, &[(50, 10)]);
    assert_eq!((ends(&plan, 100), ends(&plan, 101), ends(&plan, 300)), (both("b"), (None, None), (None, None)));
}

#[test]
fn the_end_of_a_band_is_told() {
    let groups = [group("a", 0, OPEN, 1), group("b", 0, OPEN, 1)];
    let plan = plan(&groups, Throughput, &[(10, 10), (100, 1)]);
    let (low, high) = (plan.at(10, 0.5).unwrap(), plan.at(100, 0.5).unwrap());
    assert!((10..100).contains(&low.max), "{low:?}");
    assert_eq!((&**low.roleset, &**high.roleset, high.max), ("a", "b", OPEN));
}

#[test]
fn order_of_groups_and_repetition_change_nothing() {
    let mut groups =
        vec![group("a", 0, 500, 2), group("b", 100, OPEN, 1), group("c", 100, OPEN, 2), group("d", 0, OPEN, 1)];
    let lengths: Lengths = (1..40).map(|i| (i * i, 1 + i % 7)).collect();
    let first = Plan::new(&groups, Throughput, &picture(&groups, &lengths)).unwrap();
    groups.reverse();
    let second = Plan::new(&groups, Throughput, &picture(&groups, &lengths)).unwrap();
    assert_eq!(shown(&first), shown(&second));
}
