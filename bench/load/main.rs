//! A load generator for `bench/run.sh`: requests in a closed or an open loop, timed chunks, streams held open.
//!
//! It is built by `cargo bench --bench load --no-run` and is no part of the gateway. What it prints is one JSON line.
#![allow(missing_docs, clippy::unwrap_used, clippy::disallowed_methods, reason = "a tool for developers")]

mod engine;
mod processes;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use clap::{Args, Parser, Subcommand};
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use engine::Stopwatch;
use processes::Usage;

#[derive(Parser)]
struct Cli {
    /// What `cargo bench` passes.
    #[arg(long, hide = true, global = true)]
    bench: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Streamed requests; their rate and latency
    Requests(Requests),
    /// Streams with timed chunks from an engine inside this process; the delay of each chunk
    Chunks(Chunks),
    /// Streams that say nothing, held open; the memory of the watched processes
    Open(Open),
    /// Nothing at all; what the watched processes take by themselves
    Idle(Idle),
}

/// What every kind of load needs.
#[derive(Args, Clone)]
struct Target {
    /// Where to send requests, `http://host:port`; several, with commas between them, take turns
    #[arg(long, value_delimiter = ',', required = true)]
    url: Vec<String>,
    /// Model to ask for
    #[arg(long, default_value = "bench")]
    model: String,
    /// `routing-strategy` header
    #[arg(long)]
    strategy: Option<String>,
    /// Size of the request body, about
    #[arg(long, default_value_t = 1000)]
    body_bytes: usize,
    /// Process to watch, `name=pid`; may be repeated
    #[arg(long = "watch", value_name = "NAME=PID", value_parser = processes::watched)]
    watch: Vec<(String, u32)>,
}

#[derive(Args, Clone)]
struct Requests {
    #[command(flatten)]
    target: Target,
    /// Requests at a time (closed loop)
    #[arg(long, default_value_t = 32)]
    concurrency: usize,
    /// Requests per second (open loop), instead
    #[arg(long)]
    rate: Option<u32>,
    /// Tokens of each answer
    #[arg(long, default_value_t = 16)]
    tokens: u32,
    /// Seconds of measuring, after a quarter as many of warming up
    #[arg(long, default_value_t = 8)]
    seconds: u64,
}

#[derive(Args, Clone)]
struct Chunks {
    #[command(flatten)]
    target: Target,
    /// Port of the engine inside
    #[arg(long)]
    engine_port: u16,
    /// Streams at once
    #[arg(long)]
    streams: usize,
    /// Chunks per second of each
    #[arg(long)]
    per_second: u32,
    /// Seconds of measuring
    #[arg(long, default_value_t = 8)]
    seconds: u64,
}

#[derive(Args, Clone)]
struct Open {
    #[command(flatten)]
    target: Target,
    /// Port of the engine inside
    #[arg(long)]
    engine_port: u16,
    /// Streams at once
    #[arg(long)]
    streams: usize,
}

#[derive(Args, Clone)]
struct Idle {
    /// Process to watch, `name=pid`; may be repeated
    #[arg(long = "watch", value_name = "NAME=PID", value_parser = processes::watched)]
    watch: Vec<(String, u32)>,
    /// Seconds of measuring
    #[arg(long, default_value_t = 15)]
    seconds: u64,
}

impl Idle {
    async fn run(&self) -> Result<Value> {
        let before = Usage::of(&self.watch)?;
        tokio::time::sleep(Duration::from_secs(self.seconds)).await;
        let after = Usage::of(&self.watch)?;
        Ok(json!({"cores": after.cpu_since(&before, self.seconds as f64), "resident_kib": after.resident()}))
    }
}

/// One client connection pool.
#[derive(Clone)]
struct Caller {
    client: Client<HttpConnector, Full<Bytes>>,
    target: Target,
}

/// Moments of one answer, from the sending of its request.
#[derive(Clone, Copy, Default)]
struct Timed {
    first_byte: Duration,
    total: Duration,
}

impl Caller {
    fn new(target: &Target) -> Caller {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
        Caller { client, target: target.clone() }
    }

    /// Sends a streamed chat; `each` sees every piece of the answer, and ends it by `false`.
    async fn chat(&self, number: usize, tokens: u32, mut each: impl FnMut(&Bytes) -> bool) -> Result<Timed> {
        let text = format!("{number} {}", "lorem ipsum ".repeat(self.target.body_bytes / 12));
        let body = json!({"model": self.target.model, "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens, "stream": true});
        let base = self.target.url.get(number % self.target.url.len()).context("no URL")?;
        let url = format!("{base}/v1/chat/completions");
        let mut request = Request::post(url).header("content-type", "application/json");
        if let Some(strategy) = &self.target.strategy {
            request = request.header("routing-strategy", strategy);
        }
        let request = request.body(Full::new(Bytes::from(body.to_string())))?;
        let sent = Instant::now();
        let answer = self.client.request(request).await.context("no answer")?;
        ensure!(answer.status() == 200, "status {}", answer.status());
        let mut body = answer.into_body();
        let mut timed = Timed::default();
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame.context("the answer broke off")?.into_data() {
                if timed.first_byte.is_zero() {
                    timed.first_byte = sent.elapsed();
                }
                if !each(&data) {
                    break;
                }
            }
        }
        timed.total = sent.elapsed();
        Ok(timed)
    }
}

/// The value below which `percent` of the sorted values lie, in milliseconds.
fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(index).map_or(f64::NAN, |value| (value.as_secs_f64() * 1e6).round() / 1e3)
}

