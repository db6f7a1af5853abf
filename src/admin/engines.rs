//! What engines report, as it is passed on.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Tick;
use crate::fleet::{Pod, Role, Snapshot};
use crate::scrape::export_page;
use crate::telemetry::{EngineGauge, EngineMetric, EngineValues, PodLabels};

/// Namespace and name of a pod, and the model.
type Place = (Arc<str>, Arc<str>, Arc<str>);

/// What was taken in of one.
struct Seen {
    index: usize,
    /// Where its pages are.
    addresses: Vec<String>,
}

/// The engines of the pods that are ready. Numbers that are too old to go by are left out, as they are for routing. What several
/// engines of a pod report of one model is one number.
pub(super) fn gauges(snapshot: &Snapshot, now: Tick, max_age: Duration) -> Vec<EngineGauge> {
    let mut found: Vec<EngineGauge> = Vec::new();
    let mut places: HashMap<Place, Seen> = HashMap::new();
    for pod in snapshot.pods().filter(|pod| pod.spec.scraped() && pod.spec.reachable()) {
        let (key, address) = (pod.spec.pod(), pod.spec.metric_address());
        let place = (Arc::clone(&key.namespace), Arc::clone(&key.name), Arc::clone(&pod.spec.model));
        let own = counted(pod, now, max_age);
        if let Some(seen) = places.get_mut(&place) {
            let Some(gauge) = found.get_mut(seen.index) else { continue };
            gauge.values.merge(&own);
            // Ranks may share one page.
            if !seen.addresses.contains(&address) {
                gauge.values.merge(&reported(pod, now, max_age));
                seen.addresses.push(address);
            }
        } else {
            let mut values = reported(pod, now, max_age);
            values.merge(&own);
            let labels = PodLabels { pod: key.name.to_string(), ..pod.spec.metric_labels() };
            places.insert(place, Seen { index: found.len(), addresses: vec![address] });
            found.push(EngineGauge { labels, values });
        }
    }
    found
}

/// What the engine's page says.
fn reported(pod: &Pod, now: Tick, max_age: Duration) -> EngineValues {
    let signals = pod.state.signals.load();
    if !signals.fresh(now, max_age) {
        return EngineValues::default();
    }
    let page = pod.state.page.load();
    let Some(page) = page.as_deref() else { return EngineValues::default() };
    let mut values = export_page(page, pod.spec.engine, &pod.spec.model);
    for (metric, rate) in
        [(EngineMetric::PromptTps, signals.prompt_tps), (EngineMetric::GenerationTps, signals.generation_tps)]
    {
        if let Some(rate) = rate {
            values.set(metric, rate);
        }
    }
    values
}

/// What the replicas count themselves.
fn counted(pod: &Pod, now: Tick, max_age: Duration) -> EngineValues {
    let mut values = EngineValues::default();
    values.set(EngineMetric::RealtimeRunning, pod.state.load.total(now).in_flight() as f64);
    let signals = pod.state.signals.load();
    let drain = signals.drain_rate.filter(|_| pod.spec.role != Role::Prefill && signals.fresh(now, max_age));
    if let Some(rate) = drain {
        values.set(EngineMetric::DrainRate, rate);
    }
    values
}
