//! The plane of replicas that meet in Redis: one task per model, over two connections (calls, announcements).
//!
//! - [`link`] runs one model's [`SharedLedger`](super::ledger::SharedLedger): it publishes what changed here, and brings what
//!   changed elsewhere into the pods' load cells.
//! - [`breaker`] says when claims are not worth waiting for.
//! - [`teller`] tells and hears what need not be exact or soon, [`sketches`] the prompt lengths.
//! - The supervisor starts a link for every model of the fleet, and hands announcements to them.

mod breaker;
mod inbox;
mod link;
mod sketches;
mod supervisor;
mod teller;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::findings::Finding;
use super::keys::ModelKeys;
use super::ledger::{Claimed, LedgerConfig, Pace};
use super::plane::{ClaimOrder, ModelMembers, ModelStatus, PlaneStatus, StatePlane};
use super::redis::{NewsFeed, Plane, RedisConfig, RedisError};
use crate::clock::{Clock, Tick};
use crate::fleet::Fleet;
use crate::knobs::{Grade, PlaneKnobs};
use crate::load::Scope;
use crate::rng::Rng;
use crate::telemetry::{Carried, ClaimFallback, LeftCharges, Metrics, Tracer};
use inbox::ClaimRequest;
pub use teller::Listeners;
use teller::{Findings, Teller};

/// Claims that may wait for a model's task.
const MAX_CLAIMS: usize = 1_024;
/// How long saying goodbye may take.
const LEAVE: Duration = Duration::from_secs(1);
/// Time for a question that a person asked.
const LOOK: Duration = Duration::from_secs(1);

/// What every link needs to know.
#[derive(Clone, Debug)]
struct Terms {
    grade: Grade,
    claim_deadline: Duration,
    scope: Scope,
    ledger: LedgerConfig,
    clock: Clock,
    metrics: Arc<Metrics>,
    tracer: Tracer,
}

/// A model's link as the plane sees it.
#[derive(Clone, Debug)]
struct Handle {
    keys: Arc<ModelKeys>,
    claims: mpsc::Sender<ClaimRequest>,
    status: Arc<ArcSwap<ModelStatus>>,
    /// Charges of sampled requests that it is to link to.
    left: Arc<LeftCharges>,
}

type Links = HashMap<Arc<str>, Handle>;

/// See the module.
pub struct SharedPlane {
    plane: Plane,
    terms: Terms,
    links: Arc<ArcSwap<Links>>,
    findings: Arc<Findings>,
    leaving: CancellationToken,
    tasks: TaskTracker,
}

impl fmt::Debug for SharedPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedPlane").field("plane", &self.plane).finish_non_exhaustive()
    }
}

/// What a plane is made of, beside its knobs.
#[derive(Debug)]
pub struct Surroundings {
    /// Whose pods' work is shared.
    pub fleet: Arc<Fleet>,
    /// Told when the fleet has changed.
    pub snapshots: watch::Receiver<u64>,
    /// Where what happens is counted.
    pub metrics: Arc<Metrics>,
    /// The time.
    pub clock: Clock,
    /// Where what others find goes.
    pub listeners: Listeners,
    /// Records what is published for sampled requests.
    pub tracer: Tracer,
    /// Random; names epochs and spreads replicas.
    pub seed: u64,
}

