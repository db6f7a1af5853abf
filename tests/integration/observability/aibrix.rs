//! AIBrix's own dashboard over ours: each of its queries, in a real Prometheus that scrapes as its ServiceMonitor says, with
//! a fleet of vLLM and SGLang under traffic.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Fault};

use super::prometheus::Prometheus;
use super::read;
use crate::harness::engines::{described, pd_by_default, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::{Call, base};
use crate::harness::pods::PodManifest;
use crate::harness::redis::Redis;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, Task, eventually};

const CHAT: &str = "/v1/chat/completions";

/// Until all is scraped, on a machine that is busy.
const PATIENCE: Duration = Duration::from_mins(1);

/// Panels that read what the kubelet and kube-state-metrics tell.
const NOT_OURS: [&str; 4] = [
    "aibrix component cpu usage ratio",
    "gateway memory utilization",
    "aibrix component memory used",
    "component network",
];

/// The panels and their queries, everything chosen.
fn queries() -> Vec<(String, String)> {
    let table = read("tests/data/aibrix-gateway-dashboard.tsv");
    let rows = table.lines().filter(|line| !line.starts_with('#')).map(|line| line.split_once('\t').expect("a tab"));
    rows.map(|(panel, query)| (panel.to_owned(), query.replace("$model", ".*"))).collect()
}

/// The label sets and values of an answer.
async fn ask(prometheus: &Prometheus, query: &str) -> Vec<(BTreeMap<String, String>, f64)> {
    // What waits for an answer is large, and a test that asks often would hold it many times on its stack.
    let data = Box::pin(prometheus.get("/api/v1/query", &[("query", query)])).await;
    let samples = data["result"].as_array().expect("a vector");
    let read = |sample: &Value| {
        let labels = serde_json::from_value(sample["metric"].clone()).expect("labels");
        (labels, sample["value"][1].as_str().and_then(|text| text.parse().ok()).expect("a number"))
    };
    samples.iter().map(read).collect()
}

async fn number(prometheus: &Prometheus, query: &str) -> Option<f64> {
    ask(prometheus, query).await.first().map(|(_, value)| *value).filter(|value| value.is_finite())
}

/// As a ServiceMonitor with this endpoint scrapes: the job is the service, targets have the labels of the gateway's pods.
fn scrape_config(fleet: &Fleet, endpoint: &Value) -> Value {
    let targets: Vec<Value> = fleet
        .tandems
        .iter()
        .enumerate()
        .map(|(index, tandem)| {
            let labels = json!({
                "namespace": "aibrix-system",
                "service": "aibrix-gateway-plugins",
                "pod": format!("aibrix-gateway-plugins-{index}"),
                "container": "gateway-plugin",
                "endpoint": "metrics",
            });
            json!({"targets": [tandem.http().to_string()], "labels": labels})
        })
        .collect();
    let relabelings = endpoint["metricRelabelings"].as_array().map_or(&[][..], Vec::as_slice);
    let relabelings: Vec<Value> = relabelings
        .iter()
        .map(|one| json!({"source_labels": one["sourceLabels"], "regex": one["regex"], "target_label": one["targetLabel"]}))
        .collect();
    json!([{
        "job_name": "aibrix-gateway-plugins",
        "honor_labels": endpoint["honorLabels"] == true,
        "metric_relabel_configs": relabelings,
        "static_configs": targets,
    }])
}

/// The endpoint of our ServiceMonitor.
fn our_endpoint() -> Value {
    let monitor: Value =
        serde_saphyr::from_str(&read("deploy/kubernetes/monitoring/service-monitor.yaml")).expect("YAML");
    monitor["spec"]["endpoints"][0].clone()
}

