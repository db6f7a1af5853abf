//! A generation request, validated in vLLM's order: content type, JSON, schema, model, prompt, lengths, sampling.

use std::sync::Arc;

use http::HeaderMap;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use serde_json::Value;

use super::failure::Failure;
use super::handoff::{self, Handoff, Produce};
use crate::body::{self, Fields};
use crate::config::Role;
use crate::prompt::{Natural, OutputRules, Prompt};
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
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
}

/// A request that can be run.
#[derive(Debug)]
pub(crate) struct Call {
    pub api: Api,
    /// The client-visible id.
    pub id: String,
    /// The model name as asked.
    pub model: String,
    pub prompts: Vec<Arc<Prompt>>,
    /// Samples of each prompt.
    pub samples: u32,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub return_token_ids: bool,
    pub echo: bool,
    pub jobs: Vec<Job>,
}

/// Refuses bodies that are not declared as JSON.
pub(crate) fn check_content_type(core: &Core, headers: &HeaderMap) -> Result<(), Failure> {
    let declared = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = declared.split(';').next().unwrap_or_default().trim();
    if core.config.strict && !media_type.eq_ignore_ascii_case("application/json") {
        return Err(Failure::content_type());
    }
    Ok(())
}

/// The model asked for, or a 404.
pub(crate) fn check_model(core: &Core, fields: &Fields) -> Result<String, Failure> {
    let config = &core.config;
    let Some(asked) = fields.text("model")? else { return Ok(config.model.clone()) };
    if config.strict && asked != config.model && !config.aliases.contains(&asked) {
        let served: Vec<_> = std::iter::once(&config.model).chain(&config.aliases).map(String::as_str).collect();
        return Err(Failure::unknown_model(&asked, &served.join(", ")));
    }
    Ok(asked)
}

/// Reads and validates a generation request.
pub(crate) async fn read(core: &Arc<Core>, api: Api, head: &Parts, body: &[u8], seq: u64) -> Result<Call, Failure> {
    check_content_type(core, &head.headers)?;
    let fields = Fields::parse(body)?;
    let numbers = Numbers::read(&fields, api)?;
    let stream = fields.truth("stream")?;
    let usage = |name: &str| fields.value("stream_options").is_some_and(|o| o.get(name) == Some(&Value::Bool(true)));
    let (include_usage, continuous_usage) = (usage("include_usage"), usage("continuous_usage_stats"));
    if core.config.strict && fields.object("stream_options")?.is_some() && !stream {
        let message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)";
        return Err(Failure::meaning(message, Some("stream_options")));
    }
    // From here on a refusal also frees the blocks that the hand-off names.
    let known = check_model(core, &fields);
    let handoff = handoff::read(core, &fields, seq, known.as_ref().err()).await?;
    let model = known?;
    let prompts = match api {
        Api::Chat | Api::Messages => vec![body::conversation(&fields, "messages", &core.config.model)?],
        Api::Responses => vec![body::conversation(&fields, "input", &core.config.model)?],
        Api::Completions => body::completion(&fields, "prompt", &core.config.model)?,
    };
    let longest = prompts.iter().map(|prompt| prompt.tokens).max().unwrap_or_default();
    let rules = numbers.rules(core, &fields, longest)?;
    let samples = numbers.samples;
    if prompts.len().saturating_mul(samples as usize) > core.config.limits.sequences {
        let most = core.config.limits.sequences;
        return Err(Failure::value(&format!("at most {most} sequences per request."), "n", samples));
    }
    let id = request_id(core, api, head, seq);
    note_prefill(core, &handoff, &numbers, stream, prompts.len(), seq);
    let mut jobs = Vec::with_capacity(prompts.len() * samples as usize);
    for (number, prompt) in prompts.iter().enumerate() {
        for sample in 0..samples {
            let handover = match &handoff.produce {
                Produce::Nothing => Handover::Nothing,
                Produce::Answered => Handover::Pinned(internal_id(core, api, &id, number, sample, samples)),
                Produce::Named(transfer_id) => Handover::Pinned(transfer_id.clone()),
                Produce::Stored => Handover::Stored,
            };
            jobs.push(Job {
                seq,
                index: jobs.len() as u32,
                sample,
                prompt: prompt.clone(),
                rules: rules.clone(),
                source: handoff.source.clone(),
                handover,
                sampling: 0,
                abort: core.abort.clone(),
                lingers: !core.config.disconnect_lag.is_zero(),
            });
        }
    }
    Ok(Call {
        api,
        id,
        model,
        prompts,
        samples,
        stream,
        include_usage,
        continuous_usage,
        return_token_ids: fields.truth("return_token_ids")?,
        echo: api == Api::Completions && fields.truth("echo")?,
        jobs,
    })
}

