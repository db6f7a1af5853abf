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
    /// Also with requests that arrive in the same instant spread evenly over the time to the next, where there are such
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
            let name = name.split('.').next().unwrap_or("").to_owned();
            let evened = self.even.then(|| trace.evened()).filter(|evened| evened.arrivals().ne(trace.arrivals()));
            let evened = evened.map(|evened| (format!("{name}, even"), evened));
            let wanted = if self.load.is_empty() { vec![natural] } else { self.load.clone() };
            ensure!(
                wanted.iter().all(|load| *load > 1e-6 && *load < 1e3),
                "--load must be above 0.000001 and below 1000"
            );
            for (name, trace) in std::iter::once((name, trace.clone())).chain(evened) {
                for policies in policies {
                    scenes.extend(wanted.iter().map(|load| Scene {
                        name: name.clone(),
                        trace: if self.load.is_empty() { trace.clone() } else { trace.faster(load / natural) },
                        load: (load * 1e3).round() / 1e3,
                        policies: *policies,
                    }));
                }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use clap::Parser;

    use super::*;
    use crate::knobs::{DecodePolicy, Knobs, PrefillPolicy, ProcessEnvironment};
    use crate::replay::{EngineModel, FleetShape, Format, Request};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        fleets: FleetArgs,
        #[arg(long, default_value_t = 1.0)]
        speed: f64,
    }

    fn arguments(text: &str) -> Result<FleetArgs, String> {
        let line = Line::try_parse_from(["line"].into_iter().chain(text.split_whitespace()));
        line.map(|Line { fleets, .. }| fleets).map_err(|error| error.to_string())
    }

    fn options() -> ReplayOptions {
        ReplayOptions {
            shape: FleetShape::new(2, 2, None).unwrap(),
            gateways: 1,
            sharing: Sharing::None,
            pace: Duration::from_millis(5),
            round_trip: Duration::from_micros(400),
            engine: Arc::new(EngineModel::default()),
            knobs: Arc::new(Knobs::read(&ProcessEnvironment).unwrap().0),
            seed: 1,
        }
    }

    fn trace(moments: &[u64]) -> Trace {
        let request =
            |at: &u64| Request { at: Duration::from_millis(*at), prompt: 900, output: 9, hashes: Arc::default() };
        Trace { format: Format::Azure, block_tokens: 512, requests: moments.iter().map(request).collect() }
    }

    const POLICIES: Policies = (PrefillPolicy::TokenLoad, DecodePolicy::TokenLoad);

    #[test]
    fn a_scene_for_each_trace_and_load_and_another_where_instants_can_be_spread() {
        let (bursts, steady) = (trace(&[0, 0, 1_000, 1_000, 4_000]), trace(&[0, 700, 4_000]));
        let traces = [(Path::new("/x/bursts.jsonl.gz"), bursts), (Path::new("steady.csv"), steady)];
        let scenes = |text: &str| {
            let scenes = arguments(text).unwrap().scenes(&traces, &options(), &[POLICIES]).unwrap();
            scenes.into_iter().map(|scene| (scene.name, scene.load, scene.trace.span().as_millis())).collect::<Vec<_>>()
        };
        let natural = [0.078, 0.047];
        let row = |name: &str, load, millis| (name.to_owned(), load, millis);
        assert_eq!(scenes("--replicas 2"), [row("bursts", natural[0], 4_000), row("steady", natural[1], 4_000)]);
        let even = scenes("--replicas 2 --even --load 0.5,0.25");
        let names: Vec<_> = even.iter().map(|(name, load, _)| (name.as_str(), *load)).collect();
        let expected = ["bursts", "bursts, even", "steady"].map(|name| [(name, 0.5), (name, 0.25)]).concat();
        assert_eq!(names, expected);
        assert!(even.chunks(2).all(|loads| loads[1].2.abs_diff(2 * loads[0].2) <= 1), "half the load, twice the time");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for text in ["--sharing paced", "--load 0.4", "--even", "--seeds 3", "--replicas 2 --load 0.4 --speed 2"] {
            assert!(arguments(text).is_err(), "{text}");
        }
        let complaint = |text: &str, moments: &[u64]| {
            let bar = |_| super::super::Bar::new(0);
            let args = arguments(text).unwrap();
            let compared = args.compare(&[(Path::new("t"), trace(moments))], &options(), &[POLICIES], 1, bar);
            compared.map(|compared| compared.len()).map_err(|error| error.to_string())
        };
        assert_eq!(complaint("--replicas 2,3", &[0, 9]), Ok(8));
        for (text, moments, start) in [
            ("--replicas 0", [0, 9], "--replicas must be"),
            ("--replicas 1001", [0, 9], "--replicas must be"),
            ("--replicas 2 --seeds 0", [0, 9], "--seeds must be"),
            ("--replicas 2 --sharing all", [0, 9], "--sharing: no kind \"all\"; there are none, snapshots"),
            ("--replicas 2 --load 0", [0, 9], "--load must be"),
            ("--replicas 2 --load NaN", [0, 9], "--load must be"),
            ("--replicas 2 --load 0.4", [0, 0], "--load: all requests of t arrive at once"),
        ] {
            let error = complaint(text, &moments).unwrap_err();
            assert!(error.starts_with(start), "{text}: {error}");
        }
        for text in ["--pace-ms 0", "--pace-ms 1e9", "--round-trip-ms -1", "--round-trip-ms NaN"] {
            let text = format!("--replicas 2 {}", text.replace(' ', "="));
            assert!(arguments(&text).unwrap().times().is_err(), "{text}");
        }
    }
}
