//! Errors in vLLM's words and shapes (as captured from 0.32).

use serde::Serialize;

use crate::answer::Reply;
use crate::body::Complaint;

/// A refused or failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub status: u16,
    /// `error.type`: "Bad Request" for the schema, "BadRequestError" for the meaning.
    pub kind: &'static str,
    pub message: String,
    pub param: Option<String>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: Detail<'a>,
}

#[derive(Serialize)]
struct Detail<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: u16,
}

impl From<Complaint> for Failure {
    fn from(complaint: Complaint) -> Failure {
        match complaint {
            Complaint::Empty => Failure::missing("", "None"),
            Complaint::InvalidJson { offset } => Failure::invalid_json(offset),
            Complaint::Schema { kind, place, text, input } => Failure::schema(kind, &place, &text, &input),
            Complaint::EmptyConversation => Failure::meaning(
                "Cannot apply chat template to an empty conversation. Provide at least one message.",
                None,
            ),
            Complaint::EmptyPrompt { name } => Failure::meaning(
                "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
                Some(&name),
            ),
        }
    }
}

impl Failure {
    /// The request means something that cannot be done.
    pub fn meaning(message: impl Into<String>, param: Option<&str>) -> Failure {
        Failure { status: 400, kind: "BadRequestError", message: message.into(), param: param.map(str::to_owned) }
    }

    /// As [`Failure::meaning`] about a parameter whose value is named.
    pub fn value(message: &str, param: &str, value: impl std::fmt::Display) -> Failure {
        Failure::meaning(format!("{message} (parameter={param}, value={value})"), Some(param))
    }

    /// The request does not fit the schema at `place` below `body`.
    pub fn schema(kind: &str, place: &str, text: &str, input: &str) -> Failure {
        let place = if place.is_empty() { "body".to_owned() } else { format!("body.{place}") };
        let message = format!(
            "1 validation error:\n  {{'type': '{kind}', 'loc': '{place}', 'msg': '{text}', 'input': '{input}'}}"
        );
        Failure { status: 400, kind: "Bad Request", message, param: Some(place) }
    }

    pub fn missing(place: &str, input: &str) -> Failure {
        Failure::schema("missing", place, "Field required", input)
    }

    pub fn invalid_json(offset: usize) -> Failure {
        let place = format!("body.{offset}");
        let message = format!(
            "1 validation error:\n  {{'type': 'json_invalid', 'loc': '{place}', 'msg': 'JSON decode error', \
             'input': '<dict of 0 items>', 'ctx': {{'error': 'Expecting value'}}}}"
        );
        Failure { status: 400, kind: "Bad Request", message, param: Some(place) }
    }

    pub fn content_type() -> Failure {
        let message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed".to_owned();
        Failure { status: 400, kind: "Bad Request", message, param: None }
    }

    pub fn unknown_model(asked: &str, served: &str) -> Failure {
        Failure {
            status: 404,
            kind: "NotFoundError",
            message: format!("The model `{asked}` does not exist. Valid aliases: {served}."),
            param: Some("model".to_owned()),
        }
    }

    pub fn internal() -> Failure {
        Failure { status: 500, kind: "InternalServerError", message: "Internal server error".to_owned(), param: None }
    }

    pub fn engine_dead() -> Failure {
        Failure {
            message: "EngineCore encountered an issue. See stack trace (above) for the root cause.".to_owned(),
            ..Failure::internal()
        }
    }

    fn body(&self) -> Body<'_> {
        let Failure { status, kind, message, param } = self;
        Body { error: Detail { message, r#type: kind, param: param.as_deref(), code: *status } }
    }

    /// The whole answer.
    pub fn reply(&self) -> Reply {
        Reply::value(self.status, &self.body())
    }

    /// The error event of a stream. Its spacing differs from the whole answer's, as it does in vLLM.
    pub fn event(&self) -> String {
        let text = |text: &str| serde_json::to_string(text).unwrap_or_default();
        let param = self.param.as_deref().map_or_else(|| "null".to_owned(), text);
        format!(
            "data: {{\"error\": {{\"message\": {}, \"type\": {}, \"param\": {param}, \"code\": {}}}}}\n\n",
            text(&self.message),
            text(self.kind),
            self.status
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::Fields;

    #[test]
    fn bodies_that_are_no_object_say_so() {
        for (body, param) in [("", "body"), ("[]", "body"), ("\"x\"", "body"), ("{\"a\":1,", "body.6"), ("{", "body.0")]
        {
            let failure = Failure::from(Fields::parse(body.as_bytes()).expect_err(body));
            assert_eq!((failure.status, failure.kind, failure.param.as_deref()), (400, "Bad Request", Some(param)));
        }
    }
}
