//! Prefill and decode over real sockets: the hand-off, and every way to get it wrong.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::client::{Answer, Client, get, keys, post, within};
use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Fault, KvLoadFailure, OnViolation, Timing, ViolationKind as Kind, start};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const HOST: &str = "127.0.0.1";

fn chat(text: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8})
}

/// The body of the prefill leg.
fn prefill_body(client: &Value) -> String {
    let mut body = client.clone();
    body["max_tokens"] = 1.into();
    body["max_completion_tokens"] = 1.into();
    body["stream"] = false.into();
    body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    body.to_string()
}

/// The body of the decode leg.
fn decode_body(client: &Value, prefill: &Answer) -> Value {
    let mut body = client.clone();
    body["kv_transfer_params"] = prefill.json()["kv_transfer_params"].clone();
    body["kv_transfer_params"]["remote_host"] = HOST.into();
    body
}

async fn pair() -> (Engine, Engine) {
    (start(EngineConfig::prefill("m")).await.unwrap(), start(EngineConfig::decode("m")).await.unwrap())
}

fn content(answer: &Answer) -> String {
    answer.json()["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
}

fn kinds(engine: &Engine) -> Vec<Kind> {
    engine.violations().into_iter().map(|violation| violation.kind).collect()
}

#[tokio::test]
async fn a_pair_gives_the_text_of_a_plain_engine() {
    let (prefill, decode) = pair().await;
    let plain = start(EngineConfig::combined("m")).await.unwrap();
    let body = chat(&"tell me more ".repeat(20));
    let mut client = Client::connect(prefill.address()).await;
    client.post(CHAT, &[("x-request-id", "gw-1")], &prefill_body(&body)).await;
    let first = client.answer().await;
    let captured = r#""kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"","remote_request_id":"","remote_host":"","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":75,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0}"#;
    let at = first.body.find("\"kv_transfer_params\"").unwrap();
    let end = first.body.find(",\"ec_transfer_params\"").unwrap();
    assert_eq!(keys(&first.body[at..end]), keys(captured));
    let params = &first.json()["kv_transfer_params"];
    let tokens = first.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!((&params["remote_host"], params["remote_num_tokens"].as_u64()), (&"localhost".into(), Some(tokens)));
    assert!(params["remote_request_id"].as_str().unwrap().starts_with("chatcmpl-gw-1-"));
    assert_eq!(params["remote_block_ids"][0].as_array().map(|ids| ids.len() as u64), Some(tokens.div_ceil(16)));
    let pinned = prefill.stats();
    assert_eq!((pinned.pinned_requests, pinned.pinned_blocks), (1, tokens.div_ceil(16)));
    assert!(pinned.kv_used_tokens >= tokens);

    let second = post(decode.address(), CHAT, &decode_body(&body, &first).to_string()).await;
    assert_eq!((second.status, second.json()["kv_transfer_params"].is_null()), (200, true));
    assert_eq!(content(&second), content(&post(plain.address(), CHAT, &body.to_string()).await));
    assert!(content(&second).starts_with(&content(&first)));
    let (prefilled, decoded) = (prefill.stats(), decode.stats());
    assert_eq!((prefilled.pinned_requests, prefilled.kv_used_tokens, prefilled.computed_tokens), (0, 0, tokens));
    assert_eq!((decoded.transferred_tokens, decoded.computed_tokens, decoded.kv_used_tokens), (tokens, 0, 0));
    assert!(prefill.violations().is_empty() && decode.violations().is_empty());
    let page = get(decode.address(), "/metrics").await.body;
    assert!(page.contains(&format!("source=\"external_kv_transfer\"}} {tokens}.0")));
    assert!(page.contains("vllm:nixl_xfer_time_seconds_count{engine=\"0\",model_name=\"m\"} 1.0"));
}

#[tokio::test]
async fn streams_and_completions_are_handed_over_too() {
    let (prefill, decode) = pair().await;
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 4, "stream": true});
    let first = post(prefill.address(), TEXT, &prefill_body(&body)).await;
    assert!(first.json()["kv_transfer_params"]["remote_request_id"].as_str().unwrap().contains("-0-"));
    let second = post(decode.address(), TEXT, &decode_body(&body, &first).to_string()).await;
    assert_eq!((second.events().len(), second.events()[4]), (5, "[DONE]"));
    assert!(prefill.violations().is_empty() && decode.violations().is_empty());
}

