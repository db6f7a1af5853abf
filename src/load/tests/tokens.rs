//! Token charges, the ledger's janitor, and the session table.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::super::*;
use super::pod;
use crate::clock::Tick;

const TTL: Duration = Duration::from_secs(10);

fn at(seconds: u64) -> Tick {
    Tick::from_millis(seconds * 1000)
}

fn view(active: u64, kv: u64, stranded: u64, decode: u64) -> TokenView {
    TokenView { active, kv, stranded, decode }
}

#[test]
fn a_prefill_charge_leaves_in_two_parts_and_a_decode_charge_in_one() {
    let pod = pod();
    let tokens = || pod.load.tokens.view();
    let prefill = TokenCharge::prefill(&pod, 100, at(1), TTL);
    let decode = TokenCharge::decode(&pod, 40, at(1), TTL);
    assert_eq!((tokens(), pod.load.tokens.decode_ages(at(3))), (view(100, 100, 0, 40), (1, 2.0)));
    prefill.prefill_done(at(2));
    prefill.prefill_done(at(2));
    assert_eq!(tokens(), view(0, 100, 0, 40));
    drop(prefill);
    assert_eq!(tokens(), view(0, 0, 0, 40));
    drop(decode);
    assert!(tokens().is_zero());
    assert_eq!(pod.load.tokens.decode_ages(at(3)), (0, 0.0));
    assert_eq!(pod.load.tokens.touched(), Some(at(2)));
}

fn watched(ledger: &Arc<Ledger>, charges: (Option<TokenCharge>, Option<TokenCharge>)) -> TokenCharges {
    let mut charges = TokenCharges::new(charges.0, charges.1);
    ledger.watch("r", &mut charges);
    charges
}

#[test]
fn requests_whose_policies_count_no_tokens_are_not_watched() {
    let ledger = Arc::new(Ledger::new());
    let charges = watched(&ledger, (None, None));
    assert!(ledger.is_empty());
    drop(charges);
    let pod = pod();
    let charges = watched(&ledger, (None, Some(TokenCharge::decode(&pod, 1, at(0), TTL))));
    assert_eq!(ledger.len(), 1);
    drop(charges);
    assert!(ledger.is_empty() && pod.load.tokens.view().is_zero());
}

/// R59: a charge is forced out only when its request gave no sign of life for longer than the TTL, and a release that
/// comes later changes nothing.
#[test]
fn r59_the_janitor_takes_what_nobody_releases() {
    for (ttl, touched, swept_at, forced) in [
        (TTL, 0, 10, false),
        (TTL, 0, 11, true),
        (TTL, 5, 15, false),
        (TTL, 5, 16, true),
        (Duration::ZERO, 0, 1_000_000, false),
    ] {
        let (pod, ledger) = (pod(), Arc::new(Ledger::new()));
        let prefill = TokenCharge::prefill(&pod, 100, at(0), ttl);
        let charges = watched(&ledger, (Some(prefill), Some(TokenCharge::decode(&pod, 40, at(0), ttl))));
        charges.touch(at(touched));
        let swept = ledger.sweep(at(swept_at));
        let case = format!("{ttl:?} {touched} {swept_at}");
        assert_eq!(swept.len(), if forced { 2 } else { 0 }, "{case}");
        if forced {
            assert_eq!((swept[0].decode, swept[0].tokens, swept[0].age), (false, 100, Duration::from_secs(swept_at)));
            assert_eq!((swept[1].decode, swept[1].tokens), (true, 40));
            assert!(swept.iter().all(|swept| swept.reason == SweepReason::Expired && swept.request_id == "r"));
            assert!(pod.load.tokens.view().is_zero() && ledger.is_empty(), "{case}");
        }
        charges.prefill_done(at(swept_at));
        drop(charges);
        assert!(pod.load.tokens.view().is_zero() && ledger.is_empty(), "{case}");
    }
}

/// R42: blocks that no decode pod took stay charged until their lease is over.
#[test]
fn r42_stranded_blocks_stay_charged_until_their_lease_ends() {
    let (pod, ledger) = (pod(), Arc::new(Ledger::new()));
    let charges = watched(
        &ledger,
        (Some(TokenCharge::prefill(&pod, 100, at(0), TTL)), Some(TokenCharge::decode(&pod, 40, at(0), TTL))),
    );
    charges.prefill_done(at(1));
    charges.strand(at(30), at(2));
    assert_eq!(pod.load.tokens.view(), view(0, 100, 100, 0), "the TTL is not what ends it");
    assert!(ledger.sweep(at(29)).is_empty());
    assert_eq!(pod.load.tokens.view(), view(0, 100, 100, 0));
    let swept = ledger.sweep(at(30));
    assert_eq!((swept.len(), swept[0].reason), (1, SweepReason::LeaseEnded));
    assert!(pod.load.tokens.view().is_zero() && ledger.is_empty());
}

