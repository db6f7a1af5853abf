//! What an answer said about itself.

use super::usage::{Api, UsageSum};
use crate::request::scan::{JsonObject, decode_string, each_element, each_member};

/// Event types after which a stream has nothing more to say: the end markers of the Messages and Responses APIs.
const TERMINAL_TYPES: [&str; 4] = ["message_stop", "response.completed", "response.incomplete", "response.failed"];

/// Documents in which the id of a response is looked for.
const ID_WITHIN: u64 = 4;

/// Longest id that is kept, bytes.
const MAX_ID: usize = 256;

/// Everything found so far. All of it only ever grows, except that later usage replaces earlier.
#[derive(Clone, Debug, Default)]
pub(super) struct Findings {
    pub(super) api: Api,
    pub(super) usage: UsageSum,
    pub(super) done: bool,
    pub(super) error: bool,
    /// Where in the body the event ends that said so, bytes from the start.
    pub(super) error_end: Option<u64>,
    /// The error came as the API's own last event: clients know by it that the answer has failed.
    pub(super) own_failure: bool,
    /// The id of the response (Responses API).
    pub(super) response_id: Option<Box<str>>,
    /// Something was generated: an event that neither opens the answer nor reports an error.
    pub(super) content: bool,
    /// Documents that were parsed: what an answer costs beyond the scan of its bytes.
    pub(super) parsed: u64,
}

impl Findings {
    /// Takes in the event type (the `event:` line, or the `type` of the data).
    pub(super) fn event_type(&mut self, name: &str) {
        self.done |= TERMINAL_TYPES.contains(&name);
        let error = name == "error" || name == "response.failed";
        self.error |= error;
        // What has failed before, in whatever words, has failed by those.
        if error && self.error_end.is_none() && self.api.fails_by(name) {
            self.own_failure = true;
            self.done = true;
        }
    }

    /// Takes in one JSON document; `false` when it is no JSON object.
    pub(super) fn document(&mut self, bytes: &[u8]) -> bool {
        self.parsed += 1;
        let Ok(object) = JsonObject::parse(bytes) else { return false };
        self.level(&object);
        self.take_id(&object);
        // The Responses API wraps the answer in `response`, Anthropic's first event in `message`.
        for wrapper in ["response", "message"] {
            if let Some(Ok(inner)) = object.get(wrapper).map(|value| JsonObject::parse(value.as_bytes())) {
                self.level(&inner);
                self.take_id(&inner);
            }
        }
        if let Some(name) = object.get("type").and_then(decode_string) {
            self.event_type(&name);
        }
        // SGLang's flat error object.
        self.error |= object.get("object") == Some("\"error\"");
        true
    }

    /// Whether the next documents are worth parsing for an id that is still unknown: the first ones have it.
    pub(super) fn wants_id(&self) -> bool {
        self.api == Api::Responses && self.response_id.is_none() && self.parsed < ID_WITHIN
    }

    fn take_id(&mut self, object: &JsonObject<'_>) {
        if self.wants_id() && object.get("object") == Some("\"response\"") {
            self.found_id(object.get("id"));
        }
    }

    /// Takes in the id in the head of a document that is too long to be kept.
    pub(super) fn head(&mut self, head: &[u8]) {
        if !self.wants_id() {
            return;
        }
        let text = String::from_utf8_lossy(head);
        let mut id = None;
        // Ends with an error where the head does, or where there is no more to look for.
        let _ = each_member(&text, |key, value| {
            id = Some(value).filter(|_| key == "\"id\"");
            id.is_none()
        });
        self.found_id(id);
    }

    fn found_id(&mut self, id: Option<&str>) {
        let id = id.and_then(decode_string).filter(|id| id.len() <= MAX_ID);
        self.response_id = id.map(|id| id.as_ref().into());
    }

    fn level(&mut self, object: &JsonObject<'_>) {
        if let Some(usage) = object.get_non_null("usage") {
            self.usage.merge(usage, self.api);
        }
        self.error |= object.get_non_null("error").is_some();
        self.error |= aborted(object);
        // SGLang's native endpoint keeps its reason one level deeper, beside the counts.
        if let Some(meta) = object.get("meta_info") {
            self.usage.merge(meta, self.api);
            self.error |= JsonObject::parse(meta.as_bytes()).is_ok_and(|meta| aborted(&meta));
        }
        if let Some(choices) = object.get("choices") {
            // An array or not: what cannot be read says nothing.
            let _ = each_element(choices, |choice| {
                self.error |= JsonObject::parse(choice.as_bytes()).is_ok_and(|choice| aborted(&choice));
                true
            });
        }
    }
}

/// Whether `finish_reason` is `"abort"`, or an object of that type.
fn aborted(object: &JsonObject<'_>) -> bool {
    let Some(reason) = object.get_non_null("finish_reason") else { return false };
    reason == "\"abort\""
        || JsonObject::parse(reason.as_bytes()).is_ok_and(|reason| reason.get("type") == Some("\"abort\""))
}
