//! `load-balance`, `vtc-basic`, `prefix-cache-preble`, `lora-affinity`, the gate ahead of them and the limit per pod, with
//! numbers worked out by hand.

use std::collections::BTreeSet;

use super::super::fixtures::*;
use super::super::*;
use crate::fleet::{Adapters, Role, Signals};
use crate::knobs::{GateKnobs, StrategyKnobs};
use crate::load::{DecodeCharge, PrefillCharge, UserTokens};
use crate::prefix::PrefixUpdate;

fn plain(count: usize) -> Model {
    (0..count).fold(Builder::new(), |builder, _| builder.pod(Role::Other, None, Setup::default())).build()
}

fn strategy(text: &str) -> Strategy {
    Strategy::parse(text).unwrap()
}

fn decide(model: &Model, request: &RequestFacts<'_>, text: &str, knobs: &PdKnobs, seed: u64) -> Decision {
    select(model, request, strategy(text), knobs, context(&index(), seed)).unwrap()
}

/// The pods that may win, over many seeds.
fn winners(model: &Model, request: &RequestFacts<'_>, text: &str, knobs: &PdKnobs) -> Vec<u32> {
    let seen: BTreeSet<u32> = (0..80).map(|seed| slots(&decide(model, request, text, knobs, seed).target).1).collect();
    seen.into_iter().collect()
}

fn hold(model: &Model, slot: usize, count: usize) -> Vec<DecodeCharge> {
    (0..count).map(|_| DecodeCharge::open(&model.pods[slot].state)).collect()
}

#[test]
fn load_balance_goes_by_the_time_until_a_pod_is_done() {
    // (requests, drain rate, KV usage) of each pod; the winners and the score.
    for (pods, expected, score) in [
        (vec![(4, Some(2.0), None), (3, Some(1.0), None)], vec![0], 2.0),
        (vec![(4, Some(2.0), None), (2, Some(1.0), None)], vec![0, 1], 2.0),
        // Equal times: the emptier cache; an engine that does not say counts as empty.
        (vec![(4, Some(2.0), Some(0.5)), (2, Some(1.0), Some(0.4))], vec![1], 2.0),
        (vec![(4, Some(2.0), Some(0.5)), (2, Some(1.0), None)], vec![1], 2.0),
        // Without a rate, a pod counts as the mean of 0.5 and 1.5.
        (vec![(2, Some(0.5), None), (3, None, None), (6, Some(1.5), None)], vec![1], 3.0),
        (vec![(2, Some(0.0), None), (1, None, None)], vec![1], 1.0),
        (vec![(2, None, None), (1, None, None)], vec![1], 1.0),
    ] {
        let model = plain(pods.len());
        let mut held = Vec::new();
        for (slot, (requests, drain_rate, kv_usage)) in pods.iter().enumerate() {
            held.extend(hold(&model, slot, *requests));
            set(&model.pods[slot], Signals { drain_rate: *drain_rate, kv_usage: *kv_usage, ..fresh() });
        }
        let knobs = PdKnobs::default();
        assert_eq!(winners(&model, &request(), "load-balance", &knobs), expected, "{pods:?}");
        assert_eq!(decide(&model, &request(), "load-balance", &knobs, 1).scores.decode, Some(score), "{pods:?}");
    }
    // Old rates are none: then the fewest requests.
    let model = plain(2);
    let stale = Some(crate::clock::Tick::from_millis(90_000));
    set(&model.pods[0], Signals { drain_rate: Some(9.0), at: stale, ..fresh() });
    let _held = hold(&model, 0, 1);
    assert_eq!(winners(&model, &request(), "load-balance", &PdKnobs::default()), [1]);
}

