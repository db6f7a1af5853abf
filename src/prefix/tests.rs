//! The index: matching, budget, age, departures, threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::*;
use crate::clock::Tick;
use crate::fleet::PodState;
use crate::knobs::{PrefixKnobs, Tokenizer};
use crate::rng::Rng;
use crate::telemetry::PodLabels;

fn knobs(budget_bytes: usize) -> PrefixKnobs {
    PrefixKnobs {
        tokenizer: Tokenizer::Character,
        block_size: 128,
        hash_seed: None,
        budget_bytes,
        max_blocks: None,
        max_idle: Duration::from_mins(20),
    }
}

fn pod(slot: u32) -> Arc<PodState> {
    Arc::new(PodState::new(slot, Arc::new(PodLabels::default())))
}

fn update(model: &str, hashes: &[u64], slot: u32) -> PrefixUpdate {
    PrefixUpdate { model: model.into(), hashes: hashes.into(), pod: pod(slot) }
}

fn put(index: &PrefixIndex, model: &str, hashes: &[u64], slot: u32, at: u64) {
    index.offer(update(model, hashes, slot));
    index.drain(Tick::from_millis(at));
}

/// The hashes of a prompt nobody else has.
fn prompt(id: u64, blocks: usize) -> Vec<u64> {
    let mut rng = Rng::new(id);
    (0..blocks).map(|_| rng.next_u64()).collect()
}

#[test]
fn percents_follow_the_matched_prefix() {
    let index = PrefixIndex::new(&knobs(1 << 20));
    let hashes = prompt(1, 7);
    put(&index, "m", &hashes[..3], 10, 0);
    put(&index, "m", &hashes, 11, 0);
    put(&index, "m", &hashes[..1], 13, 0);
    assert_eq!(index.match_percents("m", &hashes, &[13, 12, 11, 10]), [14, 0, 100, 42]);
    assert_eq!(index.match_percents("m", &hashes[..2], &[11, 13]), [100, 50]);
    assert_eq!(index.match_percents("m", &[], &[11]), [0]);
    assert_eq!(index.match_percents("m", &hashes, &[]), [0u8; 0]);
    assert_eq!(index.match_percents("m", &prompt(2, 3), &[11]), [0]);
}

#[test]
fn a_hole_ends_the_match() {
    let index = PrefixIndex::new(&knobs(1 << 20));
    let hashes = prompt(1, 4);
    put(&index, "m", &hashes, 1, 0);
    put(&index, "m", &[hashes[0], hashes[2], hashes[3]], 2, 0);
    put(&index, "m", &hashes[1..], 3, 0);
    assert_eq!(index.match_percents("m", &hashes, &[1, 2, 3]), [100, 25, 0]);
    // A block that nobody holds ends it for all.
    let longer = [&hashes[..2], &prompt(9, 1), &hashes[2..]].concat();
    assert_eq!(index.match_percents("m", &longer, &[1, 2, 3]), [40, 20, 0]);
}

#[test]
fn models_do_not_see_each_other() {
    let index = PrefixIndex::new(&knobs(1 << 20));
    let hashes = prompt(1, 3);
    put(&index, "a", &hashes, 1, 0);
    assert_eq!(index.match_percents("b", &hashes, &[1]), [0]);
    assert_eq!(index.match_percents("a", &hashes, &[1]), [100]);
}

#[test]
fn the_queue_is_bounded_by_number_and_bytes() {
    let index = PrefixIndex::new(&knobs(16 << 20));
    for id in 0..1030 {
        index.offer(update("m", &prompt(id, 2), 1));
    }
    assert_eq!((index.stats().queued_updates, index.stats().dropped_updates), (1024, 6));
    let drained = index.drain(Tick(0));
    assert_eq!(drained, Drained { updates: 1024, blocks: 2048, more: false });
    assert_eq!((index.stats().entries, index.stats().queued_updates), (2048, 0));
    // A sixteenth of the budget, 1 MiB, may wait: 131072 hashes.
    for id in 0..3 {
        index.offer(update("m", &prompt(id, 60_000), 1));
    }
    assert_eq!((index.stats().queued_updates, index.stats().dropped_updates), (2, 7));
    assert!(index.stats().bytes >= 960_000);
}

#[test]
fn one_drain_is_bounded() {
    let index = PrefixIndex::new(&knobs(64 << 20));
    for id in 0..3 {
        index.offer(update("m", &prompt(id, 20_000), 1));
    }
    assert_eq!(index.drain(Tick(0)), Drained { updates: 2, blocks: 40_000, more: true });
    assert_eq!(index.drain(Tick(0)), Drained { updates: 1, blocks: 20_000, more: false });
}

