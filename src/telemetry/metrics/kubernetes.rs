//! The watches of the Kubernetes API.

use std::time::Duration;

use super::Metrics;
use crate::telemetry::names::Metric;

/// What is known of one kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KubernetesGauge {
    /// `pods`, `modeladapters`, ….
    pub resource: &'static str,
    /// Objects.
    pub objects: usize,
    /// Time since the API server last said anything about them; `None` = it never did.
    pub silence: Option<Duration>,
}

impl Metrics {
    /// A list of this resource begins, for this reason.
    pub fn kubernetes_listed(&self, resource: &'static str, reason: &'static str) {
        self.count(Metric::KubernetesLists, &[resource, reason], 1);
    }

    /// A list or a watch failed.
    pub fn kubernetes_failed(&self, resource: &'static str, verb: &'static str, reason: &'static str) {
        self.count(Metric::KubernetesFailures, &[resource, verb, reason], 1);
    }

    /// A watch said this.
    pub fn kubernetes_event(&self, resource: &'static str, event: &'static str) {
        self.count(Metric::KubernetesEvents, &[resource, event], 1);
    }

    /// What is known; called before an exposition.
    pub fn set_kubernetes(&self, gauges: &[KubernetesGauge]) {
        for gauge in gauges {
            self.series(Metric::KubernetesObjects, &[gauge.resource]).set(gauge.objects as u64);
            if let Some(silence) = gauge.silence {
                self.series(Metric::KubernetesSilence, &[gauge.resource]).set_decimal(silence.as_secs_f64());
            }
        }
    }
}
