//! Prometheus metrics.

use std::sync::Arc;

use super::{PodLabels, RequestRecord};

/// All metrics of this replica, in a registry of its own.
#[derive(Debug)]
pub struct Metrics {}

/// One request in flight: the gauges go up on creation and down on drop.
#[derive(Debug)]
pub struct InFlight {}

impl Metrics {
    /// Registers everything.
    pub fn new(_gateway_pod: &str) -> Metrics {
        Metrics {}
    }

    /// The text exposition of `/metrics`.
    pub fn render(&self) -> String {
        String::new()
    }

    /// A request of a known model (or `None`) enters.
    pub fn enter(self: &Arc<Self>, _model: Option<&str>) -> InFlight {
        InFlight {}
    }

    /// A request ended: counters, buckets and the log line.
    pub fn finish(&self, _record: &RequestRecord) {}

    /// A PD pair was selected.
    pub fn selected_pair(&self, _prefill: &PodLabels, _decode: &PodLabels) {}
}
