//! Limits that replicas share: what is asked, when, and what comes of the answer.

use std::time::Duration;

use tokio_util::task::TaskTracker;

use super::*;
use crate::clock::Clock;
use crate::knobs::RateFallback;
use crate::load::RateWindow;
use crate::state::limits::{LimitCall, LimitParts, LimitRefusal, Places, SharedLimits, UserCounts};
use crate::state::redis::{Plane, RedisConfig};

const CONFIG: &str = r#"{"profiles": {"default": {"routingStrategy": "pd"},
    "limited": {"routingStrategy": "pd", "requestsPerSecond": 2}}}"#;

/// A world whose replica shares limits; nobody is asked here.
fn sharing() -> Arc<World> {
    sharing_with(CONFIG, Duration::from_millis(100))
}

fn sharing_with(config: &str, wait: Duration) -> Arc<World> {
    sharing_and(config, wait, |_| {})
}

fn sharing_and(config: &str, wait: Duration, change: impl FnOnce(&mut crate::knobs::Knobs)) -> Arc<World> {
    let plane = Plane::connect(&RedisConfig::from_parts("127.0.0.1", 1, None)).unwrap();
    let parts = LimitParts {
        fallback: RateFallback::Local,
        wait,
        replica: "r".to_owned(),
        clock: Clock::system(),
        metrics: Arc::new(Metrics::new("gateway")),
        tasks: TaskTracker::new(),
    };
    let specs = profiles::configured(config);
    let world = Arc::into_inner(world_with(&specs, change)).unwrap();
    Arc::new(world.with_limits(SharedLimits::new(plane, parts)))
}

fn asked(run: &Run) -> Option<&LimitCall> {
    run.effects.iter().find_map(|effect| if let Effect::ChargeLimits(call) = effect { Some(&**call) } else { None })
}

fn admitting(world: &Arc<World>) -> Run {
    let mut run = Run::new(Arc::clone(world));
    run.feed(head(&[("config-profile", "limited"), ("user", "alice")])).feed(body(BODY));
    assert_eq!(run.names(), ["accept", "charge"]);
    run
}

/// A place in a window that is looked at.
fn place(window: &Arc<RateWindow>) -> Event {
    Event::LimitsCharged(Ok(Places::from(window.admit(9, Tick::from_millis(0)).unwrap())))
}

fn taken(window: &RateWindow) -> u64 {
    window.taken(Tick::from_millis(0))
}

#[tokio::test]
async fn limits_that_are_turned_off_are_asked_for_by_nothing() {
    let off = |knobs: &mut crate::knobs::Knobs| knobs.disable_rate_limiting = true;
    let shared = sharing_and(CONFIG, Duration::from_millis(100), off);
    let alone = world_with(&profiles::configured(CONFIG), off);
    let long: &'static str = "x".repeat(257).leak();
    for world in [shared, alone] {
        // Twice the limit, and a name that nobody has.
        for user in ["alice", "alice", "alice", long] {
            let mut run = Run::new(Arc::clone(&world));
            run.feed(head(&[("config-profile", "limited"), ("user", user)])).feed(body(BODY));
            assert!(asked(&run).is_none() && run.names().contains(&"prefill"), "{:?}", run.names());
            run.feed(Event::Gone);
            run.oracle();
        }
    }
}

