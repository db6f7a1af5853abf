//! Loads of other replicas in decisions, and replicas that decide at the same time.

use std::collections::BTreeSet;

use super::super::fixtures::*;
use super::super::*;
use crate::fleet::{Role, Signals};
use crate::knobs::STRATEGIES;
use crate::load::{DecodeCharge, Peers, PrefillCharge, Share, TokenCharge};
use crate::rng::Rng;

const FLEET_MS: u64 = 1_000_000;

fn knobs(prefill_policy: PrefillPolicy, decode_policy: DecodePolicy) -> PdKnobs {
    PdKnobs { prefill_policy, decode_policy, ..PdKnobs::default() }
}

fn fleet() -> Model {
    let model = Builder::new().rolesets(5, 2, 2).build();
    for (pod, turn) in model.pods.iter().zip(0u32..) {
        // Some engines say how fast they are, and run two requests that nobody here sent; some say nothing.
        let rate = f64::from(100 + turn * 37 % 90);
        let known = Signals {
            generation_tps: Some(rate),
            running: Some(4.0),
            prefill_seconds_mean: Some(rate / 1e3),
            kv_usage: Some(rate / 400.0),
            foreign_running: 2.0,
            ..fresh()
        };
        set(pod, if turn % 3 == 0 { Signals::unknown() } else { known });
    }
    model
}

#[derive(Default)]
struct Held {
    prefills: Vec<PrefillCharge>,
    decodes: Vec<DecodeCharge>,
    tokens: Vec<TokenCharge>,
}

/// Random work on every pod: more than a fast path bears, with `heavy`.
fn work(model: &Model, seed: u64, heavy: bool) -> Held {
    let (mut rng, mut held) = (Rng::new(seed), Held::default());
    for pod in &model.pods {
        for _ in 0..rng.below(if heavy { 40 } else { 6 }) {
            held.prefills.push(PrefillCharge::open(&pod.state));
            held.tokens.push(TokenCharge::prefill(&pod.state, 1 + rng.below(9_000) as u64, NOW, Duration::ZERO));
        }
        for turn in 0..rng.below(if heavy { 40 } else { 6 }) {
            let mut charge = DecodeCharge::open(&pod.state);
            if turn % 2 == 0 {
                charge.hand_over();
            }
            held.decodes.push(charge);
            let begun = Tick(NOW.0 - rng.below(30_000) as u64 * 1_000_000);
            held.tokens.push(TokenCharge::decode(&pod.state, 1 + rng.below(9_000) as u64, begun, Duration::ZERO));
        }
    }
    held
}

/// All that `from` has charged is another replica's here.
fn publish(from: &Model, here: &Model) {
    for (theirs, ours) in from.pods.iter().zip(&here.pods) {
        let share = theirs.state.load.share(NOW, FLEET_MS);
        ours.state.load.remote.apply(&share, NOW, FLEET_MS);
    }
}

/// Where a request goes, and by which numbers.
fn outcome(model: &Model, strategy: Strategy, knobs: &PdKnobs, request: &RequestFacts<'_>, seed: u64) -> String {
    let decision = select(model, request, strategy, knobs, context(&index(), seed)).unwrap();
    let Decision { target, scores, fast_paths, .. } = decision;
    format!("{:?} {scores:?} {fast_paths:?}", slots(&target))
}

#[test]
fn a_charge_counts_alike_whoever_made_it() {
    let strategies = STRATEGIES.into_iter().map(|name| Strategy::parse(name).unwrap());
    let pd: Vec<(Strategy, PdKnobs)> = PrefillPolicy::ALL
        .into_iter()
        .flat_map(|prefill| DecodePolicy::ALL.map(|decode| (Strategy::Pd, knobs(prefill, decode))))
        .chain(strategies.map(|strategy| (strategy, PdKnobs::default())))
        .collect();
    for (strategy, knobs) in pd {
        for splittable in [Splittable::Yes, Splittable::No] {
            let request = RequestFacts { prompt_tokens: 700, splittable, ..request() };
            for seed in 0..12 {
                let (own, remote) = (fleet(), fleet());
                let _held = work(&own, seed, seed % 2 == 0);
                publish(&own, &remote);
                let [own, remote] = [&own, &remote].map(|model| outcome(model, strategy, &knobs, &request, seed));
                assert_eq!(own, remote, "{strategy:?} {:?}/{:?} {seed}", knobs.prefill_policy, knobs.decode_policy);
            }
        }
    }
}

#[test]
fn half_own_and_half_remote_is_all() {
    for (prefill, decode) in [
        (PrefillPolicy::TokenLoad, DecodePolicy::TokenLoad),
        (PrefillPolicy::PrefixCache, DecodePolicy::LoadBalancing),
        (PrefillPolicy::Conductor, DecodePolicy::LeastRequest),
    ] {
        let knobs = knobs(prefill, decode);
        for seed in 0..20 {
            let [all, half, other] = [fleet(), fleet(), fleet()];
            let _held = [work(&all, seed, false), work(&all, seed + 100, false)];
            let _held = [work(&half, seed, false), work(&other, seed + 100, false)];
            publish(&other, &half);
            let [all, half] = [&all, &half].map(|model| outcome(model, Strategy::Pd, &knobs, &request(), seed));
            assert_eq!(all, half, "{prefill:?}/{decode:?} {seed}");
        }
    }
}

