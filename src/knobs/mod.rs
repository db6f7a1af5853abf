//! Configuration: every environment variable, read once into one value, checked, and reported with its origin.
//!
//! [`Knobs`] is process-wide. [`PdKnobs`] is the part that a config profile may override for its own requests
//! (`spec` section 2.4 of the reference gateway); a profile carries a ready-made, checked copy.

pub(crate) mod aibrix;
mod api;
mod carried;
mod decode;
mod docs;
mod engine_auth;
mod env;
mod inert;
mod kubernetes;
mod limits;
mod metric_labels;
mod models;
mod otel;
mod parse;
mod plane;
mod read;
mod settings;
mod strategies;
mod strategy;
mod tls;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use subtle::ConstantTimeEq as _;

pub use api::ApiKnobs;
pub use decode::{AbortKnobs, DecodeTimer, DecodeWatchdog};
pub use docs::configuration_markdown;
pub use engine_auth::EngineAuth;
pub use env::{Environment, Origin, ProcessEnvironment, Refusal, Report, Setting};
pub use kubernetes::KubernetesKnobs;
pub use metric_labels::MetricLabels;
pub use models::ModelKnobs;
pub use otel::{OtelKnobs, OtlpProtocol, OtlpTls, TraceSampler};
pub use parse::MAX_TOKENS;
pub use plane::{Grade, PlaneKnobs, RateFallback, RedisTarget};
pub use strategies::{GateKnobs, Gpu, LoraThreshold, PrebleKnobs, StrategyKnobs, VtcKnobs};
pub use strategy::{
    MAX_STRATEGY_WEIGHT, REGISTERED, Registered, STRATEGIES, StrategyError, StrategyNote, StrategyWeights,
    parse_strategy,
};
pub use tls::{EngineTlsKnobs, TlsFiles, TlsKnobs};

#[cfg(test)]
pub(crate) use docs::{assert_generated, described, inert_names, registered_markdown};

/// How a prefill pod is scored. Names are those of `AIBRIX_PREFILL_SCORE_POLICY`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrefillPolicy {
    /// Prefix-cache match first, then outstanding requests.
    PrefixCache,
    /// Outstanding prefill requests only.
    LeastRequest,
    /// Estimated time to the first token: queue, cached prefix, new tokens.
    Conductor,
    /// Prompt tokens that this gateway has charged to the pod.
    TokenLoad,
    /// `token_load`, discounted by the prefix match.
    HybridCacheLoad,
}

impl PrefillPolicy {
    /// Every policy, in the order of the PD document.
    pub const ALL: [PrefillPolicy; 5] = [
        PrefillPolicy::PrefixCache,
        PrefillPolicy::LeastRequest,
        PrefillPolicy::Conductor,
        PrefillPolicy::TokenLoad,
        PrefillPolicy::HybridCacheLoad,
    ];

    /// The policy of that exact name.
    pub fn parse(name: &str) -> Option<PrefillPolicy> {
        PrefillPolicy::ALL.into_iter().find(|policy| policy.name() == name)
    }

    /// Scores depend on what the prefix index knows.
    pub fn looks_prefixes_up(self) -> bool {
        matches!(self, PrefillPolicy::PrefixCache | PrefillPolicy::Conductor | PrefillPolicy::HybridCacheLoad)
    }

    /// Its requests are charged to the prefill token ledger; those of other policies never touch it.
    pub fn charges_tokens(self) -> bool {
        matches!(self, PrefillPolicy::TokenLoad | PrefillPolicy::HybridCacheLoad)
    }

    /// The name in variables, profiles and logs.
    pub fn name(self) -> &'static str {
        match self {
            PrefillPolicy::PrefixCache => "prefix_cache",
            PrefillPolicy::LeastRequest => "least_request",
            PrefillPolicy::Conductor => "conductor",
            PrefillPolicy::TokenLoad => "token_load",
            PrefillPolicy::HybridCacheLoad => "hybrid_cache_load",
        }
    }
}

