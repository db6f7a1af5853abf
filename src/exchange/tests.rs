//! Orders of events, as tables and as random walks. The oracle after each: one `End` at most, and nothing charged.

mod absent;
mod apis;
mod bands;
mod claims;
mod disorder;
mod effects;
mod hand_over;
mod handoff;
mod legs;
mod limits;
mod models;
mod names;
mod orders;
mod passing;
mod profiles;
mod ranks;
mod shared_limits;
mod stored;
mod strategies;
mod tokens;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode};

use super::*;
use crate::clock::Tick;
use crate::engines::leg::{LegFailure, LegOutcome};
use crate::engines::lookup::LookupKind;
use crate::error::Reason;
use crate::fleet::{Engine, Fleet, PodKey, PodSpec, Role, Snapshot, build};
use crate::knobs::{Environment, Knobs};
use crate::telemetry::{Metrics, Outcome, RequestRecord};

struct Nothing;

impl Environment for Nothing {
    fn get(&self, _name: &str) -> Option<String> {
        None
    }
}

fn spec(name: &str, role: Role, roleset: Option<&str>) -> PodSpec {
    PodSpec {
        key: PodKey { namespace: Arc::from("ns"), name: Arc::from(name) },
        host: Arc::from("10.0.0.5"),
        role,
        roleset: roleset.map(Arc::from),
        ..crate::fleet::fixture::spec(name)
    }
}

fn pair() -> Vec<PodSpec> {
    vec![spec("p", Role::Prefill, Some("rs")), spec("d", Role::Decode, Some("rs"))]
}

fn world_with(specs: &[PodSpec], change: impl FnOnce(&mut Knobs)) -> Arc<World> {
    let (mut knobs, _) = Knobs::read(&Nothing).unwrap();
    change(&mut knobs);
    let fleet = Fleet::default();
    fleet.store(build(&Snapshot::default(), specs, &mut 0));
    Arc::new(World::new(Arc::new(knobs), Arc::new(fleet), Arc::new(Metrics::new("gateway")), WorldSeeds::default()))
}

fn world() -> Arc<World> {
    world_with(&pair(), |_| {})
}

fn head(pairs: &[(&'static str, &'static str)]) -> Event {
    head_of("/v1/completions", Method::POST, pairs, false)
}

fn head_of(path: &str, method: Method, pairs: &[(&'static str, &'static str)], end: bool) -> Event {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.insert(*name, HeaderValue::from_static(value));
    }
    Event::Head(RequestHead {
        request_id: "R".to_owned(),
        id_is_unique: true,
        method,
        path: path.to_owned(),
        headers,
        end,
    })
}

const BODY: &str = r#"{"model":"m","prompt":"hello","max_tokens":8}"#;

fn body(text: &'static str) -> Event {
    Event::Body { data: Bytes::from_static(text.as_bytes()), end: true }
}

fn sent(text: String) -> Event {
    Event::Body { data: Bytes::from(text), end: true }
}

fn prefill_ok() -> Event {
    Event::Prefill(LegOutcome::Answered {
        status: StatusCode::OK,
        advice: HeaderMap::new(),
        body: Bytes::from_static(
            br#"{"choices":[],"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,
            "remote_block_ids":[[1,2]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"localhost",
            "remote_port":5600}}"#,
        ),
    })
}

fn prefill_failed() -> Event {
    Event::Prefill(LegOutcome::Failed { class: LegFailure::Transport, detail: "refused".to_owned(), sent: false })
}

fn answer_head(status: u16) -> Event {
    Event::AnswerHead(AnswerHead {
        status: StatusCode::from_u16(status).unwrap(),
        headers: HeaderMap::new(),
        end: false,
    })
}

fn json_head() -> Event {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    Event::AnswerHead(AnswerHead { status: StatusCode::OK, headers, end: false })
}

fn stream_head() -> Event {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("text/event-stream"));
    Event::AnswerHead(AnswerHead { status: StatusCode::OK, headers, end: false })
}

fn chunk(text: &'static str, end: bool) -> Event {
    Event::AnswerChunk { data: Bytes::from_static(text.as_bytes()), end }
}

struct Run {
    world: Arc<World>,
    exchange: Exchange,
    effects: Vec<Effect>,
    now: u64,
}

impl Run {
    fn new(world: Arc<World>) -> Run {
        Run::over(world, Adapter::Envoy)
    }

    fn over(world: Arc<World>, adapter: Adapter) -> Run {
        let exchange = Exchange::new(Arc::clone(&world), adapter, 1, Tick::from_millis(0));
        Run { world, exchange, effects: Vec::new(), now: 0 }
    }

