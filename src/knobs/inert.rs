//! Variables that the reference gateway or OpenTelemetry knows and this version does not act on. Setting one is reported once, so that
//! nobody believes in an effect that is not there.

/// (variable, what to know instead).
pub(super) const INERT: &[(&str, &str)] = &[
    ("OTEL_EXPORTER_OTLP_COMPRESSION", UNCOMPRESSED),
    ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", UNCOMPRESSED),
    ("OTEL_BSP_EXPORT_TIMEOUT", "`OTEL_EXPORTER_OTLP_TIMEOUT` bounds an export"),
    ("PROMETHEUS_ENDPOINT", OWN_RATES),
    ("PROMETHEUS_ENDPOINT_BASIC_AUTH_USERNAME", OWN_RATES),
    ("PROMETHEUS_ENDPOINT_BASIC_AUTH_PASSWORD", OWN_RATES),
    ("AIBRIX_PROMETHEUS_QUERY_INTERVAL_MS", OWN_RATES),
    (
        "AIBRIX_PREFIX_CACHE_EVICTION_INTERVAL_SECONDS",
        "blocks that are too old are looked for all the time, a few at every turn",
    ),
    (
        "AIBRIX_HTTPROUTE_CACHE_TTL",
        "HTTPRoutes are watched, so what is known of them is always current and never asked for",
    ),
    ("AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER", REMOTE),
    ("AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT", REMOTE),
    ("AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED", REMOTE),
    ("AIBRIX_VLLM_TOKENIZER_ENDPOINT_TEMPLATE", REMOTE),
    ("AIBRIX_TOKENIZER_HEALTH_CHECK_PERIOD", REMOTE),
    ("AIBRIX_TOKENIZER_TTL", REMOTE),
    ("AIBRIX_TOKENIZER_REQUEST_TIMEOUT", REMOTE),
    ("AIBRIX_MAX_TOKENIZERS_PER_POOL", REMOTE),
];

const UNCOMPRESSED: &str = "spans are sent without compression";
const OWN_RATES: &str = "rates are taken from this replica's own samples of the engine metrics";
const REMOTE: &str = "remote tokenizers and KV events are not supported";

/// `tcp://10.0.0.7:6379`: what Kubernetes puts into `REDIS_PORT` beside a service called `redis`. It is nobody's wish.
pub(super) fn is_service_url(value: &str) -> bool {
    ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme))
}

/// Kubernetes puts variables like `AIBRIX_GATEWAY_PLUGINS_SERVICE_HOST` and `…_PORT_80_TCP_ADDR` into every container
/// of a namespace; they are not settings.
pub(super) fn is_service_link(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || name.rsplit_once("_PORT_").is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()))
}