/// The numbers of a request, typed but not yet judged.
#[derive(Debug)]
struct Numbers {
    /// The field that limits the output, and its value.
    limit: Option<(&'static str, i64)>,
    min_tokens: i64,
    samples: u32,
    temperature: Option<f64>,
    top_p: Option<f64>,
    bad_samples: Option<i64>,
}

impl Numbers {
    fn read(fields: &Fields, api: Api) -> Result<Numbers, Failure> {
        let max_tokens = fields.integer("max_tokens")?.map(|value| ("max_tokens", value));
        let limit = match api {
            Api::Chat => {
                fields.integer("max_completion_tokens")?.map(|value| ("max_completion_tokens", value)).or(max_tokens)
            }
            Api::Completions => Some(max_tokens.unwrap_or(("max_tokens", 16))),
            Api::Responses => fields.integer("max_output_tokens")?.map(|value| ("max_output_tokens", value)),
            Api::Messages if max_tokens.is_none() => return Err(Failure::missing("max_tokens", &fields.shown())),
            Api::Messages => max_tokens,
        };
        let n = fields.integer("n")?.unwrap_or(1);
        Ok(Numbers {
            limit,
            min_tokens: fields.integer("min_tokens")?.unwrap_or(0),
            samples: u32::try_from(n).unwrap_or_default(),
            bad_samples: Some(n).filter(|n| *n < 1 || *n > i64::from(u32::MAX)),
            temperature: fields.number("temperature")?,
            top_p: fields.number("top_p")?,
        })
    }

