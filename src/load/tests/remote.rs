//! Own loads and the others' in one number: merging, fading, and who turned up unseen.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use proptest::prelude::*;

use super::super::*;
use super::pod;
use crate::clock::Tick;

fn at(ms: u64) -> Tick {
    Tick::from_millis(ms)
}

/// Two requests, begun at 1,000 and 3,000 on the clock of the shares.
fn share() -> Share {
    Share {
        running: 1,
        pending: 2,
        prefills: 3,
        decode_tokens: 400,
        decode_open: 2,
        decode_start_sum_ms: 4_000,
        prefill_tokens: 500,
        kv_tokens: 600,
    }
}

#[test]
fn loads_are_the_own_and_the_others() {
    let pod = pod();
    assert_eq!((pod.load.total(at(9)), pod.load.remote.age(at(9))), (LoadView::default(), None));
    let prefill_leg = PrefillCharge::open(&pod);
    let mut decode = DecodeCharge::open(&pod);
    let tokens = [
        TokenCharge::prefill(&pod, 50, at(10_000), Duration::ZERO),
        TokenCharge::decode(&pod, 40, at(10_000), Duration::ZERO),
    ];
    pod.load.remote.apply(&share(), at(10_000), 6_000);
    let now = at(11_000);
    let view = |prefills, pending, running| LoadView { prefills, pending, running, completed: 0 };
    assert_eq!(pod.load.total(now), view(4, 3, 1));
    decode.hand_over();
    assert_eq!(pod.load.total(now), view(4, 2, 2));
    assert_eq!((pod.load.view(), pod.load.view().in_flight()), (view(1, 0, 1), 2), "the own alone, as before");
    let total = pod.load.total_tokens(now);
    assert_eq!(total, TokenView { active: 550, kv: 650, stranded: 0, decode: 440 });
    // 5 and 3 seconds old when applied, and one second has gone by; so has one for the own.
    assert_eq!(pod.load.total_decode_ages(now), (3, 8.0 + 2.0 + 1.0));
    drop((prefill_leg, decode, tokens));
    assert_eq!(pod.load.total(now), view(3, 2, 1));
    pod.load.remote.apply(&Share::ZERO, now, 7_000);
    assert_eq!(
        (pod.load.total(now), pod.load.total_tokens(now)),
        (LoadView { completed: 1, ..view(0, 0, 0) }, TokenView::default())
    );
    assert_eq!(pod.load.total_decode_ages(now), (0, 0.0));
}

#[test]
fn what_nobody_confirms_fades_out() {
    let pod = pod();
    let many = Share { running: 1_000, kv_tokens: 10_001, ..Share::ZERO };
    pod.load.remote.apply(&many, at(5_000), 0);
    for (ms, running, kv) in [
        (5_000, 1_000, 10_001),
        (8_000, 1_000, 10_001),
        (8_001, 999, 9_999),
        (9_000, 900, 9_000),
        (13_000, 500, 5_000),
        (17_999, 0, 1),
        (18_000, 0, 0),
        (1 << 40, 0, 0),
        // A reader whose now is older than the news.
        (4_000, 1_000, 10_001),
    ] {
        let now = at(ms);
        assert_eq!((pod.load.total(now).running, pod.load.total_tokens(now).kv), (running, kv), "{ms}");
    }
    pod.load.remote.confirm(at(20_000));
    assert_eq!(pod.load.total(at(23_000)).running, 1_000);
    assert_eq!(pod.load.remote.age(at(23_000)), Some(Duration::from_secs(3)));
    pod.load.remote.confirm(at(19_000));
    assert_eq!(pod.load.remote.age(at(23_000)), Some(Duration::from_secs(3)), "news do not get older");
}

#[test]
fn ages_fade_with_their_requests() {
    let pod = pod();
    pod.load.remote.apply(&share(), at(10_000), 6_000);
    // Two requests of 13 and 11 seconds, half faded.
    assert_eq!(pod.load.total_decode_ages(at(18_000)), (1, 12.0));
    assert_eq!(pod.load.total_decode_ages(at(23_000)), (0, 0.0));
}

