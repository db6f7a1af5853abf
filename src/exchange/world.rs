//! What every exchange of a replica shares.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::admission::Budget;
use crate::clock::Tick;
use crate::engines::trtllm::Snowflake;
use crate::fleet::Fleet;
use crate::knobs::Knobs;
use crate::load::{Ledger, Sessions, SweepReason};
use crate::prefix::PrefixIndex;
use crate::routing::Journal;
use crate::state::limits::SharedLimits;
use crate::state::plane::{LocalPlane, StatePlane};
use crate::telemetry::Metrics;

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
    pub hash_seed: u64,
    /// Numbers attempts, so that ids made from shared traces differ.
    pub attempts: AtomicU64,
    /// Token charges of requests in flight, and of blocks that a lease still holds.
    pub ledger: Arc<Ledger>,
    /// Last prompt sizes of sessions.
    pub sessions: Arc<Sessions>,
    /// The last decisions.
    pub journal: Arc<Journal>,
    /// Ids of TensorRT-LLM requests.
    pub snowflake: Snowflake,
    /// Wall-clock time of tick zero, milliseconds since the Unix epoch.
    pub epoch_ms: u64,
    /// Request-rate limits that replicas share; without them this one counts its models' requests alone, and users are
    /// not limited.
    pub limits: Option<Arc<SharedLimits>>,
    /// What this replica shares with others.
    pub plane: Arc<dyn StatePlane>,
}

impl World {
    /// A world in which no request has begun. `hash_seed` seeds the prefix hashes and the session table.
    pub fn new(knobs: Arc<Knobs>, fleet: Arc<Fleet>, metrics: Arc<Metrics>, hash_seed: u64) -> World {
        World {
            fleet,
            prefix: Arc::new(PrefixIndex::new(&knobs.prefix)),
            metrics,
            buffered: Budget::new(knobs.limits.max_buffered_bytes),
            streams: Budget::new(knobs.limits.max_streams),
            hash_seed,
            attempts: AtomicU64::new(0),
            ledger: Arc::default(),
            sessions: Arc::new(Sessions::new(knobs.max_sessions, hash_seed)),
            journal: Arc::default(),
            snowflake: Snowflake::new(knobs.trt_machine_id),
            epoch_ms: 0,
            limits: None,
            plane: Arc::new(LocalPlane),
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

    /// Shares by this plane.
    #[must_use]
    pub fn with_plane(mut self, plane: Arc<dyn StatePlane>) -> World {
        self.plane = plane;
        self
    }

    /// The next id of a TensorRT-LLM request.
    pub(super) fn disagg_id(&self, now: Tick) -> u64 {
        self.snowflake.next(self.epoch_ms.saturating_add(now.0 / 1_000_000))
    }
}

impl World {
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
