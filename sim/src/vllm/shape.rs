//! The bodies of answers, field by field in vLLM 0.32's order.

use serde::Serialize;
use serde_json::value::RawValue;

use super::call::{Api, Call};
use super::shape_other as other;
use crate::ambient;
use crate::sequence::{Emitted, Finished};
use crate::state::Core;

/// Token counts of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub prompt: u64,
    pub completion: u64,
    pub cached: u64,
}

/// What all parts of one answer have in common.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub api: Api,
    pub id: String,
    pub created: u64,
    pub model: String,
    pub fingerprint: String,
    include_usage: bool,
    continuous_usage: bool,
    return_token_ids: bool,
    details: bool,
}

#[derive(Serialize)]
struct WholeUsage {
    prompt_tokens: u64,
    total_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: Option<WholeDetails>,
    completion_tokens_details: Option<()>,
}

#[expect(clippy::struct_field_names, reason = "the wire's names")]
#[derive(Serialize)]
struct WholeDetails {
    cached_tokens: u64,
    created_cache_tokens: u64,
    multimodal_tokens: Option<u64>,
}

#[derive(Serialize)]
struct StreamUsage {
    prompt_tokens: u64,
    total_tokens: u64,
    completion_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<StreamDetails>,
}

#[derive(Serialize)]
struct StreamDetails {
    cached_tokens: u64,
    created_cache_tokens: u64,
}

#[derive(Serialize)]
struct RunningUsage {
    prompt_tokens: u64,
    total_tokens: u64,
    completion_tokens: u64,
    completion_tokens_details: Option<()>,
}

#[derive(Serialize)]
struct ChatAnswer<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: Vec<ChatChoice<'a>>,
    service_tier: Option<()>,
    system_fingerprint: &'a str,
    usage: WholeUsage,
    prompt_logprobs: Option<()>,
    prompt_token_ids: Option<&'a [u32]>,
    prompt_text: Option<()>,
    kv_transfer_params: Option<&'a RawValue>,
    ec_transfer_params: Option<()>,
    metrics: Option<()>,
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: u32,
    message: ChatMessage,
    logprobs: Option<()>,
    finish_reason: &'a str,
    stop_reason: Option<&'a str>,
    token_ids: Option<&'a [u32]>,
    routed_experts: Option<()>,
}

#[derive(Serialize)]
struct ChatMessage {
    role: &'static str,
    content: String,
    refusal: Option<()>,
    annotations: Option<()>,
    audio: Option<()>,
    function_call: Option<()>,
    reasoning: Option<()>,
}

#[derive(Serialize)]
struct TextAnswer<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: Vec<TextChoice<'a>>,
    service_tier: Option<()>,
    system_fingerprint: &'a str,
    usage: WholeUsage,
    kv_transfer_params: Option<&'a RawValue>,
    ec_transfer_params: Option<()>,
    metrics: Option<()>,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: u32,
    text: String,
    logprobs: Option<()>,
    finish_reason: &'a str,
    stop_reason: Option<&'a str>,
    token_ids: Option<&'a [u32]>,
    prompt_logprobs: Option<()>,
    prompt_token_ids: Option<&'a [u32]>,
    routed_experts: Option<()>,
}

#[derive(Serialize)]
struct Chunk<'a, C: Serialize> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<RunningUsage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<&'a str>,
}

#[derive(Serialize)]
struct UsageChunk<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: [(); 0],
    usage: StreamUsage,
    system_fingerprint: &'a str,
}

#[derive(Serialize)]
struct FirstChunk<'a> {
    #[serde(flatten)]
    chunk: Chunk<'a, FirstChoice>,
    prompt_token_ids: Option<&'a [u32]>,
    prompt_text: Option<()>,
}

#[derive(Serialize)]
struct FirstChoice {
    index: usize,
    delta: FirstDelta,
    logprobs: Option<()>,
    finish_reason: Option<()>,
}

#[derive(Serialize)]
struct FirstDelta {
    role: &'static str,
    content: &'static str,
}

#[derive(Serialize)]
struct DeltaChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'a str>,
    /// Only beside a finish reason, as vLLM does.
    #[expect(clippy::option_option, reason = "absent and null differ on the wire")]
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Option<&'a str>>,
    token_ids: Option<[u32; 1]>,
}

#[derive(Serialize)]
struct Delta<'a> {
    content: &'a str,
}

