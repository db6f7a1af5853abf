//! Transitions, claims, and the entries of pairs.

use std::sync::Barrier;

use proptest::prelude::*;

use super::*;
use crate::fleet::PodState;

const POLICY: EjectionPolicy =
    EjectionPolicy { failures: 3, base: Duration::from_secs(10), max: Duration::from_mins(1) };

fn at(millis: u64) -> Tick {
    Tick::from_millis(1_000_000 + millis)
}

/// `f`ailure, `s`uccess, `n`othing, all at one moment; what ejections came of it, in milliseconds.
fn run(health: &Health, reports: &str, policy: &EjectionPolicy, now: Tick) -> Vec<u128> {
    let report = |letter| match letter {
        'f' => Report::Failure,
        's' => Report::Success,
        _ => Report::Neutral,
    };
    reports.chars().filter_map(|letter| health.report(report(letter), policy, now, 0)).map(|d| d.as_millis()).collect()
}

#[test]
fn consecutive_failures_eject_at_the_limit() {
    for (limit, reports, failures, ejected) in [
        (3, "", 0, false),
        (3, "ff", 2, false),
        (3, "fff", 3, true),
        // Requests that were on their way: one ejection, not several.
        (3, "ffff", 3, true),
        (3, "ffffffffff", 3, true),
        (3, "ffsff", 2, false),
        (3, "ffsfff", 3, true),
        // 429 and the like neither count nor reset.
        (3, "fnfn", 2, false),
        (3, "fnnfnnf", 3, true),
        (3, "nnnnnn", 0, false),
        (3, "s", 0, false),
        (3, "fffs", 0, false),
        (1, "f", 1, true),
        (0, "ffffffff", 0, false),
        (u32::MAX, "ffffffff", 8, false),
    ] {
        let (health, policy) = (Health::default(), EjectionPolicy { failures: limit, ..POLICY });
        let ejections = run(&health, reports, &policy, at(0));
        let view = health.view(at(0));
        assert_eq!((view.failures, health.ejected()), (failures, ejected), "{limit} {reports}");
        assert_eq!(ejections.len(), usize::from(ejected || reports == "fffs"), "{limit} {reports}");
    }
}

#[test]
fn ejections_grow_up_to_the_maximum_and_shrink_with_good_service() {
    let health = Arc::new(Health::default());
    let mut now = at(0);
    let mut lengths = run(&health, "fff", &POLICY, now);
    for _ in 0..4 {
        let left = health.view(now).ejected_for.unwrap();
        assert_eq!(
            run(&health, "f", &POLICY, now.plus(left.saturating_sub(Duration::from_millis(1)))),
            [],
            "not yet over"
        );
        now = now.plus(left);
        // One failure is enough now.
        lengths.extend(run(&health, "f", &POLICY, now));
    }
    assert_eq!(lengths, [10_000, 20_000, 40_000, 60_000, 60_000]);
    now = now.plus(Duration::from_mins(1));
    run(&health, "s", &POLICY, now);
    assert_eq!(health.view(now), HealthView { streak: 5, ..HealthView::default() });
    for (after, streak) in [(0, 5), (9_999, 5), (10_000, 4), (10_001, 4), (19_999, 4), (20_000, 3)] {
        run(&health, "sss", &POLICY, now.plus(Duration::from_millis(after)));
        assert_eq!(health.view(now).streak, streak, "{after}");
    }
    // It comes and goes: the next ejection is longer than the first one was.
    assert_eq!(run(&health, "fff", &POLICY, now), [60_000]);
    for step in 1..20 {
        run(&health, "s", &POLICY, now.plus(Duration::from_secs(60 + 10 * step)));
    }
    assert!(health.spotless());
    assert_eq!(run(&health, "fff", &POLICY, at(0)), [10_000]);
}

#[test]
fn jitter_adds_less_than_a_fifth() {
    let eject = |jitter| {
        let health = Health::default();
        let length = health.report(Report::Failure, &EjectionPolicy { failures: 1, ..POLICY }, at(0), jitter).unwrap();
        let (before, over) = (at(0).plus(length.saturating_sub(Duration::from_millis(1))), at(0).plus(length));
        assert!(health.excluded(before) && !health.excluded(over.plus(Duration::from_millis(1))));
        length.as_secs_f64()
    };
    assert!((eject(0) - 10.0).abs() < 1e-9);
    assert!((eject(1 << 63) - 11.0).abs() < 1e-9);
    assert!((11.999..12.0).contains(&eject(u64::MAX)));
}

#[test]
fn extreme_policies_do_no_harm() {
    for (base, max) in [
        (Duration::MAX, Duration::MAX),
        (Duration::ZERO, Duration::ZERO),
        (Duration::ZERO, Duration::MAX),
        (Duration::MAX, Duration::ZERO),
        (Duration::from_nanos(1), Duration::MAX),
    ] {
        let policy = EjectionPolicy { failures: 1, base, max };
        for now in [Tick(0), at(0), Tick(u64::MAX)] {
            let health = Arc::new(Health::default());
            for _ in 0..100 {
                health.report(Report::Failure, &policy, now, u64::MAX);
            }
            assert!(health.ejected(), "{policy:?}");
            drop(health.claim(now));
            health.report(Report::Success, &policy, now, 0);
            assert!(!health.ejected() && !health.excluded(now), "{policy:?}");
        }
    }
}

