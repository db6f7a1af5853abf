//! `docs/metrics.md`, made from the table of metrics.

use std::fmt::Write as _;

use crate::telemetry::buckets::{Buckets, DURATIONS, TOKENS, TOTALS};
use crate::telemetry::names::{EngineHistogram, EngineMetric, Kind, Metric, histograms};

/// The text of `docs/metrics.md`.
pub fn metrics_markdown() -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         <!-- Generated from src/telemetry; `TANDEM_REWRITE_DOCS=1 cargo test --lib generated` writes it anew. -->\n\n\
         `/metrics` on the HTTP port answers in the Prometheus text format, and in OpenMetrics 1.0 to who prefers \
         `application/openmetrics-text`, as Prometheus does. Names are the same in both. Metrics without the prefix `tandem_` have the \
         names and labels of the AIBrix gateway plugin, so that its dashboards and alerts go on working; what differs, \
         [Migrating from AIBrix](migrating-from-aibrix.md#metrics) says. On Linux the usual `process_*` metrics are there as well.\n\n\
         Labels are bounded: `gateway_pod` is this replica; a model that no pod serves is counted as `_unknown`; the series \
         of a pod go when the pod does, or has failed and its requests are over; no label holds client text. The plugin has a \
         series for each slow request (`gateway_first_token_delay_over_1s_total`, labels `request_id` and timings); here there is \
         one for each model.\n\n\
         `TANDEM_METRIC_LABELS` chooses how much is told apart. `aibrix`, the default, has the labels of the plugin. `lean` counts \
         tokens and times per model instead of per pod ([labels](#labels-of-lean)) and passes nothing on of engines: enough for \
         the dashboards in `deploy/grafana`, and what it costs does not grow with the pods. `full` is `aibrix` and the buckets of \
         the engines' histograms, which are better read from the engines themselves. [sizing.md](sizing.md) has what they cost.\n\n\
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
            metric.labels(true).join(", "),
            definition.help
        );
    }
    for definition in histograms() {
        let labels = definition.labels.join(", ");
        let _ = writeln!(page, "| `{}` | histogram | {labels} | {} |", definition.name, definition.help);
    }
    lean(&mut page);
    engines(&mut page);
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

fn lean(page: &mut String) {
    page.push_str("\n## Labels of `lean`\n\nWhere they are others than above:\n\n");
    for metric in Metric::ALL.iter().filter(|metric| metric.per_pod().is_some()) {
        let labels = metric.labels(false).join(", ");
        let _ = writeln!(page, "- `{}`: {labels}", metric.definition().name);
    }
}

fn engines(page: &mut String) {
    page.push_str(
        "\n## Metrics of engines\n\n\
         With `aibrix` and `full`, what engines report is passed on under the plugin's names, one series for each ready pod whose \
         metrics were read within `TANDEM_METRIC_MAX_AGE_MS`, at most a second old, with the labels gateway_pod, namespace, pod, model, \
         model_name, engine_type, roleset, role, role_replica_index. What the engine does not report is not there. `model` and \
         `model_name` are the pod's model, whatever the engine calls it; several ranks or engines of a pod are one number; what an \
         engine breaks down by further labels is one number too. Counters are the engine's own. Pages beyond 1 MiB are not passed on.\n\n\
         | type | name | meaning |\n|---|---|---|\n",
    );
    for metric in EngineMetric::ALL {
        let definition = metric.definition();
        let _ = writeln!(page, "| {} | `{}` | {} |", definition.kind(), definition.name, definition.help);
    }
    let sleep = EngineMetric::SLEEP;
    let _ = writeln!(page, "| {} | `{}` | {} |", sleep.kind(), sleep.name, sleep.help);
    page.push_str(
        "\nOf these histograms there are quantiles since the engine started, as gauges with the endings `_p50`, `_p90` and `_p99`, \
         once there was an observation; with `full`, `_bucket`, `_count` and `_sum` as well:\n\n",
    );
    for histogram in EngineHistogram::ALL {
        let definition = histogram.definition();
        let _ = writeln!(page, "- `{}`: {}", definition.name, definition.help);
    }
}
