//! Select-and-charge and release, explored over every interleaving of a small model by loom.
//!
//! The files under test are compiled here once more, over loom's atomics in place of the standard ones: what is explored
//! is the code that runs, not a copy of it. An interleaving that breaks a promise fails with its trace.
#![allow(missing_docs, dead_code, unreachable_pub, clippy::unwrap_used, clippy::pedantic)]

/// What `src/load/sync.rs` is in the library.
mod sync {
    pub(super) use loom::sync::atomic::{AtomicU8, AtomicU64, Ordering};

    /// Few, so that the model stays small; a reader whose patience ends charges blindly, as in the library.
    pub(super) const SPINS: u32 = 1;
    pub(super) const YIELDS: u32 = 3;

    pub(super) fn spin() {
        loom::hint::spin_loop();
    }

    pub(super) fn give_way() {
        loom::thread::yield_now();
    }
}

mod clock {
    pub use tandem::clock::Tick;
}

#[path = "../src/load/claim.rs"]
mod claim;
#[path = "../src/load/commit.rs"]
mod commit;
#[path = "../src/load/peers.rs"]
mod peers;
#[path = "../src/load/remote.rs"]
mod remote;
#[path = "../src/load/share.rs"]
mod share;
#[path = "../src/load/starts.rs"]
mod starts;

use std::time::Duration;

use loom::sync::Arc;
use loom::thread;

use claim::{ACTIVE, Claim, TokenLoad};
use clock::Tick;
use commit::Commit;
use peers::{Heard, PeerCell};
use remote::{Fade, Remote};
use share::Share;
use sync::{AtomicU64, Ordering};

/// A fleet of two pods and its version word.
#[derive(Default)]
struct Fleet {
    commit: Commit,
    loads: [AtomicU64; 2],
}

impl Fleet {
    fn read(&self) -> [u64; 2] {
        [self.loads[0].load(Ordering::Acquire), self.loads[1].load(Ordering::Acquire)]
    }

    /// The least loaded pod of what was read.
    fn least(seen: [u64; 2]) -> usize {
        usize::from(seen[1] < seen[0])
    }

    /// One selection as `routing::select_and_charge` makes it, with so many tries; true when one went through.
    fn select_and_charge(&self, tries: u32) -> bool {
        (0..tries).any(|_| {
            let Some(token) = self.commit.begin() else { return false };
            let seen = self.read();
            let charge = || {
                assert_eq!(self.read(), seen, "the loads that were decided on are not those at the charge");
                self.loads[Fleet::least(seen)].fetch_add(1, Ordering::AcqRel);
            };
            self.commit.try_commit(token, charge).is_some()
        })
    }

    /// What a selection does that lost too often.
    fn charge_blindly(&self) {
        let seen = self.read();
        self.commit.charge_blind(|| self.loads[Fleet::least(seen)].fetch_add(1, Ordering::AcqRel));
    }
}

#[test]
fn two_selections_never_decide_on_the_same_loads() {
    loom::model(|| {
        let fleet = Arc::new(Fleet::default());
        let other = thread::spawn({
            let fleet = Arc::clone(&fleet);
            move || fleet.select_and_charge(3)
        });
        let charged = u64::from(fleet.select_and_charge(3)) + u64::from(other.join().unwrap());
        let loads = fleet.read();
        assert!(charged >= 1 && loads[0] + loads[1] == charged && loads[0].abs_diff(loads[1]) <= 1, "{loads:?}");
    });
}

#[test]
fn three_selections_at_once_spread() {
    let mut model = loom::model::Builder::new();
    // Every interleaving with up to two forced switches; all of them would take minutes.
    model.preemption_bound = Some(2);
    model.check(|| {
        let fleet = Arc::new(Fleet::default());
        let others = [0, 1].map(|_| {
            let fleet = Arc::clone(&fleet);
            thread::spawn(move || fleet.select_and_charge(2))
        });
        let mut charged = u64::from(fleet.select_and_charge(2));
        for other in others {
            charged += u64::from(other.join().unwrap());
        }
        let loads = fleet.read();
        assert!(charged >= 1 && loads[0] + loads[1] == charged && loads[0].abs_diff(loads[1]) <= 1, "{loads:?}");
    });
}

/// A charge without the check is counted like any other, and whoever decides afterwards sees it.
#[test]
fn a_blind_charge_is_seen_by_the_next_selection() {
    loom::model(|| {
        let fleet = Arc::new(Fleet::default());
        let Some(token) = fleet.commit.begin() else { panic!("nobody charges") };
        let other = thread::spawn({
            let fleet = Arc::clone(&fleet);
            move || fleet.charge_blindly()
        });
        other.join().unwrap();
        assert!(fleet.commit.try_commit(token, || ()).is_none(), "what was read before the charge is old");
        assert!(fleet.select_and_charge(1));
        assert_eq!(fleet.read(), [1, 1]);
    });
}

