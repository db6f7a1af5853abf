//! `docs/metrics.md`, made from the table of metrics.

use std::fmt::Write as _;

use crate::telemetry::buckets::{Buckets, DURATIONS, TOKENS, TOTALS};
use crate::telemetry::names::{Kind, Metric, histograms};

/// The text of `docs/metrics.md`.
pub fn metrics_markdown() -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         <!-- Generated from src/telemetry; `TANDEM_REWRITE_DOCS=1 cargo test --lib generated` writes it anew. -->\n\n\
         `/metrics` on the HTTP port answers in the Prometheus text format, and in OpenMetrics 1.0 to who prefers \
         `application/openmetrics-text`, as Prometheus does. Names are the same in both. Metrics without the prefix `tandem_` have the \
         names of the AIBrix gateway plugin; where labels differ, [Migrating from AIBrix](migrating-from-aibrix.md#metrics) says how. On Linux the usual `process_*` metrics are there as well.\n\n\
         Labels are bounded: `gateway_pod` is this replica; a model that no pod serves is counted as `_unknown`; the series \
         of a pod go when the pod does; no label holds client text.\n\n\
         In OpenMetrics, each bucket of the distributions that are told per model carries an exemplar: `trace_id`, value and \
         moment of the last request in it whose trace is sampled ([tracing.md](tracing.md)). These series go when the model \
         does. Prometheus keeps exemplars with `--enable-feature=exemplar-storage`.\n\n\
         | name | type | labels | meaning |\n|---|---|---|---|\n",
    );
    for metric in Metric::ALL {
        let definition = metric.definition();
        let kind = match definition.kind {
            Kind::Counter => "counter",
            Kind::Gauge | Kind::Decimal => "gauge",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            page,
            "| `{}` | {kind} | {} | {} |",
            definition.name,
            definition.labels.join(", "),
            definition.help
        );
    }
    for definition in histograms() {
        let labels = definition.labels.join(", ");
        let _ = writeln!(page, "| `{}` | histogram | {labels} | {} |", definition.name, definition.help);
    }
    page.push_str("\n## Buckets\n\nThe label `bucket` names a range that holds its lower border:\n\n");
    let mut row = |title: &str, buckets: &Buckets| {
        let labels: Vec<_> = buckets.labels().map(|label| format!("`{label}`")).collect();
        let _ = writeln!(page, "- {title}: {}", labels.join(", "));
    };
    row("tokens", &TOKENS);
    row("durations", &DURATIONS);
    row("`gateway_total_time_bucket_total`", &TOTALS);
    page
}
