//! Token charges over the life of a request, and what it tells about its decision.

use super::*;
use crate::knobs::{DecodePolicy, PdKnobs, PrefillPolicy};
use crate::load::TokenView;

fn counting() -> Arc<World> {
    world_with(&pair(), |knobs| {
        knobs.pd = Arc::new(PdKnobs {
            prefill_policy: PrefillPolicy::TokenLoad,
            decode_policy: DecodePolicy::TokenLoad,
            ..PdKnobs::default()
        });
    })
}

fn tokens(world: &World, name: &str) -> TokenView {
    let snapshot = world.fleet.load();
    let model = snapshot.model("m").unwrap();
    model.pods.iter().find(|pod| &*pod.spec.key.name == name).unwrap().state.load.tokens.view()
}

fn charged() -> u64 {
    BODY.len() as u64 / 4
}

#[test]
fn each_part_is_released_where_its_work_ends() {
    let world = counting();
    let cost = 3500 + charged();
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(PD)).feed(body(BODY));
    let prefill = |active, kv| TokenView { active, kv, ..TokenView::default() };
    assert_eq!(tokens(&world, "p"), prefill(cost, cost));
    assert_eq!(tokens(&world, "d").decode, charged());
    assert_eq!(world.ledger.len(), 1);
    run.feed(prefill_ok());
    assert_eq!((tokens(&world, "p"), tokens(&world, "d").decode), (prefill(0, cost), charged()));
    run.feed(answer_head(200)).feed(chunk("{}", true));
    assert!(tokens(&world, "p").is_zero() && tokens(&world, "d").is_zero() && world.ledger.is_empty());
    run.oracle();
    // A prefill that fails for good releases everything at once.
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(PD)).feed(body(BODY)).feed(prefill_failed());
    assert!(tokens(&world, "p").is_zero() && tokens(&world, "d").is_zero() && world.ledger.is_empty());
    run.oracle();
}

#[test]
fn sessions_charge_what_their_prompt_grew_by() {
    let world = counting();
    let longer: &'static str = BODY.replace("\"m\"", &format!("\"m\",\"user\":\"{}\"", "u".repeat(400))).leak();
    let headers: &[(&str, &str)] = &[("routing-strategy", "pd"), ("x-aibrix-session-key", "chat-1")];
    for (text, expected) in [
        (BODY, 3500 + charged()),
        (longer, 3500 + longer.len() as u64 / 4 - charged()),
        (BODY, 3500 + charged()), // shorter than before: the whole prompt
    ] {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head(headers)).feed(body(text));
        assert_eq!(tokens(&world, "p").active, expected);
        run.feed(Event::Gone);
        run.oracle();
    }
    assert_eq!(world.sessions.len(), 1);
}

/// R59: chunks keep a charge alive, silence does not; a force-released charge is not released again.
#[test]
fn r59_a_streaming_request_keeps_its_charge() {
    let world = world_with(&pair(), |knobs| {
        let policies = PdKnobs { decode_policy: DecodePolicy::TokenLoad, ..PdKnobs::default() };
        knobs.pd = Arc::new(PdKnobs { token_load_ttl: std::time::Duration::from_secs(3), ..policies });
    });
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(PD)).feed(body(BODY)).feed(prefill_ok()).feed(answer_head(200));
    for second in 1..=8 {
        run.now = second * 1000;
        run.feed(chunk("{", false));
        assert!(world.ledger.sweep(Tick::from_millis(second * 1000 + 500)).is_empty());
    }
    assert_eq!(tokens(&world, "d").decode, charged(), "8 s after the charge, with a TTL of 3 s");
    world.sweep_token_charges(Tick::from_millis(11_011));
    let page = world.metrics.render(&crate::telemetry::FleetGauges::default(), Tick::from_millis(11_011));
    assert!(page.contains("tandem_token_load_forced_releases_total{side=\"decode\"} 1"), "{page}");
    assert!(tokens(&world, "d").is_zero());
    run.feed(chunk("}", true));
    assert!(tokens(&world, "d").is_zero() && world.ledger.is_empty());
    run.oracle();
}

