//! `bootstrap_*` and the data-parallel rank: how the two legs of a request find each other.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use http::HeaderMap;
use serde_json::Value;

use super::call::Api;
use super::failure::Failure;
use crate::body::{Fields, shown};
use crate::config::Role;
use crate::report::ViolationKind;
use crate::sequence::{Handover, Source};
use crate::side_channel::{Claim, Manner, room_key};
use crate::state::Core;

/// The host that stands for a transfer that does not happen.
const FAKE_HOST: &str = "2.2.2.2";
/// Where an SGLang bootstrap server listens by default.
const DEFAULT_PORT: u16 = 8998;

/// The rooms (TensorRT-LLM: request ids) that an engine saw, newest last.
#[derive(Debug)]
pub(crate) struct Rooms {
    seen: Mutex<(HashSet<u64>, VecDeque<u64>)>,
    most: usize,
}

impl Rooms {
    pub fn new(most: usize) -> Rooms {
        Rooms { seen: Mutex::default(), most }
    }

    /// Remembers `room`; says whether it is new.
    pub fn enter(&self, room: u64) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (set, order) = &mut *seen;
        if !set.insert(room) {
            return false;
        }
        order.push_back(room);
        while order.len() > self.most {
            let Some(oldest) = order.pop_front() else { break };
            set.remove(&oldest);
        }
        true
    }
}

/// How one sequence is handed over.
#[derive(Clone, Debug)]
pub(crate) struct Leg {
    pub source: Source,
    pub handover: Handover,
    /// The room, where there is one.
    pub room: u64,
    /// Where the prefill engine's bootstrap server is said to be.
    pub bootstrap: String,
}

/// Reads the legs of `prompts` prompts, whose ids are `rids`.
pub(crate) fn read(
    core: &Arc<Core>,
    fields: &Fields,
    (headers, api): (&HeaderMap, Api),
    rids: &[String],
    seq: u64,
) -> Result<Vec<Leg>, Failure> {
    let own_rank = rank(core, fields, headers, api)?;
    let prompts = rids.len();
    let local = Leg { source: Source::Local, handover: Handover::Nothing, room: 0, bootstrap: String::new() };
    let named = ["bootstrap_room", "bootstrap_host", "bootstrap_port"].iter().any(|name| fields.raw(name).is_some());
    if core.config.role == Role::Combined {
        if named && core.config.strict {
            core.violate(Some(seq), ViolationKind::HandoffMisplaced, "bootstrap_* at a combined engine".to_owned());
        }
        return Ok(vec![local; prompts]);
    }
    let rooms = each(fields, "bootstrap_room", prompts)?;
    let hosts = each(fields, "bootstrap_host", prompts)?;
    let ports = each(fields, "bootstrap_port", prompts)?;
    let batch = fields.value("bootstrap_room").is_some_and(|value| !value.is_array()) && prompts > 1;
    let mut legs = Vec::with_capacity(prompts);
    for (number, rid) in rids.iter().enumerate() {
        let at = |list: &[Value]| list.get(number).cloned().unwrap_or_default();
        let host = match at(&hosts) {
            Value::Null => String::new(),
            Value::String(host) => host,
            other => return Err(Failure::schema("bootstrap_host", "Input should be a valid string", &shown(&other))),
        };
        let port = match at(&ports) {
            Value::Null if core.config.bootstrap_port > 0 => core.config.bootstrap_port,
            Value::Null => DEFAULT_PORT,
            value => integer(&value, "bootstrap_port")
                .and_then(|port| u16::try_from(port).map_err(|_| bad_integer("bootstrap_port", &value)))?,
        };
        let Some(room) = room(core, &at(&rooms), rid, seq)? else {
            return Err(Failure::meaning(format!(
                "Invalid request: Disaggregated request received without bootstrap room id. req.rid='{rid}'"
            )));
        };
        let room = if batch { room.saturating_add(number as u64) } else { room };
        if host == FAKE_HOST && core.config.role == Role::Decode {
            if core.config.strict {
                core.violate(Some(seq), ViolationKind::TransferFaked, format!("bootstrap_host is {FAKE_HOST}"));
            }
            legs.push(Leg { source: Source::Faked, room, ..local.clone() });
            continue;
        }
        note(core, room, &host, seq);
        let bootstrap = format!("{host}:{port}");
        legs.push(match core.config.role {
            Role::Prefill => {
                let rank = own_rank.unwrap_or(room % u64::from(core.config.dp_size));
                let handover = Handover::Met { id: room_key(room, rank), first: true };
                Leg { source: Source::Local, handover, room, bootstrap }
            }
            Role::Decode | Role::Combined => {
                let rank =
                    fields.value("disagg_prefill_dp_rank").map(|value| integer(&value, "disagg_prefill_dp_rank"));
                let manner = Manner::Room { room, rank: rank.transpose()? };
                let claim = Claim::new(core, String::new(), String::new(), (&host, port), manner);
                if let Some(name) = claim.host_name().filter(|name| core.config.strict && !name.is_empty()) {
                    core.violate(Some(seq), ViolationKind::HostNotReplaced, format!("bootstrap_host is {name}"));
                }
                Leg { source: Source::Remote(Arc::new(claim)), handover: Handover::Nothing, room, bootstrap }
            }
        });
    }
    Ok(legs)
}