#[test]
fn vtc_basic_gives_a_user_its_place() {
    let user = |tokens, bounds| RequestFacts { user: Some(UserTokens { tokens, bounds }), ..request() };
    // Four pods. The step is the larger of 1000 and the middle of the bounds; chance adds less than 0.1.
    for (tokens, bounds, busy, expected) in [
        (0.0, None, vec![], 0),
        (4500.0, Some((1000.0, 8000.0)), vec![], 1),
        (2700.0, Some((1000.0, 8000.0)), vec![], 1),
        (1800.0, Some((1000.0, 8000.0)), vec![], 0),
        (400.0, Some((400.0, 400.0)), vec![], 0),
        (2000.0, Some((400.0, 1600.0)), vec![], 2),
        (9000.0, Some((2000.0, 4000.0)), vec![], 3),
        (1e12, Some((2000.0, 4000.0)), vec![], 3),
        // 1.0 of distance is a whole pod's load: pod 1 with 7 of 10 costs 0.7, pod 0 1.0, with 10 the place is worth less.
        (4500.0, Some((1000.0, 8000.0)), vec![(1, 7)], 1),
        (2700.0, Some((1000.0, 8000.0)), vec![(1, 7)], 0),
    ] {
        let model = plain(4);
        let _held: Vec<_> = busy.iter().flat_map(|(slot, count)| hold(&model, *slot, *count)).collect();
        let mut knobs = PdKnobs::default();
        knobs.strategies.vtc.max_pod_load = 10.0;
        let seen = winners(&model, &user(tokens, bounds), "vtc-basic", &knobs);
        assert_eq!(seen, [expected], "{tokens} {bounds:?} {busy:?}");
        let score = decide(&model, &user(tokens, bounds), "vtc-basic", &knobs, 1).scores.decode.unwrap();
        assert!((0.0..1.2).contains(&score), "{score}");
    }
    // Without a user, any pod; and in a list it has no say.
    let model = plain(3);
    let knobs = PdKnobs::default();
    assert_eq!(winners(&model, &request(), "vtc-basic", &knobs), [0, 1, 2]);
    let _held = hold(&model, 0, 1);
    assert_eq!(winners(&model, &request(), "vtc-basic:9,least-request", &knobs), [1, 2]);
    // Weights: without fairness only the load counts.
    let mut fair = PdKnobs::default();
    fair.strategies.vtc.fairness_weight = 0.0;
    fair.strategies.vtc.max_pod_load = 1.0;
    assert_eq!(winners(&model, &user(0.0, None), "vtc-basic", &fair), [1, 2]);
}

#[test]
fn what_a_request_counts_for_its_user() {
    let vtc = StrategyKnobs::default().vtc;
    // 100 of the prompt, 150 expected of the answer, which count twice.
    assert_eq!(weighted_tokens(100, &vtc), 400.0);
    assert_eq!(weighted_tokens(1, &vtc), 1.0 + 2.0 * 2.0);
    assert_eq!(weighted_tokens(0, &vtc), 0.0);
}

#[test]
fn lora_affinity_stays_with_the_adapter() {
    let adapters = |max, running: &str, waiting: &str| Some(Arc::new(Adapters::new(max, [running, waiting])));
    let model = Model { name: "chat-lora".into(), ..plain(4) };
    for (pods, busy, expected) in [
        // Running or waiting is affinity; a prefix of a name is not.
        (
            [adapters(4, "other,chat-lora", ""), adapters(4, "", "chat-lora"), adapters(4, "chat-lora-2", ""), None],
            9,
            vec![0, 1],
        ),
        // Of those that have it, the fewest requests.
        ([adapters(4, "chat-lora", ""), adapters(4, "chat-lora", ""), None, None], 0, vec![1]),
        // Nobody has it: those with room, and those that say nothing.
        ([adapters(1, "a", ""), adapters(2, "a", "b"), adapters(3, "a", "b"), None], 9, vec![2, 3]),
        // Nobody has room either: the fewest requests.
        ([adapters(1, "a", ""), adapters(1, "b", ""), adapters(1, "c", ""), adapters(1, "d", "")], 0, vec![1, 2, 3]),
    ] {
        for (pod, adapters) in model.pods.iter().zip(&pods) {
            set(pod, Signals { adapters: adapters.clone(), ..fresh() });
        }
        let _held = if busy < 4 { hold(&model, busy, 1) } else { Vec::new() };
        let knobs = PdKnobs { strategies: sure(1.0), ..PdKnobs::default() };
        assert_eq!(winners(&model, &request(), "lora-affinity", &knobs), expected, "{pods:?}");
    }
    // Threshold 0: always to those that could load it.
    for (pod, adapters) in
        model.pods.iter().zip([adapters(2, "chat-lora", ""), adapters(2, "", ""), None, adapters(0, "", "")])
    {
        set(pod, Signals { adapters, ..fresh() });
    }
    let knobs = PdKnobs { strategies: sure(0.0), ..PdKnobs::default() };
    assert_eq!(winners(&model, &request(), "lora-affinity", &knobs), [1, 2]);
}

