//! The prefix index: which prefill pod has recently computed which prompt prefix (reference gateway, section 7).
//!
//! Promises: lookups take no lock and never wait; memory stays within a byte budget, whatever clients send; one
//! task applies updates and owns the order of eviction; entries of a departed pod go away without a full stop.

mod hash;
mod holders;
mod index;
mod lru;
mod matching;
mod tokens;
mod writer;

#[cfg(test)]
mod tests;

pub use hash::{BlockHashes, HashSeed, block_hashes};
pub use index::{Drained, PrefixIndex, PrefixStats, PrefixUpdate};
pub use tokens::{count_tokens_up_to, tokenize};
pub use writer::MAX_PROMPT_BLOCKS;
