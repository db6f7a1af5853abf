//! What one selection costs: `cargo bench --bench selection`.
//!
//! Prints the median time of a selection over fleets of different sizes, and of the prefix lookup at its worst. Goals:
//! 64 pods in 16 rolesets below 20 µs, 1000 pods below 150 µs.
#![allow(missing_docs, clippy::unwrap_used, clippy::disallowed_methods)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem::clock::Tick;
use tandem::fleet::{Engine, Model, Pod, PodKey, PodSpec, PodState, Role, Roleset, Signals};
use tandem::knobs::{PdKnobs, PrefixKnobs, Tokenizer};
use tandem::load::Commit;
use tandem::prefix::{PrefixIndex, PrefixUpdate};
use tandem::routing::{Context, RequestFacts, Strategy, select, select_and_charge};
use tandem::telemetry::PodLabels;

fn pod(slot: u32, role: Role, roleset: &Arc<str>) -> Arc<Pod> {
    let spec = PodSpec {
        key: PodKey { namespace: "bench".into(), name: format!("pod-{slot}").into() },
        uid: format!("{slot}").into(),
        restarts: 0,
        model: "m".into(),
        host: "127.0.0.1".into(),
        port: 8000,
        metric_port: 8000,
        engine: Engine::Vllm,
        kv_connector: None,
        bootstrap_port: 8998,
        role,
        roleset: Some(Arc::clone(roleset)),
        replica_index: None,
        serves_http: true,
        ready: true,
        terminating: false,
        labels: Arc::default(),
        config: None,
    };
    let state = Arc::new(PodState::new(slot, Arc::new(PodLabels::default())));
    state.signals.store(Arc::new(Signals {
        at: Some(Tick(1)),
        foreign_running: f64::from(slot % 5),
        generation_tps: Some(f64::from(slot % 100)),
        kv_usage: Some(0.3),
        drain_rate: Some(1.0),
        ..Signals::unknown()
    }));
    Arc::new(Pod { address: spec.address().into(), spec, state })
}

fn model(rolesets: usize, per_side: usize) -> Model {
    let mut slot = 0;
    let mut side = |role, name: &Arc<str>| -> Vec<Arc<Pod>> {
        (0..per_side)
            .map(|_| {
                slot += 1;
                pod(slot, role, name)
            })
            .collect()
    };
    let rolesets: Vec<Roleset> = (0..rolesets)
        .map(|i| {
            let name: Arc<str> = format!("rs-{i}").into();
            let (prefill, decode) = (side(Role::Prefill, &name), side(Role::Decode, &name));
            Roleset { name, prefill_replicas: prefill.len(), decode_replicas: decode.len(), prefill, decode }
        })
        .collect();
    let pods: Vec<_> = rolesets.iter().flat_map(|set| set.prefill.iter().chain(&set.decode)).cloned().collect();
    Model {
        name: "m".into(),
        routable: pods.clone(),
        pods,
        rolesets,
        partial: Vec::new(),
        standalone: Vec::new(),
        config: None,
        config_disagreements: 0,
        commit: Arc::new(Commit::default()),
        ..Model::default()
    }
}

/// Median time of one call.
fn median(mut call: impl FnMut(u64)) -> Duration {
    let mut times: Vec<Duration> = (0..201)
        .map(|round| {
            let start = Instant::now();
            for i in 0..20 {
                call(round * 20 + i);
            }
            start.elapsed() / 20
        })
        .collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn main() {
    let knobs = PrefixKnobs {
        tokenizer: Tokenizer::Character,
        block_size: 128,
        hash_seed: Some(1),
        budget_bytes: 256 << 20,
        max_blocks: None,
        max_idle: Duration::from_mins(20),
    };
    let hashes: Vec<u64> = (0..1000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    for (rolesets, per_side) in [(16, 2), (8, 1), (125, 4), (1, 500)] {
        let model = model(rolesets, per_side);
        let pods = model.pods.len();
        let index = PrefixIndex::new(&knobs);
        let prefills: Vec<_> = model.rolesets.iter().flat_map(|set| set.prefill.iter()).collect();
        let run = |label: &str, hashes: &[u64]| {
            let facts = RequestFacts { hashes, ..RequestFacts::default() };
            let context = |seed| Context { now: Tick(2), seed, max_metric_age: Duration::from_secs(3), prefix: &index };
            let pure = median(|seed| {
                black_box(select(&model, &facts, Strategy::Pd, &PdKnobs::default(), context(seed)).unwrap());
            });
            let charged = median(|seed| {
                let knobs = PdKnobs::default();
                black_box(select_and_charge(&model, &facts, Strategy::Pd, &knobs, context(seed)).unwrap());
            });
            println!(
                "{pods:5} pods in {rolesets:3} rolesets, {label:36} select {pure:>10.1?}  and charge {charged:>10.1?}"
            );
        };
        run("no prefix", &[]);
        run("1000 blocks, nobody holds them", &hashes);
        for pod in prefills.iter().step_by(8) {
            let update = PrefixUpdate {
                model: Arc::clone(&model.name),
                hashes: hashes.as_slice().into(),
                pod: Arc::clone(&pod.state),
            };
            index.offer(update);
            while index.drain(Tick(1)).more {}
        }
        run("1000 blocks, an eighth holds all", &hashes);
        for pod in &prefills {
            let update = PrefixUpdate {
                model: Arc::clone(&model.name),
                hashes: hashes.as_slice().into(),
                pod: Arc::clone(&pod.state),
            };
            index.offer(update);
            while index.drain(Tick(1)).more {}
        }
        run("1000 blocks, everybody holds all", &hashes);
    }
}
