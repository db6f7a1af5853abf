//! The pod annotation `model.aibrix.ai/config`: profiles, lock, per-request knobs (reference section 2).
//!
//! Parsing is pure and forgiving in one direction only: a field that cannot be used is dropped with a warning and the
//! rest stands. Where the reference would let one wrong type discard a whole `routingConfig`, or fail every request
//! over a misspelt policy, the gateway-wide value stays in force here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use super::Hints;
use super::values::{
    NUMBER_OF_SECONDS, bucket_serve_mode, decimal_seconds_or_zero, decode_policy, percent, positive, positive_tokens,
    positive_whole, prefill_policy, seconds_or_zero, share, shown, whole,
};
use crate::knobs::{DecodeTimer, PdKnobs, parse_strategy};

/// The value of the request header `config-profile` that leaves the choice to the hints; any case.
pub const AUTO: &str = "auto";

/// The annotation is not usable as a whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unusable model.aibrix.ai/config: {0}")]
pub struct ProfileError(pub String);

/// Prompt lengths a pod takes, in tokens, both ends inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketRange {
    /// `promptLenBucketMinLength` (0).
    pub min: u64,
    /// `promptLenBucketMaxLength`; `None` = unlimited (0 or absent in the annotation).
    pub max: Option<u64>,
}

/// How many requests per second the model takes from this replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RateLimit {
    /// `requestsPerSecond`: in all.
    Model(u32),
    /// `requestsPerSecondPerReplica`: for every routable pod of the model.
    PerReplica(f64),
}

impl RateLimit {
    /// Requests per second while so many pods are routable: whole ones, and one at least.
    pub fn per_second(self, replicas: usize) -> u32 {
        match self {
            RateLimit::Model(limit) => limit,
            RateLimit::PerReplica(limit) => ((limit * replicas as f64) as u32).max(u32::from(replicas > 0)),
        }
    }
}

/// One profile, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Its name.
    pub name: Arc<str>,
    /// `routingStrategy`.
    pub routing_strategy: Option<Arc<str>>,
    /// `requestsPerSecondPerReplica`, else `requestsPerSecond`.
    pub rate_limit: Option<RateLimit>,
    /// `ttftThresholdS`: a later first token is a slow one. `None` = by the gateway's own threshold.
    pub ttft_threshold: Option<Duration>,
    /// Which requests that ask for `auto` it suits. None when one of them is unusable: the profile then suits no
    /// request, rather than more than was meant.
    pub hints: Hints,
    /// Prompt-length range of the pod that carries this profile.
    pub bucket: BucketRange,
    /// `combined`: the pod runs both phases.
    pub combined: bool,
    /// The gateway-wide knobs with this profile's overrides applied.
    pub knobs: Arc<PdKnobs>,
}

/// The whole annotation, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `lockedRoutingStrategy`: wins over everything a request says.
    pub locked_strategy: Option<Arc<str>>,
    /// `disableRequestRoutingOverrides`: the headers `routing-strategy`, `config-profile` and `external-filter` of requests
    /// do not count.
    pub ignores_requests: bool,
    /// `defaultProfile`.
    pub default_profile: Option<Arc<str>>,
    /// Profiles by name.
    pub profiles: BTreeMap<Arc<str>, Arc<Profile>>,
}

impl ModelConfig {
    /// Reads the annotation's text over the gateway-wide knobs `base`. The second value lists, one sentence each, what
    /// was dropped or looks like a mistake; it can be non-empty beside `Ok` and `Err` alike.
    ///
    /// Unknown fields are ignored. A knob is looked for in `routingConfig.pd` first and then in `routingConfig`
    /// itself; the first usable one counts.
    pub fn parse(text: &str, base: &PdKnobs) -> (Result<ModelConfig, ProfileError>, Vec<String>) {
        let mut warnings = Vec::new();
        let result = parse(text, base, &mut warnings);
        (result, warnings)
    }

