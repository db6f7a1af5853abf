//! `disaggregated_params`: which leg a request is, and where the other one is.

use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::failure::Failure;
use super::server_info;
use crate::body::{Complaint, Fields, shown};
use crate::config::Role;
use crate::prompt::Finish;
use crate::report::ViolationKind;
use crate::sequence::{Finished, Handover, Source};
use crate::side_channel::{Claim, Manner};
use crate::state::Core;

/// Workers keep their own ids below this one.
const SMALLEST_GLOBAL_ID: u64 = 1 << 42;

/// Which part of a generation a request is.
#[derive(Clone, Debug)]
pub(crate) enum Leg {
    /// All of it.
    Both,
    /// The prompt.
    Context {
        /// The id the gateway gave.
        disagg_request_id: Option<u64>,
        /// The worker's own id.
        ctx_request_id: u64,
        /// Whether the generation leg runs at the same time.
        generation_first: bool,
    },
    /// The rest.
    Generation(Arc<Claim>),
}

impl Leg {
    pub fn source(&self) -> Source {
        match self {
            Leg::Both | Leg::Context { .. } => Source::Local,
            Leg::Generation(claim) => Source::Remote(claim.clone()),
        }
    }

    pub fn handover(&self) -> Handover {
        match self {
            Leg::Both | Leg::Generation(_) => Handover::Nothing,
            Leg::Context { generation_first: true, .. } => Handover::Met { id: self.key(), first: false },
            Leg::Context { .. } => Handover::Pinned(self.key()),
        }
    }

    /// The id under which the KV waits.
    fn key(&self) -> String {
        match self {
            Leg::Context { disagg_request_id: Some(id), .. } => global_key(*id),
            Leg::Context { ctx_request_id, .. } => format!("local-{ctx_request_id}"),
            Leg::Both | Leg::Generation(_) => String::new(),
        }
    }
}

fn global_key(id: u64) -> String {
    id.to_string()
}

/// What the worker writes into `encoded_opaque_state`.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    address: SocketAddr,
    key: String,
    ctx_request_id: u64,
    disagg_request_id: Option<u64>,
    first_token: u32,
}

impl State {
    /// Letters and digits only, as base64 would be.
    fn encode(&self) -> String {
        let text = serde_json::to_string(self).unwrap_or_default();
        let mut encoded = String::with_capacity(text.len() * 2);
        for byte in text.bytes() {
            let _ = write!(encoded, "{byte:02x}");
        }
        encoded
    }

    fn decode(text: &str) -> Option<State> {
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes: Vec<u8> = text.as_bytes().chunks(2).map(byte).collect::<Option<_>>()?;
        serde_json::from_slice(&bytes).ok()
    }
}

/// The members of a request's `disaggregated_params`.
struct Params<'a> {
    core: &'a Arc<Core>,
    seq: u64,
    members: std::collections::HashMap<String, Box<serde_json::value::RawValue>>,
}

impl Params<'_> {
    fn value(&self, name: &str) -> Value {
        self.members.get(name).and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default()
    }

    /// An id; numbers travel exactly.
    fn id(&self, name: &str) -> Result<Option<u64>, Failure> {
        match self.value(name) {
            Value::Null => Ok(None),
            value => value.as_u64().map(Some).ok_or_else(|| {
                let place = format!("disaggregated_params.{name}");
                Complaint::schema("int_type", &place, "Input should be a valid integer", &shown(&value)).into()
            }),
        }
    }

    fn text(&self, name: &str) -> Option<String> {
        self.value(name).as_str().filter(|text| !text.is_empty()).map(str::to_owned)
    }

    fn violate(&self, kind: ViolationKind, detail: &str) {
        if self.core.config.strict {
            self.core.violate(Some(self.seq), kind, detail.to_owned());
        }
    }

    /// A hand-off without what it needs.
    fn lacking(&self, what: &str) -> Failure {
        self.violate(ViolationKind::HandoffIncomplete, &format!("no {what}"));
        Failure::meaning(format!("{what} must be set for a generation_only request"))
    }

    /// A hand-off that is not what the context worker said.
    fn altered(&self, what: &str) -> Failure {
        self.violate(ViolationKind::HandoffAltered, what);
        Failure::meaning(format!("Invalid disaggregated_params: {what}"))
    }
}

/// Reads the hand-off fields.
pub(crate) fn read(core: &Arc<Core>, fields: &Fields, seq: u64) -> Result<Leg, Failure> {
    let Some(members) = fields.object("disaggregated_params")? else { return Ok(Leg::Both) };
    let params = Params { core, seq, members };
    let kind = match params.value("request_type") {
        Value::String(kind) => kind,
        Value::Null => return Err(Complaint::missing("disaggregated_params.request_type", "<dict>").into()),
        other => {
            let (place, text) = ("disaggregated_params.request_type", "Input should be a valid string");
            return Err(Complaint::schema("string_type", place, text, &shown(&other)).into());
        }
    };
    let generation_first = match params.id("schedule_style")? {
        None | Some(0) => false,
        Some(1) => true,
        Some(other) => {
            let (place, text) = ("disaggregated_params.schedule_style", "Input should be 0 or 1");
            return Err(Complaint::schema("enum", place, text, &other.to_string()).into());
        }
    };
    match (kind.as_str(), core.config.role) {
        ("context_and_generation", _) => Ok(Leg::Both),
        ("context_only", Role::Prefill) => context(&params, generation_first),
        ("generation_only", Role::Decode) if generation_first => concurrent(&params),
        ("generation_only", Role::Decode) => sequential(&params),
        ("context_only" | "generation_only", role) => {
            params.violate(ViolationKind::HandoffMisplaced, &format!("{kind} at a {role:?} engine"));
            Err(Failure::meaning(format!(
                "This worker cannot serve {kind} requests: it has no cache transceiver for them."
            )))
        }
        _ => Err(Failure::meaning(format!(
            "Unknown request type: {kind}. Must be context_only, generation_only or context_and_generation"
        ))),
    }
}