fn summary(mut values: Vec<Duration>) -> Value {
    values.sort_unstable();
    json!({"p50_ms": percentile(&values, 50), "p99_ms": percentile(&values, 99), "max_ms": percentile(&values, 100)})
}

impl Requests {
    /// Sends requests for `time`; what was measured and how many failed.
    async fn load(&self, caller: &Caller, time: Duration) -> (Vec<Timed>, usize) {
        let until = Instant::now() + time;
        let tokens = self.tokens;
        let (mut running, mut done, mut failed, mut number) = (JoinSet::new(), Vec::new(), 0, 0);
        let mut beat = self.rate.map(|rate| tokio::time::interval(Duration::from_secs(1) / rate));
        while Instant::now() < until {
            match &mut beat {
                Some(beat) => {
                    beat.tick().await;
                }
                None if running.len() >= self.concurrency => match running.join_next().await {
                    Some(Ok(Ok(timed))) => done.push(timed),
                    _ => failed += 1,
                },
                None => {}
            }
            let caller = caller.clone();
            number += 1;
            running.spawn(async move { caller.chat(number, tokens, |_| true).await });
            while let Some(ended) = running.try_join_next() {
                match ended {
                    Ok(Ok(timed)) => done.push(timed),
                    _ => failed += 1,
                }
            }
        }
        while let Some(ended) = running.join_next().await {
            match ended {
                Ok(Ok(timed)) => done.push(timed),
                _ => failed += 1,
            }
        }
        (done, failed)
    }

    async fn run(&self) -> Result<Value> {
        let caller = Caller::new(&self.target);
        self.load(&caller, Duration::from_secs(self.seconds) / 4).await;
        let (before, started) = (Usage::of(&self.target.watch)?, Instant::now());
        let (done, failed) = self.load(&caller, Duration::from_secs(self.seconds)).await;
        let took = started.elapsed();
        let after = Usage::of(&self.target.watch)?;
        let cpu = after.cpu_since(&before, done.len() as f64 / 1000.0);
        Ok(json!({
            "requests": done.len(),
            "failed": failed,
            "per_second": (done.len() as f64 / took.as_secs_f64()).round(),
            "first_byte": summary(done.iter().map(|timed| timed.first_byte).collect()),
            "total": summary(done.iter().map(|timed| timed.total).collect()),
            "cpu_seconds_per_1000_requests": cpu,
            "resident_kib": after.resident(),
        }))
    }
}

impl Chunks {
    async fn run(&self) -> Result<Value> {
        let watch = Stopwatch::start();
        engine::start(self.engine_port, watch, Some(self.per_second)).await?;
        let caller = Caller::new(&self.target);
        // Streams begin within one second, then all of them run for the time that counts.
        let begin = Instant::now() + Duration::from_secs(2);
        let end = begin + Duration::from_secs(self.seconds);
        let mut streams = JoinSet::new();
        for number in 0..self.streams {
            let caller = caller.clone();
            tokio::time::sleep(Duration::from_secs(1) / u32::try_from(self.streams)?).await;
            streams.spawn(async move {
                let mut delays = Vec::new();
                let ended = caller.chat(number, 0, |data| {
                    let now = Instant::now();
                    if now >= begin {
                        delays.extend(watch.delays(data));
                    }
                    now < end
                });
                ended.await.map(|_| delays)
            });
        }
        tokio::time::sleep_until(begin.into()).await;
        let before = Usage::of(&self.target.watch)?;
        tokio::time::sleep_until(end.into()).await;
        let usage = Usage::of(&self.target.watch)?;
        let (mut delays, mut failed) = (Vec::new(), 0);
        while let Some(ended) = streams.join_next().await {
            match ended? {
                Ok(more) => delays.extend(more),
                Err(error) => {
                    eprintln!("{error:#}");
                    failed += 1;
                }
            }
        }
        Ok(json!({
            "streams": self.streams,
            "failed": failed,
            "chunks_per_second": (delays.len() as f64 / self.seconds as f64).round(),
            "cpu_seconds_per_million_chunks": usage.cpu_since(&before, delays.len() as f64 / 1e6),
            "delay": summary(delays),
        }))
    }
}

impl Open {
    async fn run(&self) -> Result<Value> {
        let idle = Usage::of(&self.target.watch)?;
        engine::start(self.engine_port, Stopwatch::start(), None).await?;
        let caller = Caller::new(&self.target);
        let (open, mut opened) = tokio::sync::mpsc::unbounded_channel();
        let mut streams = JoinSet::new();
        for number in 0..self.streams {
            let (caller, open) = (caller.clone(), open.clone());
            streams.spawn(async move {
                let each = |_: &Bytes| open.send(()).is_ok();
                caller.chat(number, 0, each).await
            });
            if number % 100 == 99 {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        for _ in 0..self.streams {
            tokio::time::timeout(Duration::from_mins(1), opened.recv()).await.context("a stream did not open")?;
        }
        let held = Usage::of(&self.target.watch)?;
        streams.shutdown().await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let after = Usage::of(&self.target.watch)?;
        Ok(json!({
            "streams": self.streams,
            "resident_kib": {"before": idle.resident(), "open": held.resident(), "after": after.resident()},
        }))
    }
}

fn main() -> Result<()> {
    let Some(command) = Cli::parse().command else {
        println!("nothing to do without a command: see bench/run.sh");
        return Ok(());
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let line = runtime.block_on(async {
        match command {
            Command::Requests(command) => command.run().await,
            Command::Chunks(command) => command.run().await,
            Command::Open(command) => command.run().await,
            Command::Idle(command) => command.run().await,
        }
    })?;
    println!("{line}");
    Ok(())
}
