//! Metrics of engines that are passed on with the labels of their pods, as the AIBrix gateway plugin does.
//!
//! Two differences: a counter is passed on as the engine counts it (the plugin adds the engine's count to its own at each
//! look, so that it grows by squares), and without an observation there is no quantile (the plugin shows the first border).

use super::PodLabels;
use super::names::{EngineHistogram, EngineMetric, GATEWAY_POD, Join};
use super::page::{Page, label};

/// The quantiles of a histogram that are passed on, and the endings of their names.
const QUANTILES: [(&str, f64); 3] = [("_p50", 0.5), ("_p90", 0.9), ("_p99", 0.99)];

/// States in which a vLLM engine sleeps, values of its label `sleep_state`. The third, `awake`, is left out: the dashboard
/// shows the largest, and that is to be 0 while the engine is awake.
pub const SLEEP_STATES: [&str; 2] = ["weights_offloaded", "discard_all"];

/// A histogram as an engine reports it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Distribution {
    /// Upper border, and observations up to it; borders ascend, the last is infinite.
    pub buckets: Vec<(f64, f64)>,
    /// Observations.
    pub count: f64,
    /// Their sum.
    pub sum: f64,
}

impl Distribution {
    /// The quantile, as far as buckets tell: between the borders of the bucket in which it lies, in proportion; in the
    /// last bucket, its lower border. `None` without an observation.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let most = self.buckets.iter().map(|(_, count)| *count).fold(self.count, f64::max);
        let target = q * most;
        let (mut below, mut lower) = (0.0, 0.0);
        for &(upper, count) in self.buckets.iter().filter(|_| most > 0.0) {
            if count >= target {
                let inside = count - below;
                let share = if inside > 0.0 { (target - below) / inside } else { 1.0 };
                return Some(if upper.is_finite() { lower + share * (upper - lower) } else { lower });
            }
            (below, lower) = (count, upper);
        }
        None
    }

    /// Adds that of another engine of the same pod, if it has the same borders.
    fn add(&mut self, other: &Distribution) {
        let alike = self.buckets.iter().map(|one| one.0).eq(other.buckets.iter().map(|one| one.0));
        if alike {
            for (one, other) in self.buckets.iter_mut().zip(&other.buckets) {
                one.1 += other.1;
            }
            self.count += other.count;
            self.sum += other.sum;
        }
    }
}

/// What one engine reports, as far as it is passed on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineValues {
    numbers: [Option<f64>; EngineMetric::COUNT],
    /// By [`SLEEP_STATES`].
    asleep: [Option<f64>; SLEEP_STATES.len()],
    histograms: Vec<(EngineHistogram, Distribution)>,
}

impl EngineValues {
    /// Sets a number.
    pub fn set(&mut self, metric: EngineMetric, value: f64) {
        if let Some(slot) = self.numbers.get_mut(metric as usize) {
            *slot = Some(value);
        }
    }

    /// The number.
    pub fn get(&self, metric: EngineMetric) -> Option<f64> {
        self.numbers.get(metric as usize).copied().flatten()
    }

    /// Sets whether the engine is in this state; others than [`SLEEP_STATES`] are none.
    pub fn set_asleep(&mut self, state: &str, value: f64) {
        if let Some(index) = SLEEP_STATES.iter().position(|known| *known == state)
            && let Some(slot) = self.asleep.get_mut(index)
        {
            *slot = Some(value);
        }
    }

    /// Sets a histogram.
    pub fn set_histogram(&mut self, histogram: EngineHistogram, distribution: Distribution) {
        self.histograms.retain(|(known, _)| *known != histogram);
        self.histograms.push((histogram, distribution));
    }

    /// The histogram.
    pub fn histogram(&self, histogram: EngineHistogram) -> Option<&Distribution> {
        self.histograms.iter().find(|(known, _)| *known == histogram).map(|(_, distribution)| distribution)
    }

