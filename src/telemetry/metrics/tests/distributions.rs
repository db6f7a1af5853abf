//! Distributions per model, and the exemplars in them.

use std::time::{Duration, SystemTime};

use opentelemetry::trace::TraceId;

use super::*;
use crate::telemetry::SampledTrace;
use crate::telemetry::names::{REQUEST_HISTOGRAMS, histograms};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

fn sampled(trace: &str) -> SampledTrace {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_250);
    SampledTrace { id: TraceId::from_hex(trace).unwrap(), at }
}

fn openmetrics(metrics: &Metrics) -> String {
    metrics.render_openmetrics(&fleet(&["d-0"]), Tick(0))
}

/// What follows the name and labels of a bucket.
fn bucket<'a>(page: &'a str, name: &str, border: &str) -> &'a str {
    let start = format!("{name}_bucket{{gateway_pod=\"gw-0\",model=\"llama\",le=\"{border}\"}} ");
    page.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_else(|| panic!("{start} in {page}"))
}

#[test]
fn borders_ascend_and_belong_to_the_bucket_below() {
    for definition in histograms() {
        assert!(definition.buckets.is_sorted_by(|a, b| a < b), "{}", definition.name);
        assert!(definition.buckets.iter().all(|border| *border > 0.0 && border.is_finite()));
    }
    for (index, definition) in REQUEST_HISTOGRAMS.into_iter().enumerate() {
        let metrics = metrics();
        let part = &metrics.parts[index];
        assert_eq!(part.name(), definition.name);
        for border in definition.buckets {
            let exactly = Duration::from_secs_f64(*border);
            part.observe("llama", exactly, None);
            part.observe("llama", exactly + Duration::from_nanos(100), None);
        }
        let page = openmetrics(&metrics);
        let counts: Vec<u64> = page
            .lines()
            .filter(|line| line.starts_with(&format!("{}_bucket", definition.name)))
            .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
            .collect();
        let expected: Vec<u64> = (0..definition.buckets.len() as u64).map(|index| 2 * index + 1).collect();
        assert_eq!(counts[..expected.len()], expected, "{}", definition.name);
        assert_eq!(counts[expected.len()..], [2 * expected.len() as u64]);
    }
}

#[test]
fn a_sampled_request_is_the_exemplar_of_each_of_its_buckets() {
    let metrics = metrics();
    metrics.finish(&record(Outcome::Success, 200), Some(sampled(TRACE)));
    let page = openmetrics(&metrics);
    let exemplar = |value: &str| format!("1 # {{trace_id=\"{TRACE}\"}} {value} 1700000000.250");
    for (name, below, border, value) in [
        ("tandem_routing_seconds", "0.001", "0.0025", "0.002"),
        ("tandem_prefill_seconds", "0.05", "0.1", "0.098"),
        ("tandem_kv_transfer_seconds", "0.05", "0.1", "0.1"),
        ("tandem_time_to_first_token_seconds", "0.1", "0.25", "0.2"),
        ("tandem_time_per_output_token_seconds", "0.015", "0.02", "0.02"),
        ("tandem_decode_seconds", "1.0", "2.5", "1.98"),
        ("tandem_request_seconds", "1.0", "2.5", "2.181"),
    ] {
        assert_eq!(bucket(&page, name, below), "0", "{name}");
        assert_eq!(bucket(&page, name, border), exemplar(value), "{name}");
        assert_eq!(bucket(&page, name, "+Inf"), "1", "{name}: only in its own bucket");
    }
    // The text format knows none, and has the same numbers.
    let text = metrics.render(&fleet(&["d-0"]), Tick(0));
    assert!(!text.contains("trace_id"));
    let model = "{gateway_pod=\"gw-0\",model=\"llama\"}";
    assert_eq!(value(&text, &format!("tandem_request_seconds_sum{model}")), Some(2.181));
    assert_eq!(value(&text, &format!("tandem_request_seconds_count{model}")), Some(1.0));
    let infinite = "tandem_request_seconds_bucket{gateway_pod=\"gw-0\",model=\"llama\",le=\"+Inf\"}";
    assert_eq!(value(&text, infinite), Some(1.0));
}

