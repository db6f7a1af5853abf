//! Prometheus metrics.
//!
//! What it costs: a request that ends well updates about 22 series. Each is found by hashing its label values once, in
//! a map that readers do not lock, and is an atomic addition. Nothing is allocated for a series that exists.
//!
//! What bounds it: label values are closed sets, or names of pods and models that the fleet knows. A model that it does
//! not know has one fixed label. Series of pods that left go with the next exposition. How many there are of each pod is
//! for [`MetricLabels`] to say.

mod docs;
mod fleet;
mod kubernetes;
mod limits;
mod models;
mod plane;
mod prefill;
mod request;
mod tls;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

pub use docs::metrics_markdown;
pub use fleet::{EjectedGauge, FleetGauges, ModelGauge, PodGauge, TokenGauge};
pub use kubernetes::KubernetesGauge;
pub use plane::{ClaimFallback, PlaneGauge, SyncOutcome};
pub use prefill::{PrefillFailureClass, PrefillLeg, PrefillOutcome, PrefillStage};
pub use request::InFlight;

use super::family::{Cell, Family};
use super::histogram::Histogram;
use super::names::{Metric, PREFIX_ROUTING_SECONDS, REQUEST_HISTOGRAMS};
use super::{PodLabels, PrefixRouting};
use crate::clock::Tick;
use crate::knobs::MetricLabels;

/// The label of a model that the fleet does not know.
const UNKNOWN_MODEL: &str = "_unknown";

/// A bound on what this replica holds for its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Requests in flight.
    Streams,
    /// Bytes of request bodies.
    BufferedBytes,
    /// Connections to the HTTP front.
    FrontConnections,
    /// Time for a request body to arrive at the HTTP front.
    FrontBodyTime,
    /// Time in which a client of the HTTP front takes in nothing of its answer.
    FrontStall,
}

/// What the prefix index tells about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixIndexStats {
    /// Blocks held.
    pub entries: u64,
    /// Memory, bytes.
    pub bytes: u64,
    /// Blocks evicted since the start.
    pub evictions: u64,
    /// Updates dropped since the start.
    pub dropped_updates: u64,
}

/// All metrics of this replica, in a registry of its own.
#[derive(Debug)]
pub struct Metrics {
    gateway_pod: Arc<str>,
    labels: MetricLabels,
    ttft_threshold: Duration,
    /// What the prometheus crate keeps: process metrics and distributions.
    registry: prometheus::Registry,
    /// In the order of [`Metric::ALL`].
    families: Vec<Family>,
    /// When the snapshot was put in place, in ticks; 0 = never.
    snapshot_at: AtomicU64,
    series_rejected: Cell,
    plane: plane::PlaneHistograms,
    /// In the order of [`REQUEST_HISTOGRAMS`].
    parts: Vec<Histogram>,
    prefix_routing: Histogram,
}

impl Metrics {
    /// Registers everything, with lean labels. `gateway_pod` names this replica in them.
    pub fn new(gateway_pod: &str) -> Metrics {
        Metrics::labelled(gateway_pod, MetricLabels::Lean)
    }

