//! Step 2b: what a plan does to a selection, and what it does not.

use super::super::fixtures::*;
use super::super::*;
use crate::bands::Keeper;
use crate::fleet::{BucketRange, ModelConfig, Profile, Role, Signals};
use crate::load::PrefillCharge;

fn serving() -> PdKnobs {
    PdKnobs { prompt_length_bucketing: true, bucket_serve: true, ..PdKnobs::default() }
}

fn long(length: PromptLength) -> RequestFacts<'static> {
    RequestFacts { length, ..request() }
}

/// Publishes the plan for this traffic: by tokens, so that 100 prompts of 10 tokens and one of 1000 halve it.
fn plan(model: &Model, knobs: &PdKnobs) {
    let mut keeper = Keeper::new(Arc::clone(&model.bands));
    keeper.refresh(model, knobs, NOW);
    (0..100).for_each(|_| model.bands.observe(10));
    model.bands.observe(1000);
    keeper.refresh(model, knobs, NOW);
    assert_eq!(model.bands.plans().len(), 1);
}

fn run(model: &Model, length: PromptLength, knobs: &PdKnobs, seed: u64) -> Decision {
    let index = index();
    select(model, &long(length), Strategy::Pd, knobs, context(&index, seed)).unwrap()
}

fn roleset(decision: &Decision) -> Option<&str> {
    match &decision.target {
        Target::Pair { prefill, decode } => {
            assert_eq!(prefill.spec.roleset, decode.spec.roleset);
            prefill.spec.roleset.as_deref()
        }
        Target::Single { .. } => None,
    }
}

#[allow(clippy::unnecessary_wraps, reason = "it is compared with one")]
fn applied(name: &str, applied: bool) -> Option<BandUse> {
    Some(BandUse { roleset: name.into(), applied })
}

#[test]
fn the_band_of_the_length_decides_the_roleset() {
    use PromptLength::{Exactly, MoreThan};
    let model = Builder::new().rolesets(2, 2, 2).build();
    plan(&model, &serving());
    for (length, expected) in [
        (Exactly(0), "rs-00"),
        (Exactly(10), "rs-00"),
        (Exactly(1000), "rs-01"),
        (MoreThan(9), "rs-00"),
        (MoreThan(2000), "rs-01"),
        (Exactly(u64::MAX), "rs-01"),
        (MoreThan(u64::MAX), "rs-01"),
    ] {
        for seed in 0..30 {
            let decision = run(&model, length, &serving(), seed);
            assert_eq!(roleset(&decision), Some(expected), "{length:?}");
            assert_eq!(decision.band, applied(expected, true));
            assert_eq!(decision.steps(), "band");
            assert_eq!(decision.candidates, (4, 4), "candidates are counted before any narrowing");
        }
    }
}

#[test]
fn only_with_both_switches_a_counted_prompt_and_the_strategy_pd() {
    let model = Builder::new().rolesets(2, 1, 1).build();
    plan(&model, &serving());
    for (length, knobs) in [
        (PromptLength::Unknown, serving()),
        (PromptLength::Exactly(10), PdKnobs { bucket_serve: false, ..serving() }),
        (PromptLength::Exactly(10), PdKnobs { prompt_length_bucketing: false, ..serving() }),
    ] {
        let decisions: Vec<Decision> = (0..50).map(|seed| run(&model, length, &knobs, seed)).collect();
        assert!(decisions.iter().all(|decision| decision.band.is_none()));
        for name in ["rs-00", "rs-01"] {
            assert!(decisions.iter().any(|decision| roleset(decision) == Some(name)), "{length:?}: {name}");
        }
    }
    let index = index();
    for (strategy, splittable) in [(Strategy::Random, Splittable::Yes), (Strategy::Pd, Splittable::No)] {
        let request = RequestFacts { splittable, ..long(PromptLength::Exactly(10)) };
        let decision = select(&model, &request, strategy, &serving(), context(&index, 1)).unwrap();
        assert_eq!(decision.band, None);
    }
}

#[test]
fn without_a_plan_a_request_routes_as_ever() {
    let model = Builder::new().rolesets(3, 1, 1).build();
    for seed in 0..50 {
        let with = run(&model, PromptLength::Exactly(10), &serving(), seed);
        let without = run(&model, PromptLength::Exactly(10), &PdKnobs { bucket_serve: false, ..serving() }, seed);
        assert_eq!((slots(&with.target), with.band), (slots(&without.target), None));
    }
}

