//! The prompt of a request, as far as routing needs it.
//!
//! Only the shape that routing reads is checked. Everything else, odd members of messages included, is the engine's
//! to judge.

use std::borrow::Cow;

use super::body::BodyError;
use super::parts::{self, NonText};
use super::scan::{JsonObject, decode_key, decode_string, each_element, each_member};
use super::{Endpoint, salt};

/// Starts an item of the history in a prefix key. A control character, so that the key stays UTF-8 wherever the
/// prompt is; it cannot occur raw in JSON, so only an escaped one in a prompt could imitate it, and all that this
/// imitation can win is a wrong guess about a cache.
pub(super) const ITEM: u8 = 0x1e;

/// Separates the parts of an item.
pub(super) const PART: u8 = 0x1f;

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
    /// The "message" text of the reference gateway's section 1.4, contents joined by one space: what bucketing counts.
    /// Without parts that are no text.
    pub text: String,
    /// Images, audio, files: parts that count by their number.
    pub non_text: NonText,
    /// The bytes that the prefix index hashes, in template order: what changes the KV cache but not the text, `tools` as
    /// sent, then role and content of the whole history (strings decoded, anything else as sent; what is no text by a hash
    /// of all its bytes). Token ids enter as four bytes each, big endian.
    pub prefix_key: Vec<u8>,
}

impl Prompt {
    /// No prompt.
    pub(super) fn none() -> Prompt {
        Prompt {
            form: PromptForm::None,
            count: 0,
            token_ids: None,
            text: String::new(),
            non_text: NonText::default(),
            prefix_key: Vec::new(),
        }
    }

    /// Reads and checks the prompt of a JSON body.
    pub(super) fn read(endpoint: Endpoint, body: &JsonObject<'_>) -> Result<Prompt, BodyError> {
        let mut prompt = Prompt::read_as(endpoint, body)?;
        let members = parts::count_in_body(body, prompt.form == PromptForm::None);
        prompt.non_text.parts += members.parts;
        prompt.non_text.bytes += members.bytes;
        if prompt.form != PromptForm::None {
            let mut key = salt::of(endpoint, body);
            if !key.is_empty() {
                key.append(&mut prompt.prefix_key);
                prompt.prefix_key = key;
            }
        }
        Ok(prompt)
    }

    fn read_as(endpoint: Endpoint, body: &JsonObject<'_>) -> Result<Prompt, BodyError> {
        match endpoint {
            Endpoint::ChatCompletions | Endpoint::Messages => chat(body),
            Endpoint::Responses => responses(body),
            Endpoint::Completions => completions(body),
            Endpoint::Generate => generate(body),
            Endpoint::Embeddings => super::embeddings::check(body).map(|()| Prompt::none()),
            Endpoint::Rerank | Endpoint::RerankUnversioned | Endpoint::RerankV2 => rerank(body),
            Endpoint::Classify | Endpoint::ClassifyUnversioned => classify(body),
            Endpoint::ImagesGenerations | Endpoint::VideoGenerations => {
                let prompt = required(body, "prompt")?;
                let text = Texts::default().with(prompt, "prompt")?;
                Ok(text.into_prompt())
            }
            // Nothing of these is routed by, so what they lack is the engine's to say.
            Endpoint::AudioTranscriptions
            | Endpoint::AudioTranslations
            | Endpoint::MessagesCountTokens
            | Endpoint::ResponsesInputTokens
            | Endpoint::Tokenize
            | Endpoint::Detokenize
            | Endpoint::Score
            | Endpoint::ScoreUnversioned
            | Endpoint::Pooling
            | Endpoint::AudioSpeech => Ok(Prompt::none()),
        }
    }
}

pub(super) fn invalid(text: impl Into<String>) -> BodyError {
    BodyError::Invalid(text.into())
}

pub(super) fn required<'a>(body: &JsonObject<'a>, key: &str) -> Result<&'a str, BodyError> {
    body.get_non_null(key).ok_or_else(|| invalid(format!("field \"{key}\" is required")))
}

pub(super) fn is_array(value: &str) -> bool {
    value.starts_with('[')
}

pub(super) fn is_empty_array(value: &str) -> bool {
    value.strip_prefix('[').is_some_and(|rest| rest.trim_start().starts_with(']'))
}

/// Plain texts joined by one space, for endpoints without a chat history.
#[derive(Default)]
struct Texts {
    text: String,
    key: Vec<u8>,
    non_text: NonText,
    any: bool,
}

impl Texts {
    /// Adds a string; anything else is refused.
    fn with(mut self, value: &str, key: &str) -> Result<Texts, BodyError> {
        if !value.starts_with('"') {
            return Err(invalid(format!("field \"{key}\" must be a string")));
        }
        self.push(value);
        Ok(self)
    }

