//! Whole runs: queueing theory, conservation, repetition, policies.

use std::collections::HashSet;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::clock::{Clock, Tick};
use crate::knobs::{DecodePolicy, PrefillPolicy};
use crate::rng::Rng;

const DEFAULT: Policies = (PrefillPolicy::PrefixCache, DecodePolicy::LoadBalancing);
const BALANCED: Policies = (PrefillPolicy::LeastRequest, DecodePolicy::LeastRequest);
const EXCERPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/mooncake-first-500.jsonl.gz");

fn excerpt() -> Trace {
    read_file(EXCERPT.as_ref(), ReadOptions::default()).unwrap()
}

fn outcome(trace: &Trace, options: &ReplayOptions, policies: Policies) -> Outcome {
    run_one(trace, options, policies, &quiet).unwrap()
}

fn report(trace: &Trace, options: &ReplayOptions, policies: Policies) -> PairReport {
    PairReport::of(policies, trace, outcome(trace, options, policies))
}

#[test]
fn a_lone_request_waits_for_nothing() {
    let engine = engine(&[
        "prefill_ms=10",
        "prefill_us_per_token=100",
        "transfer_ms=3",
        "transfer_us_per_token=10",
        "step_ms=20",
        "step_us_per_sequence=1000",
    ]);
    let trace = trace(&[(0, 1000, 5), (60_000, 100, 1)]);
    for policies in all_policies() {
        let courses = outcome(&trace, &options((2, 2, 2), Arc::clone(&engine)), policies).courses;
        let times = |index: usize| {
            let course = courses[index];
            [course.prefill_started, course.prefill_ended, course.first_token, course.ended]
                .map(|at| at.unwrap().since(course.arrived).as_millis())
        };
        // 10 + 100 ms of prefill, 3 + 10 of transfer, 21 for each token.
        assert_eq!(times(0), [0, 110, 144, 228], "{policies:?}");
        assert_eq!(times(1), [0, 20, 45, 45], "{policies:?}");
    }
}

#[test]
fn at_low_load_the_first_token_takes_what_its_parts_take() {
    let mut trace = excerpt();
    for (request, turn) in trace.requests.iter_mut().zip(0..) {
        request.at = turn * Duration::from_secs(20);
    }
    let options = options((8, 8, 8), Arc::new(EngineModel::default()));
    let courses = outcome(&trace, &options, BALANCED).courses;
    let mut at_once = 0;
    for (course, request) in courses.iter().zip(&trace.requests) {
        let model = &options.engine;
        let step = Duration::from_nanos(model.step_nanos(1, request.prompt) as u64);
        let parts =
            model.prefill(request.prompt - course.cached, request.prompt) + model.transfer(request.prompt) + step;
        let ttft = course.first_token.unwrap().since(course.arrived);
        assert!(ttft + Duration::from_nanos(2) >= parts, "faster than possible");
        at_once += usize::from(ttft < parts + Duration::from_millis(40));
    }
    assert!(at_once > 490, "{at_once} of 500 did not wait");
}

/// M/D/1: with utilisation ρ and service time S, the mean wait is S · ρ / (2 (1 − ρ)).
#[test]
fn the_queue_of_one_prefill_pod_is_as_long_as_theory_says() {
    let engine = engine(&["prefill_ms=100"]);
    for utilisation in [0.3, 0.7] {
        let mut rng = Rng::new(5);
        let mut now = 0.0;
        let mut requests = trace(&vec![(0, 1, 1); 25_000]).requests;
        for request in &mut requests {
            now -= (1.0 - rng.unit()).ln() * 0.1 / utilisation;
            request.at = Duration::from_secs_f64(now);
        }
        let trace = Trace { format: Format::Azure, block_tokens: 512, requests };
        let options = options((1, 1, 1), Arc::clone(&engine));
        let courses = outcome(&trace, &options, BALANCED).courses;
        let waits = courses.iter().map(|one| one.prefill_started.unwrap().since(one.arrived).as_secs_f64());
        let mean = waits.sum::<f64>() / courses.len() as f64;
        let expected = 0.1 * utilisation / (2.0 * (1.0 - utilisation));
        assert!((mean / expected - 1.0).abs() < 0.06, "{utilisation}: {mean} {expected}");
    }
}

