//! What every exchange of a replica shares.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::admission::Budget;
use crate::clock::Tick;
use crate::engines::trtllm::Snowflake;
use crate::fleet::Fleet;
use crate::knobs::{Knobs, StrategyNote};
use crate::load::{Ledger, Sessions, SweepReason, Unserved, Users};
use crate::prefix::{HashSeed, PrefixIndex};
use crate::rng::Seeds;
use crate::routing::Journal;
use crate::state::limits::SharedLimits;
use crate::state::plane::{LocalPlane, StatePlane};
use crate::state::responses::Responses;
use crate::telemetry::Metrics;

/// Where the numbers of a [`World`] begin.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorldSeeds {
    /// Seeds the prefix hashes and the numbers of sessions and users, until replicas that share what they find agree on another one.
    pub hashes: u64,
    /// Where the numbers of attempts begin. Engines, and whoever reads their logs, see these numbers: take random bits
    /// that nothing else is made of.
    pub attempts: u64,
    /// Tells the ids of TensorRT-LLM requests from those of other replicas, unless a setting or the replicas say otherwise.
    pub machine: u16,
}

/// What every exchange of a replica shares. All of it can be used without waiting.
#[derive(Debug)]
pub struct World {
    /// The current snapshot.
    pub fleet: Arc<Fleet>,
    /// Configuration.
    pub knobs: Arc<Knobs>,
    /// Prefix index.
    pub prefix: Arc<PrefixIndex>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Bytes of request bodies held.
    pub buffered: Arc<Budget>,
    /// Open streams.
    pub streams: Arc<Budget>,
    /// Seed of the prefix hashes.
    pub hash_seed: HashSeed,
    /// Numbers attempts, so that ids made from shared traces differ, on this replica and between replicas.
    pub attempts: Seeds,
    /// Token charges of requests in flight, and of blocks that a lease still holds.
    pub ledger: Arc<Ledger>,
    /// Last prompt sizes of sessions.
    pub sessions: Arc<Sessions>,
    /// Tokens of users, for strategies that count them.
    pub users: Arc<Users>,
    /// A bit for each name of [`crate::knobs::REGISTERED`] of which the log has been told that another strategy serves it.
    replaced: AtomicU32,
    /// The last decisions.
    pub journal: Arc<Journal>,
    /// Requests refused because their model has no ready pod.
    pub unserved: Arc<Unserved>,
    /// Ids of TensorRT-LLM requests.
    pub snowflake: Snowflake,
    /// The machine number in these ids is this replica's alone, or a warning was given.
    machine_is_agreed: AtomicBool,
    /// Wall-clock time of tick zero, milliseconds since the Unix epoch.
    pub epoch_ms: u64,
    /// Request-rate limits that replicas share; without them this one counts its models' requests alone, and users are
    /// not limited.
    pub limits: Option<Arc<SharedLimits>>,
    /// What this replica shares with others.
    pub plane: Arc<dyn StatePlane>,
    /// Which pods have stored responses.
    pub responses: Arc<Responses>,
}

impl World {
    /// A world in which no request has begun.
    pub fn new(knobs: Arc<Knobs>, fleet: Arc<Fleet>, metrics: Arc<Metrics>, seeds: WorldSeeds) -> World {
        let WorldSeeds { hashes, attempts, machine } = seeds;
        World {
            fleet,
            prefix: Arc::new(PrefixIndex::new(&knobs.prefix)),
            metrics,
            buffered: Budget::new(knobs.limits.max_buffered_bytes),
            streams: Budget::new(knobs.limits.max_streams),
            hash_seed: HashSeed::new(hashes),
            attempts: Seeds::new(attempts),
            ledger: Arc::default(),
            sessions: Arc::new(Sessions::new(knobs.max_sessions)),
            users: Arc::default(),
            replaced: AtomicU32::new(0),
            journal: Arc::default(),
            unserved: Arc::default(),
            machine_is_agreed: AtomicBool::new(knobs.trt_machine_id.is_some()),
            snowflake: Snowflake::new(knobs.trt_machine_id.unwrap_or(machine)),
            epoch_ms: 0,
            limits: None,
            plane: Arc::new(LocalPlane),
            responses: Arc::new(Responses::new(knobs.api.response_ttl)),
            knobs,
        }
    }