    /// Judges the numbers against a prompt of `longest` tokens.
    fn rules(&self, core: &Core, fields: &Fields, longest: u32) -> Result<OutputRules, Failure> {
        let context = core.config.capacity.max_model_len;
        if longest >= context {
            return Err(too_long(context));
        }
        let room = context - longest;
        let limit = match self.limit {
            Some((_, limit)) => {
                check_limit(limit, context, longest)?;
                u32::try_from(limit).unwrap_or(room).min(room)
            }
            None => room,
        };
        if core.config.strict {
            self.check_sampling(i64::from(limit))?;
        }
        if let Some(bad) = self.bad_samples {
            return Err(Failure::value(&format!("n must be at least 1, got {bad}."), "n", bad));
        }
        let natural = match (core.config.natural_stop, self.limit) {
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
        Ok(OutputRules { limit, at_least: u32::try_from(self.min_tokens).unwrap_or_default(), natural, stop })
    }

    fn check_sampling(&self, limit: i64) -> Result<(), Failure> {
        // Python spells -1 as -1.0, as Rust's debug form does.
        if let Some(temperature) = self.temperature.filter(|t| *t < 0.0 || t.is_nan()) {
            let message = format!("temperature must be non-negative, got {temperature:?}.");
            return Err(Failure::value(&message, "temperature", format!("{temperature:?}")));
        }
        if let Some(top_p) = self.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return Err(Failure::value(
                &format!("top_p must be in (0, 1], got {top_p:?}."),
                "top_p",
                format!("{top_p:?}"),
            ));
        }
        let least = self.min_tokens;
        if least < 0 {
            let message = format!("min_tokens must be greater than or equal to 0, got {least}.");
            return Err(Failure::meaning(message, None));
        }
        if least > limit {
            let message = format!("min_tokens must be less than or equal to max_tokens={limit}, got {least}.");
            return Err(Failure::meaning(message, None));
        }
        Ok(())
    }
}

fn check_limit(limit: i64, context: u32, longest: u32) -> Result<(), Failure> {
    if limit < 1 {
        return Err(Failure::value(&format!("max_tokens must be at least 1, got {limit}."), "max_tokens", limit));
    }
    if limit > i64::from(context) {
        let message = format!(
            "max_tokens={limit} cannot be greater than max_model_len={context}. Please request fewer output tokens."
        );
        return Err(Failure::value(&message, "max_tokens", limit));
    }
    let total = limit + i64::from(longest);
    if total > i64::from(context) {
        let message = format!(
            "This model's maximum context length is {context} tokens. However, you requested {limit} output tokens \
             and your prompt contains at least {longest} input tokens, for a total of at least {total} tokens. Please \
             reduce the length of the input prompt or the number of requested output tokens."
        );
        return Err(Failure::value(&message, "input_tokens", longest));
    }
    Ok(())
}

fn too_long(context: u32) -> Failure {
    // The real engine stops tokenising at the limit, so it never knows the true length either.
    let at_least = u64::from(context) + 1;
    let message = format!(
        "This model's maximum context length is {context} tokens. However, your prompt contains at least {at_least} input \
         tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
    );
    Failure::value(&message, "input_tokens", at_least)
}

/// The client-visible id: from `X-Request-Id` where there is one.
fn request_id(core: &Core, api: Api, head: &Parts, seq: u64) -> String {
    let given = head.headers.get_all("x-request-id");
    if core.config.strict && given.iter().count() > 1 {
        let all: Vec<_> = given.iter().map(|value| String::from_utf8_lossy(value.as_bytes())).collect();
        core.violate(Some(seq), ViolationKind::RequestIdRepeated, all.join(", "));
    }
    let base = given
        .iter()
        .next()
        .and_then(|value| value.to_str().ok())
        .filter(|id| !id.is_empty())
        .map_or_else(|| format!("{:016x}", core.fresh_id()), str::to_owned);
    let prefix = match api {
        Api::Chat => "chatcmpl-",
        Api::Completions => "cmpl-",
        Api::Responses => "resp_",
        Api::Messages => "msg_",
    };
    format!("{prefix}{base}")
}

/// The engine's own id of one sequence: the client-visible one with a random end.
fn internal_id(core: &Core, api: Api, id: &str, prompt: usize, sample: u32, samples: u32) -> String {
    let end = core.fresh_id() >> 32;
    let child = if samples > 1 { format!("{sample}_") } else { String::new() };
    match api {
        Api::Completions => format!("{child}{id}-{prompt}-{end:08x}"),
        Api::Chat | Api::Responses | Api::Messages => format!("{child}{id}-{end:08x}"),
    }
}

/// What a gateway should not ask of a prefill engine, although the engine does it.
fn note_prefill(core: &Core, handoff: &Handoff, numbers: &Numbers, stream: bool, prompts: usize, seq: u64) {
    if !core.config.strict || core.config.role != Role::Prefill || handoff.produce == Produce::Nothing {
        return;
    }
    let limit = numbers.limit.map(|(_, limit)| limit);
    if stream || limit != Some(1) {
        let detail = format!("stream {stream}, {:?}", numbers.limit);
        core.violate(Some(seq), ViolationKind::PrefillNotCapped, detail);
    }
    if numbers.samples != 1 || prompts != 1 {
        let detail = format!("n {}, {prompts} prompts", numbers.samples);
        core.violate(Some(seq), ViolationKind::BlocksStranded, detail);
    }
}