    /// Looks a profile up: the exact name, else `defaultProfile`, else `default`.
    pub fn profile(&self, name: Option<&str>) -> Option<&Arc<Profile>> {
        name.and_then(|name| self.profiles.get(name))
            .or_else(|| self.default_profile.as_ref().and_then(|name| self.profiles.get(name)))
            .or_else(|| self.profiles.get("default"))
    }

    /// True when both say the same about requests. Range and `combined` are left out: they are each pod's own and
    /// differ on purpose.
    pub fn same_for_requests(&self, other: &ModelConfig) -> bool {
        self.locked_strategy == other.locked_strategy
            && self.ignores_requests == other.ignores_requests
            && self.default_profile == other.default_profile
            && self.profiles.len() == other.profiles.len()
            && self.profiles.iter().zip(&other.profiles).all(|((name, mine), (other_name, theirs))| {
                name == other_name
                    && mine.routing_strategy == theirs.routing_strategy
                    && mine.rate_limit == theirs.rate_limit
                    && mine.ttft_threshold == theirs.ttft_threshold
                    && mine.hints == theirs.hints
                    && (Arc::ptr_eq(&mine.knobs, &theirs.knobs) || mine.knobs == theirs.knobs)
            })
    }
}

fn parse(text: &str, base: &PdKnobs, warnings: &mut Vec<String>) -> Result<ModelConfig, ProfileError> {
    let root: Value = serde_json::from_str(text).map_err(|error| ProfileError(error.to_string()))?;
    let Value::Object(root) = root else {
        return Err(ProfileError("not a JSON object".to_owned()));
    };
    let locked_strategy = name_field(&root, "lockedRoutingStrategy", "", warnings);
    check_lock(locked_strategy.as_deref(), warnings);
    let ignores_requests = match root.get("disableRequestRoutingOverrides") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(value)) => *value,
        Some(other) => {
            warnings.push(format!("disableRequestRoutingOverrides is {}; expected true or false", shown(other)));
            false
        }
    };
    let default_profile = name_field(&root, "defaultProfile", "", warnings);
    let mut profiles = BTreeMap::new();
    match root.get("profiles") {
        None | Some(Value::Null) => {
            if locked_strategy.is_none() {
                return Err(ProfileError("it has no profiles".to_owned()));
            }
        }
        Some(Value::Object(entries)) => {
            for (name, entry) in entries {
                if let Some(profile) = parse_profile(name, entry, base, warnings) {
                    profiles.insert(Arc::clone(&profile.name), Arc::new(profile));
                }
            }
        }
        Some(_) if locked_strategy.is_some() => warnings.push("profiles is not an object and is ignored".to_owned()),
        Some(_) => return Err(ProfileError("profiles is not an object".to_owned())),
    }
    if let Some(name) = &default_profile
        && !profiles.contains_key(name)
    {
        warnings.push(format!("defaultProfile names {name:?}, which does not exist"));
    }
    Ok(ModelConfig { locked_strategy, ignores_requests, default_profile, profiles })
}

fn parse_profile(name: &str, entry: &Value, base: &PdKnobs, warnings: &mut Vec<String>) -> Option<Profile> {
    let Value::Object(entry) = entry else {
        warnings.push(format!("profile {name:?} is not an object and is ignored"));
        return None;
    };
    let place = format!("profile {name:?}: ");
    let routing_strategy = name_field(entry, "routingStrategy", &place, warnings);
    let routing_strategy = usable_strategy(routing_strategy, &place, warnings);
    let empty = Map::new();
    let config = match entry.get("routingConfig") {
        None | Some(Value::Null) => &empty,
        Some(Value::Object(config)) => config,
        Some(_) => {
            warnings.push(format!("{place}routingConfig is not an object and is ignored"));
            &empty
        }
    };
    let rate_limit = rate_limit(entry, &place, warnings);
    let requests_inflight = limit_field(entry, "requestsInflight", &place, warnings);
    let ttft_threshold = ttft_threshold(entry, &place, warnings);
    if name.trim().eq_ignore_ascii_case(AUTO) {
        warnings.push(format!("{place}no request can ask for it by name, since that means the choice by hints"));
    }
    let mut fields = Fields::new(config, place, warnings);
    let hints = fields.hints();
    let bucket = fields.bucket();
    let combined = fields.take(&[""], "combined", "true or false", Value::as_bool).unwrap_or(false);
    let mut knobs = fields.knobs(base);
    knobs.strategies.requests_inflight = requests_inflight.map(u64::from);
    let knobs = Arc::new(knobs);
    Some(Profile {
        name: Arc::from(name),
        routing_strategy,
        rate_limit,
        ttft_threshold,
        hints,
        bucket,
        combined,
        knobs,
    })
}

