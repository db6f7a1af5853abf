//! What a context worker says of itself, as far as a generation worker has to be told (`engine-protocols` section 4.4).

use std::fmt;

use crate::request::scan::{JsonObject, decode_string, each_element};

/// Where a context worker hands over KV blocks.
#[derive(Clone, PartialEq, Eq)]
pub struct ServerInfo {
    /// `ctx_info_endpoint`, a JSON string as the worker wrote it.
    endpoint: String,
    /// `ctx_dp_rank`.
    rank: u64,
    /// `encoded_opaque_state`, a JSON string as the worker wrote it.
    opaque: Option<String>,
}

/// `/server_info` does not say what is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServerInfoError {
    /// Not a JSON object.
    #[error("it is not a JSON object")]
    NotJson,
    /// `disaggregated_params` is no object.
    #[error("disaggregated_params is not an object")]
    NoParams,
    /// No endpoint.
    #[error("ctx_info_endpoint is not a non-empty string, nor a list of one")]
    NoEndpoint,
    /// No rank.
    #[error("ctx_dp_rank is not an integer of at least 0")]
    NoRank,
    /// A state that is no text.
    #[error("encoded_opaque_state is not a string")]
    BadState,
}

impl ServerInfo {
    /// Reads the answer of `/server_info`.
    pub fn parse(answer: &[u8]) -> Result<ServerInfo, ServerInfoError> {
        let answer = JsonObject::parse(answer).map_err(|_| ServerInfoError::NotJson)?;
        let params = answer.get("disaggregated_params").and_then(|params| JsonObject::parse(params.as_bytes()).ok());
        let params = params.ok_or(ServerInfoError::NoParams)?;
        let endpoint = params.get("ctx_info_endpoint").map(only).filter(|text| is_text(text));
        let rank = params.get("ctx_dp_rank").filter(|rank| rank.bytes().all(|byte| byte.is_ascii_digit()));
        let opaque = params.get_non_null("encoded_opaque_state");
        if opaque.is_some_and(|state| decode_string(state).is_none()) {
            return Err(ServerInfoError::BadState);
        }
        Ok(ServerInfo {
            endpoint: endpoint.ok_or(ServerInfoError::NoEndpoint)?.to_owned(),
            rank: rank.and_then(|rank| rank.parse().ok()).ok_or(ServerInfoError::NoRank)?,
            opaque: opaque.map(str::to_owned),
        })
    }

    /// The members that the generation worker's `disaggregated_params` gets.
    pub(super) fn members(&self) -> String {
        let ServerInfo { endpoint, rank, opaque } = self;
        let mut members = format!(r#""ctx_info_endpoint":{endpoint},"ctx_dp_rank":{rank}"#);
        if let Some(state) = opaque {
            members.push_str(r#","encoded_opaque_state":"#);
            members.push_str(state);
        }
        members
    }
}

/// The state is a way into the worker's memory, and stays out of logs.
impl fmt::Debug for ServerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ServerInfo { endpoint, rank, opaque } = self;
        let mut out = f.debug_struct("ServerInfo");
        out.field("endpoint", endpoint).field("rank", rank).field("opaque", &opaque.is_some()).finish()
    }
}

fn is_text(value: &str) -> bool {
    decode_string(value).is_some_and(|text| !text.is_empty())
}

/// The element of a list of one; any other value is itself. (Newer workers give a list; with several elements nobody
/// could say which one has the blocks.)
fn only(value: &str) -> &str {
    let (mut element, mut count) = (value, 0_usize);
    let read = each_element(value, |first| {
        element = first;
        count += 1;
        count == 1
    });
    if read.is_ok() && count == 1 { element } else { value }
}
