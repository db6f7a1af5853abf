//! `/metrics` under vLLM's names, of the newest generation, of 0.8, or of both.

use crate::config::{MetricNames, Role};
use crate::meters::Counts;
use crate::page::{Page, quoted};
use crate::prompt::BLOCK_TOKENS;
use crate::state::Core;

/// Renders all metrics in the text format.
pub(crate) fn render(core: &Core) -> String {
    let counts = core.meters.read();
    let mut page = Page::new("vllm:", labels(core));
    let config = &core.config;
    let (newest, legacy) = (config.metric_names != MetricNames::Legacy, config.metric_names != MetricNames::Newest);
    let (running, waiting) = (core.load.running(), core.load.waiting() + core.gate.waiting());
    page.gauge("num_requests_running", "Number of requests in model execution batches.", running as f64);
    page.gauge("num_requests_waiting", "Number of requests waiting to be processed.", waiting as f64);
    let usage = core.kv.active() as f64 / core.kv.capacity() as f64;
    if newest {
        page.gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage);
        page.family("num_requests_waiting_by_reason", "Number of waiting requests by reason.", "gauge");
        page.line("num_requests_waiting_by_reason", "reason=\"capacity\"", waiting as f64);
        page.line("num_requests_waiting_by_reason", "reason=\"deferred\"", 0.0);
        page.family("engine_sleep_state", "Engine sleep state; awake = 1 means engine is awake.", "gauge");
        for (state, value) in [("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)] {
            page.line("engine_sleep_state", &format!("sleep_state=\"{state}\""), value);
        }
    }
    if legacy {
        page.gauge("gpu_cache_usage_perc", "GPU KV-cache usage. 1 means 100 percent usage.", usage);
    }
    prefixes(&mut page, &counts, newest, legacy);
    tokens(&mut page, &counts, newest);
    page.family("request_success", "Count of successfully processed requests.", "counter");
    for (reason, count) in [
        ("stop", counts.finished_stop),
        ("length", counts.finished_length),
        ("abort", counts.finished_abort),
        ("error", counts.finished_error),
    ] {
        page.line("request_success_total", &format!("finished_reason=\"{reason}\""), count as f64);
    }
    page.counter("num_preemptions", "Cumulative number of preemption from the engine.", 0);
    times(&mut page, &counts, newest, legacy);
    if config.role != Role::Combined && newest {
        transfers(&mut page, &counts);
    }
    let blocks = format!(
        "block_size=\"{BLOCK_TOKENS}\",num_gpu_blocks=\"{}\",kv_cache_size_tokens=\"{}\",enable_prefix_caching=\"{}\"",
        core.kv.capacity(),
        core.kv.capacity() * u64::from(BLOCK_TOKENS),
        if config.capacity.prefix_cache { "True" } else { "False" }
    );
    page.family("cache_config_info", "Information of the LLMEngine CacheConfig", "gauge");
    page.line("cache_config_info", &blocks, 1.0);
    page.text + &server(&counts)
}

/// What the HTTP server tells of itself. (Requests that generate are all that it counts here.)
fn server(counts: &Counts) -> String {
    let mut page = Page::new("", "handler=\"/v1/chat/completions\",method=\"POST\"".to_owned());
    page.family("http_requests", "Total number of requests by method, status and handler.", "counter");
    page.line("http_requests_total", "status=\"2xx\"", counts.whole.count as f64);
    page.histogram("http_request_duration_seconds", "Latency with only few buckets by handler.", &counts.whole);
    page.text
}

fn prefixes(page: &mut Page, counts: &Counts, newest: bool, legacy: bool) {
    if newest {
        page.counter("prefix_cache_queries", "Prefix cache queries, in queried tokens.", counts.prefix_queries);
        page.counter("prefix_cache_hits", "Prefix cache hits, in cached tokens.", counts.prefix_hits);
        let text = "External prefix cache queries, in queried tokens.";
        page.counter("external_prefix_cache_queries", text, counts.external_queries);
        page.counter(
            "external_prefix_cache_hits",
            "External prefix cache hits, in cached tokens.",
            counts.external_hits,
        );
    }
    if legacy {
        page.counter("gpu_prefix_cache_queries", "GPU prefix cache queries, in queried blocks.", counts.prefix_queries);
        page.counter("gpu_prefix_cache_hits", "GPU prefix cache hits, in cached blocks.", counts.prefix_hits);
    }
}

fn tokens(page: &mut Page, counts: &Counts, newest: bool) {
    page.counter("prompt_tokens", "Number of prefill tokens processed.", counts.prompt_tokens);
    page.counter("generation_tokens", "Number of generation tokens processed.", counts.generated_tokens);
    if !newest {
        return;
    }
    page.family("prompt_tokens_by_source", "Number of prompt tokens by source.", "counter");
    for (source, count) in [
        ("local_compute", counts.computed_tokens),
        ("local_cache_hit", counts.cache_hit_tokens),
        ("external_kv_transfer", counts.transferred_tokens),
    ] {
        page.line("prompt_tokens_by_source_total", &format!("source=\"{source}\""), count as f64);
    }
    let cached = counts.cache_hit_tokens + counts.transferred_tokens;
    page.counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", cached);
}

fn times(page: &mut Page, counts: &Counts, newest: bool, legacy: bool) {
    page.histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", &counts.first_token);
    if newest {
        page.histogram(
            "inter_token_latency_seconds",
            "Histogram of inter-token latency in seconds.",
            &counts.token_gap,
        );
        let text = "Histogram of time_per_output_token_seconds per request.";
        page.histogram("request_time_per_output_token_seconds", text, &counts.mean_token_time);
    }
    if legacy {
        let text = "Histogram of time per output token in seconds.";
        page.histogram("time_per_output_token_seconds", text, &counts.token_gap);
    }
    for (name, text, histogram) in [
        ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", &counts.whole),
        ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", &counts.queue),
        ("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", &counts.inference),
        ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", &counts.prefill),
        ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", &counts.decode),
        ("request_prompt_tokens", "Number of prefill tokens processed.", &counts.prompt_length),
        ("request_generation_tokens", "Number of generation tokens processed.", &counts.output_length),
        ("iteration_tokens_total", "Histogram of number of tokens per engine step.", &counts.step_tokens),
    ] {
        page.histogram(name, text, histogram);
    }
}

fn transfers(page: &mut Page, counts: &Counts) {
    page.histogram(
        "nixl_xfer_time_seconds",
        "Histogram of transfer duration for NIXL KV Cache transfers.",
        &counts.transfer,
    );
    for (name, text, count) in [
        ("nixl_num_failed_transfers", "Number of failed NIXL KV Cache transfers.", counts.failed_transfers),
        ("nixl_num_failed_notifications", "Number of failed NIXL KV Cache notifications.", 0),
        ("nixl_num_kv_expired_reqs", "Number of requests that had their KV expire.", counts.expired_leases),
        (
            "nixl_num_notifications_after_expiry",
            "Number of completion notifications for requests that were no longer tracked.",
            counts.pulls_after_expiry,
        ),
    ] {
        page.counter(name, text, count);
    }
}

fn labels(core: &Core) -> String {
    let model = quoted(&core.config.model);
    if core.config.engine_label {
        format!("engine=\"0\",model_name=\"{model}\"")
    } else {
        format!("model_name=\"{model}\"")
    }
}
