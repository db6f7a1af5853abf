//! Chained block hashes.

/// Hashes of the full blocks of one prompt, in order, each chained to the one before.
pub type BlockHashes = Vec<u64>;

/// `h_0 = seed; h_i = XXH64(LE64(h_{i-1}) ‖ block_i, seed)` over full blocks of `block_size` bytes.
pub fn block_hashes(_bytes: &[u8], _block_size: usize, _seed: u64) -> BlockHashes {
    Vec::new()
}