/// `requestsPerSecondPerReplica` wins over `requestsPerSecond`.
fn rate_limit(entry: &Map<String, Value>, place: &str, warnings: &mut Vec<String>) -> Option<RateLimit> {
    const PER_REPLICA: &str = "requestsPerSecondPerReplica";
    let whole = limit_field(entry, "requestsPerSecond", place, warnings).map(RateLimit::Model);
    let Some(fraction) = entry.get(PER_REPLICA).and_then(Value::as_f64).filter(|limit| limit.fract() > 0.0) else {
        return limit_field(entry, PER_REPLICA, place, warnings)
            .map(|limit| RateLimit::PerReplica(limit.into()))
            .or(whole);
    };
    if fraction < 1.0 {
        let needed = (1.0 / fraction).ceil();
        warnings.push(format!("{place}{PER_REPLICA} is {fraction}: with fewer than {needed} pods it is 1 in all"));
    }
    Some(RateLimit::PerReplica(fraction.min(f64::from(u32::MAX))))
}

/// A limit: 0 is none, and so is what is not a whole number.
fn limit_field(entry: &Map<String, Value>, field: &str, place: &str, warnings: &mut Vec<String>) -> Option<u32> {
    let value = entry.get(field).filter(|value| !value.is_null())?;
    let limit = whole(value).and_then(|limit| u32::try_from(limit).ok());
    if limit.is_none() {
        let (shown, most) = (shown(value), u32::MAX);
        warnings.push(format!("{place}{field} is {shown}; expected a whole number from 0 to {most}; it is ignored"));
    }
    limit.filter(|limit| *limit > 0)
}

/// 0 leaves the gateway's own in force.
fn ttft_threshold(entry: &Map<String, Value>, place: &str, warnings: &mut Vec<String>) -> Option<Duration> {
    let value = entry.get("ttftThresholdS").filter(|value| !value.is_null())?;
    let time = decimal_seconds_or_zero(value);
    if time.is_none() {
        warnings
            .push(format!("{place}ttftThresholdS is {}; expected {NUMBER_OF_SECONDS}; it is ignored", shown(value)));
    }
    time.filter(|time| !time.is_zero())
}

/// A lock to a strategy that does not exist stays in force, and its requests are refused: to ignore it would open what
/// somebody meant to close.
fn check_lock(strategy: Option<&str>, warnings: &mut Vec<String>) {
    if let Some(error) = strategy.and_then(|name| parse_strategy(name).err()) {
        let name = shown_name(strategy);
        warnings.push(format!("lockedRoutingStrategy is {name:?} ({error}): requests that it applies to get 400"));
    }
    note_strategy(strategy, "lockedRoutingStrategy", warnings);
}

/// Says once what a name comes to that is not served as it stands.
fn note_strategy(strategy: Option<&str>, place: &str, warnings: &mut Vec<String>) {
    let note = strategy.and_then(|name| parse_strategy(name).ok()?.1.text());
    warnings.extend(note.map(|note| format!("{place}: {note}")));
}

/// A profile's strategy that does not exist is ignored (user report R92), so that a slip of the pen is no outage.
fn usable_strategy(strategy: Option<Arc<str>>, place: &str, warnings: &mut Vec<String>) -> Option<Arc<str>> {
    note_strategy(strategy.as_deref(), &format!("{place}routingStrategy"), warnings);
    let Some(error) = strategy.as_deref().and_then(|name| parse_strategy(name).err()) else { return strategy };
    let name = shown_name(strategy.as_deref());
    warnings.push(format!("{place}routingStrategy is {name:?} ({error}); it is ignored"));
    None
}

