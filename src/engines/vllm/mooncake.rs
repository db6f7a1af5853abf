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
        engine.get("engine_id").and_then(decode_string).filter(|id| !id.is_empty()).map(Cow::into_owned)
    };
    id("0").or_else(|| ranks.fields().iter().find_map(|rank| id(&rank.key))).ok_or(EngineIdError::NoEngine)
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
    fn the_engine_of_rank_0_comes_first() {
        for (answer, expected) in [
            (r#"{"0":{"engine_id":"a","worker_addr":{"0":{}}}}"#, Ok("a")),
            (r#"{"1":{"engine_id":"b"},"0":{"engine_id":"a"}}"#, Ok("a")),
            (r#"{"1":{"engine_id":"b"},"2":{"engine_id":"c"}}"#, Ok("b")),
            (r#"{"0":{"engine_id":""},"2":{"engine_id":"c\u00e9"}}"#, Ok("cé")),
            (r#"{"0":{"engine_id":7}}"#, Err(EngineIdError::NoEngine)),
            (r#"{"0":"a"}"#, Err(EngineIdError::NoEngine)),
            ("{}", Err(EngineIdError::NoEngine)),
            ("[]", Err(EngineIdError::NotJson)),
            ("", Err(EngineIdError::NotJson)),
            ("<html>", Err(EngineIdError::NotJson)),
        ] {
            assert_eq!(engine_id(answer.as_bytes()), expected.map(str::to_owned), "{answer}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_any_text_is_escaped(bytes in proptest::collection::vec(any::<u8>(), 0..80), text in ".{0,20}") {
            let _ = engine_id(&bytes);
            let Bodies { prefill, decode } = bodies(&chat(""), &text, &text, &text, 1);
            for leg in [prefill, decode] {
                let leg: Value = serde_json::from_slice(&leg).unwrap();
                prop_assert_eq!(leg["kv_transfer_params"]["transfer_id"].as_str(), Some(&*text));
            }
        }
    }
}
