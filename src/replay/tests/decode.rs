//! The decode engine, and the same simulated step by step.

use std::time::Duration;

use proptest::prelude::*;

use super::engine;
use crate::clock::Tick;
use crate::replay::decode::{DecodeEngine, Ended, Sequence};
use crate::replay::model::EngineModel;

const MS: u64 = 1_000_000;

/// Drives an engine as the world does; each sequence becomes known at its time. (request, first token, end).
fn drive(model: &EngineModel, arrivals: &[(u64, Sequence)]) -> Vec<(usize, u64, u64)> {
    let mut engine = DecodeEngine::new(std::sync::Arc::new(model.clone()));
    let mut coming: Vec<(Tick, Sequence, bool)> = arrivals.iter().map(|(at, one)| (Tick(*at), *one, false)).collect();
    let mut change: Option<Tick> = None;
    let mut done = Vec::new();
    loop {
        // Arrivals and transfers go first, in the order in which they became known.
        let next = (0..coming.len()).min_by_key(|index| (coming[*index].0, *index));
        let event = next.filter(|index| change.is_none_or(|at| coming[*index].0 <= at));
        let now = match (event, change) {
            (Some(index), _) => {
                let (now, sequence, admitted) = coming.remove(index);
                if admitted {
                    engine.transferred(sequence.request);
                    change = engine.next_change(now);
                } else {
                    assert!(engine.offer(sequence));
                }
                now
            }
            (None, Some(now)) => {
                let ended = engine.change(now);
                done.extend(
                    ended.iter().map(|Ended { sequence, first_token }| (sequence.request, first_token.0, now.0)),
                );
                change = engine.next_change(now);
                now
            }
            (None, None) => break,
        };
        while let Some((sequence, takes)) = engine.admit() {
            coming.push((now.plus(takes), sequence, true));
        }
    }
    let gaps: u64 = engine.gaps().iter().map(|gaps| gaps.count).sum();
    assert_eq!(gaps, arrivals.iter().map(|(_, one)| one.output - 1).sum::<u64>());
    assert_eq!((engine.kv_tokens(Tick(u64::MAX)), engine.page(Tick(u64::MAX)).running), (0, Some(0.0)));
    done.sort_unstable();
    done
}

fn sequence(request: usize, prompt: u64, output: u64) -> Sequence {
    Sequence { request, prompt, output }
}

#[test]
fn one_sequence_takes_a_step_for_each_token() {
    let model = engine(&["step_ms=10", "step_us_per_sequence=1000", "transfer_ms=4"]);
    assert_eq!(drive(&model, &[(0, sequence(0, 50, 3))]), [(0, 15 * MS, 37 * MS)]);
    assert_eq!(drive(&model, &[(7, sequence(0, 50, 1))]), [(0, 15 * MS + 7, 15 * MS + 7)]);
}

#[test]
fn who_comes_in_the_middle_of_a_step_waits_for_its_end() {
    let model = engine(&["step_ms=10", "step_us_per_sequence=1000"]);
    // Alone a step takes 11 ms. The second one arrives in the second step and joins at 22; steps of 12 ms until 46,
    // when the first one has 4 of its 10 tokens.
    let together = drive(&model, &[(0, sequence(0, 9, 10)), (15 * MS, sequence(1, 9, 2))]);
    assert_eq!(together, [(0, 11 * MS, 112 * MS), (1, 34 * MS, 46 * MS)]);
    // Exactly at the end of a step it joins at once.
    let together = drive(&model, &[(0, sequence(0, 9, 10)), (22 * MS, sequence(1, 9, 2))]);
    assert_eq!(together, [(0, 11 * MS, 112 * MS), (1, 34 * MS, 46 * MS)]);
    // At the moment at which the other one ends, it does not share a step with it.
    let together = drive(&model, &[(0, sequence(0, 9, 2)), (22 * MS, sequence(1, 9, 1))]);
    assert_eq!(together, [(0, 11 * MS, 22 * MS), (1, 33 * MS, 33 * MS)]);
}

#[test]
fn steps_grow_with_the_kv_cache() {
    // 10 ms and 1 µs for each KV token: 10.100, 10.101, 10.102, 10.103 ms.
    let model = engine(&["step_ms=10", "step_ns_per_kv_token=1000"]);
    assert_eq!(drive(&model, &[(0, sequence(0, 100, 4))]), [(0, 10_100_000, 40_406_000)]);
}