/// How a decode pod is scored. Names are those of `AIBRIX_DECODE_SCORE_POLICY`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecodePolicy {
    /// Weighted running requests and throughput over free KV cache.
    LoadBalancing,
    /// Running plus pending requests only.
    LeastRequest,
    /// Estimated time between tokens: throughput, batch, pressure on the KV cache.
    Conductor,
    /// Prompt tokens that this gateway has charged to the pod, and an estimate of the output so far.
    TokenLoad,
}

impl DecodePolicy {
    /// Every policy, in the order of the PD document.
    pub const ALL: [DecodePolicy; 4] =
        [DecodePolicy::LoadBalancing, DecodePolicy::LeastRequest, DecodePolicy::Conductor, DecodePolicy::TokenLoad];

    /// The policy of that exact name.
    pub fn parse(name: &str) -> Option<DecodePolicy> {
        DecodePolicy::ALL.into_iter().find(|policy| policy.name() == name)
    }

    /// Its requests are charged to the decode token ledger; those of other policies never touch it.
    pub fn charges_tokens(self) -> bool {
        self == DecodePolicy::TokenLoad
    }

    /// The name in variables, profiles and logs.
    pub fn name(self) -> &'static str {
        match self {
            DecodePolicy::LoadBalancing => "load_balancing",
            DecodePolicy::LeastRequest => "least_request",
            DecodePolicy::Conductor => "conductor",
            DecodePolicy::TokenLoad => "token_load",
        }
    }
}

/// The unit in which adaptive bucket serving divides the traffic (`AIBRIX_BUCKET_SERVE_MODE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BucketServeMode {
    /// Prompt tokens.
    Throughput,
    /// Requests.
    Rps,
}

impl BucketServeMode {
    /// The name in variables, profiles and logs.
    pub fn name(self) -> &'static str {
        match self {
            BucketServeMode::Throughput => "throughput",
            BucketServeMode::Rps => "rps",
        }
    }
}

/// Which agent moves the KV cache between vLLM pods (`AIBRIX_KV_CONNECTOR_TYPE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvConnector {
    /// `kv_transfer_params` round trip: SHFS/KVCacheManager, and vLLM's own NixlConnector.
    Shfs,
    /// The whole prefill answer travels as `disagg_prefill_resp` (Neuron).
    Nixl,
    /// vLLM's MooncakeConnector: both legs at once, tied by a transfer id.
    Mooncake,
}

/// How Envoy is told where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addressing {
    /// The header `target-pod`: an `ORIGINAL_DST` cluster dials it.
    TargetPod,
    /// `x-gateway-destination-endpoint` as well: a list from which a cluster with the load-balancing policy
    /// `override_host` takes the next one when a connection fails.
    DestinationEndpoint,
}

/// When a pod, or a pair of pods, that fails again and again is left out for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ejection {
    /// `TANDEM_EJECTION_FAILURES` (5): failures in a row; 0 = never.
    pub failures: u32,
    /// `TANDEM_EJECTION_SECONDS` (10 s): for how long at first; doubled each time.
    pub base: Duration,
    /// `TANDEM_EJECTION_MAX_SECONDS` (300 s): for how long at most.
    pub max: Duration,
}

impl Default for Ejection {
    fn default() -> Self {
        Ejection { failures: 5, base: Duration::from_secs(10), max: Duration::from_mins(5) }
    }
}

/// How the prefix index turns a prompt into bytes to hash (`AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tokenizer {
    /// The UTF-8 bytes themselves.
    Character,
    /// cl100k_base token ids, four bytes each, big endian.
    Tiktoken,
}

