//! Interop cases of `engine-protocols` section 10, as far as they are about bodies.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::{Protocol, plain_body};
use super::*;
use crate::request::Endpoint;

const MESSAGES: &str = r#""messages":[{"role":"user","content":"h\u00e9"}]"#;

const HOST: Bootstrap<'static> =
    Bootstrap { host: "10.0.0.5", port: 8998, room: 4_611_686_018_427_387_911, rid: "req-1-9f3a11c200000007" };

const HANDOFF: &str = r#""bootstrap_host":"10.0.0.5","bootstrap_port":8998,"bootstrap_room":4611686018427387911,"rid":"req-1-9f3a11c200000007""#;

fn parse(endpoint: Endpoint, body: &str) -> ParsedBody {
    ParsedBody::parse(endpoint, None, Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

fn chat(members: &str) -> ParsedBody {
    parse(Endpoint::ChatCompletions, &format!("{{\"model\":\"m\",{MESSAGES}{members}}}"))
}

/// Both legs as text, prefill first.
fn legs(body: &ParsedBody, bootstrap: &Bootstrap<'_>) -> [String; 2] {
    let Bodies { prefill, decode } = bodies(body, bootstrap);
    [prefill, decode].map(|body| String::from_utf8(body.to_vec()).unwrap())
}

#[test]
fn interop_18_chat() {
    let [prefill, decode] = legs(&chat(r#","max_tokens":64,"min_tokens":3"#), &HOST);
    assert_eq!(
        prefill,
        format!(r#"{{"model":"m",{MESSAGES},"max_tokens":1,"max_completion_tokens":1,"stream":false,{HANDOFF}}}"#)
    );
    assert_eq!(decode, format!(r#"{{"model":"m",{MESSAGES},"max_tokens":64,"min_tokens":3,{HANDOFF}}}"#));
}

#[test]
fn interop_18_what_decides_the_first_token_reaches_the_prefill_pod() {
    let members =
        r#","temperature":1e2,"seed":9007199254740993,"logit_bias":{"5":-100},"tools":[{"z":1,"a":2}],"regex":"a+""#;
    for leg in legs(&chat(members), &HOST) {
        assert!(leg.contains(members), "{leg}");
    }
    let streamed = r#","stream":true,"stream_options":{"include_usage":true}"#;
    let [prefill, decode] = legs(&chat(streamed), &HOST);
    assert!(prefill.contains(r#","stream":false,"max_tokens""#) && !prefill.contains("stream_options"), "{prefill}");
    assert!(decode.contains(streamed), "{decode}");
}

#[test]
fn interop_18_rooms_are_never_zero_and_leave_space_for_a_list() {
    let highest = i64::MAX as u64;
    for (random, prompts, expected) in [
        (0, 1, 1),
        (0, 0, 1),
        (highest - 1, 1, highest),
        (highest, 1, 1),
        (highest - 3, 3, highest - 2),
        (highest - 2, 3, 1),
        (u64::MAX, 1, 2),
        (u64::MAX, usize::MAX, 1),
    ] {
        assert_eq!(room(random, prompts), expected, "{random} {prompts}");
    }
}

#[test]
fn interop_19_port_and_host_are_the_pods() {
    let bootstrap = Bootstrap { host: "fd00::5", port: 9123, ..HOST };
    for leg in legs(&chat(""), &bootstrap) {
        let leg: Value = serde_json::from_str(&leg).unwrap();
        assert_eq!((&leg["bootstrap_host"], &leg["bootstrap_port"]), (&json!("fd00::5"), &json!(9123)));
    }
}

#[test]
fn interop_20_what_the_client_wrote_is_replaced() {
    let forged = r#","rid":"","bootstrap_room":0,"bootstrap_host":"2.2.2.2","bootstrap\u005fport":null,"kv_transfer_params":{},"disaggregated_params":{},"routed_dp_rank":7,"data_parallel_rank":7,"disagg_prefill_dp_rank":7,"x":1"#;
    for leg in legs(&chat(forged), &HOST) {
        assert!(leg.contains(r#""rid":"req-1-9f3a11c200000007""#), "{leg}");
        assert!(leg.contains(r#""bootstrap_host":"10.0.0.5""#) && leg.contains("\"x\":1"), "{leg}");
        for gone in ["2.2.2.2", "null", "kv_transfer", "disagg", "dp_rank", "data_parallel", "\"bootstrap_room\":0"] {
            assert!(!leg.contains(gone), "{gone}: {leg}");
        }
        let parsed: Value = serde_json::from_str(&leg).unwrap();
        assert_eq!(parsed["bootstrap_port"], json!(8998));
        assert_eq!(leg.matches("bootstrap").count(), 3);
    }
    for (members, expected) in [
        (r#","rid":"a","rid":"b""#, Some("rid")),
        (r#","rid":"a","r\u0069d":"b""#, Some("rid")),
        (r#","bootstrap_room":1,"bootstrap_room":1"#, Some("bootstrap_room")),
        (r#","min_tokens":1,"rid":1,"min_tokens":1,"rid":2"#, Some("min_tokens")),
        (r#","kv_transfer_params":1,"kv_transfer_params":1"#, None),
    ] {
        assert_eq!(chat(members).duplicate_of(Protocol::Sglang.controlled_keys()), expected, "{members}");
    }
}

#[test]
fn interop_20_a_client_names_its_request_on_no_route() {
    let body = chat(r#","rid":"req","data_parallel_rank":1,"bootstrap_room":1"#);
    let plain = |engine| String::from_utf8(plain_body(&body, engine).to_vec()).unwrap();
    assert_eq!(plain(Some(Engine::Sglang)), format!(r#"{{"model":"m",{MESSAGES},"data_parallel_rank":1}}"#));
    // What other engines make of it harms nobody.
    for other in [Some(Engine::Vllm), Some(Engine::Other), None] {
        assert_eq!(plain(other), format!(r#"{{"model":"m",{MESSAGES},"rid":"req","data_parallel_rank":1}}"#));
    }
}

#[test]
fn interop_27_generate_is_edited_at_its_top_level_only() {
    let sampling = r#""sampling_params": {"max_new_tokens" : 128,"temperature":0.0,"max_tokens":5}"#;
    let body = parse(Endpoint::Generate, &format!(r#"{{"model":"m","text":"a\u0062",{sampling},"stream":true}}"#));
    assert_eq!((&*body.prompt.text, body.max_tokens, body.choices, body.stream), ("ab", Some(128), 1, true));
    let [prefill, decode] = legs(&body, &HOST);
    assert_eq!(
        prefill,
        format!(
            r#"{{"model":"m","text":"a\u0062",{sampling},"stream":false,"max_tokens":1,"max_completion_tokens":1,{HANDOFF}}}"#
        )
    );
    assert_eq!(decode, format!(r#"{{"model":"m","text":"a\u0062",{sampling},"stream":true,{HANDOFF}}}"#));
}

#[test]
fn rids_have_a_fixed_width_and_abort_bodies_are_json() {
    assert_eq!(rid("req-1", 0x9f3a_11c2_0000_0007), "req-1-9f3a11c200000007");
    assert_eq!(rid("", 0), "-0000000000000000");
    assert_eq!(rid("x", u64::MAX), "x-ffffffffffffffff");
    assert_eq!(abort_body("R-0000000000000001"), r#"{"rid":"R-0000000000000001"}"#);
    assert_eq!(abort_body("\"\n"), r#"{"rid":"\"\n"}"#);
}

proptest! {
    #[test]
    fn whatever_the_request_id_is_both_legs_carry_the_same_rid(id in ".{0,40}", attempt: u64) {
        let rid = rid(&id, attempt);
        let bootstrap = Bootstrap { rid: &rid, ..HOST };
        for leg in legs(&chat(r#","rid":1"#), &bootstrap) {
            let leg: Value = serde_json::from_str(&leg).unwrap();
            prop_assert_eq!(leg["rid"].as_str(), Some(&*rid));
        }
        let abort: Value = serde_json::from_slice(&abort_body(&rid)).unwrap();
        prop_assert_eq!(abort, json!({"rid": rid}));
    }

    #[test]
    fn no_rid_of_one_request_is_the_beginning_of_another(
        id in "[a-z0-9-]{0,12}",
        one: u64,
        other: u64,
    ) {
        prop_assume!(one != other);
        prop_assert!(!rid(&id, one).starts_with(&rid(&id, other)));
    }

    #[test]
    fn every_room_of_a_list_fits(random: u64, prompts in 0..100_000_usize) {
        let first = room(random, prompts);
        prop_assert!(first >= 1);
        prop_assert!(first.checked_add(prompts.saturating_sub(1) as u64).is_some_and(|last| i64::try_from(last).is_ok()));
    }

    #[test]
    fn all_other_bytes_stay(value in "[ ]{0,2}(-?[0-9]{1,30}|\"[a-z\\\\n]{0,5}n\"|\\[1, 2\\]|\\{\"b\":1,\"a\":2\\})[ ]{0,2}") {
        let member = format!("\"other\":{value},\"z\":1");
        if let Ok(body) =
            ParsedBody::parse(Endpoint::ChatCompletions, None, Bytes::from(format!("{{\"model\":\"m\",{MESSAGES},{member}}}")))
        {
            for leg in legs(&body, &HOST) {
                prop_assert!(leg.contains(&member), "{}", leg);
            }
        }
    }
}