#[test]
fn one_probe_at_a_time() {
    let health = Arc::new(Health::default());
    assert!(health.claim(at(0)).is_none(), "healthy");
    run(&health, "fff", &POLICY, at(0));
    assert!(health.claim(at(9_999)).is_none() && health.excluded(at(9_999)));
    assert!(!health.excluded(at(10_000)));
    let probe = health.claim(at(10_000)).unwrap();
    assert!(health.excluded(at(10_000)) && health.claim(at(10_000)).is_none());
    assert_eq!(
        health.view(at(10_000)),
        HealthView { failures: 3, streak: 1, ejected_for: Some(Duration::ZERO), probing: true }
    );
    // No verdict: the next one may try.
    drop(probe);
    let lost = health.claim(at(10_001)).unwrap();
    // Never returned: it expires.
    assert!(health.claim(at(20_000)).is_none() && health.excluded(at(20_000)));
    let probe = health.claim(at(20_001)).unwrap();
    drop(lost);
    assert!(health.claim(at(20_001)).is_none(), "an expired claim gives nothing back");
    assert_eq!(run(&health, "f", &POLICY, at(20_001)), [20_000]);
    drop(probe);
    assert!(health.claim(at(40_000)).is_none());
    let probe = health.claim(at(40_001)).unwrap();
    run(&health, "s", &POLICY, at(40_001));
    assert!(!health.excluded(at(40_001)) && health.claim(at(40_001)).is_none());
    drop(probe);
    assert_eq!(health.view(at(40_001)), HealthView { streak: 2, ..HealthView::default() });
}

#[test]
fn of_two_threads_one_probes_and_of_many_failures_one_ejects() {
    for round in 0..300 {
        let (health, barrier) = (Arc::new(Health::default()), Barrier::new(4));
        let (claims, ejections) = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    let (health, barrier) = (&health, &barrier);
                    scope.spawn(move || {
                        barrier.wait();
                        let ejections = run(health, "ff", &POLICY, at(round)).len();
                        barrier.wait();
                        (health.claim(at(round + 10_000)), ejections)
                    })
                })
                .collect();
            let done: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            (done.iter().filter(|(claim, _)| claim.is_some()).count(), done.iter().map(|(_, n)| n).sum::<usize>())
        });
        assert_eq!((claims, ejections), (1, 1));
    }
}

fn pod(slot: u32) -> PodState {
    PodState::new(slot, Arc::default())
}

fn about_pair(pair: Report) -> Verdicts {
    Verdicts { pair, ..Verdicts::default() }
}

#[test]
fn only_pairs_that_failed_are_remembered() {
    let (pairs, prefill, decode, other) = (Pairs::default(), pod(1), pod(2), pod(3));
    let report = |decode: &PodState, report, now| {
        pairs.report(Some(&prefill), decode, about_pair(report), &POLICY, now, 0).pair.map(|d| d.as_secs())
    };
    for quiet in [Report::Success, Report::Neutral] {
        assert_eq!(report(&decode, quiet, at(0)), None);
        assert_eq!(pairs.list(at(0)), []);
    }
    assert_eq!(report(&decode, Report::Failure, at(0)), None);
    assert_eq!(report(&other, Report::Failure, at(0)), None);
    assert_eq!(report(&decode, Report::Neutral, at(0)), None);
    assert_eq!(pairs.list(at(0)).iter().map(|pair| (pair.prefill, pair.decode)).collect::<Vec<_>>(), [(1, 2), (1, 3)]);
    report(&other, Report::Success, at(0));
    assert_eq!((report(&decode, Report::Failure, at(0)), report(&decode, Report::Failure, at(0))), (None, Some(10)));
    let health = HealthView { failures: 3, streak: 1, ejected_for: Some(Duration::from_secs(9)), probing: false };
    assert_eq!(pairs.list(at(1000)), [PairHealth { prefill: 1, decode: 2, health }]);
    assert_eq!((pairs.ejected(), pairs.excluded(at(9_999))), (1, (vec![(1, 2)], true)));
    assert_eq!(pairs.excluded(at(10_000)), (vec![], true), "a probe may try it");
    assert_eq!([&decode, &other].map(|decode| pairs.well(&prefill, decode)), [false, true]);
    let _probe = pairs.get(1, 2).unwrap().claim(at(10_000)).unwrap();
    assert_eq!(pairs.excluded(at(10_000)), (vec![(1, 2)], true));
    report(&decode, Report::Success, at(10_000));
    assert_eq!((pairs.ejected(), pairs.list(at(10_000)).len()), (0, 1), "it has something to make up for");
    report(&decode, Report::Success, at(20_000));
    assert_eq!(pairs.list(at(20_000)), []);
    // The pods' own health is another matter, and a single pod has no pair.
    assert!(prefill.health.spotless() && decode.health.spotless());
    let all = Verdicts { prefill: Report::Failure, decode: Report::Failure, pair: Report::Failure };
    pairs.report(None, &decode, all, &POLICY, at(0), 0);
    assert_eq!((prefill.health.view(at(0)).failures, decode.health.view(at(0)).failures), (0, 1));
    assert!(pairs.well(&prefill, &decode));
    pairs.report(None, &decode, all, &EjectionPolicy { failures: 1, ..POLICY }, at(0), 0);
    assert!(!pairs.well(&prefill, &decode));
    assert_eq!(pairs.list(at(0)), []);
}

