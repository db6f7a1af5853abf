//! SGLang, cases 18 to 20 and 27: both legs at once, and what each carries.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use serde_json::{Value, json};

use super::only_work;
use crate::bodies::members::{PREFILL_FIELDS, members, raw, without};
use crate::bodies::wait_total;
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;
use crate::harness::within;

const CHAT: &str = "/v1/chat/completions";

/// What the gateway alone may say.
const OWNED: [&str; 4] = ["bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"];

/// What a prefill leg may differ in from the client's body.
fn on_prefill() -> Vec<&'static str> {
    PREFILL_FIELDS.into_iter().chain(OWNED).collect()
}

/// Checks both legs of the client's `sent` body and returns the room.
fn assert_legs(sandbox: &Sandbox, sent: &[u8], request_id: &str, host: &str) -> u64 {
    let (prefill, decode) = (only_work(&sandbox.prefill[0]), only_work(&sandbox.decode[0]));
    assert_eq!(without(&prefill.body, &on_prefill()), without(sent, &on_prefill()));
    assert_eq!(without(&decode.body, &OWNED), without(sent, &OWNED));
    let p = prefill.json();
    assert_eq!((&p["max_tokens"], &p["max_completion_tokens"], &p["stream"]), (&json!(1), &json!(1), &json!(false)));
    assert_eq!((&p["stream_options"], &p["min_tokens"]), (&Value::Null, &Value::Null));
    for name in OWNED {
        assert_eq!(raw(&prefill.body, name), raw(&decode.body, name), "{name}");
    }
    assert_eq!(p["bootstrap_host"], host);
    assert_eq!(p["bootstrap_port"], sandbox.prefill[0].bootstrap_port());
    let rid = p["rid"].as_str().expect("a rid");
    let nonce = rid.strip_prefix(request_id).and_then(|rest| rest.strip_prefix('-')).expect("a nonce");
    assert!(nonce.len() == 16 && nonce.bytes().all(|byte| byte.is_ascii_hexdigit()), "{rid}");
    let room = p["bootstrap_room"].as_u64().expect("a room");
    assert!((1..=i64::MAX as u64).contains(&room), "{room}");
    assert_eq!(prefill.header("x-request-id"), decode.header("x-request-id"));
    room
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_18_both_legs_at_once() {
    let sandbox = Sandbox::start(SandboxOptions::of(tandem_sim::EngineConfig::sglang)).await;
    let mut rooms = Vec::new();
    for path in sandbox.paths() {
        for stream in ["", r#","stream":true,"stream_options":{"include_usage":true},"min_tokens":2"#] {
            sandbox.clear();
            let body = format!(
                r#"{{"model":"m","seed":9007199254740993,"messages":[{{"role":"user","content":"hi"}}],"max_tokens":9{stream}}}"#
            );
            let hold = sandbox.decode[0].hold();
            let work = |engine: &tandem_sim::Engine| (engine.stats().computed_tokens, engine.stats().cache_hit_tokens);
            let before = work(&sandbox.prefill[0]);
            let call = tokio::spawn(Call::post(&path, CHAT, body.clone()).send());
            // Decode has its request before prefill has done anything, and prefill answers only when decode has asked.
            within("both are there", async {
                hold.wait_for(1).await;
                sandbox.prefill[0].wait_until(|prefill| prefill.stats().bootstrapping == 1).await;
            })
            .await;
            assert_eq!(work(&sandbox.prefill[0]), before);
            hold.release();
            let answer = within("the answer", call).await.unwrap();
            assert_eq!(answer.status, 200);
            assert_eq!((answer.header("target-pod"), answer.header("prefill-target-pod")), ("d0", "p0"));
            let request_id = answer.header("request-id").to_owned();
            if stream.is_empty() {
                assert_eq!(answer.json().await["usage"]["completion_tokens"], 9);
            } else {
                let (events, complete) = answer.events().collect().await;
                assert!(complete);
                assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
            }
            rooms.push(assert_legs(&sandbox, body.as_bytes(), &request_id, "127.0.0.1"));
        }
    }
    rooms.sort_unstable();
    rooms.dedup();
    assert_eq!(rooms.len(), 4, "no room is used twice");
    assert!(sandbox.engines().all(|engine| engine.records_for("/abort_request").is_empty()));
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_19_annotated_port_and_ipv6() {
    if std::net::TcpListener::bind(SocketAddr::from((Ipv6Addr::LOCALHOST, 0))).is_err() {
        eprintln!("skipped: this machine has no ::1");
        return;
    }
    let sandbox =
        Sandbox::start(SandboxOptions::of(|config| config.sglang().at(IpAddr::V6(Ipv6Addr::LOCALHOST), 0))).await;
    assert_ne!(sandbox.prefill[0].bootstrap_port(), 8998, "the annotation is not the default");
    for path in sandbox.paths() {
        sandbox.clear();
        let body = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":3}"#;
        let answer = Call::post(&path, CHAT, body).send().await;
        assert_eq!(answer.status, 200);
        let request_id = answer.header("request-id").to_owned();
        assert_legs(&sandbox, body.as_bytes(), &request_id, "::1");
        let bracketed = format!("[::1]:{}", sandbox.prefill[0].address().port());
        assert_eq!(only_work(&sandbox.prefill[0]).header("host"), Some(bracketed.as_str()));
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_20_what_a_client_says_about_the_handoff_is_replaced() {
    let sandbox = Sandbox::start(SandboxOptions::of(tandem_sim::EngineConfig::sglang)).await;
    let honest = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":3}"#;
    let forged = honest.replace(
        r#""max_tokens""#,
        r#""rid":"","bootstrap_room":0,"bootstrap_host":"2.2.2.2","bootstrap_port":1,"routed_dp_rank":7,"data_parallel_rank":7,"disagg_prefill_dp_rank":7,"max_tokens""#,
    );
    for path in sandbox.paths() {
        sandbox.clear();
        let call = Call::post(&path, CHAT, forged.clone()).header("x-data-parallel-rank", "7");
        let answer = call.header("x-override-rid", "mine").header("x-override-bootstrap-room", "1").send().await;
        assert_eq!(answer.status, 200);
        let request_id = answer.header("request-id").to_owned();
        assert_legs(&sandbox, honest.as_bytes(), &request_id, "127.0.0.1");
        for engine in [&sandbox.prefill[0], &sandbox.decode[0]] {
            let record = only_work(engine);
            let steering =
                record.headers.iter().any(|(name, _)| name.starts_with("x-override-") || name.contains("rank"));
            assert!(!steering, "{:?}", record.headers);
        }
        sandbox.clear();
        for (twice, key) in [
            (r#""rid":"a","r\u0069d":"b","max_tokens""#, "rid"),
            (r#""bootstrap_room":1,"bootstrap_room":1,"max_tokens""#, "bootstrap_room"),
        ] {
            let answer = Call::post(&path, CHAT, honest.replace(r#""max_tokens""#, twice)).send().await;
            assert_eq!(answer.status, 400);
            let error = answer.json().await["error"].clone();
            assert_eq!(error["type"], "invalid_request_error");
            assert_eq!(error["message"], format!("duplicate top-level key \"{key}\" in request body"));
        }
        assert!(sandbox.engines().all(|engine| engine.records().is_empty()));
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_27_generate_keeps_its_nested_limits() {
    let sandbox = Sandbox::start(SandboxOptions::of(tandem_sim::EngineConfig::sglang)).await;
    for path in sandbox.paths() {
        for (stream, input) in [("false", r#""text":"tell me""#), ("true", r#""input_ids":[5, 6, 7]"#)] {
            sandbox.clear();
            let params = r#"{"max_new_tokens" : 3,  "temperature":5e-1}"#;
            let body = format!(r#"{{"model":"m",{input},"sampling_params":{params},"stream":{stream}}}"#);
            let answer = Call::post(&path, "/generate", body.clone()).send().await;
            assert_eq!(answer.status, 200, "{body}");
            if stream == "true" {
                let (events, complete) = answer.events().collect().await;
                assert!(complete && events.last().is_some_and(|event| event == "[DONE]"), "{events:?}");
                assert_eq!(events.len(), 4);
            } else {
                assert_eq!(answer.json().await["meta_info"]["completion_tokens"], 3);
            }
            let (prefill, decode) = (only_work(&sandbox.prefill[0]), only_work(&sandbox.decode[0]));
            assert_eq!((prefill.path.as_str(), decode.path.as_str()), ("/generate", "/generate"));
            assert_eq!(without(&prefill.body, &on_prefill()), without(body.as_bytes(), &on_prefill()));
            assert_eq!(raw(&prefill.body, "sampling_params").as_deref(), Some(params));
            assert_eq!(raw(&prefill.body, "stream").as_deref(), Some("false"));
            assert_eq!(without(&decode.body, &OWNED), members(body.as_bytes()));
        }
    }
    // Its counts stand in `meta_info`.
    let asked = sandbox.paths().len() * 2;
    wait_total(&sandbox.fleet, "gateway_output_tokens_total", &[], (asked * 3) as f64).await;
    sandbox.close().await;
}
