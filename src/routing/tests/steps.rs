//! Step by step: who is eligible, what errors say, where single pods come in, which fast path narrows what.

use super::super::fixtures::*;
use super::super::*;
use crate::clock::Tick;
use crate::fleet::{Role, Signals};

fn bucketing() -> PdKnobs {
    PdKnobs { prompt_length_bucketing: true, ..PdKnobs::default() }
}

fn long(tokens: u64) -> RequestFacts<'static> {
    RequestFacts { length: PromptLength::Exactly(tokens), ..request() }
}

fn run(model: &Model, request: &RequestFacts<'_>, knobs: &PdKnobs, seed: u64) -> Result<Decision, RoutingError> {
    let index = index();
    select(model, request, Strategy::Pd, knobs, context(&index, seed))
}

/// The targets of many seeds, sorted, without repeats.
fn reachable(model: &Model, request: &RequestFacts<'_>, knobs: &PdKnobs) -> Vec<(Option<u32>, u32)> {
    let mut all: Vec<_> = (0..100).map(|seed| slots(&run(model, request, knobs, seed).unwrap().target)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn reason(decision: &Decision) -> Option<SingleReason> {
    match decision.target {
        Target::Single { reason, .. } => Some(reason),
        Target::Pair { .. } => None,
    }
}

#[test]
fn strategies_by_name() {
    for strategy in Strategy::SINGLES {
        assert_eq!(Strategy::parse(&strategy.name()), Ok(strategy));
    }
    assert!(Strategy::parse("PD").is_err());
}

#[test]
fn r37_errors_say_which_roleset_lacks_what() {
    let plain = Setup::default();
    for (builder, expected) in [
        (Builder::new(), "no ready pods"),
        (Builder::new().roleset("a", 1, 0), "decode pods are not ready: prefill=1, decode=0; roleset a lacks decode"),
        (Builder::new().roleset("a", 0, 2), "prefill pods are not ready: prefill=0, decode=2; roleset a lacks prefill"),
        (
            Builder::new().roleset("a", 1, 0).roleset("b", 0, 1),
            "prefill pods are not ready: prefill=1, decode=1; roleset a lacks decode; roleset b lacks prefill",
        ),
        (
            Builder::new().pod(Role::Prefill, None, plain).pod(Role::Decode, None, plain),
            "prefill pods are not ready: prefill=1, decode=1; 2 prefill or decode pods have no roleset-name",
        ),
        (Builder::new().pod(Role::Other, None, plain), "prefill pods are not ready: prefill=0, decode=0"),
    ] {
        let model = builder.build();
        assert_eq!(run(&model, &request(), &PdKnobs::default(), 1).unwrap_err().to_string(), expected);
        let unsplittable = RequestFacts { splittable: Splittable::No, ..request() };
        assert_eq!(run(&model, &unsplittable, &PdKnobs::default(), 1).unwrap_err().to_string(), expected);
    }
}

#[test]
fn r37_with_a_combined_pod_it_falls_back() {
    let model = Builder::new().roleset("a", 1, 0).roleset("b", 0, 1).combined(None).build();
    for knobs in [PdKnobs::default(), bucketing()] {
        let decision = run(&model, &long(10), &knobs, 1).unwrap();
        assert_eq!((slots(&decision.target), reason(&decision)), ((None, 2), Some(SingleReason::CombinedFallback)));
    }
}

#[test]
fn error_texts_are_bounded_and_clean() {
    let mut builder = Builder::new();
    for i in 0..50 {
        builder = builder.roleset(&format!("{i}\r\n{}", "x".repeat(5000)), 1, 0);
    }
    let text = run(&builder.build(), &request(), &PdKnobs::default(), 1).unwrap_err().to_string();
    assert!(text.len() < 1000 && text.ends_with("; 42 more rolesets are incomplete"), "{text}");
    assert!(!text.contains(char::is_control));
}

#[test]
fn a_roleset_needs_both_sides_in_the_bucket() {
    let range = |min, max| Setup { range: Some((min, max)), combined: false };
    let model = Builder::new()
        .ranged("short", 1, 1, range(0, Some(100)))
        .ranged("long", 1, 1, range(101, None))
        .pod(Role::Prefill, Some("mixed"), range(0, Some(100)))
        .pod(Role::Decode, Some("mixed"), range(101, None))
        .pod(Role::Prefill, Some("never"), range(9, Some(3)))
        .pod(Role::Decode, Some("never"), range(0, None))
        .build();
    assert_eq!(largest_bound(&model, None), Some(101));
    for (tokens, expected) in [(0, (Some(0), 1)), (100, (Some(0), 1)), (101, (Some(2), 3)), (1 << 40, (Some(2), 3))] {
        assert_eq!(reachable(&model, &long(tokens), &bucketing()), [expected], "{tokens}");
    }
    let more = RequestFacts { length: PromptLength::MoreThan(101), ..request() };
    assert_eq!(reachable(&model, &more, &bucketing()), [(Some(2), 3)]);
    // Without bucketing, ranges mean nothing.
    assert_eq!(reachable(&model, &long(5), &PdKnobs::default()).len(), 4);
}

#[test]
fn no_bucket_goes_to_a_fitting_combined_pod_at_random_and_never_to_another_bucket() {
    let range = Setup { range: Some((0, Some(100))), combined: false };
    let pairs = || Builder::new().ranged("a", 1, 1, range);
    let model = pairs().build();
    assert_eq!(run(&model, &long(101), &bucketing(), 1).unwrap_err(), RoutingError::NoBucket { length: 101 });
    assert_eq!(
        run(&model, &long(101), &bucketing(), 1).unwrap_err().to_string(),
        "no prompt-length bucket matches prompt length 101 and no combined pods available"
    );
    let counted_partly = RequestFacts { length: PromptLength::MoreThan(100), ..request() };
    assert_eq!(run(&model, &counted_partly, &bucketing(), 1).unwrap_err(), RoutingError::NoBucket { length: 101 });

    let model = pairs().combined(Some((0, None))).combined(Some((200, None))).combined(None).build();
    assert_eq!(reachable(&model, &long(150), &bucketing()), [(None, 2), (None, 4)]);
    assert_eq!(run(&model, &long(150), &bucketing(), 1).unwrap().candidates, (0, 2));
    // A fitting pair is preferred.
    assert_eq!(reachable(&model, &long(50), &bucketing()), [(Some(0), 1)]);
    let model = pairs().combined(Some((200, None))).build();
    assert_eq!(run(&model, &long(150), &bucketing(), 1).unwrap_err(), RoutingError::NoBucket { length: 150 });
}

#[test]
fn a_pod_labelled_prefill_or_decode_is_never_combined() {
    let both = Setup { range: None, combined: true };
    let model = Builder::new().pod(Role::Prefill, Some("a"), both).build();
    assert!(run(&model, &long(1), &bucketing(), 1).is_err());
}

#[test]
fn largest_bound_is_over_all_pods_and_only_finite_ones() {
    for (ranges, expected) in [
        (vec![], None),
        (vec![None], None),
        (vec![Some((0, None))], None),
        (vec![Some((0, Some(2048)))], Some(2048)),
        (vec![Some((2048, None)), Some((0, Some(100)))], Some(2048)),
        (vec![Some((50, Some(9))), None], None),
        (vec![Some((5, Some(10))), Some((5, Some(20)))], Some(20)),
    ] {
        let builder = ranges.iter().fold(Builder::new(), |builder, range| {
            builder.pod(Role::Prefill, Some("a"), Setup { range: *range, combined: false })
        });
        assert_eq!(largest_bound(&builder.build(), None), expected, "{ranges:?}");
    }
}

/// Waiting, running, drain rate.
fn queue(waiting: f64, running: f64, drain: Option<f64>) -> Signals {
    Signals { waiting: Some(waiting), running: Some(running), drain_rate: drain, ..fresh() }
}

#[test]
fn combined_takes_over_when_pairs_are_loaded_and_it_is_idle() {
    let idle = queue(0.0, 0.0, Some(1.0));
    for (combined, prefill, decode, expected) in [
        // The document's scores: queued / drain rate, idle below 0.25, loaded above 1.
        (queue(0.2, 0.2, Some(1.0)), queue(11.0, 1.0, Some(10.0)), idle.clone(), true),
        (queue(0.25, 0.25, Some(1.0)), queue(11.0, 1.0, Some(10.0)), idle.clone(), false),
        (idle.clone(), queue(10.0, 1.0, Some(10.0)), idle.clone(), false),
        (idle.clone(), idle.clone(), queue(1.1, 9.0, Some(1.0)), true),
        // No drain rate: against the running batch.
        (queue(0.0, 0.0, None), queue(5.0, 4.0, None), idle.clone(), true),
        (queue(0.0, 0.0, None), queue(4.0, 4.0, None), idle.clone(), false),
        (queue(1.0, 8.0, None), queue(5.0, 4.0, None), idle.clone(), true),
        (queue(2.0, 8.0, None), queue(5.0, 4.0, None), idle.clone(), false),
        (idle.clone(), queue(2.0, 0.0, None), idle.clone(), true),
        // A drain rate of nothing has the floor of a hundredth.
        (idle.clone(), queue(1.0, 1.0, Some(0.0)), idle.clone(), true),
        // Unknown is neither idle nor loaded.
        (Signals::unknown(), queue(50.0, 1.0, None), idle.clone(), false),
        (fresh(), queue(50.0, 1.0, None), idle.clone(), false),
        (idle.clone(), Signals { at: Some(Tick(0)), ..queue(50.0, 1.0, None) }, idle.clone(), false),
        (queue(f64::NAN, 0.0, None), queue(50.0, 1.0, None), idle.clone(), false),
    ] {
        let model = Builder::new().roleset("a", 1, 1).combined(None).build();
        for (pod, signals) in model.pods.iter().zip([&prefill, &decode, &combined]) {
            set(pod, signals.clone());
        }
        let decision = run(&model, &long(1), &bucketing(), 1).unwrap();
        let taken = reason(&decision) == Some(SingleReason::CombinedIdle);
        assert_eq!(taken, expected, "{combined:?} {prefill:?} {decode:?}");
        let decision = run(&model, &long(1), &PdKnobs::default(), 1).unwrap();
        assert_eq!(reason(&decision), None, "only with bucketing");
    }
}

#[test]
fn prealloc_queues_count_as_queued() {
    let model = Builder::new().roleset("a", 1, 1).combined(None).build();
    set(&model.pods[1], Signals { decode_prealloc_queue: Some(3.0), running: Some(2.0), ..fresh() });
    set(&model.pods[2], queue(0.0, 0.0, None));
    assert_eq!(reason(&run(&model, &long(1), &bucketing(), 1).unwrap()), Some(SingleReason::CombinedIdle));
}

#[test]
fn the_combined_pod_with_the_shortest_queue_and_a_burst_does_not_pile_up() {
    let model = Builder::new().roleset("a", 1, 1).combined(None).combined(None).combined(None).build();
    set(&model.pods[0], queue(50.0, 1.0, None));
    set(&model.pods[2], queue(0.0, 0.0, None));
    set(&model.pods[3], queue(0.0, 0.0, None));
    set(&model.pods[4], Signals { foreign_running: 9.0, ..queue(1.0, 9.0, None) });
    let index = index();
    let mut held = Vec::new();
    for seed in 0..20 {
        let chosen = select_and_charge(&model, &long(1), Strategy::Pd, &bucketing(), context(&index, seed)).unwrap();
        held.push(chosen);
    }
    let on = |slot: usize| model.pods[slot].state.load.view().in_flight();
    // Until the next scrape each idle pod gets one that it has not reported yet, then the third pod is shorter.
    assert_eq!((on(2), on(3)), (1, 1));
    assert!(on(1) >= 10, "the rest goes to the pair: {}", on(1));
}

#[test]
fn unsplittable_requests_go_to_one_pod() {
    let unsplittable = |tokens| RequestFacts { splittable: Splittable::No, ..long(tokens) };
    // A combined pod, the one with fewer requests in flight.
    let model = Builder::new().roleset("a", 1, 1).combined(Some((0, Some(10)))).combined(Some((0, None))).build();
    let busy = crate::load::DecodeCharge::open(&model.pods[3].state);
    assert_eq!(reachable(&model, &unsplittable(5), &bucketing()), [(None, 2)]);
    assert_eq!(reachable(&model, &unsplittable(50), &bucketing()), [(None, 3)], "the range is respected");
    drop(busy);
    let model = Builder::new().roleset("a", 1, 1).combined(Some((0, Some(10)))).build();
    let decision = run(&model, &unsplittable(50), &bucketing(), 1).unwrap();
    assert_eq!(slots(&decision.target), (None, 2), "and ignored when nothing fits");
    assert_eq!(reason(&decision), Some(SingleReason::CombinedUnsplittable));
    // Where decode pods cannot do it, a combined pod or nobody.
    let combined_only = RequestFacts { splittable: Splittable::CombinedOnly, ..long(50) };
    let decision = run(&model, &combined_only, &bucketing(), 1).unwrap();
    assert_eq!((slots(&decision.target), reason(&decision)), ((None, 2), Some(SingleReason::CombinedUnsplittable)));
    let error = run(&Builder::new().roleset("a", 1, 2).build(), &combined_only, &bucketing(), 1).unwrap_err();
    assert_eq!(error, RoutingError::NoCombined);
    // One that is known but not ready is worth waiting for; one that the client's filter excludes is not.
    let mut model = Builder::new().roleset("a", 1, 2).combined(None).label("zone", "1").build();
    model.standalone.clear();
    model.routable.retain(|pod| pod.spec.role != Role::Other);
    let error = run(&model, &combined_only, &bucketing(), 1).unwrap_err();
    assert_eq!(error, RoutingError::CombinedNotReady { known: 1 });
    let filter = crate::routing::Selector::parse("zone!=1").unwrap();
    let elsewhere = RequestFacts { filter: Some(&filter), ..combined_only };
    assert_eq!(run(&model, &elsewhere, &bucketing(), 1).unwrap_err(), RoutingError::NoCombined);
    // No combined pod: a decode pod by the decode side alone.
    let model = Builder::new().roleset("a", 1, 2).roleset("b", 0, 1).build();
    let busy = crate::load::DecodeCharge::open(&model.pods[1].state);
    let decision = run(&model, &unsplittable(50), &bucketing(), 1).unwrap();
    assert_eq!(reason(&decision), Some(SingleReason::DecodeOnly));
    assert_eq!(reachable(&model, &unsplittable(50), &bucketing()), [(None, 2)], "roleset b is not complete");
    drop(busy);
    // Ranges on the decode side.
    let range = |min, max| Setup { range: Some((min, max)), combined: false };
    let model = Builder::new().ranged("a", 1, 1, range(0, Some(9))).ranged("b", 1, 1, range(10, Some(99))).build();
    assert_eq!(reachable(&model, &unsplittable(9), &bucketing()), [(None, 1)]);
    assert_eq!(reachable(&model, &unsplittable(10), &bucketing()), [(None, 3)]);
    assert_eq!(reachable(&model, &unsplittable(100), &bucketing()), [(None, 1), (None, 3)]);
}

#[test]
fn prefill_fast_path_fires_above_its_spread() {
    let model = Builder::new().rolesets(3, 1, 2).build();
    let charge = |slot: usize, n| -> Vec<_> {
        (0..n).map(|_| crate::load::PrefillCharge::open(&model.pods[slot].state)).collect()
    };
    let held = charge(0, 16);
    let one = charge(3, 1);
    let decision = run(&model, &request(), &PdKnobs::default(), 1).unwrap();
    assert!(!decision.fast_paths.prefill_spread, "16 is not above 16");
    let more = charge(0, 1);
    for seed in 0..50 {
        let decision = run(&model, &request(), &PdKnobs::default(), seed).unwrap();
        assert!(decision.fast_paths.prefill_spread);
        let (prefill, decode) = slots(&decision.target);
        assert_eq!(prefill, Some(6));
        assert!([7, 8].contains(&decode), "the decode pod comes from the same roleset");
    }
    drop((held, one, more));
}

#[test]
fn prefill_fast_path_ties_go_to_the_roleset_with_the_lighter_decode_side_then_to_chance() {
    let model = Builder::new().rolesets(4, 1, 1).build();
    let held: Vec<_> = (0..17).map(|_| crate::load::PrefillCharge::open(&model.pods[0].state)).collect();
    let chosen = |model: &Model| reachable(model, &request(), &PdKnobs::default());
    assert_eq!(chosen(&model), [(Some(2), 3), (Some(4), 5), (Some(6), 7)]);
    let busy = crate::load::DecodeCharge::open(&model.pods[5].state);
    assert_eq!(chosen(&model), [(Some(2), 3), (Some(6), 7)]);
    drop((held, busy));
}

#[test]
fn both_fast_paths_fire_and_the_pair_stays_in_one_roleset() {
    let model = Builder::new().roleset("a", 1, 1).roleset("b", 1, 2).build();
    let prefills: Vec<_> = (0..17).map(|_| crate::load::PrefillCharge::open(&model.pods[0].state)).collect();
    // Roleset a has the idlest decode pod of all, but step 1 has chosen roleset b.
    set(&model.pods[1], fresh());
    set(&model.pods[3], Signals { foreign_running: 40.0, ..fresh() });
    set(&model.pods[4], Signals { foreign_running: 20.0, ..fresh() });
    let decision = run(&model, &request(), &PdKnobs::default(), 1).unwrap();
    assert_eq!(slots(&decision.target), (Some(2), 4));
    assert_eq!(
        decision.fast_paths,
        FastPaths { prefill_spread: true, decode: Some(DecodeFastPath::RequestSpread), gate: false }
    );
    drop(prefills);
    // Step 2 alone aligns the prefill side.
    let decision = run(&model, &request(), &PdKnobs::default(), 1).unwrap();
    assert_eq!(slots(&decision.target), (Some(0), 1));
    assert!(!decision.fast_paths.prefill_spread);
}

#[test]
fn the_decode_fast_path_counts_for_itself_where_no_metrics_are() {
    let model = Builder::new().roleset("a", 1, 1).roleset("b", 1, 1).roleset("c", 1, 1).build();
    let held: Vec<_> = (0..16).map(|_| crate::load::DecodeCharge::open(&model.pods[1].state)).collect();
    let chosen = || run(&model, &request(), &PdKnobs::default(), 1).unwrap();
    assert_eq!(chosen().fast_paths.decode, None, "the others have had no request: one may just have started");
    // One has had a request, which is over.
    let mut past = crate::load::DecodeCharge::open(&model.pods[3].state);
    past.hand_over();
    past.complete();
    assert_eq!(chosen().fast_paths.decode, Some(DecodeFastPath::RequestSpread));
    assert_eq!(slots(&chosen().target), (Some(2), 3));
    drop(held);
    assert_eq!(chosen().fast_paths.decode, None);
}

#[test]
fn other_strategies_take_any_routable_pod() {
    let model = Builder::new().rolesets(2, 1, 1).combined(None).build();
    let index = index();
    let pick = |strategy, seed| {
        slots(&select(&model, &request(), strategy, &PdKnobs::default(), context(&index, seed)).unwrap().target).1
    };
    let mut seen = [0; 5];
    for seed in 0..5000 {
        seen[pick(Strategy::Random, seed) as usize] += 1;
    }
    assert!(seen.iter().all(|n| (900..1100).contains(n)), "{seen:?}");
    let held: Vec<_> = [0, 2, 3, 4].map(|slot| crate::load::PrefillCharge::open(&model.pods[slot].state)).into();
    assert!((0..50).all(|seed| pick(Strategy::LeastRequest, seed) == 1));
    // Others' work counts while it is known.
    set(&model.pods[1], Signals { foreign_running: 2.0, ..fresh() });
    assert!((0..50).all(|seed| pick(Strategy::LeastRequest, seed) != 1));
    drop(held);
    // One pod alone is taken as it is, but not by pd.
    let model = Builder::new().pod(Role::Prefill, Some("a"), Setup::default()).build();
    for strategy in Strategy::SINGLES.into_iter().filter(|strategy| *strategy != Strategy::Pd) {
        let decision = select(&model, &request(), strategy, &PdKnobs::default(), context(&index, 1)).unwrap();
        assert_eq!((reason(&decision), decision.candidates), (Some(SingleReason::Strategy), (0, 1)));
        assert_eq!(decision.policies, None);
    }
    assert!(select(&model, &request(), Strategy::Pd, &PdKnobs::default(), context(&index, 1)).is_err());
    let empty = Builder::new().build();
    let error = select(&empty, &request(), Strategy::Random, &PdKnobs::default(), context(&index, 1)).unwrap_err();
    assert_eq!(error, RoutingError::NoPods);
}

#[test]
fn a_decision_explains_itself() {
    let model = Builder::new().roleset("a", 1, 1).build();
    let prefill = crate::load::PrefillCharge::open(&model.pods[0].state);
    set(&model.pods[1], Signals { foreign_running: 3.0, kv_usage: Some(0.5), ..fresh() });
    let decision = run(&model, &request(), &PdKnobs::default(), 1).unwrap();
    assert_eq!(decision.policies, Some((PrefillPolicy::PrefixCache, DecodePolicy::LoadBalancing)));
    assert_eq!((decision.candidates, decision.prefix_match_pct), ((1, 1), None));
    let expected = Scores {
        prefill: Some(11.0),
        decode: Some(2.0),
        total: Some(2.0),
        prefill_count: 1,
        decode_count: 3.0,
        cold_start: false,
    };
    assert_eq!(decision.scores, expected);
    drop(prefill);
}
