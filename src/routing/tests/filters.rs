//! `external-filter`: which pods may serve, for every strategy.

use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

use super::super::fixtures::*;
use super::super::*;
use crate::fleet::Role;

fn selector(text: &str) -> Selector {
    Selector::parse(text).unwrap()
}

fn run(model: &Model, request: &RequestFacts<'_>, strategy: Strategy, seed: u64) -> Result<Decision, RoutingError> {
    select(model, request, strategy, &PdKnobs::default(), context(&index(), seed))
}

/// Rolesets `a` and `b`; the prefill pod of `a` and both pods of `b` are in zone 1, the decode pod of `a` in zone 2.
fn zones() -> Model {
    let pod = |builder: Builder, role, roleset: &str, zone: &str| {
        builder.pod(role, Some(roleset), Setup::default()).label("zone", zone).label("roleset-name", roleset)
    };
    let builder = pod(Builder::new(), Role::Prefill, "a", "1");
    let builder = pod(builder, Role::Decode, "a", "2");
    let builder = pod(builder, Role::Prefill, "b", "1");
    pod(builder, Role::Decode, "b", "1").build()
}

#[test]
fn pd_takes_only_rolesets_that_are_complete_behind_the_filter() {
    let model = zones();
    let pairs = |text: &str| {
        let filter = selector(text);
        let facts = RequestFacts { filter: Some(&filter), ..request() };
        let mut seen = Vec::new();
        for seed in 0..40 {
            let decision = run(&model, &facts, Strategy::Pd, seed).map_err(|error| error.to_string())?;
            seen.push((slots(&decision.target), decision.candidates));
        }
        seen.sort_unstable();
        seen.dedup();
        Ok::<_, String>(seen)
    };
    assert_eq!(pairs("zone"), Ok(vec![((Some(0), 1), (2, 2)), ((Some(2), 3), (2, 2))]));
    assert_eq!(pairs("zone=1"), Ok(vec![((Some(2), 3), (1, 1))]));
    assert_eq!(pairs("roleset-name notin (b)"), Ok(vec![((Some(0), 1), (1, 1))]));
    let error = pairs("zone=2").unwrap_err();
    assert_eq!(
        error, "prefill pods are not ready: prefill=0, decode=1; external-filter matches 1 of 4 ready pods",
        "the filter is named as the cause"
    );
    let error = pairs("zone=1,roleset-name=a").unwrap_err();
    assert!(error.starts_with("decode pods are not ready: prefill=1, decode=0"), "{error}");
    assert_eq!(pairs("zone=3").unwrap_err(), "external-filter matches none of 4 ready pods");
}

#[test]
fn requests_that_cannot_be_split_and_combined_pods_are_filtered_too() {
    let filter = selector("zone=1");
    let facts = RequestFacts { filter: Some(&filter), splittable: Splittable::No, ..request() };
    let model = zones();
    for seed in 0..20 {
        assert_eq!(slots(&run(&model, &facts, Strategy::Pd, seed).unwrap().target), (None, 3));
    }
    let model = Builder::new().roleset("a", 1, 1).combined(None).combined(None).label("zone", "1").build();
    for splittable in [Splittable::Yes, Splittable::No] {
        let facts = RequestFacts { splittable, ..facts };
        for seed in 0..20 {
            assert_eq!(slots(&run(&model, &facts, Strategy::Pd, seed).unwrap().target), (None, 3));
        }
    }
}

#[test]
fn a_bucket_that_only_filtered_pods_fit_is_no_bucket() {
    let range = |max| Setup { range: Some((0, Some(max))), combined: false };
    let model = Builder::new()
        .pod(Role::Prefill, Some("short"), range(10))
        .label("zone", "1")
        .pod(Role::Decode, Some("short"), range(10))
        .label("zone", "1")
        .ranged("long", 1, 1, range(100))
        .build();
    let knobs = PdKnobs { prompt_length_bucketing: true, ..PdKnobs::default() };
    let filter = selector("zone=1");
    let facts = RequestFacts { filter: Some(&filter), length: PromptLength::Exactly(50), ..request() };
    let error = select(&model, &facts, Strategy::Pd, &knobs, context(&index(), 1)).unwrap_err();
    assert_eq!(error, RoutingError::NoBucket { length: 50 });
    let facts = RequestFacts { filter: None, ..facts };
    assert!(select(&model, &facts, Strategy::Pd, &knobs, context(&index(), 1)).is_ok());
}

/// A session id that names a pod behind the filter is as good as none.
#[test]
fn the_filter_wins_over_the_session() {
    let model = zones();
    let filter = selector("zone=1");
    let affinity = Affinity { address: Some("10.0.0.1:8000"), key: None };
    for seed in 0..20 {
        let facts = RequestFacts { filter: Some(&filter), affinity, ..request() };
        assert_ne!(slots(&run(&model, &facts, Strategy::SessionAffinity, seed).unwrap().target).1, 1);
        let facts = RequestFacts { affinity, ..request() };
        assert_eq!(slots(&run(&model, &facts, Strategy::SessionAffinity, seed).unwrap().target).1, 1);
    }
}

proptest! {
    /// Whatever the strategy: every pod of the decision passes the filter, and there is one whenever some pod passes.
    #[test]
    fn decisions_pass_the_filter(
        zones in proptest::collection::vec(proptest::option::of(0u8..3), 1..8),
        operator in proptest::sample::select(&["zone=1", "zone!=1", "zone in (0,2)", "zone notin (0,2)", "zone", "!zone"][..]),
        strategy in super::properties::plain_strategy(),
        seed in any::<u64>(),
    ) {
        let builder = zones.iter().fold(Builder::new(), |builder, zone| {
            let builder = builder.pod(Role::Other, None, Setup::default());
            match zone {
                Some(zone) => builder.label("zone", &zone.to_string()),
                None => builder,
            }
        });
        let model = builder.build();
        let filter = selector(operator);
        let passing = model.pods.iter().filter(|pod| filter.matches(&pod.spec.labels)).count();
        let affinity = Affinity { address: Some("10.0.0.0:8000"), key: Some(b"k") };
        let facts = RequestFacts { filter: Some(&filter), affinity, hashes: &[1, 2, 3], ..request() };
        match run(&model, &facts, strategy, seed) {
            Ok(decision) => {
                let Target::Single { pod, .. } = &decision.target else { panic!("one pod") };
                prop_assert!(filter.matches(&pod.spec.labels));
                prop_assert_eq!(decision.candidates, (0, passing));
            }
            Err(error) => {
                prop_assert_eq!(passing, 0);
                prop_assert_eq!(error, RoutingError::Filtered { routable: zones.len() });
            }
        }
    }
}
