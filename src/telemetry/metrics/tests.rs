//! Every metric by its text.

mod distributions;

use std::sync::Mutex;

use super::*;
use crate::clock::Tick;
use crate::error::Reason;
use crate::knobs::assert_generated;
use crate::response::Usage;
use crate::telemetry::page::{Format, Page};
use crate::telemetry::{Outcome, PrefixSelection, RequestRecord, Timings};

fn metrics() -> Arc<Metrics> {
    Arc::new(Metrics::new("gw-0"))
}

fn text(metrics: &Metrics) -> String {
    metrics.render(&FleetGauges::default(), Tick(0))
}

/// The value of the series whose line begins so.
fn value(page: &str, series: &str) -> Option<f64> {
    let line = page.lines().find(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// Series but for those of the process and of distributions, which tests of their own count.
fn series_count(page: &str) -> usize {
    let distribution = |line: &str| REQUEST_HISTOGRAMS.iter().any(|definition| line.starts_with(definition.name));
    page.lines().filter(|line| !line.starts_with('#') && !line.starts_with("process_") && !distribution(line)).count()
}

fn pod(name: &str) -> Arc<PodLabels> {
    Arc::new(PodLabels {
        namespace: "ns".into(),
        pod: name.into(),
        model: "llama".into(),
        engine_type: "vllm".into(),
        roleset: "rs-0".into(),
        role: "decode".into(),
        role_replica_index: "0".into(),
    })
}

fn fleet(pods: &[&str]) -> FleetGauges {
    FleetGauges {
        rolesets: Vec::new(),
        engines: Vec::new(),
        snapshot_version: 7,
        models: vec![ModelGauge { name: "llama".into(), replicas: pods.len(), ..ModelGauge::default() }],
        pods: pods
            .iter()
            .map(|name| PodGauge {
                namespace: "ns".into(),
                name: (*name).into(),
                prefills: 1,
                running: 2,
                pending: 3,
                metrics_age: None,
                tokens: None,
            })
            .collect(),
    }
}

fn record(outcome: Outcome, status: u16) -> RequestRecord {
    RequestRecord {
        request_id: "4bf92f3577b34da6a3ce929d0e0e4736".into(),
        client_request_id: None,
        endpoint: "/v1/chat/completions",
        model: Some("llama".into()),
        strategy: Some("pd".into()),
        policies: Some(("prefix_cache", "load_balancing")),
        decision: None,
        single_reason: None,
        roleset: "rs-0".into(),
        prefill_pod: Some(pod("p-0")),
        target_pod: Some(pod("d-0")),
        target_host: "10.0.0.2".to_owned(),
        candidate_pods: 2,
        ready_pods: 4,
        outstanding_at_start: 0,
        handoff: "relayed",
        retry: None,
        stream: true,
        body_bytes: 1000,
        answer_bytes: 2000,
        status,
        outcome,
        usage: Some(Usage { prompt_tokens: 256, completion_tokens: 99, total_tokens: 355 }),
        ttft_threshold: None,
        timings: Timings {
            received: Tick::from_millis(1000),
            routed: Some(Tick::from_millis(1001)),
            prefill_start: Some(Tick::from_millis(1002)),
            prefill_end: Some(Tick::from_millis(1100)),
            handed_over: Some(Tick::from_millis(1101)),
            answer_head: Some(Tick::from_millis(1150)),
            first_chunk: Some(Tick::from_millis(1200)),
            last_chunk: Some(Tick::from_millis(3180)),
            ended: Some(Tick::from_millis(3181)),
        },
    }
}

#[test]
fn generated_metrics_page() {
    assert_generated("docs/metrics.md", &metrics_markdown());
}

#[test]
fn names_are_unique_and_all_are_registered() {
    let metrics = metrics();
    let mut names: Vec<_> = Metric::ALL.iter().map(|metric| metric.definition().name).collect();
    for (index, metric) in Metric::ALL.iter().enumerate() {
        assert_eq!(*metric as usize, index);
        let definition = metric.definition();
        let values = definition.labels.iter().filter(|label| **label != "gateway_pod").count();
        metrics.series(*metric, &vec![""; values]);
    }
    let mut page = Page::new(Format::Text);
    metrics.families.iter().for_each(|family| family.write(&mut page));
    let page = page.text;
    for name in &names {
        assert!(page.contains(&format!("# TYPE {name} ")), "{name}");
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Metric::ALL.len());
}

/// R19 and the exact names of the reference gateway.
#[test]
fn r19_a_finished_request_is_counted_everywhere_once() {
    let metrics = metrics();
    metrics.finish(&record(Outcome::Success, 200), None);
    let page = metrics.render(&fleet(&["d-0"]), Tick(0));
    let model = "{gateway_pod=\"gw-0\",model=\"llama\"}";
    let bucket = |label: &str| format!("{{bucket=\"{label}\",gateway_pod=\"gw-0\",model=\"llama\"}}");
    let expected = [
        (
            "gateway_request_total{engine_type=\"vllm\",gateway_pod=\"gw-0\",model=\"llama\",namespace=\"ns\",\
             pod=\"d-0\",pod_name=\"gw-0\",role=\"decode\",role_replica_index=\"0\",roleset=\"rs-0\"}"
                .to_owned(),
            1.0,
        ),
        (
            "gateway_request_model_success_total{gateway_pod=\"gw-0\",model=\"llama\",pod_name=\"gw-0\",\
             status=\"gateway_request_success\",status_code=\"200\"}"
                .to_owned(),
            1.0,
        ),
        (format!("gateway_prompt_token_bucket_total{}", bucket("256-512")), 1.0),
        (format!("gateway_completion_token_bucket_total{}", bucket("0-256")), 1.0),
        (format!("gateway_input_tokens_total{model}"), 256.0),
        (format!("gateway_output_tokens_total{model}"), 99.0),
        ("gateway_requests_with_usage_total{gateway_pod=\"gw-0\",has_usage=\"true\",model=\"llama\"}".to_owned(), 1.0),
        (format!("gateway_routing_time_bucket_total{}", bucket("2-5ms")), 1.0),
        (format!("gateway_prefill_time_bucket_total{}", bucket("50-100ms")), 1.0),
        (format!("gateway_kv_transfer_time_bucket_total{}", bucket("100-200ms")), 1.0),
        (format!("gateway_ttft_bucket_total{}", bucket("200-500ms")), 1.0),
        (format!("gateway_tpot_bucket_total{}", bucket("20-50ms")), 1.0),
        (format!("gateway_decode_time_bucket_total{}", bucket("1000-2000ms")), 1.0),
        (format!("gateway_total_time_bucket_total{}", bucket("1000-5000ms")), 1.0),
        ("tandem_handoff_total{model=\"llama\",outcome=\"relayed\"}".to_owned(), 1.0),
    ];
    for (series, count) in &expected {
        assert_eq!(value(&page, series), Some(*count), "{series}\n{page}");
    }
    assert!(!page.contains("gateway_first_token_delay_over_1s_total"));
    // Nothing else was counted.
    let before = series_count(&Metrics::new("x").render(&fleet(&["d-0"]), Tick(0)));
    assert_eq!(series_count(&page), before + expected.len());
}

#[test]
fn outcomes_become_status_and_code() {
    let table = [
        (Outcome::ClientGone, 499, "client_cancelled_eof", "499"),
        (Outcome::ClientGone, 200, "client_cancelled_eof", "499"),
        (Outcome::Failed(Reason::BodyInvalid), 400, "x-error-request-body-processing_fail", "400"),
        (Outcome::Failed(Reason::PrefillRejected), 422, "pd_prefill_rejected", "422"),
        (Outcome::EngineStatus(429), 429, "gateway_rsp_headers_fail", "429"),
        (Outcome::EngineStatus(999), 999, "gateway_rsp_headers_fail", "other"),
        (Outcome::AnswerCut, 200, "gateway_rsp_body_fail", "200"),
        (Outcome::EngineErrorEvent, 200, "engine_error_event", "200"),
        (Outcome::Shutdown, 200, "aibrix_gateway_server_shutdown", "503"),
    ];
    for (outcome, status, label, code) in table {
        let metrics = metrics();
        metrics.finish(&record(outcome, status), None);
        let page = text(&metrics);
        let series = format!(
            "gateway_request_model_fail_total{{gateway_pod=\"gw-0\",model=\"llama\",pod_name=\"gw-0\",\
             status=\"{label}\",status_code=\"{code}\"}}"
        );
        assert_eq!(value(&page, &series), Some(1.0), "{page}");
        assert!(!page.contains("gateway_request_model_success_total"));
        assert!(!page.contains("ttft"), "latencies are those of successful requests");
    }
}

#[test]
fn the_first_token_threshold_is_exclusive() {
    let series = "gateway_first_token_delay_over_1s_total{gateway_pod=\"gw-0\",model=\"llama\"}";
    for (threshold, expected) in [(199, Some(1.0)), (200, None), (201, None)] {
        let metrics = Metrics::new("gw-0").with_ttft_threshold(Duration::from_millis(threshold));
        metrics.finish(&record(Outcome::Success, 200), None);
        assert_eq!(value(&text(&metrics), series), expected);
    }
}

/// R80: clients cannot make series.
#[test]
fn r80_unknown_models_share_one_series() {
    let metrics = metrics();
    let before = series_count(&text(&metrics));
    for number in 0..50_000_u32 {
        let in_flight = metrics.enter(None);
        let mut record = record(Outcome::Failed(Reason::ModelUnknown), 400);
        record.request_id = format!("random-{number}");
        record.model = None;
        record.target_pod = None;
        record.prefill_pod = None;
        record.handoff = "";
        metrics.finish(&record, None);
        drop(in_flight);
    }
    let page = text(&metrics);
    let added = series_count(&page) - before;
    assert!(added <= 10, "{added}");
    assert!(page.contains("model=\"_unknown\""));
    assert!(!page.contains("random-"));
}

#[test]
fn gauges_follow_their_guards() {
    let metrics = metrics();
    let all = "gateway_in_flight_requests{gateway_pod=\"gw-0\"}";
    let model = "gateway_model_in_flight_requests{gateway_pod=\"gw-0\",model=\"llama\"}";
    let mut one = metrics.enter(None);
    let two = metrics.enter(Some("llama"));
    assert_eq!((value(&text(&metrics), all), value(&text(&metrics), model)), (Some(2.0), Some(1.0)));
    one.set_model("llama");
    one.set_model("other");
    assert_eq!(value(&text(&metrics), model), Some(2.0));
    drop((one, two));
    assert_eq!((value(&text(&metrics), all), value(&text(&metrics), model)), (Some(0.0), Some(0.0)));
}

#[test]
fn a_prefill_leg_counts_once_whatever_happens() {
    let gauge = "gateway_prefill_outstanding_requests{gateway_pod=\"gw-0\"}";
    let series = |kind: &str, status: &str, code: &str| {
        format!(
            "gateway_prefill_request_{kind}_total{{gateway_pod=\"gw-0\",model=\"llama\",status=\"{status}\",\
             status_code=\"{code}\"}}"
        )
    };
    let table = [
        (Some(PrefillOutcome::Success), "pd-prefill-request-success", "200"),
        (Some(PrefillOutcome::HttpError(503)), "http_error", "503"),
        (Some(PrefillOutcome::HttpError(7)), "http_error", "other"),
        (Some(PrefillOutcome::Canceled), "context_canceled", "499"),
        (None, "context_canceled", "499"),
        (Some(PrefillOutcome::DeadlineExceeded), "deadline_exceeded", "504"),
        (Some(PrefillOutcome::Timeout), "timeout", "504"),
        (Some(PrefillOutcome::Error), "error", "502"),
    ];
    for (outcome, status, code) in table {
        let metrics = metrics();
        let leg = metrics.prefill_leg(Some("llama".into()));
        assert_eq!(value(&text(&metrics), gauge), Some(1.0));
        match outcome {
            Some(outcome) => leg.finish(outcome),
            None => drop(leg),
        }
        let page = text(&metrics);
        assert_eq!(value(&page, gauge), Some(0.0));
        let good = outcome == Some(PrefillOutcome::Success);
        assert_eq!(value(&page, &series(if good { "success" } else { "fail" }, status, code)), Some(1.0), "{page}");
        let failed = value(&page, &series("fail", "pd-do-prefill-request-error", "500"));
        assert_eq!(failed, if good { None } else { Some(1.0) });
    }
    let metrics = metrics();
    metrics.selection_failed(Some("llama"));
    let page = text(&metrics);
    assert_eq!(value(&page, &series("fail", "pd-filter-prefill-decode-pods-fail", "400")), Some(1.0));
    metrics.pd_prefill_failed(PrefillFailureClass::HttpStatus, PrefillStage::BeforeResponse);
    let failure = "gateway_pd_prefill_failure_total{class=\"http_status\",stage=\"before_response\"}";
    assert_eq!(value(&text(&metrics), failure), Some(1.0));
}

/// The labels of the reference gateway: counters of tokens and times are the answering pod's, replicas are pods.
#[test]
fn what_is_counted_per_pod_has_the_labels_of_the_reference() {
    let metrics = Metrics::labelled("gw-0", MetricLabels::Aibrix);
    metrics.finish(&RequestRecord { model: Some("adapter".into()), ..record(Outcome::Success, 200) }, None);
    metrics.finish(&RequestRecord { target_pod: None, ..record(Outcome::Success, 200) }, None);
    let mut fleet = fleet(&["d-0"]);
    fleet.models[0].routable = vec![(*pod("d-0")).clone(), (*pod("d-1")).clone()];
    fleet.models.push(ModelGauge { name: "adapter".into(), replicas: 2, ..ModelGauge::default() });
    let page = metrics.render(&fleet, Tick(0));
    let labels = |model: &str, pod: &str, more: &str| {
        format!(
            "engine_type=\"vllm\",gateway_pod=\"gw-0\",{more}model=\"{model}\",namespace=\"ns\",pod=\"{pod}\",role=\"decode\",\
             role_replica_index=\"0\",roleset=\"rs-0\"}}"
        )
    };
    let of_pod = |more: &str| labels("adapter", "d-0", more);
    let replica = |pod: &str| {
        let labels = labels("llama", pod, "").replace("model=\"llama\"", "model=\"llama\",model_name=\"llama\"");
        format!("model_replicas{{{labels}")
    };
    for (series, expected) in [
        (format!("gateway_ttft_bucket_total{{bucket=\"200-500ms\",{}", of_pod("")), Some(1.0)),
        (format!("gateway_prompt_token_bucket_total{{bucket=\"256-512\",{}", of_pod("")), Some(1.0)),
        (format!("gateway_input_tokens_total{{{}", of_pod("")), Some(256.0)),
        (format!("gateway_requests_with_usage_total{{{}", of_pod("has_usage=\"true\",")), Some(1.0)),
        (replica("d-0"), Some(1.0)),
        (replica("d-1"), Some(1.0)),
        ("tandem_routable_pods{model=\"llama\"}".to_owned(), Some(1.0)),
        ("tandem_routable_pods{model=\"adapter\"}".to_owned(), Some(2.0)),
    ] {
        assert_eq!(value(&page, &series), expected, "{series}\n{page}");
    }
    assert_eq!(page.matches("model_replicas{").count(), 2, "no second series under the name of an adapter");
    // Where no pod is known, its labels are empty.
    assert!(page.contains("gateway_total_time_bucket_total{bucket=\"1000-5000ms\",engine_type=\"\",gateway_pod=\"gw-0\",model=\"llama\",namespace=\"\""));
    // The pod goes, and its counters with it.
    fleet.pods.clear();
    fleet.models[0].routable.remove(0);
    let page = metrics.render(&fleet, Tick(0));
    assert!(!page.contains("\"d-0\""), "{page}");
    assert_eq!(value(&page, &replica("d-1")), Some(1.0));
}

#[test]
fn selections_by_prefixes_are_counted_as_the_reference_does() {
    let metrics = metrics();
    let routed = |selection: Option<(u8, u8, bool)>| PrefixRouting {
        model: "llama".into(),
        since: Tick(0),
        selection: selection.map(|(chosen, best, imbalanced)| PrefixSelection { chosen, best, imbalanced }),
    };
    for selection in [
        Some((0, 0, false)),
        Some((0, 40, false)),
        Some((1, 40, false)),
        Some((25, 25, true)),
        Some((26, 30, false)),
        Some((75, 75, false)),
        Some((76, 100, false)),
        Some((100, 100, false)),
        None,
    ] {
        metrics.prefix_routed(&routed(selection), Tick(50_000));
    }
    let page = metrics.render(&fleet(&["d-0"]), Tick(0));
    let counted = |name: &str, label: &str, value: &str| {
        let start = format!("aibrix_prefix_cache_{name}{{");
        let line = page.lines().find(|line| line.starts_with(&start) && line.contains(&format!("{label}=\"{value}\"")));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    for (bucket, times) in [("0", 2.0), ("1-25", 2.0), ("26-50", 1.0), ("51-75", 1.0), ("76-100", 2.0)] {
        assert_eq!(counted("routing_decisions_total", "match_percent_bucket", bucket), Some(times), "{bucket}");
    }
    for (method, times) in [("prefix_match", 6.0), ("prefix_match_skipped", 1.0), ("least_request_fallback", 1.0)] {
        assert_eq!(counted("routing_selection_total", "selection", method), Some(times), "{method}");
    }
    assert_eq!(counted("routing_errors_total", "reason", "no_target_pod"), Some(1.0));
    assert_eq!(counted("load_imbalance_total", "model", "llama"), Some(1.0));
    assert_eq!(counted("routing_latency_seconds_count", "using_kv_sync", "false"), Some(9.0));
    assert_eq!(counted("indexer_status", "indexer_type", "local"), Some(1.0));
    // 50 µs lie between 40 and 80.
    assert_eq!(counted("routing_latency_seconds_bucket", "le", "0.00004"), Some(0.0));
    assert_eq!(counted("routing_latency_seconds_bucket", "le", "0.00008"), Some(9.0));
}

#[test]
fn series_of_pods_that_left_are_gone() {
    let metrics = metrics();
    for name in ["a", "b"] {
        metrics.selected_pair(&pod(name), &pod(name));
        metrics.scrape_failed(&pod(name));
        let mut record = record(Outcome::Success, 200);
        record.target_pod = Some(pod(name));
        metrics.finish(&record, None);
    }
    let both = metrics.render(&fleet(&["a", "b"]), Tick(0));
    assert_eq!(both.matches("pod=\"a\"").count(), 4);
    assert_eq!(value(&both, "tandem_pod_decode_pending{namespace=\"ns\",pod_name=\"b\"}"), Some(3.0));
    metrics.forget_pod(&pod("b"));
    assert_eq!(metrics.families[Metric::SelectedDecode as usize].len(), 1);
    let one = metrics.render(&fleet(&["a"]), Tick(0));
    assert!(!one.contains("\"b\""), "{one}");
    assert_eq!(value(&one, "model_replicas{model=\"llama\"}"), Some(1.0));
    // Requests that found no pod keep their series.
    let mut lost = record(Outcome::Failed(Reason::NoRoutablePods), 503);
    lost.target_pod = None;
    metrics.finish(&lost, None);
    let none = metrics.render(&FleetGauges::default(), Tick(0));
    assert!(!none.contains("\"a\"") && !none.contains("model_replicas{"), "{none}");
    assert_eq!(none.matches("gateway_request_total{").count(), 1);
}

#[test]
fn values_that_run_together_stay_apart() {
    let metrics = metrics();
    let (mut one, mut other) = ((*pod("bc")).clone(), (*pod("c")).clone());
    (one.namespace, other.namespace) = ("a".into(), "ab".into());
    metrics.scrape_failed(&one);
    metrics.scrape_failed(&other);
    assert_eq!(metrics.families[Metric::EngineQueryFail as usize].len(), 2);
}

#[test]
fn a_metric_has_a_bounded_number_of_series() {
    let rejected = Cell::default();
    let family = Family::new(Metric::ModelReplicas.definition(), &["model"], &"gw".into(), &rejected);
    for number in 0..50_010_u32 {
        family.with(&[&number.to_string()]).add(1);
    }
    assert_eq!((family.len(), rejected.get()), (50_000, 10));
}

#[test]
fn the_age_of_the_snapshot_needs_one() {
    let metrics = metrics();
    let age = |now| {
        let page = metrics.render(&FleetGauges::default(), now);
        value(&page, "tandem_snapshot_age_seconds")
    };
    assert_eq!(age(Tick::from_millis(5000)), Some(0.0));
    metrics.snapshot_stored(Tick::from_millis(3500));
    assert_eq!(age(Tick::from_millis(5000)), Some(1.5));
    assert_eq!(age(Tick::from_millis(1)), Some(0.0));
}

#[test]
fn hostile_label_values_stay_inside_their_quotes() {
    let metrics = metrics();
    metrics.selection_failed(Some("a\"} 1\nevil_total 1"));
    let page = text(&metrics);
    assert!(!page.lines().any(|line| line.starts_with("evil_total")), "{page}");
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_request_ends_with_one_log_line() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().json().with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, || metrics().finish(&record(Outcome::Success, 200), None));
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(line["target"], "tandem::request");
    let fields = &line["fields"];
    assert_eq!(fields["request_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(fields["prefill_pod"], "ns/p-0");
    assert_eq!(fields["ttft_ms"], 200.0);
    assert_eq!(fields["completion_tokens"], 99);
    assert!(fields.get("single_reason").is_none());
}
