//! Prompts and the text that the simulated model makes of them.
//!
//! A prompt is a byte string: the rendered text, or four bytes for each token id. Four bytes are one token (the last may
//! be short), 64 bytes are one KV block of 16 tokens. The same prompt always leads to the same output, whoever
//! computed it, so a disaggregated answer can be compared with a plain one.

use xxhash_rust::xxh64::xxh64;

/// Prompt bytes that count as one token.
pub const BYTES_PER_TOKEN: usize = 4;
/// Tokens in one KV block.
pub const BLOCK_TOKENS: u32 = 16;
const BLOCK_BYTES: usize = BYTES_PER_TOKEN * BLOCK_TOKENS as usize;

/// A prompt as the scheduler sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prompt {
    /// Length in tokens.
    pub tokens: u32,
    /// Identity of the whole prompt, model and salt included.
    pub hash: u64,
    /// Chained hashes of the full blocks, for the prefix cache.
    pub chain: Vec<u64>,
    /// Token ids as `/tokenize` and `prompt_token_ids` show them.
    pub ids: Vec<u32>,
    /// The text to echo; empty for token-id prompts.
    pub text: String,
}

impl Prompt {
    /// A prompt of rendered text. `salt` separates models and cache salts.
    pub fn of_text(text: &str, salt: u64) -> Prompt {
        let ids = text.as_bytes().chunks(BYTES_PER_TOKEN).map(|four| (xxh64(four, 0) % 32_000) as u32).collect();
        Prompt::of_bytes(text.as_bytes(), ids, text.to_owned(), salt)
    }

    /// A prompt of token ids.
    pub fn of_ids(ids: Vec<u32>, salt: u64) -> Prompt {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        Prompt::of_bytes(&bytes, ids, String::new(), salt)
    }

    fn of_bytes(bytes: &[u8], ids: Vec<u32>, text: String, salt: u64) -> Prompt {
        let mut previous = salt;
        let chain = bytes
            .chunks_exact(BLOCK_BYTES)
            .map(|block| {
                previous = xxh64(block, previous);
                previous
            })
            .collect();
        let tokens = u32::try_from(bytes.len().div_ceil(BYTES_PER_TOKEN)).unwrap_or(u32::MAX);
        Prompt { tokens, hash: xxh64(bytes, salt), chain, ids, text }
    }

    /// KV blocks that the prompt fills, the last one perhaps in part.
    pub fn blocks(&self) -> u32 {
        self.tokens.div_ceil(BLOCK_TOKENS)
    }
}

/// The salt of prompts for `model` with the request's `cache_salt`.
pub(crate) fn salt(model: &str, cache_salt: &str) -> u64 {
    xxh64(cache_salt.as_bytes(), xxh64(model.as_bytes(), 0))
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The limit was reached.
    Length,
    /// The model or a stop string ended it.
    Stop,
    /// The engine was told to stop.
    Abort,
}

impl Finish {
    pub fn name(self) -> &'static str {
        match self {
            Finish::Length => "length",
            Finish::Stop => "stop",
            Finish::Abort => "abort",
        }
    }
}

/// When the model stops by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Natural {
    /// Never.
    #[default]
    Never,
    /// After exactly this many tokens.
    After(u32),
    /// After half to one and a half times as many tokens, fixed by the prompt.
    Around(u32),
}

/// How long the output may become.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputRules {
    /// Most tokens.
    pub limit: u32,
    /// Fewest tokens before the model may stop by itself.
    pub at_least: u32,
    /// When the model stops by itself.
    pub natural: Natural,
    /// Stop strings; the output ends before the first one.
    pub stop: Vec<String>,
}

/// A whole output, planned before its first token leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Output {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The text of each token.
    pub pieces: Vec<String>,
    /// How it ends.
    pub finish: Finish,
    /// The stop string that ended it.
    pub stop_reason: Option<String>,
}

impl Output {
    /// The text so far when the first `tokens` tokens are out.
    pub fn text(&self, tokens: usize) -> String {
        self.pieces.iter().take(tokens).map(String::as_str).collect()
    }
}

/// Some pieces have more than one byte a character, so that framing mistakes show.
const WORDS: [&str; 32] = [
    " the", " lease", " holds", " a", " block", " über", " queue", " while", " one", " prompt", " waits", ",", " 東京",
    " tokens", " move", " once", " and", " only", " then", " decode", " begins", ".", " naïve", " paths", " share",
    " what", " they", " know", " 🙂", " before", " it", " fades",
];
const MARK: &str = "[corrupt kv]";

