//! A real Prometheus that scrapes two replicas under traffic: every query of every dashboard is understood and has an
//! answer, and every rule can be evaluated.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};

use super::dashboards::{all_queries, filled};
use super::promql::Expression;
use super::{ALERTS, path};
use crate::harness::engines::{MODEL, Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, base};
use crate::harness::otlp::Collector;
use crate::harness::process::{Process, Start, tool};
use crate::harness::processor::closed_port;
use crate::harness::redis::Redis;
use crate::harness::{SOON, Task, eventually};

const CHAT: &str = "/v1/chat/completions";

/// Until all is scraped, on a machine that is busy.
const PATIENCE: Duration = Duration::from_mins(1);

/// Metrics that have no series in this test, and why not.
const QUIET: [(&str, &str); 18] = [
    ("tandem_rejected_total", "no limit is reached"),
    ("tandem_kubernetes_silence_seconds", "pods come from a file"),
    ("tandem_kubernetes_failures_total", "pods come from a file"),
    ("tandem_tls_certificate_expiry_timestamp_seconds", "no listener has TLS"),
    ("tandem_tls_handshake_failures_total", "no listener has TLS"),
    ("gateway_prefill_request_fail_total", "the engines answer"),
    ("gateway_pd_prefill_failure_total", "the engines answer"),
    ("gateway_pd_decode_watchdog_total", "the engines answer"),
    ("gateway_pd_decode_abort_total", "the engines answer, and are no SGLang"),
    ("tandem_retries_total", "the engines answer"),
    ("tandem_engine_metric_missing_total", "the engines' pages are whole"),
    ("tandem_token_load_forced_releases_total", "every request ends"),
    ("pd_bucket_serve_band_total", "bucket serving is off"),
    ("pd_bucket_serve_prompt_tokens_total", "bucket serving is off"),
    ("pd_bucket_serve_band_max", "bucket serving is off"),
    ("tandem_rate_limit_verdicts_total", "nobody is limited"),
    ("tandem_rate_limit_fallbacks_total", "nobody is limited"),
    ("tandem_rate_limit_settlements_total", "nobody is limited"),
];

/// Metrics that may have series or not.
const CHANCE: [(&str, &str); 2] = [
    ("tandem_routing_signal_missing_total", "the first requests may come before the first scrape"),
    ("llm_engine_metrics_query_fail", "a scrape may time out on a busy machine"),
];

pub struct Prometheus {
    process: Process,
    address: SocketAddr,
}

impl Prometheus {
    /// Starts it on a free port; it scrapes these replicas twice a second.
    async fn start(replicas: &[SocketAddr]) -> Prometheus {
        let targets: Vec<String> = replicas.iter().map(ToString::to_string).collect();
        Prometheus::start_with(&json!([{"job_name": "tandem", "static_configs": [{"targets": targets}]}])).await
    }

    /// The same with these scrape configurations.
    pub async fn start_with(scrape_configs: &Value) -> Prometheus {
        for _ in 0..5 {
            let address = closed_port();
            let mut start = Start::new("prometheus", tool("TANDEM_TEST_PROMETHEUS", "prometheus"));
            let config = start.directory().join("prometheus.yml");
            // JSON is YAML.
            let settings = json!({
                "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
                "rule_files": [path(ALERTS)],
                "scrape_configs": scrape_configs,
            });
            std::fs::write(&config, settings.to_string()).expect("write the configuration");
            let data = start.directory().join("data");
            start.arg("--config.file").arg(config).arg("--storage.tsdb.path").arg(data);
            start.args([&format!("--web.listen-address={address}"), "--enable-feature=exemplar-storage"]);
            let process = start.spawn();
            let up = eventually(PATIENCE, "prometheus listens", async || {
                if process.status().is_some() {
                    return Some(false);
                }
                let answer = Call::get(&base(address), "/-/ready").try_send().await.ok()?;
                (answer.status == 200).then_some(true)
            });
            if up.await {
                return Prometheus { process, address };
            }
            // Somebody else took the port, or it does not start at all, which the last try shows.
            assert!(process.logs().contains("address already in use"), "{}", process.logs());
        }
        panic!("no free port for Prometheus");
    }

    pub async fn get(&self, path: &str, parameters: &[(&str, &str)]) -> Value {
        let parameters: Vec<String> =
            parameters.iter().map(|(name, value)| format!("{name}={}", encoded(value))).collect();
        let answer = Call::get(&base(self.address), &format!("{path}?{}", parameters.join("&"))).send().await;
        let page = answer.json().await;
        assert_eq!(page["status"], "success", "{path} {parameters:?}: {page}\n{}", self.process.logs());
        page["data"].clone()
    }

