//! Small seeded randomness for routing decisions.
//!
//! A decision is a function of its inputs and one seed, so that a test, a replay or `/debug/decisions` can repeat it.
//! Nothing here is fit for secrets.

use std::sync::atomic::{AtomicU64, Ordering};

/// SplitMix64 (Steele, Lea and Flood 2014): one 64-bit word of state, passes the usual statistical batteries.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that repeats itself for the same seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A uniform number in `0..bound`; 0 when `bound` is 0. Bias is below 2^-32 for any real fleet size.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A uniform number in `0.0..1.0`.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Puts `items` into a uniformly random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last + 1);
            items.swap(last, other);
        }
    }
}

fn mix(word: u64) -> u64 {
    let mut z = word;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Hands out a fresh seed to each request, without a lock.
#[derive(Debug)]
pub struct Seeds(AtomicU64);

impl Seeds {
    /// A sequence of seeds that is fixed by `start`; pass something random in production.
    pub fn new(start: u64) -> Seeds {
        Seeds(AtomicU64::new(start))
    }

    /// The next seed.
    pub fn next(&self) -> u64 {
        mix(self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_numbers() {
        let numbers = |seed| {
            let mut rng = Rng::new(seed);
            (0..5).map(|_| rng.next_u64()).collect::<Vec<_>>()
        };
        assert_eq!(numbers(7), numbers(7));
        assert_ne!(numbers(7), numbers(8));
    }

    #[test]
    fn below_covers_its_range_evenly() {
        let mut rng = Rng::new(1);
        let mut seen = [0u32; 7];
        for _ in 0..70_000 {
            seen[rng.below(7)] += 1;
        }
        assert!(seen.iter().all(|&n| (9_500..10_500).contains(&n)), "{seen:?}");
        assert_eq!(rng.below(0), 0);
        assert_eq!(rng.below(1), 0);
    }

    #[test]
    fn seeds_differ() {
        let seeds = Seeds::new(0);
        assert_ne!(seeds.next(), seeds.next());
    }

    #[test]
    fn sixteen_processes_that_begin_at_random_never_give_a_seed_twice() {
        let mut random = Rng::new(0x7a4d_e111);
        let mut all = std::collections::HashSet::with_capacity(1_000_000);
        for _ in 0..16 {
            let seeds = Seeds::new(random.next_u64());
            all.extend((0..62_500).map(|_| seeds.next()));
        }
        assert_eq!(all.len(), 1_000_000);
    }
}
