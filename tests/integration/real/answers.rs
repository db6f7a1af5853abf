//! Greedy questions, what servers say to them, and what a failure has to look like.

use std::hash::{BuildHasher, RandomState};

use serde_json::{Value, json};

use super::PATIENCE;
use super::servers::MODEL;
use crate::harness::http::{Answer, Call};
use crate::harness::within_time;

/// The two APIs that carry prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    Chat,
    Completions,
}

impl Api {
    /// Both.
    pub const ALL: [Api; 2] = [Api::Chat, Api::Completions];

    /// Its path.
    pub fn path(self) -> &'static str {
        match self {
            Api::Chat => "/v1/chat/completions",
            Api::Completions => "/v1/completions",
        }
    }
}

/// A prompt and how many tokens may be made of it, greedily.
#[derive(Clone, Debug)]
pub struct Question {
    pub api: Api,
    pub prompt: String,
    pub max_tokens: u32,
}

/// What a server said to a question.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    pub text: String,
    pub finish: String,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
}

/// Words that nobody has asked about before, so that no prefix cache knows them.
pub fn fresh_words(count: usize) -> String {
    let known =
        ["river", "seven", "wizard", "please", "memory", "north", "answer", "zero", "jump", "city", "two", "key"];
    let mut words = Vec::with_capacity(count);
    while words.len() < count {
        // Seeded by the system: the bytes of one hash choose eight words.
        let random = RandomState::new().hash_one(words.len());
        words.extend(random.to_le_bytes().map(|byte| known[usize::from(byte) % known.len()]));
    }
    words.truncate(count);
    words.join(" ")
}

impl Question {
    /// A question nobody has asked before.
    pub fn fresh(api: Api, words: usize, max_tokens: u32) -> Question {
        Question { api, prompt: fresh_words(words), max_tokens }
    }

    /// Its body, with further members.
    pub fn body(&self, further: &Value) -> Value {
        let mut body = json!({"model": MODEL, "max_tokens": self.max_tokens, "temperature": 0});
        match self.api {
            Api::Chat => body["messages"] = json!([{"role": "user", "content": self.prompt}]),
            Api::Completions => body["prompt"] = json!(self.prompt),
        }
        for (key, value) in further.as_object().into_iter().flatten() {
            body[key] = value.clone();
        }
        body
    }

    /// The call, streamed or not, with further members.
    pub fn call(&self, base: &str, stream: bool, further: &Value) -> Call {
        let mut body = self.body(further);
        if stream {
            body["stream"] = json!(true);
            body["stream_options"] = json!({"include_usage": true});
        }
        Call::post(base, self.api.path(), body.to_string())
    }

    /// Asks and takes the whole answer, which must be a success.
    pub async fn ask(&self, base: &str, stream: bool) -> Said {
        self.ask_with(base, stream, &Value::Null).await
    }

    /// The same with further members.
    pub async fn ask_with(&self, base: &str, stream: bool, further: &Value) -> Said {
        let call = self.call(base, stream, further);
        let answer = within_time(PATIENCE, "an answer", call.try_send()).await.expect("an answer");
        success(answer, stream).await
    }
}

/// The whole of an answer that must be a success.
pub async fn success(answer: Answer, stream: bool) -> Said {
    if answer.status != 200 {
        let status = answer.status;
        panic!("{status}: {}", String::from_utf8_lossy(&answer.body().await.bytes));
    }
    if !stream {
        let whole = answer.json().await;
        let mut said = Said::default();
        said.add(&whole, "message");
        return said;
    }
    let (events, complete) = answer.events().collect().await;
    assert!(complete, "the stream was cut: {events:?}");
    let (done, events) = events.split_last().expect("events");
    assert_eq!(done, "[DONE]", "{events:?}");
    let mut said = Said::default();
    for event in events {
        said.add(&serde_json::from_str(event).expect("an event of JSON"), "delta");
    }
    said
}

impl Said {
    /// Adds an answer, or a piece of one.
    fn add(&mut self, piece: &Value, member: &str) {
        assert!(piece.get("error").is_none(), "{piece}");
        for choice in piece["choices"].as_array().expect("choices") {
            let text = choice["text"].as_str().or(choice[member]["content"].as_str());
            self.text.push_str(text.unwrap_or_default());
            if let Some(finish) = choice["finish_reason"].as_str() {
                self.finish.push_str(finish);
            }
        }
        if let Some(usage) = piece["usage"].as_object() {
            self.prompt_tokens = usage["prompt_tokens"].as_u64().expect("prompt tokens");
            self.completion_tokens = usage["completion_tokens"].as_u64().expect("completion tokens");
        }
    }
}

/// Takes the whole of an answer that must be a failure, and says which, in a few words: an error status with a message,
/// or a stream in which nothing that follows the error looks like success.
pub async fn failure(answer: Answer) -> String {
    let status = answer.status.as_u16();
    if status != 200 {
        assert!((500..=504).contains(&status), "{status}");
        let body = answer.json().await;
        let message = body["error"]["message"].as_str().or(body["message"].as_str());
        return format!("{status} {}", message.unwrap_or_else(|| panic!("no message in {body}")));
    }
    assert!(answer.header("content-type").starts_with("text/event-stream"), "a failure that says 200");
    let (events, complete) = answer.events().collect().await;
    let is_error = |event: &&String| serde_json::from_str::<Value>(event).is_ok_and(|event| event["error"].is_object());
    let Some(at) = events.iter().position(|event| is_error(&event)) else {
        assert!(!complete, "a failed stream that looks whole: {events:?}");
        return format!("200, cut after {} events", events.len());
    };
    assert_eq!(at + 1, events.len(), "something follows the error: {events:?}");
    assert!(!events.iter().any(|event| event == "[DONE]" || event.contains(r#""finish_reason":"stop""#)), "{events:?}");
    let end = if complete { "" } else { ", then cut" };
    format!("200, {at} events, then the error event{end}: {}", events[at])
}

#[test]
fn fresh_words_are_fresh() {
    let (one, other) = (fresh_words(12), fresh_words(12));
    assert_eq!(one.split(' ').count(), 12);
    assert_ne!(one, other);
}
