//! Interop cases of `engine-protocols` section 10, as far as they are about bodies, and hand-off validation.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::request::Endpoint;

const KVREQ: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// The hand-off of a real prefill server (vLLM 0.32, one KV-cache group).
const REAL: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"6c806d32-f80e-4891-8279-801abeff6da1","remote_request_id":"chatcmpl-gw-nixl-chat-1795997496-b4e889d5","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":75,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0}"#;

const MESSAGES: &str = r#""messages":[{"role":"user","content":"h\u00e9"}]"#;

fn parse(endpoint: Endpoint, body: &str) -> ParsedBody {
    ParsedBody::parse(endpoint, None, Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

fn chat(members: &str) -> ParsedBody {
    parse(Endpoint::ChatCompletions, &format!("{{\"model\":\"m\",{MESSAGES}{members}}}"))
}

fn text(bytes: &Bytes) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn prefill(body: &ParsedBody) -> String {
    text(&prefill_body(body, KvConnector::Shfs)).to_owned()
}

fn decode(body: &ParsedBody, params: &str) -> Result<(String, Handoff), HandoffError> {
    let answer = format!("{{\"id\":\"x\",\"choices\":[],\"usage\":{{}},\"kv_transfer_params\":{params}}}");
    decode_body(body, KvConnector::Shfs, answer.as_bytes(), "10.0.0.5")
        .map(|relay| (text(&relay.body).to_owned(), relay.handoff))
}

#[test]
fn interop_01_plain_chat() {
    let body = chat(r#","max_tokens":64"#);
    let expected = format!(
        r#"{{"model":"m",{MESSAGES},"max_tokens":1,"max_completion_tokens":1,"stream":false,"kv_transfer_params":{KVREQ}}}"#
    );
    assert_eq!(prefill(&body), expected);
    let relayed = REAL.replace("127.0.0.1", "10.0.0.5");
    let expected = format!(r#"{{"model":"m",{MESSAGES},"max_tokens":64,"kv_transfer_params":{relayed}}}"#);
    assert_eq!(decode(&body, REAL), Ok((expected, Handoff::Relayed)));
}

#[test]
fn interop_02_streaming_with_usage() {
    let members = r#","stream":true,"stream_options":{"include_usage":true}"#;
    let body = chat(members);
    let expected = format!(
        r#"{{"model":"m",{MESSAGES},"stream":false,"max_tokens":1,"max_completion_tokens":1,"kv_transfer_params":{KVREQ}}}"#
    );
    assert_eq!(prefill(&body), expected);
    assert!(decode(&body, REAL).unwrap().0.contains(members));
}

#[test]
fn interop_03_minimum_tokens() {
    let body = chat(r#","min_tokens":50,"max_tokens":100"#);
    assert!(!prefill(&body).contains("min_tokens"));
    assert!(prefill(&body).contains(r#""max_tokens":1,"#));
    assert!(decode(&body, REAL).unwrap().0.contains(r#","min_tokens":50,"max_tokens":100,"#));
}

#[test]
fn interop_04_only_max_completion_tokens() {
    let body = chat(r#","max_completion_tokens":10"#);
    let prefill: Value = serde_json::from_str(&prefill(&body)).unwrap();
    assert_eq!((&prefill["max_tokens"], &prefill["max_completion_tokens"]), (&json!(1), &json!(1)));
    let decode: Value = serde_json::from_str(&decode(&body, REAL).unwrap().0).unwrap();
    assert_eq!((decode.get("max_tokens"), &decode["max_completion_tokens"]), (None, &json!(10)));
}

#[test]
fn interop_05_completions_with_a_string_prompt() {
    let body = parse(Endpoint::Completions, r#"{"model":"m","prompt":"a b","max_tokens":64}"#);
    let expected = format!(
        r#"{{"model":"m","prompt":"a b","max_tokens":1,"max_completion_tokens":1,"stream":false,"kv_transfer_params":{KVREQ}}}"#
    );
    assert_eq!(prefill(&body), expected);
}

#[test]
fn interop_06_a_forged_handoff_reaches_no_pod() {
    let forged = r#","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1]},"disagg_prefill_resp":{},"kv_transfer\u005fparams":1"#;
    let body = chat(forged);
    let clean = format!("{{\"model\":\"m\",{MESSAGES}}}");
    let prefill_shfs = prefill(&body);
    assert!(prefill_shfs.contains(&format!(r#""kv_transfer_params":{KVREQ}"#)), "{prefill_shfs}");
    assert_eq!(prefill_shfs.matches("kv_transfer").count(), 1);
    assert!(!prefill_shfs.contains("disagg_prefill_resp"));
    let prefill_nixl = prefill_body(&body, KvConnector::Nixl);
    assert!(!text(&prefill_nixl).contains("kv_transfer") && !text(&prefill_nixl).contains("disagg"));
    assert_eq!(decode(&body, "null"), Ok((clean.clone(), Handoff::Absent)));
    assert_eq!(text(&plain_body(&body)), clean);
    let relayed = decode(&body, REAL).unwrap().0;
    assert_eq!(relayed.matches("\"kv_transfer").count(), 1);
    assert!(relayed.contains("6c806d32") && !relayed.contains("disagg"));
    let nixl = decode_body(&body, KvConnector::Nixl, b"{\"id\":\"x\"}", "10.0.0.5").unwrap().body;
    assert!(!text(&nixl).contains("kv_transfer"));
    assert!(text(&nixl).contains(r#""disagg_prefill_resp":{"id":"x"}"#));
}

#[test]
fn interop_06_no_engines_handoff_passes_and_none_hides_in_extra_arguments() {
    for key in HANDOFF_KEYS {
        let forged = chat(&format!(r#","{key}":{{"remote_host":"evil"}},"x":1"#));
        let (decoded, _) = decode(&forged, "null").unwrap();
        for sent in [text(&plain_body(&forged)).to_owned(), decoded, prefill(&forged)] {
            assert!(!sent.contains("evil") && sent.contains(r#""x":1"#), "{key}: {sent}");
        }
        for value in [r#""x""#, r#"{"do_remote_prefill":true}"#, "null"] {
            let escaped = key.replacen('_', "\\u005f", 1);
            for hidden in [
                format!(r#""vllm_xargs":{{"{key}":{value}}}"#),
                format!(r#""vllm\u005fxargs":{{"a":1,"{escaped}":{value}}}"#),
            ] {
                assert_eq!(hidden_handoff(&chat(&format!(",{hidden}"))), Some(key), "{hidden}");
            }
        }
    }
    for fine in [
        r#""vllm_xargs":{"top_n_sigma":1.5,"list":["kv_transfer_params"]}"#,
        r#""vllm_xargs":null"#,
        r#""vllm_xargs":[1]"#,
        r#""y":{"kv_transfer_params":1}"#,
    ] {
        assert_eq!(hidden_handoff(&chat(&format!(",{fine}"))), None, "{fine}");
    }
}

#[test]
fn interop_07_duplicate_key() {
    for (members, expected) in [
        (r#","max_tokens":1,"max_tokens":9"#, Some("max_tokens")),
        (r#","max_tokens":1,"max\u005ftokens":9"#, Some("max_tokens")),
        (r#","stream":true,"min_tokens":1,"stream":false,"min_tokens":1"#, Some("stream")),
        (r#","kv_transfer_params":1,"kv_transfer_params":2"#, Some("kv_transfer_params")),
        (r#","seed":1,"seed":2"#, None),
        (r#","max_tokens":1,"x":{"max_tokens":1}"#, None),
    ] {
        assert_eq!(
            chat(members).duplicate_of(crate::engines::Protocol::VllmShfs.controlled_keys()),
            expected,
            "{members}"
        );
    }
}

#[test]
fn r03_interop_08_byte_fidelity() {
    let members = r#", "seed":9007199254740993,"tools":[{"z":1,"a":2}] ,"temperature": 1e2,"top_p":1.0,"é":"\u00e9""#;
    let body = chat(members);
    for _ in 0..100 {
        assert!(prefill(&body).contains(members));
        assert!(decode(&body, REAL).unwrap().0.contains(members));
    }
    let plain = plain_body(&body);
    assert_eq!(plain.as_ptr(), body.raw.as_ptr());
}

#[test]
fn interop_09_nested_block_ids_and_unknown_fields() {
    let params = r#"{ "remote_block_ids": [[3,4],[]], "do_remote_prefill":true,"remote_engine_id":"e", "remote_host":"localhost","remote_port":5600,"new_key":{"x":12345678901234567890} }"#;
    let (body, handoff) = decode(&chat(""), params).unwrap();
    assert_eq!(handoff, Handoff::Relayed);
    assert!(body.contains(&params.replace("localhost", "10.0.0.5")), "{body}");
    // A second spelling of the host does not survive, and an IPv6 address comes as it is.
    let twice = params.replace("\"new_key\"", "\"remote\\u005fhost\":\"1.2.3.4\",\"new_key\"");
    let answer = format!("{{\"kv_transfer_params\":{twice}}}");
    let body = decode_body(&chat(""), KvConnector::Shfs, answer.as_bytes(), "fd00::5").unwrap().body;
    assert!(text(&body).contains(&params.replace("localhost", "fd00::5")), "{body:?}");
}

#[test]
fn interop_12_handoffs_of_the_wrong_type_or_without_substance() {
    for wrong in ["\"oops\"", "1", "[]", "true"] {
        assert_eq!(decode(&chat(""), wrong), Err(HandoffError::WrongType("kv_transfer_params")), "{wrong}");
    }
    for answer in ["", "null", "[]", "\"x\"", "{\"a\":", "{} x", "\u{feff}{}"] {
        for connector in [KvConnector::Shfs, KvConnector::Nixl] {
            let result = decode_body(&chat(""), connector, answer.as_bytes(), "10.0.0.5");
            assert_eq!(result, Err(HandoffError::NotJson), "{answer}");
        }
    }
    let clean = text(&chat("").raw).to_owned();
    let absent = decode_body(&chat(""), KvConnector::Shfs, b"{\"id\":\"x\"}", "10.0.0.5").unwrap();
    assert_eq!((text(&absent.body), absent.handoff, absent.lease), (clean.as_str(), Handoff::Absent, None));

    let replaced = |key: &str, value: Value| {
        let mut params: Value = serde_json::from_str(REAL).unwrap();
        params[key] = value;
        params.to_string()
    };
    let without = |key: &str| {
        let mut params: Value = serde_json::from_str(REAL).unwrap();
        params.as_object_mut().unwrap().remove(key);
        params.to_string()
    };
    for unusable in [
        "{}".to_owned(),
        r#"{"do_remote_prefill":true}"#.to_owned(),
        KVREQ.to_owned(),
        replaced("do_remote_prefill", json!(false)),
        replaced("do_remote_prefill", json!(1)),
        without("do_remote_prefill"),
        replaced("remote_engine_id", json!("")),
        replaced("remote_engine_id", json!(null)),
        replaced("remote_engine_id", json!(7)),
        without("remote_engine_id"),
        replaced("remote_host", json!("")),
        replaced("remote_host", json!(null)),
        without("remote_host"),
        replaced("remote_port", json!(0)),
        replaced("remote_port", json!(65536)),
        replaced("remote_port", json!(-1)),
        replaced("remote_port", json!("5600")),
        replaced("remote_port", json!(5600.5)),
        without("remote_port"),
        replaced("remote_request_id", json!(null)),
        replaced("remote_request_id", json!("")),
        replaced("remote_block_ids", json!(null)),
        replaced("remote_block_ids", json!([])),
        replaced("remote_block_ids", json!([[]])),
        replaced("remote_block_ids", json!([[], []])),
        replaced("remote_block_ids", json!([1, [2]])),
        replaced("remote_block_ids", json!([null])),
        replaced("remote_block_ids", json!([[1], null])),
        replaced("remote_block_ids", json!([["1"]])),
        replaced("remote_block_ids", json!([-1])),
        replaced("remote_block_ids", json!({"0": [1]})),
        replaced("remote_block_ids", json!("1")),
        without("remote_block_ids"),
    ] {
        let (body, handoff) = decode(&chat(""), &unusable).unwrap();
        assert!(body == clean && matches!(handoff, Handoff::Unusable(_)), "{unusable}: {handoff:?}");
    }
    for usable in [
        replaced("remote_port", json!(1)),
        replaced("remote_port", json!(65535)),
        replaced("remote_block_ids", json!([0])),
        replaced("remote_block_ids", json!([3, 4])),
        replaced("remote_block_ids", json!([[], [9]])),
        replaced("do_remote_decode", json!(null)),
        without("remote_request_id"),
    ] {
        let (body, handoff) = decode(&chat(""), &usable).unwrap();
        let body: Value = serde_json::from_str(&body).unwrap();
        let mut expected: Value = serde_json::from_str(&usable).unwrap();
        expected["remote_host"] = json!("10.0.0.5");
        assert_eq!((&body["kv_transfer_params"], handoff), (&expected, Handoff::Relayed), "{usable}");
    }
}

#[test]
fn the_fields_of_a_handoff_tell_how_long_its_blocks_stay() {
    let old =
        r#""do_remote_prefill":true,"remote_engine_id":"e","remote_host":"h","remote_port":1,"remote_block_ids":[1]"#;
    for (members, seconds) in [
        (String::new(), 120),
        (r#","tp_size":1"#.to_owned(), 120),
        (r#","remote_request_id":"r""#.to_owned(), 480),
        (r#","remote_request_id":"r","tp_size":1,"dcp_size":1"#.to_owned(), 480),
        (r#","remote_request_id":"r","remote_num_tokens":75"#.to_owned(), 30),
        (r#","remote_request_id":"r","remote_blocks_expiry_time":null"#.to_owned(), 30),
        (r#","remote_registration_generation":1"#.to_owned(), 30),
        (r#","transfer_mode":"push""#.to_owned(), 30),
    ] {
        let answer = format!("{{\"kv_transfer_params\":{{{old}{members}}}}}");
        let relay = decode_body(&chat(""), KvConnector::Shfs, answer.as_bytes(), "10.0.0.5").unwrap();
        assert_eq!(relay.lease, Some(Duration::from_secs(seconds)), "{members}");
    }
    let answer = format!("{{\"kv_transfer_params\":{REAL}}}");
    let relay = decode_body(&chat(""), KvConnector::Shfs, answer.as_bytes(), "10.0.0.5").unwrap();
    assert_eq!(relay.lease, Some(Duration::from_secs(30)));
    let unusable = decode_body(&chat(""), KvConnector::Shfs, b"{\"kv_transfer_params\":{}}", "10.0.0.5").unwrap();
    assert_eq!((unusable.handoff, unusable.lease), (Handoff::Unusable(maker::Flaw::Unknown), None));
}

#[test]
fn the_hand_off_of_aibrixs_connector_is_relayed_as_it_came() {
    let written = r#"{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [], "remote_engine_id": "c0ffee", "remote_host": "HOST", "remote_port": -1, "tp_size": 8}"#;
    let answer = format!("{{\"kv_transfer_params\":{}}}", written.replace("HOST", ""));
    let relay = decode_body(&chat(""), KvConnector::Shfs, answer.as_bytes(), "10.0.0.5").unwrap();
    assert_eq!((relay.handoff, relay.lease), (Handoff::Relayed, None));
    assert!(text(&relay.body).contains(&written.replace("HOST", "10.0.0.5")), "{:?}", relay.body);
}

#[test]
fn interop_17_neuron_nixl() {
    let body = chat(r#","max_tokens":64,"stream":true,"min_tokens":2"#);
    let expected = format!(r#"{{"model":"m",{MESSAGES},"max_tokens":1,"stream":false,"max_completion_tokens":1}}"#);
    assert_eq!(text(&prefill_body(&body, KvConnector::Nixl)), expected);
    let answer = "{ \"id\" : \"x\", \"n\":1.50, \"kv_transfer_params\":\"oops\" }";
    let relay = decode_body(&body, KvConnector::Nixl, format!("\n{answer} ").as_bytes(), "10.0.0.5").unwrap();
    let expected = format!(
        r#"{{"model":"m",{MESSAGES},"max_tokens":64,"stream":true,"min_tokens":2,"disagg_prefill_resp":{answer}}}"#
    );
    assert_eq!((text(&relay.body), relay.handoff, relay.lease), (expected.as_str(), Handoff::Relayed, None));
}

#[test]
fn r10_every_combination_of_the_five_fields_is_valid_on_prefill() {
    let fields = [
        r#","max_tokens":8"#,
        r#","max_completion_tokens":9"#,
        r#","stream":true"#,
        r#","stream_options":{"include_usage":true}"#,
        r#","min_tokens":5"#,
    ];
    for set in 0..32_usize {
        let members: String = (0..5).filter(|at| set & (1 << at) != 0).map(|at| fields[at]).collect();
        for connector in [KvConnector::Shfs, KvConnector::Nixl] {
            let body: Value = serde_json::from_slice(&prefill_body(&chat(&members), connector)).unwrap();
            let read = |key: &str| body.get(key).cloned();
            assert_eq!(read("max_tokens"), Some(json!(1)), "{members}");
            assert_eq!(read("max_completion_tokens"), Some(json!(1)));
            assert_eq!(read("stream"), Some(json!(false)));
            assert_eq!((read("stream_options"), read("min_tokens"), read("max_output_tokens")), (None, None, None));
        }
    }
}

#[test]
fn without_a_handoff_the_prefill_pod_still_makes_one_token() {
    let body = chat(r#","max_tokens":8,"stream":true,"kv_transfer_params":{},"bootstrap_room":1"#);
    let expected = format!(r#"{{"model":"m",{MESSAGES},"max_tokens":1,"stream":false,"max_completion_tokens":1}}"#);
    assert_eq!(text(&prefill_body(&body, KvConnector::Nixl)), expected);
}

#[test]
fn responses_have_their_own_limit() {
    for members in
        [r#","max_output_tokens":500"#, "", r#","max_tokens":7,"max_completion_tokens":9,"max_output_tokens":500"#]
    {
        let body = parse(Endpoint::Responses, &format!(r#"{{"model":"m","input":"x"{members}}}"#));
        let prefill: Value = serde_json::from_str(&prefill(&body)).unwrap();
        let limits =
            ["max_output_tokens", "max_tokens", "max_completion_tokens"].map(|name| prefill.get(name).cloned());
        assert_eq!(limits, [Some(json!(1)), None, None], "{members}");
        assert!(decode(&body, REAL).unwrap().0.contains(members), "the decode leg keeps what the client wrote");
    }
}

#[test]
fn r01_prompts_go_out_byte_identical_on_both_legs() {
    for prompt in [r#""a\u0062""#, r#"[ "a" ]"#, "[1,2 , 3]", "[[1],[2,3]]"] {
        let body = parse(Endpoint::Completions, &format!("{{\"model\":\"m\",\"prompt\":{prompt},\"n\":1}}"));
        let expected = format!("\"prompt\":{prompt},\"n\":1");
        assert!(prefill(&body).contains(&expected) && decode(&body, REAL).unwrap().0.contains(&expected));
    }
}

proptest! {
    #[test]
    fn no_answer_panics_and_decode_bodies_are_json(
        answer in proptest::collection::vec(any::<u8>(), 0..100),
        params in "[\\[\\]{}:,\"\\\\ 0-9a-z]{0,40}",
        host in ".{0,20}",
    ) {
        let body = chat(r#","kv_transfer_params":{}"#);
        for connector in [KvConnector::Shfs, KvConnector::Nixl] {
            let _ = decode_body(&body, connector, &answer, &host);
            let answer = format!("{{\"kv_transfer_params\":{params}}}");
            if let Ok(Relay { body: bytes, .. }) = decode_body(&body, connector, answer.as_bytes(), &host) {
                prop_assert!(serde_json::from_slice::<&serde_json::value::RawValue>(&bytes).is_ok());
            }
        }
        let answer = format!("{{\"kv_transfer_params\":{REAL}}}");
        let bytes = decode_body(&body, KvConnector::Shfs, answer.as_bytes(), &host).unwrap().body;
        let sent: Value = serde_json::from_slice(&bytes).unwrap();
        prop_assert_eq!(sent["kv_transfer_params"]["remote_host"].as_str(), Some(host.as_str()));
    }
}
