//! `/metrics`, a JSON list of iteration statistics that reading empties, and `/prometheus/metrics`, whose gauges are only
//! as new as the last finished request.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

use crate::config::MetricNames;
use crate::page::{Page, quoted};
use crate::prompt::BLOCK_TOKENS;
use crate::state::Core;

/// Statistics kept for a reader; the oldest go first.
const MOST: usize = 1_000;

#[derive(Debug, Default)]
struct Book {
    waiting: VecDeque<Value>,
    number: u64,
    /// KV utilization and hit rate when the last request finished.
    gauges: (f64, f64),
}

/// The iteration statistics of one engine.
#[derive(Debug, Default)]
pub(crate) struct Iterations {
    book: Mutex<Book>,
}

impl Iterations {
    /// Writes down the engine's state as one iteration.
    pub fn note(&self, core: &Core) {
        let counts = core.meters.read();
        let hit_rate = counts.prefix_hits as f64 / counts.prefix_queries.max(1) as f64;
        let (used, most) = (core.kv.active(), core.kv.capacity());
        let step = core.config.timing.decode_step(core.load.running()).as_secs_f64() * 1_000.0;
        let mut book = self.lock();
        book.number += 1;
        book.gauges = (used as f64 / most as f64, hit_rate);
        let number = book.number;
        book.waiting.push_back(json!({
            "iter": number,
            "iterLatencyMS": step,
            "numActiveRequests": core.load.running() + core.load.waiting(),
            "numQueuedRequests": core.load.waiting() + core.gate.waiting(),
            "maxNumActiveRequests": core.config.capacity.max_running,
            "kvCacheStats": {"maxNumBlocks": most, "usedNumBlocks": used, "freeNumBlocks": most.saturating_sub(used),
                "tokensPerBlock": BLOCK_TOKENS, "cacheHitRate": hit_rate},
        }));
        while book.waiting.len() > MOST {
            book.waiting.pop_front();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Everything since the last reading. A busy engine iterates all the time; an idle one has nothing new to say.
pub(crate) fn drain(core: &Core) -> Vec<u8> {
    if core.load.running() + core.load.waiting() + core.gate.waiting() > 0 {
        core.iterations.note(core);
    }
    let waiting: Vec<_> = core.iterations.lock().waiting.drain(..).collect();
    serde_json::to_vec(&waiting).unwrap_or_default()
}

/// Renders `/prometheus/metrics`.
pub(crate) fn render(core: &Core) -> String {
    let counts = core.meters.read();
    let (utilization, hit_rate) = core.iterations.lock().gauges;
    let labels = format!("engine_type=\"undefined\",model_name=\"{}\"", quoted(&core.config.model));
    let mut page = Page::new("trtllm_", labels);
    page.family("request_success", "Count of successfully processed requests.", "counter");
    for (reason, count) in
        [("stop", counts.finished_stop), ("length", counts.finished_length), ("cancelled", counts.finished_abort)]
    {
        page.line("request_success_total", &format!("finished_reason=\"{reason}\""), count as f64);
    }
    for (name, text, histogram) in [
        ("e2e_request_latency_seconds", "Histogram of end to end request latency in seconds.", &counts.whole),
        ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", &counts.first_token),
        ("time_per_output_token_seconds", "Histogram of time per output token in seconds.", &counts.mean_token_time),
        ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", &counts.queue),
    ] {
        page.histogram(name, text, histogram);
    }
    page.gauge("kv_cache_hit_rate", "KV cache hit rate.", hit_rate);
    page.gauge("kv_cache_utilization", "KV cache utilization.", utilization);
    if core.config.metric_names != MetricNames::Legacy {
        let waiting = core.load.waiting() + core.gate.waiting();
        page.gauge("num_requests_running", "Number of running requests.", core.load.running() as f64);
        page.gauge("num_requests_waiting", "Number of waiting requests.", waiting as f64);
        page.counter("generation_tokens", "Number of generated tokens.", counts.generated_tokens);
        page.counter("prompt_tokens", "Number of prompt tokens.", counts.prompt_tokens);
        for (name, histogram) in
            [("prefill", &counts.prefill), ("decode", &counts.decode), ("inference", &counts.inference)]
        {
            let text = format!("Histogram of time spent in the {name} phase.");
            page.histogram(&format!("request_{name}_time_seconds"), &text, histogram);
        }
    }
    page.text
}