/// The knobs of one PD request. Gateway-wide defaults come from the environment; a profile overrides single ones.
#[derive(Clone, Debug, PartialEq)]
pub struct PdKnobs {
    /// `AIBRIX_PROMPT_LENGTH_BUCKETING` (false); profile field `promptLengthBucketing`.
    pub prompt_length_bucketing: bool,
    /// `AIBRIX_BUCKET_SERVE` (false); profile field `bucketServe`. Acts only on top of bucketing.
    pub bucket_serve: bool,
    /// `AIBRIX_BUCKET_SERVE_MODE` (`throughput`); profile field `bucketServeMode`.
    pub bucket_serve_mode: BucketServeMode,
    /// `AIBRIX_PREFILL_REQUEST_TIMEOUT` (30 s): the whole prefill exchange.
    pub prefill_request_timeout: Duration,
    /// `AIBRIX_PREFILL_SCORE_POLICY` (`prefix_cache`).
    pub prefill_policy: PrefillPolicy,
    /// `AIBRIX_DECODE_SCORE_POLICY` (`load_balancing`).
    pub decode_policy: DecodePolicy,
    /// `AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD` (16, requests): step 1 fires when the spread is *above* it.
    pub prefill_imbalance_min_spread: u64,
    /// `AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD` (16, requests): step 2 fires when the spread is *at least* this.
    pub decode_imbalance_min_spread: f64,
    /// `AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD` (2048, tokens/s): step 2 fires when the spread is *above* it.
    pub decode_throughput_min_spread: f64,
    /// `AIBRIX_DECODE_SCORE_RATIO_THRESHOLD` (1.5): step 2 fires when the drain-score ratio is *above* it.
    pub decode_score_ratio: f64,
    /// `AIBRIX_DECODE_LB_WEIGHT_RUNNING` (1.0).
    pub decode_weight_running: f64,
    /// `AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT` (1.0).
    pub decode_weight_throughput: f64,
    /// `AIBRIX_MIN_MATCH_PCT` (0, percent): a smaller prefix match counts as none.
    pub min_match_pct: u8,
    /// `AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR` (1): a prefill pod above mean + factor·σ is skipped.
    pub standard_deviation_factor: f64,
    /// `AIBRIX_TOKEN_LOAD_KV_WEIGHT` (0.3): weight of resident KV tokens in the prefill token load.
    pub token_load_kv_weight: f64,
    /// `AIBRIX_TOKEN_LOAD_REQUEST_COST` (3500, tokens): added to every prefill token charge.
    pub token_load_request_cost: u64,
    /// `AIBRIX_TOKEN_LOAD_TTL_SECONDS` (3600 s): a token charge without activity for longer is force-released. Zero
    /// (only a profile can say so): never.
    pub token_load_ttl: Duration,
    /// `AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS` (1800 s): how long a session's last prompt size counts. Zero: never.
    pub token_load_session_ttl: Duration,
    /// `AIBRIX_DECODE_TOKEN_LOAD_OUTPUT_GROWTH` (true): the decode token load includes the estimated output so far.
    pub decode_output_growth: bool,
    /// `AIBRIX_HYBRID_CACHE_LOAD_FACTOR` (0.5, 0 to 1): discount of a full prefix match in `hybrid_cache_load`.
    pub hybrid_cache_load_factor: f64,
    /// `TANDEM_KV_LEASE_SECONDS` (unset): how long a prefill pod keeps the KV blocks of a request that its decode pod
    /// never took over; they stay charged for so long. `None` = by what the pod's hand-off says of its version.
    pub kv_lease: Option<Duration>,
    /// `TANDEM_HANDOFF_DEADLINE_SECONDS` (20 s): a hand-off that is older is not used any more.
    pub handoff_deadline: Duration,
    /// Bounds on decode pods that do not answer.
    pub watchdog: DecodeWatchdog,
    /// How SGLang decode pods are told to stop.
    pub abort: AbortKnobs,
    /// `AIBRIX_TRT_SCHEDULE_STYLE` (`context_first`): TensorRT-LLM gets both legs at once.
    pub trt_generation_first: bool,
    /// `AIBRIX_MOONCAKE_BOOTSTRAP_PORT` (8998): where vLLM's Mooncake connector answers `/query` on prefill pods.
    pub mooncake_port: u16,
    /// `AIBRIX_KV_CONNECTOR_TYPE` (`shfs`); a prefill pod's label `model.aibrix.ai/kv-connector-type` wins.
    pub kv_connector: KvConnector,
    /// What strategies other than `pd` go by.
    pub strategies: StrategyKnobs,
}

