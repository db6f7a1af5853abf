//! One table per formula, and what users reported.

use super::super::fixtures::*;
use super::super::*;
use super::view::View;
use super::*;
use crate::fleet::{Role, Signals};
use crate::load::DecodeCharge;
use crate::prefix::PrefixUpdate;

fn strategy(text: &str) -> Strategy {
    Strategy::parse(text).unwrap()
}

fn plain_pods(count: usize) -> Model {
    (0..count).fold(Builder::new(), |builder, _| builder.pod(Role::Other, None, Setup::default())).build()
}

fn decide(model: &Model, request: &RequestFacts<'_>, text: &str, seed: u64) -> Decision {
    let index = index();
    select(model, request, strategy(text), &PdKnobs::default(), context(&index, seed)).unwrap()
}

/// The slots that may win, over many seeds.
fn winners(model: &Model, text: &str) -> Vec<u32> {
    let mut seen: Vec<u32> = (0..60).map(|seed| slots(&decide(model, &request(), text, seed).target).1).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

fn missing(model: &Model, text: &str) -> Vec<&'static str> {
    decide(model, &request(), text, 1).missing.names().collect()
}

const KV: Signals = Signals {
    at: Some(NOW),
    kv_usage: Some(0.5),
    running: None,
    waiting: None,
    prefill_prealloc_queue: None,
    decode_prealloc_queue: None,
    generation_tps: None,
    prompt_tps: None,
    prefill_seconds_mean: None,
    foreign_running: 0.0,
    drain_rate: None,
    adapters: None,
};

/// The score of one pod with these signals and requests of ours in flight.
fn score(text: &str, signals: Signals, in_flight: usize) -> Option<f64> {
    // The sibling makes the strategy look at scores, and knows nothing itself.
    let model = plain_pods(2);
    set(&model.pods[0], signals);
    let held: Vec<_> = (0..in_flight).map(|_| DecodeCharge::open(&model.pods[0].state)).collect();
    let index = index();
    let context = context(&index, 1);
    let view = View::read(&model.pods[0], context);
    drop(held);
    match strategy(text) {
        Strategy::LeastKvCache | Strategy::LeastGpuCache => cache_usage::score(&view),
        Strategy::LeastBusyTime => busy_time::score(&view),
        Strategy::LeastUtilization => utilization::score(&view, utilization::batch(std::slice::from_ref(&view))),
        Strategy::Throughput => throughput::score(&view),
        Strategy::LeastLatency => latency::scores(std::slice::from_ref(&view)).0[0],
        _ => unreachable!(),
    }
}

