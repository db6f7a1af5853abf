use std::time::Duration;

use super::*;
use crate::state::wire::{ClaimReply, ClaimStatus};

const EPOCH: Epoch = *b"an epoch";
const ME: u32 = 7;

fn ms(millis: u64) -> Tick {
    Tick::from_millis(millis)
}

fn share(running: u32) -> Share {
    Share { running, ..Share::ZERO }
}

fn reply(version: u64, changes: &[(u64, Share)]) -> SyncReply {
    SyncReply {
        status: SyncStatus::Done,
        more: false,
        reset: false,
        epoch: EPOCH,
        member: ME,
        members: 2,
        sequence: 0,
        version,
        now_ms: 1_800_000_000_000,
        expired: Vec::new(),
        changes: changes.to_vec(),
    }
}

fn done(call: &SyncCall, version: u64, changes: &[(u64, Share)]) -> SyncReply {
    SyncReply { sequence: call.sequence, ..reply(version, changes) }
}

/// A member at version 1 whose last sync began at 0.
fn member() -> SharedLedger {
    let mut ledger = SharedLedger::new(LedgerConfig::default(), 1);
    assert_eq!(ledger.next(ms(0)), Next::Sync);
    let call = ledger.start_sync(ms(0));
    assert_eq!((call.purpose, call.member, call.shares.len()), (Purpose::Join, 0, 0));
    ledger.finish_sync(&SyncReply { reset: true, ..reply(1, &[(5, share(2))]) }, ms(1));
    assert_eq!((ledger.member(), ledger.view().share(5)), (Some((EPOCH, ME)), share(2)));
    ledger
}

#[test]
fn a_change_after_a_quiet_moment_goes_at_once_and_the_next_ones_together() {
    let mut ledger = member();
    assert_eq!(ledger.next(ms(1)), Next::At(ms(250)));
    ledger.set(5, share(1));
    // The last sync began at 0; the pace is 5 ms.
    assert_eq!(ledger.next(ms(4)), Next::At(ms(5)));
    assert_eq!(ledger.next(ms(5)), Next::Sync);
    let call = ledger.start_sync(ms(100));
    assert_eq!((call.since, call.shares.as_slice()), (1, &[(5, share(1))][..]));
    // While it is under way, changes gather.
    ledger.set(5, share(2));
    ledger.set(6, share(9));
    assert_eq!(ledger.next(ms(101)), Next::At(ms(1_100)));
    ledger.finish_sync(&done(&call, 2, &[]), ms(102));
    assert_eq!(ledger.next(ms(102)), Next::At(ms(105)));
    let mut call = ledger.start_sync(ms(105));
    call.shares.sort_by_key(|(pod, _)| *pod);
    assert_eq!((call.acknowledged, call.shares), (2, vec![(5, share(2)), (6, share(9))]));
}

#[test]
fn what_is_back_before_it_was_told_is_not_told() {
    let mut ledger = member();
    ledger.set(5, share(1));
    ledger.set(5, Share::ZERO);
    assert!(ledger.is_settled());
    assert_eq!(ledger.next(ms(1)), Next::At(ms(250)));
    // On its way as 1, and 0 again: that has to follow.
    ledger.set(5, share(1));
    let call = ledger.start_sync(ms(10));
    ledger.set(5, Share::ZERO);
    ledger.finish_sync(&done(&call, 2, &[]), ms(11));
    assert!(!ledger.is_settled());
    assert_eq!(ledger.start_sync(ms(20)).shares, [(5, Share::ZERO)]);
}

#[test]
fn an_unanswered_call_is_followed_by_one_that_says_the_same() {
    let mut ledger = member();
    ledger.set(5, share(1));
    let first = ledger.start_sync(ms(10));
    ledger.fail_sync(ms(20));
    let Next::At(again) = ledger.next(ms(20)) else { panic!("a pause") };
    assert!(again > ms(29) && again <= ms(40), "{again:?}: half to all of 20 ms");
    let second = ledger.start_sync(again);
    assert_eq!(second.shares, first.shares);
    assert!(second.sequence > first.sequence);
    assert_eq!(second.acknowledged, 0);
    // A reply that comes too late meets nobody.
    ledger.fail_sync(again);
    assert!(ledger.finish_sync(&done(&first, 9, &[(8, share(8))]), again).is_empty());
    assert_eq!(ledger.view().share(8), Share::ZERO);
    // Pauses grow to a second and no further.
    let mut now = again;
    for _ in 0..20 {
        ledger.start_sync(now);
        ledger.fail_sync(now);
        let Next::At(next) = ledger.next(now) else { panic!("a pause") };
        assert!(next.since(now) <= Duration::from_secs(1));
        now = next;
    }
}

