//! TensorRT-LLM (`engine-protocols` section 4).
//!
//! Its schema is strict: a key that a worker does not know is refused. So a leg gets `disaggregated_params` and nothing
//! else, and of what a worker says of itself only what the other one needs travels on. Ids are 64-bit integers and stay
//! the digits that were sent.

mod finished;
mod ids;
mod merge;
mod server_info;

pub use finished::Finished;
pub use ids::Snowflake;
pub use merge::{Merged, merge};
pub use server_info::{ServerInfo, ServerInfoError};

use bytes::Bytes;

use super::Bodies;
use super::handoff::{prefill_edits, strip};
use crate::fleet::Engine;
use crate::request::{Edit, ParsedBody, splice};

/// The hand-off.
const PARAMS: &str = "disaggregated_params";

/// The body of the context leg. `id` is the request's id in both workers, at least 2^42.
pub fn context_body(body: &ParsedBody, id: u64, generation_first: bool) -> Bytes {
    let schedule = if generation_first { r#","schedule_style":1"# } else { "" };
    let params = format!(r#"{{"request_type":"context_only","disagg_request_id":{id}{schedule}}}"#);
    let mut edits = prefill_edits(body, Engine::Trtllm);
    edits.push(Edit::Set(PARAMS, params.as_bytes()));
    splice(&body.raw, &body.fields, &edits)
}

/// The bodies of both legs of generation_first. The context worker's answer is not waited for, so the generation worker
/// gets no token ids: both pods turn the prompt into the same ones.
pub fn generation_bodies(body: &ParsedBody, id: u64, info: &ServerInfo) -> Bodies {
    let params = format!(
        r#"{{"request_type":"generation_only","disagg_request_id":{id},"ctx_request_id":{id},"schedule_style":1,{}}}"#,
        info.members()
    );
    Bodies { prefill: context_body(body, id, true), decode: with_params(body, params.as_bytes(), None) }
}

/// The client's body with this hand-off, and with the prompt's token ids under the name that the endpoint has for them.
fn with_params(body: &ParsedBody, params: &[u8], ids: Option<(&'static str, &[u8])>) -> Bytes {
    let mut edits = strip(Engine::Trtllm);
    edits.push(Edit::Set(PARAMS, params));
    edits.extend(ids.map(|(key, ids)| Edit::Set(key, ids)));
    splice(&body.raw, &body.fields, &edits)
}

#[cfg(test)]
mod tests;