#[test]
fn formulas() {
    let kv = |usage| Signals { kv_usage: usage, ..KV };
    let busy = |running, waiting| Signals { running, waiting, kv_usage: None, ..KV };
    let rates = |prompt_tps, generation_tps| Signals { prompt_tps, generation_tps, kv_usage: None, ..KV };
    let latency = |prefill, running, waiting, rate| Signals {
        prefill_seconds_mean: prefill,
        running,
        waiting,
        generation_tps: rate,
        kv_usage: None,
        ..KV
    };
    let stale = Signals { at: Some(crate::clock::Tick::from_millis(96_999)), ..KV };
    let table: Vec<(&str, Signals, usize, Option<f64>)> = vec![
        ("least-kv-cache", kv(Some(0.25)), 0, Some(0.25)),
        ("least-kv-cache", kv(Some(0.0)), 7, Some(0.0)),
        ("least-kv-cache", kv(Some(f64::NAN)), 0, None),
        ("least-kv-cache", kv(Some(-0.1)), 0, None),
        ("least-kv-cache", stale, 0, None),
        ("least-gpu-cache", kv(Some(1.0)), 0, Some(1.0)),
        ("least-busy-time", busy(Some(3.0), Some(4.0)), 0, Some(7.0)),
        ("least-busy-time", busy(Some(3.0), None), 0, Some(3.0)),
        ("least-busy-time", busy(Some(3.0), Some(4.0)), 7, Some(7.0)),
        ("least-busy-time", busy(Some(3.0), Some(4.0)), 8, Some(8.0)),
        ("least-busy-time", busy(None, Some(4.0)), 9, None),
        ("least-utilization", Signals { running: Some(64.0), ..kv(Some(0.5)) }, 0, Some(0.5)),
        ("least-utilization", Signals { running: Some(128.0), waiting: Some(64.0), ..kv(Some(0.5)) }, 0, Some(0.75)),
        ("least-utilization", Signals { running: Some(512.0), waiting: Some(256.0), ..kv(Some(0.5)) }, 0, Some(1.5)),
        ("least-utilization", kv(Some(0.5)), 200, Some(0.5)),
        ("least-utilization", busy(Some(64.0), None), 0, Some(0.25)),
        ("least-utilization", busy(None, None), 0, None),
        ("throughput", rates(Some(100.0), Some(50.0)), 0, Some(250.0)),
        ("throughput", rates(Some(100.0), None), 0, Some(200.0)),
        ("throughput", rates(None, Some(50.0)), 0, Some(50.0)),
        ("throughput", rates(None, None), 0, None),
        ("least-latency", latency(Some(0.5), Some(4.0), Some(0.0), Some(400.0)), 0, Some(0.5 + 1.0)),
        ("least-latency", latency(Some(0.5), Some(4.0), Some(3.0), Some(400.0)), 0, Some(2.0 + 1.0)),
        ("least-latency", latency(Some(0.5), Some(4.0), Some(3.0), Some(400.0)), 9, Some(3.0 + 1.0)),
        ("least-latency", latency(Some(0.5), Some(0.0), None, Some(0.0)), 0, Some(0.5)),
        ("least-latency", latency(Some(0.5), None, None, None), 2, Some(1.5)),
        ("least-latency", latency(None, Some(4.0), None, Some(100.0)), 0, Some(4.0)),
        // A rate that has not caught up with what runs is none; at the bound it is one.
        ("least-latency", latency(None, Some(4.0), None, Some(0.9)), 0, None),
        ("least-latency", latency(None, Some(4.0), None, Some(1.0)), 0, Some(400.0)),
        ("least-latency", latency(None, None, None, Some(50.0)), 0, None),
    ];
    for (name, signals, in_flight, expected) in table {
        assert_eq!(score(name, signals.clone(), in_flight), expected, "{name} {in_flight} {signals:?}");
    }
}

#[test]
fn the_least_score_wins_then_the_fewest_in_flight() {
    for name in ["least-kv-cache", "least-gpu-cache"] {
        let model = plain_pods(3);
        for (pod, usage) in model.pods.iter().zip([0.5, 0.25, 0.25]) {
            set(pod, Signals { kv_usage: Some(usage), ..fresh() });
        }
        assert_eq!(winners(&model, name), [1, 2]);
        let busy = DecodeCharge::open(&model.pods[1].state);
        assert_eq!(winners(&model, name), [2], "in flight decides before chance");
        let decision = decide(&model, &request(), name, 1);
        assert_eq!((decision.scores.decode, decision.scores.decode_count), (Some(0.25), 0.0));
        let considered: Vec<_> =
            decision.explanation.decodes.iter().map(|one| (one.slot, one.score, one.count)).collect();
        assert_eq!(considered, [(1, Some(0.25), 1.0), (2, Some(0.25), 0.0), (0, Some(0.5), 0.0)]);
        assert_eq!(decision.explanation.ties.total, 1);
        drop(busy);
    }
}