#[test]
fn a_tiny_budget_turns_the_index_off() {
    let index = PrefixIndex::new(&knobs(100));
    put(&index, "m", &prompt(1, 3), 1, 0);
    assert_eq!(index.match_percents("m", &prompt(1, 3), &[1]), [0]);
    assert_eq!(index.stats(), PrefixStats { bytes: index.stats().bytes, ..PrefixStats::default() });
}

#[test]
fn the_least_recently_put_goes_first_and_its_end_before_its_start() {
    let index = PrefixIndex::new(&PrefixKnobs { max_blocks: Some(40), ..knobs(1 << 20) });
    let (old, hot) = (prompt(1, 10), prompt(2, 10));
    put(&index, "m", &old, 1, 0);
    put(&index, "m", &hot, 1, 0);
    for id in 0..3 {
        put(&index, "m", &prompt(100 + id, 8), 1, 0);
        put(&index, "m", &hot, 1, 0);
    }
    // 40 places: 10 hot, 24 new, 6 of the old one.
    assert_eq!(index.match_percents("m", &hot, &[1]), [100]);
    assert_eq!(index.match_percents("m", &old, &[1]), [60]);
    assert_eq!((index.stats().entries, index.stats().evictions), (40, 4));
}

#[test]
fn one_prompt_takes_a_quarter_at_most() {
    let index = PrefixIndex::new(&PrefixKnobs { max_blocks: Some(100), ..knobs(1 << 20) });
    let (small, huge) = (prompt(1, 5), prompt(2, 5000));
    put(&index, "m", &small, 1, 0);
    put(&index, "m", &huge, 1, 0);
    assert_eq!(index.stats().entries, 30);
    assert_eq!(index.match_percents("m", &huge[..50], &[1]), [50]);
    assert_eq!(index.match_percents("m", &small, &[1]), [100]);
}

#[test]
fn idle_entries_and_idle_holders_go() {
    let index = PrefixIndex::new(&PrefixKnobs { max_idle: Duration::from_secs(10), ..knobs(1 << 20) });
    let (kept, gone) = (prompt(1, 4), prompt(2, 4));
    put(&index, "m", &kept, 1, 0);
    put(&index, "m", &gone, 1, 0);
    put(&index, "m", &kept, 2, 9_000);
    index.drain(Tick::from_millis(10_999));
    assert_eq!(index.match_percents("m", &gone, &[1]), [100], "ten seconds are not more than ten seconds");
    index.drain(Tick::from_millis(11_000));
    assert_eq!(index.match_percents("m", &gone, &[1]), [0]);
    // The other prompt lives on through pod 2, but pod 1 has not put it for too long.
    assert_eq!(index.match_percents("m", &kept, &[1, 2]), [0, 100]);
    assert_eq!((index.stats().entries, index.stats().expirations), (4, 4));
}

#[test]
fn a_departed_pod_leaves_nothing_behind() {
    let index = PrefixIndex::new(&knobs(8 << 20));
    let shared = prompt(1, 50);
    for slot in 0..4 {
        put(&index, "m", &shared, slot, 0);
        put(&index, "m", &prompt(100 + u64::from(slot), 50), slot, 0);
    }
    let before = index.stats();
    index.forget(2);
    index.drain(Tick::from_millis(0));
    assert_eq!(index.match_percents("m", &shared, &[1, 2, 3]), [100, 0, 100]);
    assert_eq!((index.stats().entries, index.stats().forgotten), (before.entries - 50, 50));
    assert!(index.stats().bytes < before.bytes);
    // A request that still routes on the old snapshot brings nothing back.
    put(&index, "m", &shared, 2, 1000);
    assert_eq!(index.match_percents("m", &shared, &[2]), [0]);
}

#[test]
fn a_departure_is_swept_bit_by_bit() {
    let index = PrefixIndex::new(&knobs(32 << 20));
    for id in 0..10 {
        put(&index, "m", &prompt(id, 5000), 1, 0);
    }
    index.forget(1);
    index.drain(Tick(0));
    let after_one = index.stats().entries;
    assert!((30_000..50_000).contains(&after_one), "{after_one}");
    for _ in 0..4 {
        index.drain(Tick(0));
    }
    assert_eq!(index.stats().entries, 0);
}

