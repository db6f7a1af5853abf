//! What one selection costs, charge and release included: `cargo bench --bench selection`.
//!
//! Every policy over 64 pods in 16 rolesets (goal: below 20 µs) and over 1,000 pods in 125 rolesets (goal: below 150 µs).
//! The prompt has 100 blocks, which an eighth of the prefill pods hold; every pod has fresh metrics, and token charges
//! where the policy counts tokens; then the other strategies. The group `prefix_lookup` shows what long prompts add.
#![allow(missing_docs, clippy::unwrap_used, clippy::disallowed_methods)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use tandem::clock::Tick;
use tandem::fleet::{Engine, Model, Pod, PodKey, PodSpec, PodState, Role, Roleset, Signals};
use tandem::knobs::{DecodePolicy, PdKnobs, PrefillPolicy, PrefixKnobs, STRATEGIES, Tokenizer};
use tandem::load::{Commit, Peers, TokenCharge};
use tandem::prefix::{PrefixIndex, PrefixUpdate};
use tandem::routing::{Affinity, Context, RequestFacts, Strategy, select_and_charge};
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
        pd: true,
        draining: false,
        tls: false,
        rank: 0,
        ready: true,
        terminating: false,
        labels: Arc::default(),
        config: None,
        also: Vec::new(),
        claim: None,
    };
    let state = Arc::new(PodState::new(slot, Arc::new(PodLabels::default())));
    state.signals.store(Arc::new(Signals {
        at: Some(Tick(1)),
        foreign_running: f64::from(slot % 5),
        running: Some(f64::from(1 + slot % 7)),
        prefill_seconds_mean: Some(0.2),
        waiting: Some(0.0),
        prompt_tps: Some(f64::from(slot % 90)),
        generation_tps: Some(f64::from(slot % 100)),
        kv_usage: Some(0.3),
        drain_rate: Some(1.0),
        ..Signals::unknown()
    }));
    Arc::new(Pod::new(spec, state))
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

fn prefix_index() -> PrefixIndex {
    PrefixIndex::new(&PrefixKnobs {
        tokenizer: Tokenizer::Character,
        block_size: 128,
        hash_seed: Some(1),
        budget_bytes: 256 << 20,
        max_blocks: None,
        max_idle: Duration::from_mins(20),
    })
}

fn hashes(blocks: u64) -> Vec<u64> {
    (1..=blocks).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

/// Every `nth` prefill pod holds the blocks.
fn fill(index: &PrefixIndex, model: &Model, hashes: &[u64], nth: usize) {
    for pod in model.rolesets.iter().flat_map(|set| &set.prefill).step_by(nth) {
        let pod = Arc::clone(&pod.state);
        index.offer(PrefixUpdate { model: Arc::clone(&model.name), hashes: hashes.into(), pod });
        while index.drain(Tick(1)).more {}
    }
}

/// (pods, rolesets, pods on each side of one)
const FLEETS: [(&str, usize, usize); 2] = [("64 pods", 16, 2), ("1000 pods", 125, 4)];

fn place(model: &Model, index: &PrefixIndex, hashes: &[u64], knobs: &PdKnobs, seed: u64) {
    place_by(model, index, hashes, Strategy::Pd, knobs, seed);
}

fn place_by(model: &Model, index: &PrefixIndex, hashes: &[u64], strategy: Strategy, knobs: &PdKnobs, seed: u64) {
    let affinity = Affinity { address: None, key: Some(b"a session of some length") };
    let facts = RequestFacts { hashes, affinity, prompt_tokens: 3200, prefix_tokens: 3200, ..RequestFacts::default() };
    let context =
        Context { now: Tick(2), seed, max_metric_age: Duration::from_secs(3), prefix: index, peers: Peers::ALONE };
    black_box(select_and_charge(model, &facts, strategy, knobs, context).unwrap());
}

fn policies(criterion: &mut Criterion) {
    let hashes = hashes(100);
    for (fleet, rolesets, per_side) in FLEETS {
        let model = model(rolesets, per_side);
        let index = prefix_index();
        fill(&index, &model, &hashes, 8);
        let _charged: Vec<TokenCharge> = model
            .pods
            .iter()
            .map(|pod| {
                let tokens = u64::from(1 + pod.state.slot % 13) * 100;
                let charge = if pod.spec.role == Role::Prefill { TokenCharge::prefill } else { TokenCharge::decode };
                charge(&pod.state, tokens, Tick(1), Duration::ZERO)
            })
            .collect();
        let mut group = criterion.benchmark_group(fleet);
        for prefill_policy in PrefillPolicy::ALL {
            for decode_policy in DecodePolicy::ALL {
                let knobs = PdKnobs {
                    prefill_policy,
                    decode_policy,
                    // Wide open, so that every candidate is scored.
                    decode_imbalance_min_spread: 1e9,
                    decode_throughput_min_spread: 1e9,
                    decode_score_ratio: 1e9,
                    ..PdKnobs::default()
                };
                let id = BenchmarkId::new(prefill_policy.name(), decode_policy.name());
                let mut seed = 0;
                group.bench_function(id, |bencher| {
                    bencher.iter(|| {
                        seed += 1;
                        place(&model, &index, &hashes, &knobs, seed);
                    });
                });
            }
        }
        group.finish();
    }
}

fn strategies(criterion: &mut Criterion) {
    let hashes = hashes(100);
    for (fleet, rolesets, per_side) in FLEETS {
        let model = model(rolesets, per_side);
        let index = prefix_index();
        fill(&index, &model, &hashes, 8);
        let mut group = criterion.benchmark_group(fleet);
        for name in STRATEGIES.into_iter().skip(1).chain(["prefix-cache:2,least-request,least-latency"]) {
            let strategy = Strategy::parse(name).unwrap();
            let mut seed = 0;
            group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
                bencher.iter(|| {
                    seed += 1;
                    place_by(&model, &index, &hashes, strategy, &PdKnobs::default(), seed);
                });
            });
        }
        group.finish();
    }
}

fn prefix_lookup(criterion: &mut Criterion) {
    let hashes = hashes(1000);
    let mut group = criterion.benchmark_group("prefix_lookup of 1000 blocks");
    for (fleet, rolesets, per_side) in FLEETS {
        let model = model(rolesets, per_side);
        for (held, nth) in [("nobody holds them", usize::MAX), ("an eighth holds all", 8), ("everybody holds all", 1)] {
            let index = prefix_index();
            if nth != usize::MAX {
                fill(&index, &model, &hashes, nth);
            }
            let mut seed = 0;
            group.bench_function(BenchmarkId::new(fleet, held), |bencher| {
                bencher.iter(|| {
                    seed += 1;
                    place(&model, &index, &hashes, &PdKnobs::default(), seed);
                });
            });
        }
    }
    group.finish();
}

fn quick() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800))
}

criterion_group! { name = selection; config = quick(); targets = policies, strategies, prefix_lookup }
criterion_main!(selection);
