//! The exposition, and the gauges that reflect the fleet at that moment.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Metrics, UNKNOWN_MODEL};
use crate::clock::Tick;
use crate::telemetry::names::Metric;
use crate::telemetry::page::{Format, Page};
use crate::telemetry::{EngineGauge, PodLabels, engines, openmetrics};

/// One living pod.
#[derive(Clone, Debug, PartialEq)]
pub struct PodGauge {
    /// Kubernetes namespace.
    pub namespace: Arc<str>,
    /// Pod name.
    pub name: Arc<str>,
    /// Prefill legs under way.
    pub prefills: u64,
    /// Requests handed over.
    pub running: u64,
    /// Requests whose prefill leg is under way.
    pub pending: u64,
    /// Time since its metrics were scraped; `None` while they never were, or do not matter.
    pub metrics_age: Option<Duration>,
    /// Its token ledger; `None` when nothing is or was just charged there.
    pub tokens: Option<TokenGauge>,
}

/// The token ledger of one pod, tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenGauge {
    /// Of a prefill pod.
    Prefill {
        /// Being computed.
        active: u64,
        /// Resident.
        kv: u64,
        /// Resident for a decode pod that never came.
        stranded: u64,
    },
    /// Of a decode pod: outstanding.
    Decode(u64),
}

/// One model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelGauge {
    /// Its name.
    pub name: Arc<str>,
    /// Its routable pods.
    pub replicas: usize,
    /// Their labels, where it is their own model and not another name for it.
    pub routable: Vec<PodLabels>,
    /// Its rolesets that lack one of their two roles.
    pub rolesets_incomplete: usize,
    /// Its pods whose configuration is not the one in force.
    pub config_disagreements: usize,
    /// What is ejected of it; `None` for a model that has another one's pods, so that none counts twice.
    pub ejected: Option<EjectedGauge>,
}

/// What is ejected of one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EjectedGauge {
    /// Pods.
    pub pods: usize,
    /// Pairs of pods.
    pub pairs: usize,
}

/// The fleet at the moment of an exposition.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FleetGauges {
    /// Version of the snapshot.
    pub snapshot_version: u64,
    /// Its models.
    pub models: Vec<ModelGauge>,
    /// Its pods.
    pub pods: Vec<PodGauge>,
    /// What their engines report, where it is passed on.
    pub engines: Vec<EngineGauge>,
    /// Its rolesets, of all models.
    pub rolesets: Vec<Arc<str>>,
}

impl Metrics {
    /// A new snapshot is in place.
    pub fn snapshot_stored(&self, now: Tick) {
        self.snapshot_at.store(now.0, Ordering::Relaxed);
    }

    /// The text exposition of `/metrics`. Series of pods that `fleet` does not hold go, and the replicas of models: a
    /// request that outlives its pod may bring the pod's series back, until the next exposition. What is counted per
    /// model stays, so that a model that comes back goes on counting; its distributions go, with their exemplars.
    pub fn render(&self, fleet: &FleetGauges, now: Tick) -> String {
        let mut page = Page::new(Format::Text);
        self.write(&mut page, fleet, now);
        match prometheus::TextEncoder::new().encode_to_string(&self.registry.gather()) {
            Ok(text) => page.text.push_str(&text),
            Err(error) => tracing::error!(%error, "distributions cannot be written"),
        }
        page.text
    }

    /// The same page in OpenMetrics 1.0, with exemplars.
    pub fn render_openmetrics(&self, fleet: &FleetGauges, now: Tick) -> String {
        let mut page = Page::new(Format::OpenMetrics);
        self.write(&mut page, fleet, now);
        openmetrics::encode(&mut page, &self.registry.gather(), |family, labels| {
            let part = self.parts.iter().find(|part| part.name() == family);
            part.map(|part| part.exemplars(labels)).unwrap_or_default()
        });
        page.text.push_str("# EOF\n");
        page.text
    }

    fn write(&self, page: &mut Page, fleet: &FleetGauges, now: Tick) {
        self.reflect(fleet, now);
        for family in &self.families {
            family.write(page);
        }
        engines::write(page, &self.gateway_pod, &fleet.engines, self.labels.histograms());
    }

    /// What of engines is passed on.
    pub fn labels(&self) -> crate::knobs::MetricLabels {
        self.labels
    }

    /// The longest prompt per roleset of the live plans; called before an exposition. Rolesets that are not named lose
    /// their series.
    pub fn set_band_ends(&self, ends: &BTreeMap<Arc<str>, u64>) {
        if let Some(family) = self.families.get(Metric::BandMax as usize) {
            family.retain(["roleset", "roleset"], |roleset, _| ends.contains_key(roleset));
        }
        for (roleset, end) in ends {
            self.series(Metric::BandMax, &[roleset]).set((*end).min(i64::MAX.cast_unsigned()));
        }
    }

    /// Removes the series of a pod that left.
    pub fn forget_pod(&self, pod: &PodLabels) {
        self.retain_pods(|namespace, name| namespace != pod.namespace || name != pod.pod);
    }

    fn retain_pods(&self, keep: impl Fn(&str, &str) -> bool) {
        for family in &self.families {
            // Beside `pod`, the label `pod_name` of the reference gateway means this replica.
            let name = if family.has_label("pod") { "pod" } else { "pod_name" };
            family.retain(["namespace", name], &keep);
        }
    }

