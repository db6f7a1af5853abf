//! From the pods of a model to live plans, over time.

use std::time::Duration;

use super::super::{Keeper, Keepers, PLAN_AGE, ends};
use super::*;
use crate::fleet::{Model, ModelConfig, PodSpec, Role, Snapshot, build, fixture};
use crate::knobs::PdKnobs;

fn gateway(on: bool) -> PdKnobs {
    PdKnobs { prompt_length_bucketing: on, bucket_serve: on, ..PdKnobs::default() }
}

/// A prefill and a decode pod of a roleset with that annotation, over gateway-wide knobs that are off.
fn pair(roleset: &str, config: Option<&str>) -> [PodSpec; 2] {
    let config = config.map(|text| Arc::new(ModelConfig::parse(text, &PdKnobs::default()).0.unwrap()));
    [("p", Role::Prefill), ("d", Role::Decode)].map(|(letter, role)| PodSpec {
        config: config.clone(),
        ..fixture::member(&format!("{letter}-{roleset}"), role, roleset)
    })
}

fn fleet(previous: &Snapshot, pods: impl IntoIterator<Item = [PodSpec; 2]>) -> Snapshot {
    let mut slot = previous.pods().map(|pod| pod.state.slot + 1).max().unwrap_or(0);
    build(previous, &pods.into_iter().flatten().collect::<Vec<_>>(), &mut slot)
}

fn one(snapshot: &Snapshot) -> Arc<Model> {
    Arc::clone(snapshot.model("m").unwrap())
}

