//! The trace in real time: simulated engines, a gateway and its HTTP front in this process.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::json;
use tandem::app::{Gateway, Options, Source};
use tandem::knobs::{Drain, Knobs, Report};
use tandem::replay::{EngineModel, FleetShape, Request, Trace};
use tandem::rng::Rng;
use tandem_sim::{BYTES_PER_TOKEN, Capacity, Engine, EngineConfig, Timing};
use tokio::task::JoinSet;

const MODEL: &str = "ranked";
/// Time-outs are not the point here.
const NEVER: Duration = Duration::from_mins(5);

type HttpClient = Client<HttpConnector, Full<Bytes>>;

/// The simulator's terms for the parameters: its first sequence is in the fixed part of a step.
fn config(config: EngineConfig, engine: &EngineModel, cache: f64) -> EngineConfig {
    let millis = |value: f64| Duration::from_secs_f64(value / 1e3);
    let timing = Timing {
        prefill_base: millis(engine.prefill_ms),
        prefill_tokens_per_second: 1e6 / engine.prefill_us_per_token,
        decode_base: millis(engine.step_ms + engine.step_us_per_sequence / 1e3),
        decode_per_sequence: millis(engine.step_us_per_sequence / 1e3),
        transfer_base: millis(engine.transfer_ms),
        transfer_per_1k_tokens: millis(engine.transfer_us_per_token),
        ..Timing::instant()
    };
    let max_running = engine.max_batch as usize;
    let capacity = Capacity { kv_tokens: cache as u64, max_model_len: 131_072, max_running, prefix_cache: true };
    config.timing(timing).capacity(capacity).lease(NEVER)
}

async fn start_engines(shape: FleetShape, model: &EngineModel) -> Result<(Vec<Engine>, String)> {
    let mut engines = Vec::new();
    let mut manifests = String::new();
    for index in 0..shape.prefill.max(shape.decode) {
        for (role, count, plain, cache) in [
            ("prefill", shape.prefill, EngineConfig::prefill(MODEL), model.prefix_cache_tokens),
            ("decode", shape.decode, EngineConfig::decode(MODEL), model.kv_tokens),
        ] {
            if index >= count {
                continue;
            }
            let engine = tandem_sim::start(config(plain, model, cache)).await?;
            write!(
                manifests,
                "---\napiVersion: v1\nkind: Pod\nmetadata:\n  name: {role}-{index}\n  labels:\n    \
                 model.aibrix.ai/name: {MODEL}\n    model.aibrix.ai/port: \"{}\"\n    role-name: {role}\n    \
                 roleset-name: roleset-{}\nstatus:\n  podIP: {}\n",
                engine.address().port(),
                index % shape.rolesets,
                engine.address().ip(),
            )?;
            engines.push(engine);
        }
    }
    Ok((engines, manifests))
}

/// The text of a request: each block's own, so that equal prefixes are equal texts.
fn prompt(request: &Request, number: usize, block_tokens: u64) -> String {
    let own = [number as u64];
    let blocks = if request.hashes.is_empty() { &own } else { &*request.hashes };
    let bytes = block_tokens as usize * BYTES_PER_TOKEN;
    let block = |hash: &u64| {
        let mut rng = Rng::new(*hash);
        (0..bytes).map(|_| char::from(b'a' + rng.below(26) as u8)).collect::<String>()
    };
    blocks.iter().map(block).collect()
}

/// Sends a request; the time to its first token.
async fn send(client: HttpClient, url: String, body: String) -> Result<Duration> {
    let request = http::Request::post(url).header("routing-strategy", "pd").body(Full::new(Bytes::from(body)))?;
    let sent = Instant::now();
    let answer = client.request(request).await.context("no answer")?;
    let status = answer.status();
    let mut body = answer.into_body();
    let mut first = None;
    let mut last = Bytes::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.context("the answer broke off")?.into_data() {
            first.get_or_insert_with(|| sent.elapsed());
            last = data;
        }
    }
    ensure!(
        status == 200 && last.ends_with(b"data: [DONE]\n\n"),
        "status {status}: {}",
        String::from_utf8_lossy(&last)
    );
    first.context("an empty answer")
}

/// Runs the trace; the mean time to first token, seconds.
pub async fn mean_ttft(
    trace: &Trace,
    shape: FleetShape,
    engine: &Arc<EngineModel>,
    (mut knobs, report): (Knobs, Report),
) -> Result<f64> {
    knobs.drain = Drain { propagation: Duration::ZERO, timeout: Duration::from_secs(5) };
    let (engines, manifests) = start_engines(shape, engine).await?;
    let local = || "127.0.0.1:0".to_owned();
    let options = Options { grpc: local(), http: local(), front: Some(local()), source: Source::Manifests(manifests) };
    let gateway = Gateway::start(options, knobs, report, None).await?;
    let url = format!("http://{}/v1/completions", gateway.addresses().front.context("no front")?);
    let client: HttpClient = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
    let bodies: Vec<String> = trace
        .requests
        .iter()
        .enumerate()
        .map(|(number, request)| {
            let prompt = prompt(request, number, trace.block_tokens);
            json!({"model": MODEL, "prompt": prompt, "max_tokens": request.output, "stream": true}).to_string()
        })
        .collect();
    // The engines' metrics are scraped before the first request comes.
    let start = tokio::time::Instant::now() + Duration::from_secs(2);
    let mut running = JoinSet::new();
    for (request, body) in trace.requests.iter().zip(bodies) {
        tokio::time::sleep_until(start + request.at).await;
        running.spawn(send(client.clone(), url.clone(), body));
    }
    let mut sum = Duration::ZERO;
    while let Some(ended) = running.join_next().await {
        sum += ended??;
    }
    gateway.drain().await;
    for engine in &engines {
        engine.stop().await;
    }
    Ok(sum.as_secs_f64() / trace.requests.len() as f64)
}