#[test]
fn list_bytes_count_against_the_budget() {
    let index = PrefixIndex::new(&knobs(256 << 10));
    let hashes = prompt(1, 20);
    for slot in 0..1500 {
        put(&index, "m", &hashes, slot, 0);
    }
    let stats = index.stats();
    assert!(stats.bytes <= 256 << 10, "{stats:?}");
    assert!(stats.evictions > 0, "20 blocks with 1500 holders each need 240 kB: {stats:?}");
    let matched = index.match_percents("m", &hashes, &[0, 1499]);
    assert!(matched[0] < 100 && matched.iter().all(|percent| *percent >= 70), "the end went first: {matched:?}");
}

#[test]
fn many_candidates_with_many_blocks() {
    let index = PrefixIndex::new(&knobs(64 << 20));
    let hashes = prompt(1, 200);
    for slot in 0..200u32 {
        put(&index, "m", &hashes[..=slot as usize], slot, 0);
    }
    let candidates: Vec<u32> = (0..200).rev().collect();
    let expected: Vec<u8> = (0..200u32).rev().map(|slot| slot.div_ceil(2) as u8).collect();
    assert_eq!(index.match_percents("m", &hashes, &candidates), expected);
}

#[test]
fn r75_churn_lookups_and_eviction_from_many_threads() {
    let index = PrefixIndex::new(&PrefixKnobs { max_idle: Duration::from_secs(2), ..knobs(1 << 20) });
    let stop = AtomicBool::new(false);
    let lookups = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for seed in 0..4u64 {
            let (index, stop, lookups) = (&index, &stop, &lookups);
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                while !stop.load(Ordering::Relaxed) {
                    let hashes = prompt(rng.next_u64() % 300, 40);
                    let slots: Vec<u32> = (0..20).map(|_| rng.below(50) as u32).collect();
                    let percents = index.match_percents("m", &hashes, &slots);
                    assert!(percents.iter().all(|percent| *percent <= 100));
                    lookups.fetch_add(1, Ordering::Relaxed);
                    index.offer(update("m", &hashes, slots[0]));
                    if rng.below(50) == 0 {
                        index.forget(slots[1]);
                    }
                }
            });
        }
        let mut millis = 0;
        while lookups.load(Ordering::Relaxed) < 20_000 {
            millis += 10;
            index.drain(Tick::from_millis(millis));
        }
        stop.store(true, Ordering::Relaxed);
    });
    while index.drain(Tick(0)).more {}
    let stats = index.stats();
    assert!(stats.bytes <= 1 << 20, "{stats:?}");
    // Everything goes by age, and the books are balanced when nothing is left.
    while index.stats().entries > 0 {
        index.drain(Tick::from_millis(100_000_000));
    }
    let empty = PrefixIndex::new(&knobs(1 << 20)).stats();
    assert!(index.stats().bytes >= empty.bytes);
    let hashes = prompt(1, 40);
    put(&index, "m", &hashes, 99, 200_000_000);
    assert_eq!(index.match_percents("m", &hashes, &[99]), [100]);
}

/// Resident memory of this process, bytes.
fn resident() -> usize {
    let pages: usize = std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

const R73_BUDGET: usize = 48 << 20;

/// Runs alone in its own process, started by the next test, so that nobody else's memory is measured.
#[test]
#[ignore = "started by r73_memory_stays_within_the_budget"]
fn r73_alone() {
    let index = PrefixIndex::new(&knobs(R73_BUDGET));
    let before = resident();
    let hot: Vec<Vec<u64>> = (0..50).map(|id| prompt(1_000_000 + id, 64)).collect();
    let mut worst = 100;
    // 8k-token prompts are about 250 blocks of 128 bytes: 2 million distinct blocks, five times what fits.
    for id in 0..8_000u64 {
        index.offer(update("m", &prompt(id, 250), (id % 8) as u32));
        let hot = &hot[(id % 50) as usize];
        if id >= 50 {
            worst = worst.min(index.match_percents("m", hot, &[9])[0]);
        }
        if id < 50 || id % 3 == 0 {
            index.offer(update("m", hot, 9));
        }
        index.drain(Tick::from_millis(id));
    }
    let grown = resident().saturating_sub(before);
    let stats = index.stats();
    println!("grown={grown} counted={} worst={worst} evictions={}", stats.bytes, stats.evictions);
    assert!(stats.bytes <= R73_BUDGET as u64, "{stats:?}");
    assert!(stats.evictions > 1_000_000, "{stats:?}");
    assert!(grown <= R73_BUDGET, "{grown} bytes resident for a budget of {R73_BUDGET}");
    assert!(grown * 2 >= stats.bytes as usize, "the accounting is not a fairy tale: {grown} of {}", stats.bytes);
    assert_eq!(worst, 100, "the hot set stays");
}

#[test]
fn r73_memory_stays_within_the_budget() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "prefix::tests::r73_alone", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed") && text.contains("worst=100"), "{text}");
}