#[test]
fn a_release_beside_a_selection_is_never_lost() {
    loom::model(|| {
        let fleet = Arc::new(Fleet::default());
        fleet.loads[0].fetch_add(1, Ordering::AcqRel);
        let other = thread::spawn({
            let fleet = Arc::clone(&fleet);
            move || fleet.loads[0].fetch_sub(1, Ordering::AcqRel)
        });
        let Some(token) = fleet.commit.begin() else { panic!("nobody charges") };
        let seen = fleet.read();
        let charged = fleet.commit.try_commit(token, || {
            // A release does not invalidate a decision: it only makes a pod less loaded than it was thought to be.
            assert!(fleet.read()[0] <= seen[0]);
            fleet.loads[1].fetch_add(1, Ordering::AcqRel);
        });
        assert!(charged.is_some());
        other.join().unwrap();
        assert_eq!(fleet.read(), [0, 1]);
    });
}

fn tick(seconds: u64) -> Tick {
    Tick::from_millis(seconds * 1000)
}

const TTL: Duration = Duration::from_secs(1);

fn prefill(load: &TokenLoad) -> Claim {
    let claim = Claim::new(false, 5, tick(1), TTL);
    claim.charge(load);
    claim
}

/// The request ends its prefill, and is over, while the janitor finds it too old.
#[test]
fn request_and_janitor_take_each_part_back_once() {
    loom::model(|| {
        let load = Arc::new(TokenLoad::default());
        let claim = Arc::new(prefill(&load));
        let janitor = thread::spawn({
            let (load, claim) = (Arc::clone(&load), Arc::clone(&claim));
            move || claim.sweep(&load, tick(9)).is_some()
        });
        claim.release(&load, ACTIVE, Some(tick(2)));
        claim.release_unless_stranded(&load);
        janitor.join().unwrap();
        assert!(load.view().is_zero() && claim.is_done(), "{:?}", load.view());
    });
}

/// The request strands its blocks while the janitor finds it too old: either may win, the blocks leave once.
#[test]
fn stranding_beside_the_janitor_leaves_nothing_behind() {
    loom::model(|| {
        let load = Arc::new(TokenLoad::default());
        let claim = Arc::new(prefill(&load));
        let janitor = thread::spawn({
            let (load, claim) = (Arc::clone(&load), Arc::clone(&claim));
            move || claim.sweep(&load, tick(9))
        });
        claim.release(&load, ACTIVE, None);
        claim.strand(&load, tick(30));
        claim.release_unless_stranded(&load);
        janitor.join().unwrap();
        let view = load.view();
        assert_eq!((view.active, view.kv), (0, view.stranded));
        assert_eq!(claim.is_done(), view.kv == 0);
        claim.sweep(&load, tick(30));
        assert!(load.view().is_zero() && claim.is_done(), "{:?}", load.view());
    });
}

/// A reader in between sees a sum of ages that belongs to the count it sees.
#[test]
fn ages_are_never_torn() {
    loom::model(|| {
        let load = Arc::new(TokenLoad::default());
        let writer = thread::spawn({
            let load = Arc::clone(&load);
            move || {
                let claim = Claim::new(true, 7, tick(1), TTL);
                claim.charge(&load);
                claim.release_unless_stranded(&load);
            }
        });
        let (count, seconds) = load.decode_ages(tick(3));
        assert!((count, seconds) == (0, 0.0) || (count, seconds) == (1, 2.0), "{count} {seconds}");
        writer.join().unwrap();
        assert_eq!(load.decode_ages(tick(3)), (0, 0.0));
    });
}

/// What the others have is replaced while a selection reads it: each word is of one publication.
#[test]
fn a_share_is_never_read_half_old_and_half_new() {
    loom::model(|| {
        let remote = Arc::new(Remote::default());
        let share = |running, pending, open, start| Share {
            running,
            pending,
            decode_open: open,
            decode_start_sum_ms: open * start,
            ..Share::ZERO
        };
        remote.apply(&share(1, 9, 1, 4_000), tick(5), 5_000);
        let writer = thread::spawn({
            let remote = Arc::clone(&remote);
            move || remote.apply(&share(2, 8, 3, 2_000), tick(6), 6_000)
        });
        let whole = Fade::at_age(Duration::ZERO);
        let (_, pending, running) = remote.counts(whole);
        assert!([(9, 1), (8, 2)].contains(&(pending, running)), "{pending} {running}");
        let ages = remote.decode_ages_ms(whole, tick(7));
        assert!([(1, 3_000), (3, 15_000)].contains(&ages), "{ages:?}");
        writer.join().unwrap();
        assert_eq!(remote.decode_ages_ms(whole, tick(7)), (3, 15_000));
        assert_eq!(remote.age(tick(7)), Some(Duration::from_secs(1)));
    });
}

/// A selection while news come in, at whatever moment, does not end the counting for good.
#[test]
fn who_turns_up_is_counted_again_after_every_race() {
    loom::model(|| {
        let news = |answers, newcomers| Heard { answers, newcomers, version: 1 };
        let at = Tick::from_millis;
        let cell = Arc::new(PeerCell::default());
        cell.join(0, 2);
        cell.selected(at(10));
        cell.heard(news(cell.selections(), 0), at(11));
        let selecting = thread::spawn({
            let cell = Arc::clone(&cell);
            move || cell.selected(at(13))
        });
        cell.heard(news(0, 0), at(13));
        selecting.join().unwrap();
        assert!(cell.view().unseen == 0.0);
        cell.selected(at(14));
        cell.heard(news(cell.selections(), 4), at(15));
        cell.heard(news(0, 0), at(20));
        assert!((cell.view().unseen - 1.0).abs() < 1e-9, "{}", cell.view().unseen);
    });
}