/// R42: the prefill pod's blocks stay charged after a decode pod that did not take the request, for as long as the
/// version of vLLM keeps them that wrote such a hand-off.
#[test]
fn r42_blocks_that_decode_did_not_take_stay_charged_for_their_lease() {
    let stream: &'static str = BODY.replace("\"m\"", "\"m\",\"stream\":true").leak();
    let failed = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\ndata: {\"error\":{\"code\":500}}\n\ndata: [DONE]\n\n";
    let late = "data: {}\n\ndata: {}\n\ndata: {}\n\ndata: {\"error\":{\"code\":500}}\n\ndata: [DONE]\n\n";
    for (text, status, answer, stranded) in [
        (BODY, 503, "{}", true),
        (BODY, 429, "{}", true),
        (BODY, 400, "{}", false),
        (BODY, 404, "{}", false),
        (BODY, 422, "{}", false),
        (BODY, 200, "{}", false),
        (stream, 200, failed, true),
        (stream, 200, late, false),
    ] {
        let world = counting();
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head(PD)).feed(body(text)).feed(prefill_ok());
        let (prefilled, cost) = (run.now, 3500 + text.len() as u64 / 4);
        let head = AnswerHead {
            status: StatusCode::from_u16(status).unwrap(),
            headers: HeaderMap::from_iter([(
                http::header::CONTENT_TYPE,
                HeaderValue::from_static(if text == stream { "text/event-stream" } else { "application/json" }),
            )]),
            end: false,
        };
        run.feed(Event::AnswerHead(head)).feed(chunk(answer, true));
        let view = tokens(&world, "p");
        run.oracle();
        assert_eq!(view.stranded, if stranded { cost } else { 0 }, "{status} {answer}");
        assert_eq!((view.active, view.kv), (0, view.stranded));
        assert!(tokens(&world, "d").is_zero());
        assert!(world.ledger.sweep(Tick::from_millis(prefilled + 479_999)).is_empty());
        assert_eq!(tokens(&world, "p"), view);
        assert_eq!(world.ledger.sweep(Tick::from_millis(prefilled + 480_000)).len(), usize::from(stranded));
        assert!(tokens(&world, "p").is_zero() && world.ledger.is_empty());
    }
}

/// The lease began with the end of the prefill: a failure that comes after it leaves nothing behind. Nor does a client
/// that left; a hand-off that could not be passed on does.
#[test]
fn r42_what_else_leaves_blocks_behind() {
    let world = counting();
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(PD)).feed(body(BODY)).feed(prefill_ok());
    run.now += 481_000;
    run.feed(answer_head(500)).feed(chunk("{}", true));
    run.oracle();
    assert!(tokens(&world, "p").is_zero());
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(PD)).feed(body(BODY)).feed(prefill_ok()).feed(Event::Gone);
    run.oracle();
    assert!(tokens(&world, "p").is_zero());
    let invalid = Event::Prefill(LegOutcome::Answered {
        status: StatusCode::OK,
        advice: HeaderMap::new(),
        body: Bytes::from_static(br#"{"choices":[],"kv_transfer_params":"none of this"}"#),
    });
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(PD)).feed(body(BODY)).feed(invalid);
    assert!(run.records().len() == 1, "{:?}", run.names());
    assert!(tokens(&world, "p").stranded > 0);
}

#[test]
fn decisions_are_journalled_and_explained_only_where_that_is_allowed() {
    for (allowed, asked, expected) in [(true, "1", true), (true, "0", false), (false, "1", false)] {
        let world = world_with(&pair(), |knobs| knobs.explain = allowed);
        let headers: &'static [(&str, &str)] = vec![("routing-strategy", "pd"), ("x-tandem-explain", asked)].leak();
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head(headers));
        let Some(Effect::AcceptHead { remove }) = run.effects.first() else { panic!() };
        assert!(remove.contains(&"x-tandem-explain".to_owned()), "engines need not know");
        run.feed(body(BODY)).feed(prefill_ok()).feed(answer_head(200));
        let added =
            run.effects.iter().find_map(|effect| if let Effect::ForwardHead(h) = effect { Some(h) } else { None });
        let summary = added.unwrap().get("x-tandem-explain").map(|value| value.to_str().unwrap());
        assert_eq!(summary.is_some_and(|text| text.contains("prefill=ns/p; decode=ns/d")), expected);
        run.feed(chunk("{}", true));
        let decision = run.record().decision.clone().unwrap();
        assert_eq!((decision.snapshot_version, decision.candidates, decision.steps.as_str()), (1, (1, 1), "none"));
        run.oracle();
        let journal = world.journal.latest();
        assert_eq!((journal.len(), journal[0].request_id.as_str(), journal[0].outcome.is_ok()), (1, "R", true));
    }
    // A failed prefill is explained too, and so is a selection that found nobody.
    let world = world_with(&pair(), |knobs| knobs.explain = true);
    let headers: &[(&str, &str)] = &[("routing-strategy", "pd"), ("x-tandem-explain", "1")];
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(headers)).feed(body(BODY)).feed(prefill_failed());
    assert!(run.refusal().headers().contains_key("x-tandem-explain"));
    run.oracle();
    let world = world_with(&[spec("p", Role::Prefill, Some("rs"))], |_| {});
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(PD)).feed(body(BODY));
    assert_eq!(run.refusal().status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(world.journal.latest()[0].outcome.is_err());
    run.oracle();
}
