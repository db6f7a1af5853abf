//! Who made the `kv_transfer_params` of a prefill answer. Every connector of vLLM writes an object of its own under that
//! name, and what a decode pod needs of it differs: each is judged by its maker's rules.

use std::time::Duration;

use crate::request::scan::{JsonObject, decode_string, each_element};

/// The connector that wrote a hand-off, by the members that only it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Maker {
    /// vLLM's `NixlConnector`, alone or inside a `MultiConnector`: the blocks lie in the memory of the prefill pod, which
    /// says where, and a decode pod without an address or a block dies of it (`engine-protocols` section 2.7).
    Nixl,
    /// AIBrix's connector over its KVCacheManager (`AIBrixPDReuseConnector`): the KV lies in shared storage and is found by
    /// content. It writes no blocks, no host, and -1 for a port; the prefill pod has freed its blocks by then.
    Aibrix,
    /// vLLM's `MooncakeConnector`, which names a transfer. Both of its legs are sent at once, so its pods must be labelled.
    Mooncake,
    /// LMCache's multi-process connector: the KV lies in LMCache's server and is found by content. What it answers are notes,
    /// of which a decode pod needs none.
    Lmcache,
    /// None of these, or an empty object.
    Unknown,
}

impl Maker {
    /// Every maker.
    pub const ALL: [Maker; 5] = [Maker::Nixl, Maker::Aibrix, Maker::Mooncake, Maker::Lmcache, Maker::Unknown];

    /// The maker of this object.
    pub fn of(params: &JsonObject<'_>) -> Maker {
        let has = |key| params.get_non_null(key).is_some();
        if params.get("remote_port").is_some_and(is_no_port) {
            Maker::Aibrix
        } else if has("transfer_id") || has("remote_bootstrap_addr") {
            Maker::Mooncake
        } else if ["do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_port"].into_iter().any(has) {
            Maker::Nixl
        } else if !params.fields().is_empty() && params.fields().iter().all(|field| is_of_lmcache(&field.key)) {
            Maker::Lmcache
        } else {
            Maker::Unknown
        }
    }

    /// What a decode pod would lack; `None` when it can work with the object.
    pub fn flaw(self, params: &JsonObject<'_>) -> Option<Flaw> {
        match self {
            Maker::Mooncake => return Some(Flaw::Mooncake),
            Maker::Unknown => return Some(Flaw::Unknown),
            Maker::Lmcache => return None,
            Maker::Nixl | Maker::Aibrix => {}
        }
        let has_text = |key| params.get(key).is_some_and(is_text);
        let blocks = params.get("remote_block_ids").and_then(count_blocks);
        if params.get("do_remote_prefill") != Some("true") {
            return Some(Flaw::NotForDecode);
        }
        if !has_text("remote_engine_id") {
            return Some(Flaw::Engine);
        }
        if self == Maker::Aibrix {
            return if blocks == Some(0) { None } else { Some(Flaw::BlocksWithoutPort) };
        }
        let port = params.get("remote_port").and_then(|port| port.parse::<u16>().ok());
        if !has_text("remote_host") {
            Some(Flaw::Host)
        } else if port.is_none_or(|port| port == 0) {
            Some(Flaw::Port)
        } else if blocks.is_none_or(|blocks| blocks == 0) {
            Some(Flaw::Blocks)
        } else if !params.get("remote_request_id").is_none_or(is_text) {
            // Older engines have no such key; where there is one, an empty one kills the decode server.
            Some(Flaw::RequestId)
        } else {
            None
        }
    }

    /// For how long the prefill pod keeps the blocks that the object names; `None` when it keeps none.
    pub fn lease(self, params: &JsonObject<'_>) -> Option<Duration> {
        // What cannot be read may name some.
        let names_blocks = params.get_non_null("remote_block_ids").is_some_and(|ids| count_blocks(ids) != Some(0));
        (self == Maker::Nixl && names_blocks).then(|| nixl_lease(params))
    }
}

