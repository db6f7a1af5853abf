//! Chained block hashes.

use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh64::{Xxh64, xxh64};

/// Hashes of the full blocks of one prompt, in order, each chained to the one before.
pub type BlockHashes = Vec<u64>;

/// Blocks up to this size are hashed from one buffer on the stack, which is faster than the streaming hasher.
const BUFFERED_BLOCK: usize = 512;

/// The seed of the prefix hashes: this replica's own until the replicas have agreed on one.
///
/// Whoever knows it can tell from hashes which prompts were sent, so it is random, made of nothing else, and stays within
/// the fleet.
#[derive(Debug)]
pub struct HashSeed(AtomicU64);

impl HashSeed {
    /// A first seed.
    pub fn new(seed: u64) -> HashSeed {
        HashSeed(AtomicU64::new(seed))
    }

    /// The seed now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Replaces it. What is known by hashes of the old one is found no more, and expires.
    pub fn set(&self, seed: u64) {
        self.0.store(seed, Ordering::Relaxed);
    }
}

/// `h_0 = seed; h_i = XXH64(LE64(h_{i-1}) ‖ block_i, seed)` over full blocks of `block_size` bytes (reference gateway,
/// section 7). A rest shorter than a block is not hashed; a block size of 0 hashes nothing.
pub fn block_hashes(bytes: &[u8], block_size: usize, seed: u64) -> BlockHashes {
    if block_size == 0 {
        return Vec::new();
    }
    let mut previous = seed;
    let mut hashes = Vec::with_capacity(bytes.len() / block_size);
    let mut buffer = [0u8; 8 + BUFFERED_BLOCK];
    for block in bytes.chunks_exact(block_size) {
        previous = if let Some(joined) = block_size.checked_add(8).and_then(|end| buffer.get_mut(..end)) {
            let (head, tail) = joined.split_at_mut(8);
            head.copy_from_slice(&previous.to_le_bytes());
            tail.copy_from_slice(block);
            xxh64(joined, seed)
        } else {
            let mut hasher = Xxh64::new(seed);
            hasher.update(&previous.to_le_bytes());
            hasher.update(block);
            hasher.digest()
        };
        hashes.push(previous);
    }
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_values_of_section_7() {
        let bytes: Vec<u8> = (1..=13).collect();
        for (seed, expected) in [
            (0, [0xed29_04c5_94e5_58d1, 0x7d9b_d50e_c506_44c0, 0xd2df_48f2_0437_57b3]),
            (42, [0xdb3e_9158_860d_93dc, 0xf6e7_eaf2_dd5b_1bcf, 0x1afb_3a63_efc6_c2c2]),
            (99, [0xb5a8_6771_0993_b553, 0xea87_b309_4486_379a, 0xd11c_9264_a358_3306u64]),
        ] {
            assert_eq!(block_hashes(&bytes, 4, seed), expected, "seed {seed}");
        }
    }

    #[test]
    fn only_full_blocks_count() {
        let bytes = [7u8; 300];
        for (len, block, count) in
            [(0, 4, 0), (3, 4, 0), (4, 4, 1), (7, 4, 1), (8, 4, 2), (300, 128, 2), (300, 0, 0), (300, 300, 1)]
        {
            assert_eq!(block_hashes(&bytes[..len], block, 1).len(), count, "{len} / {block}");
        }
    }

    #[test]
    fn a_hash_depends_on_everything_before_it() {
        let one = block_hashes(b"aaaabbbbcccc", 4, 0);
        let other = block_hashes(b"xaaabbbbcccc", 4, 0);
        assert!(one.iter().zip(&other).all(|(a, b)| a != b));
        let same_start = block_hashes(b"aaaabbbbdddd", 4, 0);
        assert_eq!(one[..2], same_start[..2]);
        assert_ne!(one[2], same_start[2]);
    }

    #[test]
    fn large_blocks_hash_as_small_ones_do() {
        // The two code paths must agree, so compare with the definition on either side of the buffer size.
        for block in [BUFFERED_BLOCK - 1, BUFFERED_BLOCK, BUFFERED_BLOCK + 1] {
            let bytes: Vec<u8> = (0..block * 2).map(|i| (i % 251) as u8).collect();
            let mut previous = 5u64;
            let expected: Vec<u64> = bytes
                .chunks_exact(block)
                .map(|b| {
                    previous = xxh64(&[&previous.to_le_bytes()[..], b].concat(), 5);
                    previous
                })
                .collect();
            assert_eq!(block_hashes(&bytes, block, 5), expected);
        }
    }
}