impl Default for PdKnobs {
    fn default() -> Self {
        PdKnobs {
            prompt_length_bucketing: false,
            bucket_serve: false,
            bucket_serve_mode: BucketServeMode::Throughput,
            prefill_request_timeout: Duration::from_secs(30),
            prefill_policy: PrefillPolicy::PrefixCache,
            decode_policy: DecodePolicy::LoadBalancing,
            prefill_imbalance_min_spread: 16,
            decode_imbalance_min_spread: 16.0,
            decode_throughput_min_spread: 2048.0,
            decode_score_ratio: 1.5,
            decode_weight_running: 1.0,
            decode_weight_throughput: 1.0,
            min_match_pct: 0,
            standard_deviation_factor: 1.0,
            token_load_kv_weight: 0.3,
            token_load_request_cost: 3500,
            token_load_ttl: Duration::from_hours(1),
            token_load_session_ttl: Duration::from_mins(30),
            decode_output_growth: true,
            hybrid_cache_load_factor: 0.5,
            kv_lease: None,
            handoff_deadline: Duration::from_secs(20),
            watchdog: DecodeWatchdog::default(),
            abort: AbortKnobs::default(),
            trt_generation_first: false,
            mooncake_port: 8998,
            kv_connector: KvConnector::Shfs,
            strategies: StrategyKnobs::default(),
        }
    }
}

/// Bounds on what clients and engines can make this replica hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// `TANDEM_MAX_BODY_BYTES` (64 MiB): a longer request body gets 413.
    pub max_body_bytes: usize,
    /// `TANDEM_MAX_BUFFERED_BYTES` (2 GiB): request bodies held by all streams together; beyond it, 503.
    pub max_buffered_bytes: usize,
    /// `TANDEM_MAX_STREAMS` (20000): requests in flight on this replica; beyond it, 503.
    pub max_streams: usize,
    /// `TANDEM_FRONT_MAX_CONNECTIONS` (20000): connections to the HTTP front; further ones are closed.
    pub max_front_connections: usize,
    /// `TANDEM_FRONT_CORS_ORIGINS` (unset): origins whose pages may call the HTTP front, as `https://host[:port]`; `*` alone:
    /// any. Empty: none.
    pub front_origins: Vec<String>,
    /// `TANDEM_FRONT_BODY_TIMEOUT_SECONDS` (300 s): how long a request body may take to arrive at the HTTP front; 408.
    pub front_body_timeout: Duration,
    /// `TANDEM_FRONT_STALL_TIMEOUT_SECONDS` (300 s): a client of the HTTP front that takes in nothing of its answer for
    /// so long is cut off.
    pub front_stall_timeout: Duration,
    /// `TANDEM_MAX_PREFILL_ANSWER_BYTES` (64 MiB): a longer prefill answer fails the leg.
    pub max_prefill_answer_bytes: usize,
    /// gRPC message limit in bytes: `AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES`, or, when that is unset, the body limit plus
    /// 1 MiB. (The reference's default of 4 MiB would refuse the bodies that the body limit allows.)
    pub max_grpc_message_bytes: usize,
}

/// How a replica goes away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drain {
    /// `TANDEM_DRAIN_PROPAGATION_SECONDS` (5 s): after SIGTERM readiness is off but new streams are still served, so
    /// that Envoy's health checks notice first.
    pub propagation: Duration,
    /// `TANDEM_DRAIN_TIMEOUT_SECONDS` (300 s): how long running streams may finish.
    pub timeout: Duration,
}

/// Scraping of engine metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrapeKnobs {
    /// `AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS` (50 ms).
    pub interval: Duration,
    /// `TANDEM_SCRAPE_TIMEOUT_MS` (1000 ms): the whole scrape of one pod.
    pub timeout: Duration,
    /// `TANDEM_METRIC_MAX_AGE_MS` (3000 ms): older values count as unknown.
    pub max_age: Duration,
    /// `TANDEM_MAX_SCRAPE_BYTES` (8 MiB): a longer metrics page is dropped.
    pub max_bytes: usize,
    /// `TANDEM_METRIC_LABELS` (`aibrix`): what of all this `/metrics` passes on, and by which labels.
    pub labels: MetricLabels,
}

