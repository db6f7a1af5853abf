//! Rooms, ranks and batches.

use std::time::Duration;

use super::{CHAT, ROOM, TEXT, both, capped, chat, content, joined, kinds, pair, pair_of};
use crate::client::{Client, get, keys, post};
use serde_json::{Value, json};
use tandem_sim::{EngineConfig, ViolationKind as Kind, start};

#[tokio::test]
async fn rooms_are_validated() {
    let (prefill, decode) = pair_of(|config| config.meeting_timeout(Duration::from_millis(1))).await;
    let good = joined(&chat("hi"), &prefill, ROOM, "r");
    for engine in [&prefill, &decode] {
        for (room, status, kind) in [
            (Value::Null, 400, Some(Kind::RoomMissing)),
            (json!(0), 500, Some(Kind::RoomInvalid)),
            (json!(1_u64 << 63), 500, Some(Kind::RoomInvalid)),
            (json!("x"), 400, None),
            (json!(-1), 400, None),
            (json!([7]), 400, None),
            (json!(i64::MAX), 500, None),
        ] {
            let mut body = good.clone();
            body["bootstrap_room"] = room.clone();
            let before = engine.violations().len();
            let answer = post(engine.address(), CHAT, &capped(&body)).await;
            assert_eq!(answer.status, status, "{room}: {}", answer.body);
            assert_eq!(kinds(engine).get(before), kind.as_ref(), "{room}");
        }
        let mut body = good.clone();
        body["bootstrap_room"] = Value::Null;
        let words = "Invalid request: Disaggregated request received without bootstrap room id. req.rid='r'";
        assert_eq!(post(engine.address(), CHAT, &capped(&body)).await.json()["message"], words);
        let mut hostless = joined(&chat("hi"), &prefill, 99, "r");
        hostless["bootstrap_host"] = Value::Null;
        let before = engine.violations().len();
        post(engine.address(), CHAT, &capped(&hostless)).await;
        assert_eq!(kinds(engine)[before..], [Kind::HandoffIncomplete]);
    }
}

#[tokio::test]
async fn a_room_used_twice_is_noticed_and_its_text_is_marked() {
    let (prefill, decode) = pair_of(|config| config.meeting_timeout(Duration::from_millis(500))).await;
    let body = joined(&chat("hi"), &prefill, ROOM, "r");
    let (_, good) = both((&prefill, &decode), CHAT, &body).await;
    assert!(!content(&good).contains("[corrupt kv]"));
    let (orphan, again) = both((&prefill, &decode), CHAT, &body).await;
    assert_eq!(again.status, 200);
    assert!(content(&again).starts_with("[corrupt kv]"), "{}", again.body);
    // The decode engine may be gone before the prefill request looks, which then waits in vain.
    assert!([200, 500].contains(&orphan.status));
    assert_eq!(kinds(&prefill), [Kind::RoomReused]);
    assert_eq!(kinds(&decode), [Kind::RoomReused, Kind::HandoffReused]);
}

#[tokio::test]
async fn a_faked_transfer_is_marked() {
    let (prefill, decode) = pair().await;
    let mut body = joined(&chat("hi"), &prefill, ROOM, "r");
    body["bootstrap_host"] = "2.2.2.2".into();
    let answer = post(decode.address(), CHAT, &body.to_string()).await;
    assert_eq!((answer.status, content(&answer).starts_with("[corrupt kv]")), (200, true));
    assert_eq!(kinds(&decode), [Kind::TransferFaked]);
    let plain = start(EngineConfig::combined("m").sglang()).await.unwrap();
    assert_eq!(post(plain.address(), CHAT, &body.to_string()).await.status, 200);
    assert_eq!(kinds(&plain), [Kind::HandoffMisplaced]);
}