#[test]
fn a_roleset_that_is_gone_or_that_a_fast_path_ruled_out_is_only_noted() {
    // The plan still has `rs-00` for short prompts, the fleet has not.
    let before = Builder::new().rolesets(2, 1, 1).build();
    plan(&before, &serving());
    let mut now = Builder::new().roleset("rs-01", 1, 1).build();
    now.bands = Arc::clone(&before.bands);
    let decision = run(&now, PromptLength::Exactly(10), &serving(), 1);
    assert_eq!((roleset(&decision), &decision.band), (Some("rs-01"), &applied("rs-00", false)));

    // Without its decode pod a roleset is no roleset.
    let mut now = Builder::new().roleset("rs-00", 1, 0).roleset("rs-01", 1, 1).build();
    now.bands = Arc::clone(&before.bands);
    let decision = run(&now, PromptLength::Exactly(10), &serving(), 1);
    assert_eq!((roleset(&decision), &decision.band), (Some("rs-01"), &applied("rs-00", false)));

    // The prefill fast path rules the banded roleset out, and its choice stands.
    let knobs = serving();
    let _busy: Vec<PrefillCharge> = before
        .pods
        .iter()
        .filter(|pod| pod.spec.role == Role::Prefill && pod.spec.roleset.as_deref() == Some("rs-00"))
        .flat_map(|pod| (0..=knobs.prefill_imbalance_min_spread).map(|_| PrefillCharge::open(&pod.state)))
        .collect();
    for seed in 0..20 {
        let decision = run(&before, PromptLength::Exactly(10), &knobs, seed);
        assert!(decision.fast_paths.prefill_spread);
        assert_eq!((roleset(&decision), &decision.band), (Some("rs-01"), &applied("rs-00", false)));
    }
}

#[test]
fn a_band_never_leads_out_of_a_range() {
    // The plan is from before the range of `rs-00` was narrowed.
    let before = Builder::new().rolesets(2, 1, 1).build();
    plan(&before, &serving());
    let narrow = Setup { range: Some((100, None)), combined: false };
    let mut now = Builder::new().ranged("rs-00", 1, 1, narrow).roleset("rs-01", 1, 1).build();
    now.bands = Arc::clone(&before.bands);
    let decision = run(&now, PromptLength::Exactly(10), &serving(), 1);
    assert_eq!((roleset(&decision), &decision.band), (Some("rs-01"), &applied("rs-00", false)));
}

#[test]
fn an_idle_combined_pod_comes_before_the_band() {
    let model = Builder::new().rolesets(2, 1, 1).combined(None).build();
    plan(&model, &serving());
    for pod in &model.pods {
        let waiting = if pod.spec.role == Role::Other { 0.0 } else { 100.0 };
        set(pod, Signals { waiting: Some(waiting), running: Some(1.0), ..fresh() });
    }
    let decision = run(&model, PromptLength::Exactly(10), &serving(), 1);
    assert!(matches!(decision.target, Target::Single { reason: SingleReason::CombinedIdle, .. }));
    assert_eq!(decision.band, None);
}

#[test]
fn each_profile_has_its_own_plan() {
    let profile = |name: &str, on: bool| {
        let profile = Profile {
            name: name.into(),
            routing_strategy: None,
            rate_limit: None,
            ttft_threshold: None,
            hints: crate::fleet::Hints::default(),
            bucket: BucketRange { min: 0, max: None },
            combined: false,
            knobs: Arc::new(PdKnobs { bucket_serve: on, ..serving() }),
        };
        (Arc::from(name), Arc::new(profile))
    };
    let mut model = Builder::new().rolesets(2, 1, 1).build();
    model.config = Some(Arc::new(ModelConfig {
        ignores_requests: false,
        locked_strategy: None,
        default_profile: Some("on".into()),
        profiles: [profile("on", true), profile("off", false)].into(),
    }));
    plan(&model, &PdKnobs::default());
    let index = index();
    let band = |profile: Option<&str>| {
        let request = RequestFacts { profile, ..long(PromptLength::Exactly(10)) };
        select(&model, &request, Strategy::Pd, &serving(), context(&index, 1)).unwrap().band
    };
    // A name that does not exist means the default.
    for name in [None, Some("on"), Some("nobody's")] {
        assert_eq!(band(name), applied("rs-00", true), "{name:?}");
    }
    assert_eq!(band(Some("off")), None);
}
