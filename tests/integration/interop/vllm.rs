//! vLLM, cases 1 to 5, 7 and 8: what each leg of an ordinary request carries.

use serde_json::{Value, json};
use tandem_sim::Fault;

use crate::bodies::members::{assert_decode_leg, assert_prefill_leg};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;

#[tokio::test(flavor = "multi_thread")]
async fn interop_01_plain_chat() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        sandbox.clear();
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 64});
        let answer = Call::post(&path, "/v1/chat/completions", body.to_string()).send().await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("target-pod"), "d0");
        assert_eq!(answer.header("prefill-target-pod"), "p0");
        assert_eq!(answer.header("routing-strategy"), "pd");
        let request_id = answer.header("request-id").to_owned();
        let answered = answer.json().await;
        assert_eq!(answered["usage"]["completion_tokens"], 64);

        let (prefill, decode) = (only(&sandbox.prefill[0]), only(&sandbox.decode[0]));
        let (p, d) = (prefill.json(), decode.json());
        assert_eq!(
            (&p["max_tokens"], &p["max_completion_tokens"], &p["stream"]),
            (&json!(1), &json!(1), &json!(false))
        );
        assert_eq!(
            p["kv_transfer_params"],
            json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                "remote_block_ids": null, "remote_host": null, "remote_port": null})
        );
        assert_eq!(d["kv_transfer_params"]["remote_host"], "127.0.0.1");
        assert_eq!((&d["max_tokens"], &d["stream"]), (&json!(64), &Value::Null));
        assert_eq!(prefill.header("x-request-id"), Some(request_id.as_str()));
        assert_eq!(decode.header("x-request-id"), Some(request_id.as_str()));
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_02_streaming_with_usage() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        sandbox.clear();
        let body = r#"{"model":"m","messages":[{"role":"user","content":"count"}],"max_tokens":7,"stream":true,"stream_options":{"include_usage":true}}"#;
        let answer = Call::post(&path, "/v1/chat/completions", body).send().await;
        assert_eq!(answer.status, 200);
        assert!(answer.header("content-type").starts_with("text/event-stream"));
        let (events, complete) = answer.events().collect().await;
        assert!(complete);
        let [.., usage, done] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!(done, "[DONE]");
        let usage: Value = serde_json::from_str(usage).unwrap();
        assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(7)));
        assert_prefill_leg(body.as_bytes(), &only(&sandbox.prefill[0]).body);
        assert_decode_leg(body.as_bytes(), &only(&sandbox.decode[0]).body);

        // Byte for byte, with all that a parser would tidy up.
        let written = ": hi\r\n\r\ndata:{\"choices\":[ ],\"usage\":null }\n\ndata: {\"x\":1e2}\n\n\ndata: [DONE]\n\n";
        sandbox.decode[0].script(Fault::on("/v1/").stream(vec![written.into()]));
        let answer = Call::post(&path, "/v1/chat/completions", body).send().await.body().await;
        assert_eq!((answer.bytes, answer.complete), (written.into(), true));
    }
    sandbox.close().await;
}

/// Cases that differ only in the limits which the client gives.
#[tokio::test(flavor = "multi_thread")]
async fn interop_03_04_05_limits_stay_with_the_decode_leg() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let chat = r#"{"model":"m","messages":[{"role":"user","content":"hello there"}],LIMITS}"#;
    let completion = r#"{"model":"m","prompt":"hello there",LIMITS}"#;
    for path in sandbox.paths() {
        for (api, form, limits, at_least, at_most) in [
            ("/v1/chat/completions", chat, r#""min_tokens":50,"max_tokens":100"#, 50, 100),
            ("/v1/chat/completions", chat, r#""max_completion_tokens":10"#, 10, 10),
            ("/v1/completions", completion, r#""max_tokens":64"#, 64, 64),
        ] {
            sandbox.clear();
            let body = form.replace("LIMITS", limits);
            let answer = Call::post(&path, api, body.clone()).send().await;
            assert_eq!(answer.status, 200, "{body}");
            let tokens = answer.json().await["usage"]["completion_tokens"].as_u64().unwrap();
            assert!((at_least..=at_most).contains(&tokens), "{tokens}: {body}");
            let (prefill, decode) = (only(&sandbox.prefill[0]), only(&sandbox.decode[0]));
            assert_eq!((prefill.path.as_str(), decode.path.as_str()), (api, api));
            assert_prefill_leg(body.as_bytes(), &prefill.body);
            assert_decode_leg(body.as_bytes(), &decode.body);
        }
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_07_duplicate_control_key() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        for (members, key) in [
            (r#""max_tokens":1,"max_tokens":9"#, "max_tokens"),
            (r#""max_tokens":1,"max\u005ftokens":9"#, "max_tokens"),
            (r#""stream":false,"stream":false"#, "stream"),
            (r#""kv_transfer_params":null,"\u006bv_transfer_params":{}"#, "kv_transfer_params"),
        ] {
            let body = format!(r#"{{"model":"m",{members},"messages":[{{"role":"user","content":"x"}}]}}"#);
            let answer = Call::post(&path, "/v1/chat/completions", body).send().await;
            assert_eq!(answer.status, 400, "{members}");
            let error = answer.json().await["error"].clone();
            assert_eq!(error["type"], "invalid_request_error");
            assert!(error["message"].as_str().unwrap().contains(&format!("\"{key}\"")), "{error}");
        }
        // Keys that the gateway does not control may be there twice: that is between the client and the engine.
        let body = r#"{"model":"m","seed":1,"seed":2,"messages":[{"role":"user","content":"x"}],"max_tokens":1}"#;
        assert!(sandbox.engines().all(|engine| engine.records().is_empty()));
        assert_eq!(Call::post(&path, "/v1/chat/completions", body).send().await.status, 200);
        sandbox.clear();
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_08_byte_fidelity() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        sandbox.clear();
        let body = r#"{"seed":9007199254740993,"tools":[{"z":1,"a":2}],"temperature":1e0,"x":1e2,"model":"m","messages":[{"role":"user","content":"caf\u00e9"}]}"#;
        let answer = Call::post(&path, "/v1/chat/completions", body).send().await;
        assert_eq!(answer.status, 200);
        for engine in sandbox.engines() {
            let received = String::from_utf8(only(engine).body.to_vec()).unwrap();
            for kept in [r#""seed":9007199254740993,"#, r#"[{"z":1,"a":2}]"#, r#""x":1e2,"#, r"caf\u00e9"] {
                assert!(received.contains(kept), "{kept} is not in {received}");
            }
        }
    }
    sandbox.close().await;
}
