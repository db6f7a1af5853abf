//! Legal bodies of the OpenAI, vLLM, SGLang and Anthropic schemas whose fields have odd shapes. What the engine thinks of
//! them is its own affair: the gateway passes them all on.

use tandem_sim::Fault;

use super::assert_no_panic;
use super::members::{assert_decode_leg, assert_prefill_leg, members};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const EMBEDDINGS: &str = "/v1/embeddings";

/// Members that join a plain chat.
const OF_CHAT: [&str; 33] = [
    r#""stop":["a","b"]"#,
    r#""stop":"a""#,
    r#""stop":null,"logprobs":null,"top_logprobs":null,"stream":null,"stream_options":null"#,
    r#""logprobs":true,"top_logprobs":20"#,
    r#""n":null,"seed":-1,"user":null"#,
    r#""seed":18446744073709551615"#,
    r#""temperature":"0.5""#,
    r#""temperature":1e-7,"top_p":1E0,"min_p":0"#,
    r#""max_tokens":"16""#,
    r#""max_tokens":null,"max_completion_tokens":16.0"#,
    r#""logit_bias":{"50256":-100,"1":1.5}"#,
    r#""response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":{"$defs":{"a":{"$ref":"%23"}}}}}"#,
    r#""response_format":null,"guided_json":"{\"type\":\"object\"}""#,
    r#""structured_outputs":{"choice":["a","b"],"regex":null}"#,
    r#""guided_choice":["ja","nein"],"guided_regex":"\\d+","guided_decoding_backend":"x""#,
    r#""tools":[],"tool_choice":"none""#,
    r#""tools":[{"type":"function","function":{"name":"f","parameters":null}}],"tool_choice":{"type":"function","function":{"name":"f"}}"#,
    r#""tools":[{"type":"custom","custom":{"name":"c","format":{"type":"grammar"}}}],"parallel_tool_calls":false"#,
    r#""functions":[{"name":"f"}],"function_call":"auto""#,
    r#""modalities":["text","audio"],"audio":{"voice":"alloy","format":"wav"}"#,
    r#""metadata":{"a":"b"},"store":true,"service_tier":"flex","prediction":{"type":"content","content":[{"type":"text","text":"x"}]}"#,
    r#""reasoning_effort":"high","verbosity":"low","web_search_options":{}"#,
    r#""chat_template_kwargs":{"enable_thinking":false,"depth":[[[]]]},"add_generation_prompt":true,"continue_final_message":false"#,
    r#""chat_template":"{% for m in messages %}{{ m }}{% endfor %}""#,
    r#""documents":[{"title":"t","text":"x"}],"mm_processor_kwargs":{"num_crops":4}"#,
    r#""stop_token_ids":[1,2],"bad_words":["x"],"include_stop_str_in_output":true,"ignore_eos":true"#,
    r#""priority":-3,"cache_salt":"s","request_id":"mine","return_token_ids":true,"return_tokens_as_token_ids":null"#,
    r#""vllm_xargs":{"k":[1,"a"]},"logits_processors":[{"qualname":"a.b","args":[]}]"#,
    r#""lora_path":["a",null],"session_params":{"id":"s"},"separate_reasoning":true,"rid":"x""#,
    r#""custom_logit_processor":"x","regex":"a|b","ebnf":"root ::= \"x\"","json_schema":"{}""#,
    r#""best_of":1,"use_beam_search":false,"length_penalty":1.0,"repetition_penalty":1.1,"truncate_prompt_tokens":-1"#,
    r#""prompt_logprobs":0,"echo":false,"skip_special_tokens":false,"spaces_between_special_tokens":true"#,
    r#""":1,"a b":2,"é":3,"\u0000":4,"MODEL":"x","Stream":"yes""#,
];

