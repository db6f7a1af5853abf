//! A generation request, validated in TensorRT-LLM's order: JSON, schema, hand-off, prompt, lengths.

use std::sync::Arc;

use serde_json::Value;
use xxhash_rust::xxh64::xxh64;

use super::failure::Failure;
use super::handoff::{self, Leg};
use super::schema;
use crate::body::{self, Complaint, Fields, shown};
use crate::fault::Fault;
use crate::prompt::{Natural, OutputRules, Prompt, salt};
use crate::report::ViolationKind;
use crate::sequence::{Handover, Job};
use crate::state::Core;

/// The API a request came in by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// Fields that decide what is sampled.
const SAMPLING: [&str; 16] = [
    "temperature",
    "top_p",
    "top_p_min",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "length_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "response_format",
    "use_beam_search",
    "best_of",
];

/// A request that can be run.
#[derive(Debug)]
pub(crate) struct Call {
    pub api: Api,
    pub id: String,
    pub model: String,
    pub prompts: Vec<Arc<Prompt>>,
    /// Samples of each prompt.
    pub samples: u32,
    pub stream: bool,
    pub include_usage: bool,
    pub leg: Leg,
    pub jobs: Vec<Job>,
}

/// Reads and validates a generation request.
pub(crate) fn read(core: &Arc<Core>, api: Api, body: &[u8], seq: u64, fault: Option<&Fault>) -> Result<Call, Failure> {
    let fields = Fields::parse(body)?;
    if core.config.strict {
        schema::check(&fields, api)?;
    }
    let Some(model) = fields.text("model")? else { return Err(Complaint::missing("model", &fields.shown()).into()) };
    let stream = fields.truth("stream")?;
    let include_usage = fields
        .value("stream_options")
        .is_some_and(|options| options.get("include_usage").is_none_or(|asked| *asked == Value::Bool(true)));
    let n = fields.integer("n")?.unwrap_or(1);
    let samples = u32::try_from(n)
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| Failure::meaning(format!("n must be at least 1, got {n}.")))?;
    let prompts = prompts(core, &fields, api)?;
    let leg = handoff::read(core, &fields, seq)?;
    let context = matches!(leg, Leg::Context { .. });
    let longest = prompts.iter().map(|prompt| prompt.tokens).max().unwrap_or_default();
    let mut rules = rules(core, &fields, api, longest)?;
    let most = core.config.limits.sequences;
    if prompts.len().saturating_mul(samples as usize) > most {
        return Err(Failure::meaning(format!("at most {most} sequences per request.")));
    }
    if context {
        // Whatever was asked, a context request ends with its first token.
        (rules.limit, rules.at_least, rules.natural) = (1, 0, Natural::Never);
        note(core, samples, prompts.len(), stream, seq);
    }
    if fault.is_some_and(|fault| fault.ends_at_once) {
        (rules.limit, rules.natural) = (2, Natural::After(1));
    }
    let sampling = sampling(&fields);
    let mut jobs = Vec::new();
    for prompt in &prompts {
        for sample in 0..samples {
            let handover = if jobs.is_empty() { leg.handover() } else { Handover::Nothing };
            jobs.push(Job {
                seq,
                index: jobs.len() as u32,
                sample,
                prompt: prompt.clone(),
                rules: rules.clone(),
                source: leg.source(),
                handover,
                sampling,
                abort: core.abort.clone(),
                lingers: !core.config.disconnect_lag.is_zero(),
            });
        }
    }
    let prefix = if api == Api::Chat { "chatcmpl" } else { "cmpl" };
    let id = format!("{prefix}-{:016x}{:016x}", core.fresh_id(), core.fresh_id());
    Ok(Call { api, id, model, prompts, samples, stream, include_usage, leg, jobs })
}

/// What a gateway should not ask of a context worker, although the worker does it.
fn note(core: &Core, samples: u32, prompts: usize, stream: bool, seq: u64) {
    if !core.config.strict {
        return;
    }
    if stream {
        core.violate(Some(seq), ViolationKind::PrefillNotCapped, "a streamed context request".to_owned());
    }
    if samples != 1 || prompts != 1 {
        core.violate(Some(seq), ViolationKind::BlocksStranded, format!("n {samples}, {prompts} prompts"));
    }
}

/// The prompts, as token ids: what a generation worker gets of them must be the same prompt as the text was.
fn prompts(core: &Core, fields: &Fields, api: Api) -> Result<Vec<Arc<Prompt>>, Failure> {
    let model = &core.config.model;
    let salt = salt(model, &fields.text("cache_salt")?.unwrap_or_default());
    let as_ids = |prompt: Arc<Prompt>| {
        let mut by_ids = Prompt::of_ids(prompt.ids.clone(), salt);
        by_ids.text.clone_from(&prompt.text);
        Arc::new(by_ids)
    };
    if api == Api::Completions {
        if fields.raw("prompt").is_none() {
            return Err(Complaint::missing("prompt", &fields.shown()).into());
        }
        return Ok(body::completion(fields, "prompt", model)?.into_iter().map(as_ids).collect());
    }
    let conversation = body::conversation(fields, "messages", model)?;
    match fields.value("prompt_token_ids") {
        None => Ok(vec![as_ids(conversation)]),
        Some(value) => {
            let wrong =
                || Complaint::schema("int_type", "prompt_token_ids", "Input should be a valid list", &shown(&value));
            let list = value.as_array().filter(|list| !list.is_empty()).ok_or_else(wrong)?;
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong);
            Ok(vec![Arc::new(Prompt::of_ids(list.iter().map(id).collect::<Result<_, _>>()?, salt))])
        }
    }
}

fn rules(core: &Core, fields: &Fields, api: Api, longest: u32) -> Result<OutputRules, Failure> {
    let context = core.config.capacity.max_model_len;
    let asked = match fields.integer("max_tokens")? {
        None if api == Api::Chat => fields.integer("max_completion_tokens")?,
        limit => limit,
    };
    if let Some(limit) = asked.filter(|limit| *limit < 1) {
        return Err(Failure::meaning(format!("max_tokens must be greater than 0, got {limit}")));
    }
    let room = i64::from(context) - i64::from(longest);
    if asked.unwrap_or(1) > room {
        return Err(Failure::meaning(format!(
            "The sum of prompt length ({longest}.0) and query length (0) max_tokens ({}) should not exceed max_seq_len \
             ({context})",
            asked.unwrap_or(1)
        )));
    }
    let limit = asked.unwrap_or(room);
    let natural = match (core.config.natural_stop, asked) {
        _ if fields.truth("ignore_eos")? => Natural::Never,
        (Some(mean), _) => Natural::Around(mean),
        (None, None) => Natural::After(core.config.chat_tokens),
        (None, Some(_)) => Natural::Never,
    };
    let stop = match fields.value("stop") {
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    let at_least = u32::try_from(fields.integer("min_tokens")?.unwrap_or(0)).unwrap_or_default();
    Ok(OutputRules { limit: u32::try_from(limit).unwrap_or(u32::MAX), at_least, natural, stop })
}

/// A fingerprint of the sampling parameters; never 0.
fn sampling(fields: &Fields) -> u64 {
    let hash = SAMPLING
        .iter()
        .filter_map(|name| Some((name, fields.raw(name)?)))
        .fold(0, |hash, (name, raw)| xxh64(raw.get().as_bytes(), xxh64(name.as_bytes(), hash)));
    hash | 1
}
