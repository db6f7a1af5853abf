//! `kv_transfer_params` and `disagg_prefill_resp`: what a request says about its KV, and what is wrong with it.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::failure::Failure;
use crate::body::Fields;
use crate::config::{Connector, OnViolation, Role};
use crate::fault::Fault;
use crate::report::ViolationKind;
use crate::sequence::{Produced, Source};
use crate::side_channel::{Claim, Manner};
use crate::state::Core;

/// What a request's hand-off fields ask for.
#[derive(Clone, Debug)]
pub(crate) struct Handoff {
    /// Where the prompt's KV comes from.
    pub source: Source,
    /// Whether the KV is to be handed over.
    pub produce: Produce,
}

/// How a prefill's KV is handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Produce {
    /// Not at all.
    Nothing,
    /// The answer says where it is (NIXL).
    Answered,
    /// Both legs know this `transfer_id` (Mooncake).
    Named(String),
    /// It lies in shared storage, and the answer says so (AIBrix).
    Stored,
}

/// The members of `kv_transfer_params`.
type Params = HashMap<String, Box<RawValue>>;

/// The hand-off object of a prefill answer, in the order of the real one.
#[derive(Debug, Serialize)]
struct Offer<'a> {
    do_remote_prefill: bool,
    do_remote_decode: bool,
    remote_block_ids: [&'a [u64]; 1],
    remote_engine_id: &'a str,
    remote_request_id: &'a str,
    remote_host: &'a str,
    remote_port: u16,
    tp_size: u32,
    dcp_size: u32,
    pp_size: u32,
    remote_num_tokens: u32,
    remote_blocks_expiry_time: Option<f64>,
    transfer_mode: &'a str,
    remote_prefill_cached_tokens: u32,
}

/// The same of AIBrix's connector, which has nothing to say but that it has written the KV.
#[derive(Debug, Serialize)]
struct StoredOffer<'a> {
    do_remote_prefill: bool,
    do_remote_decode: bool,
    remote_block_ids: [u64; 0],
    remote_engine_id: &'a str,
    remote_host: &'a str,
    remote_port: i32,
    tp_size: u32,
}

/// Reads the hand-off fields for an engine of this role.
///
/// # Errors
/// A field of the wrong type (the schema's 400), or in strict mode a hand-off that real engines die of. A request that
/// is `refused` for another reason is refused for that one, which does not save the engine.
pub(crate) async fn read(
    core: &Arc<Core>,
    fields: &Fields,
    seq: u64,
    refused: Option<&Failure>,
) -> Result<Handoff, Failure> {
    let params = fields.object("kv_transfer_params")?.unwrap_or_default();
    let truth = |name: &str| params.get(name).is_some_and(|raw| raw.get() == "true");
    let (produce, consume) = (truth("do_remote_decode"), truth("do_remote_prefill"));
    let misplaced = match core.config.role {
        Role::Prefill => consume,
        Role::Decode => produce,
        Role::Combined => consume || produce,
    };
    if misplaced && core.config.strict {
        let detail = format!("{:?} engine: do_remote_decode {produce}, do_remote_prefill {consume}", core.config.role);
        core.violate(Some(seq), ViolationKind::HandoffMisplaced, detail);
    }
    let connector = core.config.connector;
    let source = match (core.config.role, connector) {
        (Role::Decode, Connector::Mooncake) if consume => awaited(core, &params, seq)?,
        (Role::Decode, Connector::Aibrix) if consume => stored(core, &params, seq),
        (Role::Decode, Connector::Nixl) if consume => consumed(core, &params, seq, refused).await?,
        (Role::Decode, _) => told(core, fields, seq),
        (Role::Prefill | Role::Combined, _) => Source::Local,
    };
    let produce = match (produce && core.config.role == Role::Prefill, connector) {
        (false, _) => Produce::Nothing,
        (true, Connector::Nixl) => Produce::Answered,
        (true, Connector::Aibrix) => Produce::Stored,
        (true, Connector::Mooncake) => match text(&params, "transfer_id") {
            Some(id) => Produce::Named(id),
            None => return Err(lacking(core, &params, seq)),
        },
    };
    Ok(Handoff { source, produce })
}

