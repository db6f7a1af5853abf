//! Around the hand-over: who has the request, what the watchdog has seen by then, whose settings hold afterwards.

use super::legs::{STREAM, TOKEN, answered, fleet_of};
use super::*;
use crate::engines::leg::LegRequest;
use crate::fleet::ModelConfig;
use crate::knobs::{DecodePolicy, PdKnobs};

fn over(world: &Arc<World>, adapter: Adapter, text: &'static str) -> Run {
    let mut run = Run::over(Arc::clone(world), adapter);
    run.feed(head(PD)).feed(body(text));
    run
}

fn delivered(run: &Run) -> Option<&LegRequest> {
    run.effects.iter().find_map(|effect| if let Effect::Deliver(call) = effect { Some(&**call) } else { None })
}

/// A stream with events that then stalls is one that is idle, also when its events came before the prefill's outcome.
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
fn a_client_that_leaves_after_the_reply_strands_nothing() {
    let world = world_with(&fleet_of(Engine::Vllm, 1), |_| {});
    let mut run = over(&world, Adapter::Envoy, BODY);
    run.feed(prefill_ok()).feed(Event::Gone);
    let Some(Effect::Route(plan)) = run.effects.iter().find(|effect| matches!(effect, Effect::Route(_))) else {
        panic!()
    };
    let call = delivered(&run).expect("a delivery");
    assert_eq!((&call.body, Some(&call.address)), (&plan.body, plan.address.as_ref()), "what Envoy was to send");
    assert_eq!(call.headers["x-request-id"], plan.headers["x-request-id"]);
    assert_eq!(run.record().outcome, Outcome::ClientGone);
    run.oracle();

    let answers: &[fn() -> Event] = &[|| answer_head(200)];
    for (engine, adapter, between, wait) in [
        (Engine::Vllm, Adapter::Envoy, answers, 0),
        (Engine::Vllm, Adapter::Envoy, &[][..], 20_001),
        (Engine::Vllm, Adapter::Front, &[], 0),
        (Engine::Sglang, Adapter::Envoy, &[], 0),
    ] {
        let world = world_with(&fleet_of(engine, 1), |_| {});
        let mut run = over(&world, adapter, BODY);
        run.feed(prefill_ok());
        between.iter().for_each(|event| {
            run.feed(event());
        });
        run.now += wait;
        run.feed(Event::Gone);
        assert!(delivered(&run).is_none(), "{engine:?} {adapter:?} {wait}");
        run.oracle();
    }
}

/// The charge that follows a fail-over stands for as long as the profile says.
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
