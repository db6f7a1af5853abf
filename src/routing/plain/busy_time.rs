//! `least-busy-time`: the pod whose engine has the least to do.
//!
//! The reference wants the share of time that the GPU is busy, which no engine reports. An engine works as long as it
//! holds requests, and the more it holds the longer, so the number that it runs and keeps waiting stands for it.

use super::view::View;

/// Requests in the engine.
pub(super) fn score(view: &View<'_>) -> Option<f64> {
    view.work()
}
