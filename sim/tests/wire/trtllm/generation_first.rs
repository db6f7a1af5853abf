//! generation_first: both legs at once, matched by the gateway's id.

use std::time::Duration;

use super::{CHAT, ID, TEXT, ask, chat, content, context_leg, idle, kinds, pair, pair_of};
use crate::client::{Client, get, post, within};
use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Timing, ViolationKind as Kind, start};

fn context_params(id: u64) -> Value {
    json!({"request_type": "context_only", "disagg_request_id": id, "schedule_style": 1})
}

/// The generation leg of `body`, by what the context worker says about itself.
async fn generation_leg(body: &Value, context: &Engine, id: u64) -> Value {
    let info = get(context.address(), "/server_info").await.json();
    let info = &info["disaggregated_params"];
    let mut body = body.clone();
    body["disaggregated_params"] = json!({"request_type": "generation_only", "disagg_request_id": id,
        "ctx_request_id": id, "schedule_style": 1, "ctx_info_endpoint": info["ctx_info_endpoint"],
        "ctx_dp_rank": info["ctx_dp_rank"]});
    body
}

#[tokio::test]
async fn interop_32_each_leg_waits_for_the_other() {
    let (context, generation) = pair().await;
    let plain = start(EngineConfig::combined("m").trtllm()).await.unwrap();
    let body = chat("tell me more");
    let leg = generation_leg(&body, &context, ID).await;
    // The context worker computes, and answers only when its KV was taken.
    let mut first = Client::connect(context.address()).await;
    first.post(CHAT, &[], &context_leg(&body, context_params(ID))).await;
    within(context.wait_until(|engine| engine.stats().transferring == 1)).await;
    assert!(context.stats().computed_tokens > 0 && context.records().last().unwrap().status.is_none());
    let second = ask(&generation, CHAT, &leg).await;
    assert_eq!(content(&second), content(&ask(&plain, CHAT, &body).await));
    let first = first.answer().await.json();
    assert_eq!(first["choices"][0]["disaggregated_params"]["schedule_style"], 1);
    // The generation worker sends its head at once and waits for the context worker.
    let mut streamed = generation_leg(&body, &context, ID + 1).await;
    streamed["stream"] = true.into();
    let mut second = Client::connect(generation.address()).await;
    second.post(CHAT, &[], &streamed.to_string()).await;
    assert_eq!(second.head().await.0, 200);
    within(generation.wait_until(|engine| engine.stats().transferring == 1)).await;
    assert_eq!(post(context.address(), CHAT, &context_leg(&body, context_params(ID + 1))).await.status, 200);
    while second.chunk().await.is_some() {}
    within(generation.wait_until(idle)).await;
    assert!(idle(&context));
    assert!(context.violations().is_empty() && generation.violations().is_empty());
}

#[tokio::test]
async fn interop_34_a_context_worker_that_dies_cuts_a_chat_stream() {
    let slow = Timing { prefill_base: Duration::from_hours(1), ..Timing::instant() };
    for (path, body) in [(CHAT, chat("hi")), (TEXT, json!({"model": "m", "prompt": "hi", "max_tokens": 3}))] {
        let (context, generation) = pair_of(|config| config.timing(slow)).await;
        let mut leg = generation_leg(&body, &context, ID).await;
        leg["stream"] = true.into();
        let mut first = Client::connect(context.address()).await;
        first.post(path, &[], &context_leg(&body, context_params(ID))).await;
        let mut second = Client::connect(generation.address()).await;
        second.post(path, &[], &leg.to_string()).await;
        within(context.wait_until(|engine| engine.stats().running == 1)).await;
        within(generation.wait_until(|engine| engine.stats().transferring == 1)).await;
        context.kill();
        let stream = second.answer().await;
        assert_eq!(stream.status, 200);
        if path == CHAT {
            assert_eq!(stream.body, "", "no event, no [DONE]");
        } else {
            let error: Value = serde_json::from_str(stream.events()[0]).unwrap();
            assert_eq!(error["error"]["type"], "server_error");
            assert_eq!(stream.events()[1..], ["[DONE]", "[DONE]"]);
        }
        within(generation.wait_until(idle)).await;
        assert!(first.closed().await.is_err());
    }
}

#[tokio::test]
async fn a_leg_whose_twin_never_comes_times_out() {
    let (context, generation) = pair_of(|config| config.meeting_timeout(Duration::from_millis(20))).await;
    let body = chat("hi");
    let leg = generation_leg(&body, &context, ID).await;
    assert_eq!(ask(&generation, CHAT, &leg).await.status, 500);
    assert_eq!(post(context.address(), CHAT, &context_leg(&body, context_params(ID))).await.status, 500);
    assert!(idle(&context) && idle(&generation));
}

#[tokio::test]
async fn the_generation_leg_needs_everything() {
    let (context, generation) = pair().await;
    let good = generation_leg(&chat("hi"), &context, ID).await;
    for (name, value, kind) in [
        ("ctx_info_endpoint", Value::Null, Some(Kind::HandoffIncomplete)),
        ("ctx_dp_rank", Value::Null, Some(Kind::HandoffIncomplete)),
        ("disagg_request_id", Value::Null, Some(Kind::HandoffIncomplete)),
        ("ctx_request_id", json!(7), Some(Kind::HandoffAltered)),
        ("ctx_info_endpoint", "nowhere".into(), Some(Kind::HandoffAltered)),
        ("schedule_style", json!(2), None),
        ("extra", json!(1), None),
    ] {
        let mut bad = good.clone();
        bad["disaggregated_params"][name] = value;
        let before = generation.violations().len();
        assert_eq!(ask(&generation, CHAT, &bad).await.status, 400, "{name}");
        assert_eq!(kinds(&generation).get(before), kind.as_ref(), "{name}");
    }
    let unnamed = json!({"request_type": "context_only", "schedule_style": 1});
    assert_eq!(post(context.address(), CHAT, &context_leg(&chat("hi"), unnamed)).await.status, 400);
}

#[tokio::test]
async fn server_info_names_the_endpoint_or_nothing() {
    let (context, generation) = pair().await;
    let info = get(context.address(), "/server_info").await.json();
    let endpoint = format!("tcp://127.0.0.1:{}", context.bootstrap_port());
    assert_eq!(info, json!({"disaggregated_params": {"ctx_info_endpoint": endpoint, "ctx_dp_rank": 0}}));
    assert_eq!(get(generation.address(), "/server_info").await.json(), json!({"disaggregated_params": {}}));
    let config = EngineConfig { cpp_transceiver: true, ..EngineConfig::prefill("m").trtllm() };
    let cpp = start(config).await.unwrap();
    assert_eq!(get(cpp.address(), "/server_info").await.json(), json!({"disaggregated_params": {}}));
}