/// AIBrix: the KV that the prompt itself names in shared storage. The real connector looks at nothing but
/// `do_remote_prefill`; what a gateway has no reason to change is checked here all the same.
fn stored(core: &Core, params: &Params, seq: u64) -> Source {
    if core.config.strict {
        let of_connector = value(params, "remote_block_ids") == serde_json::json!([])
            && value(params, "remote_port") == serde_json::json!(-1)
            && value(params, "tp_size").is_u64();
        if text(params, "remote_engine_id").is_none() {
            core.violate(Some(seq), ViolationKind::HandoffIncomplete, members(params));
        } else if !of_connector {
            core.violate(Some(seq), ViolationKind::HandoffAltered, members(params));
        }
        let host = text(params, "remote_host").unwrap_or_default();
        if host.parse::<std::net::IpAddr>().is_err() {
            core.violate(Some(seq), ViolationKind::HostNotReplaced, format!("remote_host is {host:?}"));
        }
    }
    Source::Told
}

/// Mooncake: the KV of `transfer_id`, which the engine at `remote_bootstrap_addr` may still have to make.
fn awaited(core: &Arc<Core>, params: &Params, seq: u64) -> Result<Source, Failure> {
    let address = text(params, "remote_bootstrap_addr");
    let place = address.as_deref().and_then(|address| {
        let (host, port) = address.strip_prefix("http://")?.trim_end_matches('/').rsplit_once(':')?;
        Some((host, port.parse().ok().filter(|port| *port > 0)?))
    });
    let (Some(id), Some(engine), Some(place)) = (text(params, "transfer_id"), text(params, "remote_engine_id"), place)
    else {
        return Err(lacking(core, params, seq));
    };
    let claim = Claim::new(core, engine, id, place, Manner::Take);
    note_host(core, &claim, seq);
    Ok(Source::Remote(Arc::new(claim)))
}

fn value(params: &Params, name: &str) -> Value {
    params.get(name).and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default()
}

fn text(params: &Params, name: &str) -> Option<String> {
    value(params, name).as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

fn note_host(core: &Core, claim: &Claim, seq: u64) {
    if core.config.strict
        && let Some(name) = claim.host_name()
    {
        core.violate(Some(seq), ViolationKind::HostNotReplaced, format!("remote_host is {name}"));
    }
}

async fn consumed(core: &Arc<Core>, params: &Params, seq: u64, refused: Option<&Failure>) -> Result<Source, Failure> {
    let port = value(params, "remote_port").as_u64().and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0);
    let blocks = has_block(&value(params, "remote_block_ids"));
    let request_id = text(params, "remote_request_id");
    let hangs = request_id.is_none() && blocks;
    let (Some(engine), Some(request_id), Some(host), Some(port), true) =
        (text(params, "remote_engine_id"), request_id, text(params, "remote_host"), port, blocks)
    else {
        return incomplete(core, params, seq, hangs, refused).await.map_or(Ok(Source::Local), Err);
    };
    let claim = Claim::new(core, engine, request_id, (&host, port), Manner::Pull);
    note_host(core, &claim, seq);
    Ok(Source::Remote(Arc::new(claim)))
}

/// Some group of blocks is not empty. Before 0.19 the list was flat.
fn has_block(ids: &Value) -> bool {
    ids.as_array().is_some_and(|groups| {
        groups.iter().any(|group| group.is_u64() || group.as_array().is_some_and(|group| !group.is_empty()))
    })
}

/// What a hand-off that lacks something leads to; nothing in lenient mode.
async fn incomplete(core: &Core, params: &Params, seq: u64, hangs: bool, refused: Option<&Failure>) -> Option<Failure> {
    if !core.config.strict {
        return None;
    }
    let dead = lacking(core, params, seq);
    if core.config.on_violation == OnViolation::AsReal {
        let _crash = CrashLater { core };
        if hangs && refused.is_none() {
            // Without the request id the transfer never starts; the engine dies when the client gives up.
            std::future::pending::<()>().await;
        }
    }
    Some(refused.cloned().unwrap_or(dead))
}

/// Writes down a hand-off that lacks something.
fn lacking(core: &Core, params: &Params, seq: u64) -> Failure {
    core.violate(Some(seq), ViolationKind::HandoffIncomplete, members(params));
    Failure::engine_dead()
}

/// A hand-off as text, ordered and not too long.
fn members(params: &Params) -> String {
    let mut members: Vec<_> = params.iter().map(|(name, raw)| format!("{name}: {}", raw.get())).collect();
    members.sort_unstable();
    members.join(", ").chars().take(512).collect()
}

/// Crashes the engine when it drops, which includes the client's leaving.
struct CrashLater<'core> {
    core: &'core Core,
}

impl Drop for CrashLater<'_> {
    fn drop(&mut self) {
        self.core.crash();
    }
}