#[tokio::test]
async fn what_has_a_limit_asks_for_it_and_nothing_else_does() {
    let world = sharing();
    let long: &'static str = "x".repeat(257).leak();
    let longest: &'static str = "x".repeat(256).leak();
    // Headers, user, model's limit.
    for (headers, user, limit) in [
        (&[][..], None, None),
        (&[("user", "")], None, None),
        (&[("user", "  ")], None, None),
        (&[("user", " alice ")], Some("alice"), None),
        (&[("user", longest)], Some(longest), None),
        (&[("config-profile", "limited")], None, Some(2)),
        (&[("config-profile", "limited"), ("user", "bob")], Some("bob"), Some(2)),
    ] {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head(headers)).feed(body(BODY));
        let call = asked(&run);
        assert_eq!(call.and_then(|call| call.user.as_deref()), user, "{headers:?}");
        assert_eq!(call.and_then(|call| call.model.as_ref()).map(|limit| limit.per_second), limit, "{headers:?}");
        assert_eq!(call.is_some(), user.is_some() || limit.is_some());
        assert_eq!(run.names().contains(&"prefill"), call.is_none(), "{headers:?}");
        run.feed(Event::Gone);
        run.oracle();
    }
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(&[("user", long)])).feed(body(BODY));
    assert_eq!(run.refusal().reason, Reason::UserUnknown, "nobody has such a name");
    run.oracle();
    // Not even a name.
    let mut run = Run::new(Arc::clone(&world));
    let Event::Head(mut named) = head(&[]) else { panic!() };
    named.headers.insert("user", HeaderValue::from_bytes(b"\xff").unwrap());
    run.feed(Event::Head(named)).feed(body(BODY));
    assert_eq!(run.refusal().headers()["x-error-user"], "true");
    // Refused for itself: nobody is asked.
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(&[("user", "alice")])).feed(body(r#"{"model":"m","prompt":"x","max_tokens":1,"max_tokens":2}"#));
    assert_eq!((run.refusal().reason, asked(&run).is_none()), (Reason::InvalidPdRequest, true));
    // Without Redis, users are not limited.
    let mut run = Run::new(self::world());
    run.feed(head(&[("user", "alice"), ("routing-strategy", "pd")])).feed(body(BODY));
    assert_eq!(run.names(), ["accept", "extend", "prefill"]);
}

#[tokio::test]
async fn a_long_wait_is_announced_together_with_that_for_the_prefill_leg() {
    let mut run = Run::new(sharing_with(CONFIG, Duration::from_millis(101)));
    run.feed(head(&[("user", "alice")])).feed(body(BODY));
    let Some(Effect::ExtendTimeout(time)) = run.effects.get(1) else { panic!("{:?}", run.effects) };
    assert_eq!(*time, Duration::from_millis(30_101));
    run.feed(Event::LimitsCharged(Ok(Places::default())));
    assert_eq!(run.names(), ["accept", "extend", "charge", "prefill"]);
    run.feed(Event::Gone);
    run.oracle();
}

#[tokio::test]
async fn an_admitted_request_goes_on_and_keeps_its_place_when_it_is_served() {
    let world = sharing();
    let window = Arc::new(RateWindow::default());
    let mut run = admitting(&world);
    run.feed(Event::Timer).feed(Event::Body { data: Bytes::new(), end: true });
    run.feed(place(&window));
    assert_eq!(run.names()[1..], ["charge", "extend", "prefill"]);
    run.feed(prefill_ok()).feed(answer_head(200)).feed(chunk("{}", true));
    assert_eq!((run.record().outcome, taken(&window)), (Outcome::Success, 1));
    run.oracle();

    // The prefill leg fails: the place is free.
    let window = Arc::new(RateWindow::default());
    let mut run = admitting(&world);
    run.feed(place(&window)).feed(prefill_failed());
    assert_eq!((run.refusal().reason, taken(&window)), (Reason::PrefillFailed, 0));
    run.oracle();

    // The client leaves while a pod works for it: it has used its place.
    let window = Arc::new(RateWindow::default());
    let mut run = admitting(&world);
    run.feed(place(&window)).feed(Event::Gone);
    assert_eq!(taken(&window), 1);
    run.oracle();
}

#[tokio::test]
async fn whatever_happens_while_it_waits_the_place_goes_back() {
    let world = sharing();
    for (end, refused) in [
        (Event::Gone, false),
        (Event::Shutdown, true),
        (Event::Misconfigured("mend it".to_owned()), true),
        (head(&[]), true),
        (body(BODY), true),
    ] {
        let window = Arc::new(RateWindow::default());
        let mut run = admitting(&world);
        run.feed(end);
        assert_eq!(run.names().contains(&"refuse"), refused);
        assert!(run.exchange.ended() && !run.names().contains(&"prefill"));
        run.feed(place(&window));
        assert_eq!(taken(&window), 0, "too late");
        run.oracle();
    }
    // Nobody has asked.
    let window = Arc::new(RateWindow::default());
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(PD)).feed(place(&window));
    assert_eq!((run.names(), taken(&window)), (vec!["accept"], 0));
}