    /// One series for each routable pod, or one for each model.
    fn reflect_replicas(&self, fleet: &FleetGauges) {
        let Some(family) = self.families.get(Metric::ModelReplicas as usize) else { return };
        if !self.labels.per_pod() {
            let models: HashSet<&str> = fleet.models.iter().map(|model| &*model.name).collect();
            family.retain_by("model", |model| models.contains(model));
            for model in &fleet.models {
                family.with(&[&model.name]).set(model.replicas as u64);
            }
            return;
        }
        // Any label of a pod may have changed.
        family.retain_by("pod", |_| false);
        for pod in fleet.models.iter().flat_map(|model| &model.routable) {
            let PodLabels { namespace, pod, model, engine_type, roleset, role, role_replica_index } = pod;
            family.with(&[namespace, pod, model, engine_type, roleset, role, role_replica_index, model]).set(1);
        }
    }

    fn reflect(&self, fleet: &FleetGauges, now: Tick) {
        let pods: HashSet<(&str, &str)> = fleet.pods.iter().map(|pod| (&*pod.namespace, &*pod.name)).collect();
        // Requests without a pod have empty labels; those series stay.
        self.retain_pods(|namespace, name| name.is_empty() || pods.contains(&(namespace, name)));
        let models: HashSet<&str> = fleet.models.iter().map(|model| &*model.name).collect();
        let homes: HashSet<&str> =
            fleet.models.iter().filter(|model| model.ejected.is_some()).map(|model| &*model.name).collect();
        for (metric, stay) in [
            (Metric::RoutablePods, &models),
            (Metric::ConfigDisagreements, &models),
            (Metric::RolesetsIncomplete, &models),
            (Metric::Ejected, &homes),
        ] {
            if let Some(family) = self.families.get(metric as usize) {
                family.retain(["model", "model"], |model, _| stay.contains(model));
            }
        }
        self.reflect_replicas(fleet);
        for part in self.parts.iter().chain([&self.prefix_routing]) {
            part.retain(|model| model == UNKNOWN_MODEL || models.contains(model));
        }
        let rolesets: HashSet<&str> = fleet.rolesets.iter().map(|name| &**name).collect();
        for metric in [Metric::BandServed, Metric::BandTokens] {
            if let Some(family) = self.families.get(metric as usize) {
                family.retain(["roleset", "roleset"], |roleset, _| rolesets.contains(roleset));
            }
        }
        for model in &fleet.models {
            self.series(Metric::RoutablePods, &[&model.name]).set(model.replicas as u64);
            self.series(Metric::ConfigDisagreements, &[&model.name]).set(model.config_disagreements as u64);
            self.series(Metric::RolesetsIncomplete, &[&model.name]).set(model.rolesets_incomplete as u64);
            if let Some(ejected) = model.ejected {
                self.series(Metric::Ejected, &[&model.name, "pod"]).set(ejected.pods as u64);
                self.series(Metric::Ejected, &[&model.name, "pair"]).set(ejected.pairs as u64);
            }
        }
        let ledgers: HashSet<(&str, &str)> =
            fleet.pods.iter().filter(|pod| pod.tokens.is_some()).map(|pod| (&*pod.namespace, &*pod.name)).collect();
        for metric in [Metric::TokenActive, Metric::TokenKv, Metric::TokenDecode, Metric::TokenStranded] {
            if let Some(family) = self.families.get(metric as usize) {
                family.retain(["namespace", "pod_name"], |namespace, name| ledgers.contains(&(namespace, name)));
            }
        }
        let looked_at: HashSet<(&str, &str)> = fleet
            .pods
            .iter()
            .filter(|pod| pod.metrics_age.is_some())
            .map(|pod| (&*pod.namespace, &*pod.name))
            .collect();
        if let Some(family) = self.families.get(Metric::PodMetricsAge as usize) {
            family.retain(["namespace", "pod_name"], |namespace, name| looked_at.contains(&(namespace, name)));
        }
        for pod in &fleet.pods {
            let labels = [&*pod.namespace, &*pod.name];
            self.series(Metric::PodPrefills, &labels).set(pod.prefills);
            self.series(Metric::PodRunning, &labels).set(pod.running);
            self.series(Metric::PodPending, &labels).set(pod.pending);
            if let Some(age) = pod.metrics_age {
                self.series(Metric::PodMetricsAge, &labels).set_decimal(age.as_secs_f64());
            }
            match pod.tokens {
                Some(TokenGauge::Prefill { active, kv, stranded }) => {
                    self.series(Metric::TokenActive, &labels).set(active);
                    self.series(Metric::TokenKv, &labels).set(kv);
                    self.series(Metric::TokenStranded, &labels).set(stranded);
                }
                Some(TokenGauge::Decode(tokens)) => self.series(Metric::TokenDecode, &labels).set(tokens),
                None => {}
            }
        }
        self.series(Metric::SnapshotVersion, &[]).set(fleet.snapshot_version);
        let stored = self.snapshot_at.load(Ordering::Relaxed);
        let age = if stored == 0 { Duration::ZERO } else { now.since(Tick(stored)) };
        self.series(Metric::SnapshotAge, &[]).set_decimal(age.as_secs_f64());
        // The family's own overflow counter cannot be one of its series.
        self.series(Metric::SeriesRejected, &[]).set(self.series_rejected.get());
    }
}
