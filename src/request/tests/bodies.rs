//! Which bodies are taken, which are refused, and what is read from them.

use proptest::prelude::*;

use super::super::scan::MAX_MEMBERS;
use super::super::{BodyError, Endpoint, PromptForm};
use super::{Bytes, ParsedBody, chat, parse};

const MESSAGES: &str = r#""messages":[{"role":"user","content":"secret prompt"}]"#;

#[test]
fn r06_malformed_bodies_are_refused_with_a_short_text() {
    let chat = Endpoint::ChatCompletions;
    let deep = format!("{{\"model\":\"m\",{MESSAGES},\"x\":{}", "[".repeat(200_000));
    let cases: [(&[u8], &str); 16] = [
        (b"", "it is empty"),
        (b" \n\t", "it is empty"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"\"secret prompt\"", "not a JSON object"),
        (b"17", "not a JSON object"),
        (b"secret prompt", "not valid JSON"),
        (b"{}", "\"model\" is required"),
        (b"{\"model\":1}", "\"model\" must be a string"),
        (b"{\"model\":\"\",\"messages\":[]}", "\"model\" must not be empty"),
        (b"{\"model\":null}", "\"model\" is required"),
        (b"{\"model\":\"m\",\"messages\":[{\"content\":\"secret prompt", "ends too early"),
        (b"{\"model\":\"m\",\"messages\":[{\"content\":\"secret prompt\xff\"}]}", "not valid UTF-8"),
        (b"\xef\xbb\xbf{\"model\":\"m\"}", "byte order mark"),
        (b"{\"model\":\"m\",\"messages\":[]} secret prompt", "line 1, column 29"),
        (deep.as_bytes(), "ends too early"),
    ];
    for (body, expected) in cases {
        let error = parse(chat, body).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(expected), "{text}");
        assert!(!text.contains("secret") && text.len() < 120, "{text}");
        let is_model = matches!(error, BodyError::NoModel(_));
        assert_eq!(is_model, expected.contains("model"), "{error:?}");
    }
}

#[test]
fn every_cut_of_a_body_is_refused() {
    let body = format!("{{\"model\":\"m\",{MESSAGES},\"n\":1.5e3}}");
    for end in 0..body.len() {
        assert!(parse(Endpoint::ChatCompletions, &body[..end]).is_err(), "{end}");
    }
    assert!(parse(Endpoint::ChatCompletions, &body).is_ok());
}

