//! Selectors against the grammar of Kubernetes' `labels.Parse`.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::selector::{MAX_SELECTOR_BYTES, MAX_SELECTOR_REQUIREMENTS, Selector, SelectorError};

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn what_matches() {
    let pod = labels(&[
        ("zone", "a"),
        ("empty", ""),
        ("example.com/tier", "gold"),
        ("in", "x"),
        ("cores", "16"),
        ("min-cores", "-5"),
    ]);
    for (text, expected) in [
        ("", true),
        (" \t", true),
        ("zone=a", true),
        ("zone==a", true),
        ("zone = a", true),
        ("\n zone\t==\ra ", true),
        ("zone=b", false),
        ("Zone=a", false),
        ("zone=", false),
        ("empty=", true),
        ("empty==", true),
        ("empty=,zone=a", true),
        ("missing=", false),
        ("zone!=a", false),
        ("zone!=b", true),
        ("zone!=", true),
        ("empty!=", false),
        ("missing!=a", true),
        ("zone", true),
        ("!zone", false),
        ("! missing", true),
        ("missing", false),
        ("empty", true),
        ("zone in (a)", true),
        ("zone in(a,b)", true),
        ("zone in ( b , c )", false),
        ("zone in (b,,a)", true),
        ("empty in (,)", true),
        ("empty in (b,)", true),
        ("missing in (,)", false),
        ("zone notin (a,b)", false),
        ("zone notin (b)", true),
        ("missing notin (a)", true),
        ("empty notin (,a)", false),
        ("example.com/tier=gold", true),
        ("example.com/tier in (silver,gold),zone=a,!missing", true),
        ("example.com/tier=gold,zone=b", false),
        ("tier=gold", false),
        ("in=x", true),
        ("in in (in,x)", true),
        ("in", true),
        ("!notin", true),
        ("zone=in", false),
        ("cores>15", true),
        ("cores > 16", false),
        ("cores<17", true),
        ("cores<16", false),
        ("min-cores<1", true),
        ("zone>1", false),
        ("missing<1", false),
    ] {
        let selector = Selector::parse(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        assert_eq!(selector.matches(&pod), expected, "{text:?}");
        assert_eq!(selector.is_empty(), text.trim().is_empty(), "{text:?}");
        assert_eq!(selector.to_string(), text.trim());
    }
}

#[test]
fn what_is_refused() {
    let long = |length: usize| "k".repeat(length);
    let cases: Vec<String> = [
        "=a",
        "==",
        "!",
        "!!zone",
        "!zone=a",
        ",",
        ",zone",
        "zone,",
        "zone,,tier",
        "zone a",
        "zone=a b",
        "zone=a tier",
        "zone===a",
        "zone=!a",
        "zone=(a)",
        "zone in",
        "zone in a",
        "zone in ()",
        "zone in (a",
        "zone in a)",
        "zone in (a b)",
        "zone in (a))",
        "zone in ((a))",
        "zone notin ()",
        "zone In (a)",
        "zone ! a",
        "zone>",
        "zone>a",
        "zone>1.5",
        "zone>9223372036854775808",
        "zone><1",
        "zone>=1",
        "(zone=a)",
        "zone=a;tier=b",
        "zone=a&b",
        "zone=a/b",
        "zone=-a",
        "zone=a-",
        "zone=_",
        "zone=\"a\"",
        "zone=ä",
        "zöne=a",
        "-zone",
        "zone-",
        ".zone",
        "a/b/c",
        "/zone",
        "example.com/",
        "Example.com/zone",
        "-x.com/zone",
        "x-.com/zone",
        "x..com/zone",
        "x_y.com/zone",
        "zone=*",
        "*",
        "zone\u{a0}=a",
        "zone\0",
    ]
    .map(str::to_owned)
    .into_iter()
    .chain([
        long(64),
        format!("zone={}", long(64)),
        format!("{}/zone", [long(63), long(63), long(63), long(63)].join(".")),
    ])
    .collect();
    for text in cases {
        let error = Selector::parse(&text).expect_err(&text);
        assert_ne!(error, SelectorError::TooLarge, "{text:?}");
    }
}

#[test]
fn bounds() {
    let name = "k".repeat(63);
    assert!(Selector::parse(&format!("{name}={name}")).is_ok());
    let prefix = [name.as_str(), name.as_str(), name.as_str(), &name[..61]].join(".");
    assert_eq!(prefix.len(), 253);
    assert!(Selector::parse(&format!("{prefix}/{name}")).is_ok());

    let list = |count: usize| vec!["k"; count].join(",");
    assert!(Selector::parse(&list(MAX_SELECTOR_REQUIREMENTS)).is_ok());
    assert_eq!(Selector::parse(&list(MAX_SELECTOR_REQUIREMENTS + 1)), Err(SelectorError::TooLarge));
    assert!(Selector::parse(&format!("k in ({})", list(128))).is_ok());
    assert_eq!(Selector::parse(&format!("k in ({})", list(129))), Err(SelectorError::TooLarge));
    assert_eq!(Selector::parse(&format!("k in ({}),k=a", list(128))), Err(SelectorError::TooLarge));
    let padded = |length: usize| format!("k{}", " ".repeat(length - 1));
    assert!(Selector::parse(&padded(MAX_SELECTOR_BYTES)).is_ok());
    assert_eq!(Selector::parse(&padded(MAX_SELECTOR_BYTES + 1)), Err(SelectorError::TooLarge));
}

#[test]
fn errors_say_where() {
    for (text, expected) in [
        ("zone=a,=b", SelectorError::Unexpected { expected: "a label's key", at: 7 }),
        ("zone in  a", SelectorError::Unexpected { expected: "(", at: 9 }),
        ("zone", SelectorError::Key { at: 0 }),
        ("a= /b", SelectorError::Value { at: 3 }),
    ] {
        let text = if text == "zone" { "-zone" } else { text };
        assert_eq!(Selector::parse(text), Err(expected), "{text}");
    }
}

proptest! {
    /// No text makes it panic; what it takes is printable and selects by its own rules again.
    #[test]
    fn any_text(text in "[a-c/.=!(),<> in0-9é\t-]{0,40}") {
        if let Ok(selector) = Selector::parse(&text) {
            prop_assert!(selector.to_string().bytes().all(|byte| byte.is_ascii_graphic() || b" \t\r\n".contains(&byte)));
            prop_assert_eq!(Selector::parse(&selector.to_string()), Ok(selector.clone()));
            let _ = selector.matches(&labels(&[("a", "b")]));
        }
    }

    /// `in` and `notin` are opposites, whatever the label is.
    #[test]
    fn opposites(value in proptest::option::of("[a-c]{0,2}"), set in proptest::collection::vec("[a-c]{0,2}", 1..4)) {
        let pod = value.as_deref().map(|value| labels(&[("k", value)])).unwrap_or_default();
        let of = |operator: &str| Selector::parse(&format!("k {operator} ({})", set.join(",")));
        if set.len() > 1 || !set[0].is_empty() {
            prop_assert_ne!(of("in").unwrap().matches(&pod), of("notin").unwrap().matches(&pod));
        }
    }
}
