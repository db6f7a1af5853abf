//! The prompt of a request, as far as routing needs it.

/// The shape in which the prompt came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptForm {
    /// One text: a string prompt, or chat messages.
    Text,
    /// One list of token ids.
    Tokens,
    /// Several prompts in one request (a list of strings or of token lists, more than one element).
    Several,
    /// No prompt that routing looks at.
    None,
}

/// The prompt of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its shape. A one-element list counts as its element.
    pub form: PromptForm,
    /// How many prompts there are.
    pub count: usize,
    /// Total token ids, when the prompt came as ids: an exact length.
    pub token_ids: Option<usize>,
    /// The "message" text of reference section 1.4: what bucketing counts.
    pub text: String,
    /// The bytes that the prefix index hashes: `tools`, then role and content of the whole history, in template order.
    pub prefix_key: Vec<u8>,
}
