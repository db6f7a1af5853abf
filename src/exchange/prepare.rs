//! Work on the prompt that a selection needs: token counts and block hashes. Pure, and big prompts are worth a thread.

use crate::knobs::Tokenizer;
use crate::prefix::{BlockHashes, MAX_PROMPT_BLOCKS, block_hashes, count_tokens_up_to, tokenize};
use crate::request::embeddings;
use crate::routing::PromptLength;

/// Prompts up to this many bytes are tokenised where they are: about a quarter of a millisecond.
const INLINE_TOKENIZE_BYTES: usize = 8 * 1024;

/// Prompts up to this many blocks, and up to this many bytes, are hashed where they are: both about a quarter of a
/// millisecond.
const INLINE_HASH_BLOCKS: usize = 4096;
const INLINE_HASH_BYTES: usize = 1024 * 1024;

/// Of a tiktoken key exactly, of text about.
const BYTES_PER_TOKEN: u64 = 4;

/// What to compute.
#[derive(Debug, Default)]
pub struct PrepareJob {
    /// Count the tokens of this text, up to the limit, when buckets depend on it.
    pub count: Option<(String, u64)>,
    /// The length, where it is known already.
    pub known: Option<PromptLength>,
    /// Texts of an embeddings request that may be over its limits.
    pub inputs: Vec<(usize, String)>,
    /// Hash this prefix key, when a policy looks prefixes up.
    pub hash: Option<HashJob>,
    /// What the prompt's parts that are no text count beside it.
    pub non_text_tokens: u64,
}

/// Input of the block hashes.
#[derive(Debug)]
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
    /// The text that was counted, for whoever still needs it.
    pub text: String,
    /// The limit of embeddings requests that it is over, for the client.
    pub over_limit: Option<String>,
    /// Block hashes, empty if they were not asked for. Of a longer prompt, those of its first
    /// [`MAX_PROMPT_BLOCKS`] blocks: the index does not store more of one.
    pub hashes: BlockHashes,
    /// Tokens of the prefix key: exact with the tiktoken tokenizer, a quarter of its bytes else; with those of parts that
    /// are no text. 0 if not asked for.
    pub prefix_tokens: u64,
}

impl Prepared {
    /// Nothing is known about the prompt.
    pub fn unknown() -> Prepared {
        Prepared {
            length: PromptLength::Unknown,
            text: String::new(),
            over_limit: None,
            hashes: BlockHashes::new(),
            prefix_tokens: 0,
        }
    }
}

impl PrepareJob {
    /// Does not count what was counted far enough before, nor what was lost in the attempt.
    pub fn reuse(&mut self, counted: PromptLength) {
        let Some((_, limit)) = &self.count else { return };
        if !matches!(counted, PromptLength::MoreThan(tokens) if tokens < *limit) {
            self.count = None;
            self.known = Some(counted);
        }
    }

    /// Too much work for the event loop.
    pub fn is_heavy(&self) -> bool {
        let counting = self.count.as_ref().is_some_and(|(text, _)| text.len() > INLINE_TOKENIZE_BYTES);
        let hashing = self.hash.as_ref().is_some_and(|hash| match hash.tokenizer {
            Tokenizer::Tiktoken => hash.key.len() > INLINE_TOKENIZE_BYTES,
            Tokenizer::Character => {
                hash.key.len() > INLINE_HASH_BYTES || hash.key.len() / hash.block_size.max(1) > INLINE_HASH_BLOCKS
            }
        });
        counting || hashing || !self.inputs.is_empty()
    }

