//! Profiles of requests: the choice by hints, and limits on the rate.

use super::*;
use crate::fleet::ModelConfig;
use crate::knobs::PdKnobs;

/// A pair whose pods carry this configuration.
pub(super) fn configured(config: &str) -> Vec<PodSpec> {
    let (config, _) = ModelConfig::parse(config, &PdKnobs::default());
    let config = Arc::new(config.unwrap());
    pair().into_iter().map(|spec| PodSpec { config: Some(Arc::clone(&config)), ..spec }).collect()
}

fn with_config(config: &str) -> Arc<World> {
    world_with(&configured(config), |_| {})
}

/// `auto` finds something in long prompts only, and there is no default.
pub(super) fn only_long_ones() -> Arc<World> {
    with_config(
        r#"{"profiles": {"long": {"routingStrategy": "pd", "requestsPerSecond": 1,
                                  "routingConfig": {"promptTokensGte": 1000}}}}"#,
    )
}

const SIZES: &str = r#"{"profiles": {
    "default": {"routingStrategy": "pd", "routingConfig": {"pd": {"prefillRequestTimeout": 1}}},
    "long": {"routingStrategy": "pd",
        "routingConfig": {"promptTokensGte": 100, "promptLengthBucketing": true, "promptLenBucketMaxLength": 9000,
                          "pd": {"prefillRequestTimeout": 100}}},
    "short": {"routingStrategy": "least-request", "routingConfig": {"promptTokensLt": 100, "maxTokensLt": 1000}}}}"#;

