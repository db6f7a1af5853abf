//! Every variable by its effect: what comes of a scene without it, with it, with a value that cannot be used, and (where
//! a profile may say the same) for requests of that profile and of another one.
//!
//! A variable that needs a socket, a clock or a whole process has its effect shown by the test that is named for it in
//! [`ELSEWHERE`]. [`every_variable_has_an_effect`] compares both tables with the list of settings, so that a new
//! variable needs a row here.

mod scene;
mod scenes;
mod strategies;

use scene::Given;
use scenes::*;
use strategies::*;

use super::*;
use crate::knobs::described;

/// One variable.
struct Row {
    variable: &'static str,
    /// A value that changes what comes of the scene.
    value: &'static str,
    /// One that cannot be used; empty = every text can.
    bad: &'static str,
    /// The same as `value` in a profile, members of `routingConfig`; empty = profiles cannot say it.
    field: &'static str,
    /// Other variables that the scene needs.
    beside: &'static [(&'static str, &'static str)],
    scene: fn(&Given<'_>) -> String,
    before: &'static str,
    after: &'static str,
}

const fn row(
    variable: &'static str,
    [value, bad, field]: [&'static str; 3],
    scene: fn(&Given<'_>) -> String,
    [before, after]: [&'static str; 2],
) -> Row {
    Row { variable, value, bad, field, beside: &[], scene, before, after }
}

impl Row {
    const fn beside(self, beside: &'static [(&'static str, &'static str)]) -> Row {
        Row { beside, ..self }
    }
}

const PREFILL: &str = "AIBRIX_PREFILL_SCORE_POLICY";
const DECODE: &str = "AIBRIX_DECODE_SCORE_POLICY";
const MOONCAKE: &[(&str, &str)] = &[("AIBRIX_KV_CONNECTOR_TYPE", "mooncake")];
/// Ejection at the first failure.
const AT_ONCE: &[(&str, &str)] = &[("TANDEM_EJECTION_FAILURES", "1")];
/// Eight requests are half of what a pod can take.
const HALF_BUSY: &[(&str, &str)] = &[("AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD", "16")];
const BY_TOKENS: &[(&str, &str)] = &[(PREFILL, "token_load")];

const ROWS: &[Row] = &[
    row("POD_NAME", ["gw-9", "", ""], replica_in_metrics, ["host", "gw-9"]),
    row("ROUTING_ALGORITHM", ["least-request", "best", ""], strategy_by_default, ["none", "least-request"]),
    row("AIBRIX_AUTH_BEARER_TOKEN", ["secret", "", ""], without_a_token, ["0", "401"]),
    row("TANDEM_ENGINE_API_KEY", ["k", "\u{7f}", ""], shown_to_engines, ["Bearer secret", "Bearer k"]),
    row("TANDEM_FORWARD_AUTH_TOKEN", ["true", "yes", ""], shown_to_engines, ["nothing", "Bearer secret"])
        .beside(&[("AIBRIX_AUTH_BEARER_TOKEN", "secret")]),
    row("AIBRIX_TTFT_THRESHOLD_S", ["0.4", "soon", ""], first_token, ["fast", "slow"]),
    row("TANDEM_WAKE_SLEEPING_MODELS", ["false", "yes", ""], woken, ["10.0.0.5:8080", ""]),
    row("TANDEM_MODEL_RUNTIME_PORT", ["9", "0", ""], woken, ["10.0.0.5:8080", "10.0.0.5:9"]),
    row("TANDEM_METRIC_LABELS", ["lean", "few", ""], apart_in_metrics, ["pods", "models"]),
    row("TANDEM_EXPLAIN", ["true", "yes", ""], explained, ["silent", "told"]),
    row(
        "AIBRIX_PROMPT_LENGTH_BUCKETING",
        ["true", "yes", r#""promptLengthBucketing": true"#],
        ranges,
        ["long", "short"],
    ),
    row(
        "AIBRIX_PREFILL_REQUEST_TIMEOUT",
        ["7", "0", r#""pd": {"prefillRequestTimeout": 7}"#],
        prefill_time,
        ["30", "7"],
    ),
    row(
        PREFILL,
        ["least_request", "fastest", r#""prefillScorePolicy": "least_request""#],
        cached_but_busier,
        ["p0", "p1"],
    ),
    row(
        DECODE,
        ["least_request", "fastest", r#""decodeScorePolicy": "least_request""#],
        busier_but_faster,
        ["d0", "d1"],
    ),
    row(
        "AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD",
        ["5", "1.5", r#""pd": {"prefillLoadImbalanceMinSpread": 5}"#],
        cached_but_much_busier,
        ["p0", "p1"],
    ),
    row(
        "AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD",
        ["1", "0", r#""pd": {"decodeLoadImbalanceMinSpread": 1}"#],
        busier_but_faster,
        ["d0", "d1"],
    ),
    row(
        "AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD",
        ["999", "2k", r#""pd": {"decodeThroughputImbalanceMinSpread": 999}"#],
        busier_but_faster,
        ["d0", "d1"],
    ),
    row(
        "AIBRIX_DECODE_SCORE_RATIO_THRESHOLD",
        ["1.2", "-1.5", r#""pd": {"decodeScoreRatioThreshold": 1.2}"#],
        busier_but_drains_faster,
        ["d1", "d0"],
    ),
    row(
        "AIBRIX_DECODE_LB_WEIGHT_RUNNING",
        ["3", "NaN", r#""pd": {"decodeLBWeightRunning": 3}"#],
        busier_but_faster,
        ["d0", "d1"],
    ),
    row(
        "AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT",
        ["0.1", "inf", r#""pd": {"decodeLBWeightThroughput": 0.1}"#],
        busier_but_faster,
        ["d0", "d1"],
    ),
    row("AIBRIX_MIN_MATCH_PCT", ["60", "101", r#""pd": {"minMatchPct": 60}"#], half_cached, ["p0", "p1"]),
    row(
        "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR",
        ["0.5", "0", r#""prefixCache": {"standardDeviationFactor": 0.5}"#],
        cached_but_much_busier,
        ["p0", "p1"],
    ),
    row(
        "AIBRIX_TOKEN_LOAD_KV_WEIGHT",
        ["0.5", "0", r#""pd": {"tokenLoadKVWeight": 0.5}"#],
        computing_or_holding,
        ["p1", "p0"],
    )
    .beside(BY_TOKENS),
    row(
        "AIBRIX_TOKEN_LOAD_REQUEST_COST",
        ["100", "0", r#""pd": {"tokenLoadRequestCost": 100}"#],
        request_cost,
        ["3500", "100"],
    )
    .beside(BY_TOKENS),
    row(
        "AIBRIX_TOKEN_LOAD_TTL_SECONDS",
        ["30", "0", r#""pd": {"tokenLoadTTLSeconds": 30}"#],
        silent_request,
        ["charged", "taken back"],
    )
    .beside(BY_TOKENS),
    row(
        "AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS",
        ["30", "-1", r#""pd": {"tokenLoadSessionTTLSeconds": 30}"#],
        second_turn,
        ["the growth", "the whole"],
    )
    .beside(BY_TOKENS),
    row("AIBRIX_TOKEN_LOAD_MAX_SESSIONS", ["1", "0", ""], sessions, ["many", "one set"]),
    row("AIBRIX_DECODE_TOKEN_LOAD_OUTPUT_GROWTH", ["false", "no", ""], old_or_new_output, ["d1", "d0"])
        .beside(&[(DECODE, "token_load")]),
    row(
        "AIBRIX_HYBRID_CACHE_LOAD_FACTOR",
        ["0.1", "1.01", r#""pd": {"hybridCacheLoadFactor": 0.1}"#],
        cached_or_fewer_tokens,
        ["p0", "p1"],
    )
    .beside(&[(PREFILL, "hybrid_cache_load")]),
    row("TANDEM_KV_LEASE_SECONDS", ["30", "30s", ""], blocks_left_behind, ["charged", "free"]).beside(BY_TOKENS),
    row("TANDEM_HANDOFF_DEADLINE_SECONDS", ["5", "0", ""], late_hand_off, ["route", "prefill"]),
    // A value that cannot be used stops the start: `an_unknown_connector_refuses_the_start`.
    row("AIBRIX_KV_CONNECTOR_TYPE", ["nixl", "", ""], hand_off, ["the parameters", "the whole answer"]),
    row("AIBRIX_MOONCAKE_BOOTSTRAP_PORT", ["9000", "0", ""], mooncake_port, ["8998", "9000"]).beside(MOONCAKE),
    row("AIBRIX_TRT_SCHEDULE_STYLE", ["generation_first", "fastest", ""], schedule_style, ["prefill", "look_up"]),
    // A value that cannot be used stops the start: `a_machine_id_out_of_range_refuses_the_start`.
    row("AIBRIX_TRT_MACHINE_ID", ["1023", "", ""], machine_bits, ["0", "1023"]),
    row("TANDEM_ADDRESSING", ["destination-endpoint", "both", ""], addressed, ["one", "2"]),
    row(
        "AIBRIX_DECODE_FIRST_RESPONSE_TIMEOUT",
        ["7", "-1", r#""pd": {"decodeFirstResponseTimeout": 7}"#],
        first_response,
        ["60", "7"],
    ),
    row(
        "AIBRIX_DECODE_RESPONSE_TIMEOUT",
        ["5", "abc", r#""pd": {"decodeResponseTimeout": 5}"#],
        whole_response,
        ["none", "5"],
    ),
    row(
        "AIBRIX_DECODE_STREAM_IDLE_TIMEOUT",
        ["0.5", "inf", r#""pd": {"decodeStreamIdleTimeout": 0.5}"#],
        next_event,
        ["120", "0.5"],
    ),
    row("AIBRIX_DECODE_ABORT_TIMEOUT", ["0", "-3", r#""pd": {"decodeAbortTimeout": 0}"#], abort_bound, ["3", "none"]),
    row(
        "AIBRIX_DECODE_ABORT_RETRY_DELAY",
        ["0.5", "soon", r#""pd": {"decodeAbortRetryDelay": 0.5}"#],
        second_abort,
        ["2", "0.5"],
    ),
    row("TANDEM_EJECTION_FAILURES", ["1", "-1", ""], after_one_failure, ["in use", "ejected"]),
    row("TANDEM_EJECTION_SECONDS", ["2", "0", ""], ejected_for_long, ["10 s or more", "less"]).beside(AT_ONCE),
    row("TANDEM_EJECTION_MAX_SECONDS", ["2", "0", ""], ejected_for_long, ["10 s or more", "less"]).beside(AT_ONCE),
    row("TANDEM_NON_TEXT_PART_TOKENS", ["10", "0", ""], image_by_length, ["long", "short"]),
    row("TANDEM_RESPONSE_TTL_SECONDS", ["30", "0", ""], response_after_a_minute, ["its pod", "unknown"]),
    row("TANDEM_MAX_BODY_BYTES", ["1000", "0", ""], long_request, ["0", "413"]),
    row("TANDEM_MAX_BUFFERED_BYTES", ["1200", "0", ""], long_request, ["0", "503"]),
    row("TANDEM_MAX_STREAMS", ["1", "0", ""], second_request, ["0", "503"]),
    row("TANDEM_MAX_PREFILL_ANSWER_BYTES", ["77", "0", ""], prefill_answer_bound, ["67108864", "77"]),
    row("TANDEM_METRIC_MAX_AGE_MS", ["1900", "0", ""], old_signals, ["d0", "d1"]),
    row("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", ["tiktoken", "remote", ""], blocks, ["10", "20"]),
    row("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", ["64", "0", ""], blocks, ["10", "20"]),
    row("AIBRIX_PREFIX_CACHE_HASH_SEED", ["7", "-7", ""], seed_of_the_index, ["p1", "p0"]),
    row("TANDEM_PREFIX_CACHE_BYTES", ["1000", "0", ""], blocks, ["10", "0"]),
    row("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", ["4", "0", ""], blocks, ["10", "1"]),
    row("AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS", ["1", "0", ""], blocks_later, ["10", "0"]),
    row("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", ["3", "0", ""], emptiest_with_four, ["a", "b"]),
    row(
        "AIBRIX_LOAD_BALANCE_IMBALANCE_MIN_GAP",
        ["4", "0", r#""loadBalance": {"imbalanceMinGap": 4}"#],
        emptiest_with_four,
        ["a", "b"],
    ),
    row(
        "AIBRIX_LOAD_BALANCE_IMBALANCE_FACTOR",
        ["2", "0", r#""loadBalance": {"imbalanceFactor": 2}"#],
        emptiest_with_twelve,
        ["c", "a"],
    ),
    row(
        "AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD",
        ["10", "0", r#""vtc": {"maxPodLoad": 10}"#],
        new_user_at_a_busy_pod,
        ["a", "b"],
    )
    .beside(&[("AIBRIX_ROUTER_VTC_BASIC_UTILIZATION_WEIGHT", "2")]),
    row(
        "AIBRIX_ROUTER_VTC_BASIC_FAIRNESS_WEIGHT",
        ["0.05", "-1", r#""vtc": {"fairnessWeight": 0.05}"#],
        away_from_a_busy_pod,
        ["a", "another"],
    )
    .beside(HALF_BUSY),
    row(
        "AIBRIX_ROUTER_VTC_BASIC_UTILIZATION_WEIGHT",
        ["3", "-1", r#""vtc": {"utilizationWeight": 3}"#],
        new_user_at_a_busy_pod,
        ["a", "b"],
    )
    .beside(HALF_BUSY),
    row(
        "AIBRIX_ROUTER_VTC_BASIC_INPUT_TOKEN_WEIGHT",
        ["3", "NaN", r#""vtc": {"inputTokenWeight": 3}"#],
        tokens_of_a_user,
        ["29", "43"],
    ),
    row(
        "AIBRIX_ROUTER_VTC_BASIC_OUTPUT_TOKEN_WEIGHT",
        ["4", "-2", r#""vtc": {"outputTokenWeight": 4}"#],
        tokens_of_a_user,
        ["29", "51"],
    ),
    row("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE", ["1", "0", ""], tokens_two_minutes_later, ["29", "0"]),
    row("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT", ["seconds", "days", ""], tokens_two_minutes_later, ["29", "0"]),
    row(
        "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS",
        ["10", "0", r#""vtc": {"tokenTrackerMinTokens": 10}"#],
        second_request_of_a_user,
        ["a", "b"],
    ),
    row(
        "AIBRIX_ROUTER_PREBLE_TARGET_GPU",
        ["A6000", "H100", r#""preble": {"targetGPU": "A6000"}"#],
        preble_prefill,
        ["slow", "fast"],
    ),
    row(
        "AIBRIX_ROUTER_PREBLE_DECODING_LENGTH",
        ["90", "0", r#""preble": {"decodingLength": 90}"#],
        preble_answer,
        ["short", "long"],
    ),
    row("AIBRIX_ROUTER_PREBLE_SLIDING_WINDOW_PERIOD", ["1", "0", ""], preble_later, ["1", "0"]),
    row("AIBRIX_LORA_AFFINITY_THRESHOLD", ["0", "1.5", ""], who_has_the_adapter, ["a", "b"]),
];

/// Variable, file, and the test in it that shows the effect.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    ("TANDEM_MODEL_MEMORY_SECONDS", "tests/integration/reports/scale_to_zero.rs", "a_model_is_forgotten_in_time"),
    (
        "TANDEM_KUBERNETES_NAMESPACES",
        "tests/integration/kubernetes/settings.rs",
        "namespaces_and_selector_are_what_is_asked_for",
    ),
    (
        "TANDEM_KUBERNETES_POD_SELECTOR",
        "tests/integration/kubernetes/settings.rs",
        "namespaces_and_selector_are_what_is_asked_for",
    ),
    (
        "TANDEM_KUBERNETES_WORKLOADS",
        "tests/integration/reports/scale_to_zero.rs",
        "a_workload_without_replicas_makes_its_model_known",
    ),
    (
        "TANDEM_KUBERNETES_STALL_SECONDS",
        "tests/integration/kubernetes/settings.rs",
        "silence_and_age_of_the_list_are_bounded_by_their_settings",
    ),
    (
        "TANDEM_KUBERNETES_RELIST_SECONDS",
        "tests/integration/kubernetes/settings.rs",
        "silence_and_age_of_the_list_are_bounded_by_their_settings",
    ),
    ("REDIS_URL", "tests/integration/state/processes.rs", "r65_with_redis_two_replicas_share_without_another_switch"),
    ("REDIS_HOST", "tests/integration/state/processes.rs", "r65_with_redis_two_replicas_share_without_another_switch"),
    ("REDIS_PORT", "tests/integration/state/processes.rs", "r65_with_redis_two_replicas_share_without_another_switch"),
    ("REDIS_PASSWORD", "tests/integration/state/processes.rs", "the_password_is_used_and_shows_nowhere"),
    (
        "TANDEM_STATE_PLANE_GRADE",
        "tests/integration/state/processes.rs",
        "claims_are_made_when_the_grade_asks_for_them",
    ),
    ("TANDEM_CLAIM_DEADLINE_MS", "tests/integration/state/settings.rs", "a_claim_waits_for_its_deadline"),
    ("TANDEM_STATE_PLANE_PACE_MS", "tests/integration/state/settings.rs", "publications_keep_their_pace"),
    ("TANDEM_STATE_PLANE_BUDGET", "tests/integration/state/settings.rs", "publications_keep_their_pace"),
    ("AIBRIX_TOKEN_LOAD_SHARED_LEDGER", "tests/integration/state/settings.rs", "what_is_not_shared_does_not_count"),
    ("TANDEM_SHARED_PREFILL", "tests/integration/state/settings.rs", "what_is_not_shared_does_not_count"),
    (
        "AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES",
        "src/knobs/tests/carried.rs",
        "a_message_size_raises_the_body_limit_and_lowers_nothing",
    ),
    (
        "AIBRIX_DISABLE_RATE_LIMITING",
        "src/exchange/tests/shared_limits.rs",
        "limits_that_are_turned_off_are_asked_for_by_nothing",
    ),
    ("TANDEM_SHARED_PREFIXES", "tests/integration/state/settings.rs", "prefixes_are_shared_unless_that_is_off"),
    (
        "AIBRIX_STATESYNC_SYNC_PERIOD",
        "tests/integration/state/settings.rs",
        "findings_are_told_once_in_a_period_and_failures_at_once",
    ),
    ("TANDEM_ADMIN_TOKEN", "tests/integration/metrics/admin.rs", "operators_need_the_token_and_probes_do_not"),
    ("TANDEM_LOG", "tests/integration/traces/secrets.rs", "one_log_line_each_and_no_secret_anywhere"),
    ("TANDEM_LOG_FORMAT", "tests/integration/traces/secrets.rs", "one_log_line_each_and_no_secret_anywhere"),
    ("AIBRIX_BUCKET_SERVE", "src/bands/tests/model.rs", "switched_on_and_off"),
    ("AIBRIX_BUCKET_SERVE_MODE", "src/bands/tests/planning.rs", "equal_ranges_are_cut_at_a_quantile"),
    ("TANDEM_RATE_LIMIT_FALLBACK", "src/state/limits/tests.rs", "r71_without_redis_the_setting_decides"),
    ("TANDEM_RATE_LIMIT_WAIT_MS", "src/state/limits/tests.rs", "nobody_waits_for_long_for_a_server_that_is_silent"),
    ("TANDEM_FRONT_MAX_CONNECTIONS", "src/front/tests.rs", "connections_are_counted_and_given_back"),
    ("TANDEM_FRONT_CORS_ORIGINS", "tests/integration/reports/cross_origin.rs", "pages_of_named_origins_may_call"),
    ("TANDEM_FRONT_BODY_TIMEOUT_SECONDS", "src/front/tests.rs", "a_body_that_does_not_arrive_is_given_up"),
    ("TANDEM_FRONT_STALL_TIMEOUT_SECONDS", "src/front/tests.rs", "a_client_that_never_reads_loses_its_pod"),
    (
        "TANDEM_DRAIN_PROPAGATION_SECONDS",
        "tests/integration/scale/rollout.rs",
        "r91_a_stream_may_end_within_the_drain_timeout_and_no_later",
    ),
    (
        "TANDEM_DRAIN_TIMEOUT_SECONDS",
        "tests/integration/scale/rollout.rs",
        "r91_a_stream_may_end_within_the_drain_timeout_and_no_later",
    ),
    (
        "AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS",
        "src/scrape/tests/scraper.rs",
        "r53_black_holes_do_not_delay_the_healthy",
    ),
    ("TANDEM_SCRAPE_TIMEOUT_MS", "src/scrape/tests/scraper.rs", "r53_black_holes_do_not_delay_the_healthy"),
    ("TANDEM_MAX_SCRAPE_BYTES", "src/scrape/tests/http.rs", "what_is_no_page"),
    ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "src/knobs/tests.rs", "the_otlp_endpoint_is_resolved"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "src/telemetry/trace/tests/pipeline.rs", "spans_arrive_over_grpc"),
    ("OTEL_SDK_DISABLED", "src/knobs/tests.rs", "the_otlp_endpoint_is_resolved"),
    ("OTEL_TRACES_EXPORTER", "src/knobs/tests.rs", "the_otlp_endpoint_is_resolved"),
    ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "src/knobs/tests.rs", "what_is_said_of_traces_wins"),
    ("OTEL_EXPORTER_OTLP_PROTOCOL", "src/telemetry/trace/tests/pipeline.rs", "spans_arrive_over_http"),
    ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "src/knobs/tests.rs", "what_is_said_of_traces_wins"),
    ("OTEL_EXPORTER_OTLP_HEADERS", "src/telemetry/trace/tests/pipeline.rs", "spans_arrive_over_http"),
    ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "src/knobs/tests.rs", "otel_details"),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "src/knobs/tests.rs", "otel_details"),
    ("OTEL_EXPORTER_OTLP_INSECURE", "src/knobs/tests.rs", "the_otlp_endpoint_is_resolved"),
    ("TANDEM_ENGINE_TLS_CA", "tests/integration/tls/engines.rs", "engines_are_dialled_over_tls_in_every_way"),
    ("TANDEM_ENGINE_TLS_SERVER_NAME", "tests/integration/tls/engines.rs", "an_engine_that_is_not_believed_is_not_used"),
    (
        "TANDEM_ENGINE_TLS_INSECURE_SKIP_VERIFY",
        "tests/integration/tls/engines.rs",
        "an_engine_that_is_not_believed_is_not_used",
    ),
    ("TANDEM_GRPC_TLS_CERT", "tests/integration/tls/envoy.rs", "envoy_and_replicas_know_one_another"),
    ("TANDEM_GRPC_TLS_KEY", "tests/integration/tls/envoy.rs", "envoy_and_replicas_know_one_another"),
    ("TANDEM_GRPC_TLS_CLIENT_CA", "tests/integration/tls/envoy.rs", "envoy_and_replicas_know_one_another"),
    ("TANDEM_HTTP_TLS_CERT", "tests/integration/tls/listeners.rs", "the_admin_port_serves_over_tls"),
    ("TANDEM_HTTP_TLS_KEY", "tests/integration/tls/listeners.rs", "the_admin_port_serves_over_tls"),
    ("TANDEM_HTTP_TLS_CLIENT_CA", "tests/integration/tls/listeners.rs", "the_admin_port_serves_over_tls"),
    ("TANDEM_FRONT_TLS_CERT", "tests/integration/tls/listeners.rs", "the_front_serves_over_tls"),
    ("TANDEM_FRONT_TLS_KEY", "tests/integration/tls/listeners.rs", "the_front_serves_over_tls"),
    ("TANDEM_FRONT_TLS_CLIENT_CA", "tests/integration/tls/listeners.rs", "the_front_serves_over_tls"),
    ("OTEL_EXPORTER_OTLP_INSECURE_SKIP_VERIFY", "tests/integration/tls/collector.rs", "spans_travel_over_tls"),
    ("OTEL_EXPORTER_OTLP_CERTIFICATE", "tests/integration/tls/collector.rs", "spans_travel_over_tls"),
    ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "tests/integration/tls/collector.rs", "spans_travel_over_tls"),
    ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "tests/integration/tls/collector.rs", "spans_travel_over_tls"),
    ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "src/knobs/tests.rs", "the_files_of_the_collector_are_taken"),
    ("OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "src/knobs/tests.rs", "the_files_of_the_collector_are_taken"),
    ("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "src/knobs/tests.rs", "the_files_of_the_collector_are_taken"),
    ("OTEL_SERVICE_NAME", "src/knobs/tests.rs", "otel_details"),
    ("OTEL_RESOURCE_ATTRIBUTES", "src/telemetry/trace/tests/pipeline.rs", "spans_arrive_over_grpc"),
    ("POD_NAMESPACE", "src/knobs/tests.rs", "otel_details"),
    ("POD_UID", "src/knobs/tests.rs", "otel_details"),
    ("NODE_NAME", "src/knobs/tests.rs", "otel_details"),
    ("OTEL_PROPAGATORS", "tests/integration/traces/parents.rs", "r88_propagation_can_be_switched_off"),
    ("OTEL_TRACES_SAMPLER", "src/knobs/tests.rs", "otel_details"),
    ("OTEL_TRACES_SAMPLER_ARG", "src/knobs/tests.rs", "otel_details"),
    ("OTEL_BSP_MAX_QUEUE_SIZE", "src/telemetry/trace/tests/pipeline.rs", "spans_that_find_the_queue_full_are_counted"),
    ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "src/knobs/tests.rs", "what_is_said_of_traces_wins"),
    ("OTEL_BSP_SCHEDULE_DELAY", "tests/integration/traces/mod.rs", "exporting"),
];

/// What came out otherwise than expected, all of it.
#[derive(Default)]
struct Differences(Vec<String>);

impl Differences {
    fn note(&mut self, what: &str, found: &str, expected: &str) {
        if found != expected {
            self.0.push(format!("{what}: {found:?}, not {expected:?}"));
        }
    }
}

fn outcome(row: &Row, variable: Option<&str>, field: &str, profile: &'static str) -> String {
    let mut variables = row.beside.to_vec();
    variables.extend(variable.map(|value| (row.variable, value)));
    (row.scene)(&Given { variables: &variables, field, profile })
}

#[test]
fn each_variable_changes_what_happens() {
    let mut differences = Differences::default();
    for row in ROWS {
        let Row { variable, value, .. } = row;
        differences.note(&format!("without {variable}"), &outcome(row, None, "", "default"), row.before);
        differences.note(&format!("{variable}={value}"), &outcome(row, Some(value), "", "default"), row.after);
    }
    assert!(differences.0.is_empty(), "{:#?}", differences.0);
}

#[test]
fn r92_a_value_that_cannot_be_used_changes_nothing_and_is_told_once() {
    for row in ROWS.iter().filter(|row| !row.bad.is_empty()) {
        assert_eq!(outcome(row, Some(row.bad), "", "default"), row.before, "{}={}", row.variable, row.bad);
        let given = Given { variables: &[(row.variable, row.bad)], field: "", profile: "default" };
        let (_, report) = Knobs::read(&given).unwrap();
        assert_eq!((report.config_errors, report.warnings.len()), (1, 1), "{}={}", row.variable, row.bad);
    }
}

/// R05: a profile's knobs are those of its own requests, beside which others go on as before.
#[test]
fn each_field_of_a_profile_acts_on_its_requests_only() {
    for row in ROWS.iter().filter(|row| !row.field.is_empty()) {
        assert_eq!(outcome(row, None, row.field, "tuned"), row.after, "{} in a profile", row.field);
        assert_eq!(outcome(row, None, row.field, "default"), row.before, "{} beside the profile", row.field);
        // The profile wins over the variable.
        let value = if row.bad.is_empty() { None } else { Some(row.bad) };
        assert_eq!(outcome(row, value, row.field, "tuned"), row.after, "{}", row.field);
        let flat = row.field.strip_prefix(r#""pd": {"#).and_then(|rest| rest.strip_suffix('}'));
        if let Some(flat) = flat {
            assert_eq!(outcome(row, None, flat, "tuned"), row.after, "{flat}");
        }
    }
}

#[test]
fn every_variable_has_an_effect() {
    let mut shown: Vec<&str> = ROWS.iter().map(|row| row.variable).chain(ELSEWHERE.iter().map(|row| row.0)).collect();
    let mut described: Vec<(&str, &str)> = described();
    shown.sort_unstable();
    described.sort_unstable();
    assert_eq!(shown, described.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    for (variable, profile) in described {
        let Some(row) = ROWS.iter().find(|row| row.variable == variable) else { continue };
        let last = profile.rsplit('.').next().unwrap_or_default();
        assert!(row.field.contains(last) && row.field.is_empty() == profile.is_empty(), "{variable}: {profile}");
    }
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    for (variable, file, test) in ELSEWHERE {
        let text = std::fs::read_to_string(root.join(file)).unwrap();
        assert!(text.contains(&format!("fn {test}(")), "{variable}: {file} has no {test}");
    }
}
