//! Parts that are no text, and what makes a KV cache another one without changing the text.

use super::super::{Endpoint, NonText};
use super::{chat, parse};

/// As a PNG of 1.9 MB comes in base64.
fn image() -> String {
    format!("data:image/png;base64,{}", "iVBORw0KGgo".repeat(230_000))
}

fn content(parts: &str) -> super::super::ParsedBody {
    chat(format!(r#"{{"model":"m","messages":[{{"role":"user","content":{parts}}}]}}"#))
}

#[test]
fn an_image_is_no_text_and_counts_as_one_part() {
    let part = format!(r#"{{"type":"image_url","image_url":{{"url":"{}"}}}}"#, image());
    let body = content(&format!(r#"[{{"type":"text","text":"what is this?"}},{part}]"#));
    assert_eq!(body.prompt.non_text, NonText { parts: 1, bytes: part.len() });
    assert_eq!(body.prompt.text, r#"[{"type":"text","text":"what is this?"},]"#);
    assert!(body.prompt.prefix_key.len() < 100, "{}", body.prompt.prefix_key.len());
    let rest = body.raw.len() - part.len();
    assert_eq!(body.estimated_tokens(1000), rest as u64 / 4 + 1000);
    assert_eq!(body.estimated_tokens(0), rest as u64 / 4);
}

#[test]
fn what_is_no_text_in_every_api() {
    let parts = |endpoint, members: &str| {
        parse(endpoint, format!(r#"{{"model":"m",{members}}}"#)).unwrap().prompt.non_text.parts
    };
    let in_message =
        |part: &str| format!(r#""messages":[{{"role":"user","content":[{{"type":"text","text":"a"}},{part}]}}]"#);
    for part in [
        r#"{"type":"image_url","image_url":{"url":"https://example.com/a.png"}}"#,
        r#"{"type":"image_url","image_url":"data:image/png;base64,AAAA"}"#,
        r#"{"image_url":"https://example.com/a.png"}"#,
        r#"{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}}"#,
        r#"{"type":"audio_url","audio_url":{"url":"https://example.com/a.wav"}}"#,
        r#"{"type":"video_url","video_url":{"url":"data:video/mp4;base64,AAAA"}}"#,
        r#"{"type":"file","file":{"filename":"a.pdf","file_data":"data:application/pdf;base64,AAAA"}}"#,
        r#"{"type":"image_embeds","image_embeds":"AAAA"}"#,
        r#"{"ty\u0070e":"image_url","image_url":{"url":"x"}}"#,
        r#"{"type":"hologram","hologram":"data:model/gltf;base64,AAAA"}"#,
    ] {
        assert_eq!(parts(Endpoint::ChatCompletions, &in_message(part)), 1, "{part}");
    }
    for part in [
        r#"{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}}"#,
        r#"{"type":"image","source":{"type":"url","url":"https://example.com/a.png"}}"#,
        r#"{"type":"document","source":{"type":"base64","media_type":"application/pdf","data":"AAAA"}}"#,
        r#"{"type":"document","source":{"type":"file","file_id":"f"}}"#,
        r#"{"type":"document","source":{"type":"content","content":[{"type":"text","text":"a"},{"type":"image","source":{"type":"url","url":"x"}}]}}"#,
        r#"{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"a"},{"type":"image","source":{"type":"base64","data":"A"}}]}"#,
    ] {
        assert_eq!(parts(Endpoint::Messages, &in_message(part)), 1, "{part}");
    }
    for items in [
        r#"{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_image","image_url":"data:image/png;base64,AAAA"}]}"#,
        r#"{"role":"user","content":[{"type":"input_file","file_data":"data:application/pdf;base64,AAAA"}]}"#,
        r#"{"type":"function_call_output","call_id":"c","output":[{"type":"input_image","file_id":"f"}]}"#,
        r#"{"type":"computer_call_output","output":{"type":"computer_screenshot","image_url":"data:image/png;base64,AAAA"}}"#,
        r#"{"type":"image_generation_call","result":"AAAA"}"#,
    ] {
        assert_eq!(parts(Endpoint::Responses, &format!(r#""input":[{items}]"#)), 1, "{items}");
    }
    for (endpoint, members, expected) in [
        (Endpoint::Generate, r#""text":"a","image_data":"AAAA""#, 1),
        (Endpoint::Generate, r#""text":"a","image_data":["AAAA","BBBB"],"audio_data":["CCCC"]"#, 3),
        (Endpoint::Generate, r#""input_ids":[1],"image_data":[["AAAA",null],["BBBB"]]"#, 2),
        (Endpoint::Generate, r#""input_embeds":[[0.5,0.25],[1,2]]"#, 2),
        (Endpoint::Completions, r#""prompt_embeds":"AAAA""#, 1),
        (Endpoint::Completions, r#""prompt":"a","prompt_embeds":["AAAA","BBBB"]"#, 2),
        (Endpoint::Embeddings, r#""input":[{"text":"a","image":"data:image/png;base64,AAAA"}]"#, 1),
        (
            Endpoint::Embeddings,
            r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]"#,
            1,
        ),
        (
            Endpoint::Rerank,
            r#""query":"q","documents":{"content":[{"type":"image_url","image_url":{"url":"x"}},{"type":"text","text":"a"}]}"#,
            1,
        ),
        (Endpoint::ImagesGenerations, r#""prompt":"a cat","image":"data:image/png;base64,AAAA""#, 1),
    ] {
        assert_eq!(parts(endpoint, members), expected, "{members}");
    }
}

#[test]
fn text_stays_text() {
    for part in [
        r#"{"type":"text","text":"data:image/png;base64,AAAA"}"#,
        r#"{"type":"text","text":"a","image_url":null}"#,
        r#"{"type":"thinking","thinking":"a","signature":"s"}"#,
        r#"{"type":"tool_use","id":"t","name":"f","input":{"file":"a"}}"#,
        r#"{"type":"tool_result","tool_use_id":"t","content":"a"}"#,
        r#"{"type":"document","source":{"type":"text","media_type":"text/plain","data":"a"}}"#,
        r#"{"type":"refusal","refusal":"no"}"#,
        r#""a""#,
        "7",
        "null",
    ] {
        let body = content(&format!("[{part}]"));
        assert_eq!(body.prompt.non_text, NonText::default(), "{part}");
        assert_eq!(body.prompt.text, format!("[{part}]"));
    }
}

#[test]
fn parts_in_parts_are_looked_for_so_deep() {
    let mut part = r#"{"type":"image","source":{"type":"url","url":"x"}}"#.to_owned();
    assert_eq!(content(&format!("[{part}]")).prompt.non_text.parts, 1);
    for _ in 0..2000 {
        part = format!(r#"{{"type":"tool_result","content":[{part}]}}"#);
    }
    assert_eq!(content(&format!("[{part}]")).prompt.non_text.parts, 0);
}

#[test]
fn forms_count_their_files() {
    let body = "--B\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n\
                --B\r\ncontent-disposition: form-data; name=file; filename=a.wav\r\n\r\n0123456789\r\n--B--\r\n";
    let kind = Some("multipart/form-data; boundary=B");
    let body = super::super::ParsedBody::parse(Endpoint::AudioTranscriptions, kind, body.into()).unwrap();
    assert_eq!(body.prompt.non_text, NonText { parts: 1, bytes: 10 });
}

/// Engines keep the blocks of such requests apart although their texts are the same.
#[test]
fn what_makes_kv_different_enters_the_key_from_its_first_byte() {
    use Endpoint::{ChatCompletions, Completions, Generate, Messages, Responses};

    let key = |endpoint, members: &str| {
        let prompt = match endpoint {
            Endpoint::Completions => r#""prompt":"hello""#,
            Endpoint::Generate => r#""text":"hello""#,
            Endpoint::Responses => r#""input":"hello""#,
            _ => r#""messages":[{"role":"user","content":"hello"}]"#,
        };
        parse(endpoint, format!(r#"{{"model":"m",{prompt}{members}}}"#)).unwrap().prompt.prefix_key
    };
    for (endpoint, one, other) in [
        (ChatCompletions, r#","cache_salt":"a""#, r#","cache_salt":"b""#),
        (Completions, r#","cache_salt":"a""#, r#","cache_salt":"b""#),
        (Completions, r#","extra_key":"a""#, r#","extra_key":["a"]"#),
        (Generate, r#","extra_key":"a""#, r#","extra_key":"b""#),
        (Generate, r#","lora_path":"a""#, r#","lora_path":"b""#),
        (Generate, r#","image_data":"a""#, r#","image_data":"b""#),
        (Completions, r#","lora_request":{"lora_name":"a"}"#, r#","lora_request":{"lora_name":"b"}"#),
        (
            ChatCompletions,
            r#","chat_template_kwargs":{"enable_thinking":false}"#,
            r#","chat_template_kwargs":{"enable_thinking":true}"#,
        ),
        (ChatCompletions, r#","chat_template":"a""#, r#","chat_template":"b""#),
        (ChatCompletions, r#","documents":[{"text":"a"}]"#, r#","documents":[{"text":"b"}]"#),
        (ChatCompletions, r#","reasoning_effort":"low""#, r#","reasoning_effort":"high""#),
        (Responses, r#","reasoning":{"effort":"low"}"#, r#","reasoning":{"effort":"high"}"#),
        (Responses, r#","previous_response_id":"a""#, r#","previous_response_id":"b""#),
        (Messages, r#","thinking":{"type":"enabled","budget_tokens":1024}"#, r#","thinking":{"type":"disabled"}"#),
        (ChatCompletions, r#","tools":[1]"#, r#","tools":[2]"#),
        (Messages, r#","tools":[1]"#, r#","tools":[2]"#),
        (Responses, r#","tools":[1]"#, r#","tools":[2]"#),
        (ChatCompletions, r#","tool_choice":"none""#, r#","tool_choice":"required""#),
        (ChatCompletions, r#","mm_processor_kwargs":{"num_crops":4}"#, r#","mm_processor_kwargs":{"num_crops":9}"#),
        (Completions, r#","truncate_prompt_tokens":5"#, r#","truncate_prompt_tokens":6"#),
    ] {
        let plain = key(endpoint, "");
        let (one, other) = (key(endpoint, one), key(endpoint, other));
        assert!(one != other && !one.starts_with(&plain) && !other.starts_with(&plain), "{one:?} {other:?}");
        assert!(one.ends_with(b"hello"));
    }
    // What says as much as its absence, and what concerns the output only, changes nothing.
    for members in [
        r#","cache_salt":null"#,
        r#","tool_choice":"auto""#,
        r#","chat_template_kwargs":{}"#,
        r#","documents":[]"#,
        r#","continue_final_message":false"#,
        r#","temperature":1"#,
        r#","user":"u""#,
        r#","stream":true"#,
    ] {
        assert_eq!(key(ChatCompletions, members), key(ChatCompletions, ""), "{members}");
    }
}
