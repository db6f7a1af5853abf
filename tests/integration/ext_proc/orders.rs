//! Messages in odd orders, twice, too late; streams that end in odd moments. Each request ends once.

use std::time::Duration;

use futures_util::future::join_all;
use tonic::Code;

use super::{after_more_time, bare, chat, chat_head, routed, sse_head, start};
use crate::harness::ext_proc::{ExtProcClient, ExtProcStream, Head, Reply};
use crate::harness::metrics::Metrics;
use crate::harness::{SOON, within};

/// What a scripted Envoy says next.
#[derive(Clone, Copy, Debug)]
enum Say {
    Head,
    /// A head for a path that does not exist.
    BadHead,
    Body,
    BadBody,
    AnswerHead(u16),
    Chunk,
    LastChunk,
    Trailers,
    /// Wait for a reply.
    Hear,
    HalfClose,
}

async fn say(stream: &mut ExtProcStream, message: Say) -> Option<Reply> {
    use envoy_types::pb::envoy::service::ext_proc::v3 as pb;
    match message {
        Say::Head => stream.request_headers(chat_head(), false).await,
        Say::BadHead => stream.request_headers(Head::post("/v1/nothing"), false).await,
        Say::Body => stream.request_body(&chat(true), true).await,
        Say::BadBody => stream.request_body(b"{", true).await,
        Say::AnswerHead(200) => stream.response_headers(sse_head(), false).await,
        Say::AnswerHead(status) => stream.response_headers(Head::status(status), false).await,
        Say::Chunk => stream.response_body(b"data: {}\n\n", false).await,
        Say::LastChunk => stream.response_body(b"data: [DONE]\n\n", true).await,
        Say::Trailers => {
            stream.send(pb::processing_request::Request::ResponseTrailers(pb::HttpTrailers::default())).await;
        }
        Say::Hear => return Some(after_more_time(stream).await),
        Say::HalfClose => stream.half_close(),
    }
    None
}

/// The status of an immediate answer, or 0; and how the stream ended.
async fn play(client: &ExtProcClient, script: &[Say]) -> (i32, Code) {
    let mut stream = client.open(&[]);
    let mut status = 0;
    for message in script {
        if let Some(Reply::Immediate(immediate)) = say(&mut stream, *message).await {
            status = immediate.status;
        }
    }
    loop {
        match stream.next().await {
            Reply::Immediate(immediate) => {
                assert_eq!(status, 0, "one answer only: {script:?}");
                status = immediate.status;
            }
            Reply::End(code, _) => return (status, code),
            _ => {}
        }
    }
}

fn ended(metrics: &Metrics) -> f64 {
    metrics.sum("gateway_request_total", &[])
}