#[tokio::test]
async fn without_a_hand_off_the_decode_engine_computes() {
    let (_, decode) = pair().await;
    let answer = post(decode.address(), CHAT, &chat("hi").to_string()).await;
    let tokens = answer.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!((decode.stats().computed_tokens, decode.stats().transferred_tokens), (tokens, 0));
    assert!(decode.violations().is_empty());
}

#[tokio::test]
async fn a_hand_off_that_lacks_something_is_a_violation() {
    let (prefill, decode) = pair().await;
    let body = chat("hi");
    let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    let good = decode_body(&body, &first);
    let mut seen = 0;
    for (name, value) in [
        ("remote_request_id", Value::Null),
        ("remote_request_id", "".into()),
        ("remote_engine_id", Value::Null),
        ("remote_host", Value::Null),
        ("remote_port", 0.into()),
        ("remote_port", 65_536.into()),
        ("remote_port", "5600".into()),
        ("remote_block_ids", Value::Null),
        ("remote_block_ids", json!([])),
        ("remote_block_ids", json!([[]])),
    ] {
        let mut bad = good.clone();
        bad["kv_transfer_params"][name] = value.clone();
        let answer = post(decode.address(), CHAT, &bad.to_string()).await;
        assert_eq!(answer.status, 500, "{name} {value}");
        assert!(answer.body.contains("EngineCore encountered an issue"));
        seen += 1;
        assert_eq!(kinds(&decode), vec![Kind::HandoffIncomplete; seen], "{name} {value}");
    }
    let answer = post(decode.address(), CHAT, &good.to_string()).await;
    assert_eq!(answer.status, 200, "none of them touched the hand-off");
}

#[tokio::test]
async fn the_host_must_be_replaced() {
    let (prefill, decode) = pair().await;
    let body = chat("hi");
    let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    let mut bad = decode_body(&body, &first);
    bad["kv_transfer_params"]["remote_host"] = "localhost".into();
    assert_eq!(post(decode.address(), CHAT, &bad.to_string()).await.status, 500);
    assert_eq!(kinds(&decode), [Kind::HostNotReplaced]);
}

#[tokio::test]
async fn engines_may_sit_on_other_addresses() {
    let prefill = start(EngineConfig::prefill("m").at(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 9)), 0)).await.unwrap();
    let decode = start(EngineConfig::decode("m")).await.unwrap();
    let body = chat("hi");
    let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    let mut second = decode_body(&body, &first);
    assert_eq!(post(decode.address(), CHAT, &second.to_string()).await.status, 500, "nothing listens on 127.0.0.1");
    second["kv_transfer_params"]["remote_host"] = "127.0.0.9".into();
    assert_eq!(post(decode.address(), CHAT, &second.to_string()).await.status, 200);
    assert!(decode.violations().is_empty());
}

#[tokio::test]
async fn somebody_elses_kv_shows_in_the_text() {
    let (prefill, decode) = pair().await;
    let (long, short) = (chat(&"long ".repeat(40)), chat("short"));
    let first = post(prefill.address(), CHAT, &prefill_body(&long)).await;
    let shorter = post(decode.address(), CHAT, &decode_body(&short, &first).to_string()).await;
    assert!(content(&shorter).starts_with("[corrupt kv]"));
    let again = post(decode.address(), CHAT, &decode_body(&long, &first).to_string()).await;
    assert!(content(&again).starts_with("[corrupt kv]"));
    let second = post(prefill.address(), CHAT, &prefill_body(&short)).await;
    let longer = post(decode.address(), CHAT, &decode_body(&long, &second).to_string()).await;
    assert!(content(&longer).starts_with("[corrupt kv]"));
    assert_eq!(kinds(&decode), [Kind::PromptMismatch, Kind::HandoffReused, Kind::PromptLongerThanKv]);
}