/// Messages of a chat.
const OF_MESSAGES: [&str; 14] = [
    r#"[{"role":"user","content":null}]"#,
    r#"[{"role":"user"}]"#,
    r#"[{"role":"user","content":[]}]"#,
    r#"[{"role":"user","content":["plain",{"type":"text","text":"x"},{"type":"image_url","image_url":"http://x"}]}]"#,
    r#"[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"AA==","format":"wav"}},{"type":"video_url","video_url":{"url":"u","detail":null}}]}]"#,
    r#"[{"role":"user","content":[{"type":"image_embeds","image_embeds":{"a":"b"}},{"type":"file","file":{"file_id":"f"}}]}]"#,
    r#"[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"r"}]}]"#,
    r#"[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"a":{"b":[1]}}}}]},{"role":"tool","content":{"object":"form"}}]"#,
    r#"[{"role":"assistant","tool_calls":null,"function_call":{"name":"f","arguments":"x"},"refusal":null,"audio":{"id":"a"}}]"#,
    r#"[{"role":"assistant","content":"a","reasoning_content":"b","reasoning":{"x":1}},{"role":"user","content":"go on"}]"#,
    r#"[{"role":"developer","content":"d","name":"n"},{"role":"custom-role","content":5}]"#,
    r#"[{"role":"system","content":[{"type":"text","text":"s","cache_control":{"type":"ephemeral"}}]},{"role":"user","content":"x"}]"#,
    r#"[{"content":"no role"},"a string",7,null,[[]]]"#,
    r#"[{"role":"user","content":"\ud800 lone","role":"user"},{"role":"user","content":""}]"#,
];

