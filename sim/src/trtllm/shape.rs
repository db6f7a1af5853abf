//! The bodies of TensorRT-LLM's answers, field by field in the order of its response models.

use super::call::{Api, Call};
use super::handoff::Leg;
use crate::ambient;
use crate::prompt::Finish;
use crate::sequence::{Emitted, Finished};

/// What all parts of one answer have in common.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    id: String,
    model: String,
    created: u64,
}

impl Shape {
    pub fn new(call: &Call) -> Shape {
        Shape { id: call.id.clone(), model: call.model.clone(), created: ambient::unix_seconds() }
    }

    /// A whole answer; a context answer also carries `offered` and the prompt's token ids.
    pub fn whole(&self, call: &Call, results: &[Finished], offered: Option<&str>) -> String {
        let object = if call.api == Api::Chat { "chat.completion" } else { "text_completion" };
        let choices: Vec<_> = results
            .iter()
            .map(|result| choice(call.api, result, offered.filter(|_| result.index == 0).unwrap_or("null")))
            .collect();
        let ids = match (&call.leg, call.prompts.first()) {
            (Leg::Context { .. }, Some(prompt)) => serde_json::to_string(&prompt.ids).unwrap_or_default(),
            _ => "null".to_owned(),
        };
        format!(
            r#"{},"choices":[{}],"usage":{},"prompt_token_ids":{ids}}}"#,
            self.frame(object),
            choices.join(","),
            usage(call, results)
        )
    }

    /// The first event of a chat choice.
    pub fn role(&self, index: usize) -> String {
        self.event(
            "chat.completion.chunk",
            &format!(
                r#"{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}"#
            ),
        )
    }

    /// The event of one token.
    pub fn token(&self, api: Api, token: &Emitted) -> String {
        let piece = quote(&token.piece);
        let finish = token.finish.as_ref().map(|(finish, reason)| (*finish, reason.as_deref()));
        let (object, content) = match api {
            Api::Chat => ("chat.completion.chunk", format!(r#""delta":{{"content":{piece}}}"#)),
            Api::Completions => ("text_completion", format!(r#""text":{piece},"token_ids":null"#)),
        };
        self.event(object, &format!(r#"{{"index":{},{content},{}}}"#, token.index, end(finish)))
    }

    /// The event with the token counts.
    pub fn usage_event(&self, call: &Call, results: &[Finished]) -> String {
        let object = if call.api == Api::Chat { "chat.completion.chunk" } else { "text_completion" };
        format!("data: {},\"choices\":[],\"usage\":{}}}\n\n", self.frame(object), usage(call, results))
    }

    fn event(&self, object: &str, choice: &str) -> String {
        format!("data: {},\"choices\":[{choice}]}}\n\n", self.frame(object))
    }

    /// The opening of every object.
    fn frame(&self, object: &str) -> String {
        let Shape { id, model, created } = self;
        format!(r#"{{"id":"{id}","object":"{object}","created":{created},"model":{}"#, quote(model))
    }
}

fn choice(api: Api, result: &Finished, offered: &str) -> String {
    let output = &result.output;
    let text = quote(&output.text(usize::MAX));
    let end = end(Some((output.finish, output.stop_reason.as_deref())));
    let content = match api {
        Api::Chat => format!(
            r#""message":{{"role":"assistant","content":{text},"reasoning_content":null,"reasoning":null,"tool_calls":[]}},{end},"mm_embedding_handle":null"#
        ),
        Api::Completions => format!(r#""text":{text},"token_ids":null,{end},"context_logits":null"#),
    };
    format!(
        r#"{{"index":{},{content},"disaggregated_params":{offered},"avg_decoded_tokens_per_iter":1.0}}"#,
        result.index
    )
}

/// The members that say how a choice ended.
fn end(finish: Option<(Finish, Option<&str>)>) -> String {
    let Some((finish, reason)) = finish else {
        return r#""logprobs":null,"finish_reason":null"#.to_owned();
    };
    // TensorRT-LLM's word for an abort.
    let name = if finish == Finish::Abort { "cancelled" } else { finish.name() };
    let reason = reason.map_or_else(|| "null".to_owned(), quote);
    format!(r#""logprobs":null,"finish_reason":"{name}","stop_reason":{reason}"#)
}

fn usage(call: &Call, results: &[Finished]) -> String {
    let prompt: u64 = call.prompts.iter().map(|prompt| u64::from(prompt.tokens)).sum();
    let completion: u64 = results.iter().map(|result| result.output.ids.len() as u64).sum();
    let firsts = results.iter().step_by(call.samples.max(1) as usize);
    let cached: u64 = firsts.map(|result| u64::from(result.cached_tokens)).sum();
    format!(
        r#"{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":{completion},"prompt_tokens_details":{{"cached_tokens":{cached}}}}}"#,
        prompt + completion
    )
}

fn quote(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default()
}
