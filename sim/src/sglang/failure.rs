//! Errors in SGLang's words and shapes (as captured from 0.5.23): flat on the OpenAI paths, wrapped on `/generate`.

use crate::answer::Reply;
use crate::body::Complaint;

use super::call::Api;

/// A refused or failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub status: u16,
    /// `type`: "Bad Request" for the schema, "BadRequestError" for the meaning, the status as text for the rest.
    pub kind: &'static str,
    pub message: String,
}

impl Failure {
    /// The request means something that cannot be done.
    pub fn meaning(message: impl Into<String>) -> Failure {
        Failure { status: 400, kind: "BadRequestError", message: message.into() }
    }

    /// The engine failed.
    pub fn internal(message: impl Into<String>) -> Failure {
        Failure { status: 500, kind: "500", message: message.into() }
    }

    /// A value of the wrong type at `place`.
    pub fn schema(place: &str, text: &str, input: &str) -> Failure {
        Failure::from(Complaint::schema("value_error", place, text, input))
    }

    pub fn content_type() -> Failure {
        let detail = "{'loc': ['header', 'content-type'], 'msg': \"Unsupported Media Type: Only 'application/json' is \
                      allowed\", 'type': 'value_error'}";
        Failure { status: 400, kind: "Bad Request", message: format!("1 validation error:\n  {detail} [{detail}]") }
    }

    /// The whole answer.
    pub fn reply(&self, api: Api) -> Reply {
        Reply::json(self.status, self.body(api, self.kind))
    }

    fn body(&self, api: Api, kind: &str) -> String {
        let message = quote(&self.message);
        let code = self.status;
        match api {
            Api::Generate => format!(r#"{{"error":{{"message":{message}}}}}"#),
            Api::Chat | Api::Completions => {
                format!(r#"{{"object":"error","message":{message},"type":{},"param":null,"code":{code}}}"#, quote(kind))
            }
        }
    }

    /// The error event of a stream. Its spacing differs from the whole answer's, as it does in SGLang.
    pub fn event(&self, api: Api) -> String {
        let message = quote(&self.message);
        match api {
            Api::Generate => format!("data: {{\"error\": {{\"message\": {message}}}}}\n\n"),
            Api::Chat | Api::Completions => {
                let kind = if self.status == 500 { "INTERNAL_SERVER_ERROR" } else { "BAD_REQUEST" };
                format!(
                    "data: {{\"error\": {{\"object\": \"error\", \"message\": {message}, \"type\": \"{kind}\", \
                     \"param\": null, \"code\": {}}}}}\n\n",
                    self.status
                )
            }
        }
    }
}

impl From<Complaint> for Failure {
    fn from(complaint: Complaint) -> Failure {
        let schema = |detail: String| {
            // The real one leaks where its sources are.
            let place = "File \"/sgl-workspace/sglang/python/sglang/srt/entrypoints/http_server.py\", line 1870, in \
                         openai_v1_chat_completions";
            let message = format!("1 validation error:\n  {detail}\n\n  {place}\n    POST [{detail}]");
            Failure { status: 400, kind: "Bad Request", message }
        };
        match complaint {
            Complaint::Empty => {
                schema("{'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}".to_owned())
            }
            Complaint::InvalidJson { offset } => schema(format!(
                "{{'type': 'json_invalid', 'loc': ('body', {offset}), 'msg': 'JSON decode error', 'input': {{}}, 'ctx': \
                 {{'error': 'Expecting value'}}}}"
            )),
            Complaint::Schema { kind, place, text, input } => {
                let place = place.replace('.', "', '");
                schema(format!("{{'type': '{kind}', 'loc': ('body', '{place}'), 'msg': '{text}', 'input': '{input}'}}"))
            }
            Complaint::EmptyConversation => Failure::meaning("Messages cannot be empty."),
            Complaint::EmptyPrompt { .. } => Failure::meaning("Prompt cannot be empty"),
        }
    }
}

/// A string as JSON.
pub(crate) fn quote(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default()
}