/// Whole bodies of the other endpoints, less the model.
const OTHERS: [(&str, &str); 25] = [
    (COMPLETIONS, r#""prompt":"","suffix":null,"echo":true,"logprobs":5"#),
    (COMPLETIONS, r#""prompt":[""]"#),
    (COMPLETIONS, r#""prompt":[1],"logprobs":null,"best_of":null"#),
    (COMPLETIONS, r#""prompt":[[0,4294967295]],"add_special_tokens":false"#),
    (COMPLETIONS, r#""prompt":null,"prompt_embeds":"AAAA""#),
    (COMPLETIONS, r#""prompt_embeds":["AAAA"],"max_tokens":0"#),
    (COMPLETIONS, r#""prompt":"x","stream":false,"stop":[],"logit_bias":null"#),
    (COMPLETIONS, r#""prompt":"x","lora_path":"a","return_hidden_states":true,"input_ids":[1]"#),
    (RESPONSES, r#""input":"hi","instructions":null,"previous_response_id":null,"max_output_tokens":5"#),
    (
        RESPONSES,
        r#""input":[{"role":"user","content":[{"type":"input_text","text":"x"},{"type":"input_image","image_url":"u"}]}]"#,
    ),
    (
        RESPONSES,
        r#""input":[{"type":"function_call","call_id":"1","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"1","output":[]}]"#,
    ),
    (
        RESPONSES,
        r#""input":[{"type":"reasoning","summary":[],"encrypted_content":null},{"type":"item_reference","id":"i"}],"include":[]"#,
    ),
    (
        RESPONSES,
        r#""input":"x","tools":[{"type":"mcp","server_url":"u"}],"text":{"format":{"type":"text"}},"reasoning":{"effort":null},"background":false"#,
    ),
    (MESSAGES, r#""max_tokens":5,"system":"s","messages":[{"role":"user","content":"x"}],"stop_sequences":["a"]"#),
    (
        MESSAGES,
        r#""max_tokens":5,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":[]}]}]"#,
    ),
    (
        MESSAGES,
        r#""max_tokens":5,"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"h","signature":"s"}]}],"thinking":{"type":"enabled","budget_tokens":1},"metadata":null"#,
    ),
    (EMBEDDINGS, r#""input":["a","b"],"encoding_format":"base64","dimensions":8"#),
    (EMBEDDINGS, r#""input":[[1,2],[3]],"user":null"#),
    (EMBEDDINGS, r#""input":[1,2,3],"truncate_prompt_tokens":null"#),
    (EMBEDDINGS, r#""input":[{"text":"x","image":"data:x"}]"#),
    (EMBEDDINGS, r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]"#),
    ("/v1/rerank", r#""query":"q","documents":["a",{"text":"b"}],"top_n":1,"return_documents":null"#),
    (
        "/v1/rerank",
        r#""query":{"content":[{"type":"text","text":"q"}]},"documents":{"content":[{"type":"image_url"}]}"#,
    ),
    ("/v1/classify", r#""input":["a",5]"#),
    ("/v1/images/generations", r#""prompt":"a cat","n":1,"size":"auto","background":null"#),
];

fn corpus() -> Vec<(&'static str, String)> {
    let chat = |messages: &str, member: &str| (CHAT, format!(r#"{{"model":"m","messages":{messages},{member}}}"#));
    let of_chat = OF_CHAT.iter().map(|member| chat(r#"[{"role":"user","content":"x"}]"#, member));
    let of_messages = OF_MESSAGES.iter().map(|messages| chat(messages, r#""max_tokens":1"#));
    let others = OTHERS.iter().map(|(path, members)| (*path, format!(r#"{{"model":"m",{members}}}"#)));
    of_chat.chain(of_messages).chain(others).collect()
}

const ANSWER: &str = r#"{"id":"x","object":"any","choices":[],"kv_transfer_params":null}"#;

#[tokio::test(flavor = "multi_thread")]
async fn r02_odd_shapes_reach_a_combined_engine_untouched() {
    let sandbox = Sandbox::start(SandboxOptions {
        pairs: 0,
        combined: 1,
        engine: |mut config| {
            config.strict = false;
            config
        },
        ..SandboxOptions::default()
    })
    .await;
    let engine = &sandbox.combined[0];
    engine.script(Fault::on("/v1/").answer(200, "application/json", ANSWER).always());
    for path in sandbox.paths() {
        for (api, body) in corpus() {
            sandbox.clear();
            let answer = Call::post(&path, api, body.clone()).send().await;
            let (status, answer) = (answer.status, answer.body().await.bytes);
            assert_eq!((status.as_u16(), &*answer), (200, ANSWER.as_bytes()), "{api} {body}");
            assert_eq!(only(engine).body, body);
            assert_eq!(only(engine).path, api);
        }
    }
    assert_no_panic(&sandbox).await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r02_odd_shapes_reach_both_legs_of_a_pair() {
    let sandbox = Sandbox::start(SandboxOptions {
        engine: |mut config| {
            config.strict = false;
            config
        },
        ..SandboxOptions::default()
    })
    .await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    let handoff = r#"{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_host":"h","remote_port":1}"#;
    prefill.script(Fault::on("/v1/").answer(200, "application/json", ANSWER.replace("null", handoff)).always());
    decode.script(Fault::on("/v1/").answer(200, "application/json", ANSWER).always());
    for path in sandbox.paths() {
        for (api, body) in corpus() {
            sandbox.clear();
            let answer = Call::post(&path, api, body.clone()).send().await;
            assert_eq!(answer.status, 200, "{api} {body}");
            // What only the prefill pod could tell is asked of the decode pod alone.
            let whole = [r#""prompt_logprobs":0"#, r#""echo":true,"logprobs":5"#];
            match api {
                CHAT | COMPLETIONS if whole.iter().any(|field| body.contains(field)) => {
                    assert!(prefill.records().is_empty());
                    assert_eq!(members(&only(decode).body), members(body.as_bytes()));
                }
                CHAT | COMPLETIONS | MESSAGES => {
                    assert_prefill_leg(body.as_bytes(), &only(prefill).body);
                    assert_decode_leg(body.as_bytes(), &only(decode).body);
                }
                RESPONSES => assert_decode_leg(body.as_bytes(), &only(decode).body),
                // What generates nothing has no prefill leg.
                _ => {
                    assert!(prefill.records().is_empty());
                    assert_eq!(members(&only(decode).body), members(body.as_bytes()));
                }
            }
        }
    }
    assert_no_panic(&sandbox).await;
    sandbox.close().await;
}