impl SharedPlane {
    /// Begins to connect, and to share, without waiting for either. `plane` is the connection for calls. To be called
    /// within a runtime.
    pub fn start(
        plane: Plane,
        config: &RedisConfig,
        knobs: &PlaneKnobs,
        around: Surroundings,
    ) -> Result<SharedPlane, RedisError> {
        let Surroundings { fleet, snapshots, metrics, clock, listeners, tracer, seed } = around;
        let mut rng = Rng::new(seed);
        let terms = Terms {
            grade: knobs.grade,
            claim_deadline: knobs.claim_deadline,
            scope: Scope { prefill: knobs.share_prefill, decode_ledger: knobs.share_decode_ledger },
            ledger: LedgerConfig {
                pace: Pace { least: knobs.pace, budget: knobs.budget, ..Pace::default() },
                ..LedgerConfig::default()
            },
            clock,
            metrics,
            tracer,
        };
        let links: Arc<ArcSwap<Links>> = Arc::default();
        let (tasks, leaving) = (TaskTracker::new(), CancellationToken::new());
        let findings = Arc::new(Findings::new(knobs.share_prefixes, Arc::clone(&terms.metrics)));
        tasks.spawn(teller::run(Teller {
            plane: plane.clone(),
            fleet: Arc::clone(&fleet),
            findings: Arc::clone(&findings),
            listeners,
            metrics: Arc::clone(&terms.metrics),
            clock,
            period: knobs.findings_period,
            replica: rng.next_u64(),
            leaving: leaving.clone(),
            reconnects: plane.reconnects(),
        }));
        tasks.spawn(supervisor::run(supervisor::Supervisor {
            fleet,
            snapshots,
            plane: plane.clone(),
            feed: NewsFeed::connect(config)?,
            terms: terms.clone(),
            links: Arc::clone(&links),
            leaving: leaving.clone(),
            tasks: tasks.clone(),
            seed: rng.next_u64(),
        }));
        Ok(SharedPlane { plane, terms, links, findings, leaving, tasks })
    }
}

impl StatePlane for SharedPlane {
    fn claim(&self, order: ClaimOrder) -> BoxFuture<'static, Claimed> {
        let metrics = Arc::clone(&self.terms.metrics);
        let links = self.links.load();
        let Some(link) = links.get(&order.model) else {
            metrics.claim_fell_back(ClaimFallback::NotMember);
            return std::future::ready(Claimed::Unsure).boxed();
        };
        let (answer, answered) = oneshot::channel();
        if link.claims.try_send(ClaimRequest { order, answer, repeated: false }).is_err() {
            metrics.claim_fell_back(ClaimFallback::QueueFull);
            return std::future::ready(Claimed::Unsure).boxed();
        }
        let deadline = self.terms.claim_deadline;
        async move {
            match tokio::time::timeout(deadline, answered).await {
                Ok(Ok(claimed)) => claimed,
                Ok(Err(_)) => Claimed::Unsure,
                Err(_) => {
                    metrics.claim_fell_back(ClaimFallback::Late);
                    Claimed::Unsure
                }
            }
        }
        .boxed()
    }

    fn tells(&self) -> bool {
        true
    }

    fn tell(&self, model: &Arc<str>, finding: Finding) {
        self.findings.push(model, finding);
    }

    fn carries(&self, model: &Arc<str>, carried: Carried) {
        if let Some(link) = self.links.load().get(model) {
            link.left.leave(carried);
        }
    }

    fn status(&self, now: Tick) -> PlaneStatus {
        let (sent_bytes, received_bytes) = self.plane.traffic();
        let mut models: Vec<ModelStatus> = self
            .links
            .load()
            .values()
            .map(|link| {
                let status = ModelStatus::clone(&link.status.load());
                ModelStatus { age: status.as_of.map(|at| now.since(at)), ..status }
            })
            .collect();
        models.sort_by(|one, other| one.model.cmp(&other.model));
        PlaneStatus {
            kind: "redis",
            grade: self.terms.grade.name(),
            connected: self.plane.is_connected(),
            sent_bytes,
            received_bytes,
            models,
        }
    }

    fn members(&self) -> BoxFuture<'static, Vec<ModelMembers>> {
        let plane = self.plane.clone();
        let links = self.links.load_full();
        async move {
            let asked = links.iter().map(|(model, link)| {
                let plane = &plane;
                async move {
                    let leases = plane.ledger_members(&link.keys, LOOK).await.unwrap_or_default();
                    ModelMembers { model: Arc::clone(model), leases }
                }
            });
            let mut members = join_all(asked).await;
            members.sort_by(|one, other| one.model.cmp(&other.model));
            members
        }
        .boxed()
    }

    fn leave(&self) -> BoxFuture<'static, ()> {
        self.leaving.cancel();
        self.tasks.close();
        let (tasks, plane) = (self.tasks.clone(), self.plane.clone());
        async move {
            if tokio::time::timeout(LEAVE, tasks.wait()).await.is_err() {
                tracing::warn!(
                    "left the state plane without a goodbye: the others forget this replica when its lease is over"
                );
            }
            plane.close().await;
        }
        .boxed()
    }
}