/// The Neuron connector: the whole prefill answer must be there, or the prompt is computed here.
fn told(core: &Core, fields: &Fields, seq: u64) -> Source {
    let Some(answer) = fields.value("disagg_prefill_resp") else { return Source::Local };
    let text = |name: &str| answer.get(name).is_some_and(Value::is_string);
    let whole = text("id")
        && text("object")
        && text("model")
        && answer.get("created").is_some_and(Value::is_u64)
        && answer.get("choices").and_then(Value::as_array).is_some_and(|choices| !choices.is_empty())
        && answer.pointer("/usage/prompt_tokens").is_some_and(Value::is_u64);
    if whole {
        return Source::Told;
    }
    if core.config.strict {
        let detail: String = answer.to_string().chars().take(512).collect();
        core.violate(Some(seq), ViolationKind::PrefillAnswerIncomplete, detail);
    }
    Source::Local
}

/// The `kv_transfer_params` of a prefill answer, after what a scripted fault does to it.
pub(crate) fn offered(core: &Core, produced: Option<&Produced>, fault: Option<&Fault>) -> Option<Box<RawValue>> {
    if let Some(scripted) = fault.and_then(|fault| fault.kv_transfer_params.clone()) {
        if let Some(produced) = produced {
            core.handoffs.free(&produced.request_id);
            core.changed();
        }
        return Some(scripted);
    }
    let produced = produced?;
    if core.config.connector != Connector::Nixl {
        let params = StoredOffer {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: [],
            remote_engine_id: &core.engine_id,
            remote_host: "",
            remote_port: -1,
            tp_size: 1,
        };
        let offer = (core.config.connector == Connector::Aibrix).then(|| serde_json::to_string(&params).ok());
        return RawValue::from_string(offer??).ok();
    }
    let params = Offer {
        do_remote_prefill: true,
        do_remote_decode: false,
        remote_block_ids: [&produced.blocks],
        remote_engine_id: &core.engine_id,
        remote_request_id: &produced.request_id,
        remote_host: &core.config.advertised_host,
        remote_port: core.side_channel_port,
        tp_size: 1,
        dcp_size: 1,
        pp_size: 1,
        remote_num_tokens: produced.tokens,
        remote_blocks_expiry_time: None,
        transfer_mode: "pull",
        remote_prefill_cached_tokens: produced.cached_tokens,
    };
    let text = serde_json::to_string(&params).ok()?;
    let text = match fault.and_then(|fault| fault.kv_transfer_params_extra.as_ref()) {
        Some(extra) => merged(&text, extra.get()).unwrap_or(text),
        None => text,
    };
    RawValue::from_string(text).ok()
}

/// The members of `base` that `extra` does not name, then those of `extra`, bytes kept.
fn merged(base: &str, extra: &str) -> Option<String> {
    let (base, extra): (Members, Members) = (serde_json::from_str(base).ok()?, serde_json::from_str(extra).ok()?);
    let kept = base.0.iter().filter(|(name, _)| extra.0.iter().all(|(other, _)| other != name));
    let members: Vec<_> = kept
        .chain(&extra.0)
        .map(|(name, raw)| Some(format!("{}:{}", serde_json::to_string(name).ok()?, raw.get())))
        .collect::<Option<_>>()?;
    Some(format!("{{{}}}", members.join(",")))
}

/// An object's members in their order.
struct Members(Vec<(String, Box<RawValue>)>);

impl<'de> serde::Deserialize<'de> for Members {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Members, D::Error> {
        struct InOrder;
        impl<'de> serde::de::Visitor<'de> for InOrder {
            type Value = Members;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_ids_may_be_nested_or_flat_but_not_empty() {
        for (ids, expected) in [
            ("[[1,2],[]]", true),
            ("[[],[3]]", true),
            ("[4]", true),
            ("[]", false),
            ("[[]]", false),
            ("null", false),
            ("\"1\"", false),
        ] {
            assert_eq!(has_block(&serde_json::from_str(ids).expect(ids)), expected, "{ids}");
        }
    }

    #[test]
    fn extra_members_replace_and_keep_their_bytes() {
        let merged = merged(r#"{"b":1,"a":[[1]]}"#, r#"{"a":[[3,4],[]],"x":{"n":123456789012345678901234}}"#);
        assert_eq!(merged.as_deref(), Some(r#"{"b":1,"a":[[3,4],[]],"x":{"n":123456789012345678901234}}"#));
        assert_eq!(super::merged("{}", "[1]"), None);
    }
}