    /// Adds a string decoded, anything else (and a string that cannot be decoded) as it was sent, less what is no text.
    fn push(&mut self, value: &str) {
        if self.any {
            self.key.push(b' ');
        }
        let key = self.push_text(value);
        self.key.extend_from_slice(key.as_bytes());
    }

    /// Adds it to the text only; returns what of it belongs into the key.
    fn push_text<'a>(&mut self, value: &'a str) -> Cow<'a, str> {
        if self.any {
            self.text.push(' ');
        }
        self.any = true;
        if let Some(text) = decode_string(value) {
            self.text.push_str(&text);
            return text;
        }
        let stripped = parts::strip(value, &mut self.non_text);
        self.text.push_str(&stripped.text);
        stripped.key
    }

    fn push_elements(&mut self, array: &str) {
        // The body was scanned as a whole before, so this cannot fail.
        let _ = each_element(array, |element| {
            self.push(element);
            true
        });
    }

    fn into_prompt(self) -> Prompt {
        let Texts { text, non_text, key: prefix_key, .. } = self;
        Prompt { form: PromptForm::Text, count: 1, token_ids: None, text, non_text, prefix_key }
    }
}

/// A chat history on its way into text and prefix key.
#[derive(Default)]
struct History {
    texts: Texts,
    key: Vec<u8>,
}

impl History {
    fn new(body: &JsonObject<'_>) -> History {
        let mut history = History::default();
        if let Some(tools) = body.get_non_null("tools") {
            history.key.extend_from_slice(tools.as_bytes());
        }
        history
    }

    fn push_key(&mut self, separator: u8, value: &str) {
        self.key.push(separator);
        match decode_string(value) {
            Some(text) => self.key.extend_from_slice(text.as_bytes()),
            None => self.key.extend_from_slice(value.as_bytes()),
        }
    }

    /// Text that the template puts before the history and that the "message" text does not count.
    fn push_preamble(&mut self, role: &str, value: &str) {
        self.key.push(ITEM);
        self.key.extend_from_slice(role.as_bytes());
        self.push_key(PART, value);
    }

    fn push_item(&mut self, item: &str) {
        let (mut role, mut content, mut tool_calls) = (None, None, None);
        if item.starts_with('{') {
            let _ = each_member(item, |key, value| {
                match decode_key(key).as_ref() {
                    "role" => role = Some(value),
                    "content" => content = Some(value).filter(|value| *value != "null"),
                    "tool_calls" => tool_calls = Some(value).filter(|value| *value != "null"),
                    _ => {}
                }
                true
            });
        } else if item.starts_with('"') {
            content = Some(item);
        }
        self.push_key(ITEM, role.unwrap_or_default());
        self.key.push(PART);
        if let Some(content) = content {
            let key = self.texts.push_text(content);
            self.key.extend_from_slice(key.as_bytes());
        } else if tool_calls.is_none() {
            // Such as a function call or its result in `input` of a response: it is its own content.
            let stripped = parts::strip(item, &mut self.texts.non_text);
            self.key.extend_from_slice(stripped.key.as_bytes());
        }
        if let Some(tool_calls) = tool_calls {
            self.key.push(PART);
            self.key.extend_from_slice(tool_calls.as_bytes());
        }
    }

    fn push_items(&mut self, array: &str) {
        let _ = each_element(array, |item| {
            self.push_item(item);
            true
        });
    }

    fn into_prompt(self) -> Prompt {
        let Texts { text, non_text, .. } = self.texts;
        Prompt { form: PromptForm::Text, count: 1, token_ids: None, text, non_text, prefix_key: self.key }
    }
}

fn chat(body: &JsonObject<'_>) -> Result<Prompt, BodyError> {
    let messages = required(body, "messages")?;
    if !is_array(messages) {
        return Err(invalid("field \"messages\" must be an array"));
    }
    let mut history = History::new(body);
    if let Some(system) = body.get_non_null("system") {
        history.push_preamble("system", system);
    }
    history.push_items(messages);
    Ok(history.into_prompt())
}

fn responses(body: &JsonObject<'_>) -> Result<Prompt, BodyError> {
    let input = required(body, "input")?;
    let mut history = History::new(body);
    if let Some(instructions) = body.get_non_null("instructions") {
        history.push_preamble("system", instructions);
    }
    if input.starts_with('"') {
        history.push_preamble("user", input);
        history.texts.push_text(input);
    } else if is_array(input) && !is_empty_array(input) {
        history.push_items(input);
    } else {
        return Err(invalid("field \"input\" must be a string or a non-empty array"));
    }
    Ok(history.into_prompt())
}