#[derive(Serialize)]
struct TextDeltaChoice<'a> {
    index: u32,
    text: String,
    logprobs: Option<()>,
    finish_reason: Option<&'a str>,
    stop_reason: Option<&'a str>,
    prompt_token_ids: Option<&'a [u32]>,
    token_ids: Option<[u32; 1]>,
}

const CHAT_CHUNK: &str = "chat.completion.chunk";
const TEXT_CHUNK: &str = "text_completion";

impl Shape {
    pub fn new(core: &Core, call: &Call) -> Shape {
        Shape {
            api: call.api,
            id: call.id.clone(),
            created: ambient::unix_seconds(),
            model: call.model.clone(),
            fingerprint: core.fingerprint.clone(),
            include_usage: call.include_usage,
            continuous_usage: call.continuous_usage,
            return_token_ids: call.return_token_ids,
            details: core.config.prompt_tokens_details,
        }
    }

    /// A whole answer.
    pub fn whole(&self, call: &Call, results: &[Finished], usage: &Usage, kv: Option<&RawValue>) -> Vec<u8> {
        match self.api {
            Api::Chat => json(&ChatAnswer {
                id: &self.id,
                object: "chat.completion",
                created: self.created,
                model: &self.model,
                choices: results.iter().map(|result| self.chat_choice(result)).collect(),
                service_tier: None,
                system_fingerprint: &self.fingerprint,
                usage: self.whole_usage(usage),
                prompt_logprobs: None,
                prompt_token_ids: call.prompts.first().and_then(|prompt| self.ids(&prompt.ids)),
                prompt_text: None,
                kv_transfer_params: kv,
                ec_transfer_params: None,
                metrics: None,
            }),
            Api::Completions => json(&TextAnswer {
                id: &self.id,
                object: TEXT_CHUNK,
                created: self.created,
                model: &self.model,
                choices: results.iter().map(|result| self.text_choice(call, result)).collect(),
                service_tier: None,
                system_fingerprint: &self.fingerprint,
                usage: self.whole_usage(usage),
                kv_transfer_params: kv,
                ec_transfer_params: None,
                metrics: None,
            }),
            Api::Responses => other::response(self, results, usage, kv),
            Api::Messages => other::message(self, results, usage, kv),
        }
    }

    /// The events before choice number `index`'s first token.
    pub fn opening(&self, call: &Call, index: usize) -> Vec<String> {
        match self.api {
            Api::Chat => {
                let choice = FirstChoice {
                    index,
                    delta: FirstDelta { role: "assistant", content: "" },
                    logprobs: None,
                    finish_reason: None,
                };
                let chunk = self.chunk(CHAT_CHUNK, choice, self.running(call, 0), false);
                let ids = call.prompts.first().and_then(|prompt| self.ids(&prompt.ids));
                vec![event(&FirstChunk { chunk, prompt_token_ids: ids, prompt_text: None })]
            }
            Api::Completions => Vec::new(),
            Api::Responses => other::response_opening(self),
            Api::Messages => other::message_opening(self, call),
        }
    }

    /// The events of one token.
    pub fn token(&self, call: &Call, token: &Emitted) -> Vec<String> {
        let usage = self.running(call, u64::from(token.position));
        let finish_reason = token.finish.as_ref().map(|(finish, _)| finish.name());
        let stop_reason = token.finish.as_ref().map(|(_, reason)| reason.as_deref());
        let last = finish_reason.is_some() && !self.include_usage;
        let token_ids = self.return_token_ids.then_some([token.id]);
        match self.api {
            Api::Chat => {
                let delta = Delta { content: &token.piece };
                let choice =
                    DeltaChoice { index: token.index, delta, logprobs: None, finish_reason, stop_reason, token_ids };
                vec![event(&self.chunk(CHAT_CHUNK, choice, usage, last))]
            }
            Api::Completions => {
                let prompt = prompt_of(call, token.index);
                let echoed = if token.position == 1 && call.echo { prompt.map_or("", |p| p.text.as_str()) } else { "" };
                let first = token.position == 1;
                let choice = TextDeltaChoice {
                    index: token.index,
                    text: format!("{echoed}{}", token.piece),
                    logprobs: None,
                    finish_reason,
                    stop_reason: stop_reason.flatten(),
                    prompt_token_ids: prompt.filter(|_| first).and_then(|prompt| self.ids(&prompt.ids)),
                    token_ids,
                };
                vec![event(&self.chunk(TEXT_CHUNK, choice, usage, last))]
            }
            Api::Responses => other::response_token(self, token),
            Api::Messages => other::message_token(token),
        }
    }