/// A completion request whose prompt has so many tokens ("x x x…").
fn words(tokens: usize, members: &str) -> Event {
    let prompt = vec!["x"; tokens].join(" ");
    sent(format!(r#"{{"model":"m","prompt":"{prompt}"{members}}}"#))
}

fn route_of(run: &Run) -> Option<&RoutePlan> {
    run.effects.iter().find_map(|effect| if let Effect::Route(plan) = effect { Some(&**plan) } else { None })
}

/// Answers whatever work on the prompt is asked for, until none is.
fn prepared(run: &mut Run) -> usize {
    let mut jobs = 0;
    while let Some(at) = run.effects.iter().position(|effect| matches!(effect, Effect::Prepare(_))) {
        let Effect::Prepare(job) = run.effects.remove(at) else { panic!() };
        run.feed(Event::Prepared(job.run()));
        jobs += 1;
    }
    jobs
}

/// Runs to the end of the answer; the name in the answer's header.
fn chosen(run: &mut Run) -> Option<String> {
    prepared(run);
    if run.names().contains(&"prefill") {
        run.feed(prefill_ok());
    }
    run.feed(answer_head(200)).feed(chunk("{}", true));
    let head =
        run.effects.iter().find_map(|effect| if let Effect::ForwardHead(add) = effect { Some(add) } else { None });
    let value = head.unwrap().get("x-aibrix-config-profile");
    value.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
}

#[test]
fn auto_chooses_by_prompt_and_output_at_their_exact_bounds() {
    const AUTO: &[(&str, &str)] = &[("config-profile", " AuTo ")];
    for (tokens, members, expected) in [
        (99, r#","max_tokens":999"#, "short"),
        (100, r#","max_tokens":999"#, "long"),
        (99, r#","max_tokens":1000"#, "default"),
        (99, r#","max_completion_tokens":5"#, "short"),
        // Output of unknown length fails a hint about it.
        (99, "", "default"),
        (1, r#","max_tokens":1"#, "short"),
        (5000, "", "long"),
        (9000, "", "long"),
    ] {
        let mut run = Run::new(with_config(SIZES));
        run.feed(head(AUTO)).feed(words(tokens, members));
        assert_eq!(chosen(&mut run).as_deref(), Some(expected), "{tokens} {members}");
        let strategy = if expected == "short" { "least-request" } else { "pd" };
        assert_eq!(run.record().strategy.as_deref(), Some(strategy));
        run.oracle();
    }
    // Prompts of token ids are exact without a count.
    for (ids, expected) in [("[1,2,3]".to_owned(), "short"), (format!("[{}1]", "1,".repeat(99)), "long")] {
        let mut run = Run::new(with_config(SIZES));
        run.feed(head(AUTO)).feed(sent(format!(r#"{{"model":"m","prompt":{ids},"max_tokens":9}}"#)));
        assert_eq!(chosen(&mut run).as_deref(), Some(expected), "{ids}");
    }
}

#[test]
fn only_auto_names_the_profile_and_a_strategy_header_does_not_stop_it() {
    let mut run = Run::new(with_config(SIZES));
    run.feed(head(&[("config-profile", "long")])).feed(words(3, ""));
    assert_eq!(chosen(&mut run), None);

    let mut run = Run::new(with_config(SIZES));
    run.feed(head(&[("config-profile", "auto"), ("routing-strategy", "random")])).feed(words(200, ""));
    assert_eq!(chosen(&mut run).as_deref(), Some("long"));
    assert_eq!(run.record().strategy.as_deref(), Some("random"));

    // Also on an answer that is an error of the engine, and where Envoy's routes decide.
    let mut run =
        Run::new(with_config(r#"{"profiles": {"default": {}, "p": {"routingConfig": {"promptTokensGte": 0}}}}"#));
    run.feed(head(&[("config-profile", "auto")])).feed(body(BODY));
    assert!(route_of(&run).unwrap().address.is_none());
    run.feed(answer_head(503));
    let Some(Effect::ForwardHead(add)) = run.effects.last() else { panic!() };
    assert_eq!(add["x-aibrix-config-profile"], "p");

    // A model without a configuration has nothing to choose from.
    let mut run = Run::new(world());
    run.feed(head(&[("config-profile", "auto"), ("routing-strategy", "pd")])).feed(body(BODY));
    assert_eq!(chosen(&mut run), None);
    run.oracle();
}

#[test]
fn a_long_prompt_is_counted_off_the_loop_and_only_once() {
    let mut run = Run::new(with_config(SIZES));
    run.feed(head(&[("config-profile", "auto")])).feed(words(8000, ""));
    assert_eq!(run.names(), ["accept", "extend", "prepare"]);
    let Some(Effect::ExtendTimeout(time)) = run.effects.get(1) else { panic!() };
    assert_eq!(time.as_secs(), 100, "the longest that any profile may need");
    let Some(Effect::Prepare(job)) = run.effects.pop() else { panic!() };
    assert!(job.hash.is_none());
    assert_eq!(job.count.as_ref().map(|(_, limit)| *limit), Some(99));
    run.feed(Event::Prepared(job.run()));
    // The bucket of the profile asks for more than the hints did: the text came back for that.
    let Some(Effect::Prepare(job)) = run.effects.pop() else { panic!("{:?}", run.names()) };
    assert_eq!(job.count.as_ref().map(|(text, limit)| (text.len(), *limit)), Some((15_999, 9000)));
    assert!(job.hash.is_some());
    run.feed(Event::Prepared(job.run()));
    assert_eq!(run.names(), ["accept", "extend", "prefill"], "more time is asked for once");
    run.feed(Event::Gone);
    run.oracle();
}

#[test]
fn while_the_prompt_is_counted_anything_may_happen() {
    for (event, last) in [
        (Event::Gone, "end"),
        (Event::Shutdown, "refuse"),
        (answer_head(500), "head"),
        (body(BODY), "refuse"),
        (Event::BodyTimeout, "prepare"),
        (prefill_ok(), "prepare"),
        (Event::Body { data: Bytes::new(), end: true }, "prepare"),
    ] {
        let mut run = Run::new(with_config(SIZES));
        run.feed(head(&[("config-profile", "auto")])).feed(words(8000, ""));
        run.feed(event);
        assert!(run.names()[2..].contains(&last), "{:?}", run.names());
        run.feed(Event::Gone);
        assert_eq!(run.records().len(), 1);
        run.oracle();
    }
    // Should the count be lost, the length is unknown: the default profile, and no bucket decides.
    let mut run = Run::new(with_config(SIZES));
    run.feed(head(&[("config-profile", "auto")])).feed(words(8000, ""));
    run.feed(Event::Prepared(Prepared::unknown()));
    assert_eq!(chosen(&mut run).as_deref(), Some("default"));
    run.oracle();
}

const LIMITED: &str = r#"{"profiles": {
    "default": {"routingStrategy": "pd", "requestsPerSecond": 2},
    "free": {"routingStrategy": "pd"},
    "each": {"routingStrategy": "pd", "requestsPerSecond": 1, "requestsPerSecondPerReplica": 2}}}"#;

/// A request at `millis`, up to its prefill leg or its refusal.
fn at(world: &Arc<World>, millis: u64, profile: &'static str) -> Run {
    let mut run = Run::new(Arc::clone(world));
    run.now = millis - 20;
    run.feed(head(&[("config-profile", profile)])).feed(body(BODY));
    run
}

fn served(mut run: Run) {
    run.feed(prefill_ok()).feed(answer_head(200)).feed(chunk("{}", true));
    assert_eq!(run.record().outcome, Outcome::Success);
    run.oracle();
}

#[test]
fn requests_above_the_models_rate_get_429() {
    let world = with_config(LIMITED);
    for _ in 0..2 {
        served(at(&world, 1500, "default"));
    }
    let refused = at(&world, 1999, "default");
    let error = refused.refusal();
    assert_eq!((error.status.as_u16(), error.reason), (429, Reason::RateLimited));
    assert_eq!(error.headers()["x-error-model-rps-exceeded"], "true");
    assert_eq!(error.headers()["retry-after"], "1");
    let object: serde_json::Value = serde_json::from_slice(&error.body()).unwrap();
    assert_eq!(
        (&object["error"]["type"], &object["error"]["code"]),
        (&"rate_limit_error".into(), &"rate_limit_exceeded".into())
    );
    assert_eq!(refused.record().outcome.label(), "x-error-model-rps-exceeded_fail");
    refused.oracle();
    // Only the limit of the request's own profile counts, and only within its second.
    served(at(&world, 1999, "free"));
    served(at(&world, 2000, "default"));
}

#[test]
fn a_limit_per_replica_grows_with_the_routable_pods() {
    let mut specs = configured(LIMITED);
    specs.extend((0..2).map(|n| PodSpec { ready: n == 0, ..spec(&format!("x{n}"), Role::Other, None) }));
    let world = world_with(&specs, |_| {});
    for n in 0..7 {
        let run = at(&world, 1500, "each");
        assert_eq!(run.names().contains(&"refuse"), n >= 6, "three routable pods, two requests each: {n}");
        if n < 6 {
            served(run);
        }
    }
}

#[test]
fn a_request_that_is_not_served_gives_its_place_back() {
    let world = with_config(LIMITED);
    let taken = || world.fleet.load().model("m").unwrap().rate.taken(Tick::from_millis(1500));
    let mut open = at(&world, 1500, "default");
    assert_eq!(taken(), 1);
    open.feed(prefill_failed());
    assert_eq!((open.refusal().reason, taken()), (Reason::PrefillFailed, 0));
    let mut open = at(&world, 1500, "default");
    drop(at(&world, 1500, "default"));
    assert_eq!(taken(), 1, "also when its task goes away");
    open.feed(Event::Gone);
    assert_eq!(taken(), 1, "but a client that leaves while a pod works for it has used its place");

    // A request that is wrong in itself takes no place.
    let mut wrong = Run::new(Arc::clone(&world));
    wrong.now = 1480;
    wrong.feed(head(PD)).feed(body(r#"{"model":"m","prompt":"x","max_tokens":1,"max_tokens":2}"#));
    assert_eq!((wrong.refusal().reason, taken()), (Reason::InvalidPdRequest, 1));

    // No pair to be had.
    let lonely: Vec<PodSpec> = configured(LIMITED).into_iter().take(1).collect();
    let world = world_with(&lonely, |_| {});
    for _ in 0..3 {
        assert_eq!(at(&world, 1500, "default").refusal().reason, Reason::SelectionFailed);
    }

    // What went on to its pod was served, whatever becomes of it.
    let world = with_config(LIMITED);
    let mut handed_over = at(&world, 1500, "default");
    handed_over.feed(prefill_ok()).feed(Event::Gone);
    assert_eq!(world.fleet.load().model("m").unwrap().rate.taken(Tick::from_millis(1500)), 1);
}

#[test]
fn the_limit_of_the_profile_that_auto_chose_counts() {
    let world = with_config(
        r#"{"profiles": {"default": {"routingStrategy": "pd"},
            "long": {"routingStrategy": "pd", "requestsPerSecond": 1, "routingConfig": {"promptTokensGte": 50}}}}"#,
    );
    for (tokens, refused) in [(60, false), (60, true), (5, false), (49, false), (50, true)] {
        let mut run = Run::new(Arc::clone(&world));
        run.now = 1480;
        run.feed(head(&[("config-profile", "auto")])).feed(words(tokens, ""));
        assert_eq!(run.names().contains(&"refuse"), refused, "{tokens}");
        if refused {
            assert_eq!(run.refusal().headers()["x-aibrix-config-profile"], "long");
        } else {
            assert!(chosen(&mut run).is_some());
        }
    }
}