/// One room number, judged; `None` when there is none.
fn room(core: &Core, value: &Value, rid: &str, seq: u64) -> Result<Option<u64>, Failure> {
    if value.is_null() {
        if core.config.strict {
            core.violate(Some(seq), ViolationKind::RoomMissing, format!("rid {rid}"));
        }
        return Ok(None);
    }
    let room = integer(value, "bootstrap_room")?;
    if core.config.strict && (room == 0 || i64::try_from(room).is_err()) {
        core.violate(Some(seq), ViolationKind::RoomInvalid, format!("room {room}"));
    }
    if room == 0 {
        // A slot that holds 0 counts as not written yet.
        return Err(Failure::internal(format!(
            "Prefill transfer failed for request rank=0 req.rid='{rid}' req.bootstrap_room=0: metadata not ready"
        )));
    }
    Ok(Some(room))
}

fn note(core: &Core, room: u64, host: &str, seq: u64) {
    if !core.config.strict {
        return;
    }
    if !core.rooms.enter(room) {
        core.violate(Some(seq), ViolationKind::RoomReused, format!("room {room}"));
    }
    if host.is_empty() {
        core.violate(Some(seq), ViolationKind::HandoffIncomplete, "no bootstrap_host".to_owned());
    }
}

/// A field that is one value for all prompts, or a list with one for each.
fn each(fields: &Fields, name: &str, prompts: usize) -> Result<Vec<Value>, Failure> {
    match fields.value(name) {
        None => Ok(vec![Value::Null; prompts]),
        Some(Value::Array(list)) if prompts > 1 && list.len() == prompts => Ok(list),
        Some(Value::Array(list)) => Err(Failure::meaning(format!(
            "{name} has {} entries for {prompts} prompts: it must be a single value, or a list of one for each prompt.",
            list.len()
        ))),
        Some(value) => Ok(vec![value; prompts]),
    }
}

/// A non-negative integer; numbers travel exactly.
fn integer(value: &Value, name: &str) -> Result<u64, Failure> {
    value.as_u64().ok_or_else(|| bad_integer(name, value))
}

fn bad_integer(name: &str, value: &Value) -> Failure {
    Failure::schema(name, "Input should be a valid integer", &shown(value))
}

/// The data-parallel rank a request asks for: header (OpenAI paths), then body.
fn rank(core: &Core, fields: &Fields, headers: &HeaderMap, api: Api) -> Result<Option<u64>, Failure> {
    let header = headers.get("x-data-parallel-rank").filter(|_| api != Api::Generate);
    let asked = match header {
        Some(header) => {
            let text = String::from_utf8_lossy(header.as_bytes()).into_owned();
            let bad =
                || Failure::meaning(format!("Invalid X-Data-Parallel-Rank header: must be an integer, got '{text}'"));
            Some(text.trim().parse::<i64>().map_err(|_| bad())?)
        }
        None => match fields.integer("routed_dp_rank")? {
            Some(rank) => Some(rank),
            None => fields.integer("data_parallel_rank")?,
        },
    };
    let Some(asked) = asked else { return Ok(None) };
    let ranks = core.config.dp_size;
    u64::try_from(asked)
        .ok()
        .filter(|rank| *rank < u64::from(ranks))
        .map(Some)
        .ok_or_else(|| Failure::meaning(format!("routed_dp_rank={asked} out of range [0, {ranks})")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_are_remembered_up_to_a_limit() {
        let rooms = Rooms::new(2);
        assert!(rooms.enter(1) && rooms.enter(2) && !rooms.enter(1));
        assert!(rooms.enter(3), "1 goes");
        assert!(rooms.enter(1) && !rooms.enter(3));
    }

    #[test]
    fn values_spread_over_the_prompts_of_a_batch() {
        let fields = |text: &str| Fields::parse(format!(r#"{{"a":{text}}}"#).as_bytes()).expect("an object");
        for (text, prompts, expected) in
            [("7", 2, Some(2)), ("[7,8]", 2, Some(2)), ("[7]", 2, None), ("[7]", 1, None), ("null", 3, Some(3))]
        {
            assert_eq!(each(&fields(text), "a", prompts).ok().map(|list| list.len()), expected, "{text}");
        }
        for (text, expected) in [
            ("9223372036854775807", Some(i64::MAX as u64)),
            ("18446744073709551616", None),
            ("1.5", None),
            ("-1", None),
        ] {
            let value: Value = serde_json::from_str(text).expect("JSON");
            assert_eq!(integer(&value, "a").ok(), expected, "{text}");
        }
    }
}