/// R43: a signal that no engine reports leaves a decision that repeats, on what is known, and is named.
#[test]
fn r43_without_the_signal_requests_in_flight_decide() {
    for (name, expected) in [
        ("least-kv-cache", vec!["kv_cache_usage_perc"]),
        ("least-gpu-cache", vec!["kv_cache_usage_perc"]),
        ("least-busy-time", vec!["num_requests_running"]),
        ("least-utilization", vec!["kv_cache_usage_perc"]),
        ("throughput", vec!["avg_generation_throughput_toks_per_s"]),
        ("least-latency", vec!["avg_generation_throughput_toks_per_s", "request_prefill_time_seconds"]),
        ("throughput,least-kv-cache", vec!["kv_cache_usage_perc", "avg_generation_throughput_toks_per_s"]),
        ("least-request:2,random:0", vec![]),
        ("prefix-cache", vec![]),
    ] {
        let model = plain_pods(3);
        model.pods.iter().for_each(|pod| set(pod, fresh()));
        set(&model.pods[2], Signals { foreign_running: 1.0, ..fresh() });
        let held = DecodeCharge::open(&model.pods[0].state);
        assert_eq!(winners(&model, name), [1], "{name}");
        assert_eq!(missing(&model, name), expected, "{name}");
        drop(held);
        // One that reports is enough: then nothing is missing.
        set(
            &model.pods[0],
            Signals { running: Some(2.0), generation_tps: Some(50.0), prefill_seconds_mean: Some(0.1), ..KV },
        );
        assert_eq!(missing(&model, name), Vec::<&str>::new(), "{name}");
    }
}

/// R47: seven busy pods and a fresh one of which nothing is known. A burst gives it its share.
#[test]
fn r47_a_pod_without_the_signal_gets_its_share() {
    let index = index();
    for name in ["least-kv-cache", "least-utilization", "least-busy-time", "throughput", "least-latency"] {
        for spread in [0.0, 0.1] {
            let model = plain_pods(8);
            for (i, pod) in model.pods.iter().take(7).enumerate() {
                let more = 1.0 + spread * i as f64;
                set(
                    pod,
                    Signals {
                        running: Some(10.0),
                        foreign_running: 10.0,
                        kv_usage: Some(0.5 * more),
                        generation_tps: Some(500.0 * more),
                        prompt_tps: Some(1000.0 * more),
                        prefill_seconds_mean: Some(0.2 * more),
                        ..fresh()
                    },
                );
            }
            let held: Vec<Charges> = (0..80)
                .map(|seed| {
                    let context = context(&index, seed);
                    select_and_charge(&model, &request(), strategy(name), &PdKnobs::default(), context).unwrap().1
                })
                .collect();
            let new = model.pods[7].state.load.view().in_flight();
            assert!((5..=25).contains(&new), "{name}, spread {spread}: {new} of {}", held.len());
        }
    }
}

#[test]
fn gaps_are_filled_by_load() {
    let model = plain_pods(1);
    let view = |count| View::unknown(&model.pods[0], count);
    for (raw, counts, expected) in [
        (vec![], vec![], vec![]),
        (vec![None, None], vec![3.0, 0.0], vec![0.0, 0.0]),
        (vec![Some(4.0), None], vec![3.0, 3.0], vec![4.0, 4.0]),
        (vec![Some(4.0), None], vec![3.0, 0.0], vec![4.0, 1.0]),
        (vec![Some(4.0), None], vec![3.0, 7.0], vec![4.0, 8.0]),
        (vec![Some(4.0), Some(2.0), None], vec![0.0, 10.0, 2.0], vec![4.0, 2.0, 1.5]),
        (vec![Some(0.0), None], vec![0.0, 9.0], vec![0.0, 0.0]),
    ] {
        let views: Vec<View<'_>> = counts.iter().map(|count| view(*count)).collect();
        assert_eq!(gaps::fill(&raw, &views), expected, "{raw:?} {counts:?}");
    }
}

#[test]
fn prefix_cache_formula() {
    let two = [0.0, 8.0];
    for (counts, matches, factor, expected) in [
        (vec![], vec![], 1.0, vec![]),
        (vec![5.0], vec![40], 1.0, vec![60.0]),
        (two.to_vec(), vec![0, 100], 1.0, vec![100.0, 0.0]),
        // At the bound of mean + f·σ it counts, above it does not: mean 2, σ 2.
        (vec![0.0, 4.0, 2.0], vec![0, 90, 10], 1.0, vec![100.0, 10.0, 90.0]),
        (vec![0.0, 4.0, 2.0], vec![0, 90, 10], 0.99, vec![100.0, 100.0, 90.0]),
        (vec![0.0, 4.0, 2.0], vec![0, 90, 10], f64::NAN, vec![100.0, 10.0, 90.0]),
        (vec![1.0, 1.0], vec![200, 0], 1.0, vec![0.0, 100.0]),
    ] {
        assert_eq!(
            prefix_cache::scores(&counts, |id| matches[id], factor),
            expected,
            "{counts:?} {matches:?} {factor}"
        );
    }
}

