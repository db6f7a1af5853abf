//! vLLM's MooncakeConnector: both legs at once, matched by a transfer id (`engine-protocols` section 2.3).

use std::borrow::Cow;

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
    /// The rank has no `engine_id`.
    #[error("it names no engine_id of the rank")]
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

/// The engine of one data-parallel rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEngine {
    /// By which the decode side names it.
    pub id: String,
    /// What `x-data-parallel-rank` has to say for the prefill side to use it: ranks are counted from the lowest that the
    /// server has. `None` for a rank that is no number.
    pub pin: Option<u32>,
}

/// The engine of `rank` in the answer of a bootstrap server's `/query`, which maps data-parallel ranks to engines. For rank
/// 0, which is also that of a pod that says nothing of ranks, any other will do.
pub fn engine_of(answer: &[u8], rank: u16) -> Result<RankEngine, EngineIdError> {
    let ranks = JsonObject::parse(answer).map_err(|_| EngineIdError::NotJson)?;
    let id = |rank: &str| {
        let engine = JsonObject::parse(ranks.get(rank)?.as_bytes()).ok()?;
        engine.get("engine_id").and_then(decode_string).filter(|id| !id.is_empty()).map(Cow::into_owned)
    };
    let number = |rank: &str| rank.parse::<u32>().ok();
    let lowest = ranks.fields().iter().filter_map(|field| number(&field.key)).min().unwrap_or_default();
    let found = |rank: &str| Some(RankEngine { id: id(rank)?, pin: number(rank).map(|rank| rank - lowest) });
    let mut any = ranks.fields().iter().filter(|_| rank == 0).filter_map(|field| found(&field.key));
    found(&rank.to_string()).or_else(|| any.next()).ok_or(EngineIdError::NoEngine)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::request::Endpoint;

    fn chat(members: &str) -> ParsedBody {
        let text = format!("{{\"model\":\"m\",\"messages\":[]{members}}}");
        ParsedBody::parse(Endpoint::ChatCompletions, None, Bytes::from(text)).unwrap()
    }

    #[test]
    fn both_legs_carry_the_transfer_id() {
        let Bodies { prefill, decode } =
            bodies(&chat(r#","max_tokens":64,"stream":true"#), "xfer-R", "engine-0", "10.0.0.5", 8998);
        assert_eq!(
            prefill,
            r#"{"model":"m","messages":[],"max_tokens":1,"stream":false,"max_completion_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-R"}}"#
        );
        assert_eq!(
            decode,
            r#"{"model":"m","messages":[],"max_tokens":64,"stream":true,"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":"engine-0","remote_bootstrap_addr":"http://10.0.0.5:8998","transfer_id":"xfer-R"}}"#
        );
    }

    #[test]
    fn a_client_forges_nothing_and_ipv6_is_bracketed() {
        let forged = chat(r#","kv_transfer_params":{"do_remote_prefill":true},"bootstrap_room":1,"x":1"#);
        let Bodies { prefill, decode } = bodies(&forged, "t", "e", "fd00::5", 9000);
        for (leg, expected) in [
            (prefill, json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": "t"})),
            (
                decode,
                json!({"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": "e",
                    "remote_bootstrap_addr": "http://[fd00::5]:9000", "transfer_id": "t"}),
            ),
        ] {
            let leg: Value = serde_json::from_slice(&leg).unwrap();
            assert_eq!(leg["kv_transfer_params"], expected);
            assert_eq!((leg.get("bootstrap_room"), &leg["x"]), (None, &json!(1)));
        }
    }

    #[test]
    fn the_engine_is_that_of_the_rank() {
        let two = r#"{"1":{"engine_id":"b"},"0":{"engine_id":"a"}}"#;
        let hybrid = r#"{"2":{"engine_id":"c"},"3":{"engine_id":"d"}}"#;
        for (answer, rank, expected) in [
            (r#"{"0":{"engine_id":"a","worker_addr":{"0":{}}}}"#, 0, Ok(("a", Some(0)))),
            (two, 0, Ok(("a", Some(0)))),
            (two, 1, Ok(("b", Some(1)))),
            (two, 2, Err(EngineIdError::NoEngine)),
            // A server with some of the ranks counts them from its first.
            (hybrid, 3, Ok(("d", Some(1)))),
            (r#"{"1":{"engine_id":"b"}}"#, 1, Ok(("b", Some(0)))),
            (r#"{"1":{"engine_id":"b"},"2":{"engine_id":"c"}}"#, 0, Ok(("b", Some(0)))),
            (r#"{"0":{"engine_id":""},"2":{"engine_id":"c\u00e9"}}"#, 0, Ok(("cé", Some(2)))),
            (r#"{"x":{"engine_id":"e"}}"#, 0, Ok(("e", None))),
            (r#"{"0":{"engine_id":7}}"#, 0, Err(EngineIdError::NoEngine)),
            (r#"{"0":"a"}"#, 0, Err(EngineIdError::NoEngine)),
            ("{}", 0, Err(EngineIdError::NoEngine)),
            ("[]", 0, Err(EngineIdError::NotJson)),
            ("", 0, Err(EngineIdError::NotJson)),
            ("<html>", 0, Err(EngineIdError::NotJson)),
        ] {
            let expected = expected.map(|(id, pin)| RankEngine { id: id.to_owned(), pin });
            assert_eq!(engine_of(answer.as_bytes(), rank), expected, "{answer} {rank}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_any_text_is_escaped(bytes in proptest::collection::vec(any::<u8>(), 0..80), text in ".{0,20}") {
            let _ = engine_of(&bytes, 1);
            let Bodies { prefill, decode } = bodies(&chat(""), &text, &text, &text, 1);
            for leg in [prefill, decode] {
                let leg: Value = serde_json::from_slice(&leg).unwrap();
                prop_assert_eq!(leg["kv_transfer_params"]["transfer_id"].as_str(), Some(&*text));
            }
        }
    }
}
