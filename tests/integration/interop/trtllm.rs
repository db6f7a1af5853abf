//! TensorRT-LLM, cases 28 to 31 and 35: the context worker first.

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Fault};

use super::{only_work, work};
use crate::bodies::members::{PREFILL_FIELDS, raw, without};
use crate::bodies::{total, wait_total};
use crate::harness::engines::{Sandbox, SandboxOptions, start_engine};
use crate::harness::http::{Call, base};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// What a context leg may differ in from the client's body.
fn on_context() -> Vec<&'static str> {
    PREFILL_FIELDS.into_iter().chain(["disaggregated_params"]).collect()
}

fn number(record: &tandem_sim::Record, name: &str) -> String {
    raw(raw(&record.body, "disaggregated_params").expect("a hand-off").as_bytes(), name).expect("a number")
}

fn trtllm() -> SandboxOptions {
    SandboxOptions::of(tandem_sim::EngineConfig::trtllm)
}

/// What one worker without a split would answer.
async fn plain_answer(plain: &Engine, api: &str, body: &str) -> Value {
    Call::post(&base(plain.address()), api, body.to_owned()).send().await.json().await
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_28_29_context_first() {
    let sandbox = Sandbox::start(trtllm()).await;
    let plain = start_engine(EngineConfig::combined("m").trtllm()).await;
    let chat = r#"{"model":"m","seed":9007199254740993,"messages":[{"role":"user","content":"hello"}],"max_completion_tokens":32}"#;
    let text = r#"{"model":"m","prompt":"hello there","max_tokens":6,"min_tokens":2}"#;
    for path in sandbox.paths() {
        for (api, body, ids, limit) in [
            (CHAT, chat, "prompt_token_ids", 32),
            ("/v1/completions?x=1", text, "prompt", 6),
            (TEXT, text, "prompt", 6),
        ] {
            sandbox.clear();
            let answer = Call::post(&path, api, body).send().await;
            assert_eq!(answer.status, 200, "{api}");
            assert_eq!((answer.header("target-pod"), answer.header("prefill-target-pod")), ("d0", "p0"));
            let answer = answer.json().await;
            assert_eq!(answer["usage"]["completion_tokens"], limit);
            assert_eq!(
                answer["choices"][0].get("text"),
                plain_answer(&plain, TEXT, body).await["choices"][0].get("text")
            );

            let (context, generation) = (only_work(&sandbox.prefill[0]), only_work(&sandbox.decode[0]));
            assert_eq!((context.path.as_str(), generation.path.as_str()), (api, api));
            let c = context.json();
            assert_eq!((&c["max_tokens"], &c["stream"]), (&json!(1), &json!(false)));
            assert_eq!(
                (c.get("max_completion_tokens"), c.get("min_tokens"), c.get("stream_options")),
                (None, None, None)
            );
            assert_eq!(without(&context.body, &on_context()), without(body.as_bytes(), &on_context()));
            let id = number(&context, "disagg_request_id");
            assert_eq!(c["disaggregated_params"].as_object().unwrap().len(), 2);
            assert_eq!(c["disaggregated_params"]["request_type"], "context_only");
            assert!((1 << 42..=i64::MAX as u64).contains(&id.parse().unwrap()), "{id}");

            assert_eq!(number(&generation, "disagg_request_id"), id, "digit for digit");
            let g = generation.json();
            assert_eq!(g["disaggregated_params"]["request_type"], "generation_only");
            for relayed in ["ctx_request_id", "first_gen_tokens", "encoded_opaque_state"] {
                assert!(!g["disaggregated_params"][relayed].is_null(), "{relayed}");
            }
            assert!(g[ids].as_array().is_some_and(|ids| !ids.is_empty() && ids.iter().all(Value::is_u64)), "{g}");
            let written = ["disaggregated_params", ids];
            assert_eq!(without(&generation.body, &written), without(body.as_bytes(), &written));
            assert_eq!(context.header("x-request-id"), generation.header("x-request-id"));
        }
    }
    assert_eq!(sandbox.decode[0].stats().computed_tokens, 0, "generation read what the context worker wrote");
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_30_the_first_token_is_the_last() {
    let sandbox = Sandbox::start(trtllm()).await;
    let mut served = 0.0;
    for path in sandbox.paths() {
        for (api, prompt) in [(CHAT, r#""messages":[{"role":"user","content":"x"}]"#), (TEXT, r#""prompt":"x""#)] {
            for rest in ["", r#","stream":true"#, r#","stream":true,"stream_options":{"include_usage":true}"#] {
                sandbox.clear();
                sandbox.prefill[0].script(Fault::on("/v1/").ends_at_once());
                let body = format!(r#"{{"model":"m",{prompt},"max_tokens":9{rest}}}"#);
                let answer = Call::post(&path, api, body.clone()).send().await;
                assert_eq!(answer.status, 200, "{body}");
                assert_eq!((answer.header("target-pod"), answer.header("prefill-target-pod")), ("", "p0"), "{body}");
                assert!(!answer.header("request-id").is_empty());
                let streamed = answer.header("content-type").starts_with("text/event-stream");
                assert_eq!(streamed, !rest.is_empty());
                if streamed {
                    let (events, complete) = answer.events().collect().await;
                    assert!(complete);
                    let usage = rest.contains("usage");
                    assert_eq!(events.len(), if usage { 4 } else { 3 }, "{events:?}");
                    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
                    let of = |at: usize| serde_json::from_str::<Value>(&events[at]).unwrap();
                    let (first, last) = (of(0)["choices"][0].clone(), of(1)["choices"][0].clone());
                    let token = if api == CHAT { &first["delta"]["content"] } else { &first["text"] };
                    assert!(token.as_str().is_some_and(|token| !token.is_empty()), "{events:?}");
                    assert_eq!((&first["finish_reason"], &last["finish_reason"]), (&Value::Null, &json!("stop")));
                    assert!(!usage || of(2)["usage"]["completion_tokens"] == 1, "{events:?}");
                    assert!(
                        events.iter().all(|event| !event.contains("disagg") && !event.contains("prompt_token_ids"))
                    );
                } else {
                    let answer = answer.json().await;
                    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
                    assert_eq!(answer["usage"]["completion_tokens"], 1);
                    assert_eq!(answer.get("prompt_token_ids"), None);
                    assert_eq!(answer["choices"][0].get("disaggregated_params"), None);
                }
                only_work(&sandbox.prefill[0]);
                assert!(sandbox.decode[0].records().is_empty(), "{body}");
                served += 1.0;
            }
        }
    }
    wait_total(&sandbox.fleet, "gateway_request_model_success_total", &[], served).await;
    assert_eq!(sandbox.prefill[0].stats().pinned_requests, 0);
    sandbox.close().await;
}

/// What a context worker answers, with an id of its own.
fn context_answer(ids: &str, reason: &str) -> String {
    format!(
        r#"{{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":"a"}},"finish_reason":"{reason}","disaggregated_params":{{"request_type":"context_only","first_gen_tokens":[7],{ids},"encoded_opaque_state":"AAAA","draft_tokens":null}}}}],"prompt_token_ids":[1,2]}}"#
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_31_r34_the_context_workers_ids_count() {
    let sandbox = Sandbox::start(trtllm()).await;
    let (context, generation) = (&sandbox.prefill[0], &sandbox.decode[0]);
    let body = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":9}"#;
    let own = "9223372036854775807";
    for path in sandbox.paths() {
        sandbox.clear();
        let ids = format!(r#""ctx_request_id":9007199254740993,"disagg_request_id":{own}"#);
        context.script(Fault::on("/v1/").answer(200, "application/json", context_answer(&ids, "length")));
        generation.script(Fault::on("/v1/").answer(200, "application/json", r#"{"choices":[]}"#));
        assert_eq!(Call::post(&path, CHAT, body).send().await.status, 200);
        assert_ne!(number(&only_work(context), "disagg_request_id"), own);
        let generation = only_work(generation);
        assert_eq!(number(&generation, "disagg_request_id"), own);
        assert_eq!(number(&generation, "ctx_request_id"), "9007199254740993");
        assert_eq!(raw(&generation.body, "prompt_token_ids").as_deref(), Some("[1,2]"));
    }
    // No id although there is something to continue: the worker's mistake. So is a prompt that it gave up.
    for path in sandbox.paths() {
        for (ids, reason) in [
            (r#""ctx_request_id":null,"disagg_request_id":null"#, "length"),
            (r#""ctx_request_id":7.5"#, "length"),
            (r#""ctx_request_id":7"#, "cancelled"),
        ] {
            sandbox.clear();
            context.script(Fault::on("/v1/").answer(200, "application/json", context_answer(ids, reason)));
            let answer = Call::post(&path, CHAT, body).send().await;
            assert_eq!(answer.status, 502, "{ids} {reason}");
            assert_eq!(answer.header("x-error-pd-prefill"), "true");
            assert!(generation.records().is_empty());
        }
    }
    let failed = total(&sandbox.fleet, "gateway_pd_prefill_failure_total", &[("class", "bad_response")]).await;
    assert_eq!(failed, 6.0);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_34_a_failing_context_worker_leaves_generation_alone() {
    let sandbox = Sandbox::start(trtllm()).await;
    let body = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":9}"#;
    for path in sandbox.paths() {
        for (status, seen) in [(400, 400), (404, 404), (500, 503), (503, 503)] {
            sandbox.clear();
            let said = r#"{"object":"error","message":"no","type":"BadRequestError","param":null,"code":400}"#;
            sandbox.prefill[0].script(Fault::on("/v1/").answer(status, "application/json", said));
            let answer = Call::post(&path, CHAT, body).send().await;
            assert_eq!((answer.status.as_u16(), answer.header("x-error-pd-prefill")), (seen, "true"));
            only_work(&sandbox.prefill[0]);
            assert!(sandbox.decode[0].records().is_empty());
        }
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_35_a_foreign_field_is_the_clients_mistake() {
    for style in ["context_first", "generation_first"] {
        let sandbox = Sandbox::start(trtllm().env(&[("AIBRIX_TRT_SCHEDULE_STYLE", style)])).await;
        let foreign = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"kv_transfer_params":{"do_remote_prefill":true},"max_tokens":9}"#;
        for path in sandbox.paths() {
            sandbox.clear();
            let answer = Call::post(&path, CHAT, foreign).send().await;
            assert_eq!(answer.status, 400, "{style}");
            let message = answer.json().await["error"].to_string();
            assert!(message.contains("kv_transfer_params"), "{message}");
            // With both legs out, the one that answers first ends the other, perhaps before that is sent.
            let asked = [work(&sandbox.prefill[0]), work(&sandbox.decode[0])].concat();
            assert!(!asked.is_empty());
            for leg in asked.iter().filter(|leg| leg.status.is_some()) {
                assert_eq!(raw(&leg.body, "kv_transfer_params").as_deref(), Some(r#"{"do_remote_prefill":true}"#));
            }
        }
        sandbox.close().await;
    }
}
