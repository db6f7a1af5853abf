//! A context worker's answer as the client's, when the first token was the last one.

use serde_json::{Value, json};

use super::*;

const HANDOFF: &str = r#"{"request_type":"context_only","first_gen_tokens":[2],"ctx_request_id":null}"#;

fn finished(body: &ParsedBody, answer: &str) -> Finished {
    match merge(body, answer.as_bytes()).unwrap() {
        Merged::Finished(finished) => finished,
        Merged::Decode(body, _) => panic!("{body:?}"),
    }
}

/// The events of a stream; the last one must be its end.
fn events(finished: &Finished) -> Vec<Value> {
    assert_eq!(finished.content_type, "text/event-stream; charset=utf-8");
    let whole = text(&finished.body).strip_suffix("data: [DONE]\n\n").expect("the end of a stream");
    let events = whole.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").expect("an event"));
    events.map(|event| serde_json::from_str(event).unwrap()).collect()
}

#[test]
fn interop_30_the_answer_is_the_context_workers_without_its_handoff() {
    let kept = r#"{ "id":"x","object":"chat.completion","created":9007199254740993,"choices": [ {"index":0,"message":{"role":"assistant","content":"\u00e9"},"finish_reason":"stop"} ],"usage":{"prompt_tokens":2,"completion_tokens":1}}"#;
    let answer = kept
        .replace(r#""stop"}"#, &format!(r#""stop","disaggregated_params":{HANDOFF}}}"#))
        .replace(r#""usage""#, r#""prompt_token_ids":[1,2],"usage""#)
        .replace(r#""created""#, r#""disaggregated_params":null,"created""#);
    let expected = Finished { body: Bytes::from_static(kept.as_bytes()), content_type: "application/json" };
    assert_eq!(finished(&chat(""), &answer), expected);
    // Nothing to take away, nothing changed; several choices and odd ones included.
    for same in [kept, r#"{"choices":[{"finish_reason":"tool_calls"},5,null,[],{"a":1}]}"#] {
        assert_eq!(finished(&chat(""), same).body, same);
    }
    let two = format!(
        r#"{{"choices":[{{"disaggregated_params":1,"finish_reason":"stop"}} , {{"disaggregated_params":{HANDOFF}}}]}}"#
    );
    assert_eq!(finished(&chat(""), &two).body, r#"{"choices":[{"finish_reason":"stop"} , {}]}"#);
}

#[test]
fn interop_30_a_streaming_chat_client_gets_the_token_the_end_and_the_usage() {
    let answer = format!(
        r#"{{"id":"x","object":"chat.completion","created":7,"model":"m","system_fingerprint":null,"choices":[{{"index":0,"message":{{"role":"assistant","content":"é\n\ndata: [DONE]","reasoning_content":null,"tool_calls":[]}},"logprobs":{{"content":[1]}},"finish_reason":"stop","stop_reason":"x","disaggregated_params":{HANDOFF}}}],"usage":{{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}},"prompt_token_ids":[1,2]}}"#
    )
    .replace("é\n\n", "é\\n\\n");
    let frame = |choices: Value| json!({"id": "x", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": choices});
    let mut expected = vec![
        frame(json!([{"index": 0, "delta": {"role": "assistant", "content": "é\n\ndata: [DONE]"},
            "logprobs": {"content": [1]}, "finish_reason": null}])),
        frame(json!([{"index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop", "stop_reason": "x"}])),
    ];
    assert_eq!(events(&finished(&chat(r#","stream":true"#), &answer)), expected);
    let mut usage = frame(json!([]));
    usage["usage"] = json!({"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3});
    expected.push(usage);
    let asked = chat(r#","stream":true,"stream_options":{"include_usage":true}"#);
    assert_eq!(events(&finished(&asked, &answer)), expected);
}

#[test]
fn interop_30_a_streaming_completions_client_too() {
    let answer = format!(
        r#"{{"id":"x","object":"text_completion","created":7,"model":"m","choices":[{{"index":0,"text":" a","logprobs":null,"finish_reason":"stop","disaggregated_params":{HANDOFF}}},{{"index":1,"finish_reason":"stop"}}],"prompt_token_ids":[1]}}"#
    );
    let body = completions(r#","stream":true,"stream_options":{"include_usage":true}"#);
    let frame = |choice: Value| json!({"id": "x", "object": "text_completion", "created": 7, "model": "m", "choices": [choice]});
    let end = |index| frame(json!({"index": index, "text": "", "logprobs": null, "finish_reason": "stop"}));
    let token = |index, text| frame(json!({"index": index, "text": text, "logprobs": null, "finish_reason": null}));
    assert_eq!(events(&finished(&body, &answer)), [token(0, " a"), end(0), token(1, ""), end(1)]);
}

#[test]
fn interop_30_odd_messages_still_make_a_stream() {
    let stream = chat(r#","stream":true"#);
    for (message, delta) in [
        ("null", json!({})),
        ("5", json!({})),
        (r#"{"content":null}"#, json!({})),
        (r#"{"content":"","content":"a"}"#, json!({"content": "a"})),
        (r#"{"role":"assistant","x\"y":1}"#, json!({"role": "assistant", "x\"y": 1})),
        (
            r#"{"tool_calls":[{"id":"c","function":{}},{"id":"d"},7]}"#,
            json!({"tool_calls": [{"id": "c", "function": {}, "index": 0}, {"id": "d", "index": 1}, 7]}),
        ),
    ] {
        let answer = format!(r#"{{"choices":[{{"message":{message},"finish_reason":"tool_calls"}}]}}"#);
        let events = events(&finished(&stream, &answer));
        assert_eq!(events.len(), 2, "{message}");
        assert_eq!((&events[0]["choices"][0]["delta"], &events[0]["choices"][0]["index"]), (&delta, &json!(0)));
        assert_eq!(events[1]["choices"][0]["finish_reason"], json!("tool_calls"));
    }
}
