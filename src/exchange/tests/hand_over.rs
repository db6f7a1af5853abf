//! Around the hand-over: who has the request, what the watchdog has seen by then, whose settings hold afterwards.

use super::legs::{STREAM, TOKEN, answered, fleet_of};
use super::*;
use crate::fleet::ModelConfig;
use crate::knobs::{DecodePolicy, PdKnobs};

fn over(world: &Arc<World>, adapter: Adapter, text: &'static str) -> Run {
    let mut run = Run::over(Arc::clone(world), adapter);
    run.feed(head(PD)).feed(body(text));
    run
}

#[test]
fn r40_events_that_came_before_the_outcome_of_the_prefill_count() {
    let world = world_with(&fleet_of(Engine::Sglang, 1), |_| {});
    let mut run = over(&world, Adapter::Envoy, STREAM);
    run.feed(stream_head()).feed(chunk(TOKEN, false)).feed(answered(200, "{}"));
    let armed = run.now;
    run.now = armed + 119_000;
    run.feed(Event::Timer);
    assert!(!run.exchange.ended(), "120 s from the outcome on");
    run.now = armed + 120_100;
    run.feed(Event::Timer);
    assert!(run.effects.iter().any(|effect| matches!(effect, Effect::Cut(Reason::DecodeTimeout))));
    let trigger = run.effects.iter().find_map(|effect| match effect {
        Effect::Abort(plan) => Some(plan.trigger.label().to_string()),
        _ => None,
    });
    assert_eq!(trigger.as_deref(), Some("watchdog_stream_idle"));
    run.oracle();
}

/// Envoy may drop the request after its reply without having sent it on, and says nothing: the decode pod gets the hand-off
/// from the gateway, unless it has answered.
#[test]
fn a_charge_keeps_the_time_of_its_profile_after_a_fail_over() {
    let text =
        r#"{"profiles": {"default": {"routingStrategy": "pd", "routingConfig": {"pd": {"tokenLoadTTLSeconds": 3}}}}}"#;
    let own = PdKnobs { decode_policy: DecodePolicy::TokenLoad, ..PdKnobs::default() };
    let (config, _) = ModelConfig::parse(text, &own);
    let config = Arc::new(config.unwrap());
    let mut pods = pair();
    pods.push(PodSpec { host: Arc::from("10.0.0.6"), ..spec("d2", Role::Decode, Some("rs")) });
    let pods: Vec<_> = pods.into_iter().map(|pod| PodSpec { config: Some(Arc::clone(&config)), ..pod }).collect();
    let world = world_with(&pods, |knobs| knobs.pd = Arc::new(own.clone()));
    let mut run = over(&world, Adapter::Front, BODY);
    run.feed(prefill_ok()).feed(Event::DecodeFailed { detail: "refused".to_owned(), unreachable: true });
    assert_eq!(run.names().iter().filter(|name| **name == "route").count(), 2, "{:?}", run.names());
    let later = Tick::from_millis(run.now + 4000);
    assert!(!world.ledger.sweep(later).is_empty(), "3 s, not the hour of the gateway");
    run.feed(Event::Gone);
    run.oracle();
}
