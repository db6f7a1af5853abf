//! The fields TensorRT-LLM's request models know. Everything else is refused.

use super::call::Api;
use super::failure::Failure;
use crate::body::{Fields, shown};

/// Fields of both APIs.
const COMMON: [&str; 37] = [
    "model",
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "top_p",
    "user",
    "lora_request",
    "prompt_ignore_length",
    "use_beam_search",
    "top_k",
    "top_p_min",
    "min_p",
    "repetition_penalty",
    "length_penalty",
    "early_stopping",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "add_special_tokens",
    "response_format",
    "disaggregated_params",
    "detokenize",
];
const CHAT: [&str; 12] = [
    "messages",
    "prompt_token_ids",
    "top_logprobs",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "add_generation_prompt",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "cache_salt",
];
const COMPLETIONS: [&str; 2] = ["prompt", "return_context_logits"];
/// Members of `disaggregated_params`.
const DISAGGREGATED: [&str; 9] = [
    "request_type",
    "first_gen_tokens",
    "ctx_request_id",
    "encoded_opaque_state",
    "draft_tokens",
    "disagg_request_id",
    "ctx_dp_rank",
    "ctx_info_endpoint",
    "schedule_style",
];

/// Refuses fields that the schema does not know, and what it forbids besides.
pub(crate) fn check(fields: &Fields, api: Api) -> Result<(), Failure> {
    let own: &[&str] = if api == Api::Chat { &CHAT } else { &COMPLETIONS };
    let known = |name: &str| {
        let common = COMMON.contains(&name) && (name != "detokenize" || api == Api::Completions);
        common || own.contains(&name)
    };
    if let Some(name) = fields.names().filter(|name| !known(name)).min() {
        let value = fields.value(name).unwrap_or_default();
        return Err(Failure::unknown_field(name, &shown(&value)));
    }
    // The second name of the limit is an alias: given both, one is a stranger.
    if fields.has("max_tokens") && fields.has("max_completion_tokens") {
        let value = fields.value("max_completion_tokens").unwrap_or_default();
        return Err(Failure::unknown_field("max_completion_tokens", &shown(&value)));
    }
    if let Some(params) = fields.object("disaggregated_params")?
        && let Some((name, raw)) = params.iter().find(|(name, _)| !DISAGGREGATED.contains(&name.as_str()))
    {
        return Err(Failure::unknown_field(&format!("disaggregated_params.{name}"), raw.get()));
    }
    if fields.object("stream_options")?.is_some() && !fields.truth("stream")? {
        return Err(Failure::rule(match api {
            Api::Chat => "stream_options can only be set if stream is true",
            Api::Completions => "Stream options can only be defined when stream is true.",
        }));
    }
    if fields.text("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(Failure::rule("suffix is not supported"));
    }
    Ok(())
}
