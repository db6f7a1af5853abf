//! Selections that are committed in the state plane.

use super::*;
use crate::state::plane::Claimed;

/// A world of two pairs whose decisions are claimed on version 3.
pub(super) fn claiming_world() -> Arc<World> {
    let mut specs = pair();
    specs.extend([spec("p2", Role::Prefill, Some("rs")), spec("d2", Role::Decode, Some("rs"))]);
    let world = world_with(&specs, |_| {});
    world.fleet.load().model("m").unwrap().port.set_claims(Some(3));
    world
}

fn order(run: &Run) -> (Vec<String>, u64) {
    let claims =
        run.effects.iter().filter_map(|effect| if let Effect::Claim(order) = effect { Some(order) } else { None });
    let last = claims.last().expect("a claim");
    (last.pods.iter().map(|pod| pod.labels.pod.clone()).collect(), last.since)
}

fn asked(world: &Arc<World>) -> Run {
    let mut run = Run::new(Arc::clone(world));
    run.feed(head(&[("routing-strategy", "pd")])).feed(body(BODY));
    run
}

#[test]
fn nothing_is_sent_before_the_claim_is_answered() {
    for claimed in [Claimed::Granted, Claimed::Unsure] {
        let world = claiming_world();
        let mut run = asked(&world);
        assert_eq!(run.names(), ["accept", "claim"]);
        let (pods, since) = order(&run);
        assert_eq!((pods.len(), since), (2, 3), "both pods of the pair: {pods:?}");
        run.feed(Event::Claimed(claimed));
        assert_eq!(run.names(), ["accept", "claim", "extend", "prefill"], "{claimed:?}");
        run.feed(Event::Gone);
        run.oracle();
    }
}

#[test]
fn a_claim_that_is_turned_down_is_decided_again_on_what_is_known_by_then() {
    let world = claiming_world();
    let mut run = asked(&world);
    let (first, _) = order(&run);
    let snapshot = world.fleet.load();
    let model = snapshot.model("m").unwrap();
    // Somebody else has charged the same pods meanwhile.
    let share = crate::load::Share { prefills: 9, running: 9, ..crate::load::Share::ZERO };
    for pod in model.pods.iter().filter(|pod| first.contains(&pod.state.labels.pod)) {
        pod.state.load.remote.apply(&share, Tick::from_millis(run.now + 10), 0);
    }
    model.port.set_claims(Some(4));
    run.now -= 8;
    run.feed(Event::Claimed(Claimed::Again));
    let (second, since) = order(&run);
    assert!(second.iter().all(|pod| !first.contains(pod)), "{first:?} {second:?}");
    assert_eq!(since, 4);
    let charged: u64 = model.pods.iter().map(|pod| pod.state.load.view().in_flight()).sum();
    assert_eq!(charged, 2, "the first choice was given back");
    run.feed(Event::Claimed(Claimed::Granted)).feed(Event::Gone);
    run.oracle();
}

#[test]
fn deciding_again_has_an_end() {
    let world = claiming_world();
    let mut run = asked(&world);
    let deadline = world.knobs.plane.claim_deadline.as_millis() as u64;
    // `feed` moves on by ten.
    run.now = run.now + deadline - 11;
    run.feed(Event::Claimed(Claimed::Again));
    assert_eq!(run.names().last(), Some(&"claim"), "just before the deadline");
    run.now -= 9;
    run.feed(Event::Claimed(Claimed::Again));
    assert_eq!(run.names().last(), Some(&"prefill"), "at the deadline");
    run.feed(Event::Gone);
    run.oracle();

    let mut run = asked(&world);
    for claim in 1..=20 {
        run.now -= 10;
        run.feed(Event::Claimed(Claimed::Again));
        assert_eq!(run.names().last() == Some(&"claim"), claim < 16, "{claim}");
    }
    run.feed(Event::Gone);
    run.oracle();
}

#[test]
fn a_client_that_leaves_meanwhile_leaves_nothing_behind() {
    for event in [Event::Gone, Event::Shutdown] {
        let world = claiming_world();
        let mut run = asked(&world);
        run.feed(event).feed(Event::Claimed(Claimed::Granted));
        assert!(run.exchange.ended() && !run.names().contains(&"prefill"));
        run.oracle();
    }
}