/// The prefix index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixKnobs {
    /// `AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE` (`character`).
    pub tokenizer: Tokenizer,
    /// `AIBRIX_PREFIX_CACHE_BLOCK_SIZE` (128, bytes of tokenizer output; what the reference deploys).
    pub block_size: usize,
    /// `AIBRIX_PREFIX_CACHE_HASH_SEED`: unset → random per process.
    pub hash_seed: Option<u64>,
    /// `TANDEM_PREFIX_CACHE_BYTES` (256 MiB): memory of the index.
    pub budget_bytes: usize,
    /// `AIBRIX_PREFIX_CACHE_BLOCK_NUMBER`: an upper bound on blocks as well, when set. (The reference's default of
    /// 200000 four-byte blocks has no meaning beside a byte budget.)
    pub max_blocks: Option<usize>,
    /// `AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS` (20 min): entries not put again for this long go.
    pub max_idle: Duration,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object each.
    Json,
}

/// The log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogKnobs {
    /// `TANDEM_LOG` (`info`): `tracing_subscriber` filter directives, checked.
    pub filter: String,
    /// `TANDEM_LOG_FORMAT` (`text`).
    pub format: LogFormat,
}

/// A secret text: never shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The secret itself; the one way to it, so that uses can be found.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Somebody knows it. Takes the same time for every wrong text of the right length, which is no secret.
    pub fn is(&self, given: &[u8]) -> bool {
        given.ct_eq(self.0.as_bytes()).into()
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[secret]")
    }
}

/// The process-wide configuration.
#[derive(Clone, Debug)]
pub struct Knobs {
    /// `POD_NAME`, else the host name: this gateway replica in metrics and logs.
    pub gateway_pod: String,
    /// `ROUTING_ALGORITHM` (unset): strategy of requests that name none; [`parse_strategy`] takes it.
    pub routing_algorithm: Option<String>,
    /// `AIBRIX_AUTH_BEARER_TOKEN` (unset): clients must send it as a bearer token.
    pub auth_bearer_token: Option<Secret>,
    /// `AIBRIX_DISABLE_RATE_LIMITING` (false): limits of models and users do not hold, users are not looked up.
    pub disable_rate_limiting: bool,
    /// What engines are shown.
    pub engine_auth: EngineAuth,
    /// `TANDEM_ADMIN_TOKEN` (unset): guards metrics and `/debug/…`.
    pub admin_token: Option<Secret>,
    /// `AIBRIX_TTFT_THRESHOLD_S` (1 s): slower first tokens count in `gateway_first_token_delay_over_1s_total`.
    pub ttft_threshold: Duration,
    /// The log.
    pub log: LogKnobs,
    /// Gateway-wide defaults of the per-request knobs.
    pub pd: Arc<PdKnobs>,
    /// `AIBRIX_TOKEN_LOAD_MAX_SESSIONS` (100000): sessions whose last prompt size is remembered.
    pub max_sessions: usize,
    /// `TANDEM_EXPLAIN` (false): the request header `x-tandem-explain: 1` is answered.
    pub explain: bool,
    /// `AIBRIX_TRT_MACHINE_ID`: tells the ids of this replica's TensorRT-LLM requests from those of others. Unset: replicas
    /// agree through Redis; without it, random.
    pub trt_machine_id: Option<u16>,
    /// `TANDEM_ADDRESSING` (`target-pod`).
    pub addressing: Addressing,
    /// Pods and pairs that fail.
    pub ejection: Ejection,
    /// Bounds.
    pub limits: Limits,
    /// Shutdown.
    pub drain: Drain,
    /// Engine metrics.
    pub scrape: ScrapeKnobs,
    /// Prefix index.
    pub prefix: PrefixKnobs,
    /// APIs.
    pub api: ApiKnobs,
    /// TLS of the listeners.
    pub tls: TlsKnobs,
    /// What replicas share, and where.
    pub plane: PlaneKnobs,
    /// Discovery from the Kubernetes API.
    pub kubernetes: KubernetesKnobs,
    /// Models without pods.
    pub models: ModelKnobs,
    /// Span export.
    pub otel: OtelKnobs,
}
