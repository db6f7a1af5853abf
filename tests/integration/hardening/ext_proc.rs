//! Rare messages of Envoy.

use tonic::Code;

use crate::harness::SOON;
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::ext_proc::{BodySendMode, ExtProcClient, Head, Reply};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::RawConnection;

const PATH: &str = "/v1/completions";
const BODY: &str = r#"{"model":"m","prompt":"hello there","max_tokens":3}"#;

#[tokio::test(flavor = "multi_thread")]
async fn bodies_with_trailers_and_bodies_beyond_the_message_limit_get_an_answer() {
    let env = vec![("TANDEM_MAX_BODY_BYTES".to_owned(), "100000".to_owned())];
    let fleet = FleetOptions { replicas: 1, envoy: false, front: false, env, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let client = ExtProcClient::connect(sandbox.fleet.tandems[0].grpc()).await;

    // With trailers behind it, Envoy's one body message does not say that it is the last.
    for mode in [BodySendMode::Buffered, BodySendMode::BufferedPartial] {
        let mut stream = client.open(&[]);
        stream.request_headers_in_mode(Head::post(PATH), mode).await;
        assert!(matches!(stream.next().await, Reply::RequestHeaders(_)));
        stream.request_body(BODY.as_bytes(), false).await;
        assert!(matches!(stream.next().await, Reply::MoreTime(_)));
        let routed = stream.next().await.mutation();
        assert_eq!(routed.header("target-pod"), Some(sandbox.decode[0].address().to_string()));
        stream.reset();
    }

    // The message is lost, but not the stream: the client gets its 413.
    let mut stream = client.open(&[]);
    stream.request_headers_in_mode(Head::post(PATH), BodySendMode::Buffered).await;
    assert!(matches!(stream.next().await, Reply::RequestHeaders(_)));
    stream.request_body(&vec![b' '; 2 << 20], true).await;
    let refused = stream.next().await.immediate();
    assert_eq!((refused.status, refused.details.as_str()), (413, "body_too_large"));
    assert!(matches!(stream.next().await, Reply::End(Code::Ok, _)));

    // A mode in which the request would leave unrouted is told, and counted as a failed request.
    let mut stream = client.open(&[]);
    stream.request_headers_in_mode(Head::post(PATH), BodySendMode::Streamed).await;
    assert_eq!(stream.next().await.immediate().status, 500);
    let failed = [("status", "internal"), ("status_code", "500")];
    sandbox.fleet.tandems[0]
        .wait_metrics(SOON, "the failure is counted", |metrics| {
            metrics.matching("gateway_request_model_fail_total", &failed).any(|sample| sample.value == 1.0)
        })
        .await;
    sandbox.close().await;
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A header as HPACK's literal without indexing.
fn literal(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_with_trailers_passes_envoy() {
    const HEADERS: u8 = 1;
    const END_STREAM: u8 = 1;
    const END_HEADERS: u8 = 4;
    let fleet = FleetOptions { replicas: 1, front: false, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let head: Vec<u8> = [
        (":method", "POST"),
        (":path", PATH),
        (":scheme", "http"),
        (":authority", "gateway.test"),
        ("content-type", "application/json"),
    ]
    .iter()
    .flat_map(|(name, value)| literal(name, value))
    .collect();
    let mut connection = RawConnection::open(&sandbox.paths()[0]).await;
    let request = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[]),
        frame(HEADERS, END_HEADERS, 1, &head),
        frame(0, 0, 1, BODY.as_bytes()),
        frame(HEADERS, END_HEADERS | END_STREAM, 1, &literal("x-checksum", "1")),
    ];
    connection.send(&request.concat()).await;
    // The answer's body is plain text in a DATA frame; an error would be one as well.
    let answer = connection.read_until(|bytes| bytes.ends_with(b"}") || bytes.ends_with(b"}\n")).await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("\"completion_tokens\":3"), "{answer}");
    drop(connection);
    sandbox.close().await;
}