#[test]
fn a_stranger_joins_again_and_tells_everything() {
    let mut ledger = member();
    ledger.set(5, share(1));
    let call = ledger.start_sync(ms(10));
    ledger.finish_sync(&done(&call, 2, &[]), ms(11));
    ledger.start_sync(ms(300));
    ledger.finish_sync(&SyncReply { status: SyncStatus::Stranger, ..reply(0, &[]) }, ms(301));
    assert_eq!((ledger.member(), ledger.next(ms(301))), (None, Next::Sync));
    assert_eq!(ledger.view().share(5), share(2), "what was known stays until there is better");
    assert_eq!(ledger.start_sync(ms(302)).purpose, Purpose::Join);
    let other = SyncReply { epoch: *b"a second", member: 8, reset: true, ..reply(3, &[(6, share(4))]) };
    let mut changes = ledger.finish_sync(&other, ms(303));
    changes.sort_by_key(|(pod, _)| *pod);
    assert_eq!(changes, [(5, Share::ZERO), (6, share(4))]);
    let call = ledger.start_sync(ms(310));
    assert_eq!((call.epoch, call.member, call.shares), (*b"a second", 8, vec![(5, share(1))]));
    assert_eq!(ledger.counts().joins, 2);
}

#[test]
fn a_new_view_shows_when_it_is_whole() {
    let mut ledger = member();
    ledger.reconnected();
    let call = ledger.start_sync(ms(10));
    assert_eq!(call.since, 0);
    let page = SyncReply { more: true, reset: true, ..done(&call, 4, &[(6, share(6))]) };
    assert!(ledger.finish_sync(&page, ms(11)).is_empty());
    assert_eq!((ledger.view().share(5), ledger.view().share(6)), (share(2), Share::ZERO));
    assert_eq!(ledger.next(ms(11)), Next::Sync, "reading on does not wait");
    let call = ledger.start_sync(ms(11));
    assert_eq!(call.since, 4);
    let mut changes = ledger.finish_sync(&done(&call, 9, &[(7, share(7))]), ms(12));
    changes.sort_by_key(|(pod, _)| *pod);
    assert_eq!(changes, [(5, Share::ZERO), (6, share(6)), (7, share(7))]);
    assert_eq!(ledger.view().version(), 9);
}

#[test]
fn a_reply_to_a_call_from_before_a_reconnect_is_not_a_beginning() {
    let mut ledger = member();
    let call = ledger.start_sync(ms(10));
    assert_eq!(call.since, 1);
    ledger.reconnected();
    assert!(ledger.finish_sync(&done(&call, 5, &[(6, share(6))]), ms(11)).is_empty());
    assert!(ledger.view().is_partial());
    assert_eq!(ledger.start_sync(ms(12)).since, 0);
}

fn news(version: u64, who: u32, running: i32) -> News {
    let mut bytes = Vec::new();
    crate::state::codec::pack(&(EPOCH, version, who, 5u64, [running, 0, 0, 0], [0i64; 4]), &mut bytes).unwrap();
    News::read(&bytes).unwrap()
}

#[test]
fn announcements_move_the_view_on_and_gaps_are_noticed() {
    let mut ledger = member();
    for (announced, expected, gaps) in [
        (news(2, 9, 3), share(5), 0),
        // Heard twice, or old: nothing new.
        (news(2, 9, 3), share(5), 0),
        (news(1, 9, 3), share(5), 0),
        // The own change is no change of the others.
        (news(3, ME, 3), share(5), 0),
        (news(4, 9, -5), Share::ZERO, 0),
        // One was missed; and a share that cannot shrink.
        (news(6, 9, 1), Share::ZERO, 1),
        (news(5, 9, -1), Share::ZERO, 2),
        (News { differences: Vec::new(), ..news(5, 9, 0) }, Share::ZERO, 3),
    ] {
        ledger.hear(&announced, ms(2));
        assert_eq!((ledger.view().share(5), ledger.counts().gaps), (expected, gaps), "{announced:?}");
    }
    assert_eq!(ledger.view().version(), 4);
    // Whoever missed something asks, at its pace.
    assert_eq!(ledger.next(ms(3)), Next::At(ms(5)));
    // A reply that was overtaken by announcements does not take the view back.
    let call = ledger.start_sync(ms(5));
    ledger.hear(&news(5, 9, 4), ms(6));
    ledger.finish_sync(&done(&call, 4, &[(5, share(99))]), ms(7));
    assert_eq!((ledger.view().share(5), ledger.view().version()), (share(4), 5));
}