fn sure(threshold: f64) -> StrategyKnobs {
    StrategyKnobs { lora_threshold: crate::knobs::LoraThreshold(threshold), ..StrategyKnobs::default() }
}

#[test]
fn preble_goes_where_most_of_the_prompt_is_or_where_work_is_cheap() {
    let model = plain(3);
    let index = index();
    let hashes: Vec<u64> = (1..=10).collect();
    let holds = |slot: usize, blocks: usize| {
        let pod = Arc::clone(&model.pods[slot].state);
        index.offer(PrefixUpdate { model: Arc::clone(&model.name), hashes: hashes[..blocks].into(), pod });
        index.drain(NOW);
    };
    let knobs = PdKnobs::default();
    let window = knobs.strategies.preble.window;
    let facts = RequestFacts { hashes: &hashes, ..request() };
    let pick = || {
        let seen: BTreeSet<u32> = (0..60)
            .map(|seed| {
                let decision = select(&model, &facts, strategy("prefix-cache-preble"), &knobs, context(&index, seed));
                slots(&decision.unwrap().target).1
            })
            .collect();
        seen.into_iter().collect::<Vec<_>>()
    };
    let work = |slot: usize, seconds: f64| model.pods[slot].state.recent.add(seconds, NOW, window);
    assert_eq!(pick(), [0, 1, 2]);
    // The least cost of the last minutes.
    work(0, 7.0);
    work(1, 8.0);
    work(2, 7.5);
    assert_eq!(pick(), [0]);
    // Half of the prompt is not enough to go there, more is.
    holds(1, 5);
    assert_eq!(pick(), [0]);
    holds(1, 6);
    assert_eq!(pick(), [1]);
    // Of two that hold most, the one with the fewer requests lately; who holds less is out.
    holds(2, 6);
    holds(0, 5);
    work(2, 0.1);
    assert_eq!(pick(), [1]);
    holds(2, 10);
    assert_eq!(pick(), [2]);
}

#[test]
fn the_gate_comes_before_every_strategy() {
    let knobs = PdKnobs::default();
    let names = crate::knobs::STRATEGIES.iter().filter(|name| **name != "pd").copied();
    for name in names.chain(["least-kv-cache:9,random"]) {
        let model = plain(3);
        // Everything but the load speaks for pod 0.
        set(&model.pods[0], Signals { kv_usage: Some(0.0), drain_rate: Some(1e6), ..fresh() });
        for pod in &model.pods[1..] {
            set(pod, Signals { kv_usage: Some(0.9), drain_rate: Some(0.1), ..fresh() });
        }
        let facts = RequestFacts { affinity: Affinity { address: Some("10.0.0.0:8000"), key: None }, ..request() };
        let mut held = hold(&model, 0, 8);
        let decision = decide(&model, &facts, name, &knobs, 1);
        assert!(!decision.fast_paths.gate, "{name}: 8 apart is not too far");
        held.extend(hold(&model, 0, 1));
        for seed in 0..30 {
            let decision = decide(&model, &facts, name, &knobs, seed);
            assert_ne!(slots(&decision.target).1, 0, "{name}");
            assert!(decision.fast_paths.gate && decision.steps().starts_with("imbalance_gate"), "{name}");
            assert_eq!(decision.candidates, (0, 3));
        }
        // A wider gate, as the manifests of the reference have it.
        let wide = StrategyKnobs { gate: GateKnobs { spread: 16, factor: None }, ..StrategyKnobs::default() };
        let wide = PdKnobs { strategies: wide, ..PdKnobs::default() };
        assert!(!decide(&model, &facts, name, &wide, 1).fast_paths.gate, "{name}");
    }
    // `pd` has steps of its own.
    let model = Builder::new().roleset("a", 2, 2).build();
    let _held: Vec<_> = (0..10).map(|_| PrefillCharge::open(&model.pods[0].state)).collect();
    assert!(!decide(&model, &request(), "pd", &knobs, 1).fast_paths.gate);
}

