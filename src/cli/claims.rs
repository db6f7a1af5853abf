//! Numbers in the documentation against the constants that they are about.

use std::path::Path;

/// A sentence of a page, with `{}` where the value of a constant stands.
struct Claim {
    page: &'static str,
    sentence: &'static str,
    source: &'static str,
    constant: &'static str,
}

const fn claim(page: &'static str, sentence: &'static str, source: &'static str, constant: &'static str) -> Claim {
    Claim { page, sentence, source, constant }
}

const CLAIMS: &[Claim] = &[
    claim("configuration.md", "at least {} more than the least busy one", "src/routing/busy.rs", "MIN_EXCESS"),
    claim(
        "policies.md",
        "if that is at least {} more than the least busy pod has",
        "src/routing/busy.rs",
        "MIN_EXCESS",
    ),
    claim("strategies.md", "or fewer than {} more than the least busy one", "src/routing/busy.rs", "MIN_EXCESS"),
    claim("policies.md", "idle one of less than {} s", "src/routing/combined.rs", "IDLE"),
    claim("policies.md", "Loaded is a queue of more than {} s", "src/routing/combined.rs", "LOADED"),
    claim("strategies.md", "the batch is {}, or the most", "src/routing/plain/utilization.rs", "BATCH"),
    claim("strategies.md", "prefill time + {} · running", "src/routing/plain/latency.rs", "OUTPUT_TOKENS"),
    claim("strategies.md", "1 to {} bytes: rendezvous", "src/routing/plain/session_affinity.rs", "MAX_KEY_BYTES"),
    claim("strategies.md", "as is one above {} bytes", "src/fleet/selector.rs", "MAX_SELECTOR_BYTES"),
    claim("strategies.md", "bytes, {} requirements", "src/fleet/selector.rs", "MAX_SELECTOR_REQUIREMENTS"),
    claim("strategies.md", "requirements or {} values", "src/fleet/selector.rs", "MAX_VALUES"),
    claim("security.md", "{} per listener; beyond it", "src/tls/accept.rs", "MAX_HANDSHAKES"),
    claim("security.md", "| one handshake | {} s |", "src/tls/accept.rs", "HANDSHAKE_TIME"),
    claim("limits.md", "a name of more than {} bytes", "src/state/limits/users.rs", "MAX_USER_NAME"),
    claim("limits.md", "`rpm` 0 means {} requests", "src/state/limits/users.rs", "DEFAULT_RPM"),
    claim("policies.md", "half as much again above {} KV usage", "src/routing/decode/conductor.rs", "PRESSURE"),
    claim("models.md", "at most {} ranks are used", "src/discovery/containers.rs", "MAX_RANKS"),
    claim("operations.md", "why the last {} requests went", "src/routing/journal.rs", "KEPT"),
    claim("state-plane.md", "| the same stream | {} s, and up to 1 s", "src/state/links/teller.rs", "BEAT"),
    claim("state-plane.md", "After {} misses in a row no claims", "src/state/links/breaker.rs", "MISSES"),
    claim("state-plane.md", "until {} syncs in a row were quick", "src/state/links/breaker.rs", "QUICK"),
    claim("state-plane.md", "counts in full for {} s, then less", "src/load/remote.rs", "FADES_AFTER"),
    claim("state-plane.md", "nothing after another {}", "src/load/remote.rs", "FADES_OVER"),
    claim("kubernetes.md", "labels ({}, and those that the gateway reads)", "src/discovery/manifest.rs", "MAX_LABELS"),
    claim("kubernetes.md", "up to a pause of {} s", "src/discovery/kubernetes/pods.rs", "LONGEST_PAUSE"),
    claim("failures.md", "passed over for up to {} others", "src/exchange/machine/legs.rs", "MAX_FALLBACKS"),
];

fn file(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The number after `const NAME: … =`: a literal, a product, a shift, or the seconds of a duration.
fn constant(source: &str, name: &str) -> f64 {
    let text = file(source);
    let start = format!("const {name}: ");
    let (_, rest) = text.split_once(&start).unwrap_or_else(|| panic!("{source} has no {name}"));
    let (_, value) = rest.split_once('=').expect("a value");
    let (value, _) = value.split_once(';').expect("an end");
    let value = value.trim();
    let literal =
        |text: &str| -> f64 { text.trim().replace('_', "").parse().unwrap_or_else(|_| panic!("{name}: {text}")) };
    if let Some((unit, number)) = value.strip_prefix("Duration::from_").and_then(|call| call.split_once('(')) {
        let number = literal(number.trim_end_matches(')'));
        return match unit {
            "secs" => number,
            "millis" => number / 1000.0,
            "mins" => number * 60.0,
            _ => panic!("{name}: {value}"),
        };
    }
    if let Some((factor, power)) = value.split_once("<<") {
        return literal(factor) * 2f64.powf(literal(power));
    }
    value.split('*').map(literal).product()
}

#[test]
fn numbers_in_the_documentation_are_those_of_the_program() {
    let mut wrong = Vec::new();
    for Claim { page, sentence, source, constant: name } in CLAIMS {
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let expected = words(&sentence.replace("{}", &constant(source, name).to_string()));
        if !words(&file(&format!("docs/{page}"))).contains(&expected) {
            wrong.push(format!("docs/{page} does not say {expected:?} ({name} of {source})"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What a profile and a lock do with a strategy that does not exist, as strategies.md and profiles.md say.
#[test]
fn an_unknown_strategy_is_refused_in_a_lock_and_passed_over_in_a_profile() {
    use crate::fleet::ModelConfig;
    use crate::knobs::PdKnobs;
    let page = file("docs/strategies.md");
    let text = page.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        text.contains("in the header or the lock; in a profile or in `ROUTING_ALGORITHM` it is ignored with a warning")
    );
    let text = r#"{"lockedRoutingStrategy": "no-such", "profiles": {"default": {"routingStrategy": "no-such"}}}"#;
    let (config, warnings) = ModelConfig::parse(text, &PdKnobs::default());
    let config = config.expect("a configuration");
    assert_eq!(config.locked_strategy.as_deref(), Some("no-such"));
    assert_eq!(config.profiles.values().filter(|profile| profile.routing_strategy.is_some()).count(), 0);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
}

#[test]
fn leases_in_the_documentation_are_those_of_the_engines() {
    use crate::engines::Protocol;
    let page = file("docs/configuration.md");
    let says = |text: String| assert!(page.contains(&text), "docs/configuration.md does not say {text:?}");
    let seconds = |protocol: Protocol| protocol.default_lease().as_secs();
    says(format!("Mooncake: {} s.", seconds(Protocol::VllmMooncake)));
    says(format!("TensorRT-LLM: {} s.", seconds(Protocol::TrtContextFirst)));
    says(format!("{} s with the fields of 0.32 and of an answer that cannot be read", seconds(Protocol::VllmShfs)));
    assert_eq!([Protocol::Sglang, Protocol::VllmNixl].map(seconds), [0, 0], "they keep none");
    says("SGLang, `nixl` and AIBrix's own connector keep no blocks".to_owned());
}
