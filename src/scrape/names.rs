//! Which metric of which engine means what, over all versions seen (engine protocols, section 5).

use crate::fleet::Engine;

/// A quantity the gateway wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantity {
    Running,
    Waiting,
    PrefillPrealloc,
    DecodePrealloc,
    KvUsage,
    GenerationTps,
    PromptTps,
    GenerationTokens,
    PromptTokens,
    PrefillSecondsSum,
    PrefillSecondsCount,
    Adapters,
}

/// One name under which an engine may report a quantity.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alias {
    pub(super) quantity: Quantity,
    /// The sample's name after the engine's prefix; a trailing `_total` may be there or not.
    pub(super) name: &'static str,
}

const fn alias(quantity: Quantity, name: &'static str) -> Alias {
    Alias { quantity, name }
}

/// How one engine's metrics are called.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names {
    /// What all wanted names begin with.
    pub(super) prefix: &'static str,
    pub(super) aliases: &'static [Alias],
}

/// Newest name first: where a page has an old and a new name of one quantity, the first that has a value counts, and
/// they are never added up.
const VLLM: &[Alias] = &[
    alias(Quantity::Running, "num_requests_running"),
    alias(Quantity::Waiting, "num_requests_waiting"),
    alias(Quantity::KvUsage, "kv_cache_usage_perc"),
    alias(Quantity::KvUsage, "gpu_cache_usage_perc"),
    alias(Quantity::GenerationTps, "avg_generation_throughput_toks_per_s"),
    alias(Quantity::PromptTps, "avg_prompt_throughput_toks_per_s"),
    alias(Quantity::GenerationTokens, "generation_tokens"),
    alias(Quantity::PromptTokens, "prompt_tokens"),
    alias(Quantity::PrefillSecondsSum, "request_prefill_time_seconds_sum"),
    alias(Quantity::PrefillSecondsCount, "request_prefill_time_seconds_count"),
    alias(Quantity::Adapters, "lora_requests_info"),
];

const SGLANG: &[Alias] = &[
    alias(Quantity::Running, "num_running_reqs"),
    alias(Quantity::Waiting, "num_queue_reqs"),
    alias(Quantity::PrefillPrealloc, "num_prefill_bootstrap_queue_reqs"),
    alias(Quantity::PrefillPrealloc, "num_prefill_prealloc_queue_reqs"),
    alias(Quantity::DecodePrealloc, "num_decode_prealloc_queue_reqs"),
    alias(Quantity::KvUsage, "token_usage"),
    alias(Quantity::GenerationTps, "gen_throughput"),
    alias(Quantity::GenerationTokens, "generation_tokens"),
    alias(Quantity::PromptTokens, "prompt_tokens"),
];

const TRTLLM: &[Alias] = &[
    alias(Quantity::Running, "num_requests_running"),
    alias(Quantity::Waiting, "num_requests_waiting"),
    alias(Quantity::KvUsage, "kv_cache_utilization"),
    alias(Quantity::GenerationTokens, "generation_tokens"),
    alias(Quantity::PromptTokens, "prompt_tokens"),
    alias(Quantity::PrefillSecondsSum, "request_prefill_time_seconds_sum"),
    alias(Quantity::PrefillSecondsCount, "request_prefill_time_seconds_count"),
];

/// The names an engine may use. An engine we do not know is taken for a relative of vLLM, as most are.
pub(super) fn names(engine: Engine) -> Names {
    match engine {
        Engine::Vllm | Engine::Other => Names { prefix: "vllm:", aliases: VLLM },
        Engine::Sglang => Names { prefix: "sglang:", aliases: SGLANG },
        Engine::Trtllm => Names { prefix: "trtllm_", aliases: TRTLLM },
    }
}

/// What every version of the engine reports. One of these missing means that routing is blind in that respect, most
/// likely because the engine renamed a metric. TensorRT-LLM had no request gauges for long, so only its cache counts.
pub(super) fn expected(engine: Engine) -> &'static [Quantity] {
    match engine {
        Engine::Vllm => &[
            Quantity::Running,
            Quantity::Waiting,
            Quantity::KvUsage,
            Quantity::GenerationTokens,
            Quantity::PromptTokens,
        ],
        Engine::Sglang => &[Quantity::Running, Quantity::Waiting, Quantity::KvUsage, Quantity::GenerationTps],
        Engine::Trtllm => &[Quantity::KvUsage],
        Engine::Other => &[],
    }
}

/// The name of a quantity in the label of the missing-metric counter (reference section 6.2).
pub(super) fn label(quantity: Quantity) -> &'static str {
    match quantity {
        Quantity::Running => "num_requests_running",
        Quantity::Waiting => "num_requests_waiting",
        Quantity::PrefillPrealloc => "num_prefill_prealloc_queue_reqs",
        Quantity::DecodePrealloc => "num_decode_prealloc_queue_reqs",
        Quantity::KvUsage => "kv_cache_usage_perc",
        Quantity::GenerationTps => "avg_generation_throughput_toks_per_s",
        Quantity::PromptTps => "avg_prompt_throughput_toks_per_s",
        Quantity::GenerationTokens => "generation_tokens_total",
        Quantity::PromptTokens => "prompt_tokens_total",
        Quantity::PrefillSecondsSum | Quantity::PrefillSecondsCount => "request_prefill_time_seconds",
        Quantity::Adapters => "lora_requests_info",
    }
}
