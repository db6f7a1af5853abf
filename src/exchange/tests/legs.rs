//! Pairs whose legs run at once, retries, fail-over, the watchdog, errors inside a stream.

use super::*;
use crate::engines::lookup::{LookedUp, LookupError};
use crate::engines::trtllm::ServerInfo;
use crate::load::LoadView;
use crate::telemetry::AbortTrigger;

pub(super) const STREAM: &str = r#"{"model":"m","prompt":"hello","stream":true}"#;
pub(super) const TOKEN: &str = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
pub(super) const ERROR: &str = "data: {\"error\":{\"message\":\"no KV\",\"code\":500}}\n\n";

pub(super) fn fleet_of(engine: Engine, pairs: usize) -> Vec<PodSpec> {
    let names: [[&'static str; 3]; 2] = [["p", "d", "rs"], ["p2", "d2", "rs2"]];
    names[..pairs]
        .iter()
        .flat_map(|[prefill, decode, roleset]| {
            [spec(prefill, Role::Prefill, Some(roleset)), spec(decode, Role::Decode, Some(roleset))]
        })
        .map(|pod| PodSpec { engine, ..pod })
        .collect()
}

fn asked(world: &Arc<World>, adapter: Adapter, text: &'static str) -> Run {
    let mut run = Run::over(Arc::clone(world), adapter);
    run.feed(head(PD)).feed(body(text));
    run
}

pub(super) fn failed(class: LegFailure, sent: bool) -> Event {
    Event::Prefill(LegOutcome::Failed { class, detail: "x".to_owned(), sent })
}

pub(super) fn answered(status: u16, text: &'static str) -> Event {
    Event::Prefill(LegOutcome::Answered {
        status: StatusCode::from_u16(status).unwrap(),
        advice: HeaderMap::new(),
        body: Bytes::from_static(text.as_bytes()),
    })
}

fn aborts(run: &Run) -> Vec<&AbortPlan> {
    run.effects
        .iter()
        .filter_map(|effect| if let Effect::Abort(plan) = effect { Some(&**plan) } else { None })
        .collect()
}

fn load(world: &World, name: &str) -> LoadView {
    let model = Arc::clone(world.fleet.load().model("m").unwrap());
    model.pods.iter().find(|pod| &*pod.spec.key.name == name).unwrap().state.load.view()
}

fn json(body: &Bytes) -> serde_json::Value {
    serde_json::from_slice(body).unwrap()
}

#[test]
fn sglang_gets_both_legs_at_once_and_counts_once() {
    let world = world_with(&fleet_of(Engine::Sglang, 1), |_| {});
    let mut run = asked(&world, Adapter::Envoy, STREAM);
    assert_eq!(run.names(), ["accept", "prefill", "route"], "nothing waits for the prefill leg");
    let Some(Effect::StartPrefill(call)) = run.effects.get(1) else { panic!() };
    let Some(Effect::Route(plan)) = run.effects.get(2) else { panic!() };
    let (prefill, decode) = (json(&call.body), json(&plan.body));
    for key in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"] {
        assert!(!prefill[key].is_null() && prefill[key] == decode[key], "{key}");
    }
    assert_eq!((&prefill["stream"], &decode["stream"]), (&false.into(), &true.into()));
    assert_eq!((load(&world, "p").prefills, load(&world, "d").pending, load(&world, "d").running), (1, 1, 0));
    assert_eq!(run.exchange.deadline(), None, "the watchdog waits for the prefill leg");
    run.feed(answered(200, "{}"));
    assert_eq!((load(&world, "p").prefills, load(&world, "d").pending, load(&world, "d").running), (0, 0, 1));
    assert!(run.exchange.deadline().is_some());
    run.feed(stream_head()).feed(chunk(TOKEN, false)).feed(chunk("data: [DONE]\n\n", true));
    assert_eq!(run.record().outcome, Outcome::Success);
    assert!(aborts(&run).is_empty());
    run.oracle();
}

/// Sections 1.4 and 3.10 of the protocols: until the first event a failed prefill ends the request, after it nothing.
#[test]
fn interop_21_to_23_a_prefill_that_fails_beside_decode() {
    let head_only: &[fn() -> Event] = &[stream_head];
    let token: &[fn() -> Event] = &[stream_head, || chunk(TOKEN, false)];
    for (before, outcome, expected, status) in [
        (&[][..], answered(500, r#"{"message":"boom"}"#), "refuse", 500),
        (&[], answered(422, "{}"), "refuse", 422),
        (&[], answered(204, ""), "refuse", 502),
        (&[], failed(LegFailure::Transport, false), "refuse", 503),
        (&[], failed(LegFailure::Timeout, true), "refuse", 503),
        (head_only, answered(500, "{}"), "cut", 500),
        (token, answered(500, "{}"), "", 0),
        (token, failed(LegFailure::Timeout, true), "", 0),
        (&[], answered(200, "no JSON"), "", 0),
        (&[], failed(LegFailure::BadResponse, true), "", 0),
        (token, answered(200, "no JSON"), "", 0),
    ] {
        let world = world_with(&fleet_of(Engine::Sglang, 2), |_| {});
        let mut run = asked(&world, Adapter::Envoy, STREAM);
        for event in before {
            run.feed(event());
        }
        let shown = format!("{outcome:?} after {} events", before.len());
        // A prefill pod that has not answered is still at work.
        let late = matches!(&outcome, Event::Prefill(outcome) if outcome.failure_class() == LegFailure::Timeout);
        run.feed(outcome);
        if expected.is_empty() {
            assert!(!run.exchange.ended() && aborts(&run).is_empty(), "{shown}");
            run.feed(Event::Gone);
        } else {
            assert!(run.names().contains(&expected), "{shown}: {:?}", run.names());
            let [plan] = aborts(&run)[..] else { panic!("{shown}") };
            assert_eq!(plan.targets.len(), if late { 2 } else { 1 }, "{shown}");
            assert!(plan.retry_delay.is_some());
            assert_eq!(run.record().status, status, "{shown}");
            assert_eq!(run.record().outcome, Outcome::Failed(Reason::PrefillFailed));
            if expected == "refuse" {
                assert_eq!(run.refusal().headers()["x-error-pd-prefill"], "true");
            }
        }
        run.oracle();
    }
}

/// Section 8 of the protocols.
#[test]
fn engines_are_told_when_the_client_leaves() {
    for (engine, generation_first, events, told, last) in [
        (Engine::Sglang, false, vec![], 2, "detach"),
        (Engine::Sglang, false, vec![stream_head(), chunk(TOKEN, false)], 2, "detach"),
        (Engine::Sglang, false, vec![answered(200, "{}")], 1, "abort"),
        (Engine::Sglang, false, vec![answered(200, "{}"), stream_head(), chunk(TOKEN, false)], 1, "abort"),
        (Engine::Trtllm, true, vec![], 0, "cancel"),
        (Engine::Trtllm, true, vec![answered(200, "{}")], 0, "route"),
        (Engine::Trtllm, false, vec![], 0, "cancel"),
    ] {
        let world = world_with(&fleet_of(engine, 1), |knobs| {
            Arc::make_mut(&mut knobs.pd).trt_generation_first = generation_first;
        });
        let mut run = asked(&world, Adapter::Envoy, STREAM);
        if generation_first {
            run.feed(looked_up());
        }
        for event in events {
            run.feed(event);
        }
        run.feed(Event::Gone);
        let targets: usize = aborts(&run).iter().map(|plan| plan.targets.len()).sum();
        assert_eq!(targets, told, "{engine:?} {:?}", run.names());
        assert!(aborts(&run).iter().all(|plan| plan.trigger == AbortTrigger::ClientGone));
        let names: Vec<_> = run.names().into_iter().filter(|name| *name != "end").collect();
        assert_eq!(names.last(), Some(&last));
        assert_eq!(run.record().outcome, Outcome::ClientGone);
        run.oracle();
    }
}

pub(super) fn looked_up() -> Event {
    let info = br#"{"disaggregated_params":{"ctx_info_endpoint":"tcp://10.0.0.5:5555","ctx_dp_rank":0}}"#;
    Event::LookedUp(Ok(Arc::new(LookedUp::ServerInfo(ServerInfo::parse(info).unwrap()))))
}

#[test]
fn generation_first_fails_before_either_leg_and_is_cut_at_any_time() {
    let generation_first = |knobs: &mut Knobs| Arc::make_mut(&mut knobs.pd).trt_generation_first = true;
    let world = world_with(&fleet_of(Engine::Trtllm, 1), generation_first);
    let mut run = asked(&world, Adapter::Envoy, STREAM);
    assert_eq!(run.names(), ["accept", "extend", "look_up"]);
    run.feed(Event::LookedUp(Err(LookupError::Status(StatusCode::FOUND))));
    assert_eq!(run.names(), ["accept", "extend", "look_up", "refuse", "end"]);
    assert!(run.refusal().status.is_server_error());
    run.oracle();
    // Its head, and even tokens, prove nothing.
    let mut run = asked(&world, Adapter::Envoy, STREAM);
    run.feed(looked_up()).feed(stream_head()).feed(chunk(TOKEN, false)).feed(failed(LegFailure::Transport, true));
    assert!(run.names().contains(&"cut"));
    assert_eq!(run.record().outcome, Outcome::Failed(Reason::PrefillFailed));
    run.oracle();
}

/// TensorRT-LLM, context first: a first token that was the last one is the answer.
#[test]
fn interop_30_an_answer_without_a_generation_leg() {
    let world = world_with(&fleet_of(Engine::Trtllm, 1), |_| {});
    let mut run = asked(&world, Adapter::Envoy, BODY);
    run.feed(answered(
        200,
        r#"{"choices":[{"text":"a","finish_reason":"stop","disaggregated_params":{"ctx_request_id":null}}],"prompt_token_ids":[1],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}"#,
    ));
    assert_eq!(run.names(), ["accept", "extend", "prefill", "answer", "end"]);
    let Some(Effect::Answer(own)) = run.effects.get(3) else { panic!() };
    assert!(!own.body.windows(20).any(|text| text == b"disaggregated_params"), "{:?}", own.body);
    assert_eq!(own.headers["prefill-target-pod"], "p");
    assert_eq!((run.record().outcome, run.record().usage.unwrap().total_tokens), (Outcome::Success, 2));
    run.oracle();
}

#[test]
fn r40_each_timer_of_the_watchdog_ends_the_request() {
    let head_and_token: &[fn() -> Event] = &[stream_head, || chunk(TOKEN, false)];
    let comments: &[fn() -> Event] = &[stream_head, || chunk(": still here\n\n", false)];
    for (text, before, wait, expected, phase) in [
        (STREAM, &[][..], 60_000, "refuse", "first_response"),
        (STREAM, &[stream_head as fn() -> Event][..], 60_000, "cut", "first_response"),
        (STREAM, comments, 60_000, "cut", "first_response"),
        (STREAM, head_and_token, 120_000, "cut", "stream_idle"),
        (BODY, &[], 5000, "refuse", "response"),
    ] {
        let world = world_with(&fleet_of(Engine::Sglang, 1), |knobs| {
            Arc::make_mut(&mut knobs.pd).watchdog.response.time = std::time::Duration::from_secs(5);
        });
        let mut run = asked(&world, Adapter::Envoy, text);
        run.feed(answered(200, "{}"));
        let armed = run.now;
        for event in before {
            run.feed(event());
        }
        run.now = armed + wait - 20;
        run.feed(Event::Timer);
        assert!(!run.exchange.ended(), "{phase}: too early");
        run.now = armed + wait + 100;
        run.feed(Event::Timer);
        assert!(run.names().contains(&expected), "{phase}: {:?}", run.names());
        assert_eq!((run.record().outcome, run.record().status), (Outcome::Failed(Reason::DecodeTimeout), 504));
        let [plan] = aborts(&run)[..] else { panic!("{phase}") };
        assert_eq!((plan.retry_delay, plan.trigger.label()), (None, &*format!("watchdog_{phase}")));
        if expected == "refuse" {
            assert_eq!(run.refusal().headers()["x-error-pd-decode"], "true");
        }
        run.oracle();
    }
}

/// Recommendation 3 for real engines: another prompt's blocks may lie where an old hand-off points.
#[test]
fn a_hand_off_that_may_be_old_is_not_used() {
    let world = world_with(&fleet_of(Engine::Vllm, 2), |_| {});
    let mut run = asked(&world, Adapter::Envoy, BODY);
    let Some(Effect::StartPrefill(call)) = run.effects.get(2) else { panic!() };
    let first = call.headers["x-request-id"].clone();
    run.feed(Event::Timer);
    run.now += 20_001;
    run.feed(prefill_ok());
    assert_eq!(run.names(), ["accept", "extend", "prefill", "forget", "prefill"], "the prefill is made again");
    let Some(Effect::StartPrefill(second)) = run.effects.last() else { panic!() };
    assert_ne!(second.headers["x-request-id"], first);
    run.feed(prefill_ok()).feed(answer_head(200)).feed(chunk("{}", true));
    assert_eq!(run.record().outcome, Outcome::Success);
    run.oracle();
    // Looked at in time, it may take as long as it likes. A look proves something about the one before it.
    let mut run = asked(&world, Adapter::Envoy, BODY);
    run.now += 25_000;
    run.feed(Event::Timer).feed(Event::Timer).feed(prefill_ok());
    assert_eq!(run.names().last(), Some(&"route"));
    run.feed(Event::Gone);
    run.oracle();
}

#[test]
fn r35_a_prefill_is_tried_again_only_where_nothing_can_have_run() {
    for (outcome, tries) in [
        (failed(LegFailure::Transport, false), 2),
        (failed(LegFailure::Transport, true), 1),
        (failed(LegFailure::Timeout, true), 1),
        (answered(400, "{}"), 1),
        (answered(500, "{}"), 1),
        (answered(503, "{}"), 1),
    ] {
        for adapter in [Adapter::Envoy, Adapter::Front] {
            let world = world_with(&fleet_of(Engine::Vllm, 2), |_| {});
            let mut run = asked(&world, adapter, BODY);
            let pod = run.exchange.record().prefill_pod.clone().unwrap();
            let shown = format!("{outcome:?}");
            let again = match &outcome {
                Event::Prefill(outcome) => Event::Prefill(outcome.clone()),
                _ => panic!(),
            };
            run.feed(again);
            assert_eq!(run.names().iter().filter(|name| **name == "prefill").count(), tries, "{shown}");
            assert_eq!(run.exchange.ended(), tries == 1);
            if tries == 2 {
                assert_ne!(run.exchange.record().prefill_pod.as_ref().unwrap().pod, pod.pod, "on another pair");
                run.feed(failed(LegFailure::Transport, false));
                assert!(run.exchange.ended(), "at most once");
            }
            run.oracle();
        }
    }
    // Without another pair the failure itself is the answer.
    let world = world();
    let mut run = asked(&world, Adapter::Envoy, BODY);
    run.feed(failed(LegFailure::Transport, false));
    assert_eq!(run.refusal().reason, Reason::PrefillFailed);
    run.oracle();
}

#[test]
fn errors_inside_a_stream_never_look_like_a_good_end() {
    // Behind Envoy the head is out: the error passes, what follows does not.
    for (chunks, expected) in [
        (vec![TOKEN, "data: {\"error\":{\"code\":500}}\n\ndata: [DONE]\n\n"], vec!["chunk", "replace", "cut"]),
        (vec![ERROR, "data: [DONE]\n\n"], vec!["chunk", "cut"]),
        (vec!["data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n"], vec!["replace", "cut"]),
    ] {
        let world = world();
        let mut run = asked(&world, Adapter::Envoy, STREAM);
        run.feed(prefill_ok()).feed(stream_head());
        for text in &chunks {
            run.feed(chunk(text, false));
        }
        run.feed(chunk("", true));
        let names: Vec<_> = run.names().into_iter().skip_while(|name| *name != "head").skip(1).collect();
        assert_eq!(names[..names.len() - 1], expected, "{chunks:?}");
        for effect in &run.effects {
            if let Effect::ReplaceChunk(bytes) = effect {
                assert!(!bytes.windows(6).any(|text| text == b"[DONE]"), "{bytes:?}");
            }
        }
        assert_eq!(run.record().outcome, Outcome::EngineErrorEvent);
        run.oracle();
    }
}

#[test]
fn the_front_holds_a_head_until_something_is_generated() {
    const ROLE: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    let world = world_with(&fleet_of(Engine::Vllm, 2), |_| {});
    let mut run = asked(&world, Adapter::Front, STREAM);
    run.feed(prefill_ok()).feed(stream_head()).feed(chunk(ROLE, false));
    assert!(!run.names().contains(&"head"));
    run.feed(chunk(TOKEN, false));
    let names: Vec<_> = run.names().into_iter().skip_while(|name| *name != "route").collect();
    assert_eq!(names, ["route", "head", "held", "chunk"]);
    run.feed(chunk("data: [DONE]\n\n", true));
    assert_eq!(run.record().outcome, Outcome::Success);
    run.oracle();
    // An error before it: once on another pair. There is no third time.
    let mut run = asked(&world, Adapter::Front, STREAM);
    run.feed(prefill_ok()).feed(stream_head()).feed(chunk(ROLE, false)).feed(chunk(ERROR, false));
    assert_eq!(run.names()[4..], ["drop", "prefill"]);
    run.feed(prefill_ok()).feed(stream_head()).feed(chunk(ERROR, false));
    assert_eq!(run.refusal().status, StatusCode::BAD_GATEWAY, "nothing came before it");
    assert!(!run.names().contains(&"head"));
    run.oracle();
    let mut run = asked(&world, Adapter::Front, STREAM);
    run.feed(prefill_ok()).feed(stream_head()).feed(chunk(ROLE, false)).feed(chunk(ERROR, false));
    run.feed(prefill_ok()).feed(stream_head()).feed(chunk(ROLE, false));
    assert_eq!(run.names()[4..], ["drop", "prefill", "route", "head", "chunk"], "nothing is held for nothing");
    run.feed(chunk(ERROR, false)).feed(chunk("data: [DONE]\n\n", true));
    assert_eq!(run.names()[9..], ["chunk", "cut", "end"]);
    assert_eq!(run.record().outcome, Outcome::EngineErrorEvent);
    run.oracle();
}

/// User report: the first byte of a reasoning model's answer took 2.1 s instead of 8 ms.
#[test]
fn the_front_holds_no_reasoning_and_nothing_without_another_attempt() {
    const ROLE: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    const THOUGHT: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"reasoning_content\":\"hm\"}}]}\n\n";
    let two = fleet_of(Engine::Vllm, 2);
    let mut run = asked(&world_with(&two, |_| {}), Adapter::Front, STREAM);
    run.feed(prefill_ok()).feed(stream_head()).feed(chunk(ROLE, false));
    assert!(!run.names().contains(&"head"));
    run.feed(chunk(THOUGHT, false));
    assert_eq!(run.names()[4..], ["head", "held", "chunk"]);
    // A single prefill pod, and SGLang's pods, which are asked once: all goes out as it comes.
    for world in [world(), world_with(&fleet_of(Engine::Sglang, 2), |_| {})] {
        let mut run = asked(&world, Adapter::Front, STREAM);
        if !run.names().contains(&"route") {
            run.feed(prefill_ok());
        }
        run.feed(stream_head()).feed(chunk(ROLE, false));
        let names = run.names();
        assert_eq!(names[names.len() - 2..], ["head", "chunk"], "{names:?}");
    }
}

#[test]
fn a_failure_in_the_words_of_its_api_ends_the_stream_well() {
    const MESSAGES: &str = r#"{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":9,"stream":true}"#;
    const RESPONSES: &str = r#"{"model":"m","input":"a","stream":true}"#;
    for (path, text, failure) in [
        (
            "/v1/messages",
            MESSAGES,
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n",
        ),
        (
            "/v1/responses",
            RESPONSES,
            "data: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"x\"}}}\n\n",
        ),
        ("/v1/responses", RESPONSES, "event: error\ndata: {\"type\":\"error\",\"message\":\"m\"}\n\n"),
    ] {
        for (adapter, expected) in [
            (Adapter::Envoy, &["replace", "replace", "chunk", "end"][..]),
            (Adapter::Front, &["replace", "complete", "end"]),
        ] {
            let world = world();
            let mut run = Run::over(Arc::clone(&world), adapter);
            run.feed(head_of(path, Method::POST, PD, false)).feed(body(text)).feed(prefill_ok()).feed(stream_head());
            run.feed(Event::AnswerChunk { data: format!("{failure}data: [DONE]\n\n").into(), end: false });
            if adapter == Adapter::Envoy {
                run.feed(chunk("data: [DONE]\n\n", false)).feed(chunk("", true));
            }
            let names: Vec<_> = run.names().into_iter().skip_while(|name| *name != "head").skip(1).collect();
            assert_eq!(names, expected, "{path}");
            let passed: Vec<_> = run
                .effects
                .iter()
                .filter_map(|effect| match effect {
                    Effect::ReplaceChunk(bytes) => Some(bytes.clone()),
                    _ => None,
                })
                .collect();
            assert_eq!(passed.concat(), failure.as_bytes());
            assert_eq!(run.record().outcome, Outcome::EngineErrorEvent);
            run.oracle();
        }
    }
}

/// SGLang's pods have the room and the `rid` as soon as the request is out, whatever becomes of it.
#[test]
fn r33_a_pair_that_was_asked_at_once_is_not_asked_again() {
    let world = world_with(&fleet_of(Engine::Sglang, 2), |_| {});
    let unreachable = || Event::DecodeFailed { detail: "refused".to_owned(), unreachable: true };
    for (events, told) in [
        (vec![stream_head(), chunk(ERROR, false)], 1),
        (vec![answered(200, "{}"), stream_head(), chunk(ERROR, false)], 0),
        (vec![unreachable()], 1),
        (vec![failed(LegFailure::Transport, false)], 1),
    ] {
        let mut run = asked(&world, Adapter::Front, STREAM);
        for event in events {
            run.feed(event);
        }
        assert!(run.exchange.ended(), "{:?}", run.names());
        assert!(run.refusal().status.is_server_error());
        assert_eq!(run.names().iter().filter(|name| **name == "prefill").count(), 1);
        assert_eq!(aborts(&run).len(), told, "{:?}", run.names());
        run.oracle();
    }
}

#[test]
fn another_decode_pod_takes_over() {
    let mut specs = pair();
    specs.push(PodSpec { host: Arc::from("10.0.0.6"), ..spec("d2", Role::Decode, Some("rs")) });
    let unreachable = || Event::DecodeFailed { detail: "refused".to_owned(), unreachable: true };
    let world = world_with(&specs, |_| {});
    let mut run = asked(&world, Adapter::Front, BODY);
    run.feed(prefill_ok());
    let first = run.exchange.record().target_pod.clone().unwrap().pod.clone();
    run.feed(unreachable());
    assert_eq!(run.names().iter().filter(|name| **name == "route").count(), 2);
    let second = run.exchange.record().target_pod.clone().unwrap().pod.clone();
    assert_ne!(first, second);
    assert_eq!((load(&world, &first).running, load(&world, &second).running), (0, 1), "the charge moves along");
    let bodies: Vec<_> = run
        .effects
        .iter()
        .filter_map(|effect| if let Effect::Route(plan) = effect { Some(plan.body.clone()) } else { None })
        .collect();
    assert_eq!(bodies[0], bodies[1], "with the same hand-off, which nobody has used");
    run.feed(answer_head(200)).feed(chunk("{}", true));
    let Some(Effect::ForwardHead(added)) = run.effects.iter().find(|effect| matches!(effect, Effect::ForwardHead(_)))
    else {
        panic!()
    };
    assert_eq!(added["target-pod"], *second);
    run.oracle();
    // Nobody is left: a hand-off is not used a third time.
    let mut run = asked(&world, Adapter::Front, BODY);
    run.feed(prefill_ok()).feed(unreachable()).feed(unreachable());
    assert_eq!(run.refusal().reason, Reason::DecodeFailed);
    run.oracle();
    // Envoy says who answered.
    let mut run = asked(&world, Adapter::Envoy, BODY);
    run.feed(prefill_ok());
    let first = run.exchange.record().target_pod.clone().unwrap().pod.clone();
    let (other, address) = if first == "d" { ("d2", "10.0.0.6:8000") } else { ("d", "10.0.0.5:8000") };
    run.feed(Event::ServedBy("10.9.9.9:1".to_owned())).feed(Event::ServedBy(address.to_owned()));
    assert_eq!((load(&world, &first).running, load(&world, other).running), (0, 1));
    run.feed(answer_head(200)).feed(chunk("{}", true));
    assert_eq!(run.record().target_pod.as_ref().unwrap().pod, other);
    run.oracle();
}
