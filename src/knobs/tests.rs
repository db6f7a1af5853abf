//! Reading from a map.

use std::collections::BTreeMap;
use std::time::Duration;

use super::*;

mod carried;

struct Map(BTreeMap<String, String>);

impl Environment for Map {
    fn get(&self, name: &str) -> Option<String> {
        self.0.get(name).cloned()
    }
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
    fn host_name(&self) -> Option<String> {
        Some("the host name".to_owned())
    }
}

fn read(pairs: &[(&str, &str)]) -> (Knobs, Report) {
    Knobs::read(&map(pairs)).unwrap()
}

fn map(pairs: &[(&str, &str)]) -> Map {
    Map(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
}

fn setting<'a>(report: &'a Report, name: &str) -> &'a Setting {
    report.settings.iter().find(|setting| setting.name == name).unwrap()
}

#[test]
fn generated_configuration_page() {
    assert_generated("docs/configuration.md", &configuration_markdown());
}

/// The page shows every name that the code knows, and nothing else.
#[test]
fn generated_table_of_strategies() {
    let (begin, end) = ("<!-- registered: begin -->\n", "<!-- registered: end -->");
    let page = include_str!("../../docs/strategies.md");
    let (before, rest) = page.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    assert_generated("docs/strategies.md", &format!("{before}{begin}{}{end}{after}", registered_markdown()));
}

#[test]
fn the_table_and_the_reader_agree() {
    let (_, report) = read(&[]);
    assert_eq!((report.warnings.len(), report.config_errors), (0, 0));
    let mut read: Vec<_> = report.settings.iter().map(|setting| setting.name).collect();
    let mut described = Vec::new();
    for described_setting in settings::GROUPS.iter().flat_map(|group| group.settings) {
        described.push(described_setting.name);
        let setting = setting(&report, described_setting.name);
        assert_eq!(setting.origin, Origin::Default, "{}", setting.name);
        // Two defaults are described, not spelled out.
        match setting.name {
            "AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES" => assert_eq!(setting.value, (65 << 20).to_string()),
            "OTEL_SERVICE_NAME" => assert_eq!(setting.value, "unset"),
            _ => assert_eq!(setting.value, described_setting.default, "{}", setting.name),
        }
    }
    read.sort_unstable();
    described.sort_unstable();
    assert_eq!(read, described);
    for row in inert::inert() {
        assert!(!described.contains(&row.name), "{} is both", row.name);
    }
}

#[test]
fn defaults_equal_the_documented_fields() {
    let (knobs, _) = read(&[]);
    assert_eq!(*knobs.pd, PdKnobs::default());
    assert_eq!(knobs.gateway_pod, "the host name");
    assert_eq!(knobs.otel.endpoint, None);
    assert_eq!(knobs.otel.service_name, "aibrix-gateway-plugin");
    assert_eq!(knobs.limits.max_body_bytes, 64 << 20);
    assert_eq!(knobs.scrape.interval, Duration::from_millis(50));
    assert_eq!(knobs.prefix.max_idle, Duration::from_mins(20));
}

#[test]
fn good_values_are_taken() {
    let (knobs, report) = read(&[
        ("POD_NAME", "gw-1"),
        ("ROUTING_ALGORITHM", " least-request:2,prefix-cache "),
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "60"),
        ("AIBRIX_PREFILL_SCORE_POLICY", "least_request"),
        ("AIBRIX_DECODE_SCORE_POLICY", "least_request"),
        ("AIBRIX_PROMPT_LENGTH_BUCKETING", "T"),
        ("AIBRIX_KV_CONNECTOR_TYPE", "nixl"),
        ("AIBRIX_PREFIX_CACHE_HASH_SEED", "42"),
        ("AIBRIX_MIN_MATCH_PCT", "100"),
        ("AIBRIX_TTFT_THRESHOLD_S", "0.5"),
        ("TANDEM_DRAIN_PROPAGATION_SECONDS", "0"),
        ("TANDEM_LOG_FORMAT", "json"),
        ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", ""),
    ]);
    assert_eq!(report.warnings, Vec::<String>::new());
    assert_eq!(knobs.gateway_pod, "gw-1");
    assert_eq!(knobs.routing_algorithm.as_deref(), Some("least-request:2,prefix-cache"));
    assert_eq!(knobs.pd.prefill_request_timeout, Duration::from_mins(1));
    assert_eq!(knobs.pd.prefill_policy, PrefillPolicy::LeastRequest);
    assert_eq!(knobs.pd.decode_policy, DecodePolicy::LeastRequest);
    assert!(knobs.pd.prompt_length_bucketing);
    assert_eq!(knobs.pd.kv_connector, KvConnector::Nixl);
    assert_eq!(knobs.prefix.hash_seed, Some(42));
    assert_eq!(knobs.pd.min_match_pct, 100);
    assert_eq!(knobs.ttft_threshold, Duration::from_millis(500));
    assert_eq!(knobs.drain.propagation, Duration::ZERO);
    assert_eq!(knobs.log.format, LogFormat::Json);
    assert_eq!(setting(&report, "AIBRIX_PREFIX_CACHE_BLOCK_SIZE").origin, Origin::Default);
    assert_eq!(setting(&report, "POD_NAME").origin, Origin::Environment);
}