#[test]
fn a_remote_share_that_fades_no_longer_decides() {
    let model = Builder::new().rolesets(2, 1, 1).build();
    let busy = Share { prefills: 9, prefill_tokens: 90_000, kv_tokens: 90_000, ..Share::ZERO };
    model.pods[0].state.load.remote.apply(&busy, NOW, FLEET_MS);
    let knobs = knobs(PrefillPolicy::TokenLoad, DecodePolicy::TokenLoad);
    let firsts = |ms: u64| {
        let index = index();
        let pick = |seed| {
            let context = Context { now: NOW.plus(Duration::from_millis(ms)), ..context(&index, seed) };
            slots(&select(&model, &request(), Strategy::Pd, &knobs, context).unwrap().target).0
        };
        (0..40).filter(|seed| pick(*seed) == Some(0)).count()
    };
    assert_eq!([firsts(0), firsts(3_000), firsts(12_000)], [0, 0, 0]);
    assert!((8..32).contains(&firsts(13_000)), "a tie, for all that is known");
}

fn pick(model: &Model, knobs: &PdKnobs, peers: Peers, seed: u64) -> (Option<u32>, u32) {
    let index = index();
    let decision = select(model, &request(), Strategy::Pd, knobs, Context { peers, ..context(&index, seed) }).unwrap();
    slots(&decision.target)
}

#[test]
fn replicas_that_decide_at_once_go_different_ways() {
    for (prefill, decode) in PrefillPolicy::ALL.into_iter().flat_map(|p| DecodePolicy::ALL.map(|d| (p, d))) {
        let knobs = knobs(prefill, decode);
        for (rolesets, pods) in [(8, 1), (1, 8)] {
            let model = Builder::new().rolesets(rolesets, pods, pods).build();
            // One pod is idler than the others, so that all would take it.
            let charge = |pod: &Arc<Pod>| {
                let tokens =
                    [TokenCharge::prefill, TokenCharge::decode].map(|make| make(&pod.state, 10, NOW, Duration::ZERO));
                (PrefillCharge::open(&pod.state), DecodeCharge::open(&pod.state), tokens)
            };
            let busier = model.pods.iter().filter(|pod| pod.state.slot != model.rolesets[0].prefill[0].state.slot);
            let _held: Vec<_> =
                busier.filter(|pod| pod.state.slot != model.rolesets[0].decode[0].state.slot).map(charge).collect();
            let picks = |unseen| -> BTreeSet<Option<u32>> {
                (0..8).map(|rank| pick(&model, &knobs, Peers { rank, count: 8, unseen, view: 5 }, 3).0).collect()
            };
            assert_eq!(picks(0.0).len(), 1, "{prefill:?}/{decode:?}: equal views, equal picks");
            let apart = picks(3.5).len();
            assert!(apart >= 5, "{prefill:?}/{decode:?} {rolesets}: {apart} prefill pods for 8 replicas");
        }
    }
}

#[test]
fn a_replica_that_is_alone_decides_as_ever() {
    for seed in 0..30 {
        let model = fleet();
        let _held = work(&model, seed, seed % 2 == 0);
        for knobs in [PdKnobs::default(), knobs(PrefillPolicy::TokenLoad, DecodePolicy::TokenLoad)] {
            let alone = pick(&model, &knobs, Peers::ALONE, seed);
            assert_eq!(pick(&model, &knobs, Peers { rank: 7, count: 1, unseen: 40.0, view: 5 }, seed), alone);
            assert_eq!(
                pick(&model, &knobs, Peers { rank: 7, count: 9, unseen: 0.0, view: 5 }, seed),
                alone,
                "it misses nothing"
            );
        }
    }
}

/// Work in the engines that replicas have told of is not somebody else's once more.
#[test]
fn what_replicas_tell_is_not_counted_again_from_the_engine() {
    let model = Builder::new().rolesets(1, 1, 1).build();
    let decode = &model.pods[1];
    let mut own = DecodeCharge::open(&decode.state);
    own.hand_over();
    decode.state.load.remote.apply(&Share { running: 5, ..Share::ZERO }, NOW, FLEET_MS);
    let page = crate::scrape::Page { running: Some(9.0), ..crate::scrape::Page::default() };
    let known = crate::scrape::in_flight(decode.state.load.total(NOW));
    let signals = crate::scrape::Derived::default().signals(&page, NOW, Role::Decode, known, 0);
    assert_eq!((known, signals.foreign_running), (6, 3.0));
    set(decode, signals);
    let count = |now| {
        let index = index();
        let context = Context { now, max_metric_age: Duration::from_mins(1), ..context(&index, 1) };
        let knobs = knobs(PrefillPolicy::LeastRequest, DecodePolicy::LeastRequest);
        select(&model, &request(), Strategy::Pd, &knobs, context).unwrap().scores.decode_count
    };
    assert_eq!(count(NOW), 9.0, "1 own, 5 published, 3 of somebody who publishes nothing");
    // Half faded: the next scrape finds the rest in the engine.
    let later = NOW.plus(Duration::from_secs(8));
    let known = crate::scrape::in_flight(decode.state.load.total(later));
    set(decode, crate::scrape::Derived::default().signals(&page, later, Role::Decode, known, 0));
    assert_eq!((known, count(later)), (3, 9.0));
}