#[test]
fn required_fields_and_types_per_endpoint() {
    use Endpoint::*;
    let cases: [(Endpoint, &str, Option<&str>); 50] = [
        (Generate, r#""text":"a""#, None),
        (Generate, r#""input_ids":[1]"#, None),
        (Generate, r#""text":null,"input_embeds":[[0.1]]"#, None),
        (Generate, r#""prompt":"a""#, Some("\"text\", \"input_ids\" and \"input_embeds\" is required")),
        (Generate, r#""text":5"#, Some("\"text\" must be a string")),
        (Generate, r#""input_ids":[[1],"a"]"#, Some("\"input_ids\" must be a string")),
        (ChatCompletions, r#""messages":[]"#, None),
        (ChatCompletions, r#""messages":null"#, Some("\"messages\" is required")),
        (ChatCompletions, r#""messages":{}"#, Some("\"messages\" must be an array")),
        (ChatCompletions, r#""messages":"hi""#, Some("\"messages\" must be an array")),
        (ChatCompletions, r#""messages":[],"stream":null"#, None),
        (ChatCompletions, r#""messages":[],"stream":"true""#, Some("\"stream\" must be a boolean")),
        (ChatCompletions, r#""messages":[],"stream":1"#, Some("\"stream\" must be a boolean")),
        (Messages, r#""prompt":"x""#, Some("\"messages\" is required")),
        (Completions, r#""prompt":"""#, None),
        (Completions, r#""prompt":[]"#, None),
        (Completions, r#""prompt":[[]]"#, None),
        (Completions, r#""prompt":null"#, Some("\"prompt\" is required")),
        (Completions, r#""prompt":null,"prompt_embeds":"gAJ""#, None),
        (Completions, r#""prompt":1"#, Some("\"prompt\" must be a string, a list")),
        (Completions, r#""prompt":{}"#, Some("\"prompt\" must be a string, a list")),
        (Completions, r#""prompt":[1,"a"]"#, Some("\"prompt\" must be a string, a list")),
        (Completions, r#""prompt":[[1],2]"#, Some("\"prompt\" must be a string, a list")),
        (Completions, r#""prompt":[1.5]"#, Some("\"prompt\" must be a string, a list")),
        (Completions, r#""prompt":[[1],["a"]]"#, Some("\"prompt\" must be a string, a list")),
        (Completions, r#""prompt":[null]"#, Some("\"prompt\" must be a string, a list")),
        (Completions, r#""prompt":[true]"#, Some("\"prompt\" must be a string, a list")),
        (Responses, r#""input":"x""#, None),
        (Responses, r#""input":[{"role":"user","content":"x"}]"#, None),
        (Responses, r#""input":[ ]"#, Some("\"input\" must be a string or a non-empty array")),
        (Responses, r#""input":7"#, Some("\"input\" must be a string or a non-empty array")),
        (Responses, r#""messages":[]"#, Some("\"input\" is required")),
        (Embeddings, r#""input":"x""#, None),
        (Embeddings, r#""input":["x",[1,2]]"#, None),
        (Embeddings, r#""input":[{"type":"image_url","image_url":{"url":"u"}},{"text":"t"}]"#, None),
        (Embeddings, r#""messages":[{"role":"user","content":"x"}]"#, None),
        (Embeddings, r#""input":"""#, Some("\"input\" must not be empty")),
        (Embeddings, r#""input":[]"#, Some("\"input\" must not be empty")),
        (Embeddings, r#""input":["a",""]"#, Some("must not be empty at index 1")),
        (Embeddings, r#""input":"x","stream":true"#, Some("cannot be streamed")),
        (Rerank, r#""query":"q","documents":["d"]"#, None),
        (Rerank, r#""query":{"content":[]},"documents":{"content":[]}"#, None),
        (Rerank, r#""query":"","documents":["d"]"#, Some("\"query\" must not be empty")),
        (Rerank, r#""query":"q","documents":[]"#, Some("\"documents\" must be a non-empty array")),
        (Rerank, r#""query":"q","documents":"d""#, Some("\"documents\" must be a non-empty array")),
        (Classify, r#""input":["a","b"]"#, None),
        (Classify, r#""input":[]"#, Some("\"input\" must be a string or a non-empty array")),
        (ImagesGenerations, r#""prompt":"a cat""#, None),
        (ImagesGenerations, r#""prompt":["a cat"]"#, Some("\"prompt\" must be a string")),
        (VideoGenerations, r#""size":"1x1""#, Some("\"prompt\" is required")),
    ];
    for (endpoint, members, expected) in cases {
        let result = parse(endpoint, format!("{{\"model\":\"m\",{members}}}"));
        match expected {
            None => assert!(result.is_ok(), "{endpoint:?} {members}: {result:?}"),
            Some(text) => {
                let error = result.unwrap_err();
                assert!(matches!(&error, BodyError::Invalid(message) if message.contains(text)), "{members}: {error}");
            }
        }
    }
}

#[test]
fn r02_odd_optional_fields_never_fail() {
    for odd in [
        r#""stop":["a","b"]"#,
        r#""stop":null"#,
        r#""logprobs":null"#,
        r#""logprobs":true,"top_logprobs":3"#,
        r#""stream":null"#,
        r#""stream_options":null"#,
        r#""stream_options":[]"#,
        r#""n":null"#,
        r#""n":"two""#,
        r#""n":[]"#,
        r#""best_of":{}"#,
        r#""max_tokens":null"#,
        r#""max_tokens":-1"#,
        r#""max_tokens":1e400"#,
        r#""tools":null"#,
        r#""tools":[],"tool_choice":"none""#,
        r#""tool_choice":{"type":"function","function":{"name":"f"}}"#,
        r#""system":[{"type":"text","text":"s","cache_control":{"type":"ephemeral"}}]"#,
        r#""response_format":{"type":"json_schema","json_schema":{}}"#,
        r#""logit_bias":{"1":-100}"#,
        r#""metadata":{"a":null},"user":1"#,
        r#""prompt":{"id":"p"}"#,
        r#""messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"input_audio"}]}]"#,
        r#""messages":[{"role":"assistant","content":null,"tool_calls":[{"function":{"arguments":{"a":1}}}]}]"#,
        r#""messages":[{"role":5},null,"x",[],{}]"#,
        r#""messages":[{"role":"user","content":"\ud800 lone"}]"#,
        r#""\ud800":1,"":2"#,
    ] {
        let body = format!("{{\"model\":\"m\",{MESSAGES},{odd}}}");
        for endpoint in [Endpoint::ChatCompletions, Endpoint::Messages] {
            assert!(parse(endpoint, &body).is_ok(), "{odd}");
        }
    }
}

#[test]
fn numbers_are_read_as_engines_read_them() {
    let cases: [(&str, u64, Option<u64>); 13] = [
        (r#""x":1"#, 1, None),
        (r#""n":2"#, 2, None),
        (r#""n":2.0"#, 2, None),
        (r#""n":"2""#, 2, None),
        (r#""n":2.5"#, 1, None),
        (r#""n":0"#, 1, None),
        (r#""n":-3"#, 1, None),
        (r#""n":2,"best_of":5"#, 5, None),
        (r#""n":5,"best_of":2"#, 5, None),
        (r#""n":1,"n":4"#, 4, None),
        (r#""max_tokens":7,"max_completion_tokens":9"#, 1, Some(7)),
        (r#""max_completion_tokens":9"#, 1, Some(9)),
        (r#""max_tokens":18446744073709551615"#, 1, Some(u64::MAX)),
    ];
    for (members, choices, max_tokens) in cases {
        let body = chat(format!("{{\"model\":\"m\",{MESSAGES},{members}}}"));
        assert_eq!((body.choices, body.max_tokens), (choices, max_tokens), "{members}");
    }
    let limited = br#"{"model":"m","input":"x","messages":[],"max_output_tokens":5}"#;
    for (endpoint, expected) in [(Endpoint::Responses, Some(5)), (Endpoint::ChatCompletions, None)] {
        let body = ParsedBody::parse(endpoint, None, Bytes::from_static(limited)).unwrap();
        assert_eq!(body.max_tokens, expected, "{endpoint:?}");
    }
}

#[test]
fn generate_has_its_numbers_in_sampling_params() {
    for (members, choices, max_tokens) in [
        (r#""x":1"#, 1, None),
        (r#""sampling_params":{}"#, 1, None),
        (r#""sampling_params":null"#, 1, None),
        (r#""sampling_params":"x""#, 1, None),
        (r#""sampling_params":{"n":2,"max_new_tokens":7}"#, 2, Some(7)),
        (r#""sampling_params":{"n":2.0,"max_new_tokens":"7"}"#, 2, Some(7)),
        (r#""sampling_params":[{"n":1,"max_new_tokens":9},{"n":3},5]"#, 3, Some(9)),
        (r#""n":4,"max_tokens":5"#, 4, Some(5)),
    ] {
        let body = parse(Endpoint::Generate, format!("{{\"model\":\"m\",\"text\":\"a\",{members}}}")).unwrap();
        assert_eq!((body.choices, body.max_tokens), (choices, max_tokens), "{members}");
    }
}

#[test]
fn duplicates_read_the_last_and_a_second_model_is_refused() {
    let body = chat(
        r#"{"model":"m","stream":true,"messages":[{"content":"a"}],"str\u0065am":false,"messages":[{"content":"b"}]}"#,
    );
    assert!(!body.stream);
    assert_eq!(body.prompt.text, "b");
    assert_eq!(body.duplicate_of(&["max_tokens", "messages", "stream"]), Some("messages"));
    assert_eq!(body.duplicate_of(&["max_tokens"]), None);
    assert_eq!(body.field("stream"), Some(&b"false"[..]));
    let twice = r#"{"model":"m","messages":[],"mode\u006c":"m"}"#;
    let error = parse(Endpoint::ChatCompletions, twice).unwrap_err();
    assert_eq!(error, BodyError::Invalid("duplicate top-level key \"model\" in request body".into()));
}

#[test]
fn usage_option_and_model_are_decoded() {
    let body = chat(
        r#" { "model" : "m\u00e9\/1" , "messages":[], "stream":true, "stream_options":{"include_usage": true} } "#,
    );
    assert_eq!(&*body.model, "mé/1");
    assert!(body.stream && body.include_usage);
    assert_eq!(body.fields[0].key_span, 3..10);
    assert_eq!(&body.raw[body.fields[0].value_span.clone()], br#""m\u00e9\/1""#);
    let lone = parse(Endpoint::ChatCompletions, r#"{"model":"\ud800","messages":[]}"#).unwrap_err();
    assert!(matches!(lone, BodyError::NoModel(_)));
}

#[test]
fn members_are_bounded() {
    let members = |count: usize| {
        let filler: String = (0..count).flat_map(|at| [",\"k".to_owned(), at.to_string(), "\":0".to_owned()]).collect();
        parse(Endpoint::ChatCompletions, format!("{{\"model\":\"m\",\"messages\":[]{filler}}}"))
    };
    assert_eq!(members(MAX_MEMBERS - 2).unwrap().fields.len(), MAX_MEMBERS);
    assert!(members(MAX_MEMBERS - 1).unwrap_err().to_string().contains("more than 1024"));
}

#[test]
fn deep_nesting_does_not_overflow_the_stack() {
    let depth = 1_000_000;
    let deep = "[".repeat(depth) + &"]".repeat(depth);
    let body = format!("{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":{deep}}}],\"tools\":{deep}}}");
    let parsed = chat(&body);
    assert_eq!(parsed.prompt.text, deep);
    for members in [format!("\"prompt\":{deep}"), format!("\"prompt\":[{deep}]")] {
        assert!(parse(Endpoint::Completions, format!("{{\"model\":\"m\",{members}}}")).is_err());
    }
}

#[test]
fn multipart_bodies_carry_model_and_stream() {
    let body = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--b\r\n\
        Content-Disposition: form-data; name=\"stream\"\r\n\r\ntrue\r\n--b--\r\n";
    let raw = Bytes::copy_from_slice(body.as_bytes());
    let audio = Endpoint::AudioTranscriptions;
    let parsed = ParsedBody::parse(audio, Some("multipart/form-data; boundary=b"), raw.clone()).unwrap();
    assert_eq!((&*parsed.model, parsed.stream, parsed.prompt.form), ("whisper", true, PromptForm::None));
    assert!(parsed.fields.is_empty() && parsed.raw == raw);
    let error = ParsedBody::parse(audio, Some("application/json"), raw).unwrap_err();
    assert!(matches!(error, BodyError::Multipart(_)));
    let empty = Bytes::from_static(b"--b--");
    let error = ParsedBody::parse(audio, Some("multipart/form-data; boundary=b"), empty).unwrap_err();
    assert!(matches!(error, BodyError::NoModel(_)));
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        for endpoint in Endpoint::ALL {
            let _ = parse(endpoint, &bytes);
        }
    }

    #[test]
    fn no_json_like_text_panics(text in "[\\[\\]{}:,\"\\\\ a0umodelprsg1.é-]{0,60}") {
        for endpoint in Endpoint::ALL {
            let _ = parse(endpoint, format!("{{\"model\":\"m\",\"prompt\":{text},\"messages\":{text},\"input\":{text}}}"));
            let _ = parse(endpoint, &text);
        }
    }
}
