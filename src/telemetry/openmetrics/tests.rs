//! The format, by its text.

use std::time::{Duration, SystemTime};

use opentelemetry::trace::TraceId;
use prometheus::proto;

use super::*;
use crate::telemetry::SampledTrace;
use crate::telemetry::page::Format;

fn labels(pairs: &[(&str, &str)]) -> Metric {
    let pair = |(name, value): &(&str, &str)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value((*value).to_owned());
        pair
    };
    Metric::from_label(pairs.iter().map(pair).collect())
}

fn family(name: &str, help: &str, kind: MetricType, metrics: Vec<Metric>) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family.set_metric(metrics);
    family
}

fn counter(pairs: &[(&str, &str)], value: f64) -> Metric {
    let mut metric = labels(pairs);
    let mut counter = proto::Counter::default();
    counter.set_value(value);
    metric.set_counter(counter);
    metric
}

fn gauge(value: f64) -> Metric {
    let mut metric = labels(&[]);
    let mut gauge = proto::Gauge::default();
    gauge.set_value(value);
    metric.set_gauge(gauge);
    metric
}

fn exemplar(value: f64, at: SystemTime) -> Arc<Exemplar> {
    let id = TraceId::from_hex("0af7651916cd43dd8448eb211c80319c").unwrap();
    Arc::new(Exemplar { trace: SampledTrace { id, at }, value })
}

fn nothing(_: &str, _: &[LabelPair]) -> Vec<Option<Arc<Exemplar>>> {
    Vec::new()
}

fn encode(families: &[MetricFamily], exemplars: impl Fn(&str, &[LabelPair]) -> Vec<Option<Arc<Exemplar>>>) -> String {
    let mut page = Page::new(Format::OpenMetrics);
    super::encode(&mut page, families, exemplars);
    page.text + "# EOF\n"
}

#[test]
fn counters_lose_their_ending_in_the_family_only() {
    let families = [
        family("a_total", "Things.", MetricType::COUNTER, vec![counter(&[], 3.0)]),
        family("b_fail", "No ending.", MetricType::COUNTER, vec![counter(&[("pod", "p")], 1.5)]),
        family("c_bytes_total", "", MetricType::COUNTER, vec![counter(&[], 0.0)]),
    ];
    let expected = "\
# TYPE a counter
# HELP a Things.
a_total 3
# TYPE b_fail unknown
# HELP b_fail No ending.
b_fail{pod=\"p\"} 1.5
# TYPE c_bytes counter
# UNIT c_bytes bytes
c_bytes_total 0
# EOF
";
    assert_eq!(encode(&families, nothing), expected);
}

#[test]
fn text_is_escaped() {
    let hostile = counter(&[("model", "a\"b\\c\nd"), ("x", "")], 1.0);
    let families = [family("a_total", "One \"line\"\nand \\ more", MetricType::COUNTER, vec![hostile])];
    let expected = "\
# TYPE a counter
# HELP a One \\\"line\\\"\\nand \\\\ more
a_total{model=\"a\\\"b\\\\c\\nd\",x=\"\"} 1
# EOF
";
    assert_eq!(encode(&families, nothing), expected);
}

#[test]
fn gauges_can_be_infinite() {
    for (value, text) in
        [(f64::INFINITY, "+Inf"), (f64::NEG_INFINITY, "-Inf"), (f64::NAN, "NaN"), (-2.0, "-2"), (0.25, "0.25")]
    {
        let page = encode(&[family("g_seconds", "", MetricType::GAUGE, vec![gauge(value)])], nothing);
        assert_eq!(page, format!("# TYPE g_seconds gauge\n# UNIT g_seconds seconds\ng_seconds {text}\n# EOF\n"));
    }
    // A family that is called like a unit has none.
    let page = encode(&[family("_seconds", "", MetricType::GAUGE, vec![gauge(1.0)])], nothing);
    assert_eq!(page, "# TYPE _seconds gauge\n_seconds 1\n# EOF\n");
}

#[test]
fn histograms_carry_exemplars_where_something_was_counted() {
    let mut metric = labels(&[("model", "m")]);
    let mut histogram = proto::Histogram::default();
    let bucket = |border: f64, count: u64| {
        let mut bucket = proto::Bucket::default();
        bucket.set_upper_bound(border);
        bucket.set_cumulative_count(count);
        bucket
    };
    histogram.set_bucket(vec![bucket(0.5, 2), bucket(1.0, 2), bucket(10.0, 3)]);
    histogram.set_sample_count(5);
    histogram.set_sample_sum(61.25);
    metric.set_histogram(histogram);
    let at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_700_000_000_042_900);
    let before_all = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
    let known = |name: &str, labels: &[LabelPair]| {
        assert_eq!((name, labels[0].value()), ("h_seconds", "m"));
        // The second is of a request that was counted after the counts were read.
        vec![Some(exemplar(0.25, at)), Some(exemplar(0.75, at)), None, Some(exemplar(30.0, before_all))]
    };
    let trace = "# {trace_id=\"0af7651916cd43dd8448eb211c80319c\"}";
    let expected = format!(
        "\
# TYPE h_seconds histogram
# UNIT h_seconds seconds
# HELP h_seconds Help.
h_seconds_bucket{{model=\"m\",le=\"0.5\"}} 2 {trace} 0.25 1700000000.042
h_seconds_bucket{{model=\"m\",le=\"1.0\"}} 2
h_seconds_bucket{{model=\"m\",le=\"10.0\"}} 3
h_seconds_bucket{{model=\"m\",le=\"+Inf\"}} 5 {trace} 30
h_seconds_count{{model=\"m\"}} 5
h_seconds_sum{{model=\"m\"}} 61.25
# EOF
"
    );
    assert_eq!(encode(&[family("h_seconds", "Help.", MetricType::HISTOGRAM, vec![metric])], known), expected);
}

#[test]
fn summaries_name_their_quantiles() {
    let mut metric = labels(&[]);
    let mut summary = proto::Summary::default();
    let mut quantile = proto::Quantile::default();
    quantile.set_quantile(0.5);
    quantile.set_value(3.0);
    summary.set_quantile(vec![quantile]);
    summary.set_sample_count(7);
    summary.set_sample_sum(20.5);
    metric.set_summary(summary);
    let page = encode(&[family("s", "", MetricType::SUMMARY, vec![metric])], nothing);
    assert_eq!(page, "# TYPE s summary\ns{quantile=\"0.5\"} 3\ns_count 7\ns_sum 20.5\n# EOF\n");
}

#[test]
fn borders_have_one_spelling() {
    for (value, text) in [
        (0.0, "0.0"),
        (1.0, "1.0"),
        (600.0, "600.0"),
        (0.0001, "0.0001"),
        (0.000_25, "0.00025"),
        (0.000_05, "5e-05"),
        (0.000_012_5, "1.25e-05"),
        (999_999.0, "999999.0"),
        (1e6, "1e+06"),
        (1.5e12, "1.5e+12"),
        (f64::INFINITY, "+Inf"),
    ] {
        assert_eq!(border_text(value), text, "{value}");
    }
}
