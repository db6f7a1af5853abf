//! Token usage as engines report it.

/// Token counts of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// `prompt_tokens`, else `input_tokens`.
    pub prompt_tokens: u64,
    /// `completion_tokens`, else `output_tokens`.
    pub completion_tokens: u64,
    /// `total_tokens`, else the sum.
    pub total_tokens: u64,
}