#[test]
fn stranding_needs_something_that_is_still_charged_and_a_janitor() {
    let (pod, ledger) = (pod(), Arc::new(Ledger::new()));
    let charges = watched(&ledger, (Some(TokenCharge::prefill(&pod, 100, at(0), TTL)), None));
    assert_eq!(ledger.sweep(at(11)).len(), 1);
    charges.strand(at(30), at(12));
    assert!(pod.load.tokens.view().is_zero() && ledger.is_empty(), "forced out before");
    // Nobody would ever end it: released at once instead.
    TokenCharges::new(Some(TokenCharge::prefill(&pod, 100, at(0), TTL)), None).strand(at(30), at(1));
    assert!(pod.load.tokens.view().is_zero());
}

#[derive(Clone, Debug)]
enum Step {
    Open(u64, bool, bool),
    Done(usize),
    Touch(usize),
    Drop(usize),
    Strand(usize, u64),
    Sweep(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u64..10_000, any::<bool>(), any::<bool>()).prop_map(|(tokens, a, b)| Step::Open(tokens, a, b)),
        1 => (0usize..6).prop_map(Step::Done),
        1 => (0usize..6).prop_map(Step::Touch),
        2 => (0usize..6).prop_map(Step::Drop),
        1 => (0usize..6, 0u64..40).prop_map(|(i, lease)| Step::Strand(i, lease)),
        2 => (0u64..8).prop_map(Step::Sweep),
    ]
}

/// The model's idea of one request's charges.
#[derive(Clone, Debug)]
struct Expected {
    active: u64,
    kv: u64,
    decode: u64,
    alive: u64,
}

proptest! {
    /// The sums equal what a plain model holds, after every step, and in the end nothing is left.
    #[test]
    fn ledger_sums_equal_the_open_charges(steps in proptest::collection::vec(step(), 0..80)) {
        let (pod, ledger) = (pod(), Arc::new(Ledger::new()));
        let mut open: Vec<(TokenCharges, Expected)> = Vec::new();
        let mut stranded: Vec<(u64, u64)> = Vec::new();
        let mut now = 0;
        for step in steps {
            match step {
                Step::Open(tokens, prefill, decode) => {
                    let charges = watched(
                        &ledger,
                        (
                            prefill.then(|| TokenCharge::prefill(&pod, tokens, at(now), TTL)),
                            decode.then(|| TokenCharge::decode(&pod, tokens, at(now), TTL)),
                        ),
                    );
                    let (p, d) = (if prefill { tokens } else { 0 }, if decode { tokens } else { 0 });
                    open.push((charges, Expected { active: p, kv: p, decode: d, alive: now }));
                }
                Step::Done(i) => {
                    if let Some((charges, expected)) = open.get_mut(i) {
                        charges.prefill_done(at(now));
                        expected.active = 0;
                    }
                }
                Step::Touch(i) => {
                    if let Some((charges, expected)) = open.get_mut(i) {
                        charges.touch(at(now));
                        expected.alive = now;
                    }
                }
                Step::Drop(i) if i < open.len() => drop(open.swap_remove(i)),
                Step::Strand(i, lease) if i < open.len() => {
                    let (charges, expected) = open.swap_remove(i);
                    charges.strand(at(now + lease), at(now));
                    // A lease that is over already leaves nothing.
                    if lease > 0 {
                        stranded.push((expected.kv, now + lease));
                    }
                }
                Step::Sweep(later) => {
                    now += later;
                    ledger.sweep(at(now));
                    stranded.retain(|(_, until)| *until > now);
                    for (_, expected) in open.iter_mut().filter(|(_, e)| now - e.alive > TTL.as_secs()) {
                        *expected = Expected { active: 0, kv: 0, decode: 0, ..*expected };
                    }
                }
                _ => {}
            }
            let sum = |part: fn(&Expected) -> u64| open.iter().map(|(_, expected)| part(expected)).sum::<u64>();
            let left: u64 = stranded.iter().map(|(tokens, _)| tokens).sum();
            let expected = view(sum(|e| e.active), sum(|e| e.kv) + left, left, sum(|e| e.decode));
            prop_assert_eq!(pod.load.tokens.view(), expected);
        }
        drop(open);
        ledger.sweep(at(now + 100));
        prop_assert!(pod.load.tokens.view().is_zero() && ledger.is_empty());
        prop_assert_eq!(pod.load.tokens.decode_ages(at(now)), (0, 0.0));
    }
}