#[test]
fn prefixes_are_found_again_where_the_policy_looks_for_them() {
    let trace = excerpt();
    let mut model = EngineModel::default();
    model.set("prefix_cache_tokens=100000000").unwrap();
    let options = options((8, 8, 1), Arc::new(model));
    let (looking, balanced) = (report(&trace, &options, DEFAULT), report(&trace, &options, BALANCED));
    assert!(looking.prefix_hit_share > 1.3 * balanced.prefix_hit_share, "{looking:?} {balanced:?}");
    // No policy finds more than one cache that never forgets would.
    let mut seen = HashSet::new();
    let (mut found, mut tokens) = (0, 0);
    for request in &trace.requests {
        found += request.hashes.iter().take_while(|hash| seen.contains(*hash)).count() as u64 * trace.block_tokens;
        tokens += request.prompt;
        seen.extend(request.hashes.iter().copied());
    }
    assert!(looking.prefix_hit_share <= found as f64 / tokens as f64, "{looking:?} {found} {tokens}");
}

#[test]
fn the_same_seed_gives_the_same_bytes_on_any_number_of_threads() {
    let mut trace = excerpt();
    trace.requests.truncate(100);
    let policies = all_policies();
    let bytes = |seed, threads| {
        let mut options = options((4, 6, 2), Arc::new(EngineModel::default()));
        options.seed = seed;
        let reports = run(&trace, &options, &policies, threads, &quiet).unwrap();
        let source = Source::of("excerpt".to_owned(), &trace, 1.0);
        json(&source, &options, &[("X", "y")], &reports).to_string() + &table(&reports)
    };
    let first = bytes(7, 1);
    assert_eq!(first, bytes(7, 1));
    assert_eq!(first, bytes(7, 3));
    assert_ne!(first, bytes(8, 2), "ties fall otherwise");
}

#[test]
fn a_prefill_that_takes_too_long_fails_alone() {
    // Two seconds each, one pod, three seconds of patience: the second one would end at 4 s, the third one starts when
    // the second one gives up, and would end at 5 s.
    let options = configured(
        (1, 1, 1),
        engine(&["prefill_ms=2000"]),
        &[("AIBRIX_PREFILL_REQUEST_TIMEOUT", "3"), ("AIBRIX_PREFILL_SCORE_POLICY", "least_request")],
    );
    let trace = trace(&[(0, 1, 1), (0, 1, 1), (500, 1, 1), (3000, 1, 1)]);
    let outcome = outcome(&trace, &options, BALANCED);
    let failures: Vec<_> = outcome.courses.iter().map(|course| course.failure).collect();
    assert_eq!(failures, [None, Some(Failure::PrefillTimeout), Some(Failure::PrefillTimeout), None]);
    let ended = |index: usize| outcome.courses[index].ended.unwrap().since(outcome.courses[0].arrived).as_millis();
    assert_eq!([ended(0), ended(1), ended(2), ended(3)], [2001, 3000, 3500, 5501]);
    let report = PairReport::of(BALANCED, &trace, outcome);
    assert_eq!((report.completed, report.errors.prefill_timeout, report.errors.total()), (2, 2, 2));
}

