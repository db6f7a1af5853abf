//! `tandem quickstart`: simulated engines, a gateway and its HTTP front in one process.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use clap::Args;
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use tandem_sim::{Engine, EngineConfig, Record, Timing};

use crate::app::{Gateway, Options, Source};
use crate::clock::Clock;
use crate::engines::leg::EngineClient;
use crate::knobs::{Drain, Knobs, ProcessEnvironment};
use crate::telemetry::{Tracing, init_logging};

const MODEL: &str = "demo";
const BODY: &str = r#"{"model": "demo", "stream": true, "max_tokens": 12, "stream_options": {"include_usage": true}, "messages": [{"role": "user", "content": "What is the capital of France, and why?"}]}"#;

/// Two prefill and two decode engines (simulated vLLM), a gateway with local state, and its OpenAI front. Environment
/// variables work as for `serve`.
#[derive(Debug, Args)]
pub struct QuickstartArgs {
    /// Address of the front.
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: String,
    /// Send one streamed request, print each leg with its time, and exit. Takes a free port unless --listen is given.
    #[arg(long)]
    once: bool,
}

struct Pod {
    name: String,
    role: &'static str,
    roleset: String,
    engine: Engine,
}

/// Runs it.
pub async fn run(args: QuickstartArgs) -> Result<()> {
    let (mut knobs, report) = Knobs::read(&ProcessEnvironment)?;
    knobs.drain = Drain { propagation: Duration::ZERO, timeout: Duration::from_secs(5) };
    if args.once {
        // What is printed is the request; the log would be noise around it.
        "warn".clone_into(&mut knobs.log.filter);
    }
    let tracing = Tracing::start(&knobs.otel)?;
    init_logging(&knobs.log, tracing.as_ref())?;
    let pods = start_engines().await?;
    let front = if args.once && args.listen == "127.0.0.1:8000" { "127.0.0.1:0".to_owned() } else { args.listen };
    let options = Options {
        grpc: "127.0.0.1:0".to_owned(),
        http: "127.0.0.1:0".to_owned(),
        front: Some(front),
        source: Source::Manifests(manifests(&pods)),
    };
    let gateway = Gateway::start(options, knobs, report, tracing.as_ref()).await?;
    let addresses = gateway.addresses();
    let front = addresses.front.context("the front was not started")?;
    if args.once {
        once(front, &pods).await?;
    } else {
        println!("model {MODEL}: 2 prefill and 2 decode engines, simulated");
        println!("admin http://{} (/metrics, /debug/fleet), ext_proc {}", addresses.http, addresses.grpc);
        println!(
            "\ntry it:\n\n  curl -N http://{front}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{BODY}'\n"
        );
        println!("ctrl-c ends it");
        tokio::signal::ctrl_c().await?;
    }
    gateway.drain().await;
    for pod in &pods {
        pod.engine.stop().await;
    }
    Ok(())
}

async fn start_engines() -> Result<Vec<Pod>> {
    let mut pods = Vec::new();
    for index in 0..2 {
        for (role, config) in [("prefill", EngineConfig::prefill(MODEL)), ("decode", EngineConfig::decode(MODEL))] {
            let engine = tandem_sim::start(config.timing(Timing::typical())).await.context("cannot start an engine")?;
            pods.push(Pod { name: format!("{role}-{index}"), role, roleset: format!("group-{index}"), engine });
        }
    }
    Ok(pods)
}

fn manifests(pods: &[Pod]) -> String {
    let mut text = String::new();
    for Pod { name, role, roleset, engine } in pods {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "---\napiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  labels:\n    model.aibrix.ai/name: {MODEL}\n    \
             model.aibrix.ai/port: \"{port}\"\n    model.aibrix.ai/engine: vllm\n    role-name: {role}\n    \
             roleset-name: {roleset}\n  annotations:\n    model.aibrix.ai/config: \
             '{{\"profiles\": {{\"default\": {{\"routingStrategy\": \"pd\"}}}}}}'\nstatus:\n  podIP: {ip}\n",
            port = engine.address().port(),
            ip = engine.address().ip(),
        );
    }
    text
}

/// One streamed request, seen from the client and from both engines.
async fn once(front: SocketAddr, pods: &[Pod]) -> Result<()> {
    let clock = Clock::system();
    let mut headers = HeaderMap::new();
    headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), front.port()).to_string();
    println!("POST http://{address}/v1/chat/completions\n{BODY}\n");
    let started = clock.now();
    let client = EngineClient::new();
    let response = client.post(&address, "/v1/chat/completions", headers, Bytes::from_static(BODY.as_bytes())).await?;
    let (head, mut body) = response.into_parts();
    let mut first = None;
    let mut answer = String::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            first.get_or_insert_with(|| clock.now());
            answer.push_str(&String::from_utf8_lossy(&data));
        }
    }
    let ended = clock.now();
    for line in answer.lines().filter(|line| !line.is_empty()) {
        println!("{line}");
    }
    println!();
    let header = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("-").to_owned();
    let milliseconds = |duration: Duration| format!("{:.1} ms", duration.as_secs_f64() * 1000.0);
    for (leg, pod_header) in [("prefill leg", "prefill-target-pod"), ("decode leg", "target-pod")] {
        let name = header(pod_header);
        let took = pods.iter().find(|pod| pod.name == name).and_then(|pod| pod.engine.records().last().and_then(took));
        println!("{leg:<12} {name:<10} {}", took.map_or_else(|| "not seen".to_owned(), milliseconds));
    }
    let first = first.context("the answer was empty")?;
    println!("first token  {:<10} {}", "client", milliseconds(first.since(started)));
    println!("whole answer {:<10} {}", "client", milliseconds(ended.since(started)));
    println!("request-id   {}", header("request-id"));
    ensure!(head.status.is_success(), "the gateway answered {}", head.status);
    ensure!(answer.contains("data: [DONE]"), "the stream did not end with [DONE]");
    Ok(())
}

/// How long an engine had the request.
fn took(record: &Record) -> Option<Duration> {
    record.end.map(|(at, _)| at.duration_since(record.received_at))
}
