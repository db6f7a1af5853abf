//! What the APIs of requests bring with them: keys in a header of their own, ids of callers, codings of bodies, endpoints
//! that one pod serves, and what makes a KV cache another one.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::legs::fleet_of;
use super::*;
use crate::exchange::{DecodeJob, Decoded};
use crate::knobs::Secret;

fn gzip(text: &str) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap().into()
}

fn decode_job(run: &mut Run) -> DecodeJob {
    let at = run.effects.iter().position(|effect| matches!(effect, Effect::Decode(_))).expect("a job");
    let Effect::Decode(job) = run.effects.remove(at) else { unreachable!() };
    *job
}

const GZIP: &[(&str, &str)] = &[("routing-strategy", "pd"), ("content-encoding", "gzip")];

#[test]
fn a_coded_body_goes_on_decoded() {
    let mut run = Run::new(world());
    run.feed(head(GZIP));
    let Some(Effect::AcceptHead { remove }) = run.effects.first() else { panic!("{:?}", run.names()) };
    assert!(remove.iter().any(|name| name == "content-encoding"), "{remove:?}");
    run.feed(Event::Body { data: gzip(BODY), end: true });
    assert_eq!(run.names(), ["accept", "decode"]);
    let decoded = decode_job(&mut run).run();
    run.feed(Event::Decoded(decoded)).feed(prefill_ok());
    let Some(Effect::Route(plan)) = run.effects.last() else { panic!("{:?}", run.names()) };
    assert!(plan.body.starts_with(br#"{"model":"m","prompt":"hello""#), "{:?}", plan.body);
    assert!(!plan.headers.contains_key("content-encoding"));
    assert_eq!(run.exchange.record().body_bytes, BODY.len());
    run.feed(answer_head(200)).feed(chunk("{}", true));
    run.oracle();
}

#[test]
fn bodies_that_cannot_be_decoded_are_refused_and_leave_nothing() {
    let zeros = "0".repeat(2 << 20);
    for (body, status, text) in [
        (gzip(&zeros), 413, "the request body is longer than 1048576 bytes when decoded"),
        (Bytes::from_static(b"{}"), 400, "the request body is not valid gzip"),
        (gzip(BODY).slice(..20), 400, "the request body is not valid gzip"),
    ] {
        let mut run = Run::new(world_with(&pair(), |knobs| knobs.limits.max_body_bytes = 1 << 20));
        run.feed(head(GZIP)).feed(Event::Body { data: body, end: true });
        let decoded = decode_job(&mut run).run();
        run.feed(Event::Decoded(decoded));
        assert_eq!((run.refusal().status.as_u16(), run.refusal().message.as_ref()), (status, text));
        run.oracle();
    }
    // The common budget bounds it as well.
    let mut run = Run::new(world_with(&pair(), |knobs| knobs.limits.max_buffered_bytes = 1 << 20));
    run.feed(head(GZIP)).feed(Event::Body { data: gzip(&zeros), end: true });
    let decoded = decode_job(&mut run).run();
    run.feed(Event::Decoded(decoded));
    assert_eq!(run.refusal().reason, Reason::Overloaded);
    run.oracle();
    // The client leaves while it is decoded.
    let mut run = Run::new(world());
    run.feed(head(GZIP)).feed(Event::Body { data: gzip(BODY), end: true });
    let job = decode_job(&mut run);
    run.feed(Event::Gone);
    drop(job.run());
    run.oracle();
    let mut run = Run::new(world());
    run.feed(head(GZIP)).feed(Event::Body { data: gzip(BODY), end: true });
    let lost = Decoded::lost(&run.world.buffered);
    drop(decode_job(&mut run));
    run.feed(Event::Decoded(lost));
    assert_eq!(run.refusal().status, StatusCode::BAD_REQUEST);
    run.oracle();
}

#[test]
fn other_codings_and_charsets_are_named() {
    for (name, value, text) in [
        ("content-encoding", "br", "content-encoding br is not supported; gzip, deflate, zstd, identity are"),
        ("content-type", "application/json; charset=latin1", "charset latin1 is not supported; utf-8 is"),
    ] {
        let mut run = Run::new(world());
        run.feed(head(&[("routing-strategy", "pd"), (name, value)]));
        let refusal = run.refusal();
        assert_eq!((refusal.status.as_u16(), refusal.message.as_ref()), (415, text));
        let accepted = refusal.headers().get("accept-encoding").map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(accepted.as_deref(), (name == "content-encoding").then_some("gzip, deflate, zstd, identity"));
        run.oracle();
    }
}

#[test]
fn the_key_of_the_messages_api_is_the_gateways_token_and_stays_here() {
    const MESSAGES: &str = r#"{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":9}"#;
    let secured = || world_with(&pair(), |knobs| knobs.auth_bearer_token = Some(Secret::new("s3cret")));
    let with = |key| [("routing-strategy", "pd"), ("x-api-key", key)];
    for (path, key, status) in [
        ("/v1/messages", "s3cret", 0),
        ("/v1/messages/count_tokens", "s3cret", 0),
        ("/v1/messages", "wrong", 401),
        ("/v1/chat/completions", "s3cret", 401),
    ] {
        let mut run = Run::new(secured());
        run.feed(head_of(path, Method::POST, &with(key), false));
        if status == 0 {
            let Some(Effect::AcceptHead { remove }) = run.effects.first() else { panic!("{:?}", run.names()) };
            assert!(remove.iter().any(|name| name == "x-api-key"), "{remove:?}");
            run.feed(body(MESSAGES));
            for effect in &run.effects {
                if let Effect::StartPrefill(call) = effect {
                    assert!(!call.headers.contains_key("x-api-key"), "{:?}", call.headers);
                }
            }
        } else {
            assert_eq!(run.refusal().status.as_u16(), status, "{path}");
        }
    }
    // A key for the engine, where the gateway wants none.
    let mut run = Run::new(world());
    run.feed(head_of("/v1/messages", Method::POST, &with("engine's"), false)).feed(body(MESSAGES));
    let call = run.effects.iter().find_map(|e| if let Effect::StartPrefill(call) = e { Some(call) } else { None });
    assert_eq!(call.unwrap().headers["x-api-key"], "engine's");
}

#[test]
fn the_callers_id_comes_back_beside_ours() {
    let called = [("routing-strategy", "pd"), ("x-request-id", "caller-7")];
    let mut run = Run::new(world());
    run.feed(head(&called)).feed(body(BODY)).feed(prefill_ok()).feed(answer_head(200));
    let Some(Effect::ForwardHead(added)) = run.effects.last() else { panic!("{:?}", run.names()) };
    assert_eq!((added["request-id"].to_str().unwrap(), added["x-request-id"].to_str().unwrap()), ("R", "caller-7"));
    run.feed(chunk("{}", true));
    assert_eq!(run.record().client_request_id.as_deref(), Some("caller-7"));
    // An engine never sees it: it would have two requests of one id.
    let call = run.effects.iter().find_map(|e| if let Effect::StartPrefill(call) = e { Some(call) } else { None });
    assert_eq!(call.unwrap().headers["x-request-id"], "R");
    let mut run = Run::new(world());
    run.feed(head(&called)).feed(body("[]"));
    assert_eq!(run.refusal().headers()["x-request-id"], "caller-7");
    let mut run = Run::new(world());
    run.feed(head(PD)).feed(body("[]"));
    assert!(!run.refusal().headers().contains_key("x-request-id"));
}

#[test]
fn what_one_pod_serves_is_not_split() {
    for engine in [Engine::Vllm, Engine::Sglang, Engine::Trtllm] {
        for (path, text) in [
            ("/v1/messages/count_tokens", r#"{"model":"m","messages":[]}"#),
            ("/v1/responses/input_tokens", r#"{"model":"m","input":"a"}"#),
            ("/tokenize", r#"{"model":"m","prompt":"a"}"#),
            ("/detokenize", r#"{"model":"m","tokens":[1]}"#),
        ] {
            let world = world_with(&fleet_of(engine, 1), |_| {});
            let mut run = Run::new(world);
            run.feed(head_of(path, Method::POST, PD, false)).feed(body(text));
            assert_eq!(run.names(), ["accept", "route"], "{path}: {:?}", run.effects);
            let Some(Effect::Route(plan)) = run.effects.last() else { panic!() };
            assert_eq!((plan.path.as_str(), &plan.body[..]), (path, text.as_bytes()));
            run.feed(answer_head(200)).feed(chunk("{}", true));
            run.oracle();
        }
    }
    for (path, text) in [
        ("/v1/score", r#"{"model":"m","text_1":"a","text_2":"b"}"#),
        ("/score", r#"{"model":"m","text_1":"a","text_2":"b"}"#),
        ("/rerank", r#"{"model":"m","query":"a","documents":["b"]}"#),
        ("/v1/rerank", r#"{"model":"m","query":"a","documents":["b"]}"#),
        ("/v2/rerank", r#"{"model":"m","query":"a","documents":["b"]}"#),
        ("/classify", r#"{"model":"m","input":"a"}"#),
        ("/pooling", r#"{"model":"m","input":"a"}"#),
        ("/v1/audio/speech", r#"{"model":"m","input":"a","voice":"v"}"#),
    ] {
        let mut run = Run::new(world());
        run.feed(head_of(path, Method::POST, PD, false)).feed(body(text));
        assert_eq!(run.names(), ["accept", "route"], "{path}: {:?}", run.effects);
        run.feed(answer_head(200)).feed(chunk("{}", true));
        run.oracle();
    }
}

/// Tenants with salts of their own share no blocks, so a pod that served one is no better for another.
#[test]
fn a_pod_with_the_blocks_of_another_salt_has_none_of_this_one() {
    let world = world_with(&fleet_of(Engine::Vllm, 2), |_| {});
    let ask = |salt: &str, now: u64| {
        let text = format!(r#"{{"model":"m","prompt":"{}","cache_salt":"{salt}"}}"#, "word ".repeat(300));
        let mut run = Run::new(Arc::clone(&world));
        run.now = now;
        run.feed(head(PD)).feed(sent(text));
        world.prefix.drain(Tick::from_millis(now));
        let known = run.exchange.record().decision.as_ref().and_then(|decision| decision.prefix_match_pct);
        run.feed(prefill_ok()).feed(answer_head(200)).feed(chunk("{}", true));
        known
    };
    assert_eq!(ask("a", 0), Some(0));
    assert_eq!(ask("a", 1000), Some(100));
    assert_eq!(ask("b", 2000), Some(0));
}

#[test]
fn an_image_is_charged_by_its_number_not_by_its_bytes() {
    let image = "A".repeat(1_900_000);
    let text = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":[{{"type":"text","text":"hi"}},
            {{"type":"image_url","image_url":{{"url":"data:image/png;base64,{image}"}}}}]}}]}}"#
    );
    let world = world_with(&pair(), |knobs| {
        let pd = Arc::make_mut(&mut knobs.pd);
        pd.prefill_policy = crate::knobs::PrefillPolicy::TokenLoad;
        pd.token_load_request_cost = 0;
    });
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head_of("/v1/chat/completions", Method::POST, PD, false)).feed(sent(text));
    let model = Arc::clone(world.fleet.load().model("m").unwrap());
    let prefill = model.pods.iter().find(|pod| &*pod.spec.key.name == "p").unwrap();
    let charged = prefill.state.load.tokens.view().active;
    assert!((1000..1100).contains(&charged), "{charged}");
    run.feed(Event::Gone);
    run.oracle();
}
