//! The bodies of SGLang's answers, field by field in the order captured from 0.5.23.

use super::call::{Api, Call};
use super::failure::quote;
use crate::ambient;
use crate::prompt::Finish;
use crate::sequence::{Emitted, Finished};

/// The token id that stands for the end of a sequence in `matched_stop`.
const END_OF_SEQUENCE: u32 = 2;

/// What all parts of one answer have in common.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    id: String,
    model: String,
    created: u64,
}

impl Shape {
    pub fn new(call: &Call) -> Shape {
        Shape {
            id: call.rids.first().cloned().unwrap_or_default(),
            model: call.model.clone(),
            created: ambient::unix_seconds(),
        }
    }

    /// A whole answer.
    pub fn whole(&self, call: &Call, results: &[Finished]) -> String {
        if call.api == Api::Generate {
            let all: Vec<_> = results
                .iter()
                .enumerate()
                .map(|(index, result)| {
                    let output = &result.output;
                    let finish = Some((output.finish, output.stop_reason.as_deref()));
                    Shape::generated(call, index, &output.text(usize::MAX), &output.ids, finish)
                })
                .collect();
            let single = !call.batch && call.samples == 1;
            return if single { all.concat() } else { format!("[{}]", all.join(",")) };
        }
        let choices: Vec<_> = results.iter().map(|result| choice(call.api, result)).collect();
        let object = if call.api == Api::Chat { "chat.completion" } else { "text_completion" };
        let completion: usize = results.iter().map(|result| result.output.ids.len()).sum();
        format!(
            r#"{},"choices":[{}],"usage":{},"metadata":{{"weight_version":"default","weight_versions":[{{"version":"default","start":0,"end":{completion}}}]}}}}"#,
            self.frame(object),
            choices.join(","),
            usage(call, completion)
        )
    }

    /// The first event of a chat choice.
    pub fn role(&self, index: usize) -> String {
        self.chat_event(index as u32, r#","role":"assistant","content":"""#, None)
    }

    /// The events of one token, the finish apart from the content.
    pub fn token(&self, api: Api, token: &Emitted) -> Vec<String> {
        let finish = token.finish.as_ref().map(|(finish, reason)| (*finish, reason.as_deref()));
        let piece = quote(&token.piece);
        if api == Api::Completions {
            return vec![self.text_event(token.index, &piece, finish)];
        }
        let content =
            (!token.piece.is_empty()).then(|| self.chat_event(token.index, &format!(r#","content":{piece}"#), None));
        let end = finish.map(|finish| self.chat_event(token.index, "", Some(finish)));
        content.into_iter().chain(end).collect()
    }

    /// The event with the token counts.
    pub fn usage_event(&self, call: &Call, completion: usize) -> String {
        let object = if call.api == Api::Chat { "chat.completion.chunk" } else { "text_completion" };
        format!("data: {},\"choices\":[],\"usage\":{}}}\n\n", self.frame(object), usage(call, completion))
    }

    /// One output of `/generate`.
    pub fn generated(
        call: &Call,
        index: usize,
        text: &str,
        ids: &[u32],
        finish: Option<(Finish, Option<&str>)>,
    ) -> String {
        let prompt = index / call.samples.max(1) as usize;
        let tokens = call.prompts.get(prompt).map_or(0, |prompt| prompt.tokens);
        let rid = call.rids.get(prompt).map_or("", String::as_str);
        let reason = match finish {
            None => "null".to_owned(),
            Some((Finish::Length, _)) => format!(r#"{{"type":"length","length":{}}}"#, ids.len()),
            Some((Finish::Stop, reason)) => format!(r#"{{"type":"stop","matched":{}}}"#, matched(reason)),
            Some((Finish::Abort, _)) => r#"{"type":"abort","message":"Aborted"}"#.to_owned(),
        };
        let ids_shown = serde_json::to_string(ids).unwrap_or_default();
        let batch = call.batch || call.samples > 1;
        let place = if batch && call.stream { format!(r#","index":{index}"#) } else { String::new() };
        format!(
            r#"{{"text":{},"output_ids":{ids_shown},"meta_info":{{"id":{},"finish_reason":{reason},"prompt_tokens":{tokens},"weight_version":"default","total_retractions":0,"completion_tokens":{},"cached_tokens":0}}{place}}}"#,
            quote(text),
            quote(rid),
            ids.len()
        )
    }

    fn chat_event(&self, index: u32, delta: &str, finish: Option<(Finish, Option<&str>)>) -> String {
        format!(
            "data: {},\"choices\":[{{\"index\":{index},\"delta\":{{\"reasoning_content\":null{delta}}},{}}}]}}\n\n",
            self.frame("chat.completion.chunk"),
            end(finish)
        )
    }

    fn text_event(&self, index: u32, piece: &str, finish: Option<(Finish, Option<&str>)>) -> String {
        format!(
            "data: {},\"choices\":[{{\"index\":{index},\"text\":{piece},{}}}]}}\n\n",
            self.frame("text_completion"),
            end(finish)
        )
    }

    /// The opening of every object.
    fn frame(&self, object: &str) -> String {
        let Shape { id, model, created } = self;
        format!(r#"{{"id":{},"object":"{object}","created":{created},"model":{}"#, quote(id), quote(model))
    }
}

fn choice(api: Api, result: &Finished) -> String {
    let output = &result.output;
    let text = quote(&output.text(usize::MAX));
    let content = match api {
        Api::Chat => {
            format!(r#""message":{{"role":"assistant","content":{text},"reasoning_content":null}}"#)
        }
        Api::Completions | Api::Generate => format!(r#""text":{text}"#),
    };
    format!(r#"{{"index":{},{content},{}}}"#, result.index, end(Some((output.finish, output.stop_reason.as_deref()))))
}

/// The members that close a choice.
fn end(finish: Option<(Finish, Option<&str>)>) -> String {
    let (reason, matched) = match finish {
        None => ("null".to_owned(), "null".to_owned()),
        Some((Finish::Stop, reason)) => (quote(Finish::Stop.name()), matched(reason)),
        Some((finish, _)) => (quote(finish.name()), "null".to_owned()),
    };
    format!(r#""logprobs":null,"finish_reason":{reason},"matched_stop":{matched}"#)
}

/// The stop string, or the token that ended the sequence.
fn matched(reason: Option<&str>) -> String {
    reason.map_or_else(|| END_OF_SEQUENCE.to_string(), quote)
}

fn usage(call: &Call, completion: usize) -> String {
    let prompt: u64 = call.prompts.iter().map(|prompt| u64::from(prompt.tokens)).sum();
    format!(
        r#"{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":{completion},"prompt_tokens_details":null,"reasoning_tokens":0,"completion_tokens_details":null}}"#,
        prompt + completion as u64
    )
}
