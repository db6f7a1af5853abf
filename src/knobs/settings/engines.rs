//! Settings of the metrics of engines.

use super::{Group, one};

/// What is read of engines, and what is passed on.
pub(super) const METRICS: Group = Group {
    title: "Engine metrics",
    settings: &[
        one("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "50", "milliseconds", "", "Pause between two scrapes of one pod."),
        one("TANDEM_SCRAPE_TIMEOUT_MS", "1000", "milliseconds", "", "Bound on one scrape."),
        one("TANDEM_METRIC_MAX_AGE_MS", "3000", "milliseconds", "", "Older values count as unknown."),
        one("TANDEM_MAX_SCRAPE_BYTES", "8388608", "bytes", "", "A longer metrics page is dropped."),
        one(
            "TANDEM_METRIC_LABELS",
            "aibrix",
            "`aibrix`, `lean` or `full`",
            "",
            "What `/metrics` tells apart: as AIBrix does, per pod, with numbers of the engines; less; or with the buckets of \
             their histograms, too. See [metrics.md](metrics.md).",
        ),
    ],
};
