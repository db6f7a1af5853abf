//! The prefix index: which prefill pod has recently computed which prompt prefix (reference section 7).

mod hash;
mod index;
mod tokens;

pub use hash::{BlockHashes, block_hashes};
pub use index::{PrefixIndex, PrefixUpdate};
pub use tokens::{count_tokens_up_to, tokenize};