/// Requests, their ends and the janitor at once: whoever wins, each part leaves once.
#[test]
fn requests_and_janitor_race_without_a_trace() {
    let (pod, ledger) = (pod(), Arc::new(Ledger::new()));
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (pod, ledger) = (&pod, &ledger);
            scope.spawn(move || {
                for i in 0..2_000 {
                    let now = at(i);
                    let charges = watched(
                        ledger,
                        (
                            Some(TokenCharge::prefill(pod, 1 + i, now, Duration::from_nanos(1))),
                            Some(TokenCharge::decode(pod, 1 + i, now, Duration::from_nanos(1))),
                        ),
                    );
                    match (i + thread) % 4 {
                        0 => charges.prefill_done(now),
                        1 => charges.strand(at(i + 1), now),
                        2 => drop(ledger.sweep(at(i + 1))),
                        _ => charges.touch(at(i + 1)),
                    }
                    let tokens = pod.load.tokens.view();
                    // At most four requests at a time, and what is stranded and not swept yet.
                    assert!(tokens.active < 1 << 32 && tokens.kv < 1 << 32 && tokens.decode < 1 << 32, "{tokens:?}");
                }
            });
        }
    });
    ledger.sweep(at(1 << 20));
    assert!(pod.load.tokens.view().is_zero() && ledger.is_empty(), "{:?}", pod.load.tokens.view());
}

#[test]
fn sessions_are_charged_by_their_growth() {
    let sessions = Sessions::new(100);
    let ttl = Duration::from_mins(30);
    let grow = |key: &str, tokens, seconds| sessions.grow_by_key("m", key.as_bytes(), tokens, ttl, at(seconds));
    for (tokens, seconds, expected) in [
        (100, 0, None),
        (150, 10, Some(50)),
        (150, 20, None), // not grown
        (90, 30, None),  // shorter, and noted all the same
        (100, 40, Some(10)),
        (200, 40 + 1800, Some(100)),
        (300, 40 + 1800 + 1801, None), // too old, and noted
        (301, 40 + 1800 + 1802, Some(1)),
    ] {
        assert_eq!(grow("a", tokens, seconds), expected, "{tokens} at {seconds}");
    }
    assert_eq!(grow("b", 500, 0), None, "another key");
    assert_eq!(sessions.grow_by_key("other", b"a", 500, ttl, at(0)), None, "another model");
    assert_eq!(sessions.grow_by_key("m", b"", 500, ttl, at(0)), None);
    assert_eq!(sessions.grow_by_key("m", &[b'k'; MAX_SESSION_KEY + 1], 500, ttl, at(0)), None);
    assert_eq!(sessions.len(), 3);
    let longest = [b'k'; MAX_SESSION_KEY];
    assert_eq!(sessions.grow_by_key("m", &longest, 500, ttl, at(0)), None);
    assert_eq!(sessions.grow_by_key("m", &longest, 501, ttl, at(0)), Some(1));
    assert_eq!(sessions.grow_by_key("m", &longest, 999, Duration::ZERO, at(0)), None, "the rule is off");
    assert_eq!(
        sessions.grow_by_key("m", &longest, u64::MAX, ttl, at(0)),
        Some((1 << 24) - 1 - 501),
        "a size has a limit"
    );
}

/// The clock of an entry comes round after three days; by then the janitor has taken the entry away.
#[test]
fn old_sessions_are_forgotten_before_their_clock_comes_round() {
    let sessions = Sessions::new(100);
    let ttl = Duration::from_hours(1000);
    let (day, round) = (24 * 3600, 1 << 18);
    sessions.grow_by_key("m", b"old", 10, ttl, at(0));
    sessions.grow_by_key("m", b"young", 10, ttl, at(day));
    assert_eq!(sessions.grow_by_key("m", b"young", 11, ttl, at(day + 36 * 3600)), Some(1), "36 hours count");
    sessions.sweep(at(day + 36 * 3600));
    assert_eq!(sessions.len(), 1);
    assert_eq!(sessions.grow_by_key("m", b"old", 20, ttl, at(round + 10)), None);
}

/// R62: a table that is full forgets whom it saw longest ago; it never grows, and never starves anybody.
#[test]
fn r62_a_flood_of_keys_takes_no_memory_and_starves_nobody() {
    let sessions = Sessions::new(1000);
    let ttl = Duration::from_mins(30);
    for key in 0..300_000 {
        sessions.grow_by_key("m", format!("flood-{key}").as_bytes(), 10, ttl, at(1));
    }
    assert_eq!(sessions.len(), 1000);
    assert_eq!(sessions.grow_by_key("m", b"late", 10, ttl, at(2)), None);
    assert_eq!(sessions.grow_by_key("m", b"late", 25, ttl, at(3)), Some(15), "a newcomer is remembered");
    // Under the flood a session that is used stays, since others are older.
    for key in 0..50_000 {
        sessions.grow_by_key("m", format!("more-{key}").as_bytes(), 10, ttl, at(4 + key / 10));
        if key % 20 == 0 {
            let grown = sessions.grow_by_key("m", b"late", 26 + key, ttl, at(4 + key / 10));
            assert!(grown.is_some(), "{key}");
        }
    }
    assert_eq!(sessions.len(), 1000);
}
