//! What the rest of the gateway sees of the state plane: the trait, and the plane of a replica that is alone.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::findings::Finding;
use crate::clock::Tick;
use crate::fleet::PodState;
pub use crate::state::ledger::Claimed;
use crate::telemetry::Carried;

/// A charge that is made in this replica and has to be committed in the plane.
#[derive(Clone, Debug)]
pub struct ClaimOrder {
    /// The model.
    pub model: Arc<str>,
    /// The pods that were charged. The decision rests on them: it is made again if somebody else has charged one of them.
    pub pods: Vec<Arc<PodState>>,
    /// What [`crate::load::PlanePort::claim_since`] said before the loads were read.
    pub since: u64,
}

/// What replicas share. Nothing here blocks; what waits is a future, and has a deadline of its own.
pub trait StatePlane: fmt::Debug + Send + Sync {
    /// Commits a charge, or says that the decision is to be made again. The answer comes within the claim's deadline.
    fn claim(&self, order: ClaimOrder) -> BoxFuture<'static, Claimed>;

    /// Somebody hears what is told.
    fn tells(&self) -> bool;

    /// Tells the other replicas of the model. What cannot be told now is dropped, and counted.
    fn tell(&self, model: &Arc<str>, finding: Finding);

    /// The charge of a sampled request, for the span of the call that publishes it.
    fn carries(&self, _model: &Arc<str>, _carried: Carried) {}

    /// How it is.
    fn status(&self, now: Tick) -> PlaneStatus;

    /// Who is there, as the server has it; for people who look.
    fn members(&self) -> BoxFuture<'static, Vec<ModelMembers>>;

    /// Says goodbye: the others forget this replica's work now and not only when its lease is over.
    fn leave(&self) -> BoxFuture<'static, ()>;
}

/// The plane as this replica knows it.
#[derive(Clone, Debug, Default)]
pub struct PlaneStatus {
    /// `local` or `redis`.
    pub kind: &'static str,
    /// `paced` or `claim`; empty without a server.
    pub grade: &'static str,
    /// There is a connection.
    pub connected: bool,
    /// Bytes of arguments sent since the start.
    pub sent_bytes: u64,
    /// Bytes of the ledger's answers received since the start.
    pub received_bytes: u64,
    /// By model, ordered by name.
    pub models: Vec<ModelStatus>,
}

/// One model's ledger as this replica knows it.
#[derive(Clone, Debug, Default)]
pub struct ModelStatus {
    /// The model.
    pub model: Arc<str>,
    /// The epoch in hexadecimal; empty while this replica is no member.
    pub epoch: String,
    /// The member's number.
    pub member: u32,
    /// How many members there are.
    pub members: u32,
    /// Version of the view.
    pub version: u64,
    /// Pods on which others have work.
    pub remote_pods: usize,
    /// Pods on which this replica has work.
    pub own_pods: usize,
    /// When the view was last known to be whole.
    pub as_of: Option<Tick>,
    /// How old the view is; `None` = there never was one.
    pub age: Option<Duration>,
    /// Claims are made: the grade asks for it, others are there, and the server is quick enough.
    pub claiming: bool,
    /// What has happened so far.
    pub counts: super::ledger::LedgerCounts,
    /// Duration of the last sync that was answered.
    pub last_sync: Option<Duration>,
}

/// The members of one model's ledger.
#[derive(Clone, Debug)]
pub struct ModelMembers {
    /// The model.
    pub model: Arc<str>,
    /// Number of each member, and until when its lease holds, in ms from now on the server's clock; negative = over.
    pub leases: Vec<(u32, i64)>,
}

/// The plane of a replica that shares nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalPlane;

impl StatePlane for LocalPlane {
    fn claim(&self, _: ClaimOrder) -> BoxFuture<'static, Claimed> {
        // Nobody else is there.
        std::future::ready(Claimed::Granted).boxed()
    }

    fn tells(&self) -> bool {
        false
    }

    fn tell(&self, _: &Arc<str>, _: Finding) {}

    fn status(&self, _: Tick) -> PlaneStatus {
        PlaneStatus { kind: "local", ..PlaneStatus::default() }
    }

    fn members(&self) -> BoxFuture<'static, Vec<ModelMembers>> {
        std::future::ready(Vec::new()).boxed()
    }

    fn leave(&self) -> BoxFuture<'static, ()> {
        std::future::ready(()).boxed()
    }
}
