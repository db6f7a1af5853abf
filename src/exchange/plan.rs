//! From a parsed request to the question that routing answers: profile, strategy, knobs, what can be split.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use xxhash_rust::xxh64::xxh64;

use super::event::Adapter;
use super::headers::text;
use super::prepare::{HashJob, PrepareJob};
use super::session::Session;
use super::whole::{self, Whole};
use crate::bands;
use crate::error::{ApiError, Reason};
use crate::fleet::{Engine, Model, Profile, RateLimit, Selector};
use crate::knobs::{Knobs, PdKnobs, StrategyError, StrategyNote};
use crate::request::ParsedBody;
use crate::routing::{PromptLength, Splittable, Strategy, largest_bound};

/// Tokens up to which a prompt is counted when adaptive bucket serving weighs it, even if no range ends there: the
/// longest context of all but a few models, and about 40 ms of work. A longer prompt weighs one token more than this.
pub(super) const LONGEST_WEIGHED: u64 = 1 << 18;

/// What was decided about a request before any pod is looked at.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The strategy; `None` = Envoy's own routes decide.
    pub strategy: Option<Strategy>,
    /// What there is to say about the name that it was given.
    pub note: StrategyNote,
    /// The profile that the request named, or that its hints chose.
    pub profile: Option<String>,
    /// Knobs in force.
    pub knobs: Arc<PdKnobs>,
    /// The engine of the pods that may serve it. (Of a strategy other than `pd`, which does not care: vLLM.)
    pub engine: Engine,
    /// Limit on the model's requests.
    pub rate_limit: Option<RateLimit>,
    /// A first token later than this is slow, by the profile.
    pub ttft_threshold: Option<Duration>,
    /// One leg or two.
    pub splittable: Splittable,
    /// Why it can be only one.
    pub whole: Option<Whole>,
    /// The client's `external-filter`, when there is one that says something.
    pub filter: Option<Selector>,
    /// What the client says about its session, when the strategy cares.
    pub session: Session,
}

/// Resolves profile and strategy for a request that wants this profile (reference section 1.5, steps 4 and 5), and reads
/// the headers that steer them.
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
    let locked = config.and_then(|config| config.locked_strategy.as_deref());
    let none = HeaderMap::new();
    let headers = if config.is_some_and(|config| config.ignores_requests) { &none } else { headers };
    let named = if locked.is_some() { locked } else { named_by_header(headers)? };
    let name = named
        .or_else(|| profile.and_then(|profile| profile.routing_strategy.as_deref()))
        .or(knobs.routing_algorithm.as_deref());
    let (strategy, note) = match name {
        Some(name) => {
            let (strategy, note) = Strategy::parse_noting(name).map_err(|error| bad_strategy(name, error))?;
            (Some(strategy), note)
        }
        None if adapter == Adapter::Front => (Some(front_default(model)), StrategyNote::default()),
        // A limit per pod holds only where pods are chosen, as in the reference.
        None if profile.is_some_and(|profile| limits_pods(profile)) => {
            (Some(Strategy::LeastRequest), StrategyNote::default())
        }
        None => (None, StrategyNote::default()),
    };
    let knobs = profile.map_or_else(|| Arc::clone(&knobs.pd), |profile| Arc::clone(&profile.knobs));
    // Where Envoy's own routes decide, there is no pod to choose and so nothing to filter.
    let filter = if strategy.is_some() { filter(headers)? } else { None };
    let keeps_sessions = strategy.is_some_and(Strategy::keeps_sessions);
    let session = if keeps_sessions { Session::read(headers) } else { Session::default() };
    let rate_limit = profile.and_then(|profile| profile.rate_limit);
    let ttft_threshold = profile.and_then(|profile| profile.ttft_threshold);
    let engine = if strategy == Some(Strategy::Pd) { engine_of(model, filter.as_ref())? } else { None };
    let engine = engine.unwrap_or(Engine::Vllm);
    let whole = whole::whole(body, engine);
    let splittable = whole::splittable(whole, engine);
    Ok(Plan {
        strategy,
        note,
        profile: wanted_profile,
        knobs,
        rate_limit,
        ttft_threshold,
        engine,
        splittable,
        whole,
        filter,
        session,
    })
}

/// The header `routing-strategy`; an empty one counts as absent. One that is not even text is no strategy, and must not
/// silently become the default.
fn named_by_header(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    match headers.get("routing-strategy") {
        Some(value) if value.to_str().is_err() => {
            Err(bad_strategy(&String::from_utf8_lossy(value.as_bytes()), StrategyError::Unknown))
        }
        _ => Ok(text(headers, "routing-strategy")),
    }
}

/// The header `external-filter`: a Kubernetes label selector. Several lines of it must all hold. One that cannot be read
/// is an error: to ignore it would send the request where its sender does not want it.
fn filter(headers: &HeaderMap) -> Result<Option<Selector>, ApiError> {
    let mut whole = String::new();
    for value in headers.get_all("external-filter") {
        let text = value.to_str().map_err(|_| bad_filter("it is not text"))?.trim();
        if !text.is_empty() {
            whole.push_str(if whole.is_empty() { "" } else { "," });
            whole.push_str(text);
        }
    }
    let selector = Selector::parse(&whole).map_err(bad_filter)?;
    Ok(Some(selector).filter(|selector| !selector.is_empty()))
}