#[test]
fn prefix_cache_prefers_the_holder_until_it_is_too_busy() {
    let model = plain_pods(3);
    let index = index();
    let hashes: Vec<u64> = (1..=10).collect();
    let holds = |slot: usize, blocks: usize| {
        let pod = Arc::clone(&model.pods[slot].state);
        index.offer(PrefixUpdate { model: Arc::clone(&model.name), hashes: hashes[..blocks].into(), pod });
        index.drain(NOW);
    };
    holds(1, 10);
    holds(2, 5);
    let facts = RequestFacts { hashes: &hashes, ..request() };
    let knobs = PdKnobs { standard_deviation_factor: 2.0, ..PdKnobs::default() };
    let pick = |knobs: &PdKnobs, text: &str| {
        let decision = select(&model, &facts, strategy(text), knobs, context(&index, 1)).unwrap();
        (slots(&decision.target).1, decision.prefix_match_pct)
    };
    assert_eq!(pick(&knobs, "prefix-cache"), (1, Some(100)));
    let mut held: Vec<_> = (0..8).map(|_| DecodeCharge::open(&model.pods[1].state)).collect();
    assert_eq!(pick(&knobs, "prefix-cache"), (1, Some(100)));
    held.push(DecodeCharge::open(&model.pods[1].state));
    assert_eq!(pick(&knobs, "prefix-cache"), (2, Some(50)), "of the least busy, the one with the longer prefix");
    // Together with a heavy least-request, the empty ones win before that.
    held.truncate(1);
    assert_eq!(pick(&knobs, "prefix-cache:3,least-request").0, 1);
    assert_eq!(pick(&knobs, "prefix-cache,least-request:3").0, 2);
    held.clear();
    // R74: a match below the threshold is none.
    holds(0, 10);
    index.drain(NOW);
    let gated = PdKnobs { min_match_pct: 51, ..knobs.clone() };
    let others: Vec<_> = [0, 1].map(|slot| DecodeCharge::open(&model.pods[slot].state)).into();
    assert_ne!(pick(&gated, "prefix-cache").0, 2);
    drop(others);
}

#[test]
fn power_of_two_compares_two_distinct_pods() {
    // Of three pods with 0, 1 and 2 requests, the busiest never wins, and the idle one whenever it is drawn (2/3).
    let model = plain_pods(3);
    let held: Vec<_> = [1, 2, 2].map(|slot: usize| DecodeCharge::open(&model.pods[slot].state)).into();
    for name in ["power-of-two", "power-of-two,least-kv-cache"] {
        let mut seen = [0u32; 3];
        for seed in 0..3000 {
            seen[slots(&decide(&model, &request(), name, seed).target).1 as usize] += 1;
        }
        assert_eq!(seen[2], 0, "{name}");
        assert!((1850..=2150).contains(&seen[0]), "{name}: {seen:?}");
    }
    drop(held);
    // Alike, all win alike.
    let mut seen = [0u32; 3];
    for seed in 0..3000 {
        seen[slots(&decide(&model, &request(), "power-of-two", seed).target).1 as usize] += 1;
    }
    assert!(seen.iter().all(|count| (850..=1150).contains(count)), "{seen:?}");
}

const LONG: [u8; 257] = [b'k'; 257];

