//! The last scraped engine metrics of one pod.

use std::time::Duration;

use crate::clock::Tick;

/// Engine metrics of one pod at one moment. A field is `None` when the engine did not report it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Signals {
    /// When the scrape was answered; `None` = never.
    pub at: Option<Tick>,
    /// Running requests as the engine counts them (summed over data-parallel ranks).
    pub running: Option<f64>,
    /// Waiting requests.
    pub waiting: Option<f64>,
    /// SGLang: requests waiting for a decode pod's preallocation, on the prefill side.
    pub prefill_prealloc_queue: Option<f64>,
    /// SGLang: requests waiting for preallocation, on the decode side.
    pub decode_prealloc_queue: Option<f64>,
    /// KV-cache usage, 0..=1.
    pub kv_usage: Option<f64>,
    /// Generated tokens per second, reported or derived from our own samples.
    pub generation_tps: Option<f64>,
    /// Prompt tokens per second, reported or derived.
    pub prompt_tps: Option<f64>,
    /// Mean of the engine's prefill-time histogram, seconds.
    pub prefill_seconds_mean: Option<f64>,
    /// Running requests beyond those that this replica knew of when it scraped, its own and those that other replicas
    /// publish: the work of gateways that share nothing with this one.
    pub foreign_running: f64,
    /// Requests per second completed through this gateway over the last minute (decode pods).
    pub drain_rate: Option<f64>,
}

impl Signals {
    /// Nothing known yet.
    pub fn unknown() -> Signals {
        Signals::default()
    }

    /// True when the values are no older than `max_age`. Stale is unknown, never zero.
    pub fn fresh(&self, now: Tick, max_age: Duration) -> bool {
        self.at.is_some_and(|at| now.since(at) <= max_age)
    }
}
