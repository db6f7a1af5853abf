//! One scan over the top level of a JSON body.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::{Endpoint, Prompt};

/// The body cannot be used. Each becomes a 400 (413 for `TooLong`).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// Not JSON, not UTF-8, not an object, or a field of the wrong type; the text says which.
    #[error("{0}")]
    Invalid(String),
    /// No usable `model`.
    #[error("{0}")]
    NoModel(String),
    /// A multipart body that cannot be read.
    #[error("{0}")]
    Multipart(String),
}

/// One top-level member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// The key, escapes decoded.
    pub key: String,
    /// Byte range of the key in the body, with its quotes.
    pub key_span: Range<usize>,
    /// Byte range of the value.
    pub value_span: Range<usize>,
}

/// A request body, parsed once.
#[derive(Clone, Debug)]
pub struct ParsedBody {
    /// The bytes as the client sent them.
    pub raw: Bytes,
    /// The endpoint it was sent to.
    pub endpoint: Endpoint,
    /// Top-level members in order; empty for multipart.
    pub fields: Vec<Field>,
    /// `model`.
    pub model: Arc<str>,
    /// `stream`.
    pub stream: bool,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
    /// `n` (1 when absent or unusable), or `best_of` when that is larger.
    pub choices: u64,
    /// The larger of `max_tokens` and `max_completion_tokens` precedence is the engine's; this is
    /// `max_tokens`, else `max_completion_tokens`.
    pub max_tokens: Option<u64>,
    /// The prompt.
    pub prompt: Prompt,
}

impl ParsedBody {
    /// Parses and validates a body for an endpoint. `content_type` matters for multipart only.
    pub fn parse(_endpoint: Endpoint, _content_type: Option<&str>, _raw: Bytes) -> Result<ParsedBody, BodyError> {
        Err(BodyError::Invalid(String::new()))
    }

    /// The raw bytes of a top-level value (the last one when the key is duplicated, as engines read it).
    pub fn field(&self, key: &str) -> Option<&[u8]> {
        let field = self.fields.iter().rev().find(|field| field.key == key)?;
        self.raw.get(field.value_span.clone())
    }

    /// The first of `controlled`, in list order, that occurs more than once.
    pub fn duplicate_of<'k>(&self, controlled: &[&'k str]) -> Option<&'k str> {
        controlled.iter().copied().find(|key| self.fields.iter().filter(|field| field.key == **key).count() > 1)
    }
}
