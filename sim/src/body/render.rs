//! From request fields to prompts: a plain chat template in which everything that reaches a real template leaves a trace,
//! so that a lost tool, a reordered key or a changed message is a different prompt.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

use serde_json::Value;
use serde_json::value::RawValue;
use xxhash_rust::xxh64::xxh64;

use super::Complaint;
use super::fields::{Fields, shown};
use crate::prompt::{Prompt, salt};

/// The prompt of a conversation in field `name` (`messages`, or `input` of the Responses API).
pub(crate) fn conversation(fields: &Fields, name: &str, model: &str) -> Result<Arc<Prompt>, Complaint> {
    let Some(raw) = fields.raw(name) else { return Err(Complaint::missing(name, &fields.shown())) };
    let mut text = String::new();
    for template_input in ["tools", "documents", "chat_template_kwargs", "chat_template", "instructions", "system"] {
        if let Some(raw) = fields.raw(template_input) {
            let _ = writeln!(text, "<|{template_input}|>{}", raw.get());
        }
    }
    if let Ok(single) = serde_json::from_str::<String>(raw.get())
        && name == "input"
    {
        let _ = writeln!(text, "<|user|>\n{single}");
    } else {
        let messages: Vec<BTreeMap<String, Box<RawValue>>> = serde_json::from_str(raw.get()).map_err(|_| {
            let value: Value = serde_json::from_str(raw.get()).unwrap_or_default();
            Complaint::schema("list_type", name, "Input should be a valid list", &shown(&value))
        })?;
        if messages.is_empty() {
            return Err(Complaint::EmptyConversation);
        }
        for (place, message) in messages.iter().enumerate() {
            render_message(&mut text, &format!("{name}.{place}"), message)?;
        }
    }
    text.push_str("<|assistant|>\n");
    Ok(Arc::new(Prompt::of_text(&text, salted(fields, model)?)))
}

fn render_message(text: &mut String, place: &str, message: &BTreeMap<String, Box<RawValue>>) -> Result<(), Complaint> {
    let count = message.len();
    let Some(role) = message.get("role") else {
        return Err(Complaint::missing(&format!("{place}.role"), &format!("<dict of {count} items>")));
    };
    let role: String = serde_json::from_str(role.get()).map_err(|_| {
        let place = format!("{place}.CustomChatCompletionMessageParam.role");
        Complaint::schema("string_type", &place, "Input should be a valid string", role.get())
    })?;
    let _ = writeln!(text, "<|{role}|>");
    for (key, raw) in message {
        match key.as_str() {
            "role" => (),
            "content" => render_content(text, raw),
            _ => {
                let _ = write!(text, "<{key}={}>", raw.get());
            }
        }
    }
    text.push('\n');
    Ok(())
}

/// Text as it is; anything else (images, audio) as its type and hash, so that it costs tokens but not its own length.
fn render_content(text: &mut String, raw: &RawValue) {
    if let Ok(plain) = serde_json::from_str::<String>(raw.get()) {
        text.push_str(&plain);
        return;
    }
    let Ok(parts) = serde_json::from_str::<Vec<Box<RawValue>>>(raw.get()) else { return };
    for part in parts {
        let value: Value = serde_json::from_str(part.get()).unwrap_or_default();
        if let Some(plain) = value.get("text").and_then(Value::as_str) {
            text.push_str(plain);
        } else {
            let kind = value.get("type").and_then(Value::as_str).unwrap_or("part");
            let _ = write!(text, "<|{kind}:{:016x}|>", xxh64(part.get().as_bytes(), 0));
        }
    }
}

/// The prompts of a completion: text, token ids, or a list of either.
pub(crate) fn completion(fields: &Fields, name: &str, model: &str) -> Result<Vec<Arc<Prompt>>, Complaint> {
    let salt = salted(fields, model)?;
    let empty = || Complaint::EmptyPrompt { name: name.to_owned() };
    let value = fields.value(name).ok_or_else(empty)?;
    let wrong = || Complaint::schema("string_type", name, "Input should be a valid string", &shown(&value));
    let one = |value: &Value| match value {
        Value::String(text) if text.is_empty() => Err(empty()),
        Value::String(text) => Ok(Arc::new(Prompt::of_text(text, salt))),
        Value::Array(ids) if ids.is_empty() => Err(empty()),
        Value::Array(ids) => {
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong);
            Ok(Arc::new(Prompt::of_ids(ids.iter().map(id).collect::<Result<_, _>>()?, salt)))
        }
        _ => Err(wrong()),
    };
    match &value {
        Value::Array(list) if list.first().is_some_and(|first| !first.is_number()) => list.iter().map(one).collect(),
        _ => Ok(vec![one(&value)?]),
    }
}

fn salted(fields: &Fields, model: &str) -> Result<u64, Complaint> {
    Ok(salt(model, &fields.text("cache_salt")?.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: &str) -> Result<Arc<Prompt>, Complaint> {
        conversation(&Fields::parse(body.as_bytes()).expect("an object"), "messages", "m")
    }

    #[test]
    fn everything_that_a_template_sees_changes_the_prompt() {
        let base = chat(r#"{"messages":[{"role":"user","content":"hi"}],"seed":1}"#).expect("valid");
        let same = chat(r#"{"seed":2,"messages":[{"content":"h\u0069","role":"user"}]}"#).expect("valid");
        assert_eq!(base.hash, same.hash);
        assert_eq!(base.text, "<|user|>\nhi\n<|assistant|>\n");
        for other in [
            r#"{"messages":[{"role":"system","content":"hi"}]}"#,
            r#"{"messages":[{"role":"user","content":"hi "}]}"#,
            r#"{"messages":[{"role":"user","content":"hi","name":"x"}]}"#,
            r#"{"messages":[{"role":"user","content":"hi"}],"tools":[{"a":1}]}"#,
            r#"{"messages":[{"role":"user","content":"hi"}],"cache_salt":"s"}"#,
        ] {
            assert_ne!(chat(other).expect("valid").hash, base.hash, "{other}");
        }
        let tools =
            |keys| chat(&format!(r#"{{"messages":[{{"role":"user"}}],"tools":[{keys}]}}"#)).expect("valid").hash;
        assert_ne!(tools(r#"{"z":1,"a":2}"#), tools(r#"{"a":2,"z":1}"#));
    }

    #[test]
    fn images_cost_a_few_tokens_only() {
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"x"}},
                {{"type":"image_url","image_url":{{"url":"data:{}"}}}}]}}]}}"#,
            "A".repeat(100_000)
        );
        assert!(chat(&body).expect("valid").tokens < 40);
    }

    #[test]
    fn completions_take_four_forms() {
        let prompts = |prompt: &str| {
            let fields = Fields::parse(format!(r#"{{"prompt":{prompt}}}"#).as_bytes()).expect("an object");
            completion(&fields, "prompt", "m").map(|prompts| prompts.iter().map(|p| p.tokens).collect::<Vec<_>>())
        };
        assert_eq!(prompts("\"abcdefgh\""), Ok(vec![2]));
        assert_eq!(prompts("[5,6,7]"), Ok(vec![3]));
        assert_eq!(prompts("[\"abcd\",\"abcde\"]"), Ok(vec![1, 2]));
        assert_eq!(prompts("[[1],[1,2]]"), Ok(vec![1, 2]));
        for bad in ["\"\"", "[]", "[\"a\",\"\"]", "null", "{}", "5", "[1,\"a\"]", "[-1]", "[1.5]"] {
            assert!(prompts(bad).is_err(), "{bad}");
        }
    }
}