fn context(params: &Params<'_>, generation_first: bool) -> Result<Leg, Failure> {
    let disagg_request_id = params.id("disagg_request_id")?;
    match disagg_request_id {
        Some(id) if id >= SMALLEST_GLOBAL_ID && i64::try_from(id).is_ok() => {
            if !params.core.rooms.enter(id) {
                params.violate(ViolationKind::HandoffReused, &format!("disagg_request_id {id}"));
            }
        }
        other => params.violate(ViolationKind::RequestIdTooSmall, &format!("disagg_request_id {other:?}")),
    }
    if generation_first && disagg_request_id.is_none() {
        return Err(Failure::meaning("disagg_request_id must be set when the generation is scheduled first"));
    }
    Ok(Leg::Context { disagg_request_id, ctx_request_id: params.seq + 1, generation_first })
}

/// context_first: the context worker's own parameters come back.
fn sequential(params: &Params<'_>) -> Result<Leg, Failure> {
    let ctx = params.id("ctx_request_id")?.ok_or_else(|| params.lacking("ctx_request_id"))?;
    let state = params.text("encoded_opaque_state").ok_or_else(|| params.lacking("encoded_opaque_state"))?;
    let state = State::decode(&state).ok_or_else(|| params.altered("encoded_opaque_state cannot be decoded"))?;
    if state.ctx_request_id != ctx || state.disagg_request_id != params.id("disagg_request_id")? {
        return Err(params.altered("the ids are not those of encoded_opaque_state"));
    }
    if params.value("first_gen_tokens") != Value::from(vec![state.first_token]) {
        return Err(params.altered("first_gen_tokens are not the context worker's"));
    }
    let place = (state.address.ip().to_string(), state.address.port());
    let claim = Claim::new(params.core, String::new(), state.key, (&place.0, place.1), Manner::Pull);
    Ok(Leg::Generation(Arc::new(claim)))
}

/// generation_first: the context worker is named by its `/server_info`, the KV by the gateway's id.
fn concurrent(params: &Params<'_>) -> Result<Leg, Failure> {
    let id = params.id("disagg_request_id")?.ok_or_else(|| params.lacking("disagg_request_id"))?;
    let ctx = params.id("ctx_request_id")?.ok_or_else(|| params.lacking("ctx_request_id"))?;
    if ctx != id {
        return Err(params.altered("ctx_request_id is not disagg_request_id"));
    }
    let endpoint = params.text("ctx_info_endpoint").ok_or_else(|| params.lacking("ctx_info_endpoint"))?;
    if params.id("ctx_dp_rank")?.is_none() {
        return Err(params.lacking("ctx_dp_rank"));
    }
    let place = endpoint.strip_prefix("tcp://").and_then(|place| {
        let (host, port) = place.rsplit_once(':')?;
        Some((host, port.parse().ok()?))
    });
    let place = place.ok_or_else(|| params.altered("ctx_info_endpoint is no tcp:// address"))?;
    let claim = Claim::new(params.core, String::new(), global_key(id), place, Manner::Take);
    Ok(Leg::Generation(Arc::new(claim)))
}

/// The `disaggregated_params` of a context answer, as JSON. When the model ended by itself there is nothing to hand over
/// and the ids are null.
pub(crate) fn offered(core: &Core, leg: &Leg, result: &Finished) -> Option<String> {
    let Leg::Context { disagg_request_id, ctx_request_id, generation_first } = leg else { return None };
    let first_token = result.output.ids.first().copied().unwrap_or_default();
    let number = |id: Option<u64>| id.map_or_else(|| "null".to_owned(), |id| id.to_string());
    let handed = result.output.finish == Finish::Length;
    let state = State {
        address: SocketAddr::new(core.address.ip(), core.side_channel_port),
        key: leg.key(),
        ctx_request_id: *ctx_request_id,
        disagg_request_id: *disagg_request_id,
        first_token,
    };
    let opaque = if handed { format!("\"{}\"", state.encode()) } else { "null".to_owned() };
    let endpoint = server_info::endpoint(core).map_or_else(|| "null".to_owned(), |endpoint| format!("\"{endpoint}\""));
    Some(format!(
        r#"{{"request_type":"context_only","first_gen_tokens":[{first_token}],"ctx_request_id":{},"encoded_opaque_state":{opaque},"draft_tokens":null,"disagg_request_id":{},"ctx_dp_rank":0,"ctx_info_endpoint":{endpoint},"schedule_style":{}}}"#,
        number(handed.then_some(*ctx_request_id)),
        number(*disagg_request_id),
        u8::from(*generation_first)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_opaque_state_comes_back_as_it_was() {
        let state = State {
            address: "[::1]:5555".parse().expect("an address"),
            key: global_key(i64::MAX as u64),
            ctx_request_id: 7,
            disagg_request_id: Some(i64::MAX as u64),
            first_token: 1_003,
        };
        let text = state.encode();
        assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric()));
        let back = State::decode(&text).expect("decodes");
        assert_eq!(
            (back.address, back.disagg_request_id, back.key),
            (state.address, state.disagg_request_id, state.key)
        );
        for bad in ["", "zz", "7", &text[2..]] {
            assert!(State::decode(bad).is_none(), "{bad}");
        }
    }
}