#[test]
fn requests_that_nobody_traces_are_no_exemplars() {
    let metrics = metrics();
    let kept = |metrics: &Metrics| openmetrics(metrics).matches("trace_id").count();
    metrics.finish(&record(Outcome::Success, 200), None);
    assert_eq!(kept(&metrics), 0);
    metrics.finish(&record(Outcome::AnswerCut, 200), Some(sampled(TRACE)));
    assert_eq!(kept(&metrics), 0, "a request that failed is in no bucket");
    metrics.finish(&record(Outcome::Success, 200), Some(sampled(TRACE)));
    assert_eq!(kept(&metrics), 7);
    metrics.finish(&record(Outcome::Success, 200), None);
    assert_eq!(kept(&metrics), 7, "one that nobody keeps does not take its place");
    let later = TRACE.replace('0', "1");
    metrics.finish(&record(Outcome::Success, 200), Some(sampled(&later)));
    assert_eq!(openmetrics(&metrics).matches(later.as_str()).count(), 7, "the last one is shown");
    assert_eq!(kept(&metrics), 7);
}

#[test]
fn distributions_leave_with_their_model() {
    let metrics = metrics();
    let unknown = RequestRecord { model: None, ..record(Outcome::Success, 200) };
    metrics.finish(&record(Outcome::Success, 200), Some(sampled(TRACE)));
    metrics.finish(&unknown, None);
    let series = |page: &str, model: &str| {
        page.matches(&format!("tandem_request_seconds_count{{gateway_pod=\"gw-0\",model=\"{model}\"}}")).count()
    };
    let page = openmetrics(&metrics);
    assert_eq!((series(&page, "llama"), series(&page, UNKNOWN_MODEL)), (1, 1));
    let page = metrics.render_openmetrics(&FleetGauges::default(), Tick(0));
    assert_eq!((series(&page, "llama"), series(&page, UNKNOWN_MODEL)), (0, 1));
    assert!(!page.contains(TRACE));
    metrics.finish(&record(Outcome::Success, 200), None);
    assert!(openmetrics(&metrics).contains("tandem_request_seconds_count{gateway_pod=\"gw-0\",model=\"llama\"} 1\n"));
}

/// A page in OpenMetrics has the series of the text page, whatever they are called.
#[test]
fn both_formats_tell_the_same() {
    let metrics = metrics();
    metrics.finish(&record(Outcome::Success, 200), Some(sampled(TRACE)));
    metrics.scrape_failed(&pod("d-0"));
    let names = |page: &str| -> Vec<String> {
        let lines = page.lines().filter(|line| !line.starts_with('#') && !line.contains(",le=\""));
        lines.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    };
    let (mut text, mut open) = (names(&metrics.render(&fleet(&["d-0"]), Tick(0))), names(&openmetrics(&metrics)));
    text.sort_unstable();
    open.sort_unstable();
    assert_eq!(text, open);
    assert!(open.iter().any(|name| name.starts_with("llm_engine_metrics_query_fail{")));
}

/// In OpenMetrics, families share one space of names with the samples of others.
#[test]
fn no_sample_could_be_of_two_families() {
    let counters = Metric::ALL.iter().map(|metric| metric.definition());
    let mut taken: Vec<String> = Vec::new();
    for definition in counters {
        match definition.name.strip_suffix("_total") {
            Some(title) => taken.extend([title.to_owned(), definition.name.to_owned(), format!("{title}_created")]),
            None => taken.push(definition.name.to_owned()),
        }
    }
    for definition in histograms() {
        taken.push(definition.name.to_owned());
        taken.extend(["bucket", "count", "sum", "created"].map(|end| format!("{}_{end}", definition.name)));
    }
    let count = taken.len();
    taken.sort_unstable();
    taken.dedup();
    assert_eq!(taken.len(), count);
}