    fn feed(&mut self, event: Event) -> &mut Self {
        self.now += 10;
        self.exchange.on(Tick::from_millis(self.now), event, &mut self.effects);
        self
    }

    fn records(&self) -> Vec<&RequestRecord> {
        self.effects
            .iter()
            .filter_map(|effect| if let Effect::End(record) = effect { Some(&**record) } else { None })
            .collect()
    }

    fn record(&self) -> &RequestRecord {
        assert_eq!(self.records().len(), 1, "{:?}", self.effects);
        self.records()[0]
    }

    fn refusal(&self) -> &crate::error::ApiError {
        self.effects
            .iter()
            .find_map(|effect| if let Effect::Refuse(error) = effect { Some(&**error) } else { None })
            .expect("a refusal")
    }

    fn names(&self) -> Vec<&'static str> {
        self.effects.iter().map(names::of).collect()
    }

    /// Gauges are zero, budgets are whole.
    fn oracle(self) {
        let world = Arc::clone(&self.world);
        assert!(self.records().len() <= 1);
        drop(self);
        assert_clean(&world);
    }
}

fn assert_clean(world: &World) {
    for model in world.fleet.load().models.values() {
        for pod in &model.pods {
            let view = pod.state.load.view();
            assert_eq!((view.prefills, view.pending, view.running), (0, 0, 0), "{}", pod.spec.key);
            let tokens = pod.state.load.tokens.view();
            assert_eq!((tokens.active, tokens.kv - tokens.stranded, tokens.decode), (0, 0, 0), "{}", pod.spec.key);
        }
    }
    assert_eq!((world.buffered.used(), world.streams.used()), (0, 0));
}

const PD: &[(&str, &str)] = &[("routing-strategy", "pd")];

