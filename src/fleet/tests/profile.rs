use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use crate::fleet::{BucketRange, Features, Hints, ModelConfig, Profile, RateLimit};
use crate::knobs::{BucketServeMode, DecodePolicy, GateKnobs, Gpu, PdKnobs, PrefillPolicy, VtcKnobs};

fn parse(text: &str) -> (ModelConfig, Vec<String>) {
    let (result, warnings) = ModelConfig::parse(text, &PdKnobs::default());
    (result.unwrap(), warnings)
}

/// The profile `p` with this `routingConfig`.
fn profile(routing_config: &str) -> (Arc<Profile>, Vec<String>) {
    let (config, warnings) = parse(&format!(r#"{{"profiles": {{"p": {{"routingConfig": {routing_config}}}}}}}"#));
    (Arc::clone(&config.profiles["p"]), warnings)
}

#[test]
fn the_whole_shape() {
    let (config, warnings) = parse(
        r#"{"lockedRoutingStrategy": "pd", "defaultProfile": "a", "future": [1], "profiles": {
            "a": {"routingStrategy": "pd", "future": 5,
                  "routingConfig": {"promptLenBucketMinLength": 5, "promptLenBucketMaxLength": 2048, "combined": true}},
            "b": {}}}"#,
    );
    assert_eq!(warnings, Vec::<String>::new());
    assert_eq!(config.locked_strategy.as_deref(), Some("pd"));
    assert_eq!(config.profiles.keys().map(|name| &**name).collect::<Vec<_>>(), ["a", "b"]);
    let a = &config.profiles["a"];
    assert_eq!((a.routing_strategy.as_deref(), a.combined), (Some("pd"), true));
    assert_eq!(a.bucket, BucketRange { min: 5, max: Some(2048) });
    let b = &config.profiles["b"];
    assert_eq!((b.routing_strategy.as_deref(), b.combined), (None, false));
    assert_eq!(b.bucket, BucketRange { min: 0, max: None });
    assert_eq!(*b.knobs, PdKnobs::default());
}