/// Plans the output for `prompt_hash`, choice number `choice`. `corrupt` marks it as made from somebody else's KV.
pub(crate) fn plan_output(prompt_hash: u64, choice: u32, corrupt: bool, rules: &OutputRules) -> Output {
    let stream = xxh64(&choice.to_le_bytes(), if corrupt { !prompt_hash } else { prompt_hash });
    let natural = match rules.natural {
        Natural::Never => None,
        Natural::After(tokens) => Some(tokens),
        Natural::Around(mean) => Some((mean / 2).saturating_add((prompt_hash % u64::from(mean.max(1))) as u32)),
    };
    let (count, mut finish) = match natural.map(|natural| natural.max(rules.at_least).max(1)) {
        Some(natural) if natural < rules.limit => (natural, Finish::Stop),
        _ => (rules.limit, Finish::Length),
    };
    let mut output = Output {
        ids: Vec::with_capacity(count as usize),
        pieces: Vec::new(),
        finish: Finish::Length,
        stop_reason: None,
    };
    let mut text = String::new();
    for position in 0..count {
        let word = (xxh64(&position.to_le_bytes(), stream) % WORDS.len() as u64) as u32;
        let spelled = WORDS.get(word as usize).copied().unwrap_or_default();
        let piece = match (position, corrupt) {
            (0, true) => format!("{MARK}{spelled}"),
            (0, false) => spelled.trim_start().to_owned(),
            _ => spelled.to_owned(),
        };
        text.push_str(&piece);
        output.ids.push(1_000 + word);
        output.pieces.push(piece);
        let hit = rules.stop.iter().filter(|stop| !stop.is_empty()).find_map(|stop| Some((text.find(stop)?, stop)));
        if let Some((at, stop)) = hit.filter(|_| position + 1 >= rules.at_least) {
            finish = Finish::Stop;
            output.stop_reason = Some(stop.clone());
            cut_text(&mut output.pieces, at);
            break;
        }
    }
    output.finish = finish;
    output
}

/// Keeps the first `bytes` bytes of the joined pieces; later pieces become empty, as tokens without text are.
fn cut_text(pieces: &mut [String], bytes: usize) {
    let mut left = bytes;
    for piece in pieces {
        if piece.len() > left {
            piece.truncate(left);
        }
        left -= piece.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(limit: u32) -> OutputRules {
        OutputRules { limit, ..OutputRules::default() }
    }

    #[test]
    fn four_bytes_are_a_token_and_64_a_block() {
        for (bytes, tokens, blocks, chain) in
            [(1, 1, 1, 0), (4, 1, 1, 0), (5, 2, 1, 0), (63, 16, 1, 0), (64, 16, 1, 1), (65, 17, 2, 1), (128, 32, 2, 2)]
        {
            let prompt = Prompt::of_text(&"x".repeat(bytes), 0);
            assert_eq!((prompt.tokens, prompt.blocks(), prompt.chain.len()), (tokens, blocks, chain), "{bytes}");
        }
        let ids = Prompt::of_ids((0..17).collect(), 0);
        assert_eq!((ids.tokens, ids.blocks(), ids.chain.len(), ids.ids.len()), (17, 2, 1, 17));
        assert_eq!(Prompt::of_text("", 0).tokens, 0);
    }

    #[test]
    fn a_shared_prefix_shares_its_chain_and_a_salt_does_not() {
        let a = Prompt::of_text(&format!("{}a", "p".repeat(130)), 1);
        let b = Prompt::of_text(&format!("{}b", "p".repeat(130)), 1);
        let c = Prompt::of_text(&format!("{}a", "p".repeat(130)), 2);
        assert_eq!(a.chain, b.chain);
        assert_ne!(a.hash, b.hash);
        assert_ne!(a.chain, c.chain);
        assert_ne!(salt("m", ""), salt("n", ""));
        assert_ne!(salt("m", ""), salt("m", "x"));
    }

    #[test]
    fn output_is_fixed_by_prompt_and_choice() {
        let eight = plan_output(7, 0, false, &rules(8));
        assert_eq!(eight, plan_output(7, 0, false, &rules(8)));
        assert_eq!((eight.ids.len(), eight.finish), (8, Finish::Length));
        assert_eq!(plan_output(7, 0, false, &rules(1)).pieces[0], eight.pieces[0]);
        assert_ne!(plan_output(7, 1, false, &rules(8)).ids, eight.ids);
        assert_ne!(plan_output(8, 0, false, &rules(8)).ids, eight.ids);
        assert!(plan_output(7, 0, true, &rules(8)).text(8).starts_with(MARK));
    }

    #[test]
    fn natural_stops_lie_around_the_mean() {
        for hash in 0..200 {
            let mut rules = OutputRules { natural: Natural::Around(40), ..rules(1_000) };
            let output = plan_output(hash, 0, false, &rules);
            assert_eq!(output.finish, Finish::Stop);
            assert!((20..60).contains(&output.ids.len()), "{}", output.ids.len());
            rules.at_least = 70;
            assert_eq!(plan_output(hash, 0, false, &rules).ids.len(), 70);
            rules.limit = 10;
            assert_eq!(plan_output(hash, 0, false, &rules).finish, Finish::Length);
        }
        let exact = plan_output(1, 0, false, &OutputRules { natural: Natural::After(7), ..rules(8) });
        assert_eq!((exact.ids.len(), exact.finish), (7, Finish::Stop));
    }

    #[test]
    fn a_stop_string_cuts_the_text_before_it() {
        let whole = plan_output(7, 0, false, &rules(16));
        let stop = whole.pieces[5].clone();
        let first = whole.text(16).find(&stop).unwrap_or_default();
        let cut = plan_output(7, 0, false, &OutputRules { stop: vec![stop.clone()], ..rules(16) });
        assert_eq!((cut.finish, cut.stop_reason.as_deref()), (Finish::Stop, Some(stop.as_str())));
        assert_eq!(cut.text(16), whole.text(16)[..first]);
        assert_eq!(cut.ids.len(), cut.pieces.len());
    }
}
