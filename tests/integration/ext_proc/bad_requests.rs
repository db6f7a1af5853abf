//! Requests that cannot work: one JSON error object with the right status and markers, and nobody else hears of them.

use std::collections::BTreeSet;

use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3 as pb;
use serde_json::{Value, json};
use tonic::Code;

use super::{CHAT, bare, chat, chat_head, start};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::ext_proc::{ExtProcClient, Head, Immediate, Reply};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, RawConnection};
use crate::harness::metrics::Metrics;

const TOKEN: &str = "s3cret-token";
const BODY_LIMIT: usize = 4096;
const PROCESSING: &str = "x-error-request-body-processing";

/// A request, and what it must be answered with.
struct Case {
    name: &'static str,
    method: &'static str,
    path: String,
    headers: Vec<(&'static str, String)>,
    /// `None`: the head ends the request.
    body: Option<Vec<u8>>,
    status: u16,
    markers: Vec<(&'static str, String)>,
    code: Value,
    param: Value,
}

fn case(name: &'static str, body: impl Into<Vec<u8>>, status: u16, markers: &[&'static str]) -> Case {
    Case {
        name,
        method: "POST",
        path: CHAT.to_owned(),
        headers: vec![("authorization", format!("Bearer {TOKEN}"))],
        body: Some(body.into()),
        status,
        markers: markers.iter().map(|marker| (*marker, "true".to_owned())).collect(),
        code: Value::Null,
        param: Value::Null,
    }
}

impl Case {
    fn header(mut self, name: &'static str, value: &str) -> Case {
        self.headers.push((name, value.to_owned()));
        self
    }

