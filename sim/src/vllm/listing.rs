//! The answers that generate nothing: models, tokenize, embeddings.

use http::request::Parts;
use serde::Serialize;
use serde_json::json;

use super::call::{check_content_type, check_model};
use super::failure::Failure;
use crate::ambient;
use crate::answer::Reply;
use crate::body::{self, Fields};
use crate::state::Core;

/// Length of an embedding.
const DIMENSIONS: u64 = 8;

#[derive(Serialize)]
struct Models<'a> {
    object: &'a str,
    data: Vec<Model<'a>>,
}

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    owned_by: &'a str,
    root: &'a str,
    parent: Option<&'a str>,
    max_model_len: u32,
    permission: [Permission; 1],
}

#[derive(Serialize)]
struct Permission {
    id: String,
    object: &'static str,
    created: u64,
    allow_create_engine: bool,
    allow_sampling: bool,
    allow_logprobs: bool,
    allow_search_indices: bool,
    allow_view: bool,
    allow_fine_tuning: bool,
    organization: &'static str,
    group: Option<&'static str>,
    is_blocking: bool,
}

#[expect(clippy::struct_field_names, reason = "the wire's names")]
#[derive(Serialize)]
struct Tokens<'a> {
    count: u32,
    max_model_len: u32,
    tokens: &'a [u32],
    token_strs: Option<()>,
}

/// `/v1/models`.
pub(crate) fn models(core: &Core) -> Reply {
    let config = &core.config;
    let created = ambient::unix_seconds();
    let permission = || Permission {
        id: format!("modelperm-{:016x}", core.fresh_id()),
        object: "model_permission",
        created,
        allow_create_engine: false,
        allow_sampling: true,
        allow_logprobs: true,
        allow_search_indices: false,
        allow_view: true,
        allow_fine_tuning: false,
        organization: "*",
        group: None,
        is_blocking: false,
    };
    let entry = |id| Model {
        id,
        object: "model",
        created,
        owned_by: "vllm",
        root: &config.model,
        parent: None,
        max_model_len: config.capacity.max_model_len,
        permission: [permission()],
    };
    let data = std::iter::once(&config.model).chain(&config.aliases).map(|id| entry(id.as_str())).collect();
    Reply::value(200, &Models { object: "list", data })
}

/// `/tokenize`: of `messages` or of `prompt`.
pub(crate) fn tokenize(core: &Core, head: &Parts, body: &[u8]) -> Result<Reply, Failure> {
    check_content_type(core, &head.headers)?;
    let fields = Fields::parse(body)?;
    check_model(core, &fields)?;
    let prompt = if fields.raw("messages").is_some() {
        body::conversation(&fields, "messages", &core.config.model)?
    } else {
        let mut prompts = body::completion(&fields, "prompt", &core.config.model)?;
        prompts.swap_remove(0)
    };
    let max_model_len = core.config.capacity.max_model_len;
    Ok(Reply::value(200, &Tokens { count: prompt.tokens, max_model_len, tokens: &prompt.ids, token_strs: None }))
}

/// `/v1/embeddings`: vectors fixed by their input.
pub(crate) fn embeddings(core: &Core, head: &Parts, body: &[u8]) -> Result<Reply, Failure> {
    check_content_type(core, &head.headers)?;
    let fields = Fields::parse(body)?;
    let model = check_model(core, &fields)?;
    if fields.raw("input").is_none() {
        return Err(Failure::missing("input", &fields.shown()));
    }
    let prompts = body::completion(&fields, "input", &core.config.model)?;
    let tokens: u64 = prompts.iter().map(|prompt| u64::from(prompt.tokens)).sum();
    let data: Vec<_> = prompts
        .iter()
        .enumerate()
        .map(|(index, prompt)| {
            let place = |number: u64| ((prompt.hash >> (number * 8)) & 0xff) as f64 / 255.0 - 0.5;
            let vector: Vec<f64> = (0..DIMENSIONS).map(place).collect();
            json!({"index": index, "object": "embedding", "embedding": vector})
        })
        .collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0,
        "prompt_tokens_details": null});
    let id = format!("embd-{:016x}", core.fresh_id());
    let created = ambient::unix_seconds();
    let body = json!({"id": id, "object": "list", "created": created, "model": model, "data": data, "usage": usage});
    Ok(Reply::value(200, &body))
}