#[test]
fn a_scope_leaves_parts_of_a_share_out() {
    let kept = |prefill, decode_ledger| Scope { prefill, decode_ledger }.of(share());
    assert_eq!(kept(true, true), share());
    assert_eq!(kept(false, true), Share { prefills: 0, prefill_tokens: 0, kv_tokens: 0, ..share() });
    assert_eq!(kept(true, false), Share { decode_tokens: 0, decode_open: 0, decode_start_sum_ms: 0, ..share() });
    assert_eq!(kept(false, false), Share { running: 1, pending: 2, ..Share::ZERO });
    assert_eq!(Scope::default().of(share()), share());
}

#[test]
fn absurd_shares_stay_numbers() {
    let pod = pod();
    let most = Share {
        running: u32::MAX,
        pending: u32::MAX,
        prefills: u32::MAX,
        decode_tokens: u64::MAX,
        decode_open: u64::MAX,
        decode_start_sum_ms: 0,
        prefill_tokens: u64::MAX,
        kv_tokens: u64::MAX,
    };
    let _own = TokenCharge::prefill(&pod, 7, at(1), Duration::ZERO);
    for (fleet_ms, sum) in [(u64::MAX, 0), (0, u64::MAX)] {
        pod.load.remote.apply(&Share { decode_start_sum_ms: sum, ..most }, at(1), fleet_ms);
        assert_eq!(pod.load.total_tokens(at(1)).active, u64::MAX);
        assert_eq!(pod.load.total(at(1)).decodes(), 2 * u64::from(u32::MAX));
        let (_, ages) = pod.load.total_decode_ages(at(1));
        assert!((0.0..1e10).contains(&ages), "{ages}");
    }
}

#[test]
fn a_fleet_of_cells_adds_up() {
    let [a, b] = [pod(), pod()];
    let _charges = [
        TokenCharge::decode(&a, 10, at(1_500), Duration::ZERO),
        TokenCharge::decode(&a, 20, at(2_500), Duration::ZERO),
        TokenCharge::prefill(&a, 30, at(2_500), Duration::ZERO),
    ];
    let _decode = DecodeCharge::open(&a);
    let published = a.load.share(at(3_000), 70_000);
    // The other replica's clock started 500 s earlier, and it hears of this a millisecond later.
    b.load.remote.apply(&published, at(503_001), 70_001);
    let (there, here) = (at(504_000), at(4_000));
    assert_eq!(b.load.total(there), a.load.view());
    assert_eq!(b.load.total_tokens(there), a.load.tokens.view());
    assert_eq!(a.load.tokens.decode_ages(here), (2, 2.5 + 1.5));
    assert_eq!(b.load.total_decode_ages(there), (2, 2.5 + 1.5));
}

proptest! {
    #[test]
    fn applying_is_idempotent_and_never_below_the_own(
        running in any::<u32>(), pending in any::<u32>(), prefills in any::<u32>(),
        tokens in any::<u64>(), open in 0u64..1_000, ages in 0u64..10_000_000,
        own in 0usize..5, applied in 1u64..100_000, later in 0u64..30_000,
    ) {
        let pod = pod();
        let _own: Vec<_> = (0..own).map(|_| (
            PrefillCharge::open(&pod), DecodeCharge::open(&pod),
            TokenCharge::decode(&pod, 9, at(applied), Duration::ZERO),
        )).collect();
        let fleet_ms = 1_000_000_000;
        let share = Share {
            running, pending, prefills, decode_tokens: tokens, decode_open: open,
            decode_start_sum_ms: (open * fleet_ms).saturating_sub(ages), prefill_tokens: tokens / 2, kv_tokens: tokens,
        };
        pod.load.remote.apply(&share, at(applied), fleet_ms);
        let read = || {
            let now = at(applied + later);
            (pod.load.total(now), pod.load.total_tokens(now), pod.load.total_decode_ages(now))
        };
        let once = read();
        pod.load.remote.apply(&share, at(applied), fleet_ms);
        prop_assert_eq!(read(), once);
        let view = pod.load.view();
        let (total, sums, (count, seconds)) = once;
        prop_assert!(total.prefills >= view.prefills && total.decodes() >= view.decodes());
        prop_assert!(total.prefills <= view.prefills + u64::from(prefills));
        prop_assert!(sums.decode >= pod.load.tokens.view().decode && sums.active <= sums.kv);
        prop_assert!(count >= own as u64 && seconds >= 0.0 && seconds.is_finite());
        if later <= 3_000 {
            prop_assert_eq!((count, total.running), (own as u64 + open, u64::from(running)));
        }
    }
}