#[tokio::test]
async fn a_lease_ends_and_the_blocks_come_back() {
    let prefill = start(EngineConfig::prefill("m").lease(Duration::from_millis(40))).await.unwrap();
    let decode = start(EngineConfig::decode("m")).await.unwrap();
    let body = chat("hi");
    let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    within(prefill.wait_until(|engine| engine.stats().expired_leases == 1)).await;
    assert_eq!((prefill.stats().pinned_requests, prefill.stats().kv_used_tokens), (0, 0));
    let late = post(decode.address(), CHAT, &decode_body(&body, &first).to_string()).await;
    assert!(late.status == 200 && content(&late).starts_with("[corrupt kv]"));
    assert_eq!(kinds(&decode), [Kind::HandoffStale]);
    assert!(
        get(prefill.address(), "/metrics")
            .await
            .body
            .contains("vllm:nixl_num_kv_expired_reqs_total{engine=\"0\",model_name=\"m\"} 1.0")
    );
}

#[tokio::test]
async fn a_waiting_decode_keeps_the_lease_alive() {
    let lease = Duration::from_millis(300);
    let prefill = start(EngineConfig::prefill("m").lease(lease)).await.unwrap();
    // Room for one: the first request generates for about four leases, the second waits that long.
    let mut config = EngineConfig::decode("m").lease(lease);
    config.capacity.max_model_len = 200;
    config.capacity.kv_tokens = 224;
    config.timing = Timing { decode_base: Duration::from_millis(10), ..Timing::instant() };
    let decode = start(config).await.unwrap();
    let mut slow = chat("slow");
    slow["max_tokens"] = 120.into();
    let mut running = Client::connect(decode.address()).await;
    running.post(CHAT, &[], &slow.to_string()).await;
    within(decode.wait_until(|engine| engine.stats().running == 1)).await;
    let mut body = chat("hi");
    body["max_tokens"] = 100.into();
    let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    let second = post(decode.address(), CHAT, &decode_body(&body, &first).to_string()).await;
    assert!(!content(&second).starts_with("[corrupt kv]"));
    assert_eq!(running.answer().await.status, 200);
    assert!(decode.violations().is_empty(), "{:?}", decode.violations());
}

