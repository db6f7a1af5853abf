//! Clients that want memory, series or confusion.

use std::fmt::Write;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tonic::Code;

use super::{CHAT, after_more_time, bare, chat, chat_head, routed, start};
use crate::harness::engines::{MODEL, SandboxOptions, only};
use crate::harness::ext_proc::{ExtProcClient, Head, Reply};
use crate::harness::metrics::Metrics;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, within};

/// A line of `/proc/<pid>/status`, in bytes.
fn memory(tandem: &Tandem, line: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", tandem.process().id())).expect("read /proc");
    let value = status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':')).expect("the line");
    value.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") * 1024
}

#[tokio::test(flavor = "multi_thread")]
async fn r09_half_sent_bodies_cannot_fill_the_memory() {
    const BODY: usize = 256 << 10;
    const FIT: usize = 32;
    const CONNECTIONS: usize = 4;
    const STREAMS: usize = 200;
    /// What HTTP/2 lets each connection have under way.
    const WINDOW: usize = 16 << 20;
    let budget = (FIT * BODY + BODY / 2).to_string();
    let (sandbox, warm) = start(bare(&[("TANDEM_MAX_BUFFERED_BYTES", &budget)])).await;
    let tandem = &sandbox.fleet.tandems[0];
    routed(&warm, chat_head(), &chat(true)).await.0.reset();
    let before = memory(tandem, "VmRSS");
    // The rest is what the transport holds of messages on their way from the window to the request, and the allocator.
    let cap = before + FIT * BODY + CONNECTIONS * WINDOW + (48 << 20);
    assert!(before + CONNECTIONS * STREAMS * BODY > cap + (64 << 20), "all bodies together are far beyond the cap");

    let half = vec![b' '; BODY];
    let mut streams = Vec::new();
    for _ in 0..CONNECTIONS {
        let client = ExtProcClient::connect(tandem.grpc()).await;
        for batch in [0..STREAMS / 2, 0..STREAMS / 2] {
            let opened = batch.map(|_| async {
                let mut stream = client.open(&[]);
                stream.request_headers(chat_head(), false).await;
                stream.next().await.mutation();
                stream.request_body(&half, false).await;
                stream
            });
            streams.extend(join_all(opened).await);
        }
    }
    let extra = CONNECTIONS * STREAMS - FIT;
    let refused = |metrics: &Metrics| metrics.sum("tandem_rejected_total", &[("limit", "buffered_bytes")]);
    let in_flight = |metrics: &Metrics| metrics.sum("gateway_in_flight_requests", &[]);
    // A refusal is counted before its request has ended.
    let all = |metrics: &Metrics| refused(metrics) > extra as f64 - 0.5 && in_flight(metrics) < FIT as f64 + 0.5;
    let metrics = tandem.wait_metrics(SOON, "the extra streams are refused", all).await;
    assert_eq!(refused(&metrics), extra as f64);
    // Heads are held and counted too: some hundred bytes each.
    let heads = metrics.sum("tandem_buffered_bytes", &[]) - (FIT * BODY) as f64;
    assert!((0.0..(FIT * 1024) as f64).contains(&heads), "{heads}");
    assert_eq!(in_flight(&metrics), FIT as f64);
    // They are counted before they are told.
    within("the extra streams are told", async {
        while streams.len() > FIT {
            streams.retain_mut(|stream| stream.try_next().map(overloaded).is_none());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(streams.len(), FIT);
    let peak = memory(tandem, "VmHWM");
    assert!(peak < cap, "{} MiB above the start", (peak - before) >> 20);
    for stream in streams {
        stream.reset();
    }
    let quiet = |metrics: &Metrics| metrics.sum("tandem_buffered_bytes", &[]) == 0.0;
    tandem.wait_metrics(SOON, "the budget is free again", quiet).await;
    routed(&warm, chat_head(), &chat(true)).await.0.reset();
    assert!(memory(tandem, "VmRSS") < cap);
    sandbox.close().await;
}

fn overloaded(reply: Reply) {
    let immediate = reply.immediate();
    assert_eq!(immediate.status, 503);
    assert_eq!(immediate.header("retry-after").as_deref(), Some("1"));
    assert_eq!(immediate.json()["error"]["type"], "overloaded_error");
}

/// The outcome of a chat whose head is `head`: the strategy in force, or the refusal's status and message.
async fn outcome(client: &ExtProcClient, head: Head) -> Result<Option<String>, (i32, String)> {
    let mut stream = client.open(&[]);
    stream.request_headers(head, false).await;
    let mut reply = stream.next().await;
    if matches!(reply, Reply::RequestHeaders(_)) {
        stream.request_body(&chat(true), true).await;
        reply = after_more_time(&mut stream).await;
    }
    match reply {
        Reply::RequestBody(mutation) => Ok(mutation.header("routing-strategy")),
        Reply::Immediate(refused) => {
            let message = refused.json()["error"]["message"].as_str().expect("a message").to_owned();
            assert!(matches!(stream.next().await, Reply::End(Code::Ok, _)));
            Err((refused.status, message))
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r77_control_headers_in_every_form() {
    // No strategy by default, so that the header's effect is seen.
    let options = SandboxOptions { pod: |pod| pod.annotation("model.aibrix.ai/config", ""), ..bare(&[]) };
    let (sandbox, client) = start(options).await;
    let pd = Ok(Some("pd".to_owned()));
    assert_eq!(outcome(&client, chat_head()).await, Ok(None));
    for name in ["routing-strategy", "Routing-Strategy", "ROUTING-STRATEGY"] {
        assert_eq!(outcome(&client, chat_head().raw(name, b"pd")).await, pd, "{name} in raw_value");
        assert_eq!(outcome(&client, chat_head().value(name, "pd")).await, pd, "{name} in value");
        assert_eq!(outcome(&client, chat_head().raw(name, b" pd ")).await, pd, "{name} with blanks");
        assert_eq!(outcome(&client, chat_head().raw(name, b"pd").value(name, "pd")).await, pd, "{name} twice");
        let (status, message) = outcome(&client, chat_head().raw(name, &[b'p'; 8192])).await.unwrap_err();
        assert!(status == 400 && message.len() < 200, "{status} {message}");
        // What is no text is no strategy, and does not silently become the default.
        assert_eq!(outcome(&client, chat_head().raw(name, b"\xff\xff")).await.unwrap_err().0, 400);
    }
    // None of the others may disturb the request, whatever is in it.
    let others = [
        "Config-Profile",
        "X-Session-Id",
        "x-aibrix-session-key",
        "Traceparent",
        "X-Request-Id",
        "User",
        "Authorization",
        "Content-Length",
        "Accept-Encoding",
        "Connection",
    ];
    let long = vec![b'v'; 8192];
    for name in others {
        let head = || Head::post(CHAT).raw("routing-strategy", b"pd");
        for value in [&b"\xff\xfe\x80"[..], &long, b"", b"plain"] {
            assert_eq!(outcome(&client, head().raw(name, value)).await, pd, "{name}: {value:?}");
            assert_eq!(outcome(&client, head().raw(name, value).raw(name, b"second")).await, pd, "{name} twice");
        }
        assert_eq!(outcome(&client, head().value(name, "plain")).await, pd, "{name} in value");
    }
    // A filter that cannot be read is an error, one that nobody satisfies names itself, an empty one is none.
    let filtered = |value: &[u8]| Head::post(CHAT).raw("routing-strategy", b"pd").raw("External-Filter", value);
    for (value, expected) in [(&b"\xff\xfe\x80"[..], 400), (&long, 400), (b"a b", 400), (b"plain", 503)] {
        let (status, message) = outcome(&client, filtered(value)).await.unwrap_err();
        assert!(status == expected && message.len() < 400, "{status} {message}");
    }
    for value in [&b""[..], b"role-name in (prefill, decode)"] {
        assert_eq!(outcome(&client, filtered(value)).await, pd);
    }
    // What the engine thinks of a content type is the engine's business.
    for value in [&b"\xff"[..], &long, b"text/plain"] {
        let (status, message) =
            outcome(&client, Head::post(CHAT).raw("Content-Type", value).raw("routing-strategy", b"pd"))
                .await
                .unwrap_err();
        assert!(status == 400 && message.contains("Unsupported Media Type"), "{status} {message}");
    }
    // They reach the prefill pod as they are.
    sandbox.clear();
    let head = chat_head().raw("routing-strategy", b"pd").value("X-Session-Id", "in value").raw("X-Odd", b"a\xffb");
    let head = head.raw("Authorization", b"Bearer one").raw("x-twice", b"1").raw("X-Twice", b"2");
    assert_eq!(outcome(&client, head).await, pd);
    let leg = only(&sandbox.prefill[0]);
    for (name, value) in [("x-session-id", "in value"), ("x-odd", "a\u{fffd}b"), ("authorization", "Bearer one")] {
        assert_eq!(leg.header(name), Some(value), "{name}");
    }
    let twice: Vec<&str> = leg.headers.iter().filter(|(n, _)| n == "x-twice").map(|(_, v)| v.as_str()).collect();
    assert_eq!(twice, ["1", "2"]);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r80_names_that_clients_make_up_make_no_series() {
    const REQUESTS: usize = 5000;
    const AT_ONCE: usize = 25;
    // With the labels of pods there is a series for each pod and bucket that is met, which takes more than the first requests.
    let (sandbox, client) = start(bare(&[("TANDEM_METRIC_LABELS", "lean")])).await;
    let tandem = &sandbox.fleet.tandems[0];
    // One request of every kind; all that follow differ from it only in what the client makes up.
    let one = async |index: usize| {
        let mut salt = String::new();
        let _ = write!(salt, "{:016x}", (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let body = |model: &str| {
            json!({"model": model, "messages": [{"role": "user", "content": "x"}], "user": salt}).to_string()
        };
        let head = |path: &str| {
            let head = Head::post(path).raw("user", salt.as_bytes()).raw("x-session-id", salt.as_bytes());
            head.raw("config-profile", salt.as_bytes()).raw("x-aibrix-session-key", salt.as_bytes())
        };
        let (head, body) = match index % 20 {
            0 => (head(CHAT), body(MODEL)),
            1..6 => (head(CHAT).raw("routing-strategy", salt.as_bytes()), body(MODEL)),
            6..12 => (head(&format!("/v1/{salt}")), body(MODEL)),
            12 => (head(&format!("{CHAT}?{salt}")).raw(&format!("x-{salt}"), b"1"), body(&format!("m{salt}"))),
            _ => (head(CHAT), body(&salt)),
        };
        let mut stream = client.open(&[]);
        stream.request_headers(head, false).await;
        if matches!(stream.next().await, Reply::RequestHeaders(_)) {
            stream.request_body(body.as_bytes(), true).await;
            after_more_time(&mut stream).await;
        }
    };
    let ended = |metrics: &Metrics, count: usize| metrics.sum("gateway_request_total", &[]) > count as f64 - 0.5;
    join_all((0..20).map(&one)).await;
    let before = tandem.wait_metrics(SOON, "the first ones end", |metrics| ended(metrics, 20)).await.0.len();
    for batch in (20..REQUESTS).collect::<Vec<_>>().chunks(AT_ONCE) {
        join_all(batch.iter().map(|index| one(*index))).await;
    }
    let metrics = tandem.wait_metrics(SOON, "all end", |metrics| ended(metrics, REQUESTS)).await;
    assert!(metrics.0.len() <= before + 10, "{} series, {before} before", metrics.0.len());
    assert_eq!(metrics.sum("tandem_metric_series_rejected_total", &[]), 0.0);
    let unknown = metrics.sum("gateway_request_model_fail_total", &[("status", "x-error-no-model-backends_fail")]);
    assert_eq!(unknown, (REQUESTS / 20 * 8) as f64, "a request for an unknown model is no success");
    assert!(!metrics.has("gateway_request_model_success_total"));
    sandbox.close().await;
}
