//! Distributions of the parts of requests, per model, with an exemplar for each bucket.
//!
//! An observation is one look-up by the model's name, two atomic additions, and for a sampled request one swap of a
//! pointer: no lock, and nothing waits for an exposition. What is kept is bounded by the fleet's models: a bucket has
//! one exemplar, the last.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use opentelemetry::trace::TraceId;
use prometheus::core::{Collector, Desc};
use prometheus::proto;

use super::family::Cell;
use super::names::{GATEWAY_POD, HistogramDefinition};

/// Models of one distribution; samples of further ones are counted and not kept. Models are those of the fleet, so that
/// only a defect, or a fleet beyond all plans, comes here.
const MAX_MODELS: usize = 5_000;

const MODEL: &str = "model";

/// The trace of a request, when somebody keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledTrace {
    /// Its id.
    pub id: TraceId,
    /// When the request ended.
    pub at: SystemTime,
}

/// The last sampled request of a bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Exemplar {
    /// Its trace.
    pub(super) trace: SampledTrace,
    /// What was observed, seconds.
    pub(super) value: f64,
}

#[derive(Debug, Default)]
struct Bucket {
    /// Observations in this bucket alone.
    count: AtomicU64,
    exemplar: ArcSwapOption<Exemplar>,
}

/// The buckets of one model; the last one has no upper border.
#[derive(Debug)]
struct Series {
    buckets: Box<[Bucket]>,
    nanos: AtomicU64,
}

impl Series {
    fn new(borders: usize) -> Series {
        Series { buckets: (0..=borders).map(|_| Bucket::default()).collect(), nanos: AtomicU64::new(0) }
    }
}

#[derive(Debug)]
struct Inner {
    definition: &'static HistogramDefinition,
    gateway_pod: Arc<str>,
    models: papaya::HashMap<Box<str>, Arc<Series>, foldhash::fast::RandomState>,
    rejected: Cell,
}

/// One distribution of all models.
#[derive(Debug)]
pub(super) struct Histogram(Arc<Inner>);

impl Histogram {
    /// An empty one. `rejected` counts samples beyond [`MAX_MODELS`].
    pub(super) fn new(definition: &'static HistogramDefinition, gateway_pod: &Arc<str>, rejected: &Cell) -> Histogram {
        Histogram(Arc::new(Inner {
            definition,
            gateway_pod: Arc::clone(gateway_pod),
            models: papaya::HashMap::with_hasher(foldhash::fast::RandomState::default()),
            rejected: rejected.clone(),
        }))
    }

    /// Its name.
    pub(super) fn name(&self) -> &'static str {
        self.0.definition.name
    }

    /// What a registry takes; fails only on a name that Prometheus does not allow.
    pub(super) fn collector(&self) -> Result<Registered, prometheus::Error> {
        let definition = self.0.definition;
        let labels = definition.labels.iter().map(|label| (*label).to_owned()).collect();
        let description = Desc::new(definition.name.to_owned(), definition.help.to_owned(), labels, HashMap::new())?;
        Ok(Registered { inner: Arc::clone(&self.0), description })
    }

    /// A request of this model took so long. With a sampled trace it is the exemplar of its bucket from now on.
    pub(super) fn observe(&self, model: &str, duration: Duration, trace: Option<SampledTrace>) {
        let Some(series) = self.0.series(model) else { return };
        let value = duration.as_secs_f64();
        let index = self.0.definition.buckets.partition_point(|border| *border < value);
        if let Some(bucket) = series.buckets.get(index) {
            bucket.count.fetch_add(1, Ordering::Relaxed);
            if let Some(trace) = trace {
                bucket.exemplar.store(Some(Arc::new(Exemplar { trace, value })));
            }
        }
        series.nanos.fetch_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Drops the models that are not wanted any more, and their exemplars.
    pub(super) fn retain(&self, keep: impl Fn(&str) -> bool) {
        self.0.models.pin().retain(|model, _| keep(model));
    }

    /// The exemplars of the series with these labels, by bucket.
    pub(super) fn exemplars(&self, labels: &[proto::LabelPair]) -> Vec<Option<Arc<Exemplar>>> {
        let model = labels.iter().find(|label| label.name() == MODEL).map_or("", |label| label.value());
        let models = self.0.models.pin();
        models.get(model).map(|s| s.buckets.iter().map(|b| b.exemplar.load_full()).collect()).unwrap_or_default()
    }
}

impl Inner {
    fn series(&self, model: &str) -> Option<Arc<Series>> {
        let models = self.models.pin();
        if let Some(series) = models.get(model) {
            return Some(Arc::clone(series));
        }
        if models.len() >= MAX_MODELS {
            self.rejected.add(1);
            return None;
        }
        let series = || Arc::new(Series::new(self.definition.buckets.len()));
        Some(Arc::clone(models.get_or_insert_with(model.into(), series)))
    }

    fn sample(&self, model: &str, series: &Series) -> proto::Metric {
        let pair = |name: &str, value: &str| {
            let mut pair = proto::LabelPair::default();
            pair.set_name(name.to_owned());
            pair.set_value(value.to_owned());
            pair
        };
        let constant = self.definition.constant.iter().map(|(name, value)| pair(name, value));
        let labels = [pair(GATEWAY_POD, &self.gateway_pod), pair(MODEL, model)].into_iter().chain(constant).collect();
        let mut metric = proto::Metric::from_label(labels);
        let mut histogram = proto::Histogram::default();
        // The sum first: a sum that lacks an observation which is counted is harmless, the other way round it is not.
        histogram.set_sample_sum(Duration::from_nanos(series.nanos.load(Ordering::Relaxed)).as_secs_f64());
        let mut cumulative = 0_u64;
        let mut buckets = Vec::with_capacity(series.buckets.len());
        for (index, counted) in series.buckets.iter().enumerate() {
            cumulative = cumulative.saturating_add(counted.count.load(Ordering::Relaxed));
            // The one without border is the count itself.
            if let Some(border) = self.definition.buckets.get(index) {
                let mut bucket = proto::Bucket::default();
                bucket.set_upper_bound(*border);
                bucket.set_cumulative_count(cumulative);
                buckets.push(bucket);
            }
        }
        histogram.set_bucket(buckets);
        histogram.set_sample_count(cumulative);
        metric.set_histogram(histogram);
        metric
    }
}

/// A distribution in the registry.
pub(super) struct Registered {
    inner: Arc<Inner>,
    description: Desc,
}

impl Collector for Registered {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.description]
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        let mut family = proto::MetricFamily::default();
        family.set_name(self.inner.definition.name.to_owned());
        family.set_help(self.inner.definition.help.to_owned());
        family.set_field_type(proto::MetricType::HISTOGRAM);
        let models = self.inner.models.pin();
        family.set_metric(models.iter().map(|(model, series)| self.inner.sample(model, series)).collect());
        vec![family]
    }
}
