//! `tandem replay`: the real routing code over a trace of arrivals, on virtual time, against modelled engines.
//!
//! What is real: snapshot, selection and charge, load cells, prefix index, knobs, and what scraping derives. What is
//! modelled: the engines, whose formulas stand in [`EngineModel`] and in `docs/replay.md`, and the network, which takes
//! no time but for KV transfers.
//!
//! Promises: the same trace, options and seed give the same numbers to the last bit, on any number of threads; every
//! request ends; at the end nothing is charged any more, which each run checks.

mod cache;
mod compare;
mod decode;
mod gateway;
mod link;
mod model;
mod options;
mod plane;
mod prefill;
mod report;
mod trace;
mod world;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};

pub use compare::{Comparison, Figures, Fleets, Scene, compare, comparison_table, offered_load};
pub use model::{EngineModel, PARAMETERS, Parameter, ParameterError};
pub use options::{FleetShape, Policies, ReplayOptions, SNAPSHOT_PERIOD, Sharing, all_policies};
pub use report::{Errors, PairReport, Source, Spread, comparison_json, json, table};
pub use trace::{Format, MOONCAKE_BLOCK_TOKENS, ReadOptions, Request, Trace, TraceError, read, read_file};
pub use world::{Course, Failure, Imbalance, Outcome};

use world::World;

/// A run that cannot be trusted, or cannot begin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The fleet has no model.
    #[error("the fleet is empty")]
    Fleet,
    /// Requests did not end, or left charges behind: a bug here or in the routing code.
    #[error("{requests} requests did not end, and {charges} charges were not released")]
    Lost {
        /// Requests that did not end.
        requests: usize,
        /// Charges left.
        charges: u64,
    },
    /// A thread died.
    #[error("a run broke off")]
    Broken,
}

/// Runs the trace once with these policies. `progress` hears how many more requests have ended.
pub fn run_one(
    trace: &Trace,
    options: &ReplayOptions,
    policies: Policies,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Outcome, ReplayError> {
    World::new(trace, options, policies)?.run(progress)
}

/// Runs the trace once for each pair of policies, on up to `threads` threads. The reports come in the order of
/// `policies`.
pub fn run(
    trace: &Trace,
    options: &ReplayOptions,
    policies: &[Policies],
    threads: usize,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Vec<PairReport>, ReplayError> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(pair) = policies.get(index) else { return Ok(done) };
            let outcome = run_one(trace, options, *pair, progress)?;
            done.push((index, PairReport::of(*pair, trace, outcome)));
        }
    };
    let mut reports = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.clamp(1, policies.len().max(1))).map(|_| scope.spawn(work)).collect();
        let mut reports = Vec::new();
        for worker in workers {
            reports.extend(worker.join().map_err(|_| ReplayError::Broken)??);
        }
        Ok(reports)
    })?;
    reports.sort_by_key(|(index, _)| *index);
    Ok(reports.into_iter().map(|(_, report)| report).collect())
}
