//! Formulas, parameters, prefill engine and prefix cache.

use std::sync::Arc;
use std::time::Duration;

use super::engine;
use crate::clock::Tick;
use crate::replay::cache::PrefixCache;
use crate::replay::model::{EngineModel, PARAMETERS};
use crate::replay::prefill::{PrefillEngine, Prompt};

#[test]
fn times_follow_the_formulas() {
    let model = engine(&[
        "prefill_ms=10",
        "prefill_us_per_token=100",
        "prefill_ns_per_token_pair=2",
        "transfer_ms=3",
        "transfer_us_per_token=5",
        "step_ms=7",
        "step_us_per_sequence=11",
        "step_ns_per_kv_token=13",
    ]);
    for (new, total, expected) in
        [(0, 300, 10_000_000), (100, 300, 20_060_000), (300, 300, 40_180_000), (1, 1, 10_100_002)]
    {
        assert_eq!(model.prefill(new, total), Duration::from_nanos(expected), "{new} of {total}");
    }
    assert_eq!(model.transfer(0), Duration::from_millis(3));
    assert_eq!(model.transfer(1000), Duration::from_millis(8));
    assert_eq!(model.step_nanos(1, 0), 7_011_000.0);
    assert_eq!(model.step_nanos(3, 1000), 7_046_000.0);
    assert_eq!(model.step_growth_nanos(3), 39.0);
}

#[test]
fn parameters_are_checked() {
    let set = |text: &str| EngineModel::default().set(text).map_err(|error| error.to_string());
    assert_eq!(set(" step_ms = 2.5 "), Ok(()));
    for (text, complaint) in [
        ("step_ms", "is not NAME=VALUE"),
        ("steps=1", "there is no engine parameter \"steps\""),
        ("step_ms=0", "step_ms must be a number from 0.001 to 1000000"),
        ("step_ms=NaN", "must be a number"),
        ("step_ms=inf", "must be a number"),
        ("step_ms=-1", "must be a number"),
        ("step_ms=", "must be a number"),
        ("kv_tokens=0", "kv_tokens must be a number from 1 to"),
        ("max_batch=0.5", "must be a number from 1"),
    ] {
        assert!(set(text).is_err_and(|error| error.contains(complaint)), "{text}: {:?}", set(text));
    }
    for parameter in PARAMETERS {
        for (value, good) in [
            (parameter.least, true),
            (parameter.most, true),
            (parameter.least - 0.0001, false),
            (parameter.most * 1.001, false),
        ] {
            assert_eq!(set(&format!("{}={value}", parameter.name)).is_ok(), good, "{} {value}", parameter.name);
        }
        assert!((parameter.least..=parameter.most).contains(&parameter.default), "{}", parameter.name);
        let documented = include_str!("../../../docs/replay.md")
            .contains(&format!("| `{}` | {} | {} |", parameter.name, parameter.default, parameter.meaning));
        assert!(documented, "docs/replay.md: {} {} {}", parameter.name, parameter.default, parameter.meaning);
    }
    let mut model = EngineModel::default();
    model.set("transfer_ms=99").unwrap();
    let changed: Vec<_> = model.values().zip(PARAMETERS).filter(|((_, value), one)| *value != one.default).collect();
    assert_eq!(changed.len(), 1);
    assert_eq!(changed[0].0, ("transfer_ms", 99.0));
}

#[test]
fn the_cache_drops_what_was_used_longest_ago_and_ends_before_starts() {
    let mut cache = PrefixCache::new(4);
    cache.put(&[1, 2, 3]);
    assert_eq!(cache.leading(&[1, 2, 3, 4]), 3);
    assert_eq!(cache.leading(&[2, 3]), 2);
    assert_eq!(cache.leading(&[9, 1]), 0);
    cache.put(&[7, 8]);
    assert_eq!(cache.leading(&[1, 2, 3]), 2, "the end of the older prompt went");
    cache.put(&[1]);
    cache.put(&[10, 11]);
    assert_eq!(cache.leading(&[1, 2]), 1, "used again, unlike its successor");
    assert_eq!((cache.leading(&[7]), cache.leading(&[7, 8]), cache.leading(&[10, 11])), (1, 1, 2));
    cache.put(&[20, 21, 22, 23, 24, 25]);
    assert_eq!(cache.leading(&[20, 21, 22, 23, 24, 25]), 4, "as much of its start as fits");
    assert_eq!(cache.leading(&[10]), 0);
    let mut none = PrefixCache::new(0);
    none.put(&[1]);
    assert_eq!(none.leading(&[1]), 0);
}

fn prompt(request: usize, tokens: u64, hashes: &[u64]) -> Prompt {
    Prompt { request, tokens, hashes: Arc::from(hashes), block_tokens: 10 }
}

fn prefill_engine() -> PrefillEngine {
    PrefillEngine::new(engine(&["prefill_ms=5", "prefill_us_per_token=1000", "prefix_cache_tokens=100"]), 10)
}

#[test]
fn prompts_are_computed_one_after_the_other() {
    let mut engine = prefill_engine();
    let at = Tick::from_millis;
    assert_eq!(engine.start(at(0)), None);
    engine.offer(prompt(0, 20, &[1, 2]));
    engine.offer(prompt(1, 25, &[1, 2]));
    engine.offer(prompt(2, 20, &[1, 2]));
    assert_eq!(engine.start(at(100)), Some(at(125)));
    assert_eq!(engine.start(at(110)), None, "it is busy");
    assert_eq!((engine.outstanding(), engine.page().running, engine.page().waiting), (65, Some(1.0), Some(2.0)));
    assert_eq!(engine.page().prefill_seconds_mean, None);
    let first = engine.finish().unwrap();
    assert_eq!((first.prompt.request, first.started, first.cached), (0, at(100), 0));
    // Two blocks are cached: 5 new tokens.
    assert_eq!(engine.start(at(125)), Some(at(135)));
    assert_eq!(engine.finish().unwrap().cached, 20);
    // The last token is always computed, so that one of the two blocks does not count: 10 new tokens.
    assert_eq!(engine.start(at(135)), Some(at(150)));
    assert_eq!(engine.finish().unwrap().cached, 10);
    assert_eq!((engine.outstanding(), engine.page().running, engine.page().waiting), (0, Some(0.0), Some(0.0)));
    assert_eq!(engine.page().prompt_tokens, Some(65.0));
    let mean = engine.page().prefill_seconds_mean.unwrap();
    assert!((mean - 0.05 / 3.0).abs() < 1e-12, "{mean}");
    assert!(engine.finish().is_none());
}

#[test]
fn a_cancelled_prompt_leaves_nothing_behind() {
    let mut engine = prefill_engine();
    engine.offer(prompt(0, 20, &[1, 2]));
    engine.offer(prompt(1, 30, &[]));
    engine.start(Tick(0));
    assert!(!engine.cancel(7), "not there");
    assert!(!engine.cancel(1), "it was waiting");
    assert_eq!(engine.outstanding(), 20);
    assert!(engine.cancel(0), "it was being computed");
    assert_eq!((engine.outstanding(), engine.page().running), (0, Some(0.0)));
    engine.offer(prompt(2, 30, &[1, 2]));
    assert_eq!(engine.start(Tick(0)), Some(Tick::from_millis(35)), "what was cancelled is not cached");
}