/// `prompt` of `/v1/completions`: a string, a list of strings, a list of token ids or a list of such lists.
fn completions(body: &JsonObject<'_>) -> Result<Prompt, BodyError> {
    let Some(prompt) = body.get_non_null("prompt") else {
        // Engines take embeddings in place of a prompt.
        return match body.get_non_null("prompt_embeds") {
            Some(_) => Ok(Prompt::none()),
            None => required(body, "prompt").map(|_| Prompt::none()),
        };
    };
    one_or_several(prompt, "prompt")
}

/// `/generate` has a name for each form of a prompt; what several of them mean is the engine's to judge.
fn generate(body: &JsonObject<'_>) -> Result<Prompt, BodyError> {
    for key in ["text", "input_ids"] {
        if let Some(prompt) = body.get_non_null(key) {
            return one_or_several(prompt, key);
        }
    }
    match body.get_non_null("input_embeds") {
        Some(_) => Ok(Prompt::none()),
        None => Err(invalid("one of the fields \"text\", \"input_ids\" and \"input_embeds\" is required")),
    }
}

/// A string, a list of strings, a list of token ids or a list of such lists.
fn one_or_several(prompt: &str, key: &str) -> Result<Prompt, BodyError> {
    let wrong = || {
        invalid(format!(
            "field \"{key}\" must be a string, a list of strings, a list of token ids or a list of such lists"
        ))
    };
    if prompt.starts_with('"') {
        let mut texts = Texts::default();
        texts.push(prompt);
        return Ok(texts.into_prompt());
    }
    if !is_array(prompt) {
        return Err(wrong());
    }

    let mut texts = Texts::default();
    let mut key = Vec::new();
    let mut kind = None;
    let mut count = 0_usize;
    let mut ids = 0_usize;
    let read = each_element(prompt, |element| {
        let this = ElementKind::of(element);
        if this.is_none() || *kind.get_or_insert(this) != this {
            return false;
        }
        if count > 0 && this == Some(ElementKind::Ids) {
            key.push(ITEM);
        }
        count += 1;
        match this {
            Some(ElementKind::Text) => {
                texts.push(element);
                true
            }
            Some(ElementKind::Id) => push_id(&mut key, &mut ids, element),
            Some(ElementKind::Ids) => each_element(element, |id| push_id(&mut key, &mut ids, id)).is_ok(),
            None => false,
        }
    });
    if read.is_err() {
        return Err(wrong());
    }
    Ok(match kind.flatten() {
        None => Prompt::none(),
        Some(ElementKind::Text) => {
            let form = if count == 1 { PromptForm::Text } else { PromptForm::Several };
            Prompt { form, count, ..texts.into_prompt() }
        }
        Some(list) => {
            let count = if list == ElementKind::Id { 1 } else { count };
            let form = if count == 1 { PromptForm::Tokens } else { PromptForm::Several };
            Prompt { form, count, token_ids: Some(ids), prefix_key: key, ..Prompt::none() }
        }
    })
}

/// What a list prompt is made of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ElementKind {
    Text,
    Id,
    Ids,
}

impl ElementKind {
    fn of(element: &str) -> Option<ElementKind> {
        match element.as_bytes().first()? {
            b'"' => Some(ElementKind::Text),
            b'[' => Some(ElementKind::Ids),
            b'-' | b'0'..=b'9' => Some(ElementKind::Id),
            _ => None,
        }
    }
}

/// Adds a token id to a prefix key; `false` when it is no integer. Ids that no vocabulary has saturate: the engine
/// will refuse them.
fn push_id(key: &mut Vec<u8>, ids: &mut usize, element: &str) -> bool {
    let digits = element.strip_prefix('-').unwrap_or(element);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return false;
    }
    *ids += 1;
    key.extend_from_slice(&element.parse::<u32>().unwrap_or(u32::MAX).to_be_bytes());
    true
}

fn rerank(body: &JsonObject<'_>) -> Result<Prompt, BodyError> {
    let query = required(body, "query")?;
    let documents = required(body, "documents")?;
    if query == "\"\"" {
        return Err(invalid("field \"query\" must not be empty"));
    }
    if is_empty_array(documents) || !documents.starts_with(['[', '{']) {
        return Err(invalid("field \"documents\" must be a non-empty array"));
    }
    let mut texts = Texts::default();
    texts.push(query);
    if is_array(documents) {
        texts.push_elements(documents);
    } else {
        // Multimodal documents come as one object.
        texts.push(documents);
    }
    Ok(texts.into_prompt())
}

fn classify(body: &JsonObject<'_>) -> Result<Prompt, BodyError> {
    if body.get_non_null("messages").is_some() && body.get_non_null("input").is_none() {
        return chat(body);
    }
    let input = required(body, "input")?;
    let mut texts = Texts::default();
    if input.starts_with('"') {
        texts.push(input);
    } else if is_array(input) && !is_empty_array(input) {
        texts.push_elements(input);
    } else {
        return Err(invalid("field \"input\" must be a string or a non-empty array"));
    }
    Ok(texts.into_prompt())
}
