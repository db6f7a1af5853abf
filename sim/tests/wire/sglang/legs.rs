//! The two legs: how they meet, and how they miss each other.

use std::time::Duration;

use super::{CHAT, GENERATE, ROOM, both, capped, chat, content, idle, joined, kinds, legs, pair, pair_of, sent};
use crate::client::{get, keys, post, within};
use serde_json::{Value, json};
use tandem_sim::{EngineConfig, Fault, StreamHead, Timing, ViolationKind as Kind, start};

#[tokio::test]
async fn interop_18_a_pair_gives_the_text_of_a_plain_engine() {
    let (prefill, decode) = pair().await;
    let plain = start(EngineConfig::combined("m").sglang()).await.unwrap();
    let body = chat(&"tell me more ".repeat(20));
    let (first, second) = both((&prefill, &decode), CHAT, &joined(&body, &prefill, ROOM, "r-1")).await;
    assert_eq!((first.status, second.status), (200, 200), "{} {}", first.body, second.body);
    assert_eq!(content(&second), content(&post(plain.address(), CHAT, &body.to_string()).await));
    assert!(content(&second).starts_with(&content(&first)), "the first token is the prefill engine's");
    assert_eq!((first.json()["id"].as_str(), second.json()["id"].as_str()), (Some("r-1"), Some("r-1")));
    let captured = r#"{"id":"","object":"chat.completion","created":1,"model":"nope","choices":[{"index":0,"message":{"role":"assistant","content":"","reasoning_content":null},"logprobs":null,"finish_reason":"length","matched_stop":null}],"usage":{"prompt_tokens":12,"total_tokens":14,"completion_tokens":2,"prompt_tokens_details":null,"reasoning_tokens":0,"completion_tokens_details":null},"metadata":{"weight_version":"default","weight_versions":[{"version":"default","start":0,"end":2}]}}"#;
    assert_eq!(keys(&second.body), keys(captured));
    let tokens = second.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!((prefill.stats().computed_tokens, decode.stats().computed_tokens), (tokens, 0));
    assert_eq!(decode.stats().transferred_tokens, tokens);
    assert!(idle(&prefill) && idle(&decode));
    assert!(prefill.violations().is_empty() && decode.violations().is_empty());
}

#[tokio::test]
async fn the_prefill_answer_waits_for_the_decode_engine() {
    let (prefill, decode) = pair().await;
    let body = joined(&chat("hi"), &prefill, ROOM, "r");
    let mut first = sent(&prefill, CHAT, &capped(&body)).await;
    within(prefill.wait_until(|engine| engine.stats().bootstrapping == 1)).await;
    assert_eq!((prefill.stats().computed_tokens, prefill.stats().running), (0, 0), "nothing is computed before");
    let page = get(prefill.address(), "/metrics").await.body;
    let labels = r#"{engine_type="prefill",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"}"#;
    assert!(page.contains(&format!("sglang:num_prefill_bootstrap_queue_reqs{labels} 1.0")), "{page}");
    assert!(page.contains(&format!("sglang:num_queue_reqs{labels} 0.0")));
    assert_eq!(post(decode.address(), CHAT, &body.to_string()).await.status, 200);
    assert_eq!(first.answer().await.status, 200);
}

