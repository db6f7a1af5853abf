//! Text, shape and prefix key of prompts.

use proptest::prelude::*;

use super::super::{Endpoint, NonText, Prompt, PromptForm};
use super::{chat, parse};

fn completion(prompt: &str) -> Prompt {
    parse(Endpoint::Completions, format!("{{\"model\":\"m\",\"prompt\":{prompt}}}")).unwrap().prompt
}

fn ids(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_be_bytes()).collect()
}

#[test]
fn r01_every_form_of_a_completion_prompt() {
    let cases = [
        (r#""a\n\u00e9""#, PromptForm::Text, 1, None, "a\né", "a\né".as_bytes().to_vec()),
        (r#"["a"]"#, PromptForm::Text, 1, None, "a", b"a".to_vec()),
        (r#"["a","b c"]"#, PromptForm::Several, 2, None, "a b c", b"a b c".to_vec()),
        ("[1, 2,3]", PromptForm::Tokens, 1, Some(3), "", ids(&[1, 2, 3])),
        ("[[1,2,3]]", PromptForm::Tokens, 1, Some(3), "", ids(&[1, 2, 3])),
        ("[[1],[2,3]]", PromptForm::Several, 2, Some(3), "", [ids(&[1]), vec![0x1e], ids(&[2, 3])].concat()),
        ("[-1,99999999999]", PromptForm::Tokens, 1, Some(2), "", ids(&[u32::MAX, u32::MAX])),
        (r#""""#, PromptForm::Text, 1, None, "", Vec::new()),
        (r#"[""]"#, PromptForm::Text, 1, None, "", Vec::new()),
        ("[]", PromptForm::None, 0, None, "", Vec::new()),
        ("[[]]", PromptForm::Tokens, 1, Some(0), "", Vec::new()),
        ("[[],[]]", PromptForm::Several, 2, Some(0), "", vec![0x1e]),
    ];
    for (prompt, form, count, token_ids, text, prefix_key) in cases {
        let expected = Prompt { form, count, token_ids, text: text.into(), non_text: NonText::default(), prefix_key };
        assert_eq!(completion(prompt), expected, "{prompt}");
    }
}

#[test]
fn chat_text_joins_contents_and_the_key_holds_the_history() {
    let body = chat(
        r#"{"model":"m","tools":[{"z":1,"a":2.0}],"messages":[
            {"role":"system","content":"be\tkind"},
            {"content":[{"type":"text","text":"x\u00e9"}],"role":"user"},
            {"role":"assistant","content":null,"tool_calls":[{"id":"1"}]},
            {"role":"tool","content":""},
            {"role":"assistant","tool_calls":null}]}"#,
    );
    assert_eq!(body.prompt.text, "be\tkind [{\"type\":\"text\",\"text\":\"x\\u00e9\"}] ");
    let key = String::from_utf8(body.prompt.prefix_key).unwrap();
    assert_eq!(
        key,
        "[{\"z\":1,\"a\":2.0}]\
         \u{1e}system\u{1f}be\tkind\
         \u{1e}user\u{1f}[{\"type\":\"text\",\"text\":\"x\\u00e9\"}]\
         \u{1e}assistant\u{1f}\u{1f}[{\"id\":\"1\"}]\
         \u{1e}tool\u{1f}\
         \u{1e}assistant\u{1f}{\"role\":\"assistant\",\"tool_calls\":null}"
    );
    assert_eq!((body.prompt.form, body.prompt.count, body.prompt.token_ids), (PromptForm::Text, 1, None));
}

#[test]
fn r04_image_urls_enter_the_key_to_their_last_byte() {
    let key = |end: &str| {
        let url = "data:image/png;base64,".to_owned() + &"A".repeat(5000) + end;
        let body = format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"{url}"}}}}]}}]}}"#
        );
        chat(body).prompt.prefix_key
    };
    assert_ne!(key("x"), key("y"));
    assert_eq!(key("x"), key("x"));
}

