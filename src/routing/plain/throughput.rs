//! `throughput`: the pod with the least tokens per second, prompt tokens counting twice.
//!
//! The rates are those that the engine reports, or that this replica derives from the engine's counters.

use super::view::View;

/// `2 · prompt + generation`, tokens per second. A rate that is not known beside one that is counts as 0: SGLang's
/// prefill pods generate nothing, and some engines report one rate only.
pub(super) fn score(view: &View<'_>) -> Option<f64> {
    match (view.prompt_tps, view.generation_tps) {
        (None, None) => None,
        (prompt, generation) => Some(2.0 * prompt.unwrap_or(0.0) + generation.unwrap_or(0.0)),
    }
}