    /// Sets the wall-clock time of tick zero, milliseconds since the Unix epoch: ids that must differ from those of
    /// earlier processes are made from it.
    #[must_use]
    pub fn at_epoch_ms(mut self, epoch_ms: u64) -> World {
        self.epoch_ms = epoch_ms;
        self
    }

    /// Shares request-rate limits with other replicas.
    #[must_use]
    pub fn with_limits(mut self, limits: Arc<SharedLimits>) -> World {
        self.limits = Some(limits);
        self
    }

    /// Knows what others tell of stored responses.
    #[must_use]
    pub fn with_responses(mut self, responses: Responses) -> World {
        self.responses = Arc::new(responses);
        self
    }

    /// Shares by this plane.
    #[must_use]
    pub fn with_plane(mut self, plane: Arc<dyn StatePlane>) -> World {
        self.plane = plane;
        self
    }

    /// No other replica has this number in the ids of its TensorRT-LLM requests.
    pub fn agree_on_machine(&self, number: u16) {
        self.snowflake.set_machine(number);
        self.machine_is_agreed.store(true, Ordering::Relaxed);
    }

    /// A request names a strategy that another one serves: the log says so once.
    pub(super) fn note_replaced(&self, index: usize) {
        let bit = 1_u32.checked_shl(u32::try_from(index).unwrap_or(u32::MAX)).unwrap_or(0);
        if let Some(text) = (StrategyNote { replaced: Some(index), alone: None }).text()
            && self.replaced.fetch_or(bit, Ordering::Relaxed) & bit == 0
        {
            tracing::warn!(strategy = text, "a request names a strategy that is served by another one");
        }
    }

    /// The next id of a TensorRT-LLM request. Warns once when it may be that of another replica.
    pub(super) fn disagg_id(&self, now: Tick) -> u64 {
        if !self.machine_is_agreed.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "no other replica was asked about the ids of TensorRT-LLM requests: share Redis between the replicas, or \
                 set AIBRIX_TRT_MACHINE_ID to another number on each"
            );
        }
        self.snowflake.next(self.epoch_ms.saturating_add(now.0 / 1_000_000))
    }
}

impl World {
    /// Requests of the last minute that found no ready pod, for every model that is known.
    pub fn unserved(&self, now: Tick) -> BTreeMap<Arc<str>, u64> {
        let (snapshot, absent) = (self.fleet.load(), self.fleet.absent());
        let known = snapshot.models.keys().chain(absent.names(now));
        let mut all: BTreeMap<Arc<str>, u64> = known.map(|model| (Arc::clone(model), 0)).collect();
        all.extend(self.unserved.recent(now));
        all
    }

    /// The janitor's round over the token charges. A force-release means that a release was lost, which should not
    /// happen: it is logged and counted.
    pub fn sweep_token_charges(&self, now: Tick) {
        for swept in self.ledger.sweep(now) {
            let side = if swept.decode { "decode" } else { "prefill" };
            let (request_id, pod, tokens, age_s) = (swept.request_id, swept.pod, swept.tokens, swept.age.as_secs());
            match swept.reason {
                SweepReason::Expired => {
                    self.metrics.token_charge_forced(side);
                    tracing::warn!(request_id, pod, side, tokens, age_s, "token charge force-released after its TTL");
                }
                SweepReason::LeaseEnded => {
                    tracing::debug!(request_id, pod, tokens, age_s, "the lease of stranded KV blocks is over");
                }
            }
        }
    }
}
