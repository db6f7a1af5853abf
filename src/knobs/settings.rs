//! The table of settings: what `docs/configuration.md` and the start-up report list, in this order.

mod api;
mod engine_auth;
mod engines;
mod kubernetes;
mod models;
mod otel;
mod plane;
mod prefix;
mod strategies;
mod tls;

/// One variable for the reader of the documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Described {
    /// The variable.
    pub(super) name: &'static str,
    /// The built-in default as the report shows it.
    pub(super) default: &'static str,
    /// The unit of the value, or its form.
    pub(super) unit: &'static str,
    /// The profile field under `routingConfig` that overrides it for its own requests, or empty.
    pub(super) profile: &'static str,
    /// What it does.
    pub(super) meaning: &'static str,
}

/// A group of settings under one heading.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    /// The heading.
    pub(super) title: &'static str,
    /// Its settings.
    pub(super) settings: &'static [Described],
}

const fn one(
    name: &'static str,
    default: &'static str,
    unit: &'static str,
    profile: &'static str,
    meaning: &'static str,
) -> Described {
    Described { name, default, unit, profile, meaning }
}

/// Every setting.
pub(super) const GROUPS: &[Group] = &[
    Group {
        title: "The replica",
        settings: &[
            one("POD_NAME", "the host name", "text", "", "This replica in metrics and logs."),
            one(
                "ROUTING_ALGORITHM",
                "unset",
                "strategy",
                "",
                "Strategy of requests that name none: one of [these](strategies.md), or a weighted list of them.",
            ),
            one("AIBRIX_AUTH_BEARER_TOKEN", "unset", "secret", "", "When set, clients must send it as a bearer token."),
            one(
                "AIBRIX_DISABLE_RATE_LIMITING",
                "false",
                "boolean",
                "",
                "The limits of models and users do not hold, and users are not looked up (see [limits](limits.md)).",
            ),
            one(
                "TANDEM_ADMIN_TOKEN",
                "unset",
                "secret",
                "",
                "When set, `/metrics` and `/debug/…` want it: as a bearer token, or as the password that a browser asks for.",
            ),
            one(
                "AIBRIX_TTFT_THRESHOLD_S",
                "1",
                "seconds, decimals allowed",
                "",
                "Slower first tokens count in `gateway_first_token_delay_over_1s_total`.",
            ),
            one(
                "TANDEM_EXPLAIN",
                "false",
                "boolean",
                "",
                "Answers the request header `x-tandem-explain: 1` with a summary of the decision in a response header.",
            ),
            one("TANDEM_LOG", "info", "filter", "", "What is logged: a level, or `target=level` directives."),
            one("TANDEM_LOG_FORMAT", "text", "`text` or `json`", "", "How log lines look."),
        ],
    },
    Group {
        title: "Prefill/decode routing",
        settings: &[
            one(
                "AIBRIX_PROMPT_LENGTH_BUCKETING",
                "false",
                "boolean",
                "promptLengthBucketing",
                "Only pods whose range takes the prompt's length are candidates.",
            ),
            one(
                "AIBRIX_BUCKET_SERVE",
                "false",
                "boolean",
                "bucketServe",
                "On top of bucketing: divides the observed prompt lengths among rolesets whose ranges overlap.",
            ),
            one(
                "AIBRIX_BUCKET_SERVE_MODE",
                "throughput",
                "`throughput` or `rps`",
                "bucketServeMode",
                "What is divided evenly: prompt tokens or requests.",
            ),
            one(
                "AIBRIX_PREFILL_REQUEST_TIMEOUT",
                "30",
                "seconds",
                "pd.prefillRequestTimeout",
                "Bound on the whole prefill exchange.",
            ),
            one(
                "AIBRIX_PREFILL_SCORE_POLICY",
                "prefix_cache",
                "`prefix_cache`, `least_request`, `conductor`, `token_load` or `hybrid_cache_load`",
                "prefillScorePolicy",
                "How prefill pods are scored.",
            ),
            one(
                "AIBRIX_DECODE_SCORE_POLICY",
                "load_balancing",
                "`load_balancing`, `least_request`, `conductor` or `token_load`",
                "decodeScorePolicy",
                "How decode pods are scored.",
            ),
            one(
                "AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD",
                "16",
                "requests",
                "pd.prefillLoadImbalanceMinSpread",
                "A larger spread of outstanding prefills sends the request to the least loaded prefill pod.",
            ),
            one(
                "AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD",
                "16",
                "requests",
                "pd.decodeLoadImbalanceMinSpread",
                "This spread of running requests, or a larger one, picks the least loaded decode pod.",
            ),
            one(
                "AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD",
                "2048",
                "tokens per second",
                "pd.decodeThroughputImbalanceMinSpread",
                "A larger spread of throughput picks the decode pod with the lowest.",
            ),
            one(
                "AIBRIX_DECODE_SCORE_RATIO_THRESHOLD",
                "1.5",
                "ratio",
                "pd.decodeScoreRatioThreshold",
                "A larger ratio of drain scores picks the decode pod that drains first.",
            ),
            one(
                "AIBRIX_DECODE_LB_WEIGHT_RUNNING",
                "1",
                "weight",
                "pd.decodeLBWeightRunning",
                "Weight of running requests in the `load_balancing` score.",
            ),
            one(
                "AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT",
                "1",
                "weight",
                "pd.decodeLBWeightThroughput",
                "Weight of throughput in the `load_balancing` score.",
            ),
            one(
                "AIBRIX_MIN_MATCH_PCT",
                "0",
                "percent",
                "pd.minMatchPct",
                "A smaller prefix match counts as none; 0 lets every match count.",
            ),
            one(
                "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR",
                "1",
                "factor",
                "prefixCache.standardDeviationFactor",
                "Prefill pods with more requests than mean + factor · standard deviation, and at least 4 more than the least busy one, are skipped; of a roleset that would lose all of them the least busy ones stay, without their prefix matches.",
            ),
            one(
                "AIBRIX_TOKEN_LOAD_KV_WEIGHT",
                "0.3",
                "weight",
                "pd.tokenLoadKVWeight",
                "Weight of resident KV tokens in the scores of `token_load` and `hybrid_cache_load` (prefill).",
            ),
            one(
                "AIBRIX_TOKEN_LOAD_REQUEST_COST",
                "3500",
                "tokens",
                "pd.tokenLoadRequestCost",
                "Added to every prefill token charge.",
            ),
            one(
                "AIBRIX_TOKEN_LOAD_TTL_SECONDS",
                "3600",
                "seconds",
                "pd.tokenLoadTTLSeconds",
                "A token charge whose request shows no activity for longer is force-released, logged and counted. A \
                 profile may say 0: never.",
            ),
            one(
                "AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS",
                "1800",
                "seconds, 0 allowed",
                "pd.tokenLoadSessionTTLSeconds",
                "How long the last prompt size of an `x-aibrix-session-key` counts; 0 turns the rule off.",
            ),
            one(
                "AIBRIX_TOKEN_LOAD_MAX_SESSIONS",
                "100000",
                "sessions",
                "",
                "Sessions remembered; further ones replace those that were not used for longest.",
            ),
            one(
                "AIBRIX_DECODE_TOKEN_LOAD_OUTPUT_GROWTH",
                "true",
                "boolean",
                "",
                "The decode score of `token_load` includes the estimated output so far.",
            ),
            one(
                "AIBRIX_HYBRID_CACHE_LOAD_FACTOR",
                "0.5",
                "0 to 1",
                "pd.hybridCacheLoadFactor",
                "Discount of a full prefix match in `hybrid_cache_load`.",
            ),
            one(
                "TANDEM_KV_LEASE_SECONDS",
                "unset",
                "seconds, 0 allowed",
                "",
                "How long the KV blocks of a finished prefill stay charged when its decode pod did not take the request. \
                 Unset: the defaults of the engines, of which a hand-off's fields tell vLLM's: 30 s with the fields of 0.32 and of \
                 an answer that cannot be read, else 480 s with a `remote_request_id`, else 120 s (0.11). Mooncake: 480 s. \
                 TensorRT-LLM: 60 s. Set it where the engines are configured otherwise. SGLang, `nixl` and AIBrix's own connector keep \
                 no blocks, and nothing stays charged, whatever it is.",
            ),
            one(
                "TANDEM_HANDOFF_DEADLINE_SECONDS",
                "20",
                "seconds, decimals allowed",
                "",
                "A hand-off that may be older than this when it is to be used is thrown away and the prefill made again: \
                 behind the engine's lease, another prompt's blocks may lie there. Keep it well below that lease.",
            ),
            one(
                "AIBRIX_KV_CONNECTOR_TYPE",
                "shfs",
                "`shfs`, `nixl` or `mooncake`",
                "",
                "What moves the KV cache between vLLM pods: `shfs` for AIBrix's KVCacheManager and vLLM's own NixlConnector, `nixl` \
                 for Neuron, `mooncake` for vLLM's MooncakeConnector. The pod label `model.aibrix.ai/kv-connector-type` wins. Any other \
                 value stops the start.",
            ),
            one(
                "AIBRIX_MOONCAKE_BOOTSTRAP_PORT",
                "8998",
                "port",
                "",
                "Where prefill pods with vLLM's Mooncake connector answer `/query`.",
            ),
            one(
                "AIBRIX_TRT_SCHEDULE_STYLE",
                "context_first",
                "`context_first` or `generation_first`",
                "",
                "Whether TensorRT-LLM's two legs go one after the other, or at once.",
            ),
            one(
                "AIBRIX_TRT_MACHINE_ID",
                "unset",
                "0 to 1023",
                "",
                "Part of the ids of TensorRT-LLM requests. Unset: replicas give themselves one each through Redis; without \
                 Redis it is random, so replicas that share pods should have one each. Any other value stops the start.",
            ),
            one(
                "TANDEM_ADDRESSING",
                "target-pod",
                "`target-pod` or `destination-endpoint`",
                "",
                "How Envoy is told the pod. `destination-endpoint` also sets `x-gateway-destination-endpoint`: the decode \
                 pod and, where the engine allows it, those that may take its place when it cannot be reached.",
            ),
        ],
    },
    Group {
        title: "Decode pods that do not answer",
        settings: &[
            one(
                "AIBRIX_DECODE_FIRST_RESPONSE_TIMEOUT",
                "60",
                "seconds, 0 = off",
                "pd.decodeFirstResponseTimeout",
                "From the end of the prefill leg to the first event of a stream. Holds for SGLang; in a profile, for every \
                 engine, as the next two do.",
            ),
            one(
                "AIBRIX_DECODE_RESPONSE_TIMEOUT",
                "0",
                "seconds, 0 = off",
                "pd.decodeResponseTimeout",
                "From the end of the prefill leg to the end of an answer that is not a stream.",
            ),
            one(
                "AIBRIX_DECODE_STREAM_IDLE_TIMEOUT",
                "120",
                "seconds, 0 = off",
                "pd.decodeStreamIdleTimeout",
                "Longest gap between two events of a stream. Comments are no events.",
            ),
            one(
                "AIBRIX_DECODE_ABORT_TIMEOUT",
                "3",
                "seconds, 0 = no aborts",
                "pd.decodeAbortTimeout",
                "Bound on one `/abort_request` to an SGLang pod.",
            ),
            one(
                "AIBRIX_DECODE_ABORT_RETRY_DELAY",
                "2",
                "seconds, 0 = one abort only",
                "pd.decodeAbortRetryDelay",
                "Until the second abort: the first can overtake the request that it is about.",
            ),
            one(
                "TANDEM_EJECTION_FAILURES",
                "5",
                "failures in a row, 0 = never",
                "",
                "After so many, a pod or a pair of pods gets no requests for a while. Overload (429, 503) does not count.",
            ),
            one(
                "TANDEM_EJECTION_SECONDS",
                "10",
                "seconds",
                "",
                "For how long at first; doubled each time, and up to a fifth longer.",
            ),
            one("TANDEM_EJECTION_MAX_SECONDS", "300", "seconds", "", "For how long at most."),
        ],
    },
    Group {
        title: "Limits",
        settings: &[
            one("TANDEM_MAX_BODY_BYTES", "67108864", "bytes", "", "A longer request body gets 413."),
            one(
                "TANDEM_MAX_BUFFERED_BYTES",
                "2147483648",
                "bytes",
                "",
                "Request bodies that all streams together may hold; beyond it requests get 503.",
            ),
            one("TANDEM_MAX_STREAMS", "20000", "requests", "", "Requests in flight; beyond it requests get 503."),
            one(
                "TANDEM_MAX_PREFILL_ANSWER_BYTES",
                "67108864",
                "bytes",
                "",
                "A longer prefill answer fails the prefill leg.",
            ),
            one(
                "AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES",
                "TANDEM_MAX_BODY_BYTES + 1 MiB",
                "bytes",
                "",
                "Largest ext_proc message from Envoy. A larger value raises the body limit to it, less 4 KiB, unless that is set; \
                 one that is too small for the body limit changes nothing.",
            ),
            one(
                "TANDEM_FRONT_MAX_CONNECTIONS",
                "20000",
                "connections",
                "",
                "Connections to the HTTP front; further ones are closed.",
            ),
            one(
                "TANDEM_FRONT_CORS_ORIGINS",
                "unset",
                "origins, comma-separated, or `*`",
                "",
                "Origins whose pages may call the HTTP front from a browser, such as `https://chat.example.com`; at most 64. \
                 Unset: none. (Behind Envoy, its CORS filter decides: see `deploy/envoy/envoy.yaml`.)",
            ),
            one(
                "TANDEM_FRONT_BODY_TIMEOUT_SECONDS",
                "300",
                "seconds",
                "",
                "How long a request body may take to arrive at the HTTP front; after that 408. (Behind Envoy, its \
                 `request_timeout` bounds this.)",
            ),
            one(
                "TANDEM_FRONT_STALL_TIMEOUT_SECONDS",
                "300",
                "seconds",
                "",
                "A client of the HTTP front that takes in nothing of its answer for so long is cut off.",
            ),
        ],
    },
    Group {
        title: "Shutdown",
        settings: &[
            one(
                "TANDEM_DRAIN_PROPAGATION_SECONDS",
                "5",
                "seconds, 0 allowed",
                "",
                "After SIGTERM: readiness is off, new streams are still served.",
            ),
            one(
                "TANDEM_DRAIN_TIMEOUT_SECONDS",
                "300",
                "seconds, 0 allowed",
                "",
                "How long running streams may finish after that.",
            ),
        ],
    },
    engines::METRICS,
    prefix::PREFIX,
    api::API,
    strategies::STRATEGIES,
    kubernetes::KUBERNETES,
    models::MODELS,
    engine_auth::ENGINE_AUTH,
    tls::TLS,
    plane::PLANE,
    otel::OTEL,
];
