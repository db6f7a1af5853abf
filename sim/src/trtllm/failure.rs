//! Errors in TensorRT-LLM's shapes: validation as `{"error": text}`, everything else flat, and a 400 for nearly anything.

use serde_json::json;

use crate::answer::Reply;
use crate::body::Complaint;

/// A refused or failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The body does not fit the schema.
    Schema(String),
    /// Anything else.
    Flat {
        /// Status.
        status: u16,
        /// `type`.
        kind: &'static str,
        /// Text.
        message: String,
    },
}

impl Failure {
    /// The request means something that cannot be done, or an exception was caught: both are a 400 here.
    pub fn meaning(message: impl Into<String>) -> Failure {
        Failure::Flat { status: 400, kind: "BadRequestError", message: message.into() }
    }

    /// The executor failed.
    pub fn internal(message: impl Into<String>) -> Failure {
        Failure::Flat { status: 500, kind: "InternalServerError", message: message.into() }
    }

    /// A field that the schema does not know; `place` is its path below the body.
    pub fn unknown_field(place: &str, input: &str) -> Failure {
        Complaint::schema("extra_forbidden", place, "Extra inputs are not permitted", input).into()
    }

    /// A rule of the schema that concerns several fields.
    pub fn rule(text: &str) -> Failure {
        Failure::Schema(format!(
            "[{{'type': 'value_error', 'loc': ('body',), 'msg': 'Value error, {text}', 'input': {{}}}}]"
        ))
    }

    /// The text of it.
    pub fn text(&self) -> &str {
        match self {
            Failure::Schema(text) => text,
            Failure::Flat { message, .. } => message,
        }
    }

    /// The whole answer.
    pub fn reply(&self) -> Reply {
        match self {
            Failure::Schema(text) => Reply::value(400, &json!({"error": text})),
            Failure::Flat { status, kind, message } => {
                let message = serde_json::to_string(message).unwrap_or_default();
                let text =
                    format!(r#"{{"object":"error","message":{message},"type":"{kind}","param":null,"code":{status}}}"#);
                Reply::json(*status, text)
            }
        }
    }
}

impl From<Complaint> for Failure {
    fn from(complaint: Complaint) -> Failure {
        match complaint {
            Complaint::Empty => Failure::Schema(
                "[{'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}]".to_owned(),
            ),
            Complaint::InvalidJson { offset } => Failure::Schema(format!(
                "[{{'type': 'json_invalid', 'loc': ('body', {offset}), 'msg': 'JSON decode error', 'input': {{}}, 'ctx': \
                 {{'error': 'Expecting value'}}}}]"
            )),
            Complaint::Schema { kind, place, text, input } => {
                let place = place.replace('.', "', '");
                Failure::Schema(format!(
                    "[{{'type': '{kind}', 'loc': ('body', '{place}'), 'msg': '{text}', 'input': '{input}'}}]"
                ))
            }
            Complaint::EmptyConversation => Failure::meaning("Conversation is empty."),
            Complaint::EmptyPrompt { .. } => Failure::meaning("The prompt is empty."),
        }
    }
}