#[tokio::test]
async fn a_decode_engine_that_came_first_waits_too() {
    let (prefill, decode) = pair().await;
    let body = joined(&chat("hi"), &prefill, ROOM, "r");
    let mut second = sent(&decode, CHAT, &body.to_string()).await;
    within(decode.wait_until(|engine| engine.stats().transferring == 1)).await;
    let page = get(decode.address(), "/metrics").await.body;
    assert!(page.contains("num_decode_transfer_queue_reqs{engine_type=\"decode\",model_name=\"m\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"} 1.0"));
    assert!(page.contains("num_decode_prealloc_queue_reqs{engine_type=\"decode\",model_name=\"m\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"} 0.0"));
    assert_eq!(post(prefill.address(), CHAT, &capped(&body)).await.status, 200);
    assert_eq!(second.answer().await.status, 200);
}

#[tokio::test]
async fn streams_have_the_captured_events() {
    let (prefill, decode) = pair().await;
    let mut body = joined(&chat("hi"), &prefill, ROOM, "r");
    body["max_tokens"] = 2.into();
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let (_, stream) = both((&prefill, &decode), CHAT, &body).await;
    let events = stream.events();
    assert_eq!((events.len(), events[5]), (6, "[DONE]"), "{events:?}");
    let captured = [
        r#"{"id":"e","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[{"index":0,"delta":{"reasoning_content":null,"role":"assistant","content":""},"logprobs":null,"finish_reason":null,"matched_stop":null}]}"#,
        r#"{"id":"e","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[{"index":0,"delta":{"reasoning_content":null,"content":"&"},"logprobs":null,"finish_reason":null,"matched_stop":null}]}"#,
        r#"{"id":"e","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[{"index":0,"delta":{"reasoning_content":null,"content":"&"},"logprobs":null,"finish_reason":null,"matched_stop":null}]}"#,
        r#"{"id":"e","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[{"index":0,"delta":{"reasoning_content":null},"logprobs":null,"finish_reason":"length","matched_stop":null}]}"#,
        r#"{"id":"e","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[],"usage":{"prompt_tokens":13,"total_tokens":19,"completion_tokens":6,"prompt_tokens_details":null,"reasoning_tokens":0,"completion_tokens_details":null}}"#,
    ];
    for (event, captured) in events.iter().zip(captured) {
        assert_eq!(keys(event), keys(captured));
    }
}

#[tokio::test]
async fn the_head_comes_at_once_or_with_the_first_token() {
    let (prefill, decode) = pair().await;
    let mut body = joined(&chat("hi"), &prefill, ROOM, "r");
    body["stream"] = true.into();
    let mut early = sent(&decode, CHAT, &body.to_string()).await;
    assert_eq!(early.head().await.0, 200, "although no prefill request exists");
    drop(early);

    let late = start(EngineConfig::decode("m").sglang().stream_head(StreamHead::WithFirstToken)).await.unwrap();
    let mut body = joined(&chat("hi"), &prefill, ROOM + 1, "s");
    body["stream"] = true.into();
    let mut client = sent(&late, CHAT, &body.to_string()).await;
    within(late.wait_until(|engine| engine.stats().transferring == 1)).await;
    assert_eq!(late.records()[0].status, None, "no head yet");
    assert_eq!(post(prefill.address(), CHAT, &capped(&body)).await.status, 200);
    assert_eq!(client.answer().await.events().last(), Some(&"[DONE]"));
    prefill.kill();
    within(prefill.ended()).await;
    let mut body = joined(&chat("hi"), &prefill, ROOM + 2, "t");
    body["stream"] = true.into();
    assert_eq!(post(late.address(), CHAT, &body.to_string()).await.status, 500, "an early failure is a real one");
}

#[tokio::test]
async fn an_unreachable_prefill_engine_shows_as_captured() {
    let (prefill, decode) = pair().await;
    let body = joined(&chat("hi"), &prefill, 5, "r");
    prefill.kill();
    within(prefill.ended()).await;
    let whole = post(decode.address(), CHAT, &body.to_string()).await;
    let message = "Decode handshake failed for request rank=0 decode_req.req.rid='r' decode_req.req.bootstrap_room=5 with \
                   exception KVTransferError(bootstrap_room=5): Aborted by AbortReq.";
    let expected = json!({"object": "error", "message": message, "type": "500", "param": null, "code": 500});
    assert_eq!((whole.status, whole.json()), (500, expected));
    let mut streamed = joined(&chat("hi"), &prefill, 6, "r");
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let stream = post(decode.address(), CHAT, &streamed.to_string()).await;
    let events = stream.events();
    assert_eq!((stream.status, events.len(), events[2]), (200, 3, "[DONE]"));
    let error: Value = serde_json::from_str(events[0]).unwrap();
    assert_eq!(
        (error["error"]["code"].as_u64(), error["error"]["type"].as_str()),
        (Some(500), Some("INTERNAL_SERVER_ERROR"))
    );
    let usage: Value = serde_json::from_str(events[1]).unwrap();
    assert_eq!(usage["usage"]["completion_tokens"], 0, "a usage event after the error");
}

#[tokio::test]
async fn a_prefill_engine_that_dies_in_the_middle_is_noticed() {
    let slow = Timing { prefill_base: Duration::from_hours(1), ..Timing::instant() };
    let (prefill, decode) = pair_of(|config| config.timing(slow)).await;
    let body = joined(&chat("hi"), &prefill, ROOM, "r");
    let mut second = sent(&decode, CHAT, &body.to_string()).await;
    let mut first = sent(&prefill, CHAT, &capped(&body)).await;
    within(prefill.wait_until(|engine| engine.stats().running == 1)).await;
    prefill.kill();
    let answer = second.answer().await;
    assert_eq!(answer.status, 500);
    assert!(
        answer.body.contains("Lost connection with prefill instance (bootstrap_addr: 127.0.0.1:"),
        "{}",
        answer.body
    );
    assert!(first.closed().await.is_err(), "its own client gets a reset");
    assert!(idle(&decode));
}

#[tokio::test]
async fn a_leg_whose_twin_never_comes_waits_for_its_timeout() {
    let (prefill, decode) = pair_of(|config| config.meeting_timeout(Duration::from_millis(30))).await;
    for (engine, leg) in [(&prefill, "Prefill bootstrap failed"), (&decode, "Decode handshake failed")] {
        let body = joined(&chat("hi"), &prefill, ROOM, "r");
        let answer = post(engine.address(), CHAT, &capped(&body)).await;
        assert_eq!(answer.status, 500);
        assert!(answer.json()["message"].as_str().unwrap().starts_with(leg), "{}", answer.body);
        assert!(idle(engine));
    }
    // A prefill engine that refuses its request tells the decode engine nothing.
    let body = joined(&chat("hi"), &prefill, ROOM + 1, "r");
    prefill.script(Fault::on(CHAT).answer(400, "application/json", "{}"));
    let (first, second) = both((&prefill, &decode), CHAT, &body).await;
    assert_eq!((first.status, second.status), (400, 500));
}

#[tokio::test]
async fn the_legs_must_agree() {
    let (prefill, decode) = pair().await;
    let x = joined(&chat(&"x".repeat(64)), &prefill, 1, "a");
    let y = joined(&chat(&"y".repeat(64)), &prefill, 1, "a");
    let (_, mixed) = legs(&prefill, &capped(&x), &decode, &y.to_string(), CHAT).await;
    assert!(content(&mixed).starts_with("[corrupt kv]"));
    let mut hot = joined(&chat("hi"), &prefill, 2, "b");
    hot["temperature"] = json!(0.5);
    let mut cold: Value = serde_json::from_str(&capped(&hot)).unwrap();
    cold["temperature"] = json!(1.0);
    legs(&prefill, &cold.to_string(), &decode, &hot.to_string(), CHAT).await;
    assert_eq!(kinds(&decode), [Kind::PromptMismatch, Kind::SamplingMismatch]);
    // A prefill leg that is streamed or not capped works, and is noticed.
    let loose = joined(&chat("hi"), &prefill, 3, "c");
    let (first, _) = legs(&prefill, &loose.to_string(), &decode, &loose.to_string(), CHAT).await;
    assert_eq!(first.json()["usage"]["completion_tokens"], 1, "one token whatever is asked");
    assert_eq!(kinds(&prefill), [Kind::PrefillNotCapped]);
}

#[tokio::test]
async fn interop_27_generate_keeps_its_limits_inside() {
    let (prefill, decode) = pair().await;
    let body = json!({"text": "tell me", "sampling_params": {"max_new_tokens": 3, "temperature": 0.5}});
    let (first, second) = both((&prefill, &decode), GENERATE, &joined(&body, &prefill, ROOM, "r")).await;
    let (first, second) = (first.json(), second.json());
    assert_eq!(
        (&first["meta_info"]["completion_tokens"], &second["meta_info"]["completion_tokens"]),
        (&json!(1), &json!(3))
    );
    assert_eq!(second["meta_info"]["finish_reason"], json!({"type": "length", "length": 3}));
    assert_eq!(second["meta_info"]["id"], "r");
    assert!(prefill.violations().is_empty() && decode.violations().is_empty());
    let mut streamed = joined(&body, &prefill, ROOM + 1, "s");
    streamed["stream"] = true.into();
    let (_, stream) = both((&prefill, &decode), GENERATE, &streamed).await;
    let events = stream.events();
    assert_eq!((events.len(), events[3]), (4, "[DONE]"));
    let texts: Vec<Value> = events[..3].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(texts[2]["text"], second["text"], "each event repeats the whole text");
    assert!(texts[2]["text"].as_str().unwrap().starts_with(texts[0]["text"].as_str().unwrap()));
    let bad = post(decode.address(), GENERATE, "{}").await;
    assert_eq!((bad.status, bad.json()["error"]["message"].is_string()), (400, true));
}
