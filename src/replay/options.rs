//! What a replay is told.

use std::sync::Arc;

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

/// Everything that a run depends on beside the trace.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// Pods.
    pub shape: FleetShape,
    /// Virtual gateway replicas, at least 1; requests go to them in turn.
    pub gateways: usize,
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
