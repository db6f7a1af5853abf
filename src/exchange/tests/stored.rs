//! Stored responses: each is with the pod that made it.

use super::legs::fleet_of;
use super::*;
use crate::state::responses::Home;

const ANY: &[(&str, &str)] = &[("routing-strategy", "random")];
const WHOLE: &str = r#"{"id":"resp_1","object":"response","status":"completed","output":[]}"#;

fn singles() -> Vec<PodSpec> {
    let names: [&'static str; 4] = ["a", "b", "c", "e"];
    names.map(|name| spec(name, Role::Other, None)).to_vec()
}

fn responses(text: &'static str) -> Vec<Event> {
    vec![head_of("/v1/responses", Method::POST, ANY, false), body(text)]
}

fn feed(run: &mut Run, events: impl IntoIterator<Item = Event>) {
    for event in events {
        run.feed(event);
    }
}

fn target(run: &Run) -> String {
    run.exchange.record().target_pod.as_ref().map(|pod| pod.pod.clone()).unwrap_or_default()
}

fn plan(run: &Run) -> &crate::exchange::RoutePlan {
    let plan =
        run.effects.iter().find_map(|effect| if let Effect::Route(plan) = effect { Some(&**plan) } else { None });
    plan.unwrap_or_else(|| panic!("{:?}", run.effects))
}

/// Makes `resp_1` and says which pod has it.
fn make(world: &Arc<World>, answer: [Event; 2]) -> String {
    let mut run = Run::new(Arc::clone(world));
    feed(&mut run, responses(r#"{"model":"m","input":"a"}"#));
    feed(&mut run, answer);
    let pod = target(&run);
    if !run.exchange.ended() {
        run.feed(Event::Gone);
    }
    run.oracle();
    pod
}

#[test]
fn a_follow_up_goes_where_its_response_is() {
    const CREATED: &str = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"object\":\"response\"}}\n\n";
    for answer in [
        || [json_head(), chunk(WHOLE, true)],
        || [stream_head(), chunk(CREATED, false)],
        // Longer than what is kept of a document.
        || {
            let long = format!(r#"{{"id":"resp_1","object":"response","output":"{}"}}"#, "x".repeat(1 << 20));
            [json_head(), Event::AnswerChunk { data: long.into(), end: true }]
        },
    ] {
        let world = world_with(&singles(), |_| {});
        let pod = make(&world, answer());
        for _ in 0..8 {
            let mut run = Run::new(Arc::clone(&world));
            feed(&mut run, responses(r#"{"model":"m","input":"b","previous_response_id":"resp_1"}"#));
            assert_eq!(run.names(), ["accept", "route"]);
            assert_eq!(target(&run), pod);
            assert_eq!(run.exchange.record().single_reason, Some("stored_response"));
            run.feed(answer_head(200)).feed(chunk("{}", true));
            run.oracle();
        }
    }
}

#[test]
fn whatever_is_asked_about_a_response_goes_where_it_is() {
    let world = world_with(&singles(), |_| {});
    let pod = make(&world, [json_head(), chunk(WHOLE, true)]);
    for (method, path, end) in [
        (Method::GET, "/v1/responses/resp_1?stream=true", true),
        (Method::DELETE, "/v1/responses/resp_1", true),
        (Method::GET, "/v1/responses/resp_1/input_items", true),
        (Method::POST, "/v1/responses/resp_1/cancel", true),
        (Method::POST, "/v1/responses/resp_1/cancel", false),
    ] {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head_of(path, method.clone(), &[("target-pod", "10.9.9.9:1")], end));
        if !end {
            run.feed(body("{}"));
        }
        assert_eq!(target(&run), pod, "{method} {path}");
        let routed = plan(&run);
        assert_eq!((&routed.method, routed.path.as_str()), (&method, path));
        assert_eq!(routed.body, if end { "" } else { "{}" });
        // Of a head that is all there is, Envoy hears here what to take away.
        assert_eq!(routed.remove_headers.iter().any(|name| name == "target-pod"), end);
        assert!(!routed.headers.contains_key("target-pod"));
        // Its usage was counted when it was made.
        let usage = r#"{"id":"resp_1","object":"response","usage":{"input_tokens":5,"output_tokens":7}}"#;
        run.feed(json_head()).feed(chunk(usage, true));
        let record = run.record();
        assert_eq!((record.usage, record.model.as_deref()), (None, Some("m")));
        assert!(record.endpoint.contains("{id}"));
        run.oracle();
    }
    for (method, path) in [(Method::POST, "/v1/responses/resp_1"), (Method::GET, "/v1/responses/resp_1/cancel")] {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head_of(path, method, &[], true));
        assert_eq!(run.refusal().status, StatusCode::METHOD_NOT_ALLOWED);
    }
}

#[test]
fn what_is_lost_or_unknown_is_said() {
    let world = world_with(&singles(), |_| {});
    make(&world, [json_head(), chunk(WHOLE, true)]);
    // Another incarnation of every pod.
    let restarted: Vec<_> = singles().into_iter().map(|pod| PodSpec { restarts: pod.restarts + 1, ..pod }).collect();
    world.fleet.store(build(&world.fleet.load(), &restarted, &mut 100));
    let ask = |path: &str| {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head_of(path, Method::GET, &[], true));
        let error = run.refusal();
        (error.status.as_u16(), error.message.to_string(), error.param)
    };
    let (status, message, param) = ask("/v1/responses/resp_1");
    assert_eq!((status, param), (404, Some("response_id")));
    assert!(message.contains("gone or was restarted"), "{message}");
    let (status, message, _) = ask("/v1/responses/resp_2");
    assert!(status == 404 && message.contains("no response of this id"), "{status} {message}");
    assert_eq!(ask("/v1/responses/a%2F..").0, 404);
    let mut run = Run::new(Arc::clone(&world));
    feed(&mut run, responses(r#"{"model":"m","input":"b","previous_response_id":"resp_1"}"#));
    assert_eq!((run.refusal().status.as_u16(), run.refusal().param), (404, Some("previous_response_id")));
    // Of an unknown one the engine says so.
    let mut run = Run::new(Arc::clone(&world));
    feed(&mut run, responses(r#"{"model":"m","input":"b","previous_response_id":"resp_2"}"#));
    assert_eq!(run.names(), ["accept", "route"]);
}

#[test]
fn background_and_follow_ups_are_never_split() {
    const SPLIT: &str = r#"{"model":"m","input":"a"}"#;
    for (text, names) in [
        (SPLIT, &["accept", "extend", "prefill"][..]),
        (
            r#"{"model":"m","input":"a","background":false,"previous_response_id":null}"#,
            &["accept", "extend", "prefill"],
        ),
        (r#"{"model":"m","input":"a","background":true}"#, &["accept", "route"]),
        (r#"{"model":"m","input":"a","previous_response_id":"resp_9"}"#, &["accept", "route"]),
    ] {
        let mut run = Run::new(world());
        run.feed(head_of("/v1/responses", Method::POST, PD, false)).feed(body(text));
        assert_eq!(run.names(), names, "{text}");
    }
    // A decode pod of SGLang cannot do without a hand-off, and its API knows none of this endpoint.
    let world = world_with(&fleet_of(Engine::Sglang, 1), |_| {});
    let decode = Arc::clone(
        world.fleet.load().model("m").unwrap().pods.iter().find(|pod| pod.spec.role == Role::Decode).unwrap(),
    );
    world.responses.remember("resp_1", Home { pod: decode.state.id, model: "m".into() }, Tick::from_millis(0));
    let mut run = Run::new(world);
    run.feed(head_of("/v1/responses", Method::POST, PD, false));
    run.feed(body(r#"{"model":"m","input":"a","previous_response_id":"resp_1"}"#));
    assert_eq!((run.refusal().status.as_u16(), run.refusal().param), (400, None));
    run.oracle();
}

/// The pod that has it cannot be reached: another one would not know it.
#[test]
fn a_follow_up_does_not_start_over_elsewhere() {
    let world = world_with(&singles(), |_| {});
    make(&world, [json_head(), chunk(WHOLE, true)]);
    let mut run = Run::over(Arc::clone(&world), Adapter::Front);
    feed(&mut run, responses(r#"{"model":"m","input":"b","previous_response_id":"resp_1"}"#));
    run.feed(Event::DecodeFailed { detail: "refused".to_owned(), unreachable: true });
    assert_eq!(run.refusal().reason, Reason::DecodeFailed);
    run.oracle();
}
