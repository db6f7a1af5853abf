//! Charges and the commit step under interleaving, alone and with threads.

mod remote;
mod starts;
mod tokens;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use super::*;
use crate::fleet::PodState;
use crate::telemetry::PodLabels;

fn pod() -> Arc<PodState> {
    Arc::new(PodState::new(1, Arc::new(PodLabels::default())))
}

#[derive(Clone, Debug)]
enum Step {
    OpenPrefill,
    OpenDecode,
    HandOver(usize),
    DropPrefill(usize),
    DropDecode(usize),
    Complete(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        Just(Step::OpenPrefill),
        Just(Step::OpenDecode),
        (0usize..8).prop_map(Step::HandOver),
        (0usize..8).prop_map(Step::DropPrefill),
        (0usize..8).prop_map(Step::DropDecode),
        (0usize..8).prop_map(Step::Complete),
    ]
}

proptest! {
    #[test]
    fn gauges_equal_open_guards(steps in proptest::collection::vec(step(), 0..80)) {
        let pod = pod();
        let mut prefills: Vec<PrefillCharge> = Vec::new();
        let mut decodes: Vec<(DecodeCharge, bool)> = Vec::new();
        let mut completed = 0;
        for step in steps {
            match step {
                Step::OpenPrefill => prefills.push(PrefillCharge::open(&pod)),
                Step::OpenDecode => decodes.push((DecodeCharge::open(&pod), false)),
                Step::HandOver(i) => {
                    if let Some((charge, handed)) = decodes.get_mut(i) {
                        charge.hand_over();
                        *handed = true;
                    }
                }
                Step::DropPrefill(i) if i < prefills.len() => drop(prefills.swap_remove(i)),
                Step::DropDecode(i) if i < decodes.len() => drop(decodes.swap_remove(i)),
                Step::Complete(i) if i < decodes.len() => {
                    decodes.swap_remove(i).0.complete();
                    completed += 1;
                }
                _ => {}
            }
            let running = decodes.iter().filter(|(_, handed)| *handed).count() as u64;
            let expected = LoadView {
                prefills: prefills.len() as u64,
                pending: decodes.len() as u64 - running,
                running,
                completed,
            };
            prop_assert_eq!(pod.load.view(), expected);
            prop_assert_eq!(pod.load.view().in_flight(), (prefills.len() + decodes.len()) as u64);
        }
        drop(prefills);
        drop(decodes);
        prop_assert_eq!(pod.load.view(), LoadView { completed, ..LoadView::default() });
    }
}

#[test]
fn r58_handing_over_twice_counts_once() {
    let pod = pod();
    let mut charge = DecodeCharge::open(&pod);
    charge.hand_over();
    charge.hand_over();
    assert_eq!((pod.load.view().pending, pod.load.view().running), (0, 1));
    charge.complete();
    assert_eq!(pod.load.view(), LoadView { completed: 1, ..LoadView::default() });
}

#[test]
fn a_handed_over_request_is_never_seen_nowhere_or_twice() {
    const HELD: u64 = 64;
    let pod = pod();
    let stop = AtomicBool::new(false);
    let mut held: Vec<DecodeCharge> = (0..HELD).map(|_| DecodeCharge::open(&pod)).collect();
    std::thread::scope(|scope| {
        let observer = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let seen = pod.load.view().decodes();
                // One more while a successor is open before its predecessor is dropped.
                if !(HELD..=HELD + 1).contains(&seen) {
                    return Err(seen);
                }
            }
            Ok(())
        });
        for _ in 0..500 {
            for charge in &mut held {
                charge.hand_over();
            }
            for charge in &mut held {
                *charge = DecodeCharge::open(&pod);
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(observer.join().unwrap(), Ok(()));
    });
    drop(held);
    assert_eq!(pod.load.view(), LoadView::default());
}

#[test]
fn charges_from_many_threads_cancel_out() {
    let pod = pod();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for round in 0..2000 {
                    let prefill = PrefillCharge::open(&pod);
                    let mut decode = DecodeCharge::open(&pod);
                    if round % 3 > 0 {
                        decode.hand_over();
                    }
                    drop(prefill);
                    if round % 3 == 1 {
                        decode.complete();
                    }
                }
            });
        }
    });
    let view = pod.load.view();
    assert_eq!((view.prefills, view.pending, view.running), (0, 0, 0));
    assert_eq!(view.completed, 8 * (0..2000).filter(|r| r % 3 == 1).count() as u64);
}

#[test]
fn a_token_is_good_for_one_commit() {
    let commit = Commit::default();
    let (first, second) = (commit.begin().unwrap(), commit.begin().unwrap());
    assert_eq!(commit.try_commit(first, || 1), Some(1));
    assert_eq!(commit.try_commit(second, || 2), None);
    let third = commit.begin().unwrap();
    assert_eq!(commit.try_commit(third, || 3), Some(3));
}

#[test]
fn a_blind_charge_makes_others_decide_again() {
    let commit = Commit::default();
    let token = commit.begin().unwrap();
    assert_eq!(commit.charge_blind(|| 7), 7);
    assert_eq!(commit.try_commit(token, || ()), None);
    assert!(commit.begin().is_some());
}

#[test]
fn while_somebody_writes_nobody_decides_and_a_blind_charge_does_not_disturb() {
    let commit = Commit::default();
    let token = commit.begin().unwrap();
    let inside = commit.try_commit(token, || {
        assert_eq!(commit.begin(), None, "bounded, and not a token on an odd version");
        commit.charge_blind(|| ());
        commit.begin()
    });
    assert_eq!(inside, Some(None));
    let after = commit.begin().unwrap();
    assert_ne!(after, token);
    assert_eq!(commit.try_commit(after, || ()), Some(()));
}

#[test]
fn a_panic_while_charging_does_not_close_the_model() {
    let commit = Commit::default();
    let token = commit.begin().unwrap();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| commit.try_commit(token, || panic!("boom"))));
    assert!(caught.is_err());
    let token = commit.begin().expect("the version is even again");
    assert_eq!(commit.try_commit(token, || ()), Some(()));
}

#[test]
fn commits_exclude_each_other() {
    let commit = Commit::default();
    let busy = AtomicBool::new(false);
    let total = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut done = 0;
                while done < 500 {
                    let Some(token) = commit.begin() else { continue };
                    let committed = commit.try_commit(token, || {
                        assert!(!busy.swap(true, Ordering::AcqRel), "two at once");
                        // Not one atomic step: lost when two writers overlap.
                        let before = total.load(Ordering::Relaxed);
                        total.store(before + 1, Ordering::Relaxed);
                        busy.store(false, Ordering::Release);
                    });
                    done += u32::from(committed.is_some());
                }
            });
        }
    });
    assert_eq!(total.load(Ordering::Relaxed), 4000);
}