/// R92: a bad value keeps the default, with one warning that names variable and value.
#[test]
fn r92_bad_values_keep_the_default() {
    let table = [
        ("AIBRIX_PREFILL_SCORE_POLICY", "Prefix-Cache"),
        ("AIBRIX_PREFILL_SCORE_POLICY", "load_balancing"),
        ("AIBRIX_DECODE_SCORE_POLICY", "prefix_cache"),
        ("AIBRIX_DECODE_SCORE_POLICY", "hybrid_cache_load"),
        ("AIBRIX_BUCKET_SERVE", "on"),
        ("AIBRIX_BUCKET_SERVE_MODE", "qps"),
        ("AIBRIX_TOKEN_LOAD_KV_WEIGHT", "0"),
        ("AIBRIX_TOKEN_LOAD_KV_WEIGHT", "-0.1"),
        ("AIBRIX_TOKEN_LOAD_REQUEST_COST", "0"),
        ("AIBRIX_TOKEN_LOAD_REQUEST_COST", "3.5"),
        ("AIBRIX_TOKEN_LOAD_REQUEST_COST", "1099511627777"),
        ("AIBRIX_TOKEN_LOAD_TTL_SECONDS", "0"),
        ("AIBRIX_TOKEN_LOAD_TTL_SECONDS", "1h"),
        ("AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS", "-1"),
        ("AIBRIX_TOKEN_LOAD_MAX_SESSIONS", "0"),
        ("AIBRIX_TOKEN_LOAD_MAX_SESSIONS", "134217729"),
        ("AIBRIX_TOKEN_LOAD_MAX_SESSIONS", "18446744073709551615"),
        ("AIBRIX_DECODE_TOKEN_LOAD_OUTPUT_GROWTH", "no"),
        ("AIBRIX_HYBRID_CACHE_LOAD_FACTOR", "1.01"),
        ("AIBRIX_HYBRID_CACHE_LOAD_FACTOR", "NaN"),
        ("AIBRIX_HYBRID_CACHE_LOAD_FACTOR", "-0.01"),
        ("TANDEM_KV_LEASE_SECONDS", "30s"),
        ("TANDEM_EXPLAIN", "yes"),
        ("AIBRIX_DECODE_LB_WEIGHT_RUNNING", "NaN"),
        ("AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT", "inf"),
        ("AIBRIX_DECODE_SCORE_RATIO_THRESHOLD", "-1.5"),
        ("AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD", "0"),
        ("AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD", "2k"),
        ("AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD", "1.5"),
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "30s"),
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "0"),
        ("AIBRIX_MIN_MATCH_PCT", "101"),
        ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "0"),
        ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "remote"),
        ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "bert"),
        ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "0"),
        ("AIBRIX_PREFIX_CACHE_HASH_SEED", "-3"),
        ("AIBRIX_PROMPT_LENGTH_BUCKETING", "yes"),
        ("AIBRIX_TTFT_THRESHOLD_S", "NaN"),
        ("AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES", "4MiB"),
        ("ROUTING_ALGORITHM", "round-robin"),
        ("ROUTING_ALGORITHM", "least-request:1000001"),
        ("ROUTING_ALGORITHM", "pd:2,random,"),
        ("TANDEM_MAX_STREAMS", "0"),
        ("TANDEM_DRAIN_TIMEOUT_SECONDS", "-1"),
        ("TANDEM_LOG", "tandem=nonsense"),
        ("TANDEM_LOG_FORMAT", "xml"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_TRACES_SAMPLER_ARG", "1.01"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
    ];
    let (_, defaults) = read(&[]);
    for (name, value) in table {
        let (_, report) = read(&[(name, value)]);
        assert_eq!(report.config_errors, 1, "{name}={value}");
        assert_eq!(report.warnings.len(), 1, "{name}={value}: {:?}", report.warnings);
        assert!(report.warnings[0].contains(name) && report.warnings[0].contains(value), "{:?}", report.warnings);
        let setting = setting(&report, name);
        assert_eq!(setting.origin, Origin::DefaultAfterBadValue);
        assert_eq!(setting.value, super::tests::setting(&defaults, name).value, "{name}={value}");
    }
}

