//! Work on the prompt that a selection needs: token counts and block hashes. Pure, and big prompts are worth a thread.

use crate::knobs::Tokenizer;
use crate::prefix::{BlockHashes, block_hashes, count_tokens_up_to, tokenize};
use crate::routing::PromptLength;

/// Prompts up to this many bytes are tokenised where they are: about a quarter of a millisecond.
const INLINE_TOKENIZE_BYTES: usize = 8 * 1024;

/// What to compute.
#[derive(Clone, Debug, Default)]
pub struct PrepareJob {
    /// Count the tokens of this text, up to the limit, when buckets depend on it.
    pub count: Option<(String, u64)>,
    /// Hash this prefix key, when a policy looks prefixes up.
    pub hash: Option<HashJob>,
}

/// Input of the block hashes.
#[derive(Clone, Debug)]
pub struct HashJob {
    /// The prefix key.
    pub key: Vec<u8>,
    /// How it becomes bytes.
    pub tokenizer: Tokenizer,
    /// Block size in those bytes.
    pub block_size: usize,
    /// Seed of the chain.
    pub seed: u64,
}

/// What came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Prompt length, if it was asked for.
    pub length: PromptLength,
    /// Block hashes, empty if they were not asked for.
    pub hashes: BlockHashes,
}

impl PrepareJob {
    /// Too much work for the event loop.
    pub fn is_heavy(&self) -> bool {
        let counting = self.count.as_ref().is_some_and(|(text, _)| text.len() > INLINE_TOKENIZE_BYTES);
        let hashing = self
            .hash
            .as_ref()
            .is_some_and(|hash| hash.tokenizer == Tokenizer::Tiktoken && hash.key.len() > INLINE_TOKENIZE_BYTES);
        counting || hashing
    }

    /// Does the work.
    pub fn run(self) -> Prepared {
        let length = match self.count {
            None => PromptLength::Unknown,
            Some((text, limit)) => {
                let limit = usize::try_from(limit).unwrap_or(usize::MAX);
                match count_tokens_up_to(&text, limit) {
                    Some(tokens) => PromptLength::Exactly(tokens as u64),
                    None => PromptLength::MoreThan(limit as u64),
                }
            }
        };
        let hashes = match self.hash {
            None => BlockHashes::new(),
            Some(job) => block_hashes(&tokenize(job.tokenizer, &job.key), job.block_size, job.seed),
        };
        Prepared { length, hashes }
    }
}