/// 16 pods: of each model two or four pairs, and four that do both.
async fn engines() -> (Vec<(PodManifest, Engine)>, Vec<String>) {
    let mut all = Vec::new();
    let pd = pd_by_default();
    for (model, pairs, sglang) in [("v", 4, false), ("s", 2, true)] {
        for index in 0..pairs {
            let roleset = format!("{model}-rs{index}");
            for (role, config) in [("prefill", EngineConfig::prefill(model)), ("decode", EngineConfig::decode(model))] {
                let engine = start_engine(if sglang { config.sglang() } else { config }).await;
                let name = format!("{model}-{role}-{index}");
                let pod = PodManifest::new(&name, model, Engine::address(&engine)).role(&roleset, role).config(&pd);
                all.push((described(pod, &engine), engine));
            }
        }
    }
    let prefix = json!({"profiles": {"default": {"routingStrategy": "prefix-cache"}}});
    for index in 0..4 {
        let engine = start_engine(EngineConfig::combined("c")).await;
        let pod = PodManifest::new(&format!("c-{index}"), "c", Engine::address(&engine)).config(&prefix);
        all.push((described(pod, &engine), engine));
    }
    let names = all.iter().map(|(pod, _)| pod.name().to_owned()).collect();
    (all, names)
}

fn body(model: &str, round: u64, stream: bool) -> String {
    let text = format!("{} {}", "the same beginning ".repeat(40), round % 7);
    let mut body = json!({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4});
    if stream {
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
    }
    body.to_string()
}

/// Streams, whole answers and refusals, until it is dropped.
fn traffic(paths: Vec<String>) -> Task {
    Task::spawn(async move {
        for round in 0_u64.. {
            for path in &paths {
                let model = ["v", "s", "c", "nobody-serves-this"][(round % 4) as usize];
                if let Ok(answer) = Call::post(path, CHAT, body(model, round, round % 3 > 0)).try_send().await {
                    answer.body().await;
                }
            }
        }
    })
}

