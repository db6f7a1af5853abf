//! A generation request, validated in SGLang's order: content type, JSON, schema, prompt, lengths, hand-off. Model names
//! are not looked at.

use std::sync::Arc;

use http::HeaderMap;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use serde_json::Value;

use super::aborts::Live;
use super::failure::Failure;
use super::{handoff, limits};
use crate::body::{self, Fields, shown};
use crate::config::Role;
use crate::fault::Fault;
use crate::prompt::{Natural, Prompt};
use crate::report::ViolationKind;
use crate::sequence::Job;
use crate::state::Core;

/// The API a request came in by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/generate`.
    Generate,
}

/// A request that can be run.
#[derive(Debug)]
pub(crate) struct Call {
    pub api: Api,
    /// The model name as asked.
    pub model: String,
    pub prompts: Vec<Arc<Prompt>>,
    /// The id of each prompt.
    pub rids: Vec<String>,
    /// Whether the prompts came as a list.
    pub batch: bool,
    /// Samples of each prompt.
    pub samples: u32,
    pub stream: bool,
    pub include_usage: bool,
    /// Rooms and bootstrap addresses, for error messages.
    pub legs: Vec<(u64, String)>,
    pub jobs: Vec<Job>,
    /// What `/abort_request` finds.
    pub live: Vec<Live>,
}

/// Reads and validates a generation request.
pub(crate) fn read(
    core: &Arc<Core>,
    api: Api,
    head: &Parts,
    body: &[u8],
    seq: u64,
    fault: Option<&Fault>,
) -> Result<Call, Failure> {
    check_headers(core, &head.headers, seq)?;
    let fields = Fields::parse(body)?;
    let stream = fields.truth("stream")?;
    let include_usage =
        fields.value("stream_options").is_some_and(|options| options.get("include_usage") == Some(&Value::Bool(true)));
    let model = fields.text("model")?.unwrap_or_else(|| core.config.model.clone());
    let (prompts, batch) = prompts(core, &fields, api)?;
    let longest = prompts.iter().map(|prompt| prompt.tokens).max().unwrap_or_default();
    let mut rules = limits::rules(core, &fields, api, longest, seq)?;
    if fault.is_some_and(|fault| fault.ends_at_once) {
        (rules.limit, rules.natural) = (rules.limit.max(2), Natural::After(1));
    }
    let samples = samples(&fields, api)?;
    let most = core.config.limits.sequences;
    if prompts.len().saturating_mul(samples as usize) > most {
        return Err(Failure::meaning(format!("at most {most} sequences per request.")));
    }
    let rids = rids(core, &fields, prompts.len(), batch)?;
    let legs = handoff::read(core, &fields, (&head.headers, api), &rids, seq)?;
    if core.config.strict && samples > 1 && core.config.role != Role::Combined {
        core.violate(Some(seq), ViolationKind::RoomShared, format!("n {samples}"));
    }
    let sampling = limits::sampling(&fields);
    let (mut jobs, mut live) = (Vec::new(), Vec::new());
    for ((prompt, leg), rid) in prompts.iter().zip(&legs).zip(&rids) {
        for sample in 0..samples {
            let abort = core.abort.child_token();
            // With several samples the ids are made anew, so that no abort finds them.
            let own = if samples > 1 { fresh_rid(core) } else { rid.clone() };
            let (guard, shared) = core.rids.enter(&own, abort.clone());
            if shared && core.config.strict {
                core.violate(Some(seq), ViolationKind::RidReused, format!("rid {own}"));
            }
            live.push(guard);
            jobs.push(Job {
                seq,
                index: jobs.len() as u32,
                sample,
                prompt: prompt.clone(),
                rules: rules.clone(),
                source: leg.source.clone(),
                handover: leg.handover.clone(),
                sampling,
                abort,
                lingers: !core.config.disconnect_lag.is_zero(),
            });
        }
    }
    let legs = legs.into_iter().map(|leg| (leg.room, leg.bootstrap)).collect();
    Ok(Call { api, model, prompts, rids, batch, samples, stream, include_usage, legs, jobs, live })
}

fn check_headers(core: &Core, headers: &HeaderMap, seq: u64) -> Result<(), Failure> {
    if !core.config.strict {
        return Ok(());
    }
    let declared = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !declared.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
        return Err(Failure::content_type());
    }
    if let Some(name) = headers.keys().find(|name| name.as_str().starts_with("x-override-")) {
        core.violate(Some(seq), ViolationKind::OverrideHeader, name.to_string());
    }
    Ok(())
}

/// The prompts, and whether they came as a list.
fn prompts(core: &Core, fields: &Fields, api: Api) -> Result<(Vec<Arc<Prompt>>, bool), Failure> {
    let model = &core.config.model;
    let name = match api {
        Api::Chat => return Ok((vec![body::conversation(fields, "messages", model)?], false)),
        Api::Completions => "prompt",
        Api::Generate if fields.raw("input_ids").is_some() => "input_ids",
        Api::Generate => "text",
    };
    if fields.raw(name).is_none() && api == Api::Generate {
        return Err(Failure::meaning("Either text, input_ids or input_embeds should be provided."));
    }
    let batch =
        matches!(fields.value(name), Some(Value::Array(list)) if list.first().is_some_and(|one| !one.is_number()));
    Ok((body::completion(fields, name, model)?, batch))
}

fn samples(fields: &Fields, api: Api) -> Result<u32, Failure> {
    let n = match api {
        Api::Chat | Api::Completions => fields.integer("n")?,
        Api::Generate => fields.value("sampling_params").and_then(|nested| nested.get("n")?.as_i64()),
    };
    let n = n.unwrap_or(1);
    u32::try_from(n).ok().filter(|n| *n > 0).ok_or_else(|| Failure::meaning(format!("n must be at least 1, got {n}.")))
}

/// One id for each prompt: as given, numbered, or made up.
fn rids(core: &Core, fields: &Fields, prompts: usize, batch: bool) -> Result<Vec<String>, Failure> {
    let given = match fields.value("rid") {
        None => return Ok((0..prompts).map(|_| fresh_rid(core)).collect()),
        Some(Value::String(rid)) => vec![rid],
        Some(Value::Array(list)) if batch && list.len() == prompts => {
            list.iter().filter_map(Value::as_str).map(str::to_owned).collect()
        }
        Some(other) => return Err(Failure::schema("rid", "Input should be a valid string", &shown(&other))),
    };
    match given.as_slice() {
        [rid] if prompts > 1 => Ok((0..prompts).map(|number| format!("{rid}_{number}")).collect()),
        _ if given.len() == prompts => Ok(given),
        _ => Err(Failure::schema("rid", "Input should be a valid string", "<list>")),
    }
}

fn fresh_rid(core: &Core) -> String {
    format!("{:016x}{:016x}", core.fresh_id(), core.fresh_id())
}