/// Adaptive bucket serving keeps short prompts out of the queues of long ones: two long and three short arrive together.
#[test]
fn bands_keep_short_prompts_apart_from_long_ones() {
    let rows: Vec<_> = (0..1_000).map(|i| (i / 5 * 400, if i % 5 < 2 { 1_000 } else { 100 }, 1)).collect();
    let model = engine(&["prefill_us_per_token=90"]);
    let median = |variables| {
        let options = configured((2, 2, 2), Arc::clone(&model), variables);
        report(&trace(&rows), &options, BALANCED).ttft_seconds.p50
    };
    let mixed = median(&[]);
    let banded = median(&[
        ("AIBRIX_PROMPT_LENGTH_BUCKETING", "true"),
        ("AIBRIX_BUCKET_SERVE", "true"),
        ("AIBRIX_BUCKET_SERVE_MODE", "rps"),
    ]);
    // 90 ms behind a long prompt, against 9 to 27 ms among themselves.
    assert!(mixed > 0.085 && banded < 0.04, "{mixed} {banded}");
}

#[test]
fn what_no_decode_pod_can_hold_fails_and_releases_everything() {
    let options = options((1, 1, 1), engine(&["kv_tokens=100"]));
    let report = report(&trace(&[(0, 95, 5), (0, 96, 5), (10, 9, 5)]), &options, DEFAULT);
    assert_eq!((report.completed, report.errors.too_long), (2, 1));
}

#[test]
fn each_roleset_needs_both_roles() {
    let shape = FleetShape::new(3, 4, None).unwrap();
    assert_eq!(shape.rolesets, 3);
    for (prefill, decode, rolesets, possible) in [
        (0, 1, None, false),
        (1, 0, None, false),
        (2, 3, Some(0), false),
        (2, 3, Some(2), true),
        (2, 3, Some(3), false),
        (100_000, 1, None, false),
    ] {
        assert_eq!(FleetShape::new(prefill, decode, rolesets).is_some(), possible, "{prefill} {decode} {rolesets:?}");
    }
}

#[test]
fn imbalance_is_the_fullest_pod_over_the_mean_one() {
    // One pod of four works all the time: the fullest has four times the mean.
    let options = options((4, 4, 4), engine(&["prefill_ms=100000", "step_ms=1000"]));
    let report = report(&trace(&[(0, 10, 1), (10_000, 10, 1)]), &options, BALANCED);
    assert!(report.prefill_imbalance > 2.0 && report.prefill_imbalance <= 4.0, "{report:?}");
    assert_eq!(Imbalance::default().ratio(), 1.0);
    assert_eq!(Imbalance { max: 6.0, mean: 1.5 }.ratio(), 4.0);
}

#[test]
fn spreads_are_nearest_ranks() {
    assert_eq!(Spread::of(Vec::new()), Spread::default());
    let one = Spread::of(vec![(7.0, 1)]);
    assert_eq!((one.mean, one.p50, one.p90, one.p99), (7.0, 7.0, 7.0, 7.0));
    let hundred = Spread::of((1..=100).rev().map(|value| (f64::from(value), 1)).collect());
    assert_eq!((hundred.mean, hundred.p50, hundred.p90, hundred.p99), (50.5, 50.0, 90.0, 99.0));
    let weighted = Spread::of(vec![(2.0, 1), (1.0, 99)]);
    assert_eq!((weighted.mean, weighted.p50, weighted.p99), (1.01, 1.0, 1.0));
}

/// Four thousand requests, the excerpt eight times over at another pace, on 8 and 8 pods.
#[test]
fn thousands_of_requests_take_seconds() {
    let clock = Clock::system();
    let mut trace = excerpt();
    let once = trace.requests.clone();
    for round in 1..8u32 {
        let later = once.iter().cloned().map(|one| Request { at: one.at + round * Duration::from_secs(170), ..one });
        trace.requests.extend(later);
    }
    let options = options((8, 8, 8), Arc::new(EngineModel::default()));
    let report = report(&trace, &options, DEFAULT);
    assert_eq!(report.completed + report.errors.total(), 4000);
    assert!(report.errors.total() < 400, "{report:?}");
    // Half a second on a quiet machine, or two when nothing is optimised.
    assert!(clock.now().since(Tick(1_000_000_000)) < Duration::from_mins(1));
}

