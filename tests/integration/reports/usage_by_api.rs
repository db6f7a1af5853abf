//! The Messages API counts what the prompt cache had beside `input_tokens`; chat and Responses count it inside.

use bytes::Bytes;
use tandem_sim::Fault;

use crate::bodies::wait_total;
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;

const MESSAGES: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":9"#;
const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}]"#;
const RESPONSES: &str = r#"{"model":"m","input":"x""#;

/// Path, body without its end, the whole answer, the events of a stream. All mean 648 and 15 tokens.
const ANSWERS: [(&str, &str, &str, &str); 3] = [
    (
        "/v1/messages",
        MESSAGES,
        r#"{"type":"message","content":[],"usage":{"input_tokens":8,"cache_creation_input_tokens":40,"cache_read_input_tokens":600,"output_tokens":15}}"#,
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":8,\"cache_creation_input_tokens\":40,\"cache_read_input_tokens\":600,\"output_tokens\":1}}}\n\n\
         event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":15}}\n\n\
         event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    ),
    (
        "/v1/chat/completions",
        CHAT,
        r#"{"choices":[],"usage":{"prompt_tokens":648,"prompt_tokens_details":{"cached_tokens":600},"completion_tokens":15,"total_tokens":663}}"#,
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":648,\"prompt_tokens_details\":{\"cached_tokens\":600},\"completion_tokens\":15,\"total_tokens\":663}}\n\ndata: [DONE]\n\n",
    ),
    (
        "/v1/responses",
        RESPONSES,
        r#"{"object":"response","usage":{"input_tokens":648,"input_tokens_details":{"cached_tokens":600},"output_tokens":15,"total_tokens":663}}"#,
        "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":648,\"input_tokens_details\":{\"cached_tokens\":600},\"output_tokens\":15,\"total_tokens\":663}}}\n\n",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_counts_with_what_the_cache_had_of_it() {
    let sandbox = Sandbox::start(SandboxOptions { pairs: 0, combined: 1, ..SandboxOptions::default() }).await;
    let mut requests = 0.0;
    for base in sandbox.paths() {
        for (path, body, whole, events) in ANSWERS {
            for stream in [false, true] {
                let fault = Fault::on(path);
                sandbox.combined[0].script(if stream {
                    fault.stream(vec![Bytes::from_static(events.as_bytes())])
                } else {
                    fault.answer(200, "application/json", whole)
                });
                let answer = Call::post(&base, path, format!("{body},\"stream\":{stream}}}")).send().await;
                assert_eq!(answer.status, 200, "{path}");
                assert!(answer.body().await.complete);
                requests += 1.0;
                println!("{base}{path} stream={stream}");
                let model = [("model", "m")];
                wait_total(&sandbox.fleet, "gateway_input_tokens_total", &model, 648.0 * requests).await;
                wait_total(&sandbox.fleet, "gateway_output_tokens_total", &model, 15.0 * requests).await;
            }
        }
    }
    // The log says the same.
    let logs: String = sandbox.fleet.tandems.iter().map(|tandem| tandem.process().stderr()).collect();
    assert_eq!(logs.matches("prompt_tokens=648 completion_tokens=15").count(), 12, "{logs}");
    sandbox.close().await;
}
