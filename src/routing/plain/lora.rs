//! `lora-affinity`: among the pods whose engine has the adapter, or is about to load it, the fewest requests win; now and
//! then among those that could load it, so that a popular adapter spreads (reference gateway).
//!
//! The reference takes the engine's waiting adapters for its limit, so that no pod ever has room there; here the limit is
//! read (`max_lora`).

use super::view::View;
use crate::rng::Rng;

/// 0 for the pods of the group that may win, 1 for all others.
pub(super) fn scores(views: &[View<'_>], model: &str, threshold: f64, rng: &mut Rng) -> Vec<f64> {
    let have = |view: &View<'_>| view.adapters.as_ref().is_some_and(|adapters| adapters.has(model));
    // Of an engine that says nothing of adapters, nothing speaks against it.
    let could = |view: &View<'_>| !have(view) && view.adapters.as_ref().is_none_or(|adapters| adapters.has_room());
    let (any_has, any_could) = (views.iter().any(have), views.iter().any(could));
    let group: &dyn Fn(&View<'_>) -> bool = match (any_has, any_could) {
        (true, true) if rng.unit() >= threshold => &could,
        (true, _) => &have,
        (false, true) => &could,
        (false, false) => return vec![0.0; views.len()],
    };
    views.iter().map(|view| if group(view) { 0.0 } else { 1.0 }).collect()
}
