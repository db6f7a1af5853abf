//! A request whose pod is given: only that one has what it is about.

use std::sync::Arc;

use super::Charges;
use crate::fleet::{Model, Pod};
use crate::load::{DecodeCharge, Probes, TokenCharges};

/// Charges the pod, without a look at others. It may be ejected, or about to go: there is no other.
pub fn charge_pinned(model: &Model, pod: &Arc<Pod>) -> Charges {
    model.commit.charge_blind(|| Charges {
        prefill: None,
        decode: DecodeCharge::open(&pod.state),
        tokens: TokenCharges::new(None, None),
        probes: Probes::default(),
        conflicts: 0,
        blind: false,
    })
}
