//! What makes an engine's KV cache another one while the text of the prompt is the same.
//!
//! Such members stand at the head of the prefix key, so that every block differs: a pod that has the blocks of another tenant,
//! adapter or template has none of this request's.

use super::Endpoint;
use super::parts;
use super::prompt::{ITEM, PART};
use super::scan::JsonObject;

/// Members of a body, each with the value that says as much as its absence.
///
/// vLLM adds `cache_salt` to the hash of the first block, SGLang `extra_key` (and, under that name too, `cache_salt`) to its
/// radix tree's keys. Adapters named in the body are SGLang's (`lora_path`) and TensorRT-LLM's (`lora_request`). The others
/// go into the chat template or say what is cut from its output.
const MEMBERS: &[(&str, &str)] = &[
    ("cache_salt", "\"\""),
    ("extra_key", "\"\""),
    ("lora_path", "\"\""),
    ("lora_request", "{}"),
    ("chat_template", "\"\""),
    ("chat_template_kwargs", "{}"),
    ("documents", "[]"),
    ("functions", "[]"),
    ("tool_choice", "\"auto\""),
    ("reasoning_effort", ""),
    ("reasoning", "{}"),
    ("thinking", "{}"),
    ("output_config", "{}"),
    ("add_generation_prompt", "true"),
    ("continue_final_message", "false"),
    ("add_special_tokens", ""),
    ("truncate_prompt_tokens", ""),
    ("truncation_side", ""),
    ("truncation", "\"disabled\""),
    ("mm_processor_kwargs", "{}"),
    ("media_io_kwargs", "{}"),
    ("previous_response_id", "\"\""),
    ("conversation", "\"\""),
];

/// The head of a prefix key; empty when nothing but the text counts.
pub(super) fn of(endpoint: Endpoint, body: &JsonObject<'_>) -> Vec<u8> {
    let mut salt = Vec::new();
    let mut push = |name: &str, value: &str| {
        salt.push(ITEM);
        salt.extend_from_slice(name.as_bytes());
        salt.push(PART);
        salt.extend_from_slice(value.as_bytes());
    };
    // A template kept by the server, where the member is not the prompt itself.
    let template = ("prompt", "{}");
    let template = (endpoint == Endpoint::Responses).then_some(&template);
    // The documents of these endpoints are their prompt.
    let ranks = matches!(endpoint, Endpoint::Rerank | Endpoint::RerankUnversioned | Endpoint::RerankV2);
    for (name, absent) in MEMBERS.iter().chain(template).filter(|(name, _)| !ranks || *name != "documents") {
        if let Some(value) = body.get_non_null(name).filter(|value| value != absent) {
            push(name, value);
        }
    }
    for (name, hash) in parts::hashes_of_members(body) {
        push(name, &hash);
    }
    salt
}
