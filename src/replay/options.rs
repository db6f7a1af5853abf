//! What a replay is told.

use std::sync::Arc;
use std::time::Duration;

use super::model::EngineModel;
use crate::knobs::{DecodePolicy, Knobs, PrefillPolicy};

/// How many pods there are, and how they are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetShape {
    /// Prefill pods.
    pub prefill: usize,
    /// Decode pods.
    pub decode: usize,
    /// Rolesets; pod `i` of either role is in roleset `i % rolesets`.
    pub rolesets: usize,
}

impl FleetShape {
    /// Pods of both roles in so many rolesets; `None` = as many as possible. Each roleset needs both roles.
    pub fn new(prefill: usize, decode: usize, rolesets: Option<usize>) -> Option<FleetShape> {
        let most = prefill.min(decode);
        let rolesets = rolesets.unwrap_or(most);
        // Pods are numbered with five digits.
        let possible = (1..=most).contains(&rolesets) && prefill.max(decode) <= 99_999;
        possible.then_some(FleetShape { prefill, decode, rolesets })
    }
}

/// What virtual gateways tell each other of their loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// Nothing: each routes on its own charges and the engines' metrics.
    None,
    /// What the reference gateway shares (sections 8.1 and 8.2): counts and the decode ledger, as snapshots that each
    /// gateway writes and reads every [`SNAPSHOT_PERIOD`]. Only here, to compare with.
    Snapshots,
    /// Everything, published at once or within the pace; no request waits.
    Paced,
    /// The same, and each selection is committed in the plane before its request goes on.
    Claim,
}

impl Sharing {
    /// Every kind.
    pub const ALL: [Sharing; 4] = [Sharing::None, Sharing::Snapshots, Sharing::Paced, Sharing::Claim];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Sharing::None => "none",
            Sharing::Snapshots => "snapshots",
            Sharing::Paced => "paced",
            Sharing::Claim => "claim",
        }
    }

    /// The kind of that name.
    pub fn parse(name: &str) -> Option<Sharing> {
        Sharing::ALL.into_iter().find(|one| one.name() == name)
    }
}

/// How often gateways of the reference write and read snapshots.
pub const SNAPSHOT_PERIOD: Duration = Duration::from_millis(100);

/// Everything that a run depends on beside the trace.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// Pods.
    pub shape: FleetShape,
    /// Virtual gateway replicas, at least 1; requests go to them in turn.
    pub gateways: usize,
    /// What they tell each other.
    pub sharing: Sharing,
    /// Least time between two publications of one gateway.
    pub pace: Duration,
    /// From a gateway to the plane and back.
    pub round_trip: Duration,
    /// The engines.
    pub engine: Arc<EngineModel>,
    /// The gateway's configuration. Each run replaces the two policies.
    pub knobs: Arc<Knobs>,
    /// Start of all random numbers.
    pub seed: u64,
}

/// A prefill and a decode policy.
pub type Policies = (PrefillPolicy, DecodePolicy);

/// Every pair of policies.
pub fn all_policies() -> Vec<Policies> {
    PrefillPolicy::ALL.into_iter().flat_map(|prefill| DecodePolicy::ALL.map(|decode| (prefill, decode))).collect()
}
