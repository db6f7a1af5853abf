//! What is not edited stays as it was: prompt forms, nested keys, numbers, escapes, white space.

use std::fmt::Write;

use super::members::{KV_REQUEST, assert_decode_leg, assert_prefill_leg, raw};
use super::{total, wait_total};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;
use crate::harness::within;

#[tokio::test(flavor = "multi_thread")]
async fn r01_four_prompt_forms() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let fleet = &sandbox.fleet;
    for path in sandbox.paths() {
        for (prompt, prompt_tokens) in [
            (r#""one \u0074ext""#, 2),
            (r#"[ "one text" ]"#, 2),
            ("[5, 6,7]", 3),
            ("[[ 5,6,7,8 ]]", 4),
            (r#"["two","texts, really"]"#, 1 + 4),
            ("[[1],[2,3]]", 1 + 2),
        ] {
            sandbox.clear();
            let body = format!(r#"{{"prompt" :{prompt}, "model":"m","max_tokens":3}}"#);
            let several = prompt.contains("two") || prompt.contains("[2,3]");
            let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
            let hold = if several { decode.hold() } else { prefill.hold() };
            let call = tokio::spawn(Call::post(&path, "/v1/completions", body.clone()).send());
            within("the request arrives", hold.wait_for(1)).await;
            // While the first leg runs, exactly one request is charged, to the pod that will answer.
            let gauge = if several { "tandem_pod_decode_running" } else { "tandem_pod_decode_pending" };
            assert_eq!(total(fleet, gauge, &[("pod_name", "d0")]).await, 1.0, "{prompt}");
            assert_eq!(total(fleet, gauge, &[]).await, 1.0, "{prompt}");
            let legs = if several { 0.0 } else { 1.0 };
            assert_eq!(total(fleet, "tandem_pod_prefill_outstanding", &[]).await, legs, "{prompt}");
            hold.release();
            let answer = within("the answer", call).await.unwrap();
            assert_eq!(answer.status, 200, "{prompt}");
            assert_eq!(answer.json().await["usage"]["prompt_tokens"], prompt_tokens, "{prompt}");
            let received = only(decode).body;
            assert_eq!(raw(&received, "prompt").as_deref(), Some(prompt));
            if several {
                assert_eq!(received, body);
                assert!(prefill.records().is_empty());
            } else {
                assert_prefill_leg(body.as_bytes(), &only(prefill).body);
                assert_decode_leg(body.as_bytes(), &received);
            }
            wait_total(fleet, gauge, &[], 0.0).await;
        }
    }
    sandbox.close().await;
}

/// 30 tools whose nested keys are in no order that a map would keep, and values that a parser would respell.
fn awkward_tools() -> String {
    let mut tools = String::new();
    for number in (0..30).rev() {
        if !tools.is_empty() {
            tools.push_str(" ,\n");
        }
        write!(
            tools,
            r#"{{"type":"function","function":{{"name":"t{number}","zeta":1.0,"alpha":1e3,"mid":[9223372036854775807,-0,1E+2],"parameters":{{"required":["z","a"],"properties":{{"z{number}":{{"type":"string","description":"caf\u00e9 \ud83d\ude00 \/"}},"a{number}":{{"type":"number"}}}} , "type":"object"}},"z{number}":null}}}}"#
        )
        .expect("a string");
    }
    tools
}

#[tokio::test(flavor = "multi_thread")]
async fn r03_byte_fidelity_and_a_hundred_repeats() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let tools = awkward_tools();
    // The fields that prefill changes are in the middle, among white space.
    let body = |limit: &str, stream: &str, options: &str, tail: &str| {
        format!(
            "\n{{ \"tools\":[{tools}],\t\"max_tokens\" : {limit} ,\"seed\": 9007199254740993,{options}\"stream\":{stream},\r\n \"messages\":[{{\"role\":\"user\",\"content\":\"na\\u00efve \\\"q\\\"\"}}], \"model\":\"m\", \"temperature\":0.10, \"unknown\":{{\"k\":1.50}}{tail} }}\n"
        )
    };
    let sent = body("4", "true", "\"stream_options\": {\"include_usage\":true},", "");
    let expected = body("1", "false", "", &format!(",\"max_completion_tokens\":1,\"kv_transfer_params\":{KV_REQUEST}"));
    let (head, end) = sent.split_at(sent.len() - 3);
    for path in sandbox.paths() {
        sandbox.clear();
        for _ in 0..100 {
            let answer = Call::post(&path, "/v1/chat/completions", sent.clone()).send().await;
            assert_eq!(answer.status, 200);
            assert!(answer.body().await.complete);
        }
        let (prefill, decode) = (sandbox.prefill[0].records(), sandbox.decode[0].records());
        assert_eq!((prefill.len(), decode.len()), (100, 100));
        for record in &prefill {
            assert_eq!(String::from_utf8_lossy(&record.body), expected);
        }
        for record in &decode {
            let params = raw(&record.body, "kv_transfer_params").expect("a hand-off");
            let expected = format!("{head},\"kv_transfer_params\":{params}{end}");
            assert_eq!(String::from_utf8_lossy(&record.body), expected);
        }
    }
    // The prompt was the same on all legs of all requests, so that the cache could serve it.
    let stats = sandbox.prefill[0].stats();
    assert!(stats.cache_hit_tokens > 190 * stats.computed_tokens / 10, "{stats:?}");
    sandbox.close().await;
}
