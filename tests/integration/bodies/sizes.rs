//! Bodies of every size, and those that are too large.

use std::fmt::Write;

use serde_json::Value;
use tandem_sim::{Capacity, Limits};

use super::members::{assert_decode_leg, assert_prefill_leg};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, RawConnection};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
const PATH: &str = "/v1/chat/completions";

/// The gateway's default limit.
const LIMIT: usize = 64 * MIB;

/// A chat of exactly `size` bytes, a sixteenth of it text that the model sees and the rest an image.
fn chat_of(size: usize) -> String {
    let head = r#"{"model":"m","max_tokens":2,"messages":[{"role":"user","content":[{"type":"text","text":""#;
    let middle = r#""},{"type":"image_url","image_url":{"url":"data:image/png;base64,"#;
    let tail = r#""}}]}],"seed":7}"#;
    let mut body = head.to_owned();
    for number in 0.. {
        if body.len() > size / 16 {
            break;
        }
        write!(body, "{number} caf\\u00e9 漢字 ").expect("a string");
    }
    body.push_str(middle);
    let missing = size - body.len() - tail.len();
    body.push_str(&"ABCDEFGHIJKLMNOPQRSTUVW".repeat(missing / 23 + 1)[..missing]);
    body.push_str(tail);
    assert_eq!(body.len(), size);
    body
}

/// On a busy machine a debug build may need more than the shipped 5 s for a message of 64 MiB.
fn without_hurry() -> FleetOptions {
    let edit_envoy = |config: &mut Value| {
        let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0];
        let processor = &mut manager["typed_config"]["http_filters"][0]["typed_config"];
        assert_eq!(processor["message_timeout"], "5s");
        processor["message_timeout"] = "30s".into();
    };
    FleetOptions { edit_envoy: Some(edit_envoy), ..FleetOptions::default() }
}

/// The head of a chunked request, its body in pieces, its end.
async fn send_chunked(connection: &mut RawConnection, body: &[u8]) {
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    connection.send(head.as_bytes()).await;
    for piece in body.chunks(MIB) {
        connection.send(format!("{:x}\r\n", piece.len()).as_bytes()).await;
        connection.send(piece).await;
        connection.send(b"\r\n").await;
    }
    connection.send(b"0\r\n\r\n").await;
}

/// Reads the answer to a request that closes its connection: its head in lower case, and its body as it was sent.
async fn read_answer(connection: &mut RawConnection) -> (String, Vec<u8>) {
    let bytes = connection.read_to_end().await;
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
        panic!("no answer: {:?}", String::from_utf8_lossy(&bytes))
    };
    (String::from_utf8_lossy(&bytes[..end + 4]).to_ascii_lowercase(), bytes[end + 4..].to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn r07_bodies_arrive_whole_on_both_legs() {
    let sandbox = Sandbox::start(SandboxOptions {
        engine: |mut config| {
            config.keep_bodies = true;
            config.limits = Limits { body_bytes: 80 << 20, ..config.limits };
            let capacity = Capacity { max_model_len: 4 << 20, kv_tokens: 8 << 20, ..config.capacity };
            config.capacity(capacity)
        },
        fleet: without_hurry(),
        ..SandboxOptions::default()
    })
    .await;
    for path in sandbox.paths() {
        for size in [31 * KIB, 33 * KIB, 1100 * KIB, 4200 * KIB, 20 * MIB] {
            let body = chat_of(size);
            // Chunked bodies have no length; the rest of their way is the same, so two sizes will do.
            for chunked in [false, true].into_iter().filter(|chunked| !chunked || (32 * KIB..2 * MIB).contains(&size)) {
                sandbox.clear();
                if chunked {
                    let mut connection = RawConnection::open(&path).await;
                    send_chunked(&mut connection, body.as_bytes()).await;
                    let (head, _) = read_answer(&mut connection).await;
                    assert!(head.starts_with("http/1.1 200 "), "{size}: {head}");
                } else {
                    let answer = Call::post(&path, PATH, body.clone()).send().await;
                    assert_eq!(answer.status, 200, "{size}");
                }
                let (prefill, decode) = (only(&sandbox.prefill[0]), only(&sandbox.decode[0]));
                assert!(prefill.body_length > size && decode.body_length > size);
                assert_prefill_leg(body.as_bytes(), &prefill.body);
                assert_decode_leg(body.as_bytes(), &decode.body);
            }
        }
        sandbox.clear();
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r07_bodies_over_the_limit_get_a_413_of_their_own() {
    let sandbox = Sandbox::start(SandboxOptions { fleet: without_hurry(), ..SandboxOptions::default() }).await;
    let check = |(head, body): (String, Vec<u8>)| {
        assert!(head.starts_with("http/1.1 413 "), "{head}");
        assert!(head.contains("\r\ncontent-type: application/json\r\n"), "{head}");
        let error = serde_json::from_slice::<Value>(&body).unwrap()["error"].clone();
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["message"], format!("the request body is longer than {LIMIT} bytes"));
    };
    let body = chat_of(LIMIT + 1);
    for path in sandbox.paths() {
        // Announced: the answer does not wait for the body.
        let mut connection = RawConnection::open(&path).await;
        let announced = LIMIT + 1;
        let head = format!(
            "POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {announced}\r\n\r\n"
        );
        connection.send(head.as_bytes()).await;
        check(read_answer(&mut connection).await);

        // Not announced: found out at the last byte.
        let mut connection = RawConnection::open(&path).await;
        send_chunked(&mut connection, body.as_bytes()).await;
        check(read_answer(&mut connection).await);

        // A client that sends it all at once and reads only then.
        let answer = Call::post(&path, PATH, body.clone()).send().await;
        assert_eq!(answer.status, 413);
        assert_eq!(answer.json().await["error"]["type"], "invalid_request_error");
    }
    assert!(sandbox.engines().all(|engine| engine.records().is_empty()));
    sandbox.close().await;
}
