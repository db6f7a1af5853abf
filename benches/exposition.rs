//! What one look at `/metrics` costs with many pods, by label set: `cargo bench --bench exposition [PODS]` (400).
//!
//! Half of the pods prefill, half decode; their engines' pages have the names of vLLM 0.32, all histograms with twenty
//! borders. Each decode pod has answered 200 requests of all sizes and speeds. Prints the best of eleven looks.
#![allow(missing_docs, clippy::unwrap_used, clippy::disallowed_methods)]

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem::clock::Tick;
use tandem::fleet::Engine;
use tandem::knobs::MetricLabels;
use tandem::response::Usage;
use tandem::scrape::export_page;
use tandem::telemetry::{
    EngineGauge, FleetGauges, Metrics, ModelGauge, Outcome, PodGauge, PodLabels, RequestRecord, Timings,
};

const MODEL: &str = "meta-llama/Llama-3.1-70B-Instruct";
const LOOKS: usize = 11;
const REQUESTS: u64 = 200;

const GAUGES: [&str; 4] =
    ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"];
const COUNTERS: [&str; 8] = [
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "nixl_num_failed_transfers",
    "nixl_num_failed_notifications",
];
const HISTOGRAMS: [&str; 20] = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
    "nixl_xfer_time_seconds",
    "nixl_post_time_seconds",
    "nixl_bytes_transferred",
    "nixl_num_descriptors",
];

fn main() {
    let pods: usize = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(400);
    let page = engine_page();
    println!("{pods} pods, {} bytes on each engine's page", page.len());
    println!("{:>8} {:>9} {:>11} {:>12} {:>12}", "labels", "series", "bytes", "read, ms", "write, ms");
    for (name, labels) in [("lean", MetricLabels::Lean), ("aibrix", MetricLabels::Aibrix), ("full", MetricLabels::Full)]
    {
        let metrics = Metrics::labelled("aibrix-gateway-plugins-7d9c5b6f4-x2x9z", labels);
        let names: Vec<PodLabels> = (0..pods).map(pod).collect();
        for pod in names.iter().filter(|pod| pod.role == "decode") {
            (0..REQUESTS).for_each(|number| metrics.finish(&answered(pod, number), None));
        }
        let mut fleet = fleet(&names);
        let (mut read, mut write, mut text) = (Duration::MAX, Duration::MAX, String::new());
        for _ in 0..LOOKS {
            let start = Instant::now();
            if labels.per_pod() {
                fleet.engines = engines(&names, &page);
            }
            read = read.min(start.elapsed());
            let start = Instant::now();
            text = metrics.render(&fleet, Tick(1));
            write = write.min(start.elapsed());
        }
        let series = text.lines().filter(|line| !line.starts_with('#')).count();
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        println!("{name:>8} {series:>9} {:>11} {:>12.1} {:>12.1}", text.len(), millis(read), millis(write));
    }
}

fn pod(index: usize) -> PodLabels {
    let role = if index.is_multiple_of(2) { "prefill" } else { "decode" };
    PodLabels {
        namespace: "inference".into(),
        pod: format!("llama-70b-pool-roleset-{}-{role}-7c9b8d6f5-{index:05}", index / 2),
        model: MODEL.into(),
        engine_type: "vllm".into(),
        roleset: format!("llama-70b-pool-roleset-{}", index / 2),
        role: role.into(),
        role_replica_index: "0".into(),
    }
}

/// A request whose tokens and times fall into other buckets than those of its neighbours.
fn answered(pod: &PodLabels, number: u64) -> RequestRecord {
    let at = |millis: u64| Some(Tick::from_millis(millis));
    let (prefill, stream) = (1 << (number % 12), 1 << (number % 16));
    RequestRecord {
        model: Some(MODEL.into()),
        target_pod: Some(Arc::new(pod.clone())),
        stream: true,
        status: 200,
        outcome: Outcome::Success,
        usage: Some(Usage {
            prompt_tokens: 16 << (number % 13),
            completion_tokens: 16 << (number % 9),
            ..Usage::default()
        }),
        timings: Timings {
            received: Tick::from_millis(1000),
            routed: at(1001),
            prefill_start: at(1001 + number % 3),
            prefill_end: at(1003 + prefill),
            handed_over: at(1003 + prefill),
            answer_head: at(1004 + prefill),
            first_chunk: at(1004 + prefill + number % 64),
            last_chunk: at(1100 + prefill + stream),
            ended: at(1100 + prefill + stream),
        },
        ..RequestRecord::empty()
    }
}

fn fleet(names: &[PodLabels]) -> FleetGauges {
    let gauge = |pod: &PodLabels| PodGauge {
        namespace: Arc::from(&*pod.namespace),
        name: Arc::from(&*pod.pod),
        prefills: 1,
        running: 2,
        pending: 3,
        metrics_age: Some(Duration::from_millis(40)),
        tokens: None,
    };
    let model =
        ModelGauge { name: MODEL.into(), replicas: names.len(), routable: names.to_vec(), ..ModelGauge::default() };
    FleetGauges {
        snapshot_version: 1,
        models: vec![model],
        pods: names.iter().map(gauge).collect(),
        ..FleetGauges::default()
    }
}

fn engines(names: &[PodLabels], page: &str) -> Vec<EngineGauge> {
    let gauge = |pod: &PodLabels| EngineGauge {
        labels: pod.clone(),
        values: export_page(page.as_bytes(), Engine::Vllm, MODEL),
    };
    names.iter().map(gauge).collect()
}

fn engine_page() -> String {
    let labels = format!("engine=\"0\",model_name=\"{MODEL}\"");
    let mut page = String::new();
    for name in GAUGES {
        writeln!(page, "# HELP vllm:{name} Some help.\n# TYPE vllm:{name} gauge\nvllm:{name}{{{labels}}} 3.0").unwrap();
    }
    for state in ["awake", "weights_offloaded", "discard_all"] {
        writeln!(page, "vllm:engine_sleep_state{{{labels},sleep_state=\"{state}\"}} 0.0").unwrap();
    }
    for name in COUNTERS {
        writeln!(page, "# TYPE vllm:{name}_total counter\nvllm:{name}_total{{{labels}}} 1389206.0").unwrap();
    }
    for name in HISTOGRAMS
        .map(|name| format!("vllm:{name}"))
        .iter()
        .map(String::as_str)
        .chain(["http_request_duration_seconds"])
    {
        writeln!(page, "# HELP {name} Histogram of something.\n# TYPE {name} histogram").unwrap();
        for border in 1..=20 {
            writeln!(
                page,
                "{name}_bucket{{engine=\"0\",le=\"{border}.0\",model_name=\"{MODEL}\"}} {}.0",
                border * 1000
            )
            .unwrap();
        }
        writeln!(page, "{name}_bucket{{engine=\"0\",le=\"+Inf\",model_name=\"{MODEL}\"}} 21000.0").unwrap();
        writeln!(page, "{name}_count{{{labels}}} 21000.0\n{name}_sum{{{labels}}} 51595.25").unwrap();
    }
    page
}