#[tokio::test(flavor = "multi_thread")]
async fn r58_every_order_of_messages_ends_the_request_once() {
    use Say::{AnswerHead, BadBody, BadHead, Body, Chunk, HalfClose, Head, Hear, LastChunk, Trailers};
    let (sandbox, client) = start(bare(&[])).await;
    let tandem = &sandbox.fleet.tandems[0];
    let routed = [Head, Hear, Body, Hear];
    let answering = [&routed[..], &[AnswerHead(200), Hear, Chunk, Hear]].concat();
    let then = |before: &[Say], after: &[Say]| [before, after].concat();
    let ok = Code::Ok;
    // Script, status of the gateway's own answer (0: none), end of the stream, and the label it is counted under.
    let cases: Vec<(Vec<Say>, i32, Code, &str)> = vec![
        (vec![Body], 500, ok, "internal"),
        (vec![Chunk], 500, ok, "internal"),
        (vec![Head, Hear, Head], 500, ok, "internal"),
        (vec![Head, Hear, Chunk], 500, ok, "internal"),
        (vec![BadHead, Body, AnswerHead(200), LastChunk, Trailers], 501, ok, "unknown_request_path"),
        (vec![Head, Hear, BadBody, Body, AnswerHead(200)], 400, ok, "x-error-request-body-processing_fail"),
        (vec![Head, Hear, HalfClose], 0, ok, "client_cancelled_eof"),
        // Envoy has had its reply to the body, so the end of the stream says it once more.
        (then(&routed, &[Body]), 500, Code::Aborted, "internal"),
        (then(&routed, &[Head]), 500, Code::Aborted, "internal"),
        (then(&routed, &[HalfClose]), 0, ok, "client_cancelled_eof"),
        // Envoy's own answer to a request that was never routed, and its answer instead of the engine's.
        (vec![Head, Hear, AnswerHead(413), Hear, LastChunk], 0, ok, "gateway_rsp_headers_fail"),
        (then(&routed, &[AnswerHead(503), Hear, Chunk, LastChunk, Chunk, Trailers]), 0, ok, "gateway_rsp_headers_fail"),
        (then(&routed, &[AnswerHead(503), Hear, HalfClose]), 0, ok, "client_cancelled_eof"),
        // R85: with the answer's head out, only a failed stream makes Envoy break the answer off.
        (then(&answering, &[AnswerHead(200)]), 0, Code::Aborted, "internal"),
        (then(&answering, &[Body]), 0, Code::Aborted, "internal"),
        (then(&answering, &[Head]), 0, Code::Aborted, "internal"),
        (then(&answering, &[HalfClose]), 0, ok, "client_cancelled_eof"),
        (then(&answering, &[LastChunk, LastChunk, Trailers, AnswerHead(200)]), 0, ok, "gateway_request_success"),
        (then(&answering, &[Trailers, Trailers, LastChunk]), 0, ok, "gateway_request_success"),
    ];
    for (index, (script, status, code, label)) in cases.iter().enumerate() {
        let before = tandem.metrics().await;
        assert_eq!(play(&client, script).await, (*status, *code), "{script:?}");
        let after = tandem.wait_metrics(SOON, "it is counted", |metrics| ended(metrics) > index as f64 + 0.5).await;
        assert_eq!(ended(&after), index as f64 + 1.0, "{script:?}: counted once");
        let counted = |metrics: &Metrics| {
            ["gateway_request_model_success_total", "gateway_request_model_fail_total"]
                .map(|name| metrics.sum(name, &[("status", label)]))
                .iter()
                .sum::<f64>()
        };
        assert_eq!(counted(&after) - counted(&before), 1.0, "{script:?}: as {label}");
    }
    // The same while the prefill leg runs: the leg goes with the request.
    for (script, status) in
        [(&[Body][..], 500), (&[Head], 500), (&[AnswerHead(200), Hear, LastChunk], 0), (&[HalfClose], 0)]
    {
        let hold = sandbox.prefill[0].hold();
        let mut stream = client.open(&[]);
        for message in [Head, Hear, Body] {
            say(&mut stream, message).await;
        }
        within("the leg", hold.wait_for(1)).await;
        let gone = sandbox.prefill[0].stats().clients_gone;
        let mut seen = 0;
        for message in script {
            if let Some(Reply::Immediate(immediate)) = say(&mut stream, *message).await {
                seen = immediate.status;
            }
        }
        loop {
            match stream.next().await {
                Reply::Immediate(immediate) => seen = immediate.status,
                Reply::End(..) => break,
                _ => {}
            }
        }
        assert_eq!(seen, status, "{script:?}");
        let left = |engine: &tandem_sim::Engine| engine.stats().clients_gone > gone;
        within("the leg is closed", sandbox.prefill[0].wait_until(left)).await;
        hold.release();
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r27_a_client_that_leaves_right_after_done_was_served() {
    const REQUESTS: usize = 300;
    let (sandbox, client) = start(bare(&[])).await;
    let one = async |index: usize| {
        let (mut stream, _) = routed(&client, chat_head(), &chat(true)).await;
        stream.response_headers(sse_head(), false).await;
        stream.next().await.mutation();
        stream.response_body(b"data: {\"choices\":[]}\n\ndata: [DO", false).await;
        stream.next().await.mutation();
        stream.response_body(b"NE]\n\n", false).await;
        // 0 to 5 ms later the client has gone. Envoy says so by a clean end, which may overtake our reply; or it resets
        // the stream, once it has heard the reply.
        if index.is_multiple_of(2) {
            tokio::time::sleep(Duration::from_millis(index as u64 % 6)).await;
            stream.half_close();
            while !matches!(stream.next().await, Reply::End(..)) {}
        } else {
            stream.next().await.mutation();
            tokio::time::sleep(Duration::from_millis(index as u64 % 6)).await;
            stream.reset();
        }
    };
    for batch in (0..REQUESTS).collect::<Vec<_>>().chunks(10) {
        join_all(batch.iter().map(|index| one(*index))).await;
    }
    let tandem = &sandbox.fleet.tandems[0];
    let all = |metrics: &Metrics| ended(metrics) > REQUESTS as f64 - 0.5;
    let metrics = tandem.wait_metrics(SOON, "all are counted", all).await;
    assert_eq!(ended(&metrics), REQUESTS as f64, "each ends once");
    assert_eq!(metrics.sum("gateway_request_model_success_total", &[]), REQUESTS as f64);
    assert!(!metrics.has("gateway_request_model_fail_total"));
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r85_a_shutdown_answers_before_the_head_and_cuts_after_it() {
    let env = [("TANDEM_DRAIN_PROPAGATION_SECONDS", "0"), ("TANDEM_DRAIN_TIMEOUT_SECONDS", "1")];
    let (sandbox, client) = start(bare(&env)).await;
    let (mut waiting, _) = routed(&client, chat_head(), &chat(true)).await;
    let (mut answering, _) = routed(&client, chat_head(), &chat(true)).await;
    answering.response_headers(sse_head(), false).await;
    answering.next().await.mutation();
    let hold = sandbox.prefill[0].hold();
    let mut prefilling = client.open(&[]);
    for message in [Say::Head, Say::Hear, Say::Body] {
        say(&mut prefilling, message).await;
    }
    within("the leg", hold.wait_for(1)).await;
    let mut half = client.open(&[]);
    half.request_headers(chat_head(), false).await;
    half.next().await.mutation();
    half.request_body(b"{\"model\"", false).await;

    let tandem = &sandbox.fleet.tandems[0];
    tandem.sigterm();
    for stream in [&mut waiting, &mut prefilling, &mut half] {
        let immediate = after_more_time(stream).await.immediate();
        assert_eq!(immediate.status, 503);
        assert_eq!(immediate.header("retry-after").as_deref(), Some("1"));
        assert_eq!(immediate.json()["error"]["code"], "service_unavailable");
        let end = stream.next().await;
        assert!(matches!(end, Reply::End(Code::Unavailable, _)), "{end:?}");
    }
    let end = answering.next().await;
    assert!(matches!(end, Reply::End(Code::Aborted, _)), "no answer can follow a head that is out: {end:?}");
    assert!(tandem.exited(SOON).await.success());
    let left = |engine: &tandem_sim::Engine| engine.stats().live_requests == 0;
    within("the leg is closed", sandbox.prefill[0].wait_until(left)).await;
    drop(hold);
    sandbox.close().await;
}
