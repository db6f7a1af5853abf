//! The environment of the reference gateway's own manifests, carried over as it is.

use super::*;

/// What AIBrix 0.7's `config/gateway/gateway-plugin` gives its container.
const KUSTOMIZATION: &[(&str, &str)] = &[
    ("REDIS_HOST", "aibrix-redis-master"),
    ("REDIS_PORT", "6379"),
    ("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "50"),
    ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "character"),
    ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "128"),
    ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "16"),
    ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "2"),
    ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "60"),
    ("AIBRIX_STATESYNC_ENABLED", "false"),
    ("AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED", "false"),
    ("AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER", "false"),
    ("POD_NAME", "gw-0"),
    ("POD_NAMESPACE", "aibrix-system"),
];
/// What its overlay for releases adds.
const RELEASE: &[(&str, &str)] =
    &[("AIBRIX_GPU_OPTIMIZER_TRACING_FLAG", "false"), ("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", "200000")];
/// What its chart gives it beside the kustomization's; the sidecar form names a strategy.
const CHART: &[(&str, &str)] = &[
    ("REDIS_PASSWORD", "secret"),
    ("AIBRIX_AUTH_BEARER_TOKEN", "secret"),
    ("AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES", "4194304"),
    ("ROUTING_ALGORITHM", "random"),
];

#[test]
fn the_reference_manifests_cost_what_the_report_says_and_nothing_else() {
    let (defaults, _) = read(&[]);
    for (manifest, added, costs) in [
        ("kustomization", &[][..], &["AIBRIX_STATESYNC_ENABLED"][..]),
        ("release", RELEASE, &["AIBRIX_STATESYNC_ENABLED", "AIBRIX_PREFIX_CACHE_BLOCK_NUMBER"]),
        (
            "chart",
            CHART,
            &[
                "AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES",
                "AIBRIX_STATESYNC_ENABLED",
                "AIBRIX_AUTH_BEARER_TOKEN",
                "ROUTING_ALGORITHM",
            ],
        ),
    ] {
        let (knobs, report) = read(&[KUSTOMIZATION, added].concat());
        assert_eq!(report.warnings, Vec::<String>::new(), "{manifest}");
        assert_eq!(report.config_errors, 0, "{manifest}");
        let named: Vec<&str> = report.notes.iter().filter_map(|note| note.split(' ').next()).collect();
        assert_eq!(named, costs, "{manifest}: {:?}", report.notes);
        assert_eq!(knobs.limits.max_body_bytes, defaults.limits.max_body_bytes, "{manifest}");
        assert_eq!(knobs.limits.max_grpc_message_bytes, defaults.limits.max_grpc_message_bytes, "{manifest}");
        assert!(knobs.plane.share_prefixes && knobs.prefix.hash_seed.is_none(), "{manifest}");
        assert_eq!(knobs.plane.findings_period, defaults.plane.findings_period, "{manifest}");
    }
}

#[test]
fn what_asks_for_nothing_is_not_mentioned() {
    for row in aibrix::rows(aibrix::VARIABLES).filter(|row| row.verdict == aibrix::Verdict::Absent) {
        if !row.there.is_empty() && row.name != super::super::carried::STATESYNC {
            let (_, report) = read(&[(row.name, row.there)]);
            assert_eq!(report.warnings, Vec::<String>::new(), "{}", row.name);
        }
    }
    for (name, value) in [("AIBRIX_STATESYNC_ENABLED", "true"), ("AIBRIX_STATESYNC_SYNC_PERIOD", "100ms")] {
        let (_, report) = read(&[(name, value)]);
        assert_eq!((report.warnings, report.notes), (vec![], vec![]), "{name}");
    }
}

#[test]
fn what_costs_something_is_told_in_one_line() {
    for (name, value) in [
        ("AIBRIX_STATESYNC_ENABLED", "F"),
        ("AIBRIX_STATESYNC_SYNC_PERIOD", "10s"),
        ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "4"),
        ("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", "200000"),
        ("AIBRIX_DISABLE_RATE_LIMITING", "true"),
        ("AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES", "4194304"),
        ("ROUTING_ALGORITHM", "random"),
    ] {
        let (_, report) = read(&[(name, value)]);
        assert_eq!((report.notes.len(), report.warnings.len()), (1, 0), "{name}: {report:?}");
        assert!(report.notes[0].starts_with(name), "{:?}", report.notes);
    }
}

#[test]
fn a_message_size_raises_the_body_limit_and_lowers_nothing() {
    let (mib, default) = (1 << 20, 64 << 20);
    // Given; limits of bodies and of messages; notes.
    let table = [
        (1, default, 65 * mib, 1),
        (4 * mib, default, 65 * mib, 1),
        (64 * mib + 4095, default, 65 * mib, 1),
        (64 * mib + 4096, default, 64 * mib + 4096, 0),
        (65 * mib, default, 65 * mib, 0),
        (128 * mib, 128 * mib - 4096, 128 * mib, 0),
    ];
    for (given, body, message, notes) in table {
        let (knobs, report) = read(&[("AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES", &given.to_string())]);
        let limits = &knobs.limits;
        assert_eq!((limits.max_body_bytes, limits.max_grpc_message_bytes), (body, message), "{given}");
        assert_eq!((report.notes.len(), report.warnings.len()), (notes, 0), "{given}");
    }
    // Who sets the limit of bodies has said it all.
    for (given, message) in [("5095", 1000 + mib), ("5096", 5096), ("134217728", 128 * mib)] {
        let (knobs, _) = read(&[("TANDEM_MAX_BODY_BYTES", "1000"), ("AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES", given)]);
        assert_eq!((knobs.limits.max_body_bytes, knobs.limits.max_grpc_message_bytes), (1000, message), "{given}");
    }
}
