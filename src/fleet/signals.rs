//! The last scraped engine metrics of one pod.

use std::sync::Arc;
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
    /// LoRA adapters that the engine has or is about to load.
    pub adapters: Option<Arc<Adapters>>,
}

/// Most adapters of one engine that are remembered.
const MAX_ADAPTERS: usize = 256;

/// What an engine says of its LoRA adapters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adapters {
    /// How many it can have loaded at a time.
    pub max: u32,
    /// Hashes of the names of those that run or wait, ascending.
    names: Vec<u64>,
}

impl Adapters {
    /// From lists of names, separated by commas; only so many count.
    pub fn new(max: u32, lists: [&str; 2]) -> Adapters {
        let names = lists.into_iter().flat_map(|list| list.split(',')).map(str::trim).filter(|name| !name.is_empty());
        let mut names: Vec<u64> = names.take(MAX_ADAPTERS).map(hash).collect();
        names.sort_unstable();
        names.dedup();
        Adapters { max, names }
    }

    /// The adapter is loaded, or about to be.
    pub fn has(&self, name: &str) -> bool {
        self.names.binary_search(&hash(name)).is_ok()
    }

    /// Another one can be loaded without one that has to go.
    pub fn has_room(&self) -> bool {
        self.names.len() < self.max as usize
    }
}

fn hash(name: &str) -> u64 {
    xxhash_rust::xxh64::xxh64(name.as_bytes(), 0)
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