fn shown_name(name: Option<&str>) -> String {
    name.unwrap_or_default().chars().take(60).collect()
}

/// A non-empty text field; a value of another type is dropped with a warning.
fn name_field(object: &Map<String, Value>, field: &str, place: &str, warnings: &mut Vec<String>) -> Option<Arc<str>> {
    match object.get(field)? {
        Value::Null => None,
        Value::String(text) if text.is_empty() => None,
        Value::String(text) => Some(Arc::from(text.as_str())),
        other => {
            warnings.push(format!("{place}{field} is {}, which is not text; it is ignored", shown(other)));
            None
        }
    }
}

/// The fields of one `routingConfig`.
pub(super) struct Fields<'a> {
    pub(super) config: &'a Map<String, Value>,
    pub(super) place: String,
    pub(super) warnings: &'a mut Vec<String>,
}

/// Where a per-request knob is looked for, in this order.
const KNOB_PLACES: &[&str] = &["pd", ""];

impl<'a> Fields<'a> {
    fn new(config: &'a Map<String, Value>, place: String, warnings: &'a mut Vec<String>) -> Fields<'a> {
        for group in ["pd", "prefixCache", "loadBalance", "vtc", "preble", "autoBlend"] {
            if config.get(group).is_some_and(|value| !value.is_object() && !value.is_null()) {
                warnings.push(format!("{place}routingConfig.{group} is not an object and is ignored"));
            }
        }
        Fields { config, place, warnings }
    }

    /// The first usable value of `field` in the named groups (`""` = `routingConfig` itself). Each unusable one on
    /// the way costs a warning that says what was `expected`.
    pub(super) fn take<T>(
        &mut self,
        groups: &[&str],
        field: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Option<T> {
        for group in groups {
            let found = if group.is_empty() {
                self.config.get(field)
            } else {
                self.config.get(*group).and_then(|group| group.get(field))
            };
            let Some(value) = found.filter(|value| !value.is_null()) else { continue };
            if let Some(usable) = read(value) {
                return Some(usable);
            }
            let dot = if group.is_empty() { "" } else { "." };
            self.warnings.push(format!(
                "{}routingConfig{dot}{group}.{field} is {}; expected {expected}; it is ignored",
                self.place,
                shown(value),
            ));
        }
        None
    }

    fn knob<T>(&mut self, field: &str, expected: &str, read: impl Fn(&Value) -> Option<T>, target: &mut T) {
        if let Some(value) = self.take(KNOB_PLACES, field, expected, read) {
            *target = value;
        }
    }

    /// All hints, or none if one of them is unusable.
    fn hints(&mut self) -> Hints {
        let mut usable = true;
        let mut read = |field: &str| {
            let value = self.config.get(field).filter(|value| !value.is_null())?;
            let bound = whole(value).and_then(|bound| u64::try_from(bound).ok());
            if bound.is_none() {
                usable = false;
                self.warnings.push(format!(
                    "{}routingConfig.{field} is {}; expected a whole number of tokens; auto never chooses the profile",
                    self.place,
                    shown(value),
                ));
            }
            bound
        };
        let hints = Hints {
            prompt_gte: read("promptTokensGte"),
            prompt_lt: read("promptTokensLt"),
            max_gte: read("maxTokensGte"),
            max_lt: read("maxTokensLt"),
        };
        if !usable {
            return Hints::default();
        }
        if hints.exclude_everybody() {
            self.warnings.push(format!("{}its hints leave no request over, so auto never chooses it", self.place));
        }
        hints
    }

    fn bucket(&mut self) -> BucketRange {
        let expected = "a whole number of tokens";
        let min = self.take(&[""], "promptLenBucketMinLength", expected, whole).unwrap_or(0).max(0).unsigned_abs();
        let max = self.take(&[""], "promptLenBucketMaxLength", expected, whole).unwrap_or(0).max(0).unsigned_abs();
        let max = (max > 0).then_some(max);
        if max.is_some_and(|max| min > max) {
            self.warnings.push(format!(
                "{}promptLenBucketMinLength is above promptLenBucketMaxLength, so the pod suits no prompt",
                self.place
            ));
        }
        BucketRange { min, max }
    }

    fn knobs(&mut self, base: &PdKnobs) -> PdKnobs {
        let mut knobs = base.clone();
        let k = &mut knobs;
        self.knob("promptLengthBucketing", "true or false", Value::as_bool, &mut k.prompt_length_bucketing);
        self.knob("bucketServe", "true or false", Value::as_bool, &mut k.bucket_serve);
        self.knob("bucketServeMode", "throughput or rps", bucket_serve_mode, &mut k.bucket_serve_mode);
        self.knob(
            "prefillRequestTimeout",
            "a whole number of seconds above 0",
            |value| seconds_or_zero(value).filter(|time| !time.is_zero()),
            &mut k.prefill_request_timeout,
        );
        self.knob(
            "prefillScorePolicy",
            "prefix_cache, least_request, conductor, token_load or hybrid_cache_load",
            prefill_policy,
            &mut k.prefill_policy,
        );
        self.knob(
            "decodeScorePolicy",
            "load_balancing, least_request, conductor or token_load",
            decode_policy,
            &mut k.decode_policy,
        );
        self.knob(
            "prefillLoadImbalanceMinSpread",
            "a whole number above 0",
            positive_whole,
            &mut k.prefill_imbalance_min_spread,
        );
        let number = "a number above 0";
        self.knob("decodeLoadImbalanceMinSpread", number, positive, &mut k.decode_imbalance_min_spread);
        self.knob("decodeThroughputImbalanceMinSpread", number, positive, &mut k.decode_throughput_min_spread);
        self.knob("decodeScoreRatioThreshold", number, positive, &mut k.decode_score_ratio);
        self.knob("decodeLBWeightRunning", number, positive, &mut k.decode_weight_running);
        self.knob("decodeLBWeightThroughput", number, positive, &mut k.decode_weight_throughput);
        self.knob("minMatchPct", "a whole number from 0 to 100", percent, &mut k.min_match_pct);
        self.knob("tokenLoadKVWeight", number, positive, &mut k.token_load_kv_weight);
        self.knob("tokenLoadRequestCost", "a whole number above 0", positive_tokens, &mut k.token_load_request_cost);
        let time = "a whole number of seconds, 0 or more";
        self.knob("tokenLoadTTLSeconds", time, seconds_or_zero, &mut k.token_load_ttl);
        self.knob("tokenLoadSessionTTLSeconds", time, seconds_or_zero, &mut k.token_load_session_ttl);
        for (field, timer) in [
            ("decodeFirstResponseTimeout", &mut k.watchdog.first_response),
            ("decodeResponseTimeout", &mut k.watchdog.response),
            ("decodeStreamIdleTimeout", &mut k.watchdog.stream_idle),
        ] {
            let mut found = None;
            self.knob(field, NUMBER_OF_SECONDS, |value| decimal_seconds_or_zero(value).map(Some), &mut found);
            if let Some(time) = found {
                *timer = DecodeTimer { time, any_engine: true };
            }
        }
        self.knob("decodeAbortTimeout", NUMBER_OF_SECONDS, decimal_seconds_or_zero, &mut k.abort.timeout);
        self.knob("decodeAbortRetryDelay", NUMBER_OF_SECONDS, decimal_seconds_or_zero, &mut k.abort.retry_delay);
        self.knob("hybridCacheLoadFactor", "a number from 0 to 1", share, &mut k.hybrid_cache_load_factor);
        // This one has a group of its own (reference section 2.4).
        if let Some(factor) = self.take(&["prefixCache"], "standardDeviationFactor", number, positive) {
            k.standard_deviation_factor = factor;
        }
        self.strategies(&mut knobs.strategies);
        knobs
    }
}
