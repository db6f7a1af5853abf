//! How much metrics tell apart.

/// Which labels metrics carry, and whether those of engines are passed on (`TANDEM_METRIC_LABELS`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetricLabels {
    /// Counters of tokens and times per model, no metrics of engines: what it costs does not grow with the pods that
    /// served.
    Lean,
    /// As the AIBrix gateway plugin has them: per pod, and with gauges, counters and quantiles of the engines.
    #[default]
    Aibrix,
    /// The same, and each bucket of the engines' histograms.
    Full,
}

impl MetricLabels {
    /// The names of the setting's values.
    pub(super) const CHOICES: [(&'static str, MetricLabels); 3] =
        [("aibrix", MetricLabels::Aibrix), ("lean", MetricLabels::Lean), ("full", MetricLabels::Full)];

    /// Token and time counters tell pods apart, and metrics of engines are passed on.
    pub fn per_pod(self) -> bool {
        self != MetricLabels::Lean
    }

    /// Histograms of engines are passed on bucket by bucket.
    pub fn histograms(self) -> bool {
        self == MetricLabels::Full
    }
}
