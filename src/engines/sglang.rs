//! SGLang: both legs at once, matched by a room (`engine-protocols` section 3).
//!
//! The gateway owns `bootstrap_host`, `bootstrap_port`, `bootstrap_room` and `rid`; whatever a client wrote there is
//! replaced. (`bootstrap_host: "2.2.2.2"` is the engine's own sign for a transfer that does not happen.) So are the
//! fields that choose a data-parallel rank: prefill and decode pods agree on one by the room.

use bytes::Bytes;

use super::Bodies;
use super::handoff::{prefill_edits, quoted, strip};
use crate::fleet::Engine;
use crate::request::{Edit, ParsedBody, splice};

/// Fields by which a client would pin a request to a data-parallel rank (section 3.4).
const RANK_KEYS: [&str; 3] = ["routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"];

/// Where the two legs of a request meet.
#[derive(Clone, Copy, Debug)]
pub struct Bootstrap<'a> {
    /// The prefill pod's host, as the pod reports it; IPv6 without brackets.
    pub host: &'a str,
    /// The port of its bootstrap server.
    pub port: u16,
    /// The room; see [`room`].
    pub room: u64,
    /// The request's id in both engines; see [`rid`].
    pub rid: &'a str,
}

/// The bodies of both legs. The decode leg keeps the client's limits and stream settings. Of `/generate`, whose limits
/// are nested, the prefill pod makes one token by itself.
pub fn bodies(body: &ParsedBody, bootstrap: &Bootstrap<'_>) -> Bodies {
    let (host, rid) = (quoted(bootstrap.host), quoted(bootstrap.rid));
    let (port, room) = (bootstrap.port.to_string(), bootstrap.room.to_string());
    let with_handoff = |mut edits: Vec<Edit<'_>>| {
        edits.extend(RANK_KEYS.map(Edit::Remove));
        let edits = edits.iter().cloned().chain([
            Edit::Set("bootstrap_host", &host),
            Edit::Set("bootstrap_port", port.as_bytes()),
            Edit::Set("bootstrap_room", room.as_bytes()),
            Edit::Set("rid", &rid),
        ]);
        splice(&body.raw, &body.fields, &edits.collect::<Vec<_>>())
    };
    Bodies { prefill: with_handoff(prefill_edits(body, Engine::Sglang)), decode: with_handoff(strip(Engine::Sglang)) }
}

/// A room in 1..=2^63-1 (0 reads as "not ready"; some platforms keep it in a signed number). An engine gives the prompts
/// of a list the rooms `room`, `room + 1`, …: there is space for `prompts` of them.
pub fn room(random: u64, prompts: usize) -> u64 {
    let others = u64::try_from(prompts).unwrap_or(u64::MAX).saturating_sub(1);
    let highest = (i64::MAX as u64).saturating_sub(others).max(1);
    1 + random % highest
}

/// A request's id in the engines: `<request id>-<16 hex digits>`. `attempt` is a number that no other attempt has, on
/// whatever replica. An abort takes every id that begins with the one it names; as this end has a fixed width, the id of
/// one attempt is no beginning of another's, nor is it ever empty.
pub fn rid(request_id: &str, attempt: u64) -> String {
    format!("{request_id}-{attempt:016x}")
}

/// The body of `POST /abort_request`.
pub fn abort_body(rid: &str) -> Bytes {
    Bytes::from([b"{\"rid\":".as_slice(), &quoted(rid), b"}"].concat())
}

#[cfg(test)]
mod tests;
