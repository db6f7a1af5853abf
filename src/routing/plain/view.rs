//! What single-pod strategies see of a candidate, read once per decision.

use std::sync::Arc;
use std::time::Duration;

use super::super::decode::{free_percent, known};
use super::super::{Considered, Fate, Terms};
use super::Context;
use crate::fleet::{Adapters, Pod};

/// One candidate. What its engine says is `None` when it does not say so, or not lately.
#[derive(Clone, Debug)]
pub(super) struct View<'a> {
    /// The pod.
    pub(super) pod: &'a Arc<Pod>,
    /// Requests in flight: see [`super::in_flight`].
    pub(super) in_flight: f64,
    /// Age of what its engine says; `None` = it says nothing, or not lately.
    pub(super) metrics_age: Option<Duration>,
    /// Requests the engine runs.
    pub(super) running: Option<f64>,
    /// Requests that wait in the engine.
    pub(super) waiting: Option<f64>,
    /// KV cache in use, 0..=1.
    pub(super) kv_usage: Option<f64>,
    /// Generated tokens per second.
    pub(super) generation_tps: Option<f64>,
    /// Prompt tokens per second.
    pub(super) prompt_tps: Option<f64>,
    /// Mean time of a prefill, seconds.
    pub(super) prefill_seconds: Option<f64>,
    /// Requests completed per second.
    pub(super) drain_rate: Option<f64>,
    /// LoRA adapters.
    pub(super) adapters: Option<Arc<Adapters>>,
}

impl<'a> View<'a> {
    /// Reads one pod.
    pub(super) fn read(pod: &'a Arc<Pod>, context: Context<'_>) -> View<'a> {
        let own = pod.state.load.total(context.now).in_flight() as f64;
        let signals = pod.state.signals.load();
        if !signals.fresh(context.now, context.max_metric_age) {
            return View::unknown(pod, own);
        }
        View {
            in_flight: own + known(Some(signals.foreign_running)).unwrap_or(0.0),
            metrics_age: signals.at.map(|at| context.now.since(at)),
            running: known(signals.running),
            waiting: known(signals.waiting),
            kv_usage: known(signals.kv_usage),
            generation_tps: known(signals.generation_tps),
            prompt_tps: known(signals.prompt_tps),
            prefill_seconds: known(signals.prefill_seconds_mean),
            drain_rate: known(signals.drain_rate),
            adapters: signals.adapters.clone(),
            pod,
        }
    }

    /// A pod of which only the gateways' own requests are known.
    pub(super) fn unknown(pod: &'a Arc<Pod>, in_flight: f64) -> View<'a> {
        View {
            pod,
            in_flight,
            metrics_age: None,
            running: None,
            waiting: None,
            kv_usage: None,
            generation_tps: None,
            prompt_tps: None,
            prefill_seconds: None,
            drain_rate: None,
            adapters: None,
        }
    }

    /// For the record of the decision. `cold_start`: others' engines say something.
    pub(super) fn considered(&self, score: f64, cold_start: bool) -> Considered {
        Considered {
            slot: self.pod.state.slot,
            fate: Fate::Scored,
            ledger_age: None,
            score: Some(score),
            count: self.in_flight,
            metrics_age: self.metrics_age,
            terms: Terms::Decode {
                throughput: self.generation_tps,
                drain: None,
                free_pct: self.kv_usage.map_or(100.0, free_percent),
                tokens: 0.0,
                generated: 0.0,
                cold_start: cold_start && self.metrics_age.is_none(),
            },
        }
    }

    /// Requests in the engine: running and waiting as it last said, or in flight as we know it, whichever is more. What
    /// was sent after the last scrape is only in the second.
    pub(super) fn work(&self) -> Option<f64> {
        let said = self.running? + self.waiting.unwrap_or(0.0);
        Some(said.max(self.in_flight))
    }
}
