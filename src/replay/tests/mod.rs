//! Engines against hand-computed cases and a step-by-step simulation, trace readers, whole runs.

mod decode;
mod engines;
mod fleets;
mod runs;
mod traces;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::knobs::{Environment, Knobs};

/// The variables of a test.
struct Variables(&'static [(&'static str, &'static str)]);

impl Environment for Variables {
    fn get(&self, name: &str) -> Option<String> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }
}

/// Engines with these parameters; the others take no time, hold everything and cache nothing.
fn engine(parameters: &[&str]) -> Arc<EngineModel> {
    let mut model = EngineModel::default();
    let plain = ["prefill_ms=0", "prefill_us_per_token=0", "prefill_ns_per_token_pair=0", "prefix_cache_tokens=0"];
    let rest = ["transfer_ms=0", "transfer_us_per_token=0", "step_ms=1", "step_us_per_sequence=0"];
    let sizes = ["step_ns_per_kv_token=0", "kv_tokens=1000000000", "max_batch=1000"];
    for text in plain.iter().chain(&rest).chain(&sizes).chain(parameters) {
        model.set(text).unwrap();
    }
    Arc::new(model)
}

fn options(shape: (usize, usize, usize), engine: Arc<EngineModel>) -> ReplayOptions {
    configured(shape, engine, &[])
}

fn configured(
    (prefill, decode, rolesets): (usize, usize, usize),
    engine: Arc<EngineModel>,
    variables: &'static [(&'static str, &'static str)],
) -> ReplayOptions {
    let (knobs, report) = Knobs::read(&Variables(variables)).unwrap();
    assert_eq!(report.warnings, Vec::<String>::new());
    let shape = FleetShape::new(prefill, decode, Some(rolesets)).unwrap();
    ReplayOptions {
        shape,
        gateways: 1,
        sharing: Sharing::None,
        pace: Duration::from_millis(5),
        round_trip: Duration::from_micros(400),
        engine,
        knobs: Arc::new(knobs),
        seed: 1,
    }
}

/// Requests without known prefixes: (arrival ms, prompt, output).
fn trace(rows: &[(u64, u64, u64)]) -> Trace {
    let request =
        |(at, prompt, output)| Request { at: Duration::from_millis(at), prompt, output, hashes: Arc::default() };
    Trace { format: Format::Azure, block_tokens: 512, requests: rows.iter().copied().map(request).collect() }
}

fn quiet(_: usize) {}