#[test]
fn every_policy_can_be_named() {
    for policy in PrefillPolicy::ALL {
        let (knobs, report) = read(&[("AIBRIX_PREFILL_SCORE_POLICY", &policy.name().to_uppercase())]);
        assert_eq!((knobs.pd.prefill_policy, report.config_errors), (policy, 0));
    }
    for policy in DecodePolicy::ALL {
        let (knobs, report) = read(&[("AIBRIX_DECODE_SCORE_POLICY", policy.name())]);
        assert_eq!((knobs.pd.decode_policy, report.config_errors), (policy, 0));
    }
}

#[test]
fn token_and_bucket_knobs_are_taken() {
    let (knobs, report) = read(&[
        ("AIBRIX_BUCKET_SERVE", "true"),
        ("AIBRIX_BUCKET_SERVE_MODE", "RPS"),
        ("AIBRIX_TOKEN_LOAD_KV_WEIGHT", "0.5"),
        ("AIBRIX_TOKEN_LOAD_REQUEST_COST", "1"),
        ("AIBRIX_TOKEN_LOAD_TTL_SECONDS", "3"),
        ("AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS", "0"),
        ("AIBRIX_TOKEN_LOAD_MAX_SESSIONS", "7"),
        ("AIBRIX_DECODE_TOKEN_LOAD_OUTPUT_GROWTH", "f"),
        ("AIBRIX_HYBRID_CACHE_LOAD_FACTOR", "0"),
        ("TANDEM_KV_LEASE_SECONDS", "480"),
        ("TANDEM_EXPLAIN", "1"),
    ]);
    assert_eq!(report.warnings, Vec::<String>::new());
    let expected = PdKnobs {
        bucket_serve: true,
        bucket_serve_mode: BucketServeMode::Rps,
        token_load_kv_weight: 0.5,
        token_load_request_cost: 1,
        token_load_ttl: Duration::from_secs(3),
        token_load_session_ttl: Duration::ZERO,
        decode_output_growth: false,
        hybrid_cache_load_factor: 0.0,
        kv_lease: Some(Duration::from_mins(8)),
        ..PdKnobs::default()
    };
    assert_eq!((&*knobs.pd, knobs.max_sessions, knobs.explain), (&expected, 7, true));
}

#[test]
fn a_long_bad_value_is_cut() {
    let (_, report) = read(&[("TANDEM_MAX_STREAMS", &"ä".repeat(5000))]);
    assert!(report.warnings[0].len() < 400, "{}", report.warnings[0].len());
}

#[test]
fn an_unknown_connector_refuses_the_start() {
    for (value, text) in [("rdma", "must be shfs, nixl or mooncake"), ("SHFS", "must be")] {
        let refusal = Knobs::read(&map(&[("AIBRIX_KV_CONNECTOR_TYPE", value)])).unwrap_err();
        assert_eq!(refusal.reasons.len(), 1);
        assert!(refusal.to_string().contains(text) && refusal.to_string().contains(value), "{refusal}");
    }
}

#[test]
fn a_machine_id_out_of_range_refuses_the_start() {
    for bad in ["1024", "-1", "one", "70000"] {
        let refusal = Knobs::read(&map(&[("AIBRIX_TRT_MACHINE_ID", bad)])).unwrap_err();
        assert!(refusal.to_string().contains("0 to 1023"), "{refusal}");
    }
    assert_eq!(read(&[("AIBRIX_TRT_MACHINE_ID", "1023")]).0.trt_machine_id, Some(1023));
}

