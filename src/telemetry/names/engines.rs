//! Metrics of engines that are passed on, under the names of the AIBrix gateway plugin.

use super::Kind;

/// How the numbers of several engines of one pod make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// Counts add up.
    Sum,
    /// Of shares the largest counts.
    Max,
}

/// One metric, or one histogram.
#[derive(Debug)]
pub(in crate::telemetry) struct EngineDefinition {
    /// Its name on the wire; of a histogram, without an ending.
    pub(in crate::telemetry) name: &'static str,
    kind: Kind,
    /// What it means.
    pub(in crate::telemetry) help: &'static str,
}

impl EngineDefinition {
    /// `counter` or `gauge`.
    pub(in crate::telemetry) fn kind(&self) -> &'static str {
        match self.kind {
            Kind::Counter => "counter",
            Kind::Gauge | Kind::Decimal => "gauge",
        }
    }
}

macro_rules! engine_metrics {
    ($($id:ident $name:literal $kind:ident $join:ident, $help:literal;)*) => {
        /// A number that engines report, or that is known of each engine.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum EngineMetric { $(#[doc = $help] $id,)* }

        impl EngineMetric {
            /// All of them.
            pub const ALL: &'static [EngineMetric] = &[$(EngineMetric::$id,)*];
            /// How many there are.
            pub(in crate::telemetry) const COUNT: usize = [$(EngineMetric::$id),*].len();

            /// How the numbers of several engines of one pod make one.
            pub fn join(self) -> Join {
                match self { $(EngineMetric::$id => Join::$join,)* }
            }

            pub(in crate::telemetry) fn definition(self) -> &'static EngineDefinition {
                match self {
                    $(EngineMetric::$id => {
                        const DEFINITION: EngineDefinition =
                            EngineDefinition { name: $name, kind: Kind::$kind, help: $help };
                        &DEFINITION
                    })*
                }
            }
        }
    };
}

macro_rules! engine_histograms {
    ($($id:ident $name:literal, $help:literal;)*) => {
        /// A histogram that engines report.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum EngineHistogram { $(#[doc = $help] $id,)* }

        impl EngineHistogram {
            /// All of them.
            pub const ALL: &'static [EngineHistogram] = &[$(EngineHistogram::$id,)*];

            pub(in crate::telemetry) fn definition(self) -> &'static EngineDefinition {
                match self {
                    $(EngineHistogram::$id => {
                        const DEFINITION: EngineDefinition =
                            EngineDefinition { name: $name, kind: Kind::Decimal, help: $help };
                        &DEFINITION
                    })*
                }
            }
        }
    };
}

engine_metrics! {
    Running "num_requests_running" Decimal Sum, "Requests that the engine runs.";
    Waiting "num_requests_waiting" Decimal Sum, "Requests that wait in the engine.";
    Swapped "num_requests_swapped" Decimal Sum, "Requests that the engine swapped out or retracted.";
    PrefillPrealloc "num_prefill_prealloc_queue_reqs" Decimal Sum, "SGLang prefill pods: requests that wait for a decode pod.";
    DecodePrealloc "num_decode_prealloc_queue_reqs" Decimal Sum, "SGLang decode pods: requests that wait for memory.";
    KvUsage "kv_cache_usage_perc" Decimal Max, "Share of the KV cache in use, 0 to 1.";
    GpuCacheUsage "gpu_cache_usage_perc" Decimal Max, "The same, under its older name.";
    CpuCacheUsage "cpu_cache_usage_perc" Decimal Max, "Share of the KV cache in main memory in use, 0 to 1.";
    Utilization "engine_utilization" Decimal Max, "xLLM: share of time that the engine is busy.";
    PromptTps "avg_prompt_throughput_toks_per_s" Decimal Sum, "Prompt tokens per second, reported or taken from the counter over three seconds.";
    GenerationTps "avg_generation_throughput_toks_per_s" Decimal Sum, "Generated tokens per second, likewise.";
    PromptTokens "prompt_tokens_total" Counter Sum, "Prompt tokens.";
    GenerationTokens "generation_tokens_total" Counter Sum, "Generated tokens.";
    PrefixQueries "prefix_cache_queries_total" Counter Sum, "Tokens looked up in the engine's prefix cache.";
    PrefixHits "prefix_cache_hits_total" Counter Sum, "Tokens found there.";
    ExternalPrefixQueries "external_prefix_cache_queries_total" Counter Sum, "Tokens looked up in the cache of a KV connector.";
    ExternalPrefixHits "external_prefix_cache_hits_total" Counter Sum, "Tokens found there.";
    NixlFailedTransfers "nixl_num_failed_transfers_total" Counter Sum, "KV transfers by NIXL that failed.";
    NixlFailedNotifications "nixl_num_failed_notifications_total" Counter Sum, "Notifications by NIXL that failed.";
    HttpRequests "http_requests_total" Counter Sum, "HTTP requests that the engine's server answered, of all kinds.";
    RealtimeRunning "realtime_num_requests_running" Decimal Sum, "Requests outstanding on the pod, by the count of the gateway's replicas.";
    DrainRate "realtime_running_requests_drain_rate_1m" Decimal Sum, "Decode and combined pods: requests completed per second over the last minute, by the same count.";
}

impl EngineMetric {
    /// A gauge of its own kind: it has one series for each state.
    pub(in crate::telemetry) const SLEEP: EngineDefinition = EngineDefinition {
        name: "engine_sleep_state",
        kind: Kind::Gauge,
        help: "vLLM: 1 in the series of the state, `weights_offloaded` or `discard_all`, in which the engine sleeps.",
    };
}

engine_histograms! {
    E2e "e2e_request_latency_seconds", "Requests from their arrival to their end.";
    Queue "request_queue_time_seconds", "Requests' time in the queue.";
    Inference "request_inference_time_seconds", "Requests' time in execution.";
    Prefill "request_prefill_time_seconds", "Requests' time in prefill.";
    Decode "request_decode_time_seconds", "Requests' time in decode.";
    Stage "per_stage_req_latency_seconds", "SGLang: stages of requests, all together.";
    FirstToken "time_to_first_token_seconds", "Time to the first token.";
    OutputToken "time_per_output_token_seconds", "Time between tokens.";
    HttpDuration "http_request_duration_seconds", "HTTP requests, of all handlers together.";
    HttpDurationFine "http_request_duration_highr_seconds", "The same in finer buckets.";
    IterationTokens "iteration_tokens_total", "Tokens per step of the engine.";
    PromptLength "request_prompt_tokens", "Prompt tokens of requests.";
    OutputLength "request_generation_tokens", "Generated tokens of requests.";
    NixlTransfer "nixl_xfer_time_seconds", "KV transfers by NIXL.";
    NixlPost "nixl_post_time_seconds", "Time to post a KV transfer by NIXL.";
    NixlBytes "nixl_bytes_transferred", "Bytes of a KV transfer by NIXL.";
    NixlDescriptors "nixl_num_descriptors", "Descriptors of a KV transfer by NIXL.";
}
