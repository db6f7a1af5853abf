//! `tandem replay`.

mod fleets;

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};

use self::fleets::FleetArgs;
use crate::clock::Clock;
use crate::knobs::{DecodePolicy, Knobs, Origin, PrefillPolicy, ProcessEnvironment};
use crate::replay::{
    self, EngineModel, FleetShape, Format, MOONCAKE_BLOCK_TOKENS, PARAMETERS, Policies, ReadOptions, ReplayOptions,
    Sharing, Source,
};

/// The bar moves at most this often.
const BAR_BEAT: Duration = Duration::from_millis(100);
const BAR_WIDTH: usize = 30;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormatArg {
    /// By the first line
    Auto,
    /// JSON lines with block ids
    Mooncake,
    /// CSV
    Azure,
}

/// Run a trace of arrivals through the real routing code on virtual time, against modelled engines, and compare
/// policies. Environment variables work as for `serve`. See docs/replay.md.
#[derive(Debug, Args)]
#[command(after_long_help = parameters())]
pub struct ReplayArgs {
    /// The trace (several, to compare fleets): Mooncake JSON lines or Azure CSV, plain or gzipped
    #[arg(long, value_name = "FILE", required = true)]
    trace: Vec<PathBuf>,
    /// Its format
    #[arg(long, value_enum, default_value = "auto")]
    format: FormatArg,
    /// Requests arrive so many times as fast
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Only the first requests of the trace
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Tokens of one hashed block of a Mooncake trace
    #[arg(long, value_name = "N", default_value_t = MOONCAKE_BLOCK_TOKENS)]
    block_tokens: u64,
    /// Start of all random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Prefill pods
    #[arg(long, value_name = "N", default_value_t = 8)]
    prefill: usize,
    /// Decode pods
    #[arg(long, value_name = "N", default_value_t = 8)]
    decode: usize,
    /// Rolesets among which the pods are divided evenly; as many as possible unless given
    #[arg(long, value_name = "N")]
    rolesets: Option<usize>,
    /// Pairs of a prefill and a decode policy, or `all`; the configured pair unless given
    #[arg(long, value_name = "PREFILL/DECODE,…", value_delimiter = ',')]
    policies: Vec<String>,
    #[command(flatten)]
    fleets: FleetArgs,
    /// Parameters of the engines, listed below
    #[arg(long, value_name = "NAME=VALUE,…", value_delimiter = ',')]
    engine: Vec<String>,
    /// Runs at once; one for each core unless given. The numbers do not depend on it
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Write the numbers and all parameters to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn parameters() -> String {
    let lines = PARAMETERS.map(|one| format!("  {:26} {:>7}  {}", one.name, one.default, one.meaning));
    format!("Engine parameters and their defaults:\n{}", lines.join("\n"))
}

fn policies(texts: &[String], configured: Policies) -> Result<Vec<Policies>> {
    let mut pairs = Vec::new();
    for text in texts {
        if text == "all" {
            pairs.extend(replay::all_policies());
            continue;
        }
        let (prefill, decode) = text.split_once('/').with_context(|| format!("{text:?} is not PREFILL/DECODE"))?;
        let known = |names: Vec<&str>| names.join(", ");
        let prefills = || known(PrefillPolicy::ALL.map(PrefillPolicy::name).to_vec());
        let decodes = || known(DecodePolicy::ALL.map(DecodePolicy::name).to_vec());
        let unknown = |kind: &str, name: &str, names: String| format!("no {kind} policy {name:?}; there are {names}");
        pairs.push((
            PrefillPolicy::parse(prefill).with_context(|| unknown("prefill", prefill, prefills()))?,
            DecodePolicy::parse(decode).with_context(|| unknown("decode", decode, decodes()))?,
        ));
    }
    Ok(if pairs.is_empty() { vec![configured] } else { pairs })
}

/// Runs it.
pub fn run(args: &ReplayArgs) -> Result<()> {
    ensure!(args.speed > 1e-6 && args.speed < 1e6, "--speed must be above 0.000001 and below 1000000");
    ensure!(args.block_tokens > 0, "--block-tokens must be above 0");
    ensure!(args.limit != Some(0), "--limit must be above 0");
    let shape = FleetShape::new(args.prefill, args.decode, args.rolesets)
        .context("each roleset needs a prefill and a decode pod: give more pods or fewer --rolesets")?;
    let mut engine = EngineModel::default();
    for text in &args.engine {
        engine.set(text).context("--engine")?;
    }
    let (knobs, report) = Knobs::read(&ProcessEnvironment)?;
    for warning in &report.warnings {
        eprintln!("warning: {warning}");
    }
    let policies = policies(&args.policies, (knobs.pd.prefill_policy, knobs.pd.decode_policy)).context("--policies")?;
    let format = match args.format {
        FormatArg::Auto => None,
        FormatArg::Mooncake => Some(Format::Mooncake),
        FormatArg::Azure => Some(Format::Azure),
    };
    let how = ReadOptions { format, limit: args.limit, speed: args.speed, block_tokens: args.block_tokens };
    let read = |path: &PathBuf| replay::read_file(path, how).with_context(|| format!("the trace {}", path.display()));
    let (pace, round_trip) = args.fleets.times()?;
    let options = ReplayOptions {
        shape,
        gateways: 1,
        sharing: Sharing::None,
        pace,
        round_trip,
        engine: Arc::new(engine),
        knobs: Arc::new(knobs),
        seed: args.seed,
    };
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let set = report.settings.iter().filter(|setting| setting.origin != Origin::Default);
    let set: Vec<(&str, &str)> = set.map(|setting| (setting.name, setting.value.as_str())).collect();
    if !args.fleets.replicas.is_empty() {
        let traces = args.trace.iter().map(|path| Ok((path.as_path(), read(path)?))).collect::<Result<Vec<_>>>()?;
        let compared = args.fleets.compare(&traces, &options, &policies, threads, Bar::new)?;
        print!("{}", replay::comparison_table(&compared));
        return args.json.as_deref().map_or(Ok(()), |path| {
            let sources: Vec<Source> =
                traces.iter().map(|(path, trace)| Source::of(path.display().to_string(), trace, args.speed)).collect();
            write(path, &replay::comparison_json(&sources, &options, args.fleets.seeds, &set, &compared))
        });
    }
    let [path] = args.trace.as_slice() else { bail!("several traces are for --replicas only") };
    let (name, trace) = (path.display(), read(path)?);
    let bar = Bar::new(trace.requests.len() * policies.len());
    let reports = replay::run(&trace, &options, &policies, threads, &|ended| bar.advance(ended))?;
    bar.clear();
    let source = Source::of(name.to_string(), &trace, args.speed);
    println!(
        "{} requests in {:.0} s, {} prefill and {} decode pods in {} rolesets",
        source.requests, source.span_seconds, shape.prefill, shape.decode, shape.rolesets
    );
    print!("{}", replay::table(&reports));
    args.json.as_deref().map_or(Ok(()), |path| write(path, &replay::json(&source, &options, &set, &reports)))
}

fn write(path: &Path, json: &serde_json::Value) -> Result<()> {
    let text = serde_json::to_string_pretty(json)?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

/// A progress bar on stderr, when that is a terminal.
struct Bar {
    clock: Clock,
    total: usize,
    done: AtomicUsize,
    /// Beats since the clock's origin at which it was last drawn.
    drawn: AtomicU64,
    shown: bool,
}

impl Bar {
    fn new(total: usize) -> Bar {
        let shown = std::io::stderr().is_terminal();
        Bar { clock: Clock::system(), total, done: AtomicUsize::new(0), drawn: AtomicU64::new(0), shown }
    }

    fn advance(&self, more: usize) {
        let done = self.done.fetch_add(more, Ordering::Relaxed) + more;
        if !self.shown {
            return;
        }
        let beat = self.clock.now().0 / BAR_BEAT.as_nanos() as u64;
        if self.drawn.swap(beat, Ordering::Relaxed) < beat {
            let filled = BAR_WIDTH * done / self.total.max(1);
            let bar = format!("{}{}", "#".repeat(filled), ".".repeat(BAR_WIDTH.saturating_sub(filled)));
            // A terminal that is gone is no reason to stop.
            let _ = write!(std::io::stderr(), "\r[{bar}] {done}/{} requests", self.total);
        }
    }

    fn clear(&self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::Cli;

    const CONFIGURED: Policies = (PrefillPolicy::PrefixCache, DecodePolicy::LoadBalancing);

    fn pairs(texts: &[&str]) -> Result<Vec<Policies>, String> {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        policies(&texts, CONFIGURED).map_err(|error| error.to_string())
    }

    #[test]
    fn pairs_of_policies() {
        assert_eq!(pairs(&[]).unwrap(), [CONFIGURED]);
        assert_eq!(pairs(&["all"]).unwrap(), replay::all_policies());
        let two = pairs(&["least_request/least_request", "prefix_cache/load_balancing"]).unwrap();
        assert_eq!(two, [(PrefillPolicy::LeastRequest, DecodePolicy::LeastRequest), CONFIGURED]);
        for (text, complaint) in [
            ("least_request", "\"least_request\" is not PREFILL/DECODE"),
            ("best/least_request", "no prefill policy \"best\"; there are prefix_cache, least_request"),
            ("least_request/", "no decode policy \"\"; there are load_balancing, least_request"),
        ] {
            let error = pairs(&[text]).unwrap_err();
            assert!(error.starts_with(complaint), "{text}: {error}");
        }
    }

    #[test]
    fn what_cannot_be_run_is_refused() {
        let excerpt = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/mooncake-first-500.jsonl.gz");
        let run_with = |more: &[&str]| {
            let cli = Cli::try_parse_from([&["tandem", "replay", "--trace", excerpt, "--limit", "20"], more].concat());
            let Ok(Cli { command: crate::cli::Command::Replay(args) }) = cli else {
                return Err("arguments".to_owned());
            };
            run(&args).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(run_with(&["--speed", "2", "--prefill", "3", "--threads", "1", "--format", "mooncake"]), Ok(()));
        for (more, complaint) in [
            (["--speed", "0"], "--speed must be"),
            (["--speed", "NaN"], "--speed must be"),
            (["--block-tokens", "0"], "--block-tokens must be"),
            (["--block-tokens", "64"], "the trace"),
            (["--rolesets", "9"], "each roleset needs"),
            (["--engine", "step_ms=0"], "--engine: step_ms must be"),
            (["--format", "azure"], "the trace"),
            (["--policies", "x/y"], "--policies: no prefill policy"),
            (["--json", "/does/not/exist.json"], "cannot write"),
        ] {
            let error = run_with(&more).unwrap_err();
            assert!(error.starts_with(complaint), "{more:?}: {error}");
        }
    }
}
