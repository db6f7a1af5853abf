//! `/metrics` under the names of SGLang 0.5.23. Prefill and decode engines serve the same families.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::config::Role;
use crate::page::{Page, quoted};
use crate::prompt::BLOCK_TOKENS;
use crate::state::Core;

/// Renders all metrics in the text format.
pub(crate) fn render(core: &Core) -> String {
    let counts = core.meters.read();
    let kind = match core.config.role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Combined => "unified",
    };
    let model = format!("engine_type=\"{kind}\",model_name=\"{}\"", quoted(&core.config.model));
    let mut page = Page::new("sglang:", format!("{model},moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\""));
    let load = &core.load;
    let now = |gauge: &AtomicUsize| gauge.load(Ordering::Acquire);
    let (bootstrap, inflight) = (now(&load.bootstrapping), now(&load.inflight));
    let (prealloc, transfer) = (now(&load.preallocating), now(&load.receiving));
    // What waits in a queue of its own is not in the common one; a prompt in transfer no longer runs.
    let queued = (load.waiting() + core.gate.waiting()).saturating_sub(bootstrap + prealloc + transfer);
    let running = load.running().saturating_sub(inflight);
    let used = core.kv.active() * u64::from(BLOCK_TOKENS);
    let capacity = core.kv.capacity() * u64::from(BLOCK_TOKENS);
    let usage = used as f64 / capacity as f64;
    let hit_rate = counts.prefix_hits as f64 / counts.prefix_queries.max(1) as f64;
    // What the batch makes while it stays as it is.
    let step = core.config.timing.decode_step(running).as_secs_f64();
    let throughput = if step > 0.0 { running as f64 / step } else { 0.0 };
    for (name, text, value) in [
        ("num_running_reqs", "The number of running requests.", running as f64),
        ("num_queue_reqs", "The number of requests in the waiting queue.", queued as f64),
        ("token_usage", "The token usage.", usage),
        ("full_token_usage", "The token usage of full attention layers.", usage),
        ("kv_used_tokens", "The number of used KV tokens.", used as f64),
        ("kv_available_tokens", "The number of available KV tokens.", capacity.saturating_sub(used) as f64),
        ("max_total_num_tokens", "Maximum total number of tokens in the KV pool.", capacity as f64),
        ("gen_throughput", "The generation throughput (token/s).", throughput),
        ("cache_hit_rate", "The prefix cache hit rate.", hit_rate),
        (
            "num_prefill_bootstrap_queue_reqs",
            "The number of requests in the prefill bootstrap queue.",
            bootstrap as f64,
        ),
        ("num_prefill_inflight_queue_reqs", "The number of requests in the prefill inflight queue.", inflight as f64),
        ("num_decode_prealloc_queue_reqs", "The number of requests in the decode prealloc queue.", prealloc as f64),
        ("num_decode_transfer_queue_reqs", "The number of requests in the decode transfer queue.", transfer as f64),
        ("num_decode_host_receive_queue_reqs", "The number of requests in the decode host receive queue.", 0.0),
        ("num_decode_deferred_kv_release_reqs", "The number of requests with a deferred KV release.", 0.0),
        ("pending_prealloc_token_usage", "The token usage of pending preallocations.", 0.0),
    ] {
        page.gauge(name, text, value);
    }
    page.counter("num_bootstrap_failed_reqs", "The number of bootstrap failed requests.", counts.failed_meetings);
    page.counter("num_transfer_failed_reqs", "The number of transfer failed requests.", counts.failed_transfers);
    page.histogram("queue_time_seconds", "Histogram of queueing time in seconds.", &counts.queue);
    page.relabel(model.clone());
    page.histogram("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", &counts.token_gap);
    page.counter("num_aborted_requests", "Number of requests aborted.", counts.aborted_on_demand);
    page.family("cached_tokens", "Number of cached prompt tokens.", "counter");
    page.line("cached_tokens_total", "cache_source=\"device\"", counts.cache_hit_tokens as f64);
    page.relabel(format!("{model},is_streaming=\"false\""));
    page.counter("prompt_tokens", "Number of prefill tokens processed.", counts.prompt_tokens);
    page.counter("generation_tokens", "Number of generation tokens processed.", counts.generated_tokens);
    page.counter("num_requests", "Number of requests processed.", counts.requests);
    for (name, text, histogram) in [
        ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", &counts.first_token),
        ("e2e_request_latency_seconds", "Histogram of end-to-end request latency in seconds.", &counts.whole),
        (
            "request_time_per_output_token_seconds",
            "Histogram of the mean time per output token in seconds.",
            &counts.mean_token_time,
        ),
    ] {
        page.histogram(name, text, histogram);
    }
    page.text
}