/// Why a hand-off is of no use to a decode pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    /// It does not tell the decode pod to fetch anything.
    #[error("do_remote_prefill is not true")]
    NotForDecode,
    /// No engine.
    #[error("remote_engine_id is not a text, or empty")]
    Engine,
    /// No host.
    #[error("remote_host is not a text, or empty")]
    Host,
    /// No port.
    #[error("remote_port is not a port")]
    Port,
    /// No blocks, or something that is none.
    #[error("remote_block_ids names no blocks")]
    Blocks,
    /// Blocks, and no port to fetch them from.
    #[error("remote_port is -1, as AIBrix's connector writes it, but remote_block_ids is not an empty list")]
    BlocksWithoutPort,
    /// A request id that is there and empty.
    #[error("remote_request_id is not a text, or empty")]
    RequestId,
    /// The legs should have been sent at once.
    #[error("it is Mooncake's: label its pods model.aibrix.ai/kv-connector-type: mooncake")]
    Mooncake,
    /// Nothing is known of such an object.
    #[error("no known connector writes it")]
    Unknown,
}

/// `num_lmcache_extra_cached_tokens` and whatever else LMCache marks as its own.
fn is_of_lmcache(key: &str) -> bool {
    key.starts_with("num_lmcache_") || key.starts_with("lmcache.")
}

/// How AIBrix's connector says that nobody has to be asked.
fn is_no_port(port: &str) -> bool {
    port == "-1"
}

fn is_text(value: &str) -> bool {
    decode_string(value).is_some_and(|text| !text.is_empty())
}

/// The number of blocks in a list of block ids, or of lists of them (one per KV-cache group); `None` when something in it
/// is no block.
fn count_blocks(value: &str) -> Option<usize> {
    let is_id = |id: &str| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit());
    let (mut flat, mut nested, mut ids) = (false, false, 0_usize);
    let read = each_element(value, |element| {
        if element.starts_with('[') {
            nested = true;
            each_element(element, |id| {
                ids += 1;
                is_id(id)
            })
            .is_ok()
        } else {
            flat = true;
            ids += 1;
            is_id(element)
        }
    });
    (read.is_ok() && !(flat && nested)).then_some(ids)
}