/// Per live plan, its profile and the rolesets of its bands.
fn live(model: &Model) -> Vec<(Option<String>, Vec<String>)> {
    let plans = model.bands.plans();
    plans
        .iter()
        .map(|live| {
            let names = live.plan.bands().map(|band| band.roleset.to_string()).collect();
            (live.profile.as_deref().map(str::to_owned), names)
        })
        .collect()
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn range(min: u64, max: u64) -> String {
    let on = r#""promptLengthBucketing": true, "bucketServe": true"#;
    let config = format!(r#"{{{on}, "promptLenBucketMinLength": {min}, "promptLenBucketMaxLength": {max}}}"#);
    format!(r#"{{"profiles": {{"default": {{"routingConfig": {config}}}}}}}"#)
}

#[test]
fn ranges_of_a_roleset() {
    let both = |prefill: Option<&str>, decode: Option<&str>| {
        let [mut p, mut d] = pair("rs", None);
        let config = |text: &str| Arc::new(ModelConfig::parse(text, &PdKnobs::default()).0.unwrap());
        (p.config, d.config) = (prefill.map(config), decode.map(config));
        let groups = super::super::groups(&one(&fleet(&Snapshot::default(), [[p, d]])), None);
        groups.first().map(|group| (group.min, group.max, group.replicas))
    };
    let (low, high, never) = (range(0, 100), range(50, 0), range(9, 5));
    for (prefill, decode, expected) in [
        (None, None, Some((0, OPEN, 1))),
        (Some(&low), Some(&low), Some((0, 100, 1))),
        (Some(&low), Some(&high), Some((50, 100, 1))),
        (None, Some(&high), Some((50, OPEN, 1))),
        (Some(&low), Some(&range(101, 0)), None),
        (Some(&never), None, None),
        (None, Some(&never), None),
    ] {
        assert_eq!(both(prefill.map(|x| &**x), decode.map(|x| &**x)), expected, "{prefill:?} {decode:?}");
    }
}

#[test]
fn with_the_feature_off_nothing_is_kept() {
    let snapshot = fleet(&Snapshot::default(), [pair("a", None), pair("b", None)]);
    let model = one(&snapshot);
    for knobs in [
        PdKnobs::default(),
        PdKnobs { prompt_length_bucketing: true, ..PdKnobs::default() },
        PdKnobs { bucket_serve: true, ..PdKnobs::default() },
    ] {
        let mut keeper = Keeper::new(Arc::clone(&model.bands));
        for second in 0..20 {
            model.bands.observe(100);
            keeper.refresh(&model, &knobs, Tick::from_millis(second * 1000));
        }
        assert!(!model.bands.is_on() && live(&model).is_empty());
    }
}

#[test]
fn switched_on_and_off() {
    let snapshot = fleet(&Snapshot::default(), [pair("a", None), pair("b", None)]);
    let model = one(&snapshot);
    let mut keepers = Keepers::default();
    let mut at = |second: u64, on: bool| keepers.refresh(&snapshot, &gateway(on), Tick::from_millis(second * 1000));
    at(0, true);
    assert!(model.bands.is_on() && live(&model).is_empty());
    model.bands.observe(10);
    model.bands.observe(1000);
    // The first plan does not wait.
    at(1, true);
    assert_eq!(live(&model), [(None, names(&["a", "b"]))]);
    assert_eq!(ends(&snapshot), BTreeMap::from([("a".into(), 1007), ("b".into(), OPEN)]));
    at(2, false);
    assert!(!model.bands.is_on() && live(&model).is_empty() && ends(&snapshot).is_empty());
    // What was known before is gone.
    at(3, true);
    assert!(model.bands.is_on() && live(&model).is_empty());
}

#[test]
fn a_plan_is_looked_at_again_after_its_age_or_when_rolesets_change() {
    let open = |roleset: &str| pair(roleset, Some(&range(0, 0)));
    let first = fleet(&Snapshot::default(), [open("a"), open("b")]);
    let (knobs, mut keepers) = (gateway(true), Keepers::default());
    let tick = |after: Duration| Tick::from_millis(1000).plus(after);
    keepers.refresh(&first, &knobs, tick(Duration::ZERO));
    let model = one(&first);
    let plan = |model: &Model| Arc::clone(&model.bands.plans().first().unwrap().plan);
    let observe = |model: &Model, length: u64, requests: u32| (0..requests).for_each(|_| model.bands.observe(length));
    observe(&model, 10, 100);
    keepers.refresh(&first, &knobs, tick(Duration::ZERO));
    let young = plan(&model);
    // Different traffic counts when the plan is old enough, and not before.
    observe(&model, 5000, 100);
    keepers.refresh(&first, &knobs, tick(PLAN_AGE.saturating_sub(Duration::from_millis(1))));
    assert!(Arc::ptr_eq(&young, &plan(&model)));
    keepers.refresh(&first, &knobs, tick(PLAN_AGE));
    let old = plan(&model);
    assert!(!Arc::ptr_eq(&young, &old));
    // The same traffic keeps it.
    for i in 2..10 {
        keepers.refresh(&first, &knobs, tick(PLAN_AGE * i));
        assert!(Arc::ptr_eq(&old, &plan(&model)), "{i}");
    }
    // Another roleset counts at once; what was observed stays, also what came while the bins were exchanged.
    observe(&model, 5000, 100);
    let second = fleet(&first, [open("a"), open("b"), pair("c", Some(&range(4000, 0)))]);
    let later = one(&second);
    assert!(Arc::ptr_eq(&model.bands, &later.bands));
    keepers.refresh(&second, &knobs, tick(PLAN_AGE * 10));
    assert!(!Arc::ptr_eq(&old, &plan(&later)));
    assert!(live(&later)[0].1.contains(&"c".to_owned()));
    // A roleset that is gone holds no band.
    let third = fleet(&second, [open("b"), pair("c", Some(&range(4000, 0)))]);
    keepers.refresh(&third, &knobs, tick(PLAN_AGE * 10));
    assert!(!live(&one(&third))[0].1.contains(&"a".to_owned()));
    // So does a model, and one of its name starts afresh.
    keepers.refresh(&fleet(&third, []), &knobs, tick(PLAN_AGE * 10));
    let again = fleet(&fleet(&third, []), [open("a")]);
    keepers.refresh(&again, &knobs, tick(PLAN_AGE * 10));
    assert!(one(&again).bands.is_on() && live(&one(&again)).is_empty());
}

#[test]
fn without_traffic_the_plan_ends() {
    let snapshot = fleet(&Snapshot::default(), [pair("a", None)]);
    let (model, knobs, mut keepers) = (one(&snapshot), gateway(true), Keepers::default());
    let mut at = |second: u64| keepers.refresh(&snapshot, &knobs, Tick::from_millis(second * 1000));
    at(0);
    model.bands.observe(10);
    at(1);
    at(500);
    assert_eq!(live(&model).len(), 1);
    at(700);
    assert!(live(&model).is_empty());
}

#[test]
fn plans_per_profile() {
    let pd = |serve: bool, mode: &str| {
        format!(
            r#"{{"routingConfig": {{"promptLengthBucketing": true, "bucketServe": {serve}, "bucketServeMode": "{mode}"}}}}"#
        )
    };
    let profiles = |extra: &str| {
        let (requests, tokens, off) = (pd(true, "rps"), pd(true, "throughput"), pd(false, "rps"));
        format!(r#"{{"profiles": {{"b": {requests}, "a": {tokens}, "off": {off}{extra}}}}}"#)
    };
    let default = format!(r#", "default": {}"#, pd(false, "rps"));
    for (extra, expected) in [
        // Without a default, requests that name no profile go by the gateway-wide knobs.
        ("", vec![None, Some("a".to_owned()), Some("b".to_owned())]),
        (&*default, vec![Some("a".to_owned()), Some("b".to_owned())]),
    ] {
        let config = profiles(extra);
        let snapshot = fleet(&Snapshot::default(), [pair("x", Some(&config)), pair("y", Some(&config))]);
        let (model, knobs, mut keepers) = (one(&snapshot), gateway(true), Keepers::default());
        keepers.refresh(&snapshot, &knobs, Tick(0));
        (0..10).for_each(|_| model.bands.observe(10));
        model.bands.observe(100);
        keepers.refresh(&snapshot, &knobs, Tick(0));
        assert_eq!(live(&model).into_iter().map(|(profile, _)| profile).collect::<Vec<_>>(), expected);
        let at = |profile, seed| model.bands.roleset(profile, 10, seed).map(|name| name.to_string());
        let split = |profile| (0..100).any(|seed| at(profile, seed) != at(profile, 0));
        // By tokens ten short prompts weigh as much as the long one; by requests they have to be divided.
        assert!(!split(Some("a")) && split(Some("b")));
        assert_eq!(at(Some("off"), 0), None);
    }
    // At most eight.
    let many: Vec<String> = (0..20).map(|i| format!(r#""p{i:02}": {}"#, pd(true, "rps"))).collect();
    let config = format!(r#"{{"profiles": {{{}}}}}"#, many.join(","));
    let snapshot = fleet(&Snapshot::default(), [pair("x", Some(&config))]);
    let mut keepers = Keepers::default();
    keepers.refresh(&snapshot, &gateway(false), Tick(0));
    one(&snapshot).bands.observe(10);
    keepers.refresh(&snapshot, &gateway(false), Tick(0));
    let expected: Vec<_> = (0..super::super::MAX_PROFILES).map(|i| Some(format!("p{i:02}"))).collect();
    assert_eq!(live(&one(&snapshot)).into_iter().map(|(profile, _)| profile).collect::<Vec<_>>(), expected);
}
