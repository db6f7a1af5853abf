//! Models without pods.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Metrics;
use crate::telemetry::names::Metric;

impl Metrics {
    /// Requests of the last minute that found no ready pod, by model; called before an exposition.
    pub fn set_unserved(&self, requests: &BTreeMap<Arc<str>, u64>) {
        for (model, count) in requests {
            self.series(Metric::UnservedRequests, &[model]).set(*count);
        }
    }

    /// A call to wake a model ended (`ok`, `error`), or was not made (`limit`).
    pub fn model_woken(&self, result: &'static str) {
        self.count(Metric::ModelWakes, &[result], 1);
    }
}
