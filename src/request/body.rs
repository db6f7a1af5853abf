//! One scan over the top level of a JSON body.
//!
//! Only what routing needs is decoded and checked: `model`, `stream`, the prompt, and a few numbers. A member of an
//! unexpected shape that routing does not need never fails a request. Error texts name fields and positions and never
//! quote what the client sent.

use std::sync::Arc;

use bytes::Bytes;

use super::multipart::Form;
use super::scan::{Field, JsonObject, decode_string, each_element};
use super::{Endpoint, Prompt};

/// What the token ledgers count as one token, bytes of the request body (the PD document, "Token Load Scoring Policy").
const BYTES_PER_TOKEN: u64 = 4;

/// The body cannot be used. Each becomes a 400.
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
    /// `n` (1 when absent or unusable), or `best_of` when that is larger. `/generate` has it in `sampling_params`.
    pub choices: u64,
    /// `max_tokens`, else `max_completion_tokens`, else (responses only) `max_output_tokens`. (Which of the two an engine
    /// prefers is its own affair.) `/generate` has `sampling_params.max_new_tokens`.
    pub max_tokens: Option<u64>,
    /// The prompt.
    pub prompt: Prompt,
}

impl ParsedBody {
    /// Parses and validates a body for an endpoint. `content_type` matters for multipart only.
    pub fn parse(endpoint: Endpoint, content_type: Option<&str>, raw: Bytes) -> Result<ParsedBody, BodyError> {
        if endpoint.is_multipart() {
            return ParsedBody::parse_form(endpoint, content_type, raw);
        }
        let object =
            JsonObject::parse(&raw).map_err(|error| BodyError::Invalid(format!("invalid request body: {error}")))?;
        let model = read_model(&object)?;
        let stream = match object.get("stream") {
            None | Some("null" | "false") => false,
            Some("true") => true,
            Some(_) => return Err(BodyError::Invalid("field \"stream\" must be a boolean".into())),
        };
        let prompt = Prompt::read(endpoint, &object)?;
        let count = |key| object.get(key).and_then(read_count);
        let (choices, max_tokens) = match endpoint {
            Endpoint::Generate => read_sampling(object.get("sampling_params").unwrap_or_default()),
            // The name that this endpoint has for it comes last.
            Endpoint::Responses => (None, count("max_output_tokens")),
            _ => (None, None),
        };
        let choices = choices.or(count("n")).unwrap_or(1).max(count("best_of").unwrap_or(1)).max(1);
        let max_tokens = count("max_tokens").or_else(|| count("max_completion_tokens")).or(max_tokens);
        let include_usage = object
            .get("stream_options")
            .and_then(|options| JsonObject::parse(options.as_bytes()).ok())
            .is_some_and(|options| options.get("include_usage") == Some("true"));
        let fields = object.into_fields();
        Ok(ParsedBody { raw, endpoint, fields, model, stream, include_usage, choices, max_tokens, prompt })
    }

    fn parse_form(endpoint: Endpoint, content_type: Option<&str>, raw: Bytes) -> Result<ParsedBody, BodyError> {
        let form = Form::parse(content_type, &raw).map_err(|error| BodyError::Multipart(error.to_string()))?;
        let model = form.model.ok_or_else(|| BodyError::NoModel("form field \"model\" is required".into()))?;
        Ok(ParsedBody {
            endpoint,
            fields: Vec::new(),
            model: model.into(),
            stream: form.stream,
            include_usage: false,
            choices: 1,
            max_tokens: None,
            prompt: Prompt { non_text: form.files, ..Prompt::none() },
            raw,
        })
    }

    /// The size of the request in tokens, about: a quarter of its bytes, and a fixed number for each part that is no text.
    pub fn estimated_tokens(&self, non_text_part: u64) -> u64 {
        let text = self.raw.len().saturating_sub(self.prompt.non_text.bytes) as u64;
        (text / BYTES_PER_TOKEN).saturating_add(self.non_text_tokens(non_text_part))
    }

    /// The tokens of its parts that are no text.
    pub fn non_text_tokens(&self, non_text_part: u64) -> u64 {
        (self.prompt.non_text.parts as u64).saturating_mul(non_text_part)
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

fn read_model(object: &JsonObject<'_>) -> Result<Arc<str>, BodyError> {
    if object.fields().iter().filter(|field| field.key == "model").count() > 1 {
        // Two models would be two tenants' worth of doubt about who serves, limits and pays.
        return Err(BodyError::Invalid("duplicate top-level key \"model\" in request body".into()));
    }
    let value = object.get_non_null("model").ok_or_else(|| BodyError::NoModel("field \"model\" is required".into()))?;
    if !value.starts_with('"') {
        return Err(BodyError::NoModel("field \"model\" must be a string".into()));
    }
    match decode_string(value) {
        Some(model) if !model.trim().is_empty() => Ok(model.as_ref().into()),
        Some(_) => Err(BodyError::NoModel("field \"model\" must not be empty".into())),
        None => Err(BodyError::NoModel("field \"model\" must be valid Unicode".into())),
    }
}

/// `n` and `max_new_tokens` of `/generate`, whose sampling parameters are an object, or one for each prompt: the largest.
fn read_sampling(params: &str) -> (Option<u64>, Option<u64>) {
    let (mut choices, mut max_tokens) = (None, None);
    let mut read = |params: &str| {
        if let Ok(params) = JsonObject::parse(params.as_bytes()) {
            let count = |key| params.get(key).and_then(read_count);
            choices = choices.max(count("n"));
            max_tokens = max_tokens.max(count("max_new_tokens"));
        }
        true
    };
    if params.starts_with('[') {
        // The body was scanned as a whole before, so this cannot fail.
        let _ = each_element(params, read);
    } else {
        read(params);
    }
    (choices, max_tokens)
}

/// A non-negative whole number in any spelling that the engines' validation takes as one: `2`, `2.0`, `2e0`, `"2"`.
fn read_count(value: &str) -> Option<u64> {
    let text = decode_string(value);
    let text = text.as_deref().unwrap_or(value).trim();
    if let Ok(count) = text.parse::<u64>() {
        return Some(count);
    }
    let number = text.parse::<f64>().ok()?;
    (number.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(&number)).then_some(number as u64)
}