fn bad_filter(why: impl std::fmt::Display) -> ApiError {
    ApiError::new(Reason::BadFilter, format!("external-filter is not a label selector: {why}"))
}

/// The HTTP front has no Envoy routes to fall back on: a fleet with rolesets gets PD, any other the least busy pod.
fn front_default(model: &Model) -> Strategy {
    if model.rolesets.is_empty() && model.partial.is_empty() { Strategy::LeastRequest } else { Strategy::Pd }
}

/// The profile has a limit that is one of each pod.
fn limits_pods(profile: &Profile) -> bool {
    profile.knobs.strategies.requests_inflight.is_some() || matches!(profile.rate_limit, Some(RateLimit::PerReplica(_)))
}

fn bad_strategy(name: &str, error: StrategyError) -> ApiError {
    let shown: String = name.chars().take(64).collect();
    ApiError::new(Reason::BadStrategy, format!("incorrect routing strategy {shown}: {error}"))
}

/// The engine of the pods that may serve the request. PD needs one: a body made for one engine must not reach another
/// (user report R39). Only pods that the filter lets pass count; `None` when there is none.
fn engine_of(model: &Model, filter: Option<&Selector>) -> Result<Option<Engine>, ApiError> {
    let (engine, mixed) = match filter {
        None => (model.engine, model.engines_mixed),
        // All pods run one engine, so those that pass do.
        Some(_) if !model.engines_mixed => (model.engine, false),
        Some(filter) => {
            let pods = model.routable.iter().filter(|pod| filter.matches(&pod.spec.labels));
            let mut engines = pods.map(|pod| (pod.spec.engine, pod.spec.engine_label()));
            let first = engines.next();
            let mixed = engines.any(|engine| Some(engine) != first);
            (first.map(|(engine, _)| engine).filter(|_| !mixed), mixed)
        }
    };
    if mixed {
        let text = format!("pods of model {} run different engines; pd needs one", model.name);
        return Err(ApiError::new(Reason::SelectionFailed, text));
    }
    Ok(engine)
}

impl Plan {
    /// The work on the prompt that the selection needs; an empty job when nothing depends on the prompt. Takes the
    /// prompt out of the body: nobody else needs it, and a request would otherwise hold it twice until its prefill
    /// leg ends.
    pub fn prepare(&self, model: &Model, body: &mut ParsedBody, knobs: &Knobs, hash_seed: u64) -> PrepareJob {
        let non_text_tokens = body.non_text_tokens(knobs.api.non_text_part_tokens);
        let mut job = PrepareJob { non_text_tokens, ..PrepareJob::default() };
        let (text, key) = (std::mem::take(&mut body.prompt.text), std::mem::take(&mut body.prompt.prefix_key));
        let Some(strategy) = self.strategy else { return job };
        let pd = strategy == Strategy::Pd;
        if pd
            && self.knobs.prompt_length_bucketing
            && body.prompt.token_ids.is_none()
            && let Some(limit) = self.count_limit(model)
        {
            job.count = Some((text, limit));
        }
        let policy_looks = pd && self.splittable == Splittable::Yes && self.knobs.prefill_policy.looks_prefixes_up();
        if policy_looks || strategy.looks_prefixes_up() {
            job.hash = Some(HashJob {
                key,
                tokenizer: knobs.prefix.tokenizer,
                block_size: knobs.prefix.block_size,
                seed: adapter(&body.model, &model.name).map_or(hash_seed, |name| xxh64(name.as_bytes(), hash_seed)),
            });
        }
        job
    }
}

impl Plan {
    /// How far the prompt has to be counted; `None` when nothing depends on its length. Ranges tell lengths apart only
    /// up to their largest bound, but bands need the length itself, also when every range is open.
    fn count_limit(&self, model: &Model) -> Option<u64> {
        let bound = largest_bound(model, self.profile.as_deref());
        if bands::enabled(&self.knobs) && self.splittable == Splittable::Yes {
            Some(bound.unwrap_or(0).max(LONGEST_WEIGHED))
        } else {
            bound
        }
    }
}

/// The adapter that a request names beside its model, `base:adapter`: engines keep its KV apart from the base model's.
fn adapter<'a>(asked: &'a str, model: &str) -> Option<&'a str> {
    asked.strip_prefix(model)?.strip_prefix(':')
}

/// The length that buckets see: token-id prompts are exact, text is what was counted. What a part that is no text counts
/// as is in the latter already.
pub fn bucket_length(body: &ParsedBody, counted: PromptLength, non_text_part: u64) -> PromptLength {
    let exactly = |tokens| PromptLength::Exactly(tokens as u64).plus(body.non_text_tokens(non_text_part));
    body.prompt.token_ids.map_or(counted, exactly)
}