#[test]
fn lookup_falls_back_to_the_default_profile() {
    let (config, _) = parse(r#"{"defaultProfile": "a", "profiles": {"a": {}, "b": {}, "default": {}}}"#);
    let name = |config: &ModelConfig, wanted| config.profile(wanted).map(|profile| profile.name.to_string());
    for (wanted, found) in [(None, "a"), (Some("b"), "b"), (Some("nope"), "a"), (Some("default"), "default")] {
        assert_eq!(name(&config, wanted).as_deref(), Some(found), "{wanted:?}");
    }
    let (config, warnings) = parse(r#"{"defaultProfile": "x", "profiles": {"a": {}, "default": {}}}"#);
    assert_eq!(name(&config, None).as_deref(), Some("default"));
    assert_eq!(warnings.len(), 1);
    let (config, _) = parse(r#"{"profiles": {"a": {}}}"#);
    assert_eq!(name(&config, None), None);
}

#[test]
fn a_lock_alone_is_a_config() {
    for text in [
        r#"{"lockedRoutingStrategy": "pd"}"#,
        r#"{"lockedRoutingStrategy": "pd", "profiles": null}"#,
        r#"{"lockedRoutingStrategy": "pd", "profiles": 7}"#,
    ] {
        let (config, _) = parse(text);
        assert_eq!(config.locked_strategy.as_deref(), Some("pd"));
        assert!(config.profiles.is_empty());
    }
}

#[test]
fn r92_what_is_unusable_as_a_whole() {
    for text in [
        "",
        "{",
        r#"{"profiles": {"a": {"routingStrategy": "pd""#,
        "[]",
        "7",
        "null",
        "{}",
        r#"{"profiles": null}"#,
        r#"{"profiles": []}"#,
        r#"{"lockedRoutingStrategy": "", "defaultProfile": "x"}"#,
        r#"{"profiles": {}} {"profiles": {}}"#,
    ] {
        assert!(ModelConfig::parse(text, &PdKnobs::default()).0.is_err(), "{text}");
    }
}

#[test]
fn r92_bad_values_are_dropped_alone_with_one_warning() {
    let other_field = r#""pd": {"minMatchPct": 7}"#;
    for bad in [
        r#""decodeLoadImbalanceMinSpread": 0"#,
        r#""decodeLoadImbalanceMinSpread": -1"#,
        r#""decodeLoadImbalanceMinSpread": "16""#,
        r#""decodeScoreRatioThreshold": true"#,
        r#""decodeLBWeightRunning": []"#,
        r#""prefillRequestTimeout": 0"#,
        r#""prefillRequestTimeout": 1.5"#,
        r#""prefillRequestTimeout": -30"#,
        r#""prefillRequestTimeout": 1e300"#,
        r#""prefillLoadImbalanceMinSpread": 2.5"#,
        r#""promptLengthBucketing": "true""#,
        r#""combined": 1"#,
        r#""promptLenBucketMaxLength": "2048""#,
        r#""prefillScorePolicy": "prefixcache""#,
        r#""prefillScorePolicy": "conductor2""#,
        r#""decodeScorePolicy": "hybrid_cache_load""#,
        r#""bucketServe": "true""#,
        r#""bucketServeMode": "RPS""#,
        r#""tokenLoadKVWeight": 0"#,
        r#""tokenLoadRequestCost": 0.5"#,
        r#""tokenLoadRequestCost": 1e13"#,
        r#""tokenLoadTTLSeconds": -1"#,
        r#""tokenLoadTTLSeconds": 4294967296"#,
        r#""tokenLoadSessionTTLSeconds": "1""#,
        r#""hybridCacheLoadFactor": 1.01"#,
        r#""decodeScorePolicy": 1"#,
        r#""prefixCache": {"standardDeviationFactor": 0}"#,
        r#""prefixCache": 5"#,
    ] {
        let (profile, warnings) = profile(&format!("{{{bad}, {other_field}}}"));
        let expected = PdKnobs { min_match_pct: 7, ..PdKnobs::default() };
        assert_eq!(*profile.knobs, expected, "{bad}");
        assert_eq!((profile.combined, profile.bucket), (false, BucketRange { min: 0, max: None }), "{bad}");
        assert_eq!(warnings.len(), 1, "{bad}: {warnings:?}");
    }
    let (profile, warnings) = profile(r#""text""#);
    assert_eq!((&*profile.knobs, warnings.len()), (&PdKnobs::default(), 1));
    let (config, warnings) =
        parse(r#"{"lockedRoutingStrategy": 5, "profiles": {"a": 5, "b": {"routingStrategy": {}}}}"#);
    assert_eq!((config.locked_strategy.clone(), config.profiles.len(), warnings.len()), (None, 1, 3));
}

#[test]
fn groups_of_strategies_are_read() {
    let (profile, warnings) = profile(
        r#"{"loadBalance": {"imbalanceMinGap": 12, "imbalanceFactor": 3.5},
            "preble": {"targetGPU": "A6000", "decodingLength": 64},
            "vtc": {"maxPodLoad": 200, "fairnessWeight": 0, "utilizationWeight": 2.5, "inputTokenWeight": 3,
                    "outputTokenWeight": 4, "tokenTrackerMinTokens": 250}}"#,
    );
    assert_eq!(warnings, Vec::<String>::new());
    let knobs = &profile.knobs.strategies;
    assert_eq!(knobs.gate, GateKnobs { spread: 11, factor: Some(3.5) });
    assert_eq!((knobs.preble.gpu, knobs.preble.decoding_length), (Gpu::A6000, 64));
    let vtc = VtcKnobs {
        max_pod_load: 200.0,
        fairness_weight: 0.0,
        utilization_weight: 2.5,
        input_weight: 3.0,
        output_weight: 4.0,
        min_tokens: 250.0,
        ..VtcKnobs::default()
    };
    assert_eq!(knobs.vtc, vtc);
}

#[test]
fn null_and_unknown_fields_are_silent() {
    let (profile, warnings) =
        profile(r#"{"pd": null, "combined": null, "minMatchPct": null, "futureKnob": 5, "pd2": 1}"#);
    assert_eq!((&*profile.knobs, warnings), (&PdKnobs::default(), Vec::new()));
}

#[test]
fn r92_what_is_not_as_it_looks_is_said() {
    let (config, warnings) = parse(
        r#"{"lockedRoutingStrategy": "PD", "profiles": {
            "a": {"routingStrategy": "a:2,b", "requestsInflight": 5, "ttftThresholdS": 2},
            "b": {"routingStrategy": "least-request:2,prefix-cache", "requestsInflight": -1, "ttftThresholdS": "1"},
            "c": {"routingStrategy": "slo", "requestsInflight": 0, "ttftThresholdS": 0,
                  "routingConfig": {"autoBlend": {"loadBalanceWeight": 2}, "loadBalance": {"queuedWeight": 0.5}}},
            "d": {"routingStrategy": "pd,random", "requestsPerSecondPerReplica": 0.3}}}"#,
    );
    let expected = [
        r#"lockedRoutingStrategy is "PD" (no such strategy): requests that it applies to get 400"#,
        r#"profile "a": routingStrategy is "a:2,b" (no such strategy); it is ignored"#,
        r#"profile "b": requestsInflight is -1; expected a whole number from 0 to 4294967295; it is ignored"#,
        r#"profile "b": ttftThresholdS is "1"; expected a number of seconds, 0 or more; it is ignored"#,
        "profile \"c\": routingStrategy: slo is served as least-request: it goes by the GPU optimizer's load profiles and, \
         without them, by least-request there too",
        r#"profile "c": routingConfig.loadBalance.queuedWeight has no effect here: load-balance goes by running requests and the drain rate"#,
        r#"profile "c": routingConfig.autoBlend.loadBalanceWeight has no effect here: a strategy is what its name says, nothing is blended in; a list like prefix-cache:5,load-balance:4 is"#,
        r#"profile "d": routingStrategy: pd cannot be combined: the other members of the list do not count"#,
        r#"profile "d": requestsPerSecondPerReplica is 0.3: with fewer than 4 pods it is 1 in all"#,
    ];
    assert_eq!(warnings, expected);
    let limits = |name: &str| {
        let profile = &config.profiles[name];
        (profile.knobs.strategies.requests_inflight, profile.ttft_threshold)
    };
    assert_eq!(limits("a"), (Some(5), Some(Duration::from_secs(2))));
    assert_eq!((limits("b"), limits("c")), ((None, None), (None, None)));
}

#[test]
fn r92_limits_on_the_rate() {
    use RateLimit::{Model, PerReplica};
    for (fields, expected, warned) in [
        ("", None, 0),
        (r#""requestsPerSecond": null"#, None, 0),
        (r#""requestsPerSecond": 1"#, Some(Model(1)), 0),
        (r#""requestsPerSecond": 5.0"#, Some(Model(5)), 0),
        (r#""requestsPerSecond": 4294967295"#, Some(Model(u32::MAX)), 0),
        (r#""requestsPerSecond": 4294967296"#, None, 1),
        (r#""requestsPerSecond": 0"#, None, 0),
        (r#""requestsPerSecond": -1"#, None, 1),
        (r#""requestsPerSecond": 1.5"#, None, 1),
        (r#""requestsPerSecond": "5""#, None, 1),
        (r#""requestsPerSecond": 5, "requestsPerSecondPerReplica": 2"#, Some(PerReplica(2.0)), 0),
        (r#""requestsPerSecondPerReplica": 2.5"#, Some(PerReplica(2.5)), 0),
        (r#""requestsPerSecondPerReplica": 0.5"#, Some(PerReplica(0.5)), 1),
        (r#""requestsPerSecondPerReplica": -0.5"#, None, 1),
        (r#""requestsPerSecond": 5, "requestsPerSecondPerReplica": 0"#, Some(Model(5)), 0),
        (r#""requestsPerSecond": true, "requestsPerSecondPerReplica": 2"#, Some(PerReplica(2.0)), 1),
    ] {
        let (config, warnings) = parse(&format!(r#"{{"profiles": {{"p": {{{fields}}}}}}}"#));
        assert_eq!((config.profiles["p"].rate_limit, warnings.len()), (expected, warned), "{fields}: {warnings:?}");
    }
    for (limit, replicas, expected) in [
        (Model(7), 3, 7),
        (PerReplica(7.0), 3, 21),
        (PerReplica(7.0), 0, 0),
        (PerReplica(f64::from(u32::MAX)), 2, u32::MAX),
        (PerReplica(1.5), 3, 4),
        (PerReplica(0.25), 8, 2),
        (PerReplica(0.25), 3, 1),
    ] {
        assert_eq!(limit.per_second(replicas), expected);
    }
}

#[test]
fn r92_an_unusable_hint_lets_the_profile_suit_nobody() {
    let usable = Hints { prompt_gte: Some(1), ..Hints::default() };
    for (hints, expected, warned) in [
        (r#"{"promptTokensGte": 1}"#, usable, 0),
        (r#"{"promptTokensGte": 1.0, "maxTokensLt": null}"#, usable, 0),
        (r#"{"promptTokensGte": 0}"#, Hints { prompt_gte: Some(0), ..Hints::default() }, 0),
        (r#"{"promptTokensGte": 1, "promptTokensLt": "9"}"#, Hints::default(), 1),
        (r#"{"promptTokensGte": -1}"#, Hints::default(), 1),
        (r#"{"promptTokensGte": 1.5, "maxTokensGte": []}"#, Hints::default(), 2),
        (
            r#"{"promptTokensGte": 9, "promptTokensLt": 9}"#,
            Hints { prompt_gte: Some(9), prompt_lt: Some(9), ..Hints::default() },
            1,
        ),
        (r#"{"maxTokensLt": 0}"#, Hints { max_lt: Some(0), ..Hints::default() }, 1),
        (r#""text""#, Hints::default(), 1),
    ] {
        let (profile, warnings) = profile(hints);
        assert_eq!((profile.hints, warnings.len()), (expected, warned), "{hints}: {warnings:?}");
    }
    let (_, warnings) = parse(r#"{"profiles": {"Auto": {}}}"#);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
}

/// A configuration of profiles with these hints, and the default `d`.
fn hinted(profiles: &[(&str, &str)]) -> ModelConfig {
    let profiles: Vec<String> =
        profiles.iter().map(|(name, hints)| format!(r#""{name}": {{"routingConfig": {{{hints}}}}}"#)).collect();
    parse(&format!(r#"{{"defaultProfile": "d", "profiles": {{"d": {{}}, {}}}}}"#, profiles.join(","))).0
}

#[test]
fn the_most_specific_of_the_suiting_profiles_is_chosen() {
    let suiting: &[(&[(&str, &str)], &str)] = &[
        (&[("a", "")], "d"),
        (&[("a", r#""promptTokensGte": 101"#)], "d"),
        (&[("a", r#""promptTokensGte": 100"#)], "a"),
        (&[("a", r#""promptTokensLt": 100"#)], "d"),
        (&[("a", r#""promptTokensLt": 101"#)], "a"),
        (&[("a", r#""maxTokensGte": 51"#)], "d"),
        (&[("a", r#""maxTokensGte": 50"#)], "a"),
        (&[("a", r#""maxTokensLt": 50"#)], "d"),
        (&[("a", r#""maxTokensLt": 51"#)], "a"),
        (&[("a", r#""promptTokensGte": 1, "maxTokensLt": 50"#)], "d"),
        // More hints.
        (&[("a", r#""promptTokensGte": 100"#), ("b", r#""promptTokensGte": 1, "promptTokensLt": 999"#)], "b"),
        // The higher lower bound, then the lower upper bound, on the prompt and then on the output.
        (&[("a", r#""promptTokensGte": 1"#), ("b", r#""promptTokensGte": 2"#)], "b"),
        (&[("a", r#""promptTokensLt": 999"#), ("b", r#""promptTokensLt": 998"#)], "b"),
        (&[("a", r#""maxTokensGte": 1"#), ("b", r#""maxTokensGte": 2"#)], "b"),
        (&[("a", r#""maxTokensLt": 999"#), ("b", r#""maxTokensLt": 998"#)], "b"),
        (&[("a", r#""promptTokensLt": 999"#), ("b", r#""promptTokensGte": 1"#)], "b"),
        (&[("a", r#""maxTokensGte": 9"#), ("b", r#""promptTokensLt": 999"#)], "b"),
        (&[("a", r#""maxTokensLt": 51"#), ("b", r#""maxTokensGte": 1"#)], "b"),
        // The name.
        (&[("b", r#""promptTokensGte": 1"#), ("a", r#""promptTokensGte": 1"#)], "a"),
    ];
    let features = Features { prompt_tokens: Some(100), max_tokens: Some(50) };
    for (profiles, expected) in suiting {
        let chosen = hinted(profiles).by_hints(features).map(|profile| profile.name.to_string());
        assert_eq!(chosen.as_deref(), Some(*expected), "{profiles:?}");
    }
    let unknown = hinted(&[("a", r#""promptTokensGte": 0"#), ("b", r#""maxTokensGte": 0"#)]);
    assert_eq!(&*unknown.by_hints(Features::default()).unwrap().name, "d", "what is not known suits no hint");
    assert!(parse(r#"{"profiles": {"a": {}}}"#).0.by_hints(features).is_none(), "no default, nobody chosen");
}

proptest! {
    /// Counting as far as `largest_prompt_hint` says answers all that a full count would.
    #[test]
    fn a_count_up_to_the_largest_hint_is_enough(
        bounds in proptest::collection::vec((0u64..40, 0u64..40, 0u64..4, 0u64..4), 1..5), tokens in 0u64..50, max in 0u64..4
    ) {
        let texts: Vec<(String, String)> = bounds.iter().enumerate().map(|(n, (gte, lt, max_gte, max_lt))| (
            format!("p{n}"),
            format!(r#""promptTokensGte": {gte}, "promptTokensLt": {lt}, "maxTokensGte": {max_gte}, "maxTokensLt": {max_lt}"#),
        )).collect();
        let profiles: Vec<(&str, &str)> = texts.iter().map(|(name, hints)| (name.as_str(), hints.as_str())).collect();
        let config = hinted(&profiles);
        let chosen = |tokens| config.by_hints(Features { prompt_tokens: tokens, max_tokens: Some(max) }).unwrap().name.clone();
        let counted = config.largest_prompt_hint(Some(max)).map(|bound| tokens.min(bound));
        prop_assert_eq!(chosen(Some(tokens)), chosen(counted));
    }
}

#[test]
fn every_knob_is_read_nested_and_flat() {
    let knobs = r#""promptLengthBucketing": true, "prefillRequestTimeout": 60, "prefillScorePolicy": " Least_Request ",
        "decodeScorePolicy": "least_request", "prefillLoadImbalanceMinSpread": 3, "decodeLoadImbalanceMinSpread": 4.5,
        "decodeThroughputImbalanceMinSpread": 100, "decodeScoreRatioThreshold": 2, "decodeLBWeightRunning": 0.5,
        "decodeLBWeightThroughput": 0.25, "minMatchPct": 100,
        "bucketServe": true, "bucketServeMode": "rps", "tokenLoadKVWeight": 0.7, "tokenLoadRequestCost": 10,
        "tokenLoadTTLSeconds": 0, "tokenLoadSessionTTLSeconds": 60, "hybridCacheLoadFactor": 1"#;
    let expected = PdKnobs {
        prompt_length_bucketing: true,
        prefill_request_timeout: Duration::from_mins(1),
        prefill_policy: PrefillPolicy::LeastRequest,
        decode_policy: DecodePolicy::LeastRequest,
        prefill_imbalance_min_spread: 3,
        decode_imbalance_min_spread: 4.5,
        decode_throughput_min_spread: 100.0,
        decode_score_ratio: 2.0,
        decode_weight_running: 0.5,
        decode_weight_throughput: 0.25,
        min_match_pct: 100,
        standard_deviation_factor: 2.0,
        bucket_serve: true,
        bucket_serve_mode: BucketServeMode::Rps,
        token_load_kv_weight: 0.7,
        token_load_request_cost: 10,
        token_load_ttl: Duration::ZERO,
        token_load_session_ttl: Duration::from_mins(1),
        hybrid_cache_load_factor: 1.0,
        ..PdKnobs::default()
    };
    let factor = r#""prefixCache": {"standardDeviationFactor": 2}"#;
    for text in [format!("{{{knobs}, {factor}}}"), format!(r#"{{"pd": {{{knobs}}}, {factor}}}"#)] {
        let (profile, warnings) = profile(&text);
        assert_eq!((&*profile.knobs, warnings), (&expected, Vec::new()), "{text}");
    }
}

#[test]
fn nested_wins_over_flat_unless_it_is_unusable() {
    for (text, expected, warned) in [
        (r#"{"pd": {"minMatchPct": 1}, "minMatchPct": 2}"#, 1, 0),
        (r#"{"pd": {"minMatchPct": 101}, "minMatchPct": 2}"#, 2, 1),
        (r#"{"pd": {"minMatchPct": 101}, "minMatchPct": -1}"#, 0, 2),
        (r#"{"minMatchPct": 0}"#, 0, 0),
    ] {
        let (profile, warnings) = profile(text);
        assert_eq!((profile.knobs.min_match_pct, warnings.len()), (expected, warned), "{text}: {warnings:?}");
    }
}

#[test]
fn overrides_start_from_the_gateways_own_values() {
    let base = PdKnobs { decode_weight_running: 7.0, min_match_pct: 50, ..PdKnobs::default() };
    let text = r#"{"profiles": {"p": {"routingConfig": {"minMatchPct": 10}}}}"#;
    let (config, _) = ModelConfig::parse(text, &base);
    assert_eq!(*config.unwrap().profiles["p"].knobs, PdKnobs { min_match_pct: 10, ..base });
}

#[test]
fn bucket_bounds() {
    for (text, min, max, warned) in [
        (r#"{"promptLenBucketMinLength": -5}"#, 0, None, 0),
        (r#"{"promptLenBucketMaxLength": 0}"#, 0, None, 0),
        (r#"{"promptLenBucketMaxLength": -1}"#, 0, None, 0),
        (r#"{"promptLenBucketMinLength": 5, "promptLenBucketMaxLength": 5}"#, 5, Some(5), 0),
        (r#"{"promptLenBucketMinLength": 6, "promptLenBucketMaxLength": 5}"#, 6, Some(5), 1),
        (r#"{"promptLenBucketMinLength": 2048.0}"#, 2048, None, 0),
    ] {
        let (profile, warnings) = profile(text);
        assert_eq!((profile.bucket, warnings.len()), (BucketRange { min, max }, warned), "{text}");
    }
}

#[test]
fn only_what_concerns_requests_is_compared() {
    let with = |routing: &str| parse(&format!(r#"{{"profiles": {{"a": {{"routingConfig": {routing}}}}}}}"#)).0;
    assert!(with("{}").same_for_requests(&with(r#"{"combined": true, "promptLenBucketMaxLength": 9}"#)));
    assert!(!with("{}").same_for_requests(&with(r#"{"minMatchPct": 1}"#)));
    assert!(!with("{}").same_for_requests(&parse(r#"{"profiles": {"b": {}}}"#).0));
    assert!(!with("{}").same_for_requests(&with(r#"{"promptTokensGte": 1}"#)));
    assert!(!with("{}").same_for_requests(&parse(r#"{"profiles": {"a": {"requestsPerSecond": 1}}}"#).0));
    assert!(!with("{}").same_for_requests(&parse(r#"{"profiles": {"a": {}, "b": {}}}"#).0));
}

#[test]
fn the_examples_of_the_page_are_usable() {
    let page = include_str!("../../../docs/profiles.md");
    let examples: Vec<&str> =
        page.split("```json").skip(1).map(|rest| rest.split("```").next().unwrap_or_default()).collect();
    assert_eq!(examples.len(), 3);
    for example in &examples {
        assert_eq!(parse(example).1, Vec::<String>::new(), "{example}");
    }
    let (config, _) = parse(examples[1]);
    for (prompt, max, expected) in
        [(7999, None, "short"), (8000, None, "long"), (8000, Some(3999), "long"), (8000, Some(4000), "long-essay")]
    {
        let features = Features { prompt_tokens: Some(prompt), max_tokens: max };
        assert_eq!(&*config.by_hints(features).unwrap().name, expected, "{features:?}");
    }
    assert_eq!(parse(examples[2]).0.profiles["default"].rate_limit, Some(RateLimit::PerReplica(10.0)));
}

#[test]
fn long_values_are_cut_in_warnings() {
    let (_, warnings) = profile(&format!(r#"{{"prefillScorePolicy": "{}"}}"#, "é".repeat(5000)));
    assert!(warnings[0].chars().count() < 300, "{}", warnings[0].len());
}

proptest! {
    #[test]
    fn no_text_makes_it_fail_in_another_way(text in r#"(\{|\}|"profiles"|"pd"|"routingConfig"|:|,|[0-9.eE+-]{1,4}|"[a-z]{0,3}"|null|\[|\]| ){0,40}"#) {
        let _ = ModelConfig::parse(&text, &PdKnobs::default());
    }
}
