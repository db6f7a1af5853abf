//! Edits of the top level.

use proptest::prelude::*;
use serde_json::value::RawValue;

use super::super::scan::{JsonObject, each_member};
use super::super::{Edit, splice};
use super::Bytes;

fn edit(raw: &str, edits: &[Edit<'_>]) -> String {
    let raw = Bytes::copy_from_slice(raw.as_bytes());
    let fields = JsonObject::parse(&raw).unwrap().into_fields();
    String::from_utf8(splice(&raw, &fields, edits).to_vec()).unwrap()
}

#[test]
fn edits_touch_only_what_they_name() {
    use Edit::{Remove, Set};
    let cases: [(&str, &[Edit<'_>], &str); 22] = [
        ("{}", &[], "{}"),
        ("{}", &[Remove("a")], "{}"),
        ("{}", &[Set("a", b"1")], r#"{"a":1}"#),
        (" {\n } ", &[Set("a", b"1"), Set("b", b"2")], " {\"a\":1,\"b\":2\n } "),
        (r#"{"a":1}"#, &[Remove("a")], "{}"),
        (r#"{ "a" : 1 }"#, &[Remove("a")], "{  }"),
        (r#"{"a":1,"b":2,"c":3}"#, &[Remove("a")], r#"{"b":2,"c":3}"#),
        (r#"{"a":1,"b":2,"c":3}"#, &[Remove("b")], r#"{"a":1,"c":3}"#),
        (r#"{"a":1,"b":2,"c":3}"#, &[Remove("c")], r#"{"a":1,"b":2}"#),
        (r#"{"a":1,"b":2,"c":3}"#, &[Remove("a"), Remove("b")], r#"{"c":3}"#),
        (r#"{"a":1,"b":2,"c":3}"#, &[Remove("b"), Remove("c")], r#"{"a":1}"#),
        (r#"{"a":1,"b":2,"c":3}"#, &[Remove("c"), Remove("b"), Remove("a")], "{}"),
        (r#"{"a":1,"b":2}"#, &[Remove("a"), Remove("b"), Set("c", b"[]")], r#"{"c":[]}"#),
        (r#"{"a":1,"b":2}"#, &[Set("a", b"null")], r#"{"a":null,"b":2}"#),
        (r#"{"a":1,"b":2,"a":3}"#, &[Set("a", b"9")], r#"{"a":9,"b":2}"#),
        (r#"{"a":1,"b":2,"a":3}"#, &[Remove("a")], r#"{"b":2}"#),
        (r#"{"\u0061":1,"b":2,"a":3}"#, &[Set("a", b"9")], r#"{"\u0061":9,"b":2}"#),
        (r#"{"\u0061":1,"b":2}"#, &[Remove("a")], r#"{"b":2}"#),
        ("{ \"a\" : 1 ,\n  \"b\" : 2 }\n", &[Set("b", b"3"), Set("c", b"4")], "{ \"a\" : 1 ,\n  \"b\" : 3,\"c\":4 }\n"),
        (r#"{"a":1}"#, &[Set("a", b"2"), Remove("a")], "{}"),
        (r#"{"a":1}"#, &[Remove("a"), Set("a", b"2"), Set("a", b"3")], r#"{"a":3}"#),
        ("{}", &[Set("q\"\n", b"1")], "{\"q\\\"\\n\":1}"),
    ];
    for (raw, edits, expected) in cases {
        assert_eq!(edit(raw, edits), expected, "{raw} {edits:?}");
    }
}

#[test]
fn without_an_effect_the_same_bytes_come_back() {
    let raw = Bytes::from_static(b"{\"a\":1}");
    let fields = JsonObject::parse(&raw).unwrap().into_fields();
    assert_eq!(splice(&raw, &fields, &[Edit::Remove("b")]).as_ptr(), raw.as_ptr());
    for other in ["", " ", "--b\r\n", "[1]"] {
        let raw = Bytes::from_static(other.as_bytes());
        assert_eq!(splice(&raw, &[], &[Edit::Set("a", b"1")]), raw);
    }
}

/// Random members: key spelling, value text, white space around.
fn member() -> impl Strategy<Value = (String, String)> {
    let key = prop_oneof![
        Just(r#""max_tokens""#.to_owned()),
        Just(r#""max\u005ftokens""#.to_owned()),
        Just(r#""stream""#.to_owned()),
        Just(r#""\u0073tream""#.to_owned()),
        Just(r#""\ud800""#.to_owned()),
        "[a-c]{0,2}".prop_map(|key| format!("\"{key}\"")),
    ];
    let value = prop_oneof![
        Just("1e2".to_owned()),
        Just("9007199254740993".to_owned()),
        Just(r#"{"z":1, "a":[2,{"stream" : "}"}]}"#.to_owned()),
        Just(r#""é\u00e9,\"}{ \ud800""#.to_owned()),
        Just("null".to_owned()),
        any::<i64>().prop_map(|number| number.to_string()),
    ];
    let space = || "[ \n\t\r]{0,2}";
    (space(), key, space(), space(), value, space())
        .prop_map(|(a, key, b, c, value, d)| (key.clone(), format!("{a}{key}{b}:{c}{value}{d}")))
}

fn members(text: &str) -> Vec<(String, String)> {
    let mut all = Vec::new();
    each_member(text, |key, value| {
        all.push((key.to_owned(), value.to_owned()));
        true
    })
    .unwrap();
    all
}

proptest! {
    #[test]
    fn r03_interop_08_other_members_keep_bytes_and_order(
        parts in proptest::collection::vec(member(), 0..8),
        blank in "[ \n]{0,2}",
        set in proptest::collection::vec(prop_oneof![Just("max_tokens"), Just("a"), Just("new")], 0..3),
        removed in proptest::collection::vec(prop_oneof![Just("stream"), Just("b"), Just("absent")], 0..3),
    ) {
        let joined = parts.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(",");
        let raw = if parts.is_empty() { format!("{{{blank}}}{blank}") } else { format!("{blank}{{{joined}}}{blank}") };
        let edits: Vec<_> = set.iter().map(|key| Edit::Set(key, b"[7]"))
            .chain(removed.iter().map(|key| Edit::Remove(key))).collect();
        let out = edit(&raw, &edits);

        prop_assert!(serde_json::from_str::<&RawValue>(&out).is_ok(), "{}", out);
        let decoded = |key: &str| super::super::scan::decode_key(key).into_owned();
        let named = |key: &str| set.contains(&decoded(key).as_str()) || removed.contains(&decoded(key).as_str());
        let others = |text: &str| members(text).into_iter().filter(|(key, _)| !named(key)).collect::<Vec<_>>();
        prop_assert_eq!(others(&out), others(&raw));
        for key in &set {
            let values: Vec<_> = members(&out).into_iter().filter(|(k, _)| decoded(k) == *key).map(|(_, v)| v).collect();
            prop_assert_eq!(values, vec!["[7]".to_owned()]);
        }
        for key in &removed {
            prop_assert!(members(&out).iter().all(|(k, _)| decoded(k) != *key));
        }
        // Doing it twice changes nothing more.
        prop_assert_eq!(edit(&out, &edits), out.clone());
        if edits.is_empty() {
            prop_assert_eq!(out, raw);
        }
    }
}