fn limited(limit: u64) -> PdKnobs {
    PdKnobs {
        strategies: StrategyKnobs { requests_inflight: Some(limit), ..StrategyKnobs::default() },
        ..PdKnobs::default()
    }
}

#[test]
fn no_pod_gets_more_than_its_profile_lets_it_have() {
    let index = index();
    for name in crate::knobs::STRATEGIES.iter().filter(|name| **name != "pd") {
        let model = plain(3);
        let mut held = Vec::new();
        for seed in 0..6 {
            let context = context(&index, seed);
            held.push(select_and_charge(&model, &request(), strategy(name), &limited(2), context).unwrap());
        }
        let loads: Vec<u64> = model.pods.iter().map(|pod| pod.state.load.view().in_flight()).collect();
        assert_eq!(loads, [2, 2, 2], "{name}");
        let error = select(&model, &request(), strategy(name), &limited(2), context(&index, 9)).unwrap_err();
        assert_eq!(error, RoutingError::Saturated { limit: 2 }, "{name}");
        let (decision, charges) = held.remove(0);
        drop(charges);
        let again = select(&model, &request(), strategy(name), &limited(2), context(&index, 10)).unwrap();
        assert_eq!(slots(&again.target), slots(&decision.target), "{name}");
    }
}

#[test]
fn pairs_are_limited_by_either_side() {
    let model = Builder::new().rolesets(2, 1, 1).combined(None).build();
    let pick = |limit| select(&model, &request(), Strategy::Pd, &limited(limit), context(&index(), 1));
    let pair = |limit| pick(limit).map(|decision| slots(&decision.target));
    // Pods 0 and 1 are roleset a, 2 and 3 roleset b.
    let prefill = PrefillCharge::open(&model.pods[0].state);
    assert_eq!(pair(1), Ok((Some(2), 3)), "the prefill pod of a has its one");
    let decode = DecodeCharge::open(&model.pods[3].state);
    assert_eq!(pair(1), Err(RoutingError::Saturated { limit: 1 }), "and the decode pod of b");
    assert!(pair(2).is_ok());
    drop(prefill);
    assert_eq!(pair(1), Ok((Some(0), 1)));
    drop(decode);
    assert!(pick(1).is_ok());
}

/// Many at once: the limit holds, since a selection and its charge are one step.
#[test]
fn the_limit_holds_however_many_ask_at_once() {
    let model = plain(4);
    let index = index();
    let served = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (model, index, served) = (&model, &index, &served);
            scope.spawn(move || {
                for turn in 0..10 {
                    let context = context(index, thread * 100 + turn);
                    if let Ok((_, charges)) =
                        select_and_charge(model, &request(), Strategy::LeastRequest, &limited(5), context)
                    {
                        assert!(!charges.blind);
                        served.lock().unwrap().push(charges);
                    }
                }
            });
        }
    });
    let served = served.into_inner().unwrap();
    assert_eq!(served.len(), 20);
    assert!(model.pods.iter().all(|pod| pod.state.load.view().in_flight() == 5));
}
