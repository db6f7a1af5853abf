//! What is observed of each setting. A scene says in one word what came of it.

use std::time::Duration;

use super::scene::*;
use super::*;
use crate::fleet::{ClaimState, Signals};
use crate::load::Sessions;

fn rate(generation_tps: f64) -> Signals {
    Signals { generation_tps: Some(generation_tps), ..Signals::unknown() }
}

/// Pods of a roleset for short prompts and of one for long ones.
fn short_and_long(short: &'static str, long: &'static str) -> [Member; 4] {
    [
        ("short", Role::Prefill, Some("s"), short),
        ("sd", Role::Decode, Some("s"), short),
        ("long", Role::Prefill, Some("l"), long),
        ("ld", Role::Decode, Some("l"), long),
    ]
}

/// A short text with an image, one roleset for short prompts and one for long ones.
pub(super) fn image_by_length(given: &Given<'_>) -> String {
    let (short, long) = (
        r#""promptLengthBucketing": true, "promptLenBucketMaxLength": 100"#,
        r#""promptLengthBucketing": true, "promptLenBucketMinLength": 101"#,
    );
    let image = "A".repeat(4000);
    let scene = Scene::new(given, &short_and_long(short, long));
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":[{{"type":"text","text":"hello"}},
            {{"type":"image_url","image_url":{{"url":"data:image/png;base64,{image}"}}}}]}}]}}"#
    );
    prefill_pod(&scene.ask_at("/v1/chat/completions", &[("routing-strategy", "pd")], &body))
}