#[test]
fn variables_without_effect_are_named_once() {
    for aibrix::Row { name, .. } in inert::inert() {
        let (_, report) = read(&[(name, "x")]);
        assert_eq!(report.warnings.len(), 1, "{name}: {:?}", report.warnings);
        assert!(report.warnings[0].starts_with(&format!("{name} is set, but has no effect here: ")));
        assert_eq!(report.config_errors, 0);
    }
    let (_, report) = read(&[
        ("TANDEM_MAX_BODY_BYTE", "1"),
        ("AIBRIX_GATEWAY_PLUGINS_SERVICE_HOST", "10.0.0.1"),
        ("AIBRIX_GATEWAY_PLUGINS_SERVICE_PORT_GRPC", "50052"),
        ("AIBRIX_GATEWAY_PLUGINS_PORT", "tcp://10.0.0.1:50052"),
        ("AIBRIX_GATEWAY_PLUGINS_PORT_50052_TCP_ADDR", "10.0.0.1"),
        ("REDIS_PORT", "tcp://10.0.0.7:6379"),
        ("HOME", "/"),
    ]);
    assert_eq!(report.warnings, ["TANDEM_MAX_BODY_BYTE is set, but has no effect here: no such setting"]);
}

#[test]
fn secrets_stay_out_of_the_report() {
    let (knobs, report) = read(&[
        ("AIBRIX_AUTH_BEARER_TOKEN", "hunter2"),
        ("TANDEM_ENGINE_API_KEY", "hunter2"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20hunter2"),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "hunter2"),
        ("PROMETHEUS_BASIC_AUTH_PASSWORD", "hunter2"),
        ("REDIS_URL", "redis://:hunter2@redis"),
        ("REDIS_PASSWORD", "hunter2"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:hunter2@collector:4317"),
    ]);
    let shown = format!(
        "{report:?} {} {:?} {:?}",
        report.table(),
        knobs.auth_bearer_token,
        (&knobs.otel.headers, &knobs.engine_auth)
    );
    assert!(shown.contains("http://[secret]@collector:4317"), "{shown}");
    assert!(!shown.contains("hunter2"), "{shown}");
    assert_eq!(knobs.auth_bearer_token.unwrap().expose(), "hunter2");
    assert_eq!(knobs.otel.headers[0].1.expose(), "Bearer hunter2");
    assert_eq!(report.config_errors, 1);
}

#[test]
fn strategies_are_those_of_routing() {
    use crate::routing::Strategy;
    assert_eq!(STRATEGIES.map(|name| Strategy::parse(name).unwrap()), Strategy::SINGLES);
    assert_eq!(Strategy::SINGLES.map(|strategy| strategy.name().into_owned()), STRATEGIES.map(str::to_owned));
}

#[test]
fn the_otlp_endpoint_is_resolved() {
    type Case<'a> = (&'a [(&'a str, &'a str)], Option<&'a str>);
    let base = "OTEL_EXPORTER_OTLP_ENDPOINT";
    let traces = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    let http = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http");
    let table: [Case<'_>; 11] = [
        (&[], None),
        (&[http], None),
        (&[(base, "http://c:4317")], Some("http://c:4317")),
        (&[(base, "c:4317")], Some("https://c:4317")),
        (&[(base, "c:4317"), ("OTEL_EXPORTER_OTLP_INSECURE", "true")], Some("http://c:4317")),
        (&[(base, "https://c:4317")], Some("https://c:4317")),
        (&[(base, "http://c:4318/"), http], Some("http://c:4318/v1/traces")),
        (&[(base, "http://a"), (traces, "http://b/x"), http], Some("http://b/x")),
        (&[(base, "https://c:4317"), ("OTEL_EXPORTER_OTLP_INSECURE", "true")], Some("http://c:4317")),
        (&[(base, "http://c"), ("OTEL_SDK_DISABLED", "true")], None),
        (&[(base, "http://c"), ("OTEL_TRACES_EXPORTER", "none")], None),
    ];
    for (pairs, expected) in table {
        assert_eq!(read(pairs).0.otel.endpoint.as_deref(), expected, "{pairs:?}");
    }
}

#[test]
fn the_files_of_the_collector_are_taken() {
    let (knobs, report) = read(&[
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca"),
        ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "/cert"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/key"),
        ("OTEL_EXPORTER_OTLP_INSECURE_SKIP_VERIFY", "true"),
    ]);
    let file = |name: &str| Some(std::path::PathBuf::from(name));
    let all =
        OtlpTls { authorities: file("/ca"), client_cert: file("/cert"), client_key: file("/key"), skip_verify: true };
    assert_eq!((knobs.otel.tls, report.warnings.len(), report.config_errors), (all, 1, 0));
    let (knobs, _) = read(&[
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca"),
        ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "/traces-ca"),
        ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "/cert"),
        ("OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "/traces-cert"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/key"),
        ("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "/traces-key"),
    ]);
    let of_traces = OtlpTls {
        authorities: file("/traces-ca"),
        client_cert: file("/traces-cert"),
        client_key: file("/traces-key"),
        skip_verify: false,
    };
    assert_eq!(knobs.otel.tls, of_traces);
    // What no scheme means is told.
    assert_eq!(read(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "c:4317")]).1.warnings.len(), 1);
}