#[test]
fn session_affinity_names_a_pod_of_the_candidates_or_nobody() {
    let model = plain_pods(4);
    let with = |address: Option<&'static str>, key: Option<&'static [u8]>| RequestFacts {
        affinity: Affinity { address, key },
        ..request()
    };
    let all = |facts: &RequestFacts<'_>, text: &str| {
        let mut seen: Vec<u32> = (0..80).map(|seed| slots(&decide(&model, facts, text, seed).target).1).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    };
    for name in ["session-affinity", "session-affinity:5,least-request"] {
        assert_eq!(all(&with(Some("10.0.0.2:8000"), None), name), [2]);
        assert_eq!(all(&with(Some("10.0.0.2:8000"), Some(b"key")), name), [2], "the id before the key");
        // What no pod has, is ignored: another port, another host, nonsense.
        for forged in ["10.0.0.2:8001", "10.0.0.9:8000", "", "10.0.0.2", "169.254.169.254:80"] {
            assert_eq!(all(&with(Some(forged), None), name), [0, 1, 2, 3], "{forged}");
        }
        let by_key = all(&with(None, Some(b"key")), name);
        assert_eq!(by_key.len(), 1);
        assert_eq!(all(&with(Some("10.0.0.9:8000"), Some(b"key")), name), by_key, "a forged id leaves the key");
        // 256 bytes are a key, 257 and none are not.
        assert_eq!(all(&with(None, Some(&LONG[..256])), name).len(), 1);
        assert_eq!(all(&with(None, Some(&LONG)), name).len(), 4);
        assert_eq!(all(&with(None, Some(b"")), name).len(), 4);
    }
}

/// The hash of the reference, computed independently: the highest FNV-1a of key, NUL, address.
#[test]
fn session_keys_are_spread_and_stay_when_a_pod_leaves() {
    let (eight, seven) = (plain_pods(8), plain_pods(7));
    let pick = |model: &Model, key: &str| {
        let facts = RequestFacts { affinity: Affinity { address: None, key: Some(key.as_bytes()) }, ..request() };
        slots(&decide(model, &facts, "session-affinity", 1).target).1
    };
    let mut seen = [0u32; 8];
    for number in 0..800 {
        let key = format!("session-{number}");
        let hash = |pod: &Arc<Pod>| {
            let text = [key.as_bytes(), b"\0", pod.address.as_bytes()].concat();
            text.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
        };
        let expected = eight.pods.iter().max_by_key(|pod| hash(pod)).unwrap().state.slot;
        let chosen = pick(&eight, &key);
        assert_eq!(chosen, expected);
        seen[chosen as usize] += 1;
        if chosen < 7 {
            assert_eq!(pick(&seven, &key), chosen, "only the keys of the pod that left move");
        }
    }
    assert!(seen.iter().all(|count| *count > 30), "{seen:?}");
}

#[test]
fn weights_decide_between_members() {
    let model = plain_pods(3);
    // Pod 0: empty cache, 4 requests; pod 1: full cache, none; pod 2: in the middle of both.
    for (pod, (usage, foreign)) in model.pods.iter().zip([(0.0, 4.0), (1.0, 0.0), (0.4, 2.0)]) {
        set(pod, Signals { kv_usage: Some(usage), foreign_running: foreign, ..fresh() });
    }
    for (text, expected, score) in [
        ("least-kv-cache", 0, 0.0),
        ("least-request", 1, 0.0),
        ("least-kv-cache,least-request", 2, 0.9),
        ("least-kv-cache:3,least-request:2", 0, 2.0),
        ("least-kv-cache:3,least-request", 0, 1.0),
        ("least-kv-cache,least-request:3", 1, 1.0),
        ("least-kv-cache:1000000,least-request:1", 0, 1.0),
        ("least-kv-cache:0,least-request:1", 1, 0.0),
    ] {
        let decision = decide(&model, &request(), text, 1);
        assert_eq!((slots(&decision.target).1, decision.scores.decode), (expected, Some(score)), "{text}");
        assert_eq!(decision.strategy, strategy(text));
    }
    // A member that sees no difference has no say, and chance is the last resort.
    model.pods.iter().for_each(|pod| set(pod, KV));
    assert_eq!(winners(&model, "least-kv-cache:9,least-request"), [0, 1, 2]);
    let held = DecodeCharge::open(&model.pods[0].state);
    assert_eq!(winners(&model, "least-kv-cache:9,least-request"), [1, 2]);
    drop(held);
}
