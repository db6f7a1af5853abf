//! context_first: the context worker's answer carries the hand-off.

use std::time::Duration;

use super::{
    CHAT, ID, TEXT, ask, chat, content, context_leg, context_only, generation_leg, idle, kinds, pair, pair_of,
};
use crate::client::{Client, post, within};
use serde_json::{Value, json};
use tandem_sim::{EngineConfig, Fault, Timing, ViolationKind as Kind, start};

#[tokio::test]
async fn interop_28_a_pair_gives_the_text_of_a_plain_engine() {
    let (context, generation) = pair().await;
    let plain = start(EngineConfig::combined("m").trtllm()).await.unwrap();
    let body = chat(&"tell me more ".repeat(20));
    let first = post(context.address(), CHAT, &context_leg(&body, context_only(ID))).await;
    let answer = first.json();
    let params = &answer["choices"][0]["disaggregated_params"];
    assert_eq!(
        (params["request_type"].as_str(), params["disagg_request_id"].as_u64()),
        (Some("context_only"), Some(ID))
    );
    assert!(first.body.contains(&format!("\"disagg_request_id\":{ID}")), "digit by digit");
    assert!(params["ctx_request_id"].is_u64() && params["encoded_opaque_state"].is_string());
    assert_eq!(params["first_gen_tokens"].as_array().map(Vec::len), Some(1));
    assert_eq!((answer["choices"][0]["finish_reason"].as_str(), context.stats().pinned_requests), (Some("length"), 1));
    let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(answer["prompt_token_ids"].as_array().map(|ids| ids.len() as u64), Some(tokens));
    let second = ask(&generation, CHAT, &generation_leg(&body, &first)).await;
    assert_eq!(content(&second), content(&ask(&plain, CHAT, &body).await));
    assert!(
        second.json()["prompt_token_ids"].is_null() && second.json()["choices"][0]["disaggregated_params"].is_null()
    );
    assert_eq!((generation.stats().transferred_tokens, generation.stats().computed_tokens), (tokens, 0));
    assert!(idle(&context) && idle(&generation));
    assert!(context.violations().is_empty() && generation.violations().is_empty());
}

#[tokio::test]
async fn interop_29_completions_take_the_token_ids_as_prompt() {
    let (context, generation) = pair().await;
    let body = json!({"model": "m", "prompt": "tell me more", "max_tokens": 5, "stream": true});
    let first = post(context.address(), "/v1/completions?x=1", &context_leg(&body, context_only(ID))).await;
    let mut second = generation_leg(&body, &first);
    second["prompt"] = second["prompt_token_ids"].take();
    if let Some(members) = second.as_object_mut() {
        members.remove("prompt_token_ids");
    }
    let stream = ask(&generation, TEXT, &second).await;
    assert_eq!((stream.events().len(), stream.events()[5]), (6, "[DONE]"), "{}", stream.body);
    assert!(generation.violations().is_empty());
    // A completion knows no `prompt_token_ids`.
    second["prompt_token_ids"] = json!([1]);
    assert_eq!(ask(&generation, TEXT, &second).await.status, 400);
}

#[tokio::test]
async fn interop_30_a_context_that_ends_by_itself_hands_nothing_over() {
    let (context, _) = pair().await;
    context.script(Fault::on(CHAT).ends_at_once());
    let answer = post(context.address(), CHAT, &context_leg(&chat("hi"), context_only(ID))).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    assert!(choice["disaggregated_params"]["ctx_request_id"].is_null());
    assert!(choice["disaggregated_params"]["encoded_opaque_state"].is_null());
    assert!(!choice["message"]["content"].as_str().unwrap().is_empty());
    assert_eq!(context.stats().pinned_requests, 0);
}

#[tokio::test]
async fn ids_must_be_global_and_new() {
    let (context, _) = pair().await;
    for (params, kind) in [
        (json!({"request_type": "context_only"}), Some(Kind::RequestIdTooSmall)),
        (context_only((1 << 42) - 1), Some(Kind::RequestIdTooSmall)),
        (context_only(1 << 42), None),
        (context_only(1 << 42), Some(Kind::HandoffReused)),
        (context_only(i64::MAX as u64), None),
    ] {
        let before = context.violations().len();
        let answer = post(context.address(), CHAT, &context_leg(&chat("hi"), params.clone())).await;
        assert_eq!((answer.status, kinds(&context).get(before)), (200, kind.as_ref()), "{params}");
    }
    let wrong = context_leg(&chat("hi"), json!({"request_type": "context_only", "disagg_request_id": 4.5e18}));
    assert_eq!(post(context.address(), CHAT, &wrong).await.status, 400, "a float is no id");
}

