//! generation_first, and the ids of both styles.

use std::collections::HashSet;

use proptest::prelude::*;

use super::super::super::Bodies;
use super::*;

/// 2023-01-01T00:00:00Z.
const START: u64 = 1_672_531_200_000;

fn info(params: &str) -> Result<ServerInfo, ServerInfoError> {
    ServerInfo::parse(format!("{{\"version\":\"1.3\",\"disaggregated_params\":{params}}}").as_bytes())
}

#[test]
fn interop_32_generation_first() {
    let told = info(r#"{"ctx_info_endpoint":"tcp://10.0.0.5:5555","ctx_dp_rank":0,"extra":1}"#).unwrap();
    let body = chat(r#","max_completion_tokens":32,"stream":true,"disaggregated_params":{"forged":1}"#);
    let Bodies { prefill, decode } = generation_bodies(&body, ID, &told);
    assert_eq!(
        prefill,
        format!(
            r#"{{"model":"m",{MESSAGES},"stream":false,"disaggregated_params":{{"request_type":"context_only","disagg_request_id":{ID},"schedule_style":1}},"max_tokens":1}}"#
        )
    );
    assert_eq!(
        decode,
        format!(
            r#"{{"model":"m",{MESSAGES},"max_completion_tokens":32,"stream":true,"disaggregated_params":{{"request_type":"generation_only","disagg_request_id":{ID},"ctx_request_id":{ID},"schedule_style":1,"ctx_info_endpoint":"tcp://10.0.0.5:5555","ctx_dp_rank":0}}}}"#
        )
    );
    let Bodies { prefill, decode } = generation_bodies(&completions(""), ID, &told);
    for leg in [prefill, decode] {
        assert!(text(&leg).contains(r#""prompt":"a b""#) && !text(&leg).contains("prompt_token_ids"));
    }
}

#[test]
fn interop_32_an_opaque_state_travels_and_stays_out_of_logs() {
    let told = info(r#"{"encoded_opaque_state":"QUJD\/w==","ctx_info_endpoint":["tcp:\/\/h:1"],"ctx_dp_rank":3}"#);
    let told = told.unwrap();
    let Bodies { decode, .. } = generation_bodies(&chat(""), ID, &told);
    let expected = r#""ctx_info_endpoint":"tcp:\/\/h:1","ctx_dp_rank":3,"encoded_opaque_state":"QUJD\/w=="}}"#;
    assert!(text(&decode).ends_with(expected), "{decode:?}");
    assert!(!format!("{told:?}").contains("QUJD"));
}

#[test]
fn interop_33_bad_server_info() {
    use ServerInfoError::*;
    let endpoint = |value: &str| format!(r#"{{"ctx_info_endpoint":{value},"ctx_dp_rank":0}}"#);
    let rank = |value: &str| format!(r#"{{"ctx_info_endpoint":"e","ctx_dp_rank":{value}}}"#);
    let state = |value: &str| format!(r#"{{"ctx_info_endpoint":"e","ctx_dp_rank":0,"encoded_opaque_state":{value}}}"#);
    for (params, expected) in [
        ("{}".to_owned(), Some(NoEndpoint)),
        ("null".to_owned(), Some(NoParams)),
        ("[]".to_owned(), Some(NoParams)),
        ("\"x\"".to_owned(), Some(NoParams)),
        (endpoint("\"\""), Some(NoEndpoint)),
        (endpoint("null"), Some(NoEndpoint)),
        (endpoint("5"), Some(NoEndpoint)),
        (endpoint("{}"), Some(NoEndpoint)),
        (endpoint("[]"), Some(NoEndpoint)),
        (endpoint("[null]"), Some(NoEndpoint)),
        (endpoint("[\"\"]"), Some(NoEndpoint)),
        (endpoint("[\"a\",\"b\"]"), Some(NoEndpoint)),
        (endpoint("[[\"a\"]]"), Some(NoEndpoint)),
        (endpoint("[ \"a\" ]"), None),
        (endpoint("\"a\""), None),
        (rank("null"), Some(NoRank)),
        (rank("1.5"), Some(NoRank)),
        (rank("0.0"), Some(NoRank)),
        (rank("1e0"), Some(NoRank)),
        (rank("-1"), Some(NoRank)),
        (rank("-0"), Some(NoRank)),
        (rank("\"0\""), Some(NoRank)),
        (rank("[0]"), Some(NoRank)),
        (rank("true"), Some(NoRank)),
        (rank("18446744073709551616"), Some(NoRank)),
        (r#"{"ctx_info_endpoint":"e"}"#.to_owned(), Some(NoRank)),
        (rank("0"), None),
        (rank("1023"), None),
        (state("null"), None),
        (state("\"\""), None),
        (state("5"), Some(BadState)),
        (state("[\"a\"]"), Some(BadState)),
    ] {
        assert_eq!(info(&params).err(), expected, "{params}");
    }
    for (answer, expected) in [("", NotJson), ("[]", NotJson), ("<html>", NotJson), ("{}", NoParams)] {
        assert_eq!(ServerInfo::parse(answer.as_bytes()), Err(expected), "{answer}");
    }
}

/// Worked out by hand from the layout: time << 22 | machine << 12 | count, then modulo 2^63-1-2^42, plus 2^42.
#[test]
fn ids_have_the_layout_of_the_reference() {
    for (machine, now, expected) in [
        (0, START, 1 << 42),
        (0, 0, 1 << 42),
        (0, START + 1, (1 << 42) + (1 << 22)),
        (5, START + 1, (1 << 42) + (1 << 22) + (5 << 12)),
        (1023, START, (1 << 42) + (1023 << 12)),
        (1024, START, 1 << 42),
        // 2026-11-30T00:00:00Z.
        (7, 1_795_996_800_000, (123_465_600_000 << 22) + (7 << 12) + (1 << 42)),
        // The last time that 41 bits hold, and all that come after it.
        (0, START + (1 << 41) - 1, (1 << 43) - (1 << 22) + 1),
        (0, u64::MAX, (1 << 43) - (1 << 22) + 1),
    ] {
        assert_eq!(Snowflake::new(machine).next(now), expected, "{machine} {now}");
    }
    let ids = Snowflake::new(3);
    let first = ids.next(START + 9);
    assert_eq!([ids.next(START + 9), ids.next(START + 9)], [first + 1, first + 2]);
}

#[test]
fn no_id_repeats_when_the_clock_steps_back_or_a_millisecond_is_full() {
    let ids = Snowflake::new(1);
    let mut seen = HashSet::new();
    let mut last = 0;
    for now in [START + 10, START + 9, 0, START + 10].into_iter().flat_map(|now| std::iter::repeat_n(now, 5_000)) {
        let id = ids.next(now);
        assert!(seen.insert(id) && id > last, "{id}");
        last = id;
    }
    // 20,000 ids from millisecond 10 on: the last of them belongs to the fifth.
    assert_eq!((last - (1 << 42)) >> 22, 14);
    // Time that has passed the borrowed one counts again.
    assert_eq!(ids.next(START + 1_000), (1 << 42) + (1_000 << 22) + (1 << 12));
    // At the end of time it starts over, with other ids than those already given.
    for _ in 0..10_000 {
        assert!(seen.insert(ids.next(u64::MAX)));
    }
}

#[test]
fn threads_never_get_the_same_id() {
    let ids = Snowflake::new(2);
    let all: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4_u64)
            .map(|thread| {
                let ids = &ids;
                scope.spawn(move || (0..5_000).map(|at| ids.next(START + at % (thread + 2))).collect::<Vec<_>>())
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
}

proptest! {
    #[test]
    fn ids_stay_in_range_and_differ(
        machine: u16,
        clock in proptest::collection::vec(prop_oneof![any::<u64>(), START..START + 3, START + (1 << 41) - 3..START + (1 << 41) + 3], 1..200),
    ) {
        let ids = Snowflake::new(machine);
        let given: Vec<u64> = clock.iter().map(|now| ids.next(*now)).collect();
        prop_assert!(given.iter().all(|id| (1 << 42..1 << 63).contains(id)));
        prop_assert_eq!(given.iter().collect::<HashSet<_>>().len(), given.len());
    }

    #[test]
    fn machines_never_give_the_same_id(one in 0..1024_u16, other in 0..1024_u16, now in START..START + (1 << 40)) {
        prop_assume!(one != other);
        prop_assert!(Snowflake::new(one).next(now) != Snowflake::new(other).next(now));
    }

    #[test]
    fn no_answer_panics(bytes in proptest::collection::vec(any::<u8>(), 0..80), text in "[\\[\\]{}:,\"\\\\ 0-9a-z_]{0,40}") {
        let _ = ServerInfo::parse(&bytes);
        let _ = info(&text);
        if let Ok(told) = info(&format!(r#"{{"ctx_info_endpoint":{text},"ctx_dp_rank":0}}"#)) {
            let Bodies { decode, .. } = generation_bodies(&chat(""), ID, &told);
            prop_assert!(serde_json::from_slice::<&serde_json::value::RawValue>(&decode).is_ok());
        }
    }
}
