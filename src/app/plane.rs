//! The state plane of this replica: shared through Redis where that is configured, its own otherwise.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use tokio_util::sync::CancellationToken;

use crate::exchange::World;
use crate::knobs::{PlaneKnobs, RedisTarget, Secret};
use crate::state::identity::{Identity, ReplicaIdentity};
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

/// Keeps this replica's identity, and puts what it says in force.
pub(super) async fn keep_identity(identity: Arc<ReplicaIdentity>, world: Arc<World>, stop: CancellationToken) {
    let own = Identity { number: Some(world.snowflake.machine()), seed: world.hash_seed.get() };
    let listener = Arc::clone(&world);
    identity.keep(own, move |identity| take_identity(&listener, identity), stop).await;
}

/// Puts what the replicas have agreed on in force, save what is configured.
pub(super) fn take_identity(world: &World, identity: Identity) {
    if world.knobs.trt_machine_id.is_none()
        && let Some(number) = identity.number
    {
        world.agree_on_machine(number);
    }
    if world.knobs.prefix.hash_seed.is_none() {
        world.hash_seed.set(identity.seed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::WorldSeeds;
    use crate::knobs::{Environment, Knobs};
    use crate::telemetry::Metrics;

    struct Nothing;

    impl Environment for Nothing {
        fn get(&self, _: &str) -> Option<String> {
            None
        }
    }

    #[test]
    fn what_is_configured_stands_against_what_replicas_agree_on() {
        type Change = fn(&mut Knobs);
        let cases: [(&str, Change, u64, u16); 4] = [
            ("nothing", |_| {}, 9, 5),
            ("the seed", |knobs| knobs.prefix.hash_seed = Some(3), 3, 5),
            ("the machine", |knobs| knobs.trt_machine_id = Some(6), 9, 6),
            ("no prefixes are shared", |knobs| knobs.plane.share_prefixes = false, 9, 5),
        ];
        for (name, change, seed, machine) in cases {
            let (mut knobs, _) = Knobs::read(&Nothing).expect("defaults");
            change(&mut knobs);
            let knobs = Arc::new(knobs);
            let seeds = WorldSeeds { hashes: knobs.prefix.hash_seed.unwrap_or(2), machine: 1, ..WorldSeeds::default() };
            let world = World::new(knobs, Arc::default(), Arc::new(Metrics::new("gateway")), seeds);
            take_identity(&world, Identity { number: Some(5), seed: 9 });
            assert_eq!((world.hash_seed.get(), world.snowflake.machine()), (seed, machine), "{name}");
            // All numbers are taken: the one that it has stands.
            take_identity(&world, Identity { number: None, seed: 9 });
            assert_eq!(world.snowflake.machine(), machine, "{name}");
        }
    }

    #[test]
    fn an_address_that_cannot_be_used_is_an_error_without_its_password() {
        let error = redis_config(&RedisTarget::Url(Secret::new("redis://u:hunter2@h:notaport"))).unwrap_err();
        assert!(!format!("{error:#}").contains("hunter2"), "{error:#}");
    }
}
