//! Requests that were refused because their model has no ready pod: what an autoscaler waits for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Tick;

/// How far back requests count.
pub const UNSERVED_WINDOW: Duration = Duration::from_mins(1);
/// Models counted; requests for further ones are not.
const MAX_MODELS: usize = 1024;

const PARTS: u64 = 12;
const PART: Duration = Duration::from_secs(UNSERVED_WINDOW.as_secs() / PARTS);
const COUNT_BITS: u32 = 24;
const MOST: u64 = (1 << COUNT_BITS) - 1;

/// Requests of a model in the last minute: a ring of parts, each with its number and a count in one word.
#[derive(Debug, Default)]
struct Ring([AtomicU64; PARTS as usize]);

impl Ring {
    fn count(&self, part: u64) {
        let Some(cell) = self.0.get((part % PARTS) as usize) else { return };
        let fresh = |word: u64| match (word >> COUNT_BITS).cmp(&part) {
            std::cmp::Ordering::Less => part << COUNT_BITS | 1,
            std::cmp::Ordering::Equal => word + u64::from(word & MOST < MOST),
            // Of a request that was late.
            std::cmp::Ordering::Greater => word,
        };
        cell.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| Some(fresh(word))).ok();
    }

    fn sum(&self, part: u64) -> u64 {
        let live = |word: u64| (word >> COUNT_BITS) + PARTS > part && word >> COUNT_BITS <= part;
        let words = self.0.iter().map(|cell| cell.load(Ordering::Relaxed));
        words.filter(|word| live(*word)).map(|word| word & MOST).sum()
    }
}

/// The counts of all models. Lock-free.
#[derive(Debug, Default)]
pub struct Unserved {
    models: papaya::HashMap<Arc<str>, Ring, foldhash::fast::RandomState>,
}

/// Parts are numbered from 1, so that an untouched word belongs to none.
fn part_of(now: Tick) -> u64 {
    now.0 / u64::try_from(PART.as_nanos()).unwrap_or(u64::MAX) + 1
}

impl Unserved {
    /// A request was refused. `model` comes from the fleet or from its routes, never from a client alone.
    pub fn refused(&self, model: &Arc<str>, now: Tick) {
        let models = self.models.pin();
        if let Some(ring) = models.get(model) {
            return ring.count(part_of(now));
        }
        if models.len() < MAX_MODELS {
            models.get_or_insert_with(Arc::clone(model), Ring::default).count(part_of(now));
        }
    }

    /// Requests refused within [`UNSERVED_WINDOW`], of each model of which one ever was.
    pub fn recent(&self, now: Tick) -> Vec<(Arc<str>, u64)> {
        let models = self.models.pin();
        models.iter().map(|(model, ring)| (Arc::clone(model), ring.sum(part_of(now)))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Tick {
        Tick::from_millis(seconds * 1000)
    }

    fn of(unserved: &Unserved, model: &str, now: Tick) -> Option<u64> {
        unserved.recent(now).into_iter().find(|(name, _)| &**name == model).map(|(_, count)| count)
    }

    #[test]
    fn the_last_minute_counts_and_then_falls_to_zero() {
        let (unserved, model) = (Unserved::default(), Arc::from("m"));
        assert_eq!(of(&unserved, "m", at(0)), None);
        for second in [0, 1, 4, 5, 50] {
            unserved.refused(&model, at(second));
        }
        for (second, expected) in [(50, 5), (59, 5), (60, 2), (64, 2), (65, 1), (109, 1), (110, 0), (100_000, 0)] {
            assert_eq!(of(&unserved, "m", at(second)), Some(expected), "{second}");
        }
        unserved.refused(&model, at(100_000));
        assert_eq!(of(&unserved, "m", at(100_000)), Some(1));
        unserved.refused(&model, at(3));
        assert_eq!(of(&unserved, "m", at(100_000)), Some(1), "a late one is not counted");
    }

    #[test]
    fn models_are_bounded_and_threads_lose_nothing() {
        let unserved = Unserved::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| unserved.refused(&Arc::from("m"), at(1))));
            }
        });
        assert_eq!(of(&unserved, "m", at(1)), Some(4000));
        for number in 0..2 * MAX_MODELS {
            unserved.refused(&Arc::from(format!("x{number}")), at(1));
        }
        assert_eq!(unserved.recent(at(1)).len(), MAX_MODELS);
    }
}
