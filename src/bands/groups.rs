//! The rolesets of a model as the planner sees them, per profile.

use std::sync::Arc;

use super::plan::Group;
use crate::fleet::{Model, Pod, Profile, Roleset};
use crate::knobs::{BucketServeMode, PdKnobs};

/// Profiles of a model that get plans (reference section 4.13).
pub const MAX_PROFILES: usize = 8;

/// What one profile needs a plan for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    /// The profile's name in the model's configuration; `None` for requests to which no profile applies.
    pub(super) profile: Option<Arc<str>>,
    pub(super) mode: BucketServeMode,
    pub(super) groups: Vec<Group>,
}

/// Bucket serving is on for requests with these knobs: it acts on top of bucketing only.
pub fn enabled(knobs: &PdKnobs) -> bool {
    knobs.prompt_length_bucketing && knobs.bucket_serve
}

/// The profiles of a model that have bucketing and bucket serving on, the default one first and the others by name, at most
/// [`MAX_PROFILES`].
/// `gateway` are the knobs of requests to which no profile applies.
pub(super) fn questions(model: &Model, gateway: &PdKnobs) -> Vec<Question> {
    let config = model.config.as_deref();
    // The configuration answers for every request as soon as it has a default.
    let without = config.is_none_or(|config| config.profile(None).is_none()) && enabled(gateway);
    let named =
        config.into_iter().flat_map(|config| config.profiles.values()).filter(|profile| enabled(&profile.knobs));
    // Most requests name none: should there be too many profiles, the default one is not left out.
    let default = config.and_then(|config| config.profile(None));
    let is_default = |profile: &&Arc<Profile>| default.is_some_and(|default| Arc::ptr_eq(default, profile));
    let (first, others): (Vec<_>, Vec<_>) = named.partition(is_default);
    let named = first.into_iter().chain(others);
    let named = named.map(|profile| (Some(Arc::clone(&profile.name)), profile.knobs.bucket_serve_mode));
    let without = without.then_some((None, gateway.bucket_serve_mode));
    without
        .into_iter()
        .chain(named)
        .take(MAX_PROFILES)
        .map(|(profile, mode)| {
            let groups = groups(model, profile.as_deref());
            Question { profile, mode, groups }
        })
        .collect()
}

/// The complete rolesets with their ranges under a profile. Rolesets that take nothing are left out.
pub fn groups(model: &Model, profile: Option<&str>) -> Vec<Group> {
    model.rolesets.iter().filter_map(|roleset| group(roleset, profile)).collect()
}

/// A roleset takes what both its sides take. A side whose pods declare different ranges counts as taking all from its
/// shortest to its longest length: should there be a hole, then requests in it are routed as without a plan.
fn group(roleset: &Roleset, profile: Option<&str>) -> Option<Group> {
    let (prefill, decode) = (hull(&roleset.prefill, profile)?, hull(&roleset.decode, profile)?);
    let (min, max) = (prefill.0.max(decode.0), prefill.1.min(decode.1));
    (min <= max).then(|| Group { min, max, name: Arc::clone(&roleset.name), replicas: roleset.prefill_replicas })
}

fn hull(pods: &[Arc<Pod>], profile: Option<&str>) -> Option<(u64, u64)> {
    let ranges = pods.iter().map(|pod| {
        let profile = pod.spec.config.as_ref().and_then(|config| config.profile(profile));
        profile.map_or((0, u64::MAX), |profile| (profile.bucket.min, profile.bucket.max.unwrap_or(u64::MAX)))
    });
    ranges.filter(|(min, max)| min <= max).reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))
}