fn pods() -> impl proptest::strategy::Strategy<Value = (usize, usize, usize)> {
    (1usize..5, 1usize..5).prop_flat_map(|(prefill, decode)| (Just(prefill), Just(decode), 1..=prefill.min(decode)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn no_request_is_lost_and_time_goes_forward(
        shape in pods(),
        rows in proptest::collection::vec((0u64..3_000, 1u64..4_000, 1u64..100, 0u64..4), 1..60),
        kv in 1_000u64..20_000,
        cache in 0u64..20_000,
        batch in 1u64..8,
        gateways in 1usize..4,
        sharing in prop::sample::select(Sharing::ALL.to_vec()),
        seed in any::<u64>(),
        pair in any::<prop::sample::Index>(),
    ) {
        let mut requests = trace(&rows.iter().map(|(at, prompt, output, _)| (*at, *prompt, *output)).collect::<Vec<_>>())
            .requests;
        for (request, (.., family)) in requests.iter_mut().zip(&rows) {
            request.hashes = (0..request.prompt / 512).map(|block| family * 1000 + block).collect();
        }
        requests.sort_by_key(|request| request.at);
        let first = requests[0].at;
        for request in &mut requests {
            request.at -= first;
        }
        let trace = Trace { format: Format::Mooncake, block_tokens: 512, requests };
        let mut model = EngineModel::default();
        for text in [format!("kv_tokens={kv}"), format!("prefix_cache_tokens={cache}"), format!("max_batch={batch}")] {
            model.set(&text).unwrap();
        }
        let mut options = configured(shape, Arc::new(model), &[("AIBRIX_PREFILL_REQUEST_TIMEOUT", "2")]);
        (options.gateways, options.sharing) = (gateways, sharing);
        options.seed = seed;
        let policies = all_policies();
        let told = std::sync::atomic::AtomicUsize::new(0);
        let tell = |more| { told.fetch_add(more, std::sync::atomic::Ordering::Relaxed); };
        // It fails when a request does not end or a charge stays.
        let outcome = run_one(&trace, &options, *pair.get(&policies), &tell).unwrap();
        prop_assert_eq!(told.into_inner(), trace.requests.len());
        for (course, request) in outcome.courses.iter().zip(&trace.requests) {
            let moments = [Some(course.arrived), course.prefill_started, course.prefill_ended, course.first_token, course.ended];
            let moments: Vec<Tick> = moments.into_iter().flatten().collect();
            prop_assert!(moments.is_sorted(), "{course:?}");
            prop_assert!(course.cached < request.prompt);
            prop_assert!(course.ended <= Some(outcome.ended));
            match course.failure {
                None => prop_assert_eq!(moments.len(), 5),
                Some(Failure::TooLong) => prop_assert!(request.prompt + request.output > kv),
                Some(Failure::PrefillTimeout) => {
                    // The leg begins when its claim has been granted, at once or after some that were not.
                    let late = course.ended.unwrap().since(course.arrived.plus(Duration::from_secs(2))).as_nanos();
                    let claims = late / options.round_trip.as_nanos();
                    prop_assert_eq!(late, claims * options.round_trip.as_nanos());
                    let asks = sharing == Sharing::Claim && gateways > 1;
                    prop_assert!(if asks { (1..=17).contains(&claims) } else { claims == 0 }, "{claims}");
                }
                Some(Failure::NotRouted) => prop_assert!(false, "there is a pair for everybody"),
            }
        }
        let gaps: u64 = outcome.gaps.iter().map(|(_, count)| count).sum();
        let answered = outcome.courses.iter().zip(&trace.requests).filter(|(course, _)| course.failure.is_none());
        prop_assert_eq!(gaps, answered.map(|(_, request)| request.output - 1).sum::<u64>());
        let report = PairReport::of(DEFAULT, &trace, outcome);
        for number in [report.kv_imbalance, report.prefill_imbalance] {
            prop_assert!(number >= 1.0 - 1e-9 && number.is_finite(), "{number}");
        }
    }
}
