//! Bodies of one size and the limit hold for every HTTP version and framing: an upload of 1 MiB that works over HTTP/1.1 must
//! not be a 413 over HTTP/2.

use std::convert::Infallible;
use std::fmt;

use bytes::Bytes;
use futures_util::stream;
use http::{Request, StatusCode};
use http_body::Frame;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tandem_sim::{Capacity, Limits};
use tokio::net::TcpStream;

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::{Task, within};

const MIB: usize = 1 << 20;
/// The gateway's default limit.
const LIMIT: usize = 64 * MIB;
const PATH: &str = "/v1/chat/completions";

/// How a body travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Framing {
    http2: bool,
    /// With a `content-length`.
    announced: bool,
}

impl fmt::Display for Framing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = if self.announced { "with a length" } else { "without one" };
        write!(f, "HTTP/{} {length}", if self.http2 { "2" } else { "1.1" })
    }
}

const FRAMINGS: [Framing; 4] = [
    Framing { http2: false, announced: true },
    Framing { http2: false, announced: false },
    Framing { http2: true, announced: true },
    Framing { http2: true, announced: false },
];

/// A chat of exactly so many bytes, nearly all of them an image.
fn chat(model: &str, size: usize) -> Bytes {
    let head = format!(
        r#"{{"model":"{model}","max_tokens":2,"messages":[{{"role":"user","content":[{{"type":"text","text":"what is it?"}},{{"type":"image_url","image_url":{{"url":"data:image/png;base64,"#
    );
    let tail = r#""}}]}]}"#;
    let mut body = head.into_bytes();
    body.resize(size - tail.len(), b'A');
    body.extend_from_slice(tail.as_bytes());
    body.into()
}

/// Sends a body over a connection of its own; status and body of the answer.
async fn send(base: &str, framing: Framing, body: Bytes) -> (StatusCode, Bytes) {
    let authority = base.strip_prefix("http://").expect("http");
    let stream = within("connect", TcpStream::connect(authority)).await.expect("connect");
    let body: BoxBody<Bytes, Infallible> = if framing.announced {
        Full::new(body).boxed()
    } else {
        let pieces: Vec<_> = body.chunks(MIB).map(|piece| Ok(Frame::data(body.slice_ref(piece)))).collect();
        BodyExt::boxed(StreamBody::new(stream::iter(pieces)))
    };
    let request = Request::post(format!("http://{authority}{PATH}"))
        .header("host", authority)
        .header("routing-strategy", "pd")
        .header("content-type", "application/json")
        .body(body)
        .expect("a request");
    let exchange = async {
        if framing.http2 {
            let (mut sender, connection) =
                http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("handshake");
            let task = Task::spawn(async { drop(connection.await) });
            (sender.send_request(request).await.expect("an answer"), task)
        } else {
            let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("handshake");
            let task = Task::spawn(async { drop(connection.await) });
            (sender.send_request(request).await.expect("an answer"), task)
        }
    };
    let (answer, _connection) = within(&format!("an answer over {framing}"), exchange).await;
    let (head, body) = answer.into_parts();
    let body = within("the answer's body", body.collect()).await.expect("a whole answer").to_bytes();
    (head.status, body)
}

/// On a busy machine a debug build may need more than the shipped 5 s for a message of 64 MiB.
fn without_hurry() -> FleetOptions {
    let edit_envoy = |config: &mut Value| {
        let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0];
        manager["typed_config"]["http_filters"][0]["typed_config"]["message_timeout"] = "30s".into();
    };
    FleetOptions { replicas: 1, front: false, edit_envoy: Some(edit_envoy), ..FleetOptions::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_as_welcome_over_http2_as_over_http1() {
    let sandbox = Sandbox::start(SandboxOptions {
        engine: |mut config| {
            config.limits = Limits { body_bytes: 80 << 20, ..config.limits };
            let capacity = Capacity { max_model_len: 32 << 20, kv_tokens: 64 << 20, ..config.capacity };
            config.capacity(capacity)
        },
        fleet: without_hurry(),
        ..SandboxOptions::default()
    })
    .await;
    let envoy = sandbox.fleet.envoy.as_ref().expect("envoy").base();
    for framing in FRAMINGS {
        for size in [1000, MIB - 1, MIB, MIB + 1, 4 * MIB + 1] {
            sandbox.clear();
            let (status, answer) = send(&envoy, framing, chat("m", size)).await;
            assert_eq!(status, 200, "{size} bytes over {framing}: {answer:?}");
            for engine in sandbox.engines() {
                let records = engine.records();
                assert!(records.len() == 1 && records[0].body_length >= size, "{size} bytes over {framing}");
            }
        }
        // Up to the last byte of the limit it is the gateway that judges: this one was read whole.
        let (status, answer) = send(&envoy, framing, chat("nobody", LIMIT)).await;
        let said = serde_json::from_slice::<Value>(&answer).expect("JSON");
        assert_eq!((status.as_u16(), &said["error"]["code"]), (400, &json!("model_not_found")), "{framing}: {said}");
        let (status, answer) = send(&envoy, framing, chat("nobody", LIMIT + 1)).await;
        let said = serde_json::from_slice::<Value>(&answer).expect("JSON");
        assert_eq!(status, 413, "{framing}: {said}");
        assert_eq!(said["error"]["message"], format!("the request body is longer than {LIMIT} bytes"), "{framing}");
    }
    sandbox.close().await;
}