#[tokio::test]
async fn a_hand_off_comes_back_whole_and_unchanged() {
    let (context, generation) = pair().await;
    let body = chat("hi");
    let first = post(context.address(), CHAT, &context_leg(&body, context_only(ID))).await;
    let good = generation_leg(&body, &first);
    for (name, value, kind) in [
        ("ctx_request_id", Value::Null, Kind::HandoffIncomplete),
        ("encoded_opaque_state", Value::Null, Kind::HandoffIncomplete),
        ("encoded_opaque_state", "abc".into(), Kind::HandoffAltered),
        ("ctx_request_id", json!(999), Kind::HandoffAltered),
        ("disagg_request_id", json!(ID + 1), Kind::HandoffAltered),
        ("first_gen_tokens", json!([1]), Kind::HandoffAltered),
    ] {
        let mut bad = good.clone();
        bad["disaggregated_params"][name] = value;
        let before = generation.violations().len();
        let answer = ask(&generation, CHAT, &bad).await;
        assert_eq!((answer.status, answer.json()["type"].as_str()), (400, Some("BadRequestError")), "{name}");
        assert_eq!(kinds(&generation)[before..], [kind], "{name}");
    }
    assert_eq!(context.stats().pinned_requests, 1, "nothing of this freed it");
    assert_eq!(ask(&generation, CHAT, &good).await.status, 200);
    // Nobody answers for it twice.
    let again = ask(&generation, CHAT, &good).await;
    assert_eq!((again.status, kinds(&generation).last()), (400, Some(&Kind::HandoffReused)));
}

#[tokio::test]
async fn the_legs_must_agree() {
    let (context, generation) = pair().await;
    let body = chat("hi");
    let first = post(context.address(), CHAT, &context_leg(&body, context_only(ID))).await;
    let mut other = generation_leg(&body, &first);
    other["prompt_token_ids"] = json!([1, 2, 3]);
    assert!(content(&ask(&generation, CHAT, &other).await).starts_with("[corrupt kv]"));
    let first = post(context.address(), CHAT, &context_leg(&body, context_only(ID + 1))).await;
    let mut hot = generation_leg(&body, &first);
    hot["temperature"] = json!(0.5);
    ask(&generation, CHAT, &hot).await;
    assert_eq!(kinds(&generation), [Kind::PromptMismatch, Kind::SamplingMismatch]);
}

#[tokio::test]
async fn unread_kv_goes_when_its_time_is_over() {
    let (context, generation) = pair_of(|config| config.lease(Duration::from_millis(20))).await;
    let body = chat("hi");
    let first = post(context.address(), CHAT, &context_leg(&body, context_only(ID))).await;
    within(context.wait_until(|engine| engine.stats().expired_leases == 1)).await;
    assert!(idle(&context));
    let late = ask(&generation, CHAT, &generation_leg(&body, &first)).await;
    assert_eq!((late.status, kinds(&generation)), (400, vec![Kind::HandoffStale]));
    context.kill();
    within(context.ended()).await;
    assert_eq!(ask(&generation, CHAT, &generation_leg(&body, &first)).await.status, 500);
}

#[tokio::test]
async fn kv_stays_pinned_until_a_generation_request_was_delivered_and_cancelled() {
    let slow = Timing { transfer_base: Duration::from_hours(1), ..Timing::instant() };
    let (context, generation) = pair_of(|config| config.timing(slow)).await;
    let body = chat("hi");
    let mut client = Client::connect(context.address()).await;
    client.post(CHAT, &[], &context_leg(&body, context_only(ID))).await;
    let first = client.answer().await;
    drop(client);
    assert_eq!(context.stats().pinned_requests, 1, "an abort after the answer does nothing");
    let mut second = Client::connect(generation.address()).await;
    second.post(CHAT, &[], &generation_leg(&body, &first).to_string()).await;
    within(generation.wait_until(|engine| engine.stats().transferring == 1)).await;
    drop(second);
    within(context.wait_until(idle)).await;
    within(generation.wait_until(idle)).await;
    assert_eq!(context.stats().expired_leases, 0);
}

#[tokio::test]
async fn legs_at_the_wrong_worker_are_refused() {
    let (context, generation) = pair().await;
    let plain = start(EngineConfig::combined("m").trtllm()).await.unwrap();
    let body = context_leg(&chat("hi"), context_only(ID));
    for engine in [&generation, &plain] {
        assert_eq!(post(engine.address(), CHAT, &body).await.status, 400);
        assert_eq!(kinds(engine), [Kind::HandoffMisplaced]);
    }
    for (kind, status) in [("context_and_generation", 200), ("both", 400)] {
        let mut body = chat("hi");
        body["disaggregated_params"] = json!({"request_type": kind});
        assert_eq!(ask(&context, CHAT, &body).await.status, status, "{kind}");
    }
    let mut streamed: Value = serde_json::from_str(&body).unwrap();
    streamed["stream"] = true.into();
    streamed["n"] = 2.into();
    ask(&context, CHAT, &streamed).await;
    assert_eq!(kinds(&context), [Kind::PrefillNotCapped, Kind::BlocksStranded]);
}