/// Count and times of one share must not meet those of another, or one request seems to be as old as the process.
#[test]
fn readers_never_see_half_a_share() {
    let pod = pod();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let now = Tick::from_millis(1_000_000);
            let mut reads = 0u32;
            while !stop.load(Ordering::Relaxed) || reads < 1_000 {
                let (count, seconds) = pod.load.total_decode_ages(now);
                assert!(seconds <= 10.0 * count as f64, "{count} {seconds}");
                reads += 1;
            }
        });
        for turn in 0..20_000u64 {
            let open = turn % 7;
            let share = Share { decode_open: open, decode_start_sum_ms: open * 995_000, ..Share::ZERO };
            pod.load.remote.apply(&share, at(1_000_000), 1_000_000);
        }
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
}

#[test]
fn peers_are_known_after_joining() {
    let cell = PeerCell::default();
    assert_eq!(cell.view(), Peers::ALONE);
    for (rank, count, expected) in [
        (0, 0, Peers::ALONE),
        (0, 1, Peers::ALONE),
        (1, 3, Peers { rank: 1, count: 3, unseen: 0.0, view: 0 }),
        (9, 3, Peers { rank: 9, count: 3, unseen: 0.0, view: 0 }),
        (5, 1, Peers::ALONE),
    ] {
        cell.join(rank, count);
        assert_eq!(cell.view(), expected, "{rank} of {count}");
    }
}

fn news(answers: u64, newcomers: u64) -> Heard {
    Heard { answers, newcomers, version: 0 }
}

fn joined() -> PeerCell {
    let cell = PeerCell::default();
    cell.join(0, 2);
    cell
}

#[test]
fn unseen_requests_are_those_that_turn_up_around_a_selection() {
    let cell = joined();
    let unseen = || cell.view().unseen;
    cell.heard(news(cell.selections(), 9), at(100));
    cell.heard(news(0, 9), at(101));
    assert_eq!(unseen(), 0.0, "nobody had selected");
    cell.selected(at(200));
    let sent = cell.selections();
    cell.heard(news(0, 4), at(205));
    cell.heard(news(sent, 6), at(210));
    assert_eq!(unseen(), 0.0, "as long again will count");
    cell.heard(news(0, 10), at(220));
    cell.heard(news(0, 99), at(221));
    assert!((unseen() - 10.0).abs() < 1e-9, "half of twenty: {}", unseen());
    cell.heard(news(sent, 50), at(230));
    cell.heard(news(0, 0), at(300));
    assert!((unseen() - 10.0).abs() < 1e-9, "nobody had selected since: {}", unseen());
    for turn in 0..200 {
        cell.selected(at(1_000 + turn));
        cell.heard(news(cell.selections(), u64::MAX), at(1_000 + turn));
        cell.heard(news(0, 0), at(1_001 + turn));
    }
    assert!((60.0..=64.0).contains(&unseen()), "bounded: {}", unseen());
}

/// One selection at a time is looked at, and only its own answer ends the wait.
#[test]
fn an_answer_to_an_earlier_selection_is_not_waited_for() {
    let cell = joined();
    cell.selected(at(100));
    let first = cell.selections();
    cell.selected(at(101));
    cell.heard(news(first, 2), at(110));
    cell.heard(news(0, 0), at(121));
    assert!((cell.view().unseen - 1.0).abs() < 1e-9);
    cell.selected(at(130));
    cell.heard(news(2, 40), at(140));
    cell.heard(news(0, 0), at(1_000));
    assert!((cell.view().unseen - 1.0).abs() < 1e-9, "that was the answer to the second selection");
    cell.heard(news(cell.selections(), 0), at(1_001));
    cell.heard(news(0, 0), at(9_000));
    assert!((cell.view().unseen - 10.5).abs() < 1e-9, "the mean of 1 and 20: {}", cell.view().unseen);
    cell.selected(at(10_000));
    cell.heard(news(0, 7), at(10_500));
    cell.heard(news(cell.selections(), 60), at(11_001));
    cell.heard(news(0, 60), at(14_000));
    assert!((cell.view().unseen - 10.5).abs() < 1e-9, "an outage says nothing about who decides at once");
}