#[test]
fn pairs_are_bounded_and_go_with_their_pods() {
    let (pairs, prefill) = (Pairs::default(), pod(0));
    let fail = |decode| pairs.report(Some(&prefill), &pod(decode), about_pair(Report::Failure), &POLICY, at(0), 0);
    for decode in 1..=MAX_PAIRS as u32 + 10 {
        fail(decode);
    }
    assert_eq!(pairs.list(at(0)).len(), MAX_PAIRS);
    pairs.keep(|slot| slot != 1 && slot < 5);
    assert_eq!(pairs.list(at(0)).iter().map(|pair| pair.decode).collect::<Vec<_>>(), [2, 3, 4]);
    pairs.keep(|slot| slot != 0);
    assert_eq!(pairs.list(at(0)), []);
    let off = EjectionPolicy { failures: 0, ..POLICY };
    pairs.report(Some(&prefill), &pod(1), about_pair(Report::Failure), &off, at(0), 0);
    assert_eq!(pairs.list(at(0)), [], "nothing is counted when nothing is ever ejected");
}

#[test]
fn what_is_ejected_together_does_not_come_back_together() {
    let (pairs, prefill, decode) = (Pairs::default(), pod(1), pod(2));
    let all = Verdicts { prefill: Report::Failure, decode: Report::Failure, pair: Report::Failure };
    let policy = EjectionPolicy { failures: 1, ..POLICY };
    let ejections = pairs.report(Some(&prefill), &decode, all, &policy, at(0), 0x0123_4567_89ab_cdef);
    assert_eq!(ejections.pods(), 2);
    let lengths = [ejections.prefill.unwrap(), ejections.decode.unwrap(), ejections.pair.unwrap()];
    assert!(lengths[0] != lengths[1] && lengths[1] != lengths[2] && lengths[0] != lengths[2], "{lengths:?}");
}

#[test]
fn a_snapshot_is_quiet_until_somebody_is_ejected() {
    let (pairs, decode) = (Pairs::default(), pod(2));
    let (old, new) = (Settled::default(), Settled::default());
    let fail = Verdicts { decode: Report::Failure, ..Verdicts::default() };
    let report = || pairs.report(None, &decode, fail, &POLICY, at(0), 0);
    report();
    report();
    assert!(pairs.quiet(&old), "failures alone make no difference");
    report();
    assert!(!pairs.quiet(&old) && !pairs.quiet(&new));
    // Who looked before the ejection settles nothing after it.
    pairs.settle(&old, 0);
    assert!(!pairs.quiet(&old));
    pairs.settle(&old, pairs.ejections());
    assert!(pairs.quiet(&old) && !pairs.quiet(&new) && !pairs.quiet(&old.clone()));
}

proptest! {
    /// Whatever happens in whatever order: one live claim at most, and none while it is healthy or its time runs.
    #[test]
    fn claims_exclude_each_other(steps in proptest::collection::vec((0u8..5, 0u64..8_000), 1..200)) {
        let (health, mut now, mut held) = (Arc::new(Health::default()), at(0), Vec::<(Probe, Tick)>::new());
        for (step, wait) in steps {
            now = now.plus(Duration::from_millis(wait));
            match step {
                0 => { health.report(Report::Success, &POLICY, now, 0); }
                1 | 2 => { health.report(Report::Failure, &POLICY, now, wait << 50); }
                3 => {
                    let may = health.ejected() && !health.excluded(now);
                    let claim = health.claim(now);
                    prop_assert_eq!(claim.is_some(), may);
                    held.extend(claim.map(|claim| (claim, now)));
                }
                _ => { held.pop(); }
            }
            if health.view(now).probing {
                prop_assert!(held.iter().any(|(_, since)| now.since(*since) < POLICY.base));
                prop_assert!(health.claim(now).is_none());
            }
            prop_assert_eq!(health.excluded(now), health.view(now).ejected_for.is_some_and(|left| !left.is_zero()) || health.view(now).probing);
        }
    }

    #[test]
    fn a_word_holds_the_state(word in any::<u64>()) {
        // One bit is spare.
        let word = word & !(1 << 62);
        prop_assert_eq!(State::unpack(word).pack(), word);
    }
}