#[tokio::test]
async fn batches_spread_rooms_and_ids() {
    let (prefill, decode) = pair().await;
    let body = joined(&json!({"prompt": ["a", "b"], "max_tokens": 2}), &prefill, 100, "r");
    let (first, second) = both((&prefill, &decode), TEXT, &body).await;
    assert_eq!((first.status, second.status), (200, 200));
    assert_eq!(second.json()["choices"].as_array().map(Vec::len), Some(2));
    // Rooms 100 and 101 were used.
    let body = joined(&json!({"prompt": "c", "max_tokens": 2}), &prefill, 101, "s");
    post(decode.address(), TEXT, &body.to_string()).await;
    assert_eq!(kinds(&decode), [Kind::RoomReused, Kind::HandoffReused]);
    let mut lists = joined(&json!({"prompt": ["a", "b"], "max_tokens": 2}), &prefill, 0, "t");
    lists["bootstrap_room"] = json!([7, 9]);
    lists["bootstrap_host"] = json!(["127.0.0.1", "127.0.0.1"]);
    lists["rid"] = json!(["t0", "t1"]);
    let (first, second) = both((&prefill, &decode), TEXT, &lists).await;
    assert_eq!((first.status, second.status), (200, 200), "{}", second.body);
    lists["bootstrap_room"] = json!([7]);
    assert_eq!(post(decode.address(), TEXT, &lists.to_string()).await.status, 400);
}

#[tokio::test]
async fn several_samples_share_a_room_and_hang() {
    let (prefill, decode) = pair_of(|config| config.meeting_timeout(Duration::from_millis(500))).await;
    let mut body = joined(&chat("hi"), &prefill, ROOM, "r");
    body["n"] = 2.into();
    let (first, _) = both((&prefill, &decode), CHAT, &body).await;
    assert_eq!(first.status, 500);
    assert!(kinds(&prefill).contains(&Kind::RoomShared) && kinds(&decode).contains(&Kind::RoomShared));
}

#[tokio::test]
async fn ranks_must_match() {
    let (prefill, decode) =
        pair_of(|config| EngineConfig { dp_size: 4, ..config }.meeting_timeout(Duration::from_millis(500))).await;
    // Unpinned, both sides take the room modulo the prefill engine's ranks.
    let body = joined(&chat("hi"), &prefill, 6, "a");
    let (first, second) = both((&prefill, &decode), CHAT, &body).await;
    assert_eq!((first.status, second.status), (200, 200));
    for (told, expected) in [(None, 500), (Some(3), 200), (Some(1), 500)] {
        let mut body = joined(&chat("hi"), &prefill, 40 + told.unwrap_or(0), "b");
        if let Some(rank) = told {
            body["disagg_prefill_dp_rank"] = rank.into();
        }
        let mut first = Client::connect(prefill.address()).await;
        first.post(CHAT, &[("x-data-parallel-rank", "3")], &capped(&body)).await;
        let second = post(decode.address(), CHAT, &body.to_string()).await;
        assert_eq!((first.answer().await.status, second.status), (expected, expected), "{told:?}");
    }
    for rank in ["4", "-1", "x"] {
        let mut client = Client::connect(decode.address()).await;
        client.post(CHAT, &[("x-data-parallel-rank", rank)], &joined(&chat("hi"), &prefill, 9, "c").to_string()).await;
        assert_eq!(client.answer().await.status, 400, "{rank}");
    }
    let mut client = Client::connect(decode.address()).await;
    client.post(CHAT, &[("x-override-rid", "q")], &joined(&chat("hi"), &prefill, 8, "d").to_string()).await;
    client.answer().await;
    assert!(kinds(&decode).contains(&Kind::OverrideHeader));
}

#[tokio::test]
async fn the_bootstrap_server_describes_the_prefill_engine() {
    let (prefill, _) = pair().await;
    let address = std::net::SocketAddr::new(prefill.address().ip(), prefill.bootstrap_port());
    assert_eq!(get(address, "/health").await.body, "OK");
    let route = get(address, "/route?prefill_dp_rank=-1").await.json();
    let captured = r#"{"attn_tp_size":1,"dp_size":1,"page_size":1,"kv_cache_dtype":"auto","follow_bootstrap_room":true,"prefill_http_port":1}"#;
    assert_eq!(route["prefill_http_port"].as_u64(), Some(u64::from(prefill.address().port())));
    for key in keys(captured) {
        assert!(route.get(&key).is_some(), "{key}");
    }
    assert_eq!(get(address, "/query").await.status, 404);
    let info = get(prefill.address(), "/server_info").await.json();
    assert_eq!(info["disaggregation_mode"], "prefill");
}
