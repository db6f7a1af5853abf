//! Models that are known and have no ready pod, and sleeping ones that are woken.

use std::collections::BTreeSet;

use super::legs::fleet_of;
use super::*;
use crate::fleet::{Absent, ClaimState, RouteTable};

fn refused(world: &Arc<World>, headers: &[(&'static str, &'static str)], model: &'static str) -> Run {
    let text: &'static str = format!(r#"{{"model":"{model}","prompt":"hello"}}"#).leak();
    let mut run = Run::new(Arc::clone(world));
    run.feed(head(headers)).feed(body(text));
    run
}

fn unserved(world: &World, model: &str) -> u64 {
    let all = world.unserved.recent(Tick::from_millis(100));
    all.into_iter().find(|(name, _)| &**name == model).map_or(0, |(_, count)| count)
}

#[test]
fn a_known_model_without_pods_is_unavailable_and_never_unknown() {
    let later = Tick::from_millis(3_600_000);
    let absent = |gone: &[&str], workloads: &[&str]| {
        let workloads: BTreeSet<Arc<str>> = workloads.iter().map(|name| Arc::from(*name)).collect();
        let gone = gone.iter().map(|name| Arc::from(*name));
        Absent::default().next(gone, &workloads, |_| false, (Tick(0), later))
    };
    let routes = || RouteTable::Known([(Arc::from("demo-router"), Vec::new())].into());
    for (model, absent, routes, known) in [
        ("went", absent(&["went"], &[]), RouteTable::Absent, true),
        ("scaled", absent(&[], &["scaled"]), RouteTable::Absent, true),
        ("demo", Absent::default(), routes(), true),
        ("demo-router", Absent::default(), routes(), false),
        ("other", absent(&["went"], &["scaled"]), routes(), false),
    ] {
        let world = world_with(&pair(), |_| {});
        world.fleet.set_absent(absent);
        world.fleet.set_routes(routes);
        for headers in [PD, &[], &[("routing-strategy", "random")][..]] {
            let run = refused(&world, headers, model);
            let error = run.refusal();
            let (headers, expected) = (error.headers(), if known { (503, "true") } else { (400, model) });
            assert_eq!((error.status.as_u16(), headers["x-error-no-model-backends"].to_str().unwrap()), expected);
            assert_eq!(headers.get("retry-after").map(|value| value.to_str().unwrap()), known.then_some("10"));
            assert_eq!(run.record().model.as_deref(), known.then_some(model), "only known names are labels");
            run.oracle();
        }
        assert_eq!(unserved(&world, model), if known { 3 } else { 0 }, "{model}");
    }
}

#[test]
fn pods_that_are_not_ready_count_as_missing() {
    let unready = |specs: Vec<PodSpec>, role: Role| {
        let change = |pod: PodSpec| PodSpec { ready: pod.role != role, ..pod };
        specs.into_iter().map(change).collect::<Vec<_>>()
    };
    for (specs, retry) in [
        (unready(fleet_of(Engine::Vllm, 1), Role::Prefill), true),
        (unready(fleet_of(Engine::Vllm, 1), Role::Decode), true),
        (vec![PodSpec { ready: false, ..spec("a", Role::Other, None) }], true),
    ] {
        let world = world_with(&specs, |_| {});
        let run = refused(&world, PD, "m");
        assert_eq!(run.refusal().status, 503);
        assert_eq!(run.refusal().headers().contains_key("retry-after"), retry);
        assert_eq!(unserved(&world, "m"), 1);
        run.oracle();
    }
    // Who filters all of them away has to ask for less.
    let world = world_with(&fleet_of(Engine::Vllm, 1), |_| {});
    let run = refused(&world, &[("routing-strategy", "pd"), ("external-filter", "zone=x")], "m");
    assert!(!run.refusal().headers().contains_key("retry-after"));
    assert_eq!(unserved(&world, "m"), 0);
    run.oracle();
}

#[test]
fn only_a_sleeping_model_is_woken() {
    let claimed = |name: &str, state: ClaimState| PodSpec {
        port: 0,
        ready: false,
        uid: Arc::from(format!("u-{name}:0")),
        claim: Some(state),
        ..spec(name, Role::Other, None)
    };
    for (states, switched_on, woken) in [
        (&[ClaimState::Sleeping][..], true, Some("u-a")),
        (&[ClaimState::Failed, ClaimState::Sleeping], true, Some("u-b")),
        (&[ClaimState::Sleeping, ClaimState::Sleeping], true, Some("u-a")),
        (&[ClaimState::Sleeping, ClaimState::Activating], true, None),
        (&[ClaimState::Activating], true, None),
        (&[ClaimState::Failed], true, None),
        (&[ClaimState::Sleeping], false, None),
    ] {
        let pods: Vec<PodSpec> = states.iter().zip(["a", "b"]).map(|(state, name)| claimed(name, *state)).collect();
        let world = world_with(&pods, |knobs| knobs.models.wake = switched_on);
        let run = refused(&world, PD, "m");
        let call = run.effects.iter().find_map(|effect| match effect {
            Effect::Wake(call) => Some((&*call.address, &*call.pod, &*call.model)),
            _ => None,
        });
        assert_eq!(call, woken.map(|pod| ("10.0.0.5:8080", pod, "m")), "{states:?}");
        assert_eq!(run.refusal().status, 503);
        run.oracle();
    }
}