/// Four replicas decide in the same instant, again and again, always in the same order: all come to know it.
#[test]
fn the_first_and_the_last_of_those_who_decide_at_once_learn_the_same() {
    let cells: Vec<PeerCell> = (0..4).map(|_| PeerCell::default()).collect();
    for (rank, cell) in (0..).zip(&cells) {
        cell.join(rank, 4);
    }
    for burst in 1..200u64 {
        let now = at(burst * 1_000);
        for cell in &cells {
            cell.selected(now);
        }
        let back = now.plus(Duration::from_micros(400));
        for (place, cell) in cells.iter().enumerate() {
            // Earlier ones were announced before its answer came, later ones after.
            let version = burst * 4;
            cell.heard(Heard { answers: 0, newcomers: place as u64, version }, back);
            cell.heard(Heard { answers: cell.selections(), newcomers: 0, version }, back);
            cell.heard(Heard { answers: 0, newcomers: 3 - place as u64, version }, back);
        }
    }
    for cell in &cells {
        let Peers { unseen, view, .. } = cell.view();
        assert!((unseen - 1.5).abs() < 1e-3, "{unseen}");
        assert_eq!(view, 199 * 4);
    }
}

/// A burst every second: the first news of one also end the counting for the one before, and neither is lost.
#[test]
fn every_burst_is_an_observation() {
    let cell = joined();
    let unseen = || cell.view().unseen;
    for (burst, newcomers, mean) in [(1u64, 4, 0.0), (2, 8, 2.0), (3, 8, 3.0), (4, 0, 10.0 / 3.0)] {
        let now = at(burst * 1_000);
        cell.selected(now);
        cell.heard(news(0, newcomers), now.plus(Duration::from_millis(1)));
        cell.heard(news(cell.selections(), 0), now.plus(Duration::from_millis(1)));
        assert!((unseen() - mean).abs() < 1e-9, "{burst}: {}", unseen());
    }
    // From the tenth on the latest counts a tenth.
    for burst in 5..40u64 {
        cell.selected(at(burst * 1_000));
        cell.heard(news(cell.selections(), 2), at(burst * 1_000));
    }
    let before = unseen();
    cell.selected(at(60_000));
    cell.heard(news(cell.selections(), 42), at(60_000));
    cell.heard(news(0, 0), at(61_000));
    // The one before it is taken in too.
    let expected = 0.9 * (0.9 * before + 0.1) + 0.1 * 21.0;
    assert!((unseen() - expected).abs() < 1e-9, "{before} {}", unseen());
}

#[test]
fn what_others_complete_counts_as_completed() {
    let pod = pod();
    let completed = || pod.load.total(at(1)).completed;
    DecodeCharge::open(&pod).complete();
    for (running, pending, expected) in [(4, 0, 1), (4, 0, 1), (3, 9, 2), (0, 0, 5), (7, 1, 5), (6, 2, 6)] {
        pod.load.remote.apply(&Share { running, pending, ..Share::ZERO }, at(1), 0);
        assert_eq!(completed(), expected, "{running} {pending}");
    }
    // What fades has not been completed, and what was completed does not fade.
    assert_eq!(pod.load.total(at(60_000)).completed, 6);
    assert_eq!(pod.load.view().completed, 1, "the own alone");
}

#[test]
fn the_view_is_the_version_last_heard() {
    let cell = joined();
    // After a new beginning of the shared state versions are small again.
    for version in [4, 9, 2] {
        cell.heard(Heard { answers: 0, newcomers: 0, version }, at(version));
        assert_eq!(cell.view().view, version);
    }
}
