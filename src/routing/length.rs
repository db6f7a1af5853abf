//! The length of a prompt.

/// How long the prompt is, as far as it had to be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptLength {
    /// Exactly this many tokens.
    Exactly(u64),
    /// More than this many tokens, which is the largest finite bound of the model's buckets.
    MoreThan(u64),
    /// Not counted, because nothing depends on it.
    Unknown,
}

impl PromptLength {
    /// The tokens, as bands see them: one more than the bound for a prompt that was not counted to its end.
    pub fn tokens(self) -> Option<u64> {
        match self {
            PromptLength::Exactly(tokens) => Some(tokens),
            PromptLength::MoreThan(tokens) => Some(tokens.saturating_add(1)),
            PromptLength::Unknown => None,
        }
    }

    /// So many tokens more.
    #[must_use]
    pub fn plus(self, tokens: u64) -> PromptLength {
        match self {
            PromptLength::Exactly(length) => PromptLength::Exactly(length.saturating_add(tokens)),
            PromptLength::MoreThan(length) => PromptLength::MoreThan(length.saturating_add(tokens)),
            PromptLength::Unknown => PromptLength::Unknown,
        }
    }
}
