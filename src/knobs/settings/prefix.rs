//! The prefix index.

use super::{Group, one};

pub(super) const PREFIX: Group = Group {
    title: "Prefix index",
    settings: &[
        one(
            "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE",
            "character",
            "`character` or `tiktoken`",
            "",
            "What is hashed: the prompt's bytes, or its cl100k_base tokens.",
        ),
        one(
            "AIBRIX_PREFIX_CACHE_BLOCK_SIZE",
            "128",
            "bytes of tokenizer output",
            "",
            "Size of one block. (The reference gateway's own default is 4; its manifests set 128.)",
        ),
        one(
            "AIBRIX_PREFIX_CACHE_HASH_SEED",
            "unset",
            "number",
            "",
            "Seed of the block hashes; unset means random, and with Redis the same for all replicas.",
        ),
        one(
            "TANDEM_PREFIX_CACHE_BYTES",
            "268435456",
            "bytes",
            "",
            "Memory of the index: what is not put again for longest goes first. One prompt takes a quarter of it at most.",
        ),
        one(
            "AIBRIX_PREFIX_CACHE_BLOCK_NUMBER",
            "unset",
            "blocks",
            "",
            "When set, a bound on the number of blocks beside that on the memory; the lower one holds.",
        ),
        one(
            "AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS",
            "20",
            "minutes",
            "",
            "Blocks that were not put again for this long go.",
        ),
    ],
};