    /// Does the work.
    pub fn run(self) -> Prepared {
        let (length, text) = match self.count {
            None => (self.known.unwrap_or(PromptLength::Unknown), String::new()),
            Some((text, limit)) => {
                let limit = usize::try_from(limit).unwrap_or(usize::MAX);
                let length = match count_tokens_up_to(&text, limit) {
                    Some(tokens) => PromptLength::Exactly(tokens as u64),
                    None => PromptLength::MoreThan(limit as u64),
                };
                (length.plus(self.non_text_tokens), text)
            }
        };
        let over_limit = embeddings::over_limit(&self.inputs, count_tokens_up_to);
        let Some(job) = self.hash else { return Prepared { length, text, over_limit, ..Prepared::unknown() } };
        let bytes = tokenize(job.tokenizer, &job.key);
        let longest = job.block_size.saturating_mul(MAX_PROMPT_BLOCKS);
        let hashes = block_hashes(bytes.get(..longest).unwrap_or(&bytes), job.block_size, job.seed);
        let prefix_tokens = (bytes.len() as u64 / BYTES_PER_TOKEN).saturating_add(self.non_text_tokens);
        Prepared { length, text, over_limit, hashes, prefix_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(tokenizer: Tokenizer, bytes: usize, block_size: usize) -> PrepareJob {
        let hash = HashJob { key: vec![b'x'; bytes], tokenizer, block_size, seed: 0 };
        PrepareJob { hash: Some(hash), ..PrepareJob::default() }
    }

    fn counting(bytes: usize, limit: u64) -> PrepareJob {
        PrepareJob { count: Some(("x".repeat(bytes), limit)), ..PrepareJob::default() }
    }

    #[test]
    fn what_was_counted_far_enough_is_not_counted_again() {
        use PromptLength::{Exactly, MoreThan, Unknown};
        for (before, limit, expected) in [
            (Unknown, 9, Unknown),
            (Exactly(3), 9, Exactly(3)),
            (Exactly(30), 9, Exactly(30)),
            (MoreThan(8), 9, Exactly(1)),
            (MoreThan(9), 9, MoreThan(9)),
            (MoreThan(10), 9, MoreThan(10)),
        ] {
            let mut job = counting(8, limit);
            job.reuse(before);
            assert_eq!(job.run().length, expected, "{before:?}");
        }
        let mut nothing = PrepareJob::default();
        nothing.reuse(Exactly(5));
        assert_eq!(nothing.run().length, Unknown, "nobody asked");
        assert_eq!(counting(8, 9).run().text, "xxxxxxxx", "the text comes back");
    }

    #[test]
    fn only_small_prompts_are_worked_on_where_they_are() {
        use Tokenizer::{Character, Tiktoken};
        for (job, heavy) in [
            (PrepareJob::default(), false),
            (job(Tiktoken, INLINE_TOKENIZE_BYTES, 128), false),
            (job(Tiktoken, INLINE_TOKENIZE_BYTES + 1, 128), true),
            (job(Character, INLINE_HASH_BLOCKS * 128 + 127, 128), false),
            (job(Character, (INLINE_HASH_BLOCKS + 1) * 128, 128), true),
            (job(Character, INLINE_HASH_BYTES, 4096), false),
            (job(Character, INLINE_HASH_BYTES + 1, 4096), true),
            (job(Character, 1000, 0), false),
            (counting(INLINE_TOKENIZE_BYTES, 9), false),
            (counting(INLINE_TOKENIZE_BYTES + 1, 9), true),
        ] {
            assert_eq!(job.is_heavy(), heavy);
        }
    }

    #[test]
    fn a_prompt_has_a_bounded_number_of_hashes() {
        assert_eq!(job(Tokenizer::Character, 400, 4).run().hashes.len(), 100);
        assert_eq!(job(Tokenizer::Character, MAX_PROMPT_BLOCKS + 9, 1).run().hashes.len(), MAX_PROMPT_BLOCKS);
        let short = job(Tokenizer::Character, 9, usize::MAX).run();
        assert_eq!(short, Prepared { prefix_tokens: 2, ..Prepared::unknown() });
        assert_eq!(job(Tokenizer::Tiktoken, 800, 4).run().prefix_tokens, 100, "eight x are one token");
    }
}