    /// The events after the last token, `[DONE]` left out.
    pub fn closing(&self, usage: &Usage) -> Vec<String> {
        let object = match self.api {
            Api::Responses => return other::response_closing(self, usage),
            Api::Messages => return other::message_closing(usage),
            Api::Chat => CHAT_CHUNK,
            Api::Completions => TEXT_CHUNK,
        };
        if !self.include_usage {
            return Vec::new();
        }
        vec![event(&UsageChunk {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices: [],
            usage: StreamUsage {
                prompt_tokens: usage.prompt,
                total_tokens: usage.prompt + usage.completion,
                completion_tokens: usage.completion,
                prompt_tokens_details: self
                    .details
                    .then_some(StreamDetails { cached_tokens: usage.cached, created_cache_tokens: 0 }),
            },
            system_fingerprint: &self.fingerprint,
        })]
    }

    /// Whether streams of this API end with `[DONE]`.
    pub fn ends_with_done(&self) -> bool {
        matches!(self.api, Api::Chat | Api::Completions)
    }

    fn chunk<'a, C: Serialize>(
        &'a self,
        object: &'a str,
        choice: C,
        usage: Option<RunningUsage>,
        last: bool,
    ) -> Chunk<'a, C> {
        Chunk {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices: vec![choice],
            usage,
            system_fingerprint: last.then_some(self.fingerprint.as_str()),
        }
    }

    fn chat_choice<'a>(&self, result: &'a Finished) -> ChatChoice<'a> {
        let output = &result.output;
        ChatChoice {
            index: result.index,
            message: ChatMessage {
                role: "assistant",
                content: output.text(usize::MAX),
                refusal: None,
                annotations: None,
                audio: None,
                function_call: None,
                reasoning: None,
            },
            logprobs: None,
            finish_reason: output.finish.name(),
            stop_reason: output.stop_reason.as_deref(),
            token_ids: self.ids(&output.ids),
            routed_experts: None,
        }
    }

    fn text_choice<'a>(&self, call: &Call, result: &'a Finished) -> TextChoice<'a> {
        let output = &result.output;
        let echoed = if call.echo { result.prompt.text.as_str() } else { "" };
        TextChoice {
            index: result.index,
            text: format!("{echoed}{}", output.text(usize::MAX)),
            logprobs: None,
            finish_reason: output.finish.name(),
            stop_reason: output.stop_reason.as_deref(),
            token_ids: self.ids(&output.ids),
            prompt_logprobs: None,
            prompt_token_ids: self.ids(&result.prompt.ids),
            routed_experts: None,
        }
    }

    fn ids<'a>(&self, ids: &'a [u32]) -> Option<&'a [u32]> {
        self.return_token_ids.then_some(ids)
    }

    fn running(&self, call: &Call, completion: u64) -> Option<RunningUsage> {
        let prompt = call.prompts.iter().map(|prompt| u64::from(prompt.tokens)).sum();
        (self.include_usage && self.continuous_usage).then_some(RunningUsage {
            prompt_tokens: prompt,
            total_tokens: prompt + completion,
            completion_tokens: completion,
            completion_tokens_details: None,
        })
    }

    fn whole_usage(&self, usage: &Usage) -> WholeUsage {
        WholeUsage {
            prompt_tokens: usage.prompt,
            total_tokens: usage.prompt + usage.completion,
            completion_tokens: usage.completion,
            prompt_tokens_details: self.details.then_some(WholeDetails {
                cached_tokens: usage.cached,
                created_cache_tokens: usage.prompt.saturating_sub(usage.cached) / 16 * 16,
                multimodal_tokens: None,
            }),
            completion_tokens_details: None,
        }
    }
}

fn prompt_of(call: &Call, index: u32) -> Option<&crate::prompt::Prompt> {
    call.prompts.get((index / call.samples.max(1)) as usize).map(AsRef::as_ref)
}

/// Serialises an answer; its types cannot fail to.
pub(crate) fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

/// One event of an OpenAI stream.
fn event(value: &impl Serialize) -> String {
    format!("data: {}\n\n", serde_json::to_string(value).unwrap_or_default())
}
