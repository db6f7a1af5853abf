//! From a parsed request to the question that routing answers: profile, strategy, knobs, what can be split.

use std::sync::Arc;

use http::HeaderMap;

use super::event::Adapter;
use super::headers::text;
use super::prepare::{HashJob, PrepareJob};
use crate::error::{ApiError, Reason};
use crate::fleet::{Engine, Model, RateLimit};
use crate::knobs::{Knobs, PdKnobs};
use crate::request::{Endpoint, ParsedBody};
use crate::routing::{PromptLength, Splittable, Strategy, largest_bound};

/// What was decided about a request before any pod is looked at.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The strategy; `None` = Envoy's own routes decide.
    pub strategy: Option<Strategy>,
    /// The profile that the request named, or that its hints chose.
    pub profile: Option<String>,
    /// Knobs in force.
    pub knobs: Arc<PdKnobs>,
    /// Limit on the model's requests.
    pub rate_limit: Option<RateLimit>,
    /// One leg or two.
    pub splittable: Splittable,
}

/// Resolves profile and strategy for a request that wants this profile (reference section 1.5, steps 4 and 5).
pub fn plan(
    adapter: Adapter,
    model: &Model,
    headers: &HeaderMap,
    wanted_profile: Option<String>,
    body: &ParsedBody,
    knobs: &Knobs,
) -> Result<Plan, ApiError> {
    let config = model.config.as_deref();
    let profile = config.and_then(|config| config.profile(wanted_profile.as_deref()));
    let name = config
        .and_then(|config| config.locked_strategy.as_deref())
        .or_else(|| text(headers, "routing-strategy"))
        .or_else(|| profile.and_then(|profile| profile.routing_strategy.as_deref()))
        .or(knobs.routing_algorithm.as_deref());
    let strategy = match name {
        Some(name) => Some(Strategy::parse(name).ok_or_else(|| bad_strategy(name))?),
        None if adapter == Adapter::Front => Some(front_default(model)),
        None => None,
    };
    let knobs = profile.map_or_else(|| Arc::clone(&knobs.pd), |profile| Arc::clone(&profile.knobs));
    let rate_limit = profile.and_then(|profile| profile.rate_limit);
    Ok(Plan { strategy, profile: wanted_profile, knobs, rate_limit, splittable: splittable(body) })
}

/// The HTTP front has no Envoy routes to fall back on: a fleet with rolesets gets PD, any other the least busy pod.
fn front_default(model: &Model) -> Strategy {
    if model.rolesets.is_empty() && model.partial.is_empty() { Strategy::LeastRequest } else { Strategy::Pd }
}

fn bad_strategy(name: &str) -> ApiError {
    let shown: String = name.chars().take(64).collect();
    ApiError::new(Reason::BadStrategy, format!("incorrect routing strategy {shown}"))
}

/// Only one prompt with one choice can be handed from a prefill to a decode pod (`engine-protocols` 2.5), and only
/// generation has two phases.
fn splittable(body: &ParsedBody) -> Splittable {
    let generates = matches!(
        body.endpoint,
        Endpoint::ChatCompletions | Endpoint::Completions | Endpoint::Messages | Endpoint::Responses
    );
    if generates && body.choices <= 1 && body.prompt.count <= 1 { Splittable::Yes } else { Splittable::No }
}

/// The engines' dialects that PD works with here.
pub fn check_engine(model: &Model) -> Result<(), ApiError> {
    if model.engines_mixed {
        let text = format!("pods of model {} run different engines; pd needs one", model.name);
        return Err(ApiError::new(Reason::SelectionFailed, text));
    }
    match model.engine {
        None | Some(Engine::Vllm) => Ok(()),
        Some(engine) => {
            let text = format!("pd is not available for engine {} of model {}", engine.name(), model.name);
            Err(ApiError::new(Reason::EngineUnsupported, text))
        }
    }
}

impl Plan {
    /// The work on the prompt that the selection needs; an empty job when nothing depends on the prompt. Takes the
    /// prompt out of the body: nobody else needs it, and a request would otherwise hold it twice until its prefill
    /// leg ends.
    pub fn prepare(&self, model: &Model, body: &mut ParsedBody, knobs: &Knobs, hash_seed: u64) -> PrepareJob {
        let mut job = PrepareJob::default();
        let (text, key) = (std::mem::take(&mut body.prompt.text), std::mem::take(&mut body.prompt.prefix_key));
        if self.strategy != Some(Strategy::Pd) {
            return job;
        }
        if self.knobs.prompt_length_bucketing
            && body.prompt.token_ids.is_none()
            && let Some(limit) = largest_bound(model, self.profile.as_deref())
        {
            job.count = Some((text, limit));
        }
        if self.splittable == Splittable::Yes && self.knobs.prefill_policy.looks_prefixes_up() {
            job.hash = Some(HashJob {
                key,
                tokenizer: knobs.prefix.tokenizer,
                block_size: knobs.prefix.block_size,
                seed: hash_seed,
            });
        }
        job
    }
}

/// The length that buckets see: token-id prompts are exact, text is what was counted.
pub fn bucket_length(body: &ParsedBody, counted: PromptLength) -> PromptLength {
    body.prompt.token_ids.map_or(counted, |tokens| PromptLength::Exactly(tokens as u64))
}