    /// Does the query have a value that is a number?
    async fn has_data(&self, query: &str) -> bool {
        let data = self.get("/api/v1/query", &[("query", query)]).await;
        let result = data["result"].as_array().expect("a vector");
        result.iter().any(|sample| sample["value"][1].as_str().is_some_and(|value| value != "NaN"))
    }
}

fn encoded(text: &str) -> String {
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    text.bytes().map(|byte| if safe(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// Streams, whole answers and refusals, until it is dropped.
fn traffic(paths: Vec<String>) -> Task {
    Task::spawn(async move {
        for round in 0_u64.. {
            for path in &paths {
                let model = if round % 4 == 3 { "nobody-serves-this" } else { MODEL };
                let stream = round % 2 == 0;
                let mut body = json!({"model": model, "messages": [{"role": "user", "content": format!("{round}")}], "max_tokens": 4});
                if stream {
                    body["stream"] = true.into();
                    body["stream_options"] = json!({"include_usage": true});
                }
                if let Ok(answer) = Call::post(path, CHAT, body.to_string()).try_send().await {
                    answer.body().await;
                }
            }
        }
    })
}

/// Does the query name one of these?
fn names(query: &str, metrics: &[(&str, &str)]) -> bool {
    let expression = Expression::read(query).expect("a query");
    expression.selectors.iter().any(|selector| metrics.iter().any(|(metric, _)| *metric == selector.metric))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_panel_has_data_and_every_rule_is_evaluated() {
    let (redis, collector) = (Redis::start().await, Collector::start().await);
    let endpoint = base(collector.grpc());
    let env = [
        ("REDIS_URL", redis.url()),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
        ("OTEL_BSP_SCHEDULE_DELAY", "20".to_owned()),
        // So that tokens are counted on both sides.
        ("AIBRIX_PREFILL_SCORE_POLICY", "token_load".to_owned()),
        ("AIBRIX_DECODE_SCORE_POLICY", "token_load".to_owned()),
    ];
    let env = env.map(|(name, value)| (name.to_owned(), value)).to_vec();
    let fleet = FleetOptions { envoy: false, env, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let replicas: Vec<SocketAddr> = sandbox.fleet.tandems.iter().map(crate::harness::tandem::Tandem::http).collect();
    let fronts = sandbox.fleet.tandems.iter().filter_map(crate::harness::tandem::Tandem::front).map(base).collect();
    let prometheus = Prometheus::start(&replicas).await;
    let requests = traffic(fronts);

    let queries: BTreeSet<(String, String)> = all_queries()
        .into_iter()
        .map(|(place, query)| (place, filled(&query, "10s")))
        .filter(|(_, query)| !names(query, &CHANCE))
        .collect();
    let (silent, mut waiting): (Vec<_>, Vec<_>) = queries.into_iter().partition(|(_, query)| names(query, &QUIET));
    assert!(waiting.len() > 80, "{}", waiting.len());
    let limit = tokio::time::Instant::now() + PATIENCE;
    loop {
        let mut still = Vec::new();
        for (place, query) in waiting {
            if !prometheus.has_data(&query).await {
                still.push((place, query));
            }
        }
        waiting = still;
        if waiting.is_empty() {
            break;
        }
        assert!(tokio::time::Instant::now() < limit, "no data: {waiting:#?}");
        // The next scrape.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    for (place, query) in silent {
        assert!(!prometheus.has_data(&query).await, "{place} has data after all, take it off the list: {query}");
    }

    let evaluated = eventually(SOON, "all rules are evaluated", async || {
        let data = prometheus.get("/api/v1/rules", &[]).await;
        let groups = data["groups"].as_array()?;
        let rules: Vec<Value> =
            groups.iter().filter_map(|group| group["rules"].as_array()).flatten().cloned().collect();
        rules.iter().all(|rule| rule["health"] != "unknown").then_some(rules)
    });
    let rules = evaluated.await;
    assert_eq!(rules.len(), super::rules().len());
    let broken: Vec<&Value> = rules.iter().filter(|rule| rule["health"] != "ok").collect();
    assert!(broken.is_empty(), "{broken:#?}");
    let firing: Vec<&Value> = rules.iter().filter(|rule| rule["state"] == "firing").collect();
    assert!(firing.is_empty(), "a fleet that is well raises no alert: {firing:#?}");

    // From a point on a dashboard to a trace that the collector has.
    let found = eventually(SOON, "exemplars", async || {
        let query = [("query", "tandem_time_to_first_token_seconds_bucket"), ("start", "0"), ("end", "9999999999")];
        let data = prometheus.get("/api/v1/query_exemplars", &query).await;
        let id = data[0]["exemplars"][0]["labels"]["trace_id"].as_str()?.to_owned();
        Some(id)
    });
    let id = found.await;
    collector
        .wait_for("the trace of an exemplar", |spans| spans.iter().any(|span| span.trace_id == id).then_some(()))
        .await;
    drop(requests);
    sandbox.close().await;
}
