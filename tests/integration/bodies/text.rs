//! Characters of more than one byte, in prompts of every length and in answers cut at every byte.

use bytes::Bytes;
use serde_json::json;
use tandem_sim::Fault;

use super::members::{assert_decode_leg, assert_prefill_leg};
use super::{assert_no_panic, wait_total};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;

/// Characters of one to four bytes: CJK, emoji with joiners and variation selectors, combining marks, Thai, Arabic,
/// a noncharacter, and what JSON escapes.
const ALPHABET: &str =
    "漢字かな한국👩‍👩‍👧‍👦❤️e\u{301}\u{327}ก็ำمرحبا\u{202e}\u{10ffff}\u{fffd}é\"\\\n\u{7f}\u{2028}a🇨🇳𝔘ZZ\u{0}";

/// Prompts that move every character over every block border (blocks have 128 bytes).
async fn send_texts(sandbox: &Sandbox, path: &str, lengths: impl IntoIterator<Item = usize>) {
    let endless = || ALPHABET.chars().cycle();
    for length in lengths {
        let text: String = endless().skip(length % 7).take(length).collect();
        let chat = json!({"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": text}],
            "tools": [{"名": text.chars().take(5).collect::<String>()}]});
        let completion = json!({"model": "m", "max_tokens": 2, "prompt": format!("a{text}")});
        for (api, body) in [("/v1/chat/completions", chat), ("/v1/completions", completion)] {
            sandbox.clear();
            let body = body.to_string();
            let answer = Call::post(path, api, body.clone()).send().await;
            assert_eq!(answer.status, 200, "{length}");
            assert_prefill_leg(body.as_bytes(), &only(&sandbox.prefill[0]).body);
            assert_decode_leg(body.as_bytes(), &only(&sandbox.decode[0]).body);
        }
    }
}

/// Buckets make the gateway count tokens as well as hash the text.
fn with_buckets() -> SandboxOptions {
    SandboxOptions {
        pod: |pod| {
            let config = json!({"promptLengthBucketing": true, "promptLenBucketMaxLength": 100_000});
            pod.config(&json!({"profiles": {"default": {"routingStrategy": "pd", "routingConfig": config}}}))
        },
        ..SandboxOptions::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r11_prompts_of_many_lengths() {
    let sandbox = Sandbox::start(with_buckets()).await;
    for path in sandbox.paths() {
        send_texts(&sandbox, &path, (0..90).chain([127, 128, 129, 1000, 9000])).await;
    }
    assert_no_panic(&sandbox).await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r11_prompts_of_many_lengths_in_real_tokens() {
    let mut options = with_buckets();
    options.fleet.env.push(("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE".to_owned(), "tiktoken".to_owned()));
    options.fleet.replicas = 1;
    options.fleet.envoy = false;
    let sandbox = Sandbox::start(options).await;
    let path = sandbox.paths().remove(0);
    send_texts(&sandbox, &path, (0..90).chain([127, 128, 129, 1000, 9000])).await;
    assert_no_panic(&sandbox).await;
    sandbox.close().await;
}

/// A prefill pod's error text is cut to 256 bytes for the client, never inside a character; three dots say so.
#[tokio::test(flavor = "multi_thread")]
async fn r11_error_texts_of_many_lengths() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        for status in [400, 500] {
            for length in (60..130).chain([250, 256, 257, 5000]) {
                let text: String =
                    ALPHABET.chars().filter(|c| !c.is_control() && !c.is_whitespace()).cycle().take(length).collect();
                sandbox.prefill[0].script(Fault::on("/v1/").answer(status, "text/plain", text.clone()));
                let body = r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#;
                let answer = Call::post(&path, "/v1/chat/completions", body).send().await;
                assert_eq!(answer.status, if status == 400 { 400 } else { 503 });
                let message = answer.json().await["error"]["message"].as_str().unwrap().to_owned();
                let said = message.trim_start_matches("prefill request failed (http_status): ");
                let (kept, cut) = said.strip_suffix("...").map_or((said, false), |kept| (kept, true));
                assert_eq!(cut, text.len() > 256, "{said}");
                assert!(text.starts_with(kept) && kept.len() > 200.min(text.len() - 1), "{said}");
                assert!(kept.len() <= 256);
            }
        }
    }
    assert_no_panic(&sandbox).await;
    sandbox.close().await;
}

/// The writes of an engine may end anywhere, also inside a character, a line end or the usage.
#[tokio::test(flavor = "multi_thread")]
async fn r11_r13_answers_split_at_every_byte_offset() {
    let sandbox = Sandbox::start(SandboxOptions { pairs: 0, combined: 1, ..SandboxOptions::default() }).await;
    let stream = "data: {\"choices\":[{\"delta\":{\"content\":\"漢👩‍👧e\u{301}\"}}]}\r\n\r\n: é\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":5,\"total_tokens\":8}}\n\ndata: [DONE]\n\n";
    let whole = "{\"choices\":[{\"message\":{\"content\":\"漢👩‍👧e\u{301}\"}}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":5,\"total_tokens\":8}}";
    let body =
        |stream| json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": stream}).to_string();
    let mut requests = 0_u32;
    for path in sandbox.paths() {
        for (text, content_type, stream) in [(stream, "text/event-stream", true), (whole, "application/json", false)] {
            let body = body(stream);
            for offset in 1..text.len() {
                let (first, second) = text.as_bytes().split_at(offset);
                let writes = vec![Bytes::from_static(first), Bytes::from_static(second)];
                let fault = Fault::on("/v1/").answer_raw(200, &[("content-type", content_type)], writes, true);
                sandbox.combined[0].script(fault);
                let answer = Call::post(&path, "/v1/chat/completions", body.clone()).send().await.body().await;
                assert_eq!((answer.bytes, answer.complete), (text.into(), true), "cut at {offset}");
                requests += 1;
            }
        }
    }
    let requests = f64::from(requests);
    wait_total(&sandbox.fleet, "gateway_requests_with_usage_total", &[("has_usage", "true")], requests).await;
    wait_total(&sandbox.fleet, "gateway_input_tokens_total", &[("model", "m")], 3.0 * requests).await;
    wait_total(&sandbox.fleet, "gateway_output_tokens_total", &[("model", "m")], 5.0 * requests).await;
    assert_no_panic(&sandbox).await;
    sandbox.close().await;
}

/// As above with a real answer of a pair, its words in several bytes a character, written byte by byte.
#[tokio::test(flavor = "multi_thread")]
async fn r11_a_pairs_answer_byte_by_byte() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let body = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":3,"stream":true,"stream_options":{"include_usage":true}}"#;
    for path in sandbox.paths() {
        let mut texts = Vec::new();
        for sizes in [vec![], vec![1], vec![2, 3]] {
            sandbox.decode[0].script(Fault::on("/v1/").split(&sizes));
            let (events, complete) =
                Call::post(&path, "/v1/chat/completions", body).send().await.events().collect().await;
            assert!(complete && events.last().is_some_and(|event| event == "[DONE]"));
            let text: String = events[..events.len() - 1]
                .iter()
                .map(|event| serde_json::from_str::<serde_json::Value>(event).unwrap())
                .filter_map(|event| Some(event["choices"][0]["delta"]["content"].as_str()?.to_owned()))
                .collect();
            assert!(!text.is_empty() && !text.contains('\u{fffd}'), "{text}");
            texts.push(text);
        }
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    }
    sandbox.close().await;
}