/// Waits until each of the queries has data.
async fn all_fill(prometheus: &Prometheus, mut waiting: Vec<(String, String)>) {
    let limit = tokio::time::Instant::now() + PATIENCE;
    while !waiting.is_empty() {
        let mut still = Vec::new();
        for (panel, query) in waiting {
            if number(prometheus, &query).await.is_none() {
                still.push((panel, query));
            }
        }
        waiting = still;
        assert!(waiting.is_empty() || tokio::time::Instant::now() < limit, "no data: {waiting:#?}");
        // The next scrape.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_panel_of_aibrix_s_gateway_dashboard_fills() {
    let redis = Box::pin(Redis::start()).await;
    let (pods, names) = Box::pin(engines()).await;
    let engine = |name: &str| &pods.iter().find(|(pod, _)| pod.name() == name).expect("a pod").1;
    let env = vec![("REDIS_URL".to_owned(), redis.url())];
    let options = FleetOptions { envoy: false, env, ..FleetOptions::default() };
    let mut fleet = Box::pin(Fleet::start(pods.iter().map(|(pod, _)| pod.clone()), options)).await;
    // AIBrix's ServiceMonitor says nothing of labels, so that what a sample says of `pod` comes after `exported_`.
    let prometheus = Box::pin(Prometheus::start_with(&scrape_config(&fleet, &json!({})))).await;
    let with_ours = Box::pin(Prometheus::start_with(&scrape_config(&fleet, &our_endpoint()))).await;
    let fronts: Vec<String> = fleet.tandems.iter().filter_map(Tandem::front).map(base).collect();
    // So that a prefill leg fails; what it had counted before, nothing could have seen grow.
    let refusal = || Fault::on(CHAT).answer(400, "application/json", r#"{"error":{"message":"no"}}"#).times(2);
    engine("v-prefill-0").script(refusal());
    let requests = traffic(fronts.clone());
    let (others, ours): (Vec<_>, Vec<_>) =
        queries().into_iter().partition(|(panel, _)| NOT_OURS.contains(&panel.as_str()));
    let panels: BTreeSet<&str> = ours.iter().map(|(panel, _)| panel.as_str()).collect();
    assert_eq!((panels.len(), others.len()), (32, 5), "the table was read");
    Box::pin(all_fill(&prometheus, ours.clone())).await;
    Box::pin(all_fill(&with_ours, ours)).await;
    assert_eq!(number(&with_ours, "count(group by (exported_pod) (model_replicas))").await, Some(16.0));

    // What can be known.
    let one = |query: &str, expected: f64| {
        let query = query.replace("$model", ".*");
        let prometheus = &prometheus;
        Box::pin(async move {
            eventually(SOON, &format!("{query} is {expected}"), async || {
                (number(prometheus, &query).await == Some(expected)).then_some(())
            })
            .await;
        })
    };
    let of_role = |role: &str| format!("count(group by (exported_pod) (model_replicas{{role=\"{role}\"}}))");
    one("count(group by (exported_pod) (model_replicas))", 16.0).await;
    one(&of_role("prefill"), 6.0).await;
    one(&of_role("decode"), 6.0).await;
    one("count(group by (exported_pod) (model_replicas{model_name=~\"$model\", role!~\"prefill|decode\"}))", 4.0).await;
    let by_role =
        ask(&prometheus, "count by (role) (group by (exported_pod, role) (model_replicas{role=~\"prefill|decode\"}))")
            .await;
    let by_role: BTreeMap<String, f64> =
        by_role.into_iter().map(|(labels, count)| (labels["role"].clone(), count)).collect();
    assert_eq!(by_role, [("decode".to_owned(), 6.0), ("prefill".to_owned(), 6.0)].into());
    let usage = ask(&prometheus, "max by (exported_pod, role) (kv_cache_usage_perc{model=~\".*\"})").await;
    let shown: BTreeSet<&str> = usage.iter().map(|(labels, _)| labels["exported_pod"].as_str()).collect();
    assert_eq!(shown, names.iter().map(String::as_str).collect());
    let asleep = ask(&prometheus, "max by (exported_pod, role) (engine_sleep_state{model=~\".*\"})").await;
    assert_eq!(
        (asleep.len(), asleep.iter().map(|(_, value)| *value).sum::<f64>()),
        (12, 0.0),
        "vLLM's engines are awake"
    );
    let hits = "100 * sum(rate(aibrix_prefix_cache_routing_decisions_total{match_percent_bucket!=\"0\"}[1m])) / clamp_min(sum(rate(aibrix_prefix_cache_routing_decisions_total[1m])), 1e-9)";
    let rate = number(&prometheus, hits).await.expect("a rate");
    assert!((50.0..=100.0).contains(&rate), "prompts are alike: {rate}");

    // Nothing runs, then three requests do, in the pods that do both.
    drop(requests);
    let running = |role: &str| {
        format!(
            "sum(max by (exported_pod, model_name) (num_requests_waiting{{job=\"aibrix-gateway-plugins\", role{role}}} and on(exported_pod) model_replicas{{role{role}}} == 1))"
        )
    };
    let (single, prefill) = (running("!~\"prefill|decode\""), running("=\"prefill\""));
    one("sum(gateway_model_in_flight_requests)", 0.0).await;
    one(&single, 0.0).await;
    let holds: Vec<_> = (0..4).map(|index| engine(&format!("c-{index}")).hold()).collect();
    let held: Vec<_> =
        (0..3).map(|round| tokio::spawn(Call::post(&fronts[0], CHAT, body("c", round, false)).try_send())).collect();
    one(&single, 3.0).await;
    one(&prefill, 0.0).await;
    one("sum(gateway_model_in_flight_requests{model=~\"$model\"})", 3.0).await;
    one("sum(max by (exported_pod) (realtime_num_requests_running))", 3.0).await;
    holds.into_iter().for_each(tandem_sim::Hold::release);
    for answer in held {
        assert_eq!(answer.await.expect("ended").expect("an answer").status, 200);
    }
    one(&single, 0.0).await;
    // Each success is in one bucket of one pod, on whichever replica.
    let successes = number(&prometheus, "sum(gateway_request_model_success_total)").await.expect("a number");
    one("sum(gateway_prompt_token_bucket_total{exported_pod!=\"\"})", successes).await;
    one("sum(gateway_total_time_bucket_total{exported_pod!=\"\"})", successes).await;

    // A pod goes, and what was shown of it.
    fleet.pods.remove("v-decode-3");
    one("count(group by (exported_pod) (model_replicas))", 15.0).await;
    for metric in [
        "num_requests_running",
        "kv_cache_usage_perc",
        "gateway_total_time_bucket_total",
        "e2e_request_latency_seconds_p50",
    ] {
        let gone = format!("{metric}{{exported_pod=\"v-decode-3\"}}");
        eventually(SOON, &gone, async || ask(&prometheus, &gone).await.is_empty().then_some(())).await;
    }
}
