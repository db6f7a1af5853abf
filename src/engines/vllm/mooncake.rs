//! vLLM's MooncakeConnector: both legs at once, matched by a transfer id (`engine-protocols` section 2.3).

use bytes::Bytes;

use super::super::Bodies;
use super::super::handoff::{prefill_edits, quoted, strip};
use super::KV_PARAMS;
use crate::fleet::{Engine, join_host_port};
use crate::request::scan::{JsonObject, decode_string};
use crate::request::{Edit, ParsedBody, splice};

/// The answer of `/query` names no engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineIdError {
    /// Not a JSON object.
    #[error("it is not a JSON object")]
    NotJson,
    /// No rank has an `engine_id`.
    #[error("it names no engine_id")]
    NoEngine,
}

/// The bodies of both legs. `host` and `port` are those of the prefill pod's bootstrap server, IPv6 without brackets.
pub fn bodies(body: &ParsedBody, transfer_id: &str, engine_id: &str, host: &str, port: u16) -> Bodies {
    let text = |text: &str| String::from_utf8(quoted(text)).unwrap_or_default();
    let (transfer, engine) = (text(transfer_id), text(engine_id));
    let address = text(&format!("http://{}", join_host_port(host, port)));
    let with_params = |edits: Vec<Edit<'_>>, params: &str| -> Bytes {
        let set = [Edit::Set(KV_PARAMS, params.as_bytes())];
        splice(&body.raw, &body.fields, &edits.iter().cloned().chain(set).collect::<Vec<_>>())
    };
    Bodies {
        prefill: with_params(
            prefill_edits(body, Engine::Vllm),
            &format!(r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":{transfer}}}"#),
        ),
        decode: with_params(
            strip(Engine::Vllm),
            &format!(
                r#"{{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":{engine},"remote_bootstrap_addr":{address},"transfer_id":{transfer}}}"#
            ),
        ),
    }
}

/// The engine id in the answer of a bootstrap server's `/query`, which maps data-parallel ranks to engines: that of rank
/// 0, else any.
pub fn engine_id(answer: &[u8]) -> Result<String, EngineIdError> {
    let ranks = JsonObject::parse(answer).map_err(|_| EngineIdError::NotJson)?;
    let id = |rank: &str| {
        let engine = JsonObject::parse(ranks.get(rank)?.as_bytes()).ok()?;
        engine.get("engine_id").and_then(decode_string).filter(|id| !id.is_empty()).map(|id| id.into_owned())
    };
    id("0").or_else(|| ranks.fields().iter().find_map(|rank| id(&rank.key))).ok_or(EngineIdError::NoEngine)
}
