//! What sharing buys: fleets of gateways compared with one gateway that sees everything, on the same arrivals.

use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;

use super::options::{Policies, ReplayOptions, Sharing};
use super::report::PairReport;
use super::trace::Trace;
use super::{EngineModel, ReplayError, run_one};

/// Arrivals, and the policies that place them.
#[derive(Clone, Debug)]
pub struct Scene {
    /// What the trace is called.
    pub name: String,
    /// Its arrivals, as fast as the load wants them.
    pub trace: Trace,
    /// Load of the prefill pods if no prefix were found: see [`offered_load`].
    pub load: f64,
    /// The policies.
    pub policies: Policies,
}

/// The three numbers that are compared. Means over the seeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Half of the requests have their first token after so many seconds.
    pub ttft_p50: f64,
    /// 99 of 100 have.
    pub ttft_p99: f64,
    /// Largest over mean KV tokens of the decode pods, time average.
    pub kv_imbalance: f64,
    /// Requests that failed.
    pub errors: f64,
}

impl Figures {
    fn of(report: &PairReport) -> Figures {
        Figures {
            ttft_p50: report.ttft_seconds.p50,
            ttft_p99: report.ttft_seconds.p99,
            kv_imbalance: report.kv_imbalance,
            errors: report.errors.total() as f64,
        }
    }

    fn plus(self, other: Figures, weight: f64) -> Figures {
        Figures {
            ttft_p50: self.ttft_p50 + weight * other.ttft_p50,
            ttft_p99: self.ttft_p99 + weight * other.ttft_p99,
            kv_imbalance: self.kv_imbalance + weight * other.kv_imbalance,
            errors: self.errors + weight * other.errors,
        }
    }
}

/// One fleet on one scene.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// What the trace is called.
    pub trace: String,
    /// Offered load.
    pub load: f64,
    /// Prefill and decode policy.
    pub policies: String,
    /// Gateways.
    pub replicas: usize,
    /// What they share.
    pub sharing: Sharing,
    /// What came out.
    pub fleet: Figures,
    /// What one gateway that sees everything makes of the same arrivals.
    pub one: Figures,
}

impl Comparison {
    /// TTFT p50, TTFT p99 and KV imbalance as multiples of those of one gateway.
    pub fn multiples(&self) -> [f64; 3] {
        let of = |fleet: f64, one: f64| if one > 0.0 { fleet / one } else { 1.0 };
        [
            of(self.fleet.ttft_p50, self.one.ttft_p50),
            of(self.fleet.ttft_p99, self.one.ttft_p99),
            of(self.fleet.kv_imbalance, self.one.kv_imbalance),
        ]
    }
}

/// The fleets to compare.
#[derive(Clone, Copy, Debug)]
pub struct Fleets<'a> {
    /// Numbers of gateways.
    pub replicas: &'a [usize],
    /// What they tell each other.
    pub sharing: &'a [Sharing],
    /// How many runs each number is the mean of.
    pub seeds: u64,
}

/// Time that the prompts of the trace take to compute, nothing cached, over the time that `pods` prefill pods have.
pub fn offered_load(trace: &Trace, engine: &EngineModel, pods: usize) -> f64 {
    let work: f64 =
        trace.requests.iter().map(|request| engine.prefill(request.prompt, request.prompt).as_secs_f64()).sum();
    let time = trace.span().as_secs_f64() * pods as f64;
    if time > 0.0 { work / time } else { 0.0 }
}

/// Runs every scene with one gateway and with every fleet, once per seed, on up to `threads` threads. The numbers do not
/// depend on how many there are.
pub fn compare(
    scenes: &[Scene],
    Fleets { replicas, sharing, seeds }: Fleets<'_>,
    options: &ReplayOptions,
    threads: usize,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Vec<Comparison>, ReplayError> {
    let fleets: Vec<(usize, Sharing)> =
        replicas.iter().flat_map(|count| sharing.iter().map(|sharing| (*count, *sharing))).collect();
    let per_scene = 1 + fleets.len();
    let seeds = seeds.max(1);
    let jobs = scenes.len() * per_scene * seeds as usize;
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Figures)>> = Mutex::default();
    let work = || {
        loop {
            let job = next.fetch_add(1, Ordering::Relaxed);
            let (scene, rest) = (job / (per_scene * seeds as usize), job % (per_scene * seeds as usize));
            let Some(scene) = scenes.get(scene) else { return Ok(()) };
            let (fleet, seed) = (rest / seeds as usize, rest as u64 % seeds);
            let (gateways, sharing) =
                fleet.checked_sub(1).and_then(|at| fleets.get(at)).copied().unwrap_or((1, Sharing::None));
            let seed = options.seed.wrapping_add(seed.wrapping_mul(0x51_7c_c1_b7_27_22_0a_95));
            let run = ReplayOptions { gateways, sharing, seed, ..options.clone() };
            let outcome = run_one(&scene.trace, &run, scene.policies, progress)?;
            let figures = Figures::of(&PairReport::of(scene.policies, &scene.trace, outcome));
            done.lock().map_err(|_| ReplayError::Broken)?.push((job, figures));
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.clamp(1, jobs.max(1))).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| ReplayError::Broken)?)
    })?;
    let mut done = done.into_inner().map_err(|_| ReplayError::Broken)?;
    // Sums of floats depend on their order.
    done.sort_by_key(|(job, _)| *job);
    let means: Vec<Figures> = done
        .chunks(seeds as usize)
        .map(|runs| runs.iter().fold(Figures::default(), |sum, (_, one)| sum.plus(*one, 1.0 / seeds as f64)))
        .collect();
    let mut comparisons = Vec::new();
    for (scene, figures) in scenes.iter().zip(means.chunks(per_scene)) {
        let Some((one, rest)) = figures.split_first() else { continue };
        for ((replicas, sharing), fleet) in fleets.iter().zip(rest) {
            comparisons.push(Comparison {
                trace: scene.name.clone(),
                load: scene.load,
                policies: format!("{}/{}", scene.policies.0.name(), scene.policies.1.name()),
                replicas: *replicas,
                sharing: *sharing,
                fleet: *fleet,
                one: *one,
            });
        }
    }
    Ok(comparisons)
}

/// A table in Markdown: a row for each trace, pair of policies, number of gateways and load, a column for each kind of
/// sharing, in each cell TTFT p50 / TTFT p99 / KV imbalance as multiples of those of one gateway.
pub fn comparison_table(comparisons: &[Comparison]) -> String {
    let mut sharings: Vec<Sharing> = Vec::new();
    for one in comparisons {
        if !sharings.contains(&one.sharing) {
            sharings.push(one.sharing);
        }
    }
    let names: Vec<&str> = sharings.iter().map(|sharing| sharing.name()).collect();
    let mut text = format!("| trace | policies | N | load | one gateway | {} |\n", names.join(" | "));
    text.push_str(&"|---".repeat(5 + names.len()));
    text.push_str("|\n");
    for row in comparisons.chunks(sharings.len().max(1)) {
        let Some(Comparison { trace, policies, replicas, load, one, .. }) = row.first() else { continue };
        // Writing to a string cannot fail.
        let _ = write!(text, "| {trace} | {policies} | {replicas} | {load} | ");
        let _ = write!(text, "{:.3} s / {:.3} s / {:.3} |", one.ttft_p50, one.ttft_p99, one.kv_imbalance);
        for cell in row {
            let [p50, p99, kv] = cell.multiples();
            let _ = write!(text, " {p50:.2} / {p99:.2} / {kv:.2} |");
        }
        text.push('\n');
    }
    text
}
