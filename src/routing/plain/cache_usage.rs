//! `least-kv-cache` and `least-gpu-cache`: the pod with the least of its KV cache in use.
//!
//! The reference adds the CPU cache for the first and reads another name for the second. No engine of today reports a
//! CPU cache, and both names stand for the one usage that each engine has, so the two strategies are the same here.

use super::view::View;

/// Share of the KV cache in use.
pub(super) fn score(view: &View<'_>) -> Option<f64> {
    view.kv_usage
}