#[test]
fn a_full_cache_or_batch_makes_others_wait_in_turn() {
    let rows = [(0, sequence(0, 60, 10)), (0, sequence(1, 35, 5)), (0, sequence(2, 5, 5))];
    for limits in ["kv_tokens=100", "max_batch=1"] {
        let done = drive(&engine(&["step_ms=10", limits]), &rows);
        assert_eq!(done[0], (0, 10 * MS, 100 * MS), "{limits}");
        assert_eq!(done[1].1, 110 * MS, "{limits}");
        assert!(done[2].1 >= 110 * MS, "first come, first served, although it would fit: {limits}");
    }
    // 70 + 30 is exactly what there is room for.
    let done = drive(&engine(&["step_ms=10", "kv_tokens=100"]), &[rows[0], (0, sequence(1, 25, 5))]);
    assert_eq!(done[1], (1, 10 * MS, 50 * MS));
    let mut tiny = DecodeEngine::new(engine(&["kv_tokens=100"]));
    assert!(tiny.offer(sequence(0, 95, 5)));
    assert!(!tiny.offer(sequence(1, 96, 5)));
}

#[test]
fn its_page_tells_of_the_moment() {
    let mut engine = DecodeEngine::new(engine(&["step_ms=10", "kv_tokens=1000", "max_batch=2", "transfer_ms=1"]));
    for request in 0..3 {
        engine.offer(sequence(request, 100, 10));
    }
    assert_eq!(engine.admit(), Some((sequence(0, 100, 10), Duration::from_millis(1))));
    engine.admit().unwrap();
    assert_eq!(engine.admit(), None, "the batch is full");
    engine.transferred(0);
    assert_eq!(engine.next_change(Tick(5)), Some(Tick(5)));
    engine.change(Tick(0));
    let page = |ms: u64| engine.page(Tick(ms * MS));
    assert_eq!((page(0).running, page(0).waiting, page(0).generation_tokens), (Some(1.0), Some(2.0), Some(0.0)));
    assert_eq!((page(9).kv_usage, page(10).kv_usage), (Some(0.2), Some(0.201)));
    assert_eq!((page(39).generation_tokens, page(40).generation_tokens), (Some(3.0), Some(4.0)));
    assert_eq!(page(500).generation_tokens, Some(10.0), "no more than there are");
    assert_eq!(engine.next_change(Tick(35 * MS)), Some(Tick(100 * MS)));
}

/// Every step by itself, for sequences that all fit: (first token, end) by request.
fn step_by_step(model: &EngineModel, arrivals: &[(u64, Sequence)]) -> Vec<(f64, f64)> {
    let mut times = vec![(0.0, 0.0); arrivals.len()];
    let mut running: Vec<(Sequence, u64)> = Vec::new();
    let mut joined = vec![false; arrivals.len()];
    let mut now = 0.0;
    loop {
        for (index, (at, one)) in arrivals.iter().enumerate() {
            if !joined[index] && *at as f64 <= now + 0.5 {
                joined[index] = true;
                running.push((*one, 0));
            }
        }
        if running.is_empty() {
            let next = arrivals.iter().zip(&joined).filter(|(_, joined)| !**joined).map(|((at, _), _)| *at).min();
            let Some(next) = next else { return times };
            now = next as f64;
            continue;
        }
        let kv = running.iter().map(|(one, made)| one.prompt + made).sum();
        now += model.step_nanos(running.len(), kv);
        for (one, made) in &mut running {
            *made += 1;
            if *made == 1 {
                times[one.request].0 = now;
            }
            times[one.request].1 = now;
        }
        running.retain(|(one, made)| *made < one.output);
    }
}

proptest! {
    #[test]
    fn jumping_over_steps_changes_nothing(
        rows in proptest::collection::vec((0u64..400, 1u64..2000, 1u64..60), 1..25),
        base in 1u64..20,
        each in 0u64..1000,
        kv in 0u64..50,
    ) {
        // Arrivals on odd fractions of steps, so that rounding cannot put them on the other side of a step's end.
        let mut arrivals: Vec<(u64, Sequence)> =
            rows.iter().map(|(at, prompt, output)| (at * MS + 333_331, sequence(0, *prompt, *output))).collect();
        arrivals.sort_by_key(|(at, _)| *at);
        for (index, (_, one)) in arrivals.iter_mut().enumerate() {
            one.request = index;
        }
        let settings = [
            format!("step_ms={base}"), format!("step_us_per_sequence={each}"), format!("step_ns_per_kv_token={kv}"),
        ];
        let model = engine(&settings.iter().map(String::as_str).collect::<Vec<_>>());
        let done = drive(&model, &arrivals);
        let expected = step_by_step(&model, &arrivals);
        prop_assert_eq!(done.len(), expected.len());
        for ((request, first, end), (at_first, at_end)) in done.iter().zip(&expected) {
            // Each change of the batch rounds to a nanosecond.
            prop_assert!((*first as f64 - at_first).abs() < 60.0, "{request}: {first} {at_first}");
            prop_assert!((*end as f64 - at_end).abs() < 60.0, "{request}: {end} {at_end}");
        }
    }
}
