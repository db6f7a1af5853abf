//! The pod annotation `model.aibrix.ai/config`: profiles, lock, per-request knobs (reference section 2).

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::knobs::PdKnobs;

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

/// One profile, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Its name.
    pub name: Arc<str>,
    /// `routingStrategy`.
    pub routing_strategy: Option<Arc<str>>,
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
    /// `defaultProfile`.
    pub default_profile: Option<Arc<str>>,
    /// Profiles by name.
    pub profiles: BTreeMap<Arc<str>, Arc<Profile>>,
}

impl ModelConfig {
    /// Looks a profile up: the exact name, else `defaultProfile`, else `default`.
    pub fn profile(&self, name: Option<&str>) -> Option<&Arc<Profile>> {
        name.and_then(|name| self.profiles.get(name))
            .or_else(|| self.default_profile.as_ref().and_then(|name| self.profiles.get(name)))
            .or_else(|| self.profiles.get("default"))
    }
}