#[tokio::test]
async fn refusals_are_told_as_the_reference_tells_them() {
    let world = sharing();
    let (minute, none) = (Duration::from_millis(59_001), "");
    for (refusal, status, marker, code, retry) in [
        (LimitRefusal::UserUnknown, 500, "x-error-user", None, none),
        (LimitRefusal::UserUnreadable, 500, "x-error-user", None, none),
        (LimitRefusal::UserUncountable, 500, "x-error-incr-rpm", None, none),
        (LimitRefusal::UserRequests(7, minute), 429, "x-error-rpm-exceeded", Some("rate_limit_exceeded"), "60"),
        (LimitRefusal::UserTokens(7, Duration::ZERO), 429, "x-error-tpm-exceeded", Some("rate_limit_exceeded"), "1"),
        (LimitRefusal::Model(2), 429, "x-error-model-rps-exceeded", Some("rate_limit_exceeded"), "1"),
        (LimitRefusal::ModelUncountable, 500, "x-error-incr-model-rps", None, none),
    ] {
        let mut run = admitting(&world);
        run.feed(Event::LimitsCharged(Err(refusal)));
        let (error, headers) = (run.refusal(), run.refusal().headers());
        assert_eq!((error.status.as_u16(), &headers[marker]), (status, &HeaderValue::from_static("true")));
        assert_eq!(headers.get("retry-after").map_or(none, |value| value.to_str().unwrap()), retry, "{refusal:?}");
        let object: serde_json::Value = serde_json::from_slice(&error.body()).unwrap();
        assert_eq!(object["error"]["code"].as_str(), code, "{refusal:?}");
        let kind = if status == 429 { "rate_limit_error" } else { "api_error" };
        assert_eq!(object["error"]["type"], kind);
        assert!(!error.message.contains("alice"), "{}", error.message);
        assert_eq!(run.record().outcome.label(), format!("{marker}_fail"));
        run.oracle();
    }
}

#[tokio::test]
async fn r18_only_a_user_whose_tokens_are_limited_has_to_ask_for_usage() {
    let world = sharing();
    let (limited, free) = (r#"{"rpm":5,"tpm":10}"#, r#"{"rpm":5,"tpm":0}"#);
    let (chat, completions) = ("/v1/chat/completions", "/v1/completions");
    for (path, members, record, refused) in [
        (chat, r#","stream":true"#, limited, true),
        (chat, r#","stream":true,"stream_options":{"include_usage":false}"#, limited, true),
        (chat, r#","stream":true,"stream_options":{"include_usage":true}"#, limited, false),
        (chat, r#","stream":false"#, limited, false),
        (chat, r#","stream":true"#, free, false),
        (completions, r#","stream":true"#, limited, false),
    ] {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head_of(path, Method::POST, &[("user", "alice")], false));
        run.feed(sent(format!(
            r#"{{"model":"m","prompt":"x","messages":[{{"role":"user","content":"x"}}]{members}}}"#
        )));
        run.feed(Event::LimitsCharged(Ok(Places::of_user(record, None))));
        assert_eq!(run.names().contains(&"refuse"), refused, "{path} {members} {record}");
        if refused {
            let error = run.refusal();
            assert_eq!((error.status.as_u16(), error.param), (400, Some("stream_options")));
            let text = "include usage for stream options not set";
            assert_eq!(&*error.message, text);
            assert_eq!(error.headers()["x-error-no-stream-options-include-usage"], text);
        }
        run.feed(Event::Gone);
        run.oracle();
    }
}

#[tokio::test]
async fn the_head_of_the_answer_tells_what_the_user_was_charged() {
    let world = sharing();
    for counts in [None, Some(UserCounts { requests: 3, tokens: 44 })] {
        let mut run = admitting(&world);
        run.feed(Event::LimitsCharged(Ok(Places::of_user("{}", counts)))).feed(prefill_ok()).feed(answer_head(200));
        let Some(Effect::ForwardHead(add)) = run.effects.last() else { panic!("{:?}", run.effects) };
        let told = |name: &str| add.get(name).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(told("x-update-rpm"), counts.map(|counts| counts.requests.to_string()));
        assert_eq!(told("x-update-tpm"), counts.map(|counts| counts.tokens.to_string()));
        run.feed(chunk("{}", true));
        run.oracle();
    }
}

/// A prefill pod that has the whole answer has served the request, whose place is used.
#[tokio::test]
async fn an_answer_without_a_decode_pod_uses_its_place() {
    let world = sharing();
    let specs: Vec<PodSpec> = legs::fleet_of(Engine::Trtllm, 1)
        .into_iter()
        .zip(profiles::configured(CONFIG))
        .map(|(pod, configured)| PodSpec { config: configured.config, ..pod })
        .collect();
    world.fleet.store(build(&Snapshot::default(), &specs, &mut 0));
    let window = Arc::new(RateWindow::default());
    let mut run = admitting(&world);
    run.feed(place(&window)).feed(legs::answered(
        200,
        r#"{"choices":[{"text":"a","finish_reason":"stop","disaggregated_params":{"ctx_request_id":null}}],"prompt_token_ids":[1]}"#,
    ));
    assert!(run.names().contains(&"answer"));
    assert_eq!((run.record().outcome, taken(&window)), (Outcome::Success, 1));
    run.oracle();
}