#[tokio::test]
async fn a_dead_prefill_engine_fails_the_request_or_is_made_up_for() {
    for (policy, status) in [(KvLoadFailure::Fail, 500), (KvLoadFailure::Recompute, 200)] {
        let prefill = start(EngineConfig::prefill("m")).await.unwrap();
        let decode = start(EngineConfig::decode("m").kv_load_failure(policy)).await.unwrap();
        let body = chat("hi");
        let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
        prefill.kill();
        within(prefill.ended()).await;
        let answer = post(decode.address(), CHAT, &decode_body(&body, &first).to_string()).await;
        assert_eq!(answer.status, status);
        assert_eq!(decode.stats().failed_transfers, 1);
        if policy == KvLoadFailure::Fail {
            assert_eq!(
                answer.body,
                r#"{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}"#
            );
            let mut streamed = decode_body(&body, &first);
            streamed["stream"] = true.into();
            let stream = post(decode.address(), CHAT, &streamed.to_string()).await;
            let events = stream.events();
            assert_eq!((stream.status, events.len(), events[2]), (200, 3, "[DONE]"));
            assert!(events[0].contains(r#""role":"assistant""#));
            assert_eq!(
                events[1],
                r#"{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}"#
            );
        } else {
            assert!(decode.stats().computed_tokens > 0);
        }
        assert!(decode.violations().is_empty(), "a dead engine is nobody's breach");
    }
}

#[tokio::test]
async fn another_engines_id_fails_at_once() {
    let (prefill, decode) = pair().await;
    let body = chat("hi");
    let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    let mut other = decode_body(&body, &first);
    other["kv_transfer_params"]["remote_engine_id"] = "deadbeef-0000".into();
    assert_eq!(post(decode.address(), CHAT, &other.to_string()).await.status, 500);
    let mut other = decode_body(&body, &first);
    other["kv_transfer_params"]["remote_request_id"] = "chatcmpl-made-up".into();
    assert!(content(&post(decode.address(), CHAT, &other.to_string()).await).starts_with("[corrupt kv]"));
    assert_eq!(kinds(&decode), [Kind::HandoffUnknown]);
    assert_eq!(prefill.stats().pinned_requests, 1);
}

#[tokio::test]
async fn a_rejected_decode_frees_the_blocks() {
    let (prefill, decode) = pair().await;
    let body = chat("hi");
    for (name, value, status) in [("temperature", json!(-1), 400), ("model", json!("nope"), 404)] {
        let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
        let mut bad = decode_body(&body, &first);
        bad[name] = value;
        assert_eq!(prefill.stats().pinned_requests, 1);
        assert_eq!(post(decode.address(), CHAT, &bad.to_string()).await.status, status);
        within(prefill.wait_until(|engine| engine.stats().pinned_requests == 0)).await;
    }
    assert_eq!(prefill.stats().expired_leases, 0);
}

#[tokio::test]
async fn hand_offs_in_the_wrong_place_are_noticed() {
    let (prefill, decode) = pair().await;
    let plain = start(EngineConfig::combined("m")).await.unwrap();
    let body = chat("hi");
    let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    for engine in [&prefill, &plain] {
        assert_eq!(post(engine.address(), CHAT, &decode_body(&body, &first).to_string()).await.status, 200);
        assert_eq!(kinds(engine), [Kind::HandoffMisplaced]);
    }
    let answer = post(decode.address(), CHAT, &prefill_body(&body)).await;
    assert!(answer.json()["kv_transfer_params"].is_null());
    assert_eq!(kinds(&decode), [Kind::HandoffMisplaced]);
}

#[tokio::test]
async fn careless_prefill_requests_are_noticed() {
    let (prefill, _) = pair().await;
    let with = |change: fn(&mut Value)| {
        let mut body: Value = serde_json::from_str(&prefill_body(&chat("hi"))).unwrap();
        change(&mut body);
        body.to_string()
    };
    let streamed = post(prefill.address(), CHAT, &with(|body| body["stream"] = true.into())).await;
    assert!(!streamed.body.contains("kv_transfer_params"));
    let long = post(prefill.address(), CHAT, &with(|body| body["max_completion_tokens"] = 20.into())).await;
    assert_eq!(long.json()["usage"]["completion_tokens"], 20, "max_completion_tokens wins");
    let two = post(prefill.address(), CHAT, &with(|body| body["n"] = 2.into())).await;
    assert!(two.json()["kv_transfer_params"]["remote_request_id"].as_str().unwrap().starts_with("1_chatcmpl-"));
    assert_eq!(kinds(&prefill), [Kind::PrefillNotCapped, Kind::PrefillNotCapped, Kind::BlocksStranded]);
    assert_eq!(prefill.stats().pinned_requests, 4);
    let mut client = Client::connect(prefill.address()).await;
    client.post(CHAT, &[("x-request-id", "a"), ("x-request-id", "b")], &prefill_body(&chat("hi"))).await;
    assert!(client.answer().await.json()["id"] == "chatcmpl-a");
    assert_eq!(kinds(&prefill).last(), Some(&Kind::RequestIdRepeated));
}

#[tokio::test]
async fn interop_09_scripted_hand_offs_keep_their_bytes() {
    let (prefill, decode) = pair().await;
    let extra = r#"{"remote_block_ids":[[3,4],[]],"new_key":{"x":12345678901234567890123}}"#;
    prefill.script(Fault::on("/v1/").kv_transfer_params_extra(extra).unwrap());
    let body = chat("hi");
    let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    assert!(first.body.contains(r#""remote_block_ids":[[3,4],[]],"new_key":{"x":12345678901234567890123}}"#));
    prefill.script(Fault::on("/v1/").kv_transfer_params("\"oops\"").unwrap());
    let second = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    assert!(second.body.contains(r#""kv_transfer_params":"oops","#));
    assert_eq!(prefill.stats().pinned_requests, 1, "a replaced hand-off pins nothing");
    // The extra number does not survive a JSON value, so the test writes it as text, as a gateway would.
    let mut decode_body = decode_body(&body, &first);
    decode_body["kv_transfer_params"]["new_key"] = Value::Null;
    assert_eq!(post(decode.address(), CHAT, &decode_body.to_string()).await.status, 200);
    assert!(decode.violations().is_empty());
}

#[tokio::test]
async fn interop_17_a_whole_prefill_answer_can_be_told() {
    let (prefill, decode) = pair().await;
    let mut body = chat("hi");
    let first = post(prefill.address(), CHAT, &body.to_string()).await;
    body["disagg_prefill_resp"] = first.json();
    assert_eq!(post(decode.address(), CHAT, &body.to_string()).await.status, 200);
    assert_eq!(decode.stats().computed_tokens, 0);
    assert!(decode.violations().is_empty());
    body["disagg_prefill_resp"] = json!({"id": "x"});
    assert_eq!(post(decode.address(), CHAT, &body.to_string()).await.status, 200);
    assert_eq!(kinds(&decode), [Kind::PrefillAnswerIncomplete]);
}

#[tokio::test]
async fn as_real_the_engine_dies_of_a_bad_hand_off() {
    let nasty = || start(EngineConfig::decode("m").on_violation(OnViolation::AsReal));
    let prefill = start(EngineConfig::prefill("m")).await.unwrap();
    let body = chat("hi");

    let decode = nasty().await.unwrap();
    let mut bad = body.clone();
    bad["kv_transfer_params"] = json!({"do_remote_prefill": true, "remote_block_ids": null});
    let answer = post(decode.address(), CHAT, &bad.to_string()).await;
    assert_eq!((answer.status, get(decode.address(), "/health").await.status), (500, 503));
    within(decode.ended()).await;

    let decode = nasty().await.unwrap();
    let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    let longer = chat(&"longer ".repeat(50));
    assert_eq!(post(decode.address(), CHAT, &decode_body(&longer, &first).to_string()).await.status, 500);
    within(decode.ended()).await;

    let decode = nasty().await.unwrap();
    let first = post(prefill.address(), CHAT, &prefill_body(&body)).await;
    let mut bad = decode_body(&body, &first);
    bad["kv_transfer_params"]["remote_request_id"] = Value::Null;
    let mut client = Client::connect(decode.address()).await;
    client.post(CHAT, &[], &bad.to_string()).await;
    within(decode.wait_until(|engine| !engine.violations().is_empty())).await;
    assert_eq!(get(decode.address(), "/health").await.status, 200, "it hangs, for now");
    drop(client);
    within(decode.ended()).await;
}

#[tokio::test]
async fn as_real_a_refused_request_with_a_bad_hand_off_kills_too() {
    let config = EngineConfig::decode("m").on_violation(OnViolation::AsReal);
    for (params, rejected) in [
        (json!({"do_remote_prefill": true}), 404),
        (
            json!({"do_remote_prefill": true, "remote_engine_id": "e", "remote_block_ids": [[1]], "remote_host": HOST,
            "remote_port": 1}),
            404,
        ),
    ] {
        let decode = start(config.clone()).await.unwrap();
        let mut body = chat("hi");
        body["model"] = "nope".into();
        body["kv_transfer_params"] = params;
        let answer = post(decode.address(), CHAT, &body.to_string()).await;
        assert_eq!((answer.status, kinds(&decode)), (rejected, vec![Kind::HandoffIncomplete]));
        within(decode.ended()).await;
    }
}
