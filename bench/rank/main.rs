//! Does `tandem replay` rank policies as a run in real time does?
//!
//!   cargo bench --profile dev --bench rank -- run
//!
//! The trace is shrunk: a block of 512 tokens becomes one of 64, an answer a sixteenth. For each pair of policies it goes
//! through the HTTP front of a real gateway to simulated vLLM engines, in real time, and through `tandem replay` with
//! the same engine parameters. Several pairs run at once, each with its own gateway and engines: so times can be long
//! compared with the stalls of a busy machine. Both orders by mean time to first token are printed, with Spearman's rank
//! correlation.
#![allow(missing_docs, clippy::unwrap_used, clippy::disallowed_methods, reason = "a tool for developers")]

mod real;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, Parser, Subcommand};
use tandem::knobs::{Environment, Knobs};

use tandem::replay::{self, EngineModel, FleetShape, PairReport, Policies, ReadOptions, ReplayOptions, Request, Trace};

/// Tokens of a shrunk block.
const BLOCK_TOKENS: u64 = 64;
const OUTPUT_SCALE: u64 = 16;

/// What the engines of both sides are, in the terms of replay.
const ENGINE: [&str; 11] = [
    "prefill_ms=10",
    "prefill_ns_per_token_pair=0",
    "prefix_cache_tokens=400000",
    "transfer_ms=10",
    "transfer_us_per_token=0",
    "step_ms=220",
    "step_us_per_sequence=30000",
    "step_ns_per_kv_token=0",
    "kv_tokens=400000",
    "max_batch=256",
    // 1,600 tokens per second.
    "prefill_us_per_token=625",
];

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
    /// Compare the rankings
    Run(Run),
}

#[derive(Args)]
struct Run {
    /// A Mooncake trace
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/mooncake-first-500.jsonl.gz"))]
    trace: PathBuf,
    /// Only the first requests
    #[arg(long, default_value_t = 120)]
    limit: usize,
    /// Requests arrive so many times as fast
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Prefill pods, and decode pods
    #[arg(long, default_value_t = 4)]
    pods: usize,
    /// Rolesets among which they are divided
    #[arg(long, default_value_t = 2)]
    rolesets: usize,
    /// Runs of replay, with different seeds, whose mean is ranked
    #[arg(long, default_value_t = 8)]
    seeds: u64,
    /// Pairs of policies that run at once in real time; in a debug build each takes a tenth of a core
    #[arg(long, default_value_t = 5)]
    at_once: usize,
    /// Only the first pairs of policies
    #[arg(long)]
    pairs: Option<usize>,
}

/// The variables of a run.
struct Variables(Vec<(&'static str, String)>);

impl Environment for Variables {
    fn get(&self, name: &str) -> Option<String> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
    }
}

/// The configuration of both sides. Scrapes are rarer than by default: all pages of all pairs are made and read on the
/// same cores.
fn knobs((prefill, decode): Policies) -> Result<(Knobs, tandem::knobs::Report)> {
    let variables = [
        ("AIBRIX_PREFILL_SCORE_POLICY", prefill.name()),
        ("AIBRIX_DECODE_SCORE_POLICY", decode.name()),
        ("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "1000"),
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "300"),
        ("TANDEM_LOG", "error"),
    ];
    Ok(Knobs::read(&Variables(variables.map(|(name, value)| (name, value.to_owned())).to_vec()))?)
}

/// The trace as it is sent: whole blocks, fewer tokens.
fn shrink(trace: Trace) -> Trace {
    let requests = trace.requests.into_iter().map(|one| Request {
        prompt: one.hashes.len().max(1) as u64 * BLOCK_TOKENS,
        output: (one.output / OUTPUT_SCALE).max(1),
        ..one
    });
    Trace { block_tokens: BLOCK_TOKENS, requests: requests.collect(), ..trace }
}

/// Mean time to first token in replay, seconds, by seed.
fn virtually(
    trace: &Trace,
    seeds: u64,
    shape: FleetShape,
    engine: &Arc<EngineModel>,
    pair: Policies,
) -> Result<Vec<f64>> {
    let one = |seed| {
        let options = ReplayOptions {
            shape,
            gateways: 1,
            sharing: replay::Sharing::None,
            pace: std::time::Duration::from_millis(5),
            round_trip: std::time::Duration::ZERO,
            engine: Arc::clone(engine),
            knobs: Arc::new(knobs(pair)?.0),
            seed,
        };
        let report = PairReport::of(pair, trace, replay::run_one(trace, &options, pair, &|_| ())?);
        ensure!(report.errors.total() == 0, "{:?} in replay", report.errors);
        Ok(report.ttft_seconds.mean)
    };
    (1..=seeds).map(one).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// 1 for the least value; equal values share the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let rank = |value: &f64| {
        let below = values.iter().filter(|other| *other < value).count() as f64;
        let equal = values.iter().filter(|other| *other == value).count() as f64;
        below + f64::midpoint(equal, 1.0)
    };
    values.iter().map(rank).collect()
}