#[test]
fn the_dead_are_buried_apart_and_once() {
    let mut dues = Vec::new();
    for seed in 0..8 {
        let mut ledger = SharedLedger::new(LedgerConfig::default(), seed);
        ledger.start_sync(ms(0));
        ledger.finish_sync(&SyncReply { expired: vec![3, ME], ..reply(1, &[]) }, ms(0));
        let mut now = ms(0);
        let call = loop {
            match ledger.next(now) {
                Next::Reap(call) => break call,
                Next::At(next) => now = next,
                Next::Sync => {
                    let call = ledger.start_sync(now);
                    ledger.finish_sync(&SyncReply { expired: vec![3, ME], ..done(&call, 1, &[]) }, now);
                }
            }
        };
        assert_eq!((call.member, call.cursor, call.epoch), (3, 0, EPOCH), "nobody buries itself");
        assert!(now >= ms(300) && now <= ms(600), "{now:?}");
        dues.push(now);
        ledger.finish_reap(&call, Some(ReapReply::GoOn { cursor: 50, shares: 2 }), now);
        let Next::Reap(call) = ledger.next(now) else { panic!("goes on") };
        assert_eq!(call.cursor, 50);
        ledger.finish_reap(&call, Some(ReapReply::Gone { shares: 1 }), now);
        assert!(matches!(ledger.next(now), Next::At(_)));
        assert_eq!(ledger.counts().reaped, 3);
    }
    dues.sort();
    dues.dedup();
    assert!(dues.len() > 4, "{dues:?}");
}

#[test]
fn somebody_else_may_have_buried_them() {
    let mut ledger = SharedLedger::new(LedgerConfig::default(), 1);
    ledger.start_sync(ms(0));
    ledger.finish_sync(&SyncReply { expired: vec![3], ..reply(1, &[]) }, ms(0));
    let call = ledger.start_sync(ms(250));
    // This call did not look.
    ledger.finish_sync(&SyncReply { members: 0, ..done(&call, 1, &[]) }, ms(251));
    let call = ledger.start_sync(ms(252));
    ledger.finish_sync(&done(&call, 1, &[]), ms(253));
    assert_eq!(ledger.next(ms(254)), Next::At(ms(502)));
}

fn claimed(status: ClaimStatus, version: u64, changes: &[(u64, Share)]) -> ClaimReply {
    ClaimReply { status, more: false, version, now_ms: 1_800_000_000_000, changes: changes.to_vec() }
}

#[test]
fn a_granted_claim_is_told_and_a_failed_one_goes_with_the_next_sync() {
    let mut ledger = member();
    let call = ledger.start_claim(&[(5, share(1))], vec![5], 1, ms(1)).unwrap();
    assert_eq!((call.since, call.shares.as_slice()), (1, &[(5, share(1))][..]));
    assert_eq!(ledger.next(ms(1)), Next::At(ms(250)), "nothing else to tell");
    let (outcome, _) = ledger.finish_claim(call.sequence, &claimed(ClaimStatus::Granted, 2, &[]), ms(2));
    assert_eq!((outcome, ledger.is_settled(), ledger.view().version()), (Claimed::Granted, true, 2));

    let call = ledger.start_claim(&[(5, share(2))], vec![5], 2, ms(3)).unwrap();
    let changed = claimed(ClaimStatus::Changed, 4, &[(5, share(8))]);
    assert_eq!(ledger.finish_claim(call.sequence, &changed, ms(4)), (Claimed::Again, vec![(5, share(8))]));
    ledger.set(5, share(1));

    let call = ledger.start_claim(&[(6, share(1))], Vec::new(), 4, ms(5)).unwrap();
    ledger.fail_claim(call.sequence);
    let late = ledger.finish_claim(call.sequence, &claimed(ClaimStatus::Granted, 9, &[(5, share(0))]), ms(6));
    assert_eq!(late, (Claimed::Unsure, Vec::new()));
    let mut sync = ledger.start_sync(ms(7));
    sync.shares.sort_by_key(|(pod, _)| *pod);
    assert_eq!(sync.shares, [(5, share(1)), (6, share(1))]);
    assert!(sync.sequence > call.sequence);
}

#[test]
fn who_is_no_member_claims_nothing() {
    let mut ledger = SharedLedger::new(LedgerConfig::default(), 1);
    assert!(ledger.start_claim(&[(5, share(1))], vec![5], 0, ms(1)).is_none());
    let mut ledger = member();
    ledger.reconnected();
    assert!(ledger.start_claim(&[(5, share(1))], vec![5], 1, ms(1)).is_none());
    let mut ledger = member();
    let call = ledger.start_claim(&[(5, share(1))], vec![5], 1, ms(1)).unwrap();
    let unsure = ledger.finish_claim(call.sequence, &claimed(ClaimStatus::Unsure, 0, &[]), ms(2));
    assert_eq!(unsure, (Claimed::Unsure, Vec::new()));
    assert_eq!(ledger.next(ms(5)), Next::Sync, "finds out");
}

#[test]
fn a_replica_leaves_when_it_has_told_everything() {
    let mut ledger = member();
    ledger.set(5, share(1));
    ledger.leave();
    let call = ledger.start_sync(ms(10));
    assert_eq!((call.purpose, call.shares.len()), (Purpose::Leave, 1));
    assert!(!ledger.has_left());
    ledger.finish_sync(&done(&call, 2, &[]), ms(11));
    assert!(ledger.has_left());
    assert_eq!(ledger.next(ms(9_999)), Next::At(Tick(u64::MAX)));
}
