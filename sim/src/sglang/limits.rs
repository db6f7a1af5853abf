//! How long an SGLang answer may become, and what its first token depends on.

use serde_json::Value;
use xxhash_rust::xxh64::xxh64;

use super::call::Api;
use super::failure::Failure;
use crate::body::Fields;
use crate::config::Role;
use crate::prompt::{Natural, OutputRules};
use crate::report::ViolationKind;
use crate::state::Core;

/// Fields that decide what is sampled.
const SAMPLING: [&str; 16] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "response_format",
    "regex",
    "ebnf",
    "json_schema",
    "sampling_params",
];

/// A fingerprint of the sampling parameters; never 0.
pub(crate) fn sampling(fields: &Fields) -> u64 {
    let hash = SAMPLING
        .iter()
        .filter_map(|name| Some((name, fields.raw(name)?)))
        .fold(0, |hash, (name, raw)| xxh64(raw.get().as_bytes(), xxh64(name.as_bytes(), hash)));
    hash | 1
}

/// The output's rules for a prompt of `longest` tokens; a prefill engine makes one token, whatever was asked.
pub(crate) fn rules(core: &Core, fields: &Fields, api: Api, longest: u32, seq: u64) -> Result<OutputRules, Failure> {
    let context = core.config.capacity.max_model_len;
    if longest >= context {
        return Err(Failure::meaning(format!(
            "The input ({longest} tokens) is longer than the model's context length ({context} tokens)."
        )));
    }
    let nested = fields.value("sampling_params").unwrap_or_default();
    let asked = asked(fields, api, &nested)?;
    if let Some(limit) = asked.filter(|limit| *limit < 0) {
        return Err(Failure::meaning(format!("max_new_tokens must be at least 0, got {limit}.")));
    }
    if let Some(limit) = asked.filter(|limit| *limit > i64::from(context)) {
        return Err(Failure::meaning(format!(
            "max_completion_tokens is too large: {limit}.This model supports at most {context} completion tokens."
        )));
    }
    let room = context - longest;
    let limit = asked.map_or(room, |limit| u32::try_from(limit).unwrap_or(room));
    if limit > room {
        return Err(Failure::meaning(format!(
            "Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total \
             of {} tokens: {longest} tokens from the input messages and {limit} tokens for the completion.",
            u64::from(longest) + u64::from(limit)
        )));
    }
    let member = |name: &str| fields.value(name).or_else(|| nested.get(name).cloned()).unwrap_or_default();
    let at_least = ["min_tokens", "min_new_tokens"].iter().find_map(|name| member(name).as_u64()).unwrap_or_default();
    if core.config.strict && asked.is_some() && at_least > u64::from(limit) && core.config.role != Role::Prefill {
        return Err(Failure::meaning(format!(
            "min_new_tokens must be in [0, max_new_tokens({limit})], got {at_least}."
        )));
    }
    let natural = match (core.config.natural_stop, asked) {
        _ if member("ignore_eos") == Value::Bool(true) => Natural::Never,
        (Some(mean), _) => Natural::Around(mean),
        (None, None) => Natural::After(core.config.chat_tokens),
        (None, Some(_)) => Natural::Never,
    };
    let stop = match member("stop") {
        Value::String(stop) => vec![stop],
        Value::Array(list) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    let at_least = u32::try_from(at_least).unwrap_or(u32::MAX);
    if core.config.role == Role::Prefill {
        let capped = api == Api::Generate || asked == Some(1);
        let streamed = fields.truth("stream")?;
        if core.config.strict && (!capped || streamed) {
            core.violate(Some(seq), ViolationKind::PrefillNotCapped, format!("stream {streamed}, limit {asked:?}"));
        }
        return Ok(OutputRules { limit: 1, at_least: 0, natural: Natural::Never, stop });
    }
    Ok(OutputRules { limit, at_least, natural, stop })
}

/// The limit asked for. Chat takes the first one that is not zero.
fn asked(fields: &Fields, api: Api, nested: &Value) -> Result<Option<i64>, Failure> {
    Ok(match api {
        Api::Chat => match fields.integer("max_completion_tokens")? {
            Some(limit) if limit != 0 => Some(limit),
            zero => fields.integer("max_tokens")?.or(zero),
        },
        Api::Completions => Some(fields.integer("max_tokens")?.unwrap_or(16)),
        Api::Generate => Some(nested.get("max_new_tokens").and_then(Value::as_i64).unwrap_or(128)),
    })
}