/// Spearman's: the correlation of the ranks.
fn spearman(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (ranks(a), ranks(b));
    let mean = f64::midpoint(a.len() as f64, 1.0);
    let product = |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum() };
    product(&a, &b) / (product(&a, &a) * product(&b, &b)).sqrt()
}

impl Run {
    async fn run(&self) -> Result<()> {
        let how = ReadOptions { limit: Some(self.limit), speed: self.speed, ..ReadOptions::default() };
        let trace = Arc::new(shrink(replay::read_file(&self.trace, how)?));
        let shape = FleetShape::new(self.pods, self.pods, Some(self.rolesets)).context("too few pods")?;
        ensure!(self.seeds > 1, "one run has no others");
        let mut engine = EngineModel::default();
        for text in ENGINE {
            engine.set(text)?;
        }
        let engine = Arc::new(engine);
        let mut pairs = replay::all_policies();
        pairs.truncate(self.pairs.unwrap_or(pairs.len()));
        println!(
            "{} requests in {:.1} s, {} prefill and {} decode pods in {} rolesets, {} pairs of policies",
            trace.requests.len(),
            trace.span().as_secs_f64(),
            self.pods,
            self.pods,
            self.rolesets,
            pairs.len()
        );
        let runs: Vec<Vec<f64>> =
            pairs.iter().map(|pair| virtually(&trace, self.seeds, shape, &engine, *pair)).collect::<Result<_>>()?;
        let virtual_: Vec<f64> = runs.iter().map(|runs| mean(runs)).collect();
        let first: Vec<f64> = runs.iter().filter_map(|runs| runs.first().copied()).collect();
        let others: Vec<f64> = runs.iter().filter_map(|runs| runs.get(1..)).map(mean).collect();
        println!("one run of replay against the mean of its others: {:.3}", spearman(&first, &others));
        let mut real = Vec::new();
        for together in pairs.chunks(self.at_once.max(1)) {
            let mut running = Vec::new();
            for pair in together {
                let (trace, engine, knobs) = (Arc::clone(&trace), Arc::clone(&engine), knobs(*pair)?);
                running.push(tokio::spawn(async move { real::mean_ttft(&trace, shape, &engine, knobs).await }));
            }
            for one in running {
                real.push(one.await??);
            }
        }
        println!("{:38} {:>16} {:>16}", "mean TTFT, seconds", "real time", "replay");
        for ((pair, real), replayed) in pairs.iter().zip(&real).zip(&virtual_) {
            println!("{:38} {real:>16.4} {replayed:>16.4}", format!("{}/{}", pair.0.name(), pair.1.name()));
        }
        for (title, values) in [("real time", &real), ("replay", &virtual_)] {
            let mut order: Vec<(f64, String)> = values
                .iter()
                .zip(&pairs)
                .map(|(value, pair)| (*value, format!("{}/{}", pair.0.name(), pair.1.name())))
                .collect();
            order.sort_by(|a, b| a.0.total_cmp(&b.0));
            let names: Vec<String> = order.into_iter().map(|(_, name)| name).collect();
            println!("{title}: {}", names.join(" < "));
        }
        println!("Spearman's rank correlation: {:.3}", spearman(&real, &virtual_));
        Ok(())
    }
}

fn main() -> Result<()> {
    let Some(Command::Run(run)) = Cli::parse().command else {
        println!("nothing to do without a command: run");
        return Ok(());
    };
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(run.run())
}