    /// The same with these labels.
    pub fn labelled(gateway_pod: &str, labels: MetricLabels) -> Metrics {
        let gateway_pod: Arc<str> = gateway_pod.into();
        let registry = prometheus::Registry::new();
        let series_rejected = Cell::default();
        let family = |metric: &Metric| {
            Family::new(metric.definition(), metric.labels(labels.per_pod()), &gateway_pod, &series_rejected)
        };
        let families = Metric::ALL.iter().map(family).collect();
        #[cfg(target_os = "linux")]
        if let Err(error) = registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self())) {
            tracing::error!(%error, "process metrics cannot be exported");
        }
        let plane = plane::PlaneHistograms::new(&registry, &gateway_pod);
        let parts: Vec<Histogram> = REQUEST_HISTOGRAMS
            .into_iter()
            .map(|definition| Histogram::new(definition, &gateway_pod, &series_rejected))
            .collect();
        let prefix_routing = Histogram::new(&PREFIX_ROUTING_SECONDS, &gateway_pod, &series_rejected);
        for part in parts.iter().chain([&prefix_routing]) {
            let registered = part.collector().and_then(|collector| registry.register(Box::new(collector)));
            if let Err(error) = registered {
                tracing::error!(metric = part.name(), %error, "metric cannot be exported");
            }
        }
        let metrics = Metrics {
            gateway_pod,
            labels,
            ttft_threshold: Duration::from_secs(1),
            registry,
            families,
            snapshot_at: AtomicU64::new(0),
            series_rejected,
            plane,
            parts,
            prefix_routing,
        };
        metrics.series(Metric::BuildInfo, &[env!("CARGO_PKG_VERSION")]).set(1);
        // A counter that appears only when it first counts hides its first increase from `rate()`.
        for metric in Metric::ALL {
            if metric.definition().labels.iter().all(|label| *label == super::names::GATEWAY_POD) {
                metrics.series(*metric, &[]);
            }
        }
        for (indexer, used) in [("local", 1), ("sync", 0)] {
            metrics.series(Metric::PrefixIndexer, &["_init_", indexer]).set(used);
        }
        for scope in ["pod", "pair"] {
            metrics.series(Metric::Ejections, &[scope]);
        }
        for result in ["ok", "error", "limit"] {
            metrics.series(Metric::ModelWakes, &[result]);
        }
        metrics.begin_plane();
        metrics
    }

    /// Sets the border of `gateway_first_token_delay_over_1s_total` (1 s).
    #[must_use]
    pub fn with_ttft_threshold(mut self, threshold: Duration) -> Metrics {
        self.ttft_threshold = threshold;
        self
    }

    fn series(&self, metric: Metric, values: &[&str]) -> Cell {
        // The families stand in the order of the enum, and all of them do.
        self.families.get(metric as usize).map_or_else(Cell::default, |family| family.with(values))
    }

    fn count(&self, metric: Metric, values: &[&str], amount: u64) {
        self.series(metric, values).add(amount);
    }

    fn pod_series(&self, metric: Metric, pod: &PodLabels) -> Cell {
        self.series(
            metric,
            &[&pod.namespace, &pod.pod, &pod.model, &pod.engine_type, &pod.roleset, &pod.role, &pod.role_replica_index],
        )
    }

    /// A PD pair was selected.
    pub fn selected_pair(&self, prefill: &PodLabels, decode: &PodLabels) {
        self.pod_series(Metric::SelectedPrefill, prefill).add(1);
        self.pod_series(Metric::SelectedDecode, decode).add(1);
    }

    /// Adaptive bucket serving sent a request of so many prompt tokens to this roleset.
    pub fn banded(&self, roleset: &str, tokens: u64) {
        self.count(Metric::BandServed, &[roleset], 1);
        self.count(Metric::BandTokens, &[roleset], tokens);
    }

    /// No pair could be selected for a request of this model.
    pub fn selection_failed(&self, model: Option<&str>) {
        let model = model.unwrap_or(UNKNOWN_MODEL);
        self.count(Metric::PrefillFail, &[model, "pd-filter-prefill-decode-pods-fail", "400"], 1);
    }

    /// A selection decided again this often, because others were charged in between.
    pub fn selection_conflicts(&self, times: u64) {
        self.count(Metric::SelectionConflicts, &[], times);
    }

    /// A selection charged without the check.
    pub fn blind_commit(&self) {
        self.count(Metric::BlindCommits, &[], 1);
    }

    /// So many pods and pairs were ejected.
    pub fn ejected(&self, pods: u64, pairs: u64) {
        for (scope, amount) in [("pod", pods), ("pair", pairs)] {
            if amount > 0 {
                self.count(Metric::Ejections, &[scope], amount);
            }
        }
    }

    /// A selection had nobody but ejected pods or pairs to choose from.
    pub fn ejection_ignored(&self) {
        self.count(Metric::EjectionIgnored, &[], 1);
    }

    /// A request was refused.
    pub fn rejected(&self, limit: Limit) {
        let limit = match limit {
            Limit::Streams => "streams",
            Limit::BufferedBytes => "buffered_bytes",
            Limit::FrontConnections => "front_connections",
            Limit::FrontBodyTime => "front_body_time",
            Limit::FrontStall => "front_stall",
        };
        self.count(Metric::Rejected, &[limit], 1);
    }

    /// What this replica holds at most: requests in flight, and bytes of request bodies.
    pub fn set_limits(&self, streams: usize, buffered_bytes: usize) {
        for (limit, amount) in [("streams", streams), ("buffered_bytes", buffered_bytes)] {
            self.series(Metric::LimitSet, &[limit]).set(amount as u64);
        }
    }

    /// Whether this replica wants traffic; called before an exposition.
    pub fn set_ready(&self, ready: bool) {
        self.series(Metric::Ready, &[]).set(u64::from(ready));
    }

    /// Bytes of request bodies held now.
    pub fn set_buffered_bytes(&self, bytes: u64) {
        self.series(Metric::BufferedBytes, &[]).set(bytes);
    }

    /// Sessions whose last prompt size is remembered now.
    pub fn set_sessions(&self, sessions: u64) {
        self.series(Metric::TokenSessions, &[]).set(sessions);
    }

    /// The janitor took a token charge back whose release never came. `side` is `prefill` or `decode`.
    pub fn token_charge_forced(&self, side: &'static str) {
        self.series(Metric::TokenForced, &[side]).add(1);
    }

    /// A scrape of this pod failed.
    pub fn scrape_failed(&self, pod: &PodLabels) {
        self.pod_series(Metric::EngineQueryFail, pod).add(1);
    }

    /// A scrape lacked a metric under all its names (R54). `metric` is our own name for it.
    pub fn engine_metric_missing(&self, engine: &'static str, metric: &'static str) {
        self.count(Metric::EngineMetricMissing, &[engine, metric], 1);
    }

    /// A strategy had to decide without a signal that it goes by (R43). `signal` is our own name for it.
    pub fn routing_signal_missing(&self, model: &str, signal: &'static str) {
        self.count(Metric::RoutingSignalMissing, &[model, signal], 1);
    }

    /// An engine's page was too long to be passed on.
    pub fn engine_page_dropped(&self) {
        self.count(Metric::EnginePagesDropped, &[], 1);
    }

    /// A selection by prefixes was made, or found no pod. Of a model that had one, everything that counts them has a series.
    pub fn prefix_routed(&self, routing: &PrefixRouting, now: Tick) {
        // The index is the gateway's own, told by its selections and those of other replicas.
        const KV_SYNC: &str = "false";
        let model = &*routing.model;
        let imbalanced = routing.selection.is_some_and(|selection| selection.imbalanced);
        self.count(Metric::PrefixErrors, &[model, "no_target_pod", KV_SYNC], u64::from(routing.selection.is_none()));
        self.count(Metric::PrefixImbalance, &[model, KV_SYNC], u64::from(imbalanced));
        if let Some(selection) = routing.selection {
            self.count(Metric::PrefixDecisions, &[model, selection.bucket(), KV_SYNC], 1);
            self.count(Metric::PrefixSelections, &[model, selection.method(), KV_SYNC], 1);
        }
        self.prefix_routing.observe(model, now.since(routing.since), None);
    }

    /// A panic was caught.
    pub fn panic_caught(&self) {
        self.count(Metric::Panics, &[], 1);
    }

    /// The state of the prefix index; called before an exposition.
    pub fn set_prefix_index(&self, stats: PrefixIndexStats) {
        self.series(Metric::PrefixEntries, &[]).set(stats.entries);
        self.series(Metric::PrefixBytes, &[]).set(stats.bytes);
        self.series(Metric::PrefixEvictions, &[]).set(stats.evictions);
        self.series(Metric::PrefixDropped, &[]).set(stats.dropped_updates);
    }

    /// Settings and annotations that are not usable.
    pub fn set_config_errors(&self, count: usize) {
        self.series(Metric::ConfigErrors, &[]).set(count as u64);
    }

    /// Spans dropped since the start; called before an exposition.
    pub fn set_spans_dropped(&self, count: u64) {
        self.series(Metric::SpansDropped, &[]).set(count);
    }
}
