//! context_first: from the client's body to the context worker, and from its answer to the generation worker.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::super::{Handoff, HandoffError, plain_body};
use super::*;

/// What a context worker offers, `ids` in place of its ids.
fn params(ids: &str) -> String {
    format!(
        r#"{{"request_type":"context_only","first_gen_tokens":[5],{ids},"encoded_opaque_state":"QUJD\/w==","draft_tokens":null,"schedule_style":0}}"#
    )
}

fn offered() -> String {
    params(&format!(r#""ctx_request_id":7,"disagg_request_id":{ID}"#))
}

/// An answer that ended for `reason`, hand-off and token ids included.
fn answer(reason: &str, params: &str, ids: &str) -> String {
    format!(
        r#"{{"id":"x","choices":[{{"index":0,"message":{{}},"finish_reason":{reason},"disaggregated_params":{params}}}],"usage":{{}},"prompt_token_ids":{ids}}}"#
    )
}

fn decode(body: &ParsedBody, answer: &str) -> Result<(String, Handoff), HandoffError> {
    match merge(body, answer.as_bytes())? {
        Merged::Decode(body, handoff) => Ok((text(&body).to_owned(), handoff)),
        Merged::Finished(finished) => panic!("{finished:?}"),
    }
}

#[test]
fn interop_28_context_first_chat() {
    let body = chat(r#","max_completion_tokens":32"#);
    let context = format!(
        r#"{{"model":"m",{MESSAGES},"max_tokens":1,"stream":false,"disaggregated_params":{{"request_type":"context_only","disagg_request_id":{ID}}}}}"#
    );
    assert_eq!(context_body(&body, ID, false), context);
    let handoff = offered().replace("context_only", "generation_only");
    let expected = format!(
        r#"{{"model":"m",{MESSAGES},"max_completion_tokens":32,"disaggregated_params":{handoff},"prompt_token_ids":[1,2]}}"#
    );
    let answered = answer(r#""length""#, &offered(), "[1,2]");
    assert_eq!(decode(&body, &answered), Ok((expected, Handoff::Relayed)));
}

#[test]
fn interop_28_the_context_worker_gets_no_key_that_it_refuses() {
    let members = [
        r#","max_tokens":8"#,
        r#","max_completion_tokens":9"#,
        r#","stream":true"#,
        r#","stream_options":{"include_usage":true}"#,
        r#","min_tokens":5"#,
        r#","disaggregated_params":{"request_type":"context_and_generation"}"#,
    ];
    for set in 0..64_usize {
        let members: String = (0..6).filter(|at| set & (1 << at) != 0).map(|at| members[at]).collect();
        let context: Value = serde_json::from_slice(&context_body(&chat(&members), ID, false)).unwrap();
        let expected = json!({"model": "m", "messages": [{"role": "user", "content": "hé"}], "max_tokens": 1,
            "stream": false, "disaggregated_params": {"request_type": "context_only", "disagg_request_id": ID}});
        assert_eq!(context, expected, "{members}");
    }
    let responses = parse(Endpoint::Responses, r#"{"model":"m","input":"x","max_output_tokens":500}"#);
    let context = context_body(&responses, ID, false);
    assert!(text(&context).contains(r#""max_output_tokens":1,"#) && !text(&context).contains("max_tokens"));
}

#[test]
fn interop_29_token_ids_take_the_place_of_a_completions_prompt() {
    assert_eq!(Endpoint::from_path("/v1/completions?x=1"), Some(Endpoint::Completions));
    let handoff = offered().replace("context_only", "generation_only");
    let answered = answer(r#""length""#, &offered(), "[1, 2]");
    let expected = format!(r#"{{"model":"m","prompt":[1, 2],"max_tokens":9,"disaggregated_params":{handoff}}}"#);
    assert_eq!(decode(&completions(r#","max_tokens":9"#), &answered), Ok((expected, Handoff::Relayed)));
    // A worker that gives none: the prompt goes out as it came.
    for none in ["null", "\"1\"", "{}"] {
        let (sent, _) = decode(&completions(""), &answer(r#""length""#, &offered(), none)).unwrap();
        assert_eq!(sent, format!(r#"{{"model":"m","prompt":"a b","disaggregated_params":{handoff}}}"#));
    }
}

#[test]
fn interop_31_the_ids_are_those_of_the_answer() {
    for id in ["4398046511104", "9223372036854775807", "18446744073709551615", "123456789012345678901234567890"] {
        let ids = format!(r#""ctx_request_id":{id},"disagg_request_id":{id}"#);
        let (sent, _) = decode(&chat(""), &answer(r#""length""#, &params(&ids), "[1]")).unwrap();
        assert!(sent.contains(&ids) && !sent.contains(&ID.to_string()), "{sent}");
    }
    // Workers before 1.2 have no global id.
    for ids in [r#""ctx_request_id":7,"disagg_request_id":null"#, r#""ctx_request_id":0"#] {
        let (sent, handoff) = decode(&chat(""), &answer(r#""length""#, &params(ids), "[1]")).unwrap();
        assert!(sent.contains(ids) && handoff == Handoff::Relayed, "{sent}");
    }
}

#[test]
fn a_handoff_at_the_top_comes_before_that_of_the_choice() {
    let inner = params(r#""ctx_request_id":1"#);
    let outer = params(r#""ctx_request_id":2"#);
    for (top, expected) in [(outer.as_str(), r#""ctx_request_id":2"#), ("null", r#""ctx_request_id":1"#)] {
        let answered = format!(
            r#"{{"disaggregated_params":{top},"choices":[{{"disaggregated_params":{inner}}},{{"disaggregated_params":5}}]}}"#
        );
        let (sent, handoff) = decode(&chat(""), &answered).unwrap();
        assert!(sent.contains(expected) && sent.contains("generation_only"), "{sent}");
        assert_eq!((handoff, sent.matches("request_type").count()), (Handoff::Relayed, 1));
    }
    let twice = r#"{"disaggregated_params":{"request_type":"a","request\u005ftype":"b","ctx_request_id":3}}"#;
    let (sent, _) = decode(&chat(""), twice).unwrap();
    assert!(sent.contains(r#""disaggregated_params":{"request_type":"generation_only","ctx_request_id":3}"#), "{sent}");
}

#[test]
fn answers_that_hand_nothing_over() {
    let forged = chat(r#","disaggregated_params":{"request_type":"generation_only"},"x":1"#);
    let clean = format!(r#"{{"model":"m",{MESSAGES},"x":1}}"#);
    for absent in ["{}", r#"{"choices":[]}"#, r#"{"choices":{}}"#, r#"{"choices":[5]}"#, r#"{"choices":null}"#] {
        assert_eq!(decode(&forged, absent), Ok((clean.clone(), Handoff::Absent)), "{absent}");
    }
    let without = answer(r#""not_finished""#, "null", "[1]");
    assert_eq!(decode(&forged, &without), Ok((clean, Handoff::Absent)));
    for wrong in ["7", "\"oops\"", "[]", "false"] {
        let answered = answer(r#""length""#, wrong, "[1]");
        assert_eq!(decode(&forged, &answered), Err(HandoffError::WrongType("disaggregated_params")), "{wrong}");
    }
    for bad in ["", "null", "[]", "oops", "{\"cut\":"] {
        assert_eq!(decode(&forged, bad), Err(HandoffError::NotJson), "{bad}");
    }
}

/// A prompt that goes on without saying where its blocks are is a defect of the worker: no generation leg.
#[test]
fn interop_30_null_ids_of_an_unfinished_prompt_are_an_error() {
    for (ids, missing) in [
        (r#""ctx_request_id":null,"disagg_request_id":5"#, "ctx_request_id"),
        (r#""disagg_request_id":5"#, "ctx_request_id"),
        (r#""ctx_request_id":"7""#, "ctx_request_id"),
        (r#""ctx_request_id":7.5"#, "ctx_request_id"),
        (r#""ctx_request_id":7e0"#, "ctx_request_id"),
        (r#""ctx_request_id":7,"disagg_request_id":"5""#, "disagg_request_id"),
        (r#""ctx_request_id":7,"disagg_request_id":5e15"#, "disagg_request_id"),
    ] {
        for reason in [r#""length""#, r#""not_finished""#, "null"] {
            let answered = answer(reason, &params(ids), "[1]");
            assert_eq!(decode(&chat(""), &answered), Err(HandoffError::NoId(missing)), "{ids}");
        }
    }
    for reason in ["cancelled", "timeout", "abort", "error"] {
        let answered = answer(&format!("\"{reason}\""), &offered(), "[1]");
        assert_eq!(decode(&chat(""), &answered), Err(HandoffError::GaveUp(reason)));
    }
}

/// The worker itself refuses what it does not know, and the client learns of its mistake.
#[test]
fn interop_35_foreign_fields_are_neither_added_nor_removed() {
    let foreign = r#","kv_transfer_params":{"do_remote_prefill":true},"bootstrap_room":1,"rid":"r""#;
    let body = chat(foreign);
    let (sent, _) = decode(&body, &answer(r#""length""#, &offered(), "[1]")).unwrap();
    let plain = plain_body(&body, Some(Engine::Trtllm));
    for leg in [text(&context_body(&body, ID, false)), &sent, text(&plain)] {
        assert!(leg.contains(foreign), "{leg}");
    }
    assert_eq!(plain.as_ptr(), body.raw.as_ptr());
    let own = plain_body(&chat(r#","disaggregated_params":{}"#), Some(Engine::Trtllm));
    assert_eq!(own, format!("{{\"model\":\"m\",{MESSAGES}}}"));
}

proptest! {
    #[test]
    fn ids_stay_the_digits_that_were_sent(id: u64, ctx: u64, token: u64) {
        let context: Value = serde_json::from_slice(&context_body(&chat(""), id, false)).unwrap();
        prop_assert_eq!(context["disaggregated_params"]["disagg_request_id"].as_u64(), Some(id));
        let ids = format!(r#""ctx_request_id":{ctx},"disagg_request_id":{id}"#);
        let answered = answer(r#""length""#, &params(&ids), &format!("[{token}]"));
        let (sent, _) = decode(&chat(""), &answered).unwrap();
        prop_assert!(sent.contains(&ids), "{}", sent);
        let ids = format!("\"prompt_token_ids\":[{token}]");
        prop_assert!(sent.contains(&ids), "{}", sent);
    }

    #[test]
    fn all_other_bytes_stay(
        value in "[ ]{0,2}(-?[1-9][0-9]{0,30}|\"[a-z]{0,5}\\\\n\"|\\[1, 2\\]|\\{\"b\":1,\"a\":2\\})[ ]{0,2}",
        style in 0..2_usize,
    ) {
        let member = format!(",\"other\":{value},\"z\":1");
        let body = chat(&member);
        let (decode, _) = decode(&body, &answer(r#""length""#, &offered(), "[1]")).unwrap();
        for leg in [text(&context_body(&body, ID, style == 1)), &decode] {
            prop_assert!(leg.contains(&member), "{}", leg);
        }
    }

    #[test]
    fn no_answer_panics_and_every_body_is_json(
        bytes in proptest::collection::vec(any::<u8>(), 0..100),
        inner in "[\\[\\]{}:,\"\\\\ 0-9a-z]{0,40}",
        stream: bool,
    ) {
        let body = chat(if stream { r#","stream":true"# } else { "" });
        let _ = merge(&body, &bytes);
        for answered in [
            answer(r#""length""#, &inner, "[1]"),
            answer(&inner, &offered(), "[1]"),
            answer(r#""stop""#, &inner, &inner),
            format!("{{\"choices\":{inner}}}"),
        ] {
            match merge(&body, answered.as_bytes()) {
                Ok(Merged::Decode(sent, _)) => {
                    prop_assert!(serde_json::from_slice::<&serde_json::value::RawValue>(&sent).is_ok());
                }
                Ok(Merged::Finished(finished)) => prop_assert!(!finished.body.is_empty()),
                Err(_) => {}
            }
        }
    }
}