    fn head(&self) -> Head {
        let pseudo = Head::default().raw(":method", self.method.as_bytes()).raw(":path", self.path.as_bytes());
        let pseudo = pseudo.raw(":scheme", b"http").raw(":authority", b"gateway.test");
        self.headers.iter().fold(pseudo, |head, (name, value)| head.raw(name, value.as_bytes()))
    }
}

/// The table. `salt` goes wherever a client may write what it likes, so that a second round has other texts.
fn table(salt: &str) -> Vec<Case> {
    let no_model = &[PROCESSING, "x-error-no-model-in-request"];
    let messages = r#""messages":[{"role":"user","content":"x"}]"#;
    let unknown = format!("no-such-model-{salt}");
    vec![
        case("truncated", format!(r#"{{"model":"m","messages":[{{"role":"{salt}"#), 400, &[PROCESSING]),
        case("not UTF-8", [b"{\"model\":\"m\xff\xfe\",", messages.as_bytes(), b"}"].concat(), 400, &[PROCESSING]),
        case("a list", "[]", 400, &[PROCESSING]),
        case("text", format!("hello {salt}"), 400, &[PROCESSING]),
        case("byte order mark", [b"\xef\xbb\xbf", &chat(false)[..]].concat(), 400, &[PROCESSING]),
        case("no members", "{}", 400, no_model),
        case("model is a number", format!(r#"{{"model":1,{messages}}}"#), 400, no_model),
        case("model is null", format!(r#"{{"model":null,{messages}}}"#), 400, no_model),
        case("no messages", r#"{"model":"m"}"#, 400, &[PROCESSING]),
        case("stream is no boolean", format!(r#"{{"model":"m",{messages},"stream":"{salt}"}}"#), 400, &[PROCESSING]),
        Case { body: None, ..case("no body", "", 400, &[PROCESSING]) },
        Case { body: None, ..case("no body, length 0", "", 400, &[PROCESSING]) }.header("content-length", "0"),
        case("empty body", "", 400, &[PROCESSING]),
        case("empty body, length 0", "", 400, &[PROCESSING]).header("content-length", "0"),
        case("fewer bytes than announced (R23)", chat(false), 400, &[PROCESSING]).header("content-length", "1000"),
        case("more bytes than announced (R23)", chat(false), 400, &[PROCESSING]).header("content-length", "10"),
        case("announced too long", chat(false), 413, &[PROCESSING]).header("content-length", "4097"),
        case("too long", vec![b' '; BODY_LIMIT + 1], 413, &[PROCESSING]),
        Case {
            markers: vec![("x-error-no-model-backends", unknown.clone())],
            code: json!("model_not_found"),
            param: json!("model"),
            ..case("unknown model", format!(r#"{{"model":"{unknown}",{messages}}}"#), 400, &[])
        },
        Case { path: format!("/v1/{salt}"), ..case("unknown path", chat(false), 501, &[PROCESSING]) },
        // (Without a body it passes, and is Envoy's to answer.)
        Case { method: "PUT", ..case("wrong method with a body", chat(false), 405, &[PROCESSING]) },
        Case { method: "PATCH", ..case("another wrong method", chat(false), 405, &[PROCESSING]) },
        case("bad strategy", chat(false), 400, &["x-error-routing", "x-error-invalid-routing-strategy"])
            .header("routing-strategy", salt),
        case(
            "doubled controlled key",
            format!(r#"{{"model":"m",{messages},"stream":false,"stream":true}}"#),
            400,
            &["x-error-routing"],
        ),
        Case {
            path: "/v1/audio/transcriptions".to_owned(),
            ..case("no form", chat(false), 400, &["x-error-multipart-parsing"])
        },
        Case {
            headers: vec![("authorization", format!("Bearer {salt}"))],
            code: json!("invalid_api_key"),
            param: json!("api_key"),
            ..case("bad API key", chat(false), 401, &[])
        },
        Case {
            headers: Vec::new(),
            code: json!("invalid_api_key"),
            param: json!("api_key"),
            ..case("no API key", chat(false), 401, &[])
        },
    ]
}

/// What the error object and its headers must be, whichever way they came.
fn check(case: &Case, status: u16, headers: &[(String, String)], body: &[u8]) {
    let name = case.name;
    assert_eq!(status, case.status, "{name}: {}", String::from_utf8_lossy(body));
    let values = |wanted: &str| -> Vec<&str> {
        headers.iter().filter(|(key, _)| key == wanted).map(|(_, value)| value.as_str()).collect()
    };
    assert_eq!(values("content-type"), ["application/json"], "{name}");
    assert!(values("request-id").iter().all(|id| id.len() >= 32) && values("request-id").len() == 1, "{name}");
    let markers: BTreeSet<(&str, &str)> = headers
        .iter()
        .filter(|(key, _)| key.starts_with("x-error-"))
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    assert_eq!(markers, case.markers.iter().map(|(key, value)| (*key, value.as_str())).collect(), "{name}");
    let object: Value = serde_json::from_slice(body).unwrap_or_else(|error| panic!("{name}: {error}"));
    let kind = match case.status {
        401 => "authentication_error",
        501 => "api_error",
        _ => "invalid_request_error",
    };
    let message = object["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(!message.is_empty(), "{name}");
    let expected = json!({"error": {"message": message, "type": kind, "code": case.code, "param": case.param}});
    assert_eq!(object, expected, "{name}");
}

async fn play(client: &ExtProcClient, case: &Case) -> Immediate {
    let mut stream = client.open(&[]);
    stream.request_headers(case.head(), case.body.is_none()).await;
    let mut reply = stream.next().await;
    if let (Reply::RequestHeaders(_), Some(body)) = (&reply, &case.body) {
        stream.request_body(body, true).await;
        reply = stream.next().await;
    }
    let Reply::Immediate(immediate) = reply else { panic!("{}: {reply:?}", case.name) };
    let end = stream.next().await;
    assert!(matches!(end, Reply::End(Code::Ok, _)), "{}: {end:?}", case.name);
    immediate
}

/// Every series of a page: its name and labels.
fn series(metrics: &Metrics) -> BTreeSet<String> {
    metrics.0.iter().map(|sample| format!("{}{:?}", sample.name, sample.labels)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn r06_bad_requests_are_told_why_and_touch_nothing() {
    let limit = BODY_LIMIT.to_string();
    // With the labels of pods come rates of the engines, which are there from their second look on.
    let env = [
        ("AIBRIX_AUTH_BEARER_TOKEN", TOKEN),
        ("TANDEM_MAX_BODY_BYTES", limit.as_str()),
        ("TANDEM_METRIC_LABELS", "lean"),
    ];
    let (sandbox, client) = start(bare(&env)).await;
    let tandem = &sandbox.fleet.tandems[0];
    let mut known = BTreeSet::new();
    for (round, salt) in ["alpha", "beta-gamma"].into_iter().enumerate() {
        for case in table(salt) {
            let immediate = play(&client, &case).await;
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let headers: Vec<_> = immediate.headers.iter().map(|(key, value)| (key.clone(), text(value))).collect();
            check(&case, u16::try_from(immediate.status).unwrap(), &headers, &immediate.body);
            assert!(!immediate.details.is_empty(), "{}: Envoy's log needs a word", case.name);
        }
        // What clients write makes no series: the second round finds all of them there.
        tandem
            .wait_metrics(crate::harness::SOON, "all requests end", |metrics| {
                let ended = metrics.sum("gateway_request_total", &[]);
                (ended - ((round + 1) * table("").len()) as f64).abs() < 0.5
            })
            .await;
        let metrics = tandem.metrics().await;
        match round {
            0 => known = series(&metrics),
            _ => assert_eq!(series(&metrics).difference(&known).collect::<Vec<_>>(), Vec::<&String>::new()),
        }
        let failures = metrics.sum("gateway_request_model_fail_total", &[]);
        assert_eq!(failures, metrics.sum("gateway_request_total", &[]), "each is a failure, and one");
        assert_eq!(metrics.sum("gateway_request_model_fail_total", &[("status", "internal")]), 0.0);
        assert!(!metrics.has("gateway_request_model_success_total"));
        assert!(!metrics.has("gateway_prefill_request_fail_total"), "no engine is blamed");
        let models: BTreeSet<_> =
            metrics.matching("gateway_request_total", &[]).map(|sample| sample.labels["model"].clone()).collect();
        assert_eq!(models, ["_unknown", "m"].map(str::to_owned).into());
    }
    // A good request among them is served all the same.
    let head = chat_head().raw("authorization", format!("bearer {TOKEN}").as_bytes());
    let (stream, mutation) = super::routed(&client, head, &chat(false)).await;
    assert_eq!(mutation.header("target-pod"), Some(sandbox.decode[0].address().to_string()));
    stream.reset();
    assert_eq!(sandbox.prefill[0].records().len(), 1, "the bad ones reached no engine");
    assert!(sandbox.decode[0].records().is_empty());
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r06_bad_requests_through_envoy_and_the_front() {
    let limit = BODY_LIMIT.to_string();
    let env = [("AIBRIX_AUTH_BEARER_TOKEN", TOKEN), ("TANDEM_MAX_BODY_BYTES", limit.as_str())];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let fleet = FleetOptions { replicas: 1, env, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    for path in sandbox.paths() {
        // Lengths that lie are a matter of HTTP between client and server; the scripted Envoy tells them.
        for case in table("x").into_iter().filter(|case| !case.headers.iter().any(|(key, _)| *key == "content-length"))
        {
            let call = match case.method {
                "GET" => Call::get(&path, &case.path),
                "POST" => Call::post(&path, &case.path, case.body.clone().unwrap_or_default()),
                _ => continue,
            };
            let call = case.headers.iter().fold(call, |call, (name, value)| call.header(name, value));
            let answer = call.send().await;
            let status = answer.status.as_u16();
            let headers: Vec<_> = answer
                .headers
                .iter()
                .map(|(key, value)| (key.to_string(), value.to_str().expect("text").to_owned()))
                .collect();
            let body = answer.body().await;
            assert!(body.complete, "{}", case.name);
            check(&case, status, &headers, &body.bytes);
        }
    }
    assert!(sandbox.engines().all(|engine| engine.records().is_empty()));
    // Unusual is not bad: a body in chunks, with trailers behind it.
    for path in sandbox.paths() {
        let body = chat(false);
        let (one, two) = body.split_at(7);
        let mut connection = RawConnection::open(&path).await;
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\nconnection: close\r\n\
             content-type: application/json\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"
        );
        connection.send(head.as_bytes()).await;
        for part in [one, two] {
            connection.send(&[format!("{:x}\r\n", part.len()).as_bytes(), part, b"\r\n"].concat()).await;
        }
        connection.send(b"0\r\nx-sum: 1\r\n\r\n").await;
        let answer = String::from_utf8_lossy(&connection.read_to_end().await).into_owned();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_cannot_work_is_refused_with_a_text_that_says_so() {
    let (sandbox, client) = start(bare(&[])).await;
    let modes = [
        (BodySendMode::None, "NONE"),
        (BodySendMode::Streamed, "STREAMED"),
        (BodySendMode::FullDuplexStreamed, "FULL_DUPLEX_STREAMED"),
    ];
    let message = |request: Option<Head>, mode: BodySendMode| pb::ProcessingRequest {
        request: request.map(|head| pb::processing_request::Request::RequestHeaders(head.message(false))),
        protocol_config: Some(pb::ProtocolConfiguration { request_body_mode: mode as i32, ..Default::default() }),
        ..Default::default()
    };
    for (mode, name) in modes {
        let mut stream = client.open(&[]);
        stream.send_whole(message(Some(chat_head()), mode)).await;
        let immediate = stream.next().await.immediate();
        assert_eq!(immediate.status, 500);
        let text = immediate.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(text.contains(&format!("request_body_mode {name} ")) && text.contains("BUFFERED"), "{text}");
        assert!(matches!(stream.next().await, Reply::End(Code::Ok, _)));
    }
    // The supported modes go on.
    for mode in [BodySendMode::Buffered, BodySendMode::BufferedPartial] {
        let mut stream = client.open(&[]);
        stream.send_whole(message(Some(chat_head()), mode)).await;
        assert!(matches!(stream.next().await, Reply::RequestHeaders(_)));
        stream.reset();
    }
    let mut stream = client.open(&[]);
    stream.send_whole(message(None, BodySendMode::Buffered)).await;
    assert_eq!(stream.next().await.immediate().status, 500);
    // Each of them is a request that ended, like any other.
    let tandem = &sandbox.fleet.tandems[0];
    let metrics = tandem
        .wait_metrics(crate::harness::SOON, "six requests end", |metrics| {
            metrics.sum("gateway_request_total", &[]) > 5.5
        })
        .await;
    let status = [("status", "internal"), ("status_code", "500")];
    assert_eq!(metrics.sum("gateway_request_model_fail_total", &status), 4.0);
    assert!(sandbox.engines().all(|engine| engine.records().is_empty()));
    sandbox.close().await;
}