    /// Adds what another engine of the same pod and model reports.
    pub fn merge(&mut self, other: &EngineValues) {
        let join = |join: Join, one: Option<f64>, other: Option<f64>| match (one, other) {
            (Some(one), Some(other)) => Some(if join == Join::Max { one.max(other) } else { one + other }),
            (one, other) => one.or(other),
        };
        for metric in EngineMetric::ALL {
            let merged = join(metric.join(), self.get(*metric), other.get(*metric));
            if let Some(slot) = self.numbers.get_mut(*metric as usize) {
                *slot = merged;
            }
        }
        for (one, other) in self.asleep.iter_mut().zip(other.asleep) {
            *one = join(Join::Max, *one, other);
        }
        for (histogram, distribution) in &other.histograms {
            match self.histograms.iter_mut().find(|(known, _)| known == histogram) {
                Some((_, known)) => known.add(distribution),
                None => self.histograms.push((*histogram, distribution.clone())),
            }
        }
    }
}

/// The engine of one pod at the moment of an exposition.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineGauge {
    /// The pod's labels.
    pub labels: PodLabels,
    /// What it reports.
    pub values: EngineValues,
}

/// The labels of a pod's series, in order of their names; `model_name` as engines call it, beside `model`.
pub(super) fn pod_labels(gateway_pod: &str, pod: &PodLabels) -> String {
    let mut text = String::with_capacity(256);
    for (name, value) in [
        ("engine_type", &*pod.engine_type),
        (GATEWAY_POD, gateway_pod),
        ("model", &pod.model),
        ("model_name", &pod.model),
        ("namespace", &pod.namespace),
        ("pod", &pod.pod),
        ("role", &pod.role),
        ("role_replica_index", &pod.role_replica_index),
        ("roleset", &pod.roleset),
    ] {
        label(&mut text, name, value);
    }
    text
}

/// Writes what engines report, one family after the other. `histograms`: bucket by bucket, too.
pub(super) fn write(page: &mut Page, gateway_pod: &str, engines: &[EngineGauge], histograms: bool) {
    let labelled: Vec<(String, &EngineValues)> =
        engines.iter().map(|engine| (pod_labels(gateway_pod, &engine.labels), &engine.values)).collect();
    for metric in EngineMetric::ALL {
        let definition = metric.definition();
        let mut begun = false;
        for (labels, values) in &labelled {
            if let Some(value) = values.get(*metric) {
                if !std::mem::replace(&mut begun, true) {
                    page.family(definition.name, definition.kind(), definition.help);
                }
                page.sample(definition.name, "", labels, value);
            }
        }
    }
    write_sleep(page, &labelled);
    for histogram in EngineHistogram::ALL {
        write_histogram(page, *histogram, &labelled, histograms);
    }
}

fn write_sleep(page: &mut Page, engines: &[(String, &EngineValues)]) {
    let definition = EngineMetric::SLEEP;
    let mut begun = false;
    for (labels, values) in engines {
        for (state, value) in SLEEP_STATES.iter().zip(values.asleep) {
            let Some(value) = value else { continue };
            if !std::mem::replace(&mut begun, true) {
                page.family(definition.name, definition.kind(), definition.help);
            }
            let mut labels = labels.clone();
            label(&mut labels, "sleep_state", state);
            page.sample(definition.name, "", &labels, value);
        }
    }
}

fn write_histogram(
    page: &mut Page,
    histogram: EngineHistogram,
    engines: &[(String, &EngineValues)],
    bucket_by_bucket: bool,
) {
    let definition = histogram.definition();
    let known: Vec<(&String, &Distribution)> =
        engines.iter().filter_map(|(labels, values)| Some((labels, values.histogram(histogram)?))).collect();
    if known.is_empty() {
        return;
    }
    if bucket_by_bucket {
        page.family(definition.name, "histogram", definition.help);
        for (labels, distribution) in &known {
            for (border, count) in &distribution.buckets {
                let mut labels = (*labels).clone();
                label(&mut labels, "le", &super::openmetrics::border_text(*border));
                page.sample(definition.name, "_bucket", &labels, *count);
            }
            page.sample(definition.name, "_count", labels, distribution.count);
            page.sample(definition.name, "_sum", labels, distribution.sum);
        }
    }
    for (suffix, q) in QUANTILES {
        let name = format!("{}{suffix}", definition.name);
        let mut begun = false;
        for (labels, distribution) in &known {
            if let Some(value) = distribution.quantile(q) {
                if !std::mem::replace(&mut begun, true) {
                    page.family(&name, "gauge", definition.help);
                }
                page.sample(&name, "", labels, value);
            }
        }
    }
}

#[cfg(test)]
mod tests;