/// A response is asked for a minute after it was made.
pub(super) fn response_after_a_minute(given: &Given<'_>) -> String {
    let mut scene = Scene::new(given, &[("c0", Role::Other, None, "")]);
    let mut run = scene.ask_at("/v1/responses", &[("routing-strategy", "random")], r#"{"model":"m","input":"a"}"#);
    run.feed(json_head()).feed(chunk(r#"{"object":"response","id":"resp_1"}"#, true));
    scene.now += 60_000;
    let mut run = Run::new(Arc::clone(&scene.world));
    run.now = scene.now;
    run.feed(head_of("/v1/responses/resp_1", Method::GET, &[], true));
    if run.names() == ["route"] { "its pod".to_owned() } else { "unknown".to_owned() }
}

/// A short prompt, one roleset for short ones and one, less loaded, for long ones.
pub(super) fn ranges(given: &Given<'_>) -> String {
    let members = short_and_long(r#""promptLenBucketMaxLength": 10"#, r#""promptLenBucketMinLength": 11"#);
    let scene = Scene::new(given, &members).prefills("short", 5);
    prefill_pod(&scene.ask_with(&[("routing-strategy", "pd")], "hello"))
}

pub(super) fn prefill_time(given: &Given<'_>) -> String {
    prefill_call(&Scene::new(given, TWO_AND_TWO).ask()).timeout.as_secs().to_string()
}

/// `p0` knows the whole prompt and has one request.
pub(super) fn cached_but_busier(given: &Given<'_>) -> String {
    prefill_pod(&Scene::new(given, TWO_AND_TWO).cached("p0", PROMPT_BYTES).prefills("p0", 1).ask())
}

/// The same with six requests.
pub(super) fn cached_but_much_busier(given: &Given<'_>) -> String {
    prefill_pod(&Scene::new(given, TWO_AND_TWO).cached("p0", PROMPT_BYTES).prefills("p0", 6).ask())
}

/// `p0` knows half of the prompt and has one request.
pub(super) fn half_cached(given: &Given<'_>) -> String {
    prefill_pod(&Scene::new(given, TWO_AND_TWO).cached("p0", PROMPT_BYTES / 2).prefills("p0", 1).ask())
}

/// `d0` has one request more and the higher throughput.
pub(super) fn busier_but_faster(given: &Given<'_>) -> String {
    decode_pod(&Scene::new(given, TWO_AND_TWO).decodes("d0", 2, &rate(1000.0)).decodes("d1", 1, &rate(0.0)).ask())
}

/// The same, and the signals are two seconds old.
pub(super) fn old_signals(given: &Given<'_>) -> String {
    let mut scene = Scene::new(given, TWO_AND_TWO).decodes("d0", 2, &rate(1000.0)).decodes("d1", 1, &rate(0.0));
    scene.now += 2000;
    decode_pod(&scene.ask())
}

/// `d0` has one request more but completes them faster: drain scores 1 and 1.25.
pub(super) fn busier_but_drains_faster(given: &Given<'_>) -> String {
    let drain = |rate| Signals { drain_rate: Some(rate), ..Signals::unknown() };
    decode_pod(&Scene::new(given, TWO_AND_TWO).decodes("d0", 2, &drain(2.0)).decodes("d1", 1, &drain(0.8)).ask())
}

/// `p0` computes 1000 tokens, `p1` holds 4000.
pub(super) fn computing_or_holding(given: &Given<'_>) -> String {
    prefill_pod(&Scene::new(given, TWO_AND_TWO).tokens("p0", 1000, false).tokens("p1", 4000, true).ask())
}

/// `p0` knows the whole prompt and computes 1000 tokens, `p1` 600.
pub(super) fn cached_or_fewer_tokens(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO).cached("p0", PROMPT_BYTES);
    prefill_pod(&scene.tokens("p0", 1000, false).tokens("p1", 600, false).ask())
}

/// What a request is charged beside its own tokens.
pub(super) fn request_cost(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    let run = scene.ask();
    let active = scene.pod(&prefill_pod(&run)).state.load.tokens.view().active;
    (active - run.exchange.record().body_bytes as u64 / 4).to_string()
}

/// A minute of silence.
pub(super) fn silent_request(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    let _run = scene.ask();
    let swept = scene.world.ledger.sweep(Tick::from_millis(scene.now + 60_000));
    if swept.is_empty() { "charged" } else { "taken back" }.to_owned()
}

/// The decode pod refuses a request whose blocks wait for it; a minute later.
pub(super) fn blocks_left_behind(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    let mut run = scene.ask();
    run.feed(prefill_ok()).feed(answer_head(500)).feed(chunk("{}", true));
    let pod = scene.pod(&prefill_pod(&run));
    assert!(pod.state.load.tokens.view().stranded > 0);
    scene.world.ledger.sweep(Tick::from_millis(scene.now + 60_000));
    if pod.state.load.tokens.view().is_zero() { "free" } else { "charged" }.to_owned()
}

/// The second turn of a session, a minute after the first.
pub(super) fn second_turn(given: &Given<'_>) -> String {
    let mut scene = Scene::new(given, TWO_AND_TWO);
    let headers = [("routing-strategy", "pd"), ("x-aibrix-session-key", "chat")];
    drop(scene.ask_with(&headers, &prompt(4000)));
    scene.now += 60_000;
    let run = scene.ask_with(&headers, &prompt(8000));
    let active = scene.pod(&prefill_pod(&run)).state.load.tokens.view().active;
    if active < 3500 + 1100 { "the growth" } else { "the whole" }.to_owned()
}

/// `d0` has fewer prompt tokens but generates for ten seconds, `d1` has just begun.
pub(super) fn old_or_new_output(given: &Given<'_>) -> String {
    let mut scene = Scene::new(given, TWO_AND_TWO);
    scene.now = 11_000;
    let busy = Signals { running: Some(1.0), ..rate(1000.0) };
    let scene = scene.decodes("d0", 0, &busy).decodes("d1", 0, &busy);
    decode_pod(&scene.decode_tokens("d0", 100, 1000).decode_tokens("d1", 150, 11_000).ask())
}

pub(super) fn hand_off(given: &Given<'_>) -> String {
    let mut run = Scene::new(given, TWO_AND_TWO).ask();
    run.feed(prefill_ok());
    let Some(Effect::Route(plan)) = run.effects.last() else { panic!("{:?}", run.names()) };
    let text = String::from_utf8_lossy(&plan.body);
    if text.contains("disagg_prefill_resp") { "the whole answer" } else { "the parameters" }.to_owned()
}

/// Sessions that are remembered of twenty.
pub(super) fn sessions(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    let table: &Sessions = &scene.world.sessions;
    for n in 0..20 {
        table.grow_by_key("m", n.to_string().as_bytes(), 5, Duration::from_secs(9), scene.tick());
    }
    if table.len() > 8 { "many" } else { "one set" }.to_owned()
}

pub(super) fn strategy_by_default(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    scene.ask_with(&[], "hello").exchange.record().strategy.as_deref().unwrap_or("none").to_owned()
}

pub(super) fn without_a_token(given: &Given<'_>) -> String {
    refused(&Scene::new(given, TWO_AND_TWO).ask())
}

/// Where a sleeping model is woken.
pub(super) fn woken(given: &Given<'_>) -> String {
    let (knobs, _) = Knobs::read(given).unwrap();
    let asleep = PodSpec { port: 0, claim: Some(ClaimState::Sleeping), ..spec("a", Role::Other, None) };
    let mut run = Run::new(world_with(&[asleep], |own| *own = knobs));
    run.feed(head(PD)).feed(body(BODY));
    let calls = run.effects.iter().filter_map(|effect| match effect {
        Effect::Wake(call) => Some(call.address.clone()),
        _ => None,
    });
    calls.collect()
}

/// What both legs of a client with a token have in `authorization`.
pub(super) fn shown_to_engines(given: &Given<'_>) -> String {
    let headers = [("routing-strategy", "pd"), ("authorization", "Bearer secret")];
    let mut run = Scene::new(given, TWO_AND_TWO).ask_with(&headers, "hello");
    run.feed(prefill_ok());
    let shown =
        |headers: &http::HeaderMap| headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
    let prefill = shown(&prefill_call(&run).headers);
    let Some(Effect::Route(plan)) = run.effects.last() else { panic!("{:?}", run.names()) };
    assert_eq!(shown(&plan.headers), prefill);
    prefill.unwrap_or_else(|| "nothing".to_owned())
}

/// A request of about 1400 bytes of body and 300 of head.
pub(super) fn long_request(given: &Given<'_>) -> String {
    refused(&Scene::new(given, TWO_AND_TWO).ask())
}

pub(super) fn second_request(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    let _first = scene.ask();
    refused(&scene.ask())
}

pub(super) fn prefill_answer_bound(given: &Given<'_>) -> String {
    prefill_call(&Scene::new(given, TWO_AND_TWO).ask()).max_answer_bytes.to_string()
}

pub(super) fn explained(given: &Given<'_>) -> String {
    let mut run =
        Scene::new(given, TWO_AND_TWO).ask_with(&[("routing-strategy", "pd"), ("x-tandem-explain", "1")], "hello");
    run.feed(prefill_ok()).feed(answer_head(200));
    let Some(Effect::ForwardHead(add)) = run.effects.last() else { panic!("{:?}", run.names()) };
    if add.contains_key("x-tandem-explain") { "told" } else { "silent" }.to_owned()
}

pub(super) fn replica_in_metrics(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    let _run = scene.ask();
    let named = |name: &str| page_has(&scene.world, "gateway_in_flight_requests", &format!("gateway_pod=\"{name}\""));
    ["host", "gw-9"].into_iter().find(|name| named(name)).unwrap_or_default().to_owned()
}

/// What the counter of a request that was served tells apart.
pub(super) fn apart_in_metrics(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    let mut run = scene.ask();
    run.feed(prefill_ok()).feed(answer_head(200)).feed(chunk("{}", true));
    scene.world.metrics.finish(run.record(), None);
    // A pod that is not in the fleet of the page has no series, a model has.
    let models = page_has(&scene.world, "gateway_total_time_bucket_total", "model=\"m\"");
    if models { "models" } else { "pods" }.to_owned()
}

/// A first chunk half a second after the head.
pub(super) fn first_token(given: &Given<'_>) -> String {
    let mut scene = Scene::new(given, TWO_AND_TWO);
    scene.now = 0;
    let mut run = scene.ask();
    run.feed(prefill_ok()).feed(answer_head(200));
    run.now += 450;
    run.feed(chunk("{}", true));
    scene.world.metrics.finish(run.record(), None);
    if page_has(&scene.world, "gateway_first_token_delay_over_1s_total{", " 1") { "slow" } else { "fast" }.to_owned()
}

/// Blocks that the index stores of one prompt of 1280 bytes.
pub(super) fn blocks(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    let _run = scene.ask();
    scene.world.prefix.drain(scene.tick());
    scene.world.prefix.stats().entries.to_string()
}

/// Blocks that are left two minutes later.
pub(super) fn blocks_later(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    let _run = scene.ask();
    for millis in [0, 120_000] {
        scene.world.prefix.drain(Tick::from_millis(scene.now + millis));
    }
    scene.world.prefix.stats().entries.to_string()
}

/// A pod whose cache was described with seed 7.
pub(super) fn seed_of_the_index(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO).prefills("p0", 1);
    let hashes = crate::prefix::block_hashes(prompt(PROMPT_BYTES).as_bytes(), 128, 7);
    let pod = Arc::clone(&scene.pod("p0").state);
    let update = crate::prefix::PrefixUpdate { model: Arc::from("m"), hashes: Arc::from(&hashes[..]), pod };
    scene.world.prefix.offer(update);
    scene.world.prefix.drain(scene.tick());
    prefill_pod(&scene.ask())
}

const STREAM: &str = r#"{"model":"m","prompt":"hello","stream":true}"#;
const WHOLE: &str = r#"{"model":"m","prompt":"hello"}"#;
const PD: &[(&str, &str)] = &[("routing-strategy", "pd")];

fn seconds(time: std::time::Duration) -> String {
    time.as_secs_f64().to_string()
}

/// An SGLang pair whose prefill leg has succeeded, and when.
fn sglang(given: &Given<'_>, body: &str) -> (Scene, Run) {
    let scene = Scene::of(given, TWO_AND_TWO, Engine::Sglang);
    let mut run = scene.ask_for(PD, body);
    run.feed(prefill_ok());
    (scene, run)
}

/// How long the watchdog waits from the last event on.
fn patience(run: &Run) -> String {
    run.exchange.deadline().map_or("none".to_owned(), |at| seconds(at.since(Tick::from_millis(run.now))))
}

pub(super) fn first_response(given: &Given<'_>) -> String {
    let (_scene, mut run) = sglang(given, STREAM);
    run.exchange.on(Tick::from_millis(run.now), stream_head(), &mut run.effects);
    patience(&run)
}

pub(super) fn whole_response(given: &Given<'_>) -> String {
    patience(&sglang(given, WHOLE).1)
}

pub(super) fn next_event(given: &Given<'_>) -> String {
    let (_scene, mut run) = sglang(given, STREAM);
    run.feed(stream_head()).feed(chunk("data: {\"choices\":[{\"text\":\"a\"}]}\n\n", false));
    patience(&run)
}

fn abort_plan(given: &Given<'_>) -> Option<AbortPlan> {
    let scene = Scene::of(given, TWO_AND_TWO, Engine::Sglang);
    let mut run = scene.ask_for(PD, STREAM);
    run.feed(prefill_failed());
    run.effects.iter().find_map(|effect| if let Effect::Abort(plan) = effect { Some((**plan).clone()) } else { None })
}

pub(super) fn abort_bound(given: &Given<'_>) -> String {
    abort_plan(given).map_or("none".to_owned(), |plan| seconds(plan.timeout))
}

pub(super) fn second_abort(given: &Given<'_>) -> String {
    abort_plan(given).and_then(|plan| plan.retry_delay).map_or("none".to_owned(), seconds)
}

pub(super) fn mooncake_port(given: &Given<'_>) -> String {
    let run = Scene::new(given, TWO_AND_TWO).ask();
    let port = run.effects.iter().find_map(|effect| match effect {
        Effect::LookUp(call) => match call.kind {
            LookupKind::MooncakeQuery { port, .. } => Some(port),
            LookupKind::ServerInfo => None,
        },
        _ => None,
    });
    port.unwrap().to_string()
}

pub(super) fn schedule_style(given: &Given<'_>) -> String {
    let run = Scene::of(given, TWO_AND_TWO, Engine::Trtllm).ask();
    run.names().last().unwrap().to_string()
}

/// The bits of the request's id that are the replica's.
pub(super) fn machine_bits(given: &Given<'_>) -> String {
    let scene = Scene::of(given, TWO_AND_TWO, Engine::Trtllm);
    let body: serde_json::Value = serde_json::from_slice(&prefill_call(&scene.ask()).body).unwrap();
    let id = body["disaggregated_params"]["disagg_request_id"].as_u64().unwrap();
    (((id - (1 << 42)) >> 12) & 1023).to_string()
}

pub(super) fn addressed(given: &Given<'_>) -> String {
    let scene = Scene::new(given, TWO_AND_TWO);
    let mut run = scene.ask();
    run.feed(prefill_ok());
    let Some(Effect::Route(plan)) = run.effects.iter().find(|effect| matches!(effect, Effect::Route(_))) else {
        panic!("{:?}", run.names());
    };
    let list = plan.set_headers.iter().find(|(name, _)| *name == "x-gateway-destination-endpoint");
    list.map_or("one".to_owned(), |(_, list)| list.split(',').count().to_string())
}

/// The answer of the prefill pod was not there nine seconds ago, and is now.
pub(super) fn late_hand_off(given: &Given<'_>) -> String {
    let mut run = Scene::new(given, TWO_AND_TWO).ask();
    run.feed(Event::Timer);
    run.now += 9000;
    run.feed(prefill_ok());
    run.names().last().unwrap().to_string()
}

/// One failure of a prefill pod: for how many seconds it is ejected.
fn ejection(given: &Given<'_>) -> Option<u64> {
    let scene = Scene::new(given, TWO_AND_TWO);
    let mut run = scene.ask();
    let pod = scene.pod(&prefill_pod(&run));
    run.feed(Event::Prefill(LegOutcome::Failed { class: LegFailure::Timeout, detail: String::new(), sent: true }));
    let view = pod.state.health.view(Tick::from_millis(run.now));
    view.ejected_for.map(|time| time.as_secs())
}

pub(super) fn after_one_failure(given: &Given<'_>) -> String {
    ejection(given).map_or("in use", |_| "ejected").to_owned()
}

pub(super) fn ejected_for_long(given: &Given<'_>) -> String {
    if ejection(given).unwrap() >= 10 { "10 s or more" } else { "less" }.to_owned()
}
