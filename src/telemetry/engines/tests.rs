//! Quantiles, several engines of one pod, and the text.

use super::*;
use crate::telemetry::page::Format;

fn distribution(buckets: &[(f64, f64)]) -> Distribution {
    let count = buckets.last().map_or(0.0, |(_, count)| *count);
    Distribution { buckets: buckets.to_vec(), count, sum: 0.0 }
}

#[test]
fn quantiles_lie_between_the_borders_of_their_bucket() {
    let infinity = f64::INFINITY;
    let even = distribution(&[(1.0, 10.0), (2.0, 20.0), (infinity, 20.0)]);
    let late = distribution(&[(1.0, 0.0), (2.0, 0.0), (4.0, 8.0), (infinity, 8.0)]);
    let above = distribution(&[(1.0, 1.0), (2.0, 1.0), (infinity, 100.0)]);
    for (what, of, expected) in [
        ("even", &even, [Some(1.0), Some(1.8), Some(1.98)]),
        ("all in one bucket", &late, [Some(3.0), Some(3.8), Some(3.98)]),
        ("beyond the last border", &above, [Some(2.0), Some(2.0), Some(2.0)]),
        ("nothing observed", &distribution(&[(1.0, 0.0), (infinity, 0.0)]), [None; 3]),
        ("no buckets", &distribution(&[]), [None; 3]),
        ("only the last bucket", &distribution(&[(infinity, 3.0)]), [Some(0.0); 3]),
    ] {
        let found = [0.5, 0.9, 0.99].map(|q| of.quantile(q).map(|value| (value * 1e9).round() / 1e9));
        assert_eq!(found, expected, "{what}");
    }
    // A count that lags behind its buckets.
    let lagging = Distribution { count: 0.0, ..even };
    assert_eq!(lagging.quantile(0.5), Some(1.0));
}

#[test]
fn engines_of_one_pod_make_one() {
    let mut one = EngineValues::default();
    let mut other = EngineValues::default();
    for (values, running, usage) in [(&mut one, 3.0, 0.2), (&mut other, 4.0, 0.9)] {
        values.set(EngineMetric::Running, running);
        values.set(EngineMetric::KvUsage, usage);
        values.set_histogram(EngineHistogram::E2e, distribution(&[(1.0, 1.0), (f64::INFINITY, 2.0)]));
    }
    other.set(EngineMetric::Waiting, 5.0);
    other.set_asleep("discard_all", 1.0);
    other.set_asleep("awake", 0.0);
    other.set_histogram(EngineHistogram::Queue, distribution(&[(1.0, 1.0)]));
    one.merge(&other);
    let numbers = [EngineMetric::Running, EngineMetric::KvUsage, EngineMetric::Waiting].map(|metric| one.get(metric));
    assert_eq!(numbers, [Some(7.0), Some(0.9), Some(5.0)]);
    assert_eq!(one.asleep, [None, Some(1.0)]);
    let e2e = one.histogram(EngineHistogram::E2e).expect("kept");
    assert_eq!((e2e.buckets.as_slice(), e2e.count), ([(1.0, 2.0), (f64::INFINITY, 4.0)].as_slice(), 4.0));
    assert!(one.histogram(EngineHistogram::Queue).is_some());
    // Other borders cannot be added up.
    let mut strange = EngineValues::default();
    strange.set_histogram(EngineHistogram::E2e, distribution(&[(3.0, 9.0)]));
    one.merge(&strange);
    assert_eq!(one.histogram(EngineHistogram::E2e).map(|e2e| e2e.count), Some(4.0));
}

fn written(format: Format, histograms: bool) -> String {
    let mut values = EngineValues::default();
    values.set(EngineMetric::Running, 3.0);
    values.set(EngineMetric::PromptTokens, 42.0);
    values.set_asleep("weights_offloaded", 0.0);
    values.set_asleep("discard_all", 0.0);
    let buckets = vec![(1.0, 10.0), (2.0, 20.0), (f64::INFINITY, 20.0)];
    values.set_histogram(EngineHistogram::IterationTokens, Distribution { buckets, count: 20.0, sum: 25.5 });
    let labels = PodLabels {
        namespace: "ns".into(),
        pod: "p".into(),
        model: "a\"b".into(),
        engine_type: "vllm".into(),
        roleset: "rs".into(),
        role: "prefill".into(),
        role_replica_index: String::new(),
    };
    let engines =
        [EngineGauge { labels: labels.clone(), values }, EngineGauge { labels, values: EngineValues::default() }];
    let mut page = Page::new(format);
    write(&mut page, "gw", &engines, histograms);
    page.text
}

const LABELS: &str = "engine_type=\"vllm\",gateway_pod=\"gw\",model=\"a\\\"b\",model_name=\"a\\\"b\",namespace=\"ns\",pod=\"p\",role=\"prefill\",role_replica_index=\"\",roleset=\"rs\"";

#[test]
fn each_family_is_written_once_with_the_labels_of_the_reference() {
    let text = written(Format::Text, false);
    let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let expected = [
        format!("num_requests_running{{{LABELS}}} 3"),
        format!("prompt_tokens_total{{{LABELS}}} 42"),
        format!("engine_sleep_state{{{LABELS},sleep_state=\"weights_offloaded\"}} 0"),
        format!("engine_sleep_state{{{LABELS},sleep_state=\"discard_all\"}} 0"),
        format!("iteration_tokens_total_p50{{{LABELS}}} 1"),
        format!("iteration_tokens_total_p90{{{LABELS}}} 1.8"),
        format!("iteration_tokens_total_p99{{{LABELS}}} 1.98"),
    ];
    assert_eq!(samples, expected);
    let kinds: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    let expected = [
        "num_requests_running gauge",
        "prompt_tokens_total counter",
        "engine_sleep_state gauge",
        "iteration_tokens_total_p50 gauge",
        "iteration_tokens_total_p90 gauge",
        "iteration_tokens_total_p99 gauge",
    ];
    assert_eq!(kinds, expected);
}

#[test]
fn histograms_are_written_bucket_by_bucket_where_that_is_wanted() {
    let text = written(Format::OpenMetrics, true);
    for line in [
        format!("iteration_tokens_total_bucket{{{LABELS},le=\"1.0\"}} 10"),
        format!("iteration_tokens_total_bucket{{{LABELS},le=\"+Inf\"}} 20"),
        format!("iteration_tokens_total_count{{{LABELS}}} 20"),
        format!("iteration_tokens_total_sum{{{LABELS}}} 25.5"),
        "# TYPE iteration_tokens_total histogram".to_owned(),
        "# TYPE prompt_tokens counter".to_owned(),
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}