#[test]
fn otel_details() {
    let (knobs, _) = read(&[
        ("OTEL_RESOURCE_ATTRIBUTES", "service.name=a,k8s.pod.name=b%2Fc"),
        ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1000"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2000"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100"),
    ]);
    assert_eq!(knobs.otel.service_name, "a");
    let expected = [("k8s.pod.name", "b/c"), ("service.instance.id", "the host name")];
    assert_eq!(knobs.otel.resource_attributes, expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
    assert_eq!(knobs.otel.sampler, TraceSampler { parent_based: true, ratio: 0.25 });
    assert_eq!(knobs.otel.timeout, Duration::from_secs(2));
    assert_eq!((knobs.otel.queue_size, knobs.otel.batch_size), (100, 100));
    let (knobs, _) = read(&[("OTEL_RESOURCE_ATTRIBUTES", "service.name=a"), ("OTEL_SERVICE_NAME", "b")]);
    assert_eq!((knobs.otel.service_name.as_str(), knobs.otel.resource_attributes.len()), ("b", 1));
    let (knobs, _) = read(&[
        ("OTEL_RESOURCE_ATTRIBUTES", "k8s.node.name=mine"),
        ("POD_NAME", "gw-1"),
        ("POD_NAMESPACE", "infra"),
        ("POD_UID", "u-1"),
        ("NODE_NAME", "n-1"),
    ]);
    let attributes: Vec<String> =
        knobs.otel.resource_attributes.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let of_pod = ["service.instance.id=gw-1", "k8s.pod.name=gw-1", "k8s.namespace.name=infra", "k8s.pod.uid=u-1"];
    assert_eq!(attributes, [&["k8s.node.name=mine"][..], &of_pod].concat(), "what the operator says wins");
    for (text, propagate) in [("tracecontext,baggage", true), ("baggage", false), ("none", false), ("b3", true)] {
        assert_eq!(read(&[("OTEL_PROPAGATORS", text)]).0.otel.propagate, propagate, "{text}");
    }
}

#[test]
fn what_is_said_of_traces_wins() {
    let (knobs, _) = read(&[
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "key=common"),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "key=traces"),
        ("OTEL_BSP_SCHEDULE_DELAY", "7"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5"),
    ]);
    assert_eq!(knobs.otel.protocol, OtlpProtocol::HttpProtobuf);
    assert_eq!(knobs.otel.headers.iter().map(|(_, value)| value.expose()).collect::<Vec<_>>(), ["traces"]);
    assert_eq!((knobs.otel.schedule_delay, knobs.otel.batch_size), (Duration::from_millis(7), 5));
}

#[test]
fn the_table_shows_what_differs() {
    let (_, report) = read(&[("TANDEM_MAX_STREAMS", "7"), ("AIBRIX_MIN_MATCH_PCT", "x")]);
    let table = report.table();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("TANDEM_MAX_STREAMS") && line.ends_with("7  (environment)")));
    assert!(lines.iter().any(|line| line.ends_with("0  (default (bad value))")));
    assert!(lines[2].ends_with("settings at their defaults"));
}
