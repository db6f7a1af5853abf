//! An installation that was carried over by hand: replicas with the environment of AIBrix's own manifests, pods with AIBrix's
//! labels, Redis, and the shipped file before them. It works as well as one of ours.

use serde_json::{Value, json};
use tandem_sim::{Capacity, Limits};

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, base};
use crate::harness::redis::Redis;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually};

const PATH: &str = "/v1/chat/completions";

/// What both forms of AIBrix 0.7 give the container, beside the address of Redis and the pod's name and namespace.
const COMMON: &[(&str, &str)] = &[
    ("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "50"),
    ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "character"),
    ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "128"),
    ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "16"),
    ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "2"),
    ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "60"),
    ("AIBRIX_STATESYNC_ENABLED", "false"),
    ("POD_NAMESPACE", "aibrix-system"),
];
/// What the kustomization adds, its overlay for releases included.
const KUSTOMIZATION: &[(&str, &str)] = &[
    ("AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED", "false"),
    ("AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER", "false"),
    ("AIBRIX_GPU_OPTIMIZER_TRACING_FLAG", "false"),
    ("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", "200000"),
];
/// What the chart adds.
const CHART: &[(&str, &str)] = &[("AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES", "4194304")];

/// A debug build on a busy machine may need more than the shipped 5 s for a long message.
fn without_hurry(config: &mut Value) {
    let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0];
    manager["typed_config"]["http_filters"][0]["typed_config"]["message_timeout"] = "30s".into();
}

async fn carried_over(redis: &Redis, added: &[(&str, &str)]) -> Sandbox {
    let (host, port) = (redis.address().ip().to_string(), redis.address().port().to_string());
    let options = SandboxOptions {
        pairs: 4,
        engine: |mut config| {
            config.limits = Limits { body_bytes: 80 << 20, ..config.limits };
            let capacity = Capacity { max_model_len: 4 << 20, kv_tokens: 8 << 20, ..config.capacity };
            config.capacity(capacity)
        },
        fleet: FleetOptions { edit_envoy: Some(without_hurry), ..FleetOptions::default() },
        ..SandboxOptions::default()
    };
    let sandbox = options.env(COMMON).env(added).env(&[("REDIS_HOST", &host), ("REDIS_PORT", &port)]);
    let sandbox = Sandbox::start(sandbox).await;
    for tandem in &sandbox.fleet.tandems {
        eventually(SOON, "the replicas to meet", async || {
            let page = tandem.admin_json("/debug/state").await;
            page["models"].as_object()?.values().all(|model| model["members"] == 2).then_some(())
        })
        .await;
    }
    sandbox
}

fn chat(base: &str, text: &str, image: usize) -> Call {
    let image = "A".repeat(image);
    let body = json!({"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": [
        {"type": "text", "text": text},
        {"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{image}")}},
    ]}]});
    Call::post(base, PATH, body.to_string())
}

/// The prefill pod that a request of this text went to.
async fn prefilled_by(base: &str, text: &str) -> String {
    let answer = chat(base, text, 4).send().await;
    assert_eq!(answer.status, 200, "{text:.20}");
    let pod = answer.header("prefill-target-pod").to_owned();
    answer.body().await;
    pod
}

/// How many blocks of prompts a replica knows somewhere.
async fn blocks(tandem: &Tandem) -> f64 {
    tandem.metrics().await.sum("tandem_prefix_index_entries", &[])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_environment_of_aibrix_costs_nothing_that_is_not_said() {
    for (manifest, added, costs) in [
        ("kustomization", KUSTOMIZATION, &["AIBRIX_STATESYNC_ENABLED", "AIBRIX_PREFIX_CACHE_BLOCK_NUMBER"][..]),
        ("chart", CHART, &["AIBRIX_STATESYNC_ENABLED", "AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES"]),
    ] {
        let redis = Redis::start().await;
        let sandbox = carried_over(&redis, added).await;
        let envoy = sandbox.fleet.envoy.as_ref().expect("Envoy").base();
        // What one replica finds out about prefixes, the other goes by: chance alone would agree once in 4^6.
        let [one, two] = &sandbox.fleet.tandems[..] else { panic!("two replicas") };
        let fronts = [one, two].map(|tandem| base(tandem.front().expect("a front")));
        for prompt in 0..6 {
            let text = format!("{prompt} once upon a time ").repeat(200);
            let before = blocks(two).await;
            let pod = prefilled_by(&fronts[0], &text).await;
            eventually(SOON, "the prefix", async || (blocks(two).await > before).then_some(())).await;
            assert_eq!(prefilled_by(&fronts[1], &text).await, pod, "{manifest}: prompt {prompt}");
        }

        for pair in 0..4 {
            let answer = chat(&envoy, "long", (6 << 20) + pair).send().await;
            assert_eq!(answer.status, 200, "{manifest}: a body of 6 MiB");
            assert!(answer.header("prefill-target-pod").starts_with('p'), "{manifest}: it was split");
            answer.body().await;
        }

        let log = one.process().stderr();
        for variable in costs {
            let lines = log.lines().filter(|line| line.contains(&format!("{variable} is ")));
            assert_eq!(lines.count(), 1, "{manifest}: {variable}\n{log}");
        }
        assert_eq!(one.metrics().await.sum("tandem_config_errors", &[]), 0.0, "{manifest}");
        sandbox.close().await;
    }
}