#[test]
fn r05_the_key_of_a_turn_extends_the_key_of_the_turn_before() {
    let turn = |messages: &str| chat(format!(r#"{{"model":"m","messages":[{messages}]}}"#)).prompt.prefix_key;
    let system = r#"{"role":"system","content":"same for all"}"#;
    let first = turn(&format!(r#"{system},{{"role":"user","content":"one"}}"#));
    let second = turn(&format!(
        r#"{system},{{"role":"user","content":"one"}},{{"role":"assistant","content":"1"}},{{"role":"user","content":"on"}}"#
    ));
    let other = turn(&format!(r#"{system},{{"role":"user","content":"two"}}"#));
    assert!(second.starts_with(&first) && second.len() > first.len());
    assert!(!other.starts_with(&first));
}

#[test]
fn r11_lone_surrogates_fall_back_to_the_bytes_as_sent() {
    let body =
        chat(r#"{"model":"m","messages":[{"role":"user","content":"a\ud83d"},{"role":"\udc00","content":"😀"}]}"#);
    assert_eq!(body.prompt.text, r#""a\ud83d" 😀"#);
    assert_eq!(completion(r#""\udc00x""#).text, r#""\udc00x""#);
    assert_eq!(completion(r#""\ud83d\ude00""#).text, "😀");
}

#[test]
fn system_instructions_and_input_items_enter_the_key() {
    let messages = r#"{"model":"m","max_tokens":1,"system":"be kind","messages":[{"role":"user","content":"x"}]}"#;
    let prompt = parse(Endpoint::Messages, messages).unwrap().prompt;
    assert_eq!(prompt.text, "x");
    assert_eq!(prompt.prefix_key, b"\x1esystem\x1fbe kind\x1euser\x1fx");

    let text = r#"{"model":"m","instructions":"be kind","input":"x y"}"#;
    let prompt = parse(Endpoint::Responses, text).unwrap().prompt;
    assert_eq!(prompt.text, "x y");
    assert_eq!(prompt.prefix_key, b"\x1esystem\x1fbe kind\x1euser\x1fx y");

    let items = r#"{"model":"m","tools":[1],"input":[{"role":"user","content":"x"},{"type":"function_call_output","output":"7"},"plain"]}"#;
    let prompt = parse(Endpoint::Responses, items).unwrap().prompt;
    assert_eq!(prompt.text, "x plain");
    let expected =
        "[1]\u{1e}user\u{1f}x\u{1e}\u{1f}{\"type\":\"function_call_output\",\"output\":\"7\"}\u{1e}\u{1f}plain";
    assert_eq!(String::from_utf8(prompt.prefix_key).unwrap(), expected);
}

#[test]
fn other_endpoints_have_the_text_of_the_table() {
    for (endpoint, members, text, form) in [
        (
            Endpoint::Rerank,
            r#""query":"q","documents":["a","b c",{"text":"d"}]"#,
            r#"q a b c {"text":"d"}"#,
            PromptForm::Text,
        ),
        (Endpoint::Classify, r#""input":["a","b"]"#, "a b", PromptForm::Text),
        (Endpoint::Classify, r#""input":"a""#, "a", PromptForm::Text),
        (Endpoint::Classify, r#""messages":[{"role":"user","content":"c"}]"#, "c", PromptForm::Text),
        (Endpoint::ImagesGenerations, r#""prompt":"a cat""#, "a cat", PromptForm::Text),
        (Endpoint::VideoGenerations, r#""prompt":"a dog""#, "a dog", PromptForm::Text),
        (Endpoint::Embeddings, r#""input":["a"]"#, "", PromptForm::None),
        (Endpoint::Generate, r#""text":"a""#, "a", PromptForm::Text),
        (Endpoint::Generate, r#""text":["a","b"]"#, "a b", PromptForm::Several),
        (Endpoint::Generate, r#""input_ids":[1,2]"#, "", PromptForm::Tokens),
        (Endpoint::Generate, r#""input_ids":[[1],[2]]"#, "", PromptForm::Several),
        (Endpoint::Generate, r#""input_embeds":[[0.5]]"#, "", PromptForm::None),
    ] {
        let prompt = parse(endpoint, format!("{{\"model\":\"m\",{members}}}")).unwrap().prompt;
        assert_eq!((prompt.text.as_str(), prompt.form), (text, form), "{members}");
    }
}

proptest! {
    #[test]
    fn r11_any_text_comes_through_decoded(contents in proptest::collection::vec(any::<String>(), 0..5)) {
        let messages: Vec<_> = contents.iter().map(|c| serde_json::json!({"role": "user", "content": c})).collect();
        let body = chat(serde_json::json!({"model": "m", "messages": messages}).to_string());
        prop_assert_eq!(&body.prompt.text, &contents.join(" "));
        let key: String = contents.iter().flat_map(|content| ["\u{1e}user\u{1f}", content]).collect();
        prop_assert_eq!(body.prompt.prefix_key, key.into_bytes());
    }
}
