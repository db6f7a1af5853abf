//! The state plane of this replica: shared through Redis where that is configured, its own otherwise.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use xxhash_rust::xxh64::xxh64;

use crate::knobs::{PlaneKnobs, RedisTarget, Secret};
use crate::state::links::{SharedPlane, Surroundings};
use crate::state::plane::{LocalPlane, StatePlane};
use crate::state::redis::{Plane, RedisConfig};

/// Where Redis is, as the client wants it. An address that cannot be used refuses the start.
pub(super) fn redis_config(target: &RedisTarget) -> Result<RedisConfig> {
    match target {
        RedisTarget::Url(url) => RedisConfig::from_url(url.expose()).context("REDIS_URL cannot be used"),
        RedisTarget::Parts { host, port, password } => {
            Ok(RedisConfig::from_parts(host, *port, password.as_ref().map(Secret::expose)))
        }
    }
}

/// A connection to Redis, where one is configured. Does not wait for it.
pub(super) fn connect(knobs: &PlaneKnobs) -> Result<Option<(Plane, RedisConfig)>> {
    let Some(target) = &knobs.redis else { return Ok(None) };
    let config = redis_config(target)?;
    tracing::info!(redis = ?config, grade = knobs.grade.name(), "sharing state with other replicas");
    let plane = Plane::connect(&config)?;
    Ok(Some((plane, config)))
}

/// Starts to share, where there is a connection to do it over.
pub(super) fn start(
    connection: Option<&(Plane, RedisConfig)>,
    knobs: &PlaneKnobs,
    around: Surroundings,
) -> Result<Arc<dyn StatePlane>> {
    match connection {
        Some((plane, config)) => Ok(Arc::new(SharedPlane::start(plane.clone(), config, knobs, around)?)),
        None => Ok(Arc::new(LocalPlane)),
    }
}

/// The seed of the prefix hashes: replicas that tell one another what they find have to agree on it, and whoever may not
/// talk to Redis must not guess it, where that has a password. `random` is taken where nothing is shared.
pub(super) fn hash_seed(knobs: &PlaneKnobs, random: u64) -> u64 {
    match &knobs.redis {
        Some(target) if knobs.share_findings => {
            xxh64(target.credential().unwrap_or_default().as_bytes(), 0x7461_6e64_656d_0001)
        }
        _ => random,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knobs(url: Option<&str>, share_findings: bool) -> PlaneKnobs {
        PlaneKnobs { redis: url.map(|url| RedisTarget::Url(Secret::new(url))), share_findings, ..PlaneKnobs::default() }
    }

    #[test]
    fn replicas_that_share_agree_on_the_seed() {
        let seed = |url, share, random| hash_seed(&knobs(url, share), random);
        assert_eq!(seed(None, true, 7), 7);
        assert_eq!(seed(Some("redis://:pw@h"), false, 7), 7);
        assert_eq!(seed(Some("redis://:pw@h"), true, 7), seed(Some("redis://:pw@10.0.0.1:6379"), true, 8));
        assert_ne!(seed(Some("redis://:pw@h"), true, 7), seed(Some("redis://:other@h"), true, 7));
    }

    #[test]
    fn an_address_that_cannot_be_used_is_an_error_without_its_password() {
        let error = redis_config(&RedisTarget::Url(Secret::new("redis://u:hunter2@h:notaport"))).unwrap_err();
        assert!(!format!("{error:#}").contains("hunter2"), "{error:#}");
    }
}
