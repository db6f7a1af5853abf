//! Which signals a decision had to do without.

/// Something that engines report, wanted by a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::routing) enum Signal {
    KvUsage,
    Running,
    Throughput,
    PrefillTime,
}

/// With the names that `tandem_engine_metric_missing_total` has for them.
const NAMES: [(Signal, &str); 4] = [
    (Signal::KvUsage, "kv_cache_usage_perc"),
    (Signal::Running, "num_requests_running"),
    (Signal::Throughput, "avg_generation_throughput_toks_per_s"),
    (Signal::PrefillTime, "request_prefill_time_seconds"),
];

/// A set of signals that a strategy wanted and that no candidate had (R43). The decision fell back to what is known,
/// in the end to the requests in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissingSignals(u8);

impl MissingSignals {
    pub(in crate::routing) fn add(&mut self, signal: Signal) {
        self.0 |= 1 << signal as u8;
    }

    pub(super) fn extend(&mut self, others: MissingSignals) {
        self.0 |= others.0;
    }

    /// Their names, a closed set.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        NAMES.into_iter().filter(move |(signal, _)| self.0 & (1 << *signal as u8) != 0).map(|(_, name)| name)
    }
}