/// How long NIXL's prefill side keeps its blocks, as far as the fields tell its version (sections 2.2 and 2.6): 120 s in
/// 0.11, 480 s once there is a `remote_request_id`, a lease of 30 s, which the decode pod renews, with the fields of the
/// version that brought it. A pod configured otherwise keeps them for another time.
fn nixl_lease(params: &JsonObject<'_>) -> Duration {
    let leased = ["remote_blocks_expiry_time", "remote_num_tokens", "remote_registration_generation", "transfer_mode"];
    if leased.iter().any(|key| params.get(key).is_some()) {
        Duration::from_secs(30)
    } else if params.get("remote_request_id").is_some() {
        Duration::from_mins(8)
    } else {
        Duration::from_mins(2)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// As AIBrix's connector writes it.
    fn aibrix() -> Value {
        json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [], "remote_engine_id": "e",
            "remote_host": "", "remote_port": -1, "tp_size": 2})
    }

    /// As vLLM 0.32's `NixlConnector` writes it.
    fn nixl() -> Value {
        json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
            "remote_request_id": "r", "remote_host": "localhost", "remote_port": 5600, "tp_size": 1, "dcp_size": 1,
            "pp_size": 1, "remote_num_tokens": 30, "remote_blocks_expiry_time": null, "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0})
    }

    fn with(mut params: Value, key: &str, value: Value) -> Value {
        params[key] = value;
        params
    }

    fn without(mut params: Value, key: &str) -> Value {
        params.as_object_mut().unwrap().remove(key);
        params
    }

    /// Maker, flaw and lease in seconds.
    fn judged(params: &Value) -> (Maker, Option<Flaw>, Option<u64>) {
        let text = params.to_string();
        let object = JsonObject::parse(text.as_bytes()).unwrap();
        let maker = Maker::of(&object);
        (maker, maker.flaw(&object), maker.lease(&object).map(|lease| lease.as_secs()))
    }

    #[test]
    fn each_hand_off_is_judged_by_the_rules_of_its_maker() {
        use Maker::{Aibrix, Mooncake, Nixl, Unknown};
        for (params, maker, flaw, lease) in [
            (nixl(), Nixl, None, Some(30)),
            // 0.19 and 0.11.
            (
                without(without(without(nixl(), "remote_num_tokens"), "remote_blocks_expiry_time"), "transfer_mode"),
                Nixl,
                None,
                Some(480),
            ),
            (
                json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [7], "remote_engine_id": "e",
                "remote_host": "h", "remote_port": 5557, "tp_size": 1}),
                Nixl,
                None,
                Some(120),
            ),
            // Inside a `MultiConnector`: the parts' members side by side.
            (with(nixl(), "num_lmcache_extra_cached_tokens", json!(3)), Nixl, None, Some(30)),
            (with(nixl(), "remote_block_ids", json!([])), Nixl, Some(Flaw::Blocks), None),
            (with(nixl(), "remote_block_ids", json!([[], []])), Nixl, Some(Flaw::Blocks), None),
            (with(nixl(), "remote_block_ids", json!(null)), Nixl, Some(Flaw::Blocks), None),
            (with(nixl(), "remote_block_ids", json!([[1], null])), Nixl, Some(Flaw::Blocks), Some(30)),
            (with(nixl(), "remote_port", json!(0)), Nixl, Some(Flaw::Port), Some(30)),
            (with(nixl(), "remote_port", json!(-2)), Nixl, Some(Flaw::Port), Some(30)),
            (with(nixl(), "remote_host", json!("")), Nixl, Some(Flaw::Host), Some(30)),
            (with(nixl(), "remote_engine_id", json!("")), Nixl, Some(Flaw::Engine), Some(30)),
            (with(nixl(), "remote_request_id", json!("")), Nixl, Some(Flaw::RequestId), Some(30)),
            (with(nixl(), "do_remote_prefill", json!(false)), Nixl, Some(Flaw::NotForDecode), Some(30)),
            (aibrix(), Aibrix, None, None),
            (with(aibrix(), "remote_host", json!("10.0.0.5")), Aibrix, None, None),
            (with(aibrix(), "remote_host", json!(null)), Aibrix, None, None),
            (with(aibrix(), "remote_block_ids", json!([[], []])), Aibrix, None, None),
            (with(aibrix(), "later_versions_key", json!({"x": 1})), Aibrix, None, None),
            (with(aibrix(), "remote_engine_id", json!("")), Aibrix, Some(Flaw::Engine), None),
            (without(aibrix(), "remote_engine_id"), Aibrix, Some(Flaw::Engine), None),
            (with(aibrix(), "do_remote_prefill", json!(false)), Aibrix, Some(Flaw::NotForDecode), None),
            (with(aibrix(), "remote_block_ids", json!([1])), Aibrix, Some(Flaw::BlocksWithoutPort), None),
            (with(aibrix(), "remote_block_ids", json!(null)), Aibrix, Some(Flaw::BlocksWithoutPort), None),
            (with(nixl(), "remote_port", json!(-1)), Aibrix, Some(Flaw::BlocksWithoutPort), None),
            // No blocks at a real port are NIXL's: its decode side dies of them.
            (with(aibrix(), "remote_port", json!(5600)), Nixl, Some(Flaw::Host), None),
            (
                with(with(aibrix(), "remote_port", json!(5600)), "remote_host", json!("h")),
                Nixl,
                Some(Flaw::Blocks),
                None,
            ),
            (with(aibrix(), "remote_port", json!("-1")), Nixl, Some(Flaw::Host), None),
            (with(aibrix(), "remote_port", json!(null)), Nixl, Some(Flaw::Host), None),
            (json!({"transfer_id": "t", "do_remote_prefill": true}), Mooncake, Some(Flaw::Mooncake), None),
            (json!({"remote_bootstrap_addr": "http://h:8998"}), Mooncake, Some(Flaw::Mooncake), None),
            (json!({"num_lmcache_extra_cached_tokens": 0}), Maker::Lmcache, None, None),
            (json!({"lmcache.note": {}, "num_lmcache_extra_cached_tokens": 7}), Maker::Lmcache, None, None),
            (json!({"num_lmcache_extra_cached_tokens": 0, "else": 1}), Unknown, Some(Flaw::Unknown), None),
            (json!({}), Unknown, Some(Flaw::Unknown), None),
            (json!({"first_tok": 5}), Unknown, Some(Flaw::Unknown), None),
            (json!({"remote_port": null, "remote_engine_id": null}), Unknown, Some(Flaw::Unknown), None),
        ] {
            assert_eq!(judged(&params), (maker, flaw, lease), "{params}");
        }
    }

    #[test]
    fn a_flaw_says_what_is_missing() {
        assert_eq!(Flaw::Blocks.to_string(), "remote_block_ids names no blocks");
        assert!(Flaw::Mooncake.to_string().contains("model.aibrix.ai/kv-connector-type: mooncake"));
    }
}
