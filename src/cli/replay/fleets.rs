//! `tandem replay --replicas`: fleets of gateways compared with one that sees everything.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::replay::{self, Policies, ReplayOptions, Scene, Sharing, Trace};

/// Most replicas of one fleet; more are a mistake.
const MAX_REPLICAS: usize = 1_000;

/// How gateways share what they know.
#[derive(Debug, Args)]
pub(super) struct FleetArgs {
    /// Compare fleets of so many gateways with one that sees everything, on the same arrivals
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(super) replicas: Vec<usize>,
    /// What those gateways tell each other: none, snapshots, paced, claim; all four unless given
    #[arg(long, value_name = "KIND,…", value_delimiter = ',', requires = "replicas")]
    sharing: Vec<String>,
    /// Instead of --speed: requests arrive so fast that the prefill pods have this load, if they find no prefixes
    #[arg(long, value_name = "X,…", value_delimiter = ',', requires = "replicas", conflicts_with = "speed")]
    load: Vec<f64>,
    /// Least time between two publications of a gateway
    #[arg(long, value_name = "MS", default_value_t = 5.0)]
    pub(super) pace_ms: f64,
    /// From a gateway to Redis and back
    #[arg(long, value_name = "MS", default_value_t = 0.4)]
    pub(super) round_trip_ms: f64,
    /// Spread requests that arrive in the same instant evenly over the time to the next
    #[arg(long, requires = "replicas")]
    even: bool,
    /// Run with so many seeds and average
    #[arg(long, value_name = "N", default_value_t = 1, requires = "replicas")]
    pub(super) seeds: u64,
}

impl FleetArgs {
    /// The pace and the round trip.
    pub(super) fn times(&self) -> Result<(Duration, Duration)> {
        let millis = |name: &str, value: f64| {
            ensure!((0.0..=10_000.0).contains(&value), "{name} must be from 0 to 10000");
            Ok(Duration::from_secs_f64(value / 1e3))
        };
        ensure!(self.pace_ms > 0.0, "--pace-ms must be above 0");
        Ok((millis("--pace-ms", self.pace_ms)?, millis("--round-trip-ms", self.round_trip_ms)?))
    }

    fn sharing(&self) -> Result<Vec<Sharing>> {
        let parse = |name: &String| {
            let known = Sharing::ALL.map(Sharing::name).join(", ");
            Sharing::parse(name).with_context(|| format!("--sharing: no kind {name:?}; there are {known}"))
        };
        if self.sharing.is_empty() { Ok(Sharing::ALL.to_vec()) } else { self.sharing.iter().map(parse).collect() }
    }

    /// Every trace at every load, or as it is, under every pair of policies.
    fn scenes(&self, traces: &[(&Path, Trace)], options: &ReplayOptions, policies: &[Policies]) -> Result<Vec<Scene>> {
        let mut scenes = Vec::new();
        for (path, trace) in traces {
            let natural = replay::offered_load(trace, &options.engine, options.shape.prefill);
            ensure!(natural > 0.0, "--load: all requests of {} arrive at once", path.display());
            let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
            let name = name.split('.').next().unwrap_or("").to_owned() + if self.even { ", even" } else { "" };
            let evened = self.even.then(|| trace.evened());
            let trace = evened.as_ref().unwrap_or(trace);
            let wanted = if self.load.is_empty() { vec![natural] } else { self.load.clone() };
            ensure!(
                wanted.iter().all(|load| *load > 1e-6 && *load < 1e3),
                "--load must be above 0.000001 and below 1000"
            );
            for policies in policies {
                scenes.extend(wanted.iter().map(|load| Scene {
                    name: name.clone(),
                    trace: if self.load.is_empty() { trace.clone() } else { trace.faster(load / natural) },
                    load: (load * 1e3).round() / 1e3,
                    policies: *policies,
                }));
            }
        }
        Ok(scenes)
    }

    /// Runs the comparison.
    pub(super) fn compare(
        &self,
        traces: &[(&Path, Trace)],
        options: &ReplayOptions,
        policies: &[Policies],
        threads: usize,
        bar: impl Fn(usize) -> super::Bar,
    ) -> Result<Vec<replay::Comparison>> {
        let most = self.replicas.iter().copied().max().unwrap_or(1);
        ensure!(most <= MAX_REPLICAS && !self.replicas.contains(&0), "--replicas must be from 1 to {MAX_REPLICAS}");
        ensure!((1..=1_000).contains(&self.seeds), "--seeds must be from 1 to 1000");
        let sharing = self.sharing()?;
        let scenes = self.scenes(traces, options, policies)?;
        let runs = (1 + self.replicas.len() * sharing.len()) * self.seeds as usize;
        let bar = bar(scenes.iter().map(|scene| scene.trace.requests.len() * runs).sum());
        let how = replay::Fleets { replicas: &self.replicas, sharing: &sharing, seeds: self.seeds };
        let compared = replay::compare(&scenes, how, options, threads, &|ended| bar.advance(ended))?;
        bar.clear();
        Ok(compared)
    }
}