#[test]
fn a_pd_request_goes_the_whole_way() {
    let mut run = Run::new(world());
    run.feed(head(PD)).feed(body(BODY));
    assert_eq!(run.names(), ["accept", "extend", "prefill"]);
    let loads = |run: &Run| {
        let model = Arc::clone(run.world.fleet.load().model("m").unwrap());
        let view = |name: &str| model.pods.iter().find(|pod| &*pod.spec.key.name == name).unwrap().state.load.view();
        (view("p").prefills, view("d").pending, view("d").running, view("d").completed)
    };
    assert_eq!(loads(&run), (1, 1, 0, 0));
    run.feed(prefill_ok());
    assert_eq!(loads(&run), (0, 0, 1, 0));
    run.feed(answer_head(200)).feed(chunk(r#"{"id":"x","usage":{"prompt_tokens":3,"#, false));
    run.feed(chunk(r#""completion_tokens":4,"total_tokens":7}}"#, true));
    assert_eq!(loads(&run), (0, 0, 0, 1));
    assert_eq!(run.names(), ["accept", "extend", "prefill", "route", "head", "chunk", "chunk", "end"]);
    let Some(Effect::StartPrefill(call)) = run.effects.get(2) else { panic!() };
    let Some(Effect::Route(plan)) = run.effects.get(3) else { panic!() };
    assert_eq!(&*call.address, "10.0.0.5:8000");
    assert_eq!(call.headers["x-request-id"], "R");
    assert!(plan.set_headers.contains(&("x-request-id", "R".to_owned())));
    assert!(plan.set_headers.contains(&("target-pod", "10.0.0.5:8000".to_owned())));
    let Some(Effect::ForwardHead(add)) = run.effects.get(4) else { panic!() };
    for (name, value) in [
        ("request-id", "R"),
        ("routing-strategy", "pd"),
        ("target-pod", "d"),
        ("target-pod-ip", "10.0.0.5:8000"),
        ("prefill-target-pod", "p"),
        ("prefill-target-pod-ip", "10.0.0.5"),
        ("x-went-into-req-headers", "true"),
    ] {
        assert_eq!(add[name], value);
    }
    let record = run.record();
    assert_eq!(record.outcome, Outcome::Success);
    assert_eq!(record.usage.unwrap().total_tokens, 7);
    assert_eq!(record.handoff, "relayed");
    assert_eq!(
        (record.timings.prefill_start, record.timings.prefill_end),
        (Some(Tick::from_millis(20)), Some(Tick::from_millis(30)))
    );
    run.oracle();
}

#[test]
fn refused_requests_touch_no_pod() {
    let long = "x".repeat(2 << 20).leak();
    for (name, events, status, reason) in [
        ("unknown path", vec![head_of("/v1/nope", Method::POST, &[], false)], 501, Reason::UnknownPath),
        ("wrong method", vec![head_of("/v1/completions", Method::PUT, &[], false)], 405, Reason::MethodNotAllowed),
        ("no body", vec![head_of("/v1/completions", Method::POST, &[], true)], 400, Reason::BodyInvalid),
        ("announced too long", vec![head(&[("content-length", "99999999999")])], 413, Reason::BodyTooLarge),
        ("too long", vec![head(&[]), body(long)], 413, Reason::BodyTooLarge),
        ("r23 cut body", vec![head(&[("content-length", "999")]), body(BODY)], 400, Reason::BodyTruncated),
        ("not json", vec![head(&[]), body("{")], 400, Reason::BodyInvalid),
        ("no model", vec![head(&[]), body(r#"{"prompt":"x"}"#)], 400, Reason::ModelMissing),
        ("unknown model", vec![head(&[]), body(r#"{"model":"zz","prompt":"x"}"#)], 400, Reason::ModelUnknown),
        ("bad strategy", vec![head(&[("routing-strategy", "PD")]), body(BODY)], 400, Reason::BadStrategy),
        (
            "a hand-off by the back door",
            vec![head(&[]), body(r#"{"model":"m","prompt":"x","vllm_xargs":{"kv\u005ftransfer_params":"x"}}"#)],
            400,
            Reason::BodyInvalid,
        ),
        (
            "interop_07 duplicate key",
            vec![head(PD), body(r#"{"model":"m","prompt":"x","max_tokens":1,"max\u005ftokens":9}"#)],
            400,
            Reason::InvalidPdRequest,
        ),
    ] {
        let mut run = Run::new(world_with(&pair(), |knobs| knobs.limits.max_body_bytes = 1 << 20));
        for event in events {
            run.feed(event);
        }
        let error = run.refusal();
        assert_eq!((error.status.as_u16(), error.reason), (status, reason), "{name}");
        assert_eq!(run.record().outcome, Outcome::Failed(reason), "{name}");
        if name == "interop_07 duplicate key" {
            assert_eq!(error.message, "duplicate top-level key \"max_tokens\" in request body");
        }
        run.oracle();
    }
}

#[test]
fn a_wrong_api_key_is_refused_before_the_body() {
    let world = world_with(&pair(), |knobs| knobs.auth_bearer_token = Some(crate::knobs::Secret::new("k")));
    let mut run = Run::new(world);
    run.feed(head(&[("authorization", "Bearer x")]));
    assert_eq!(run.names(), ["refuse", "end"]);
    assert_eq!(run.refusal().status, StatusCode::UNAUTHORIZED);
    run.oracle();
}

#[test]
fn a_body_may_come_in_pieces() {
    let mut run = Run::new(world());
    run.feed(head(PD));
    for byte in 0..BODY.len() {
        let data = Bytes::from_static(&BODY.as_bytes()[byte..=byte]);
        run.feed(Event::Body { data, end: byte + 1 == BODY.len() });
    }
    assert_eq!(run.names(), ["accept", "extend", "prefill"]);
    run.feed(Event::Gone);
    run.oracle();
}

#[test]
fn prefill_failures_reach_the_client_and_release() {
    for (event, status, reason) in [
        (prefill_failed(), 503, Reason::PrefillFailed),
        (
            Event::Prefill(LegOutcome::Answered {
                status: StatusCode::BAD_REQUEST,
                advice: HeaderMap::new(),
                body: Bytes::from_static(b"{\"error\":{\"message\":\"too long\"}}"),
            }),
            400,
            Reason::PrefillRejected,
        ),
        (
            Event::Prefill(LegOutcome::Answered {
                status: StatusCode::OK,
                advice: HeaderMap::new(),
                body: Bytes::from_static(b"{\"kv_transfer_params\":\"oops\"}"),
            }),
            502,
            Reason::HandoffInvalid,
        ),
    ] {
        let mut run = Run::new(world());
        run.feed(head(PD)).feed(body(BODY)).feed(event);
        assert_eq!((run.refusal().status.as_u16(), run.refusal().reason), (status, reason));
        assert_eq!(run.refusal().headers()["x-error-pd-prefill"], "true");
        assert!(!run.names().contains(&"route"));
        run.oracle();
    }
}

#[test]
fn the_client_may_leave_at_any_moment() {
    let steps: Vec<fn() -> Event> =
        vec![|| head(PD), || body(BODY), prefill_ok, || answer_head(200), || chunk("data: {}\n\n", false)];
    for taken in 0..=steps.len() {
        let mut run = Run::new(world());
        for step in &steps[..taken] {
            run.feed(step());
        }
        run.feed(Event::Gone);
        let record = run.record();
        assert_eq!((record.outcome, record.status), (Outcome::ClientGone, 499), "after {taken} steps");
        assert_eq!(run.names().contains(&"cancel"), taken == 2);
        run.oracle();
    }
}

/// The client leaves in the moment in which the prefill leg ends.
fn gone_after(prefill: Event) -> Event {
    let Event::Prefill(outcome) = prefill else { panic!() };
    Event::GoneAfterPrefill(outcome)
}

#[test]
fn interop_15b_a_client_that_leaves_between_the_legs_lets_the_decode_pod_hear_of_the_blocks() {
    let mut run = Run::new(world());
    run.feed(head(PD)).feed(body(BODY)).feed(gone_after(prefill_ok()));
    assert_eq!(run.names()[2..], ["prefill", "deliver", "end"]);
    let Some(Effect::Deliver(call)) = run.effects.get(3) else { panic!() };
    assert_eq!(&*call.address, "10.0.0.5:8000");
    assert_eq!(call.headers["x-request-id"], "R");
    let sent: serde_json::Value = serde_json::from_slice(&call.body).unwrap();
    assert_eq!(sent["kv_transfer_params"]["remote_host"], "10.0.0.5");
    assert_eq!((run.record().outcome, run.record().status), (Outcome::ClientGone, 499));
    run.oracle();

    // Nothing is held where there is no hand-off.
    let absent = LegOutcome::Answered {
        status: StatusCode::OK,
        advice: HeaderMap::new(),
        body: Bytes::from_static(b"{\"kv_transfer_params\":null}"),
    };
    for outcome in [Event::Prefill(absent), prefill_failed()] {
        let mut run = Run::new(world());
        run.feed(head(PD)).feed(body(BODY)).feed(gone_after(outcome));
        assert_eq!(run.names()[2..], ["prefill", "end"]);
        run.oracle();
    }
}

#[test]
fn r27_leaving_after_done_is_success() {
    let mut run = Run::new(world());
    let streaming = r#"{"model":"m","prompt":"hello","stream":true}"#;
    run.feed(head(PD)).feed(body(streaming)).feed(prefill_ok());
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("text/event-stream"));
    run.feed(Event::AnswerHead(AnswerHead { status: StatusCode::OK, headers, end: false }));
    run.feed(chunk("data: {\"choices\":[]}\n\ndata: [DONE]\n\n", false)).feed(Event::Gone);
    assert_eq!(run.record().outcome, Outcome::Success);
    run.oracle();
}

#[test]
fn a_shutdown_refuses_before_the_answer_and_cuts_it_after() {
    let steps: Vec<fn() -> Event> =
        vec![|| head(PD), || body(BODY), prefill_ok, || answer_head(200), || chunk("{", false)];
    for taken in 0..=steps.len() {
        let mut run = Run::new(world());
        for step in &steps[..taken] {
            run.feed(step());
        }
        run.feed(Event::Shutdown);
        assert_eq!(run.names().contains(&"cut"), taken > 3, "after {taken} steps");
        assert_eq!(run.names().contains(&"refuse"), taken <= 3, "after {taken} steps");
        run.oracle();
    }
}

#[test]
fn engine_errors_pass_through_and_count() {
    for (status, outcome) in
        [(200, Outcome::Success), (404, Outcome::EngineStatus(404)), (503, Outcome::EngineStatus(503))]
    {
        let mut run = Run::new(world());
        run.feed(head(PD)).feed(body(BODY)).feed(prefill_ok()).feed(answer_head(status)).feed(chunk("{}", true));
        assert_eq!((run.record().outcome, run.record().status), (outcome, status));
        run.oracle();
    }
}

#[test]
fn without_a_strategy_envoy_routes_by_the_model_header() {
    let mut run = Run::new(world());
    run.feed(head(&[])).feed(body(r#"{"model":"m","prompt":"x","kv_transfer_params":{"do_remote_prefill":true}}"#));
    let Some(Effect::Route(plan)) = run.effects.get(1) else { panic!("{:?}", run.effects) };
    assert!(plan.address.is_none());
    assert!(plan.set_headers.contains(&("model", "m".to_owned())));
    assert_eq!(&plan.body[..], br#"{"model":"m","prompt":"x"}"#);
    run.feed(Event::Gone);
    run.oracle();
}

#[test]
fn ids_from_shared_traces_are_made_unique_for_the_legs() {
    let world = world();
    let mut seen = std::collections::HashSet::new();
    for _ in 0..3 {
        let mut run = Run::new(Arc::clone(&world));
        let Event::Head(mut shared) = head(PD) else { panic!() };
        shared.id_is_unique = false;
        run.feed(Event::Head(shared)).feed(body(BODY));
        let Some(Effect::StartPrefill(call)) = run.effects.get(2) else { panic!() };
        assert!(seen.insert(call.headers["x-request-id"].clone()));
        assert!(call.headers["x-request-id"].to_str().unwrap().starts_with("R-"));
    }
}
