//! Engine metrics on their way into routing.

use std::time::Duration;

use serde_json::{Value, json};
use tandem_sim::{Cut, EngineConfig, Fault, MetricNames};

use super::{CHAT, chat, fleet_shows, front, pod};
use crate::harness::SOON;
use crate::harness::engines::{Backend, MODEL, Sandbox, SandboxOptions, pd_by_default, start_engine};
use crate::harness::fleet::Fleet;
use crate::harness::http::Call;
use crate::harness::oracle::oracle;
use crate::harness::pods::PodManifest;

/// A metrics page: each line a sample's name after `vllm:`, its labels and value.
fn page(lines: &[&str]) -> Fault {
    let comment = "# HELP vllm:num_requests_running Number of requests.\n";
    let text = lines.iter().fold(comment.to_owned(), |text, line| text + "vllm:" + line + "\n");
    Fault::on("/metrics").answer(200, "text/plain; version=0.0.4", text).always()
}

#[tokio::test(flavor = "multi_thread")]
async fn r54_old_and_new_names_of_engine_metrics() {
    const TOKENS: [&str; 2] =
        ["prompt_tokens_total{model_name=\"m\"} 5", "generation_tokens_total{model_name=\"m\"} 6"];
    let with_tokens = |lines: &[&'static str]| [lines, &TOKENS].concat();
    // Pod, what its page says, and what must be known of it: running, waiting, KV usage.
    let scripted: [(&str, Vec<&str>, Value); 6] = [
        (
            "new",
            with_tokens(&[
                "num_requests_running{engine=\"0\",model_name=\"m\"} 3",
                "num_requests_waiting{engine=\"0\",model_name=\"m\"} 2",
                "kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.5",
            ]),
            json!([3.0, 2.0, 0.5]),
        ),
        (
            "old",
            with_tokens(&[
                "num_requests_running{model_name=\"m\"} 4",
                "num_requests_waiting{model_name=\"m\"} 0",
                "gpu_cache_usage_perc{model_name=\"m\"} 0.25",
            ]),
            json!([4.0, 0.0, 0.25]),
        ),
        (
            "both",
            with_tokens(&[
                "gpu_cache_usage_perc{model_name=\"m\"} 0.25",
                "kv_cache_usage_perc{model_name=\"m\"} 0.75",
                "num_requests_running{model_name=\"m\"} 1",
                "num_requests_waiting{model_name=\"m\"} 1",
            ]),
            json!([1.0, 1.0, 0.75]),
        ),
        (
            "ranks",
            with_tokens(&[
                "num_requests_running{engine=\"0\",model_name=\"m\"} 3 1700000000000",
                "num_requests_running{engine=\"1\",model_name=\"m\"} 4 # {trace_id=\"x\"} 1",
                "num_requests_waiting{engine=\"0\",model_name=\"m\"} 1",
                "num_requests_waiting{engine=\"1\",model_name=\"m\"} 1",
                "kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.5",
            ]),
            json!([7.0, 2.0, 0.5]),
        ),
        (
            "nan",
            with_tokens(&[
                "num_requests_running{model_name=\"m\"} NaN",
                "num_requests_waiting{model_name=\"m\"} +Inf",
                "kv_cache_usage_perc{model_name=\"m\"} 0.5",
            ]),
            json!([null, null, 0.5]),
        ),
        ("renamed", vec!["requests_active{model_name=\"m\"} 3"], json!([null, null, null])),
    ];
    let mut pods = Vec::new();
    let mut engines = Vec::new();
    for (name, lines, _) in &scripted {
        let engine = start_engine(EngineConfig::combined(MODEL)).await;
        engine.script(page(lines));
        pods.push(PodManifest::new(name, MODEL, engine.address()).config(&pd_by_default()));
        engines.push(engine);
    }
    // What the simulated engine itself reports, in each generation's names.
    let generations = [
        ("sim-newest", MetricNames::Newest, true),
        ("sim-legacy", MetricNames::Legacy, false),
        ("sim-both", MetricNames::Both, true),
    ];
    for (name, metric_names, engine_label) in generations {
        let engine = start_engine(EngineConfig { metric_names, engine_label, ..EngineConfig::combined(MODEL) }).await;
        pods.push(PodManifest::new(name, MODEL, engine.address()).config(&pd_by_default()));
        engines.push(engine);
    }
    let fleet = Fleet::start(pods, front(&[])).await;
    let tandem = &fleet.tandems[0];
    let known = |page: &Value, name: &str| {
        let signals = &pod(page, name)["signals"];
        assert!(signals.is_object(), "{name} in {page}");
        (signals["fresh"] == true).then(|| json!([signals["running"], signals["waiting"], signals["kv_usage"]]))
    };
    let expected: Vec<(&str, Value)> = scripted
        .iter()
        .map(|(name, _, values)| (*name, values.clone()))
        .chain(generations.iter().map(|(name, ..)| (*name, json!([0.0, 0.0, 0.0]))))
        .collect();
    let all_known = |page: &Value| expected.iter().all(|(name, _)| known(page, name).is_some());
    let shown = fleet_shows(tandem, "all pods are scraped", all_known).await;
    for (name, values) in &expected {
        assert_eq!(known(&shown, name).as_ref(), Some(values), "{name}");
    }
    // Blindness is counted, under the newest name, and only where something is missing.
    let metrics = tandem.metrics().await;
    let missing: Vec<_> = metrics.matching("tandem_engine_metric_missing_total", &[]).collect();
    let mut names: Vec<&str> = missing.iter().map(|sample| sample.labels["metric"].as_str()).collect();
    names.sort_unstable();
    let all = [
        "generation_tokens_total",
        "kv_cache_usage_perc",
        "num_requests_running",
        "num_requests_waiting",
        "prompt_tokens_total",
    ];
    assert_eq!(names, all);
    assert!(missing.iter().all(|sample| sample.labels["engine"] == "vllm" && sample.value >= 1.0));
    let backends: Vec<&dyn Backend> = engines.iter().map(|engine| engine as &dyn Backend).collect();
    oracle(&fleet.tandems, &backends).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r55_a_pod_whose_metrics_stop_is_unknown_and_served_on() {
    const MAX_AGE_MS: f64 = 400.0;
    let env = [("TANDEM_METRIC_MAX_AGE_MS", "400"), ("TANDEM_SCRAPE_TIMEOUT_MS", "300")];
    let sandbox = Sandbox::start(SandboxOptions { fleet: front(&env), ..SandboxOptions::default() }).await;
    let (tandem, path) = (&sandbox.fleet.tandems[0], sandbox.paths().remove(0));
    let fresh = |page: &Value, name: &str| pod(page, name)["signals"]["fresh"] == true;
    fleet_shows(tandem, "both are known", |page| fresh(page, "p0") && fresh(page, "d0")).await;
    let silences: [Fault; 4] = [
        Fault::on("/metrics").answer(503, "text/plain", "starting"),
        Fault::on("/metrics").head_delay(Duration::from_mins(10)),
        Fault::on("/metrics").cut_before_head(Cut::Reset),
        Fault::on("/metrics").stall_after(1),
    ];
    for silence in silences {
        let failures = |metrics: &crate::harness::metrics::Metrics| {
            let labels =
                [("pod", "d0"), ("role", "decode"), ("roleset", "rs0"), ("model", "m"), ("namespace", "default")];
            metrics.sum("llm_engine_metrics_query_fail", &labels)
        };
        let before = failures(&tandem.metrics().await);
        sandbox.decode[0].script(silence.always());
        let page = fleet_shows(tandem, "the decode pod is unknown", |page| !fresh(page, "d0")).await;
        let age = pod(&page, "d0")["signals"]["age_ms"].as_f64().expect("an age");
        assert!(age >= MAX_AGE_MS, "{age}");
        // Unknown is neither gone nor idle: it stays in the set, and requests go on.
        assert_eq!(pod(&page, "d0")["routable"], true);
        let answer = Call::post(&path, CHAT, chat(true, 4)).send().await;
        assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "d0"));
        assert!(answer.events().collect().await.1);
        let old = |metrics: &crate::harness::metrics::Metrics| {
            let age = metrics.sum("tandem_pod_metrics_age_seconds", &[("namespace", "default"), ("pod_name", "d0")]);
            age >= MAX_AGE_MS / 1000.0 && failures(metrics) > before
        };
        tandem.wait_metrics(SOON, "age and failures show", old).await;
        sandbox.decode[0].clear_faults();
        fleet_shows(tandem, "it is known again", |page| fresh(page, "d0")).await;
    }
    sandbox.close().await;
}
