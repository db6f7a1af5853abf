//! A metrics page → what is passed on of it. Pure and tolerant, like [`super::parse_page`], but done when somebody looks at
//! our own page, not at each look at the engine's.

use super::series::{self, Labels, Total, split_labels, value};
use crate::fleet::Engine;
use crate::telemetry::{Distribution, EngineHistogram as H, EngineMetric as M, EngineValues, Join};

/// Borders of one histogram; further ones are left out.
const MAX_BORDERS: usize = 128;

const fn number(name: &'static str, metric: M) -> (&'static str, M) {
    (name, metric)
}

const fn histogram(name: &'static str, histogram: H) -> (&'static str, H) {
    (name, histogram)
}

/// The gauge of vLLM that has a series for each state.
const SLEEP: &str = "vllm:engine_sleep_state";

/// Names without a trailing `_total`. Of several names of one metric, the first that has a value counts.
struct Sources {
    numbers: &'static [(&'static str, M)],
    histograms: &'static [(&'static str, H)],
}

const VLLM: Sources = Sources {
    numbers: &[
        number("vllm:num_requests_running", M::Running),
        number("vllm:num_requests_waiting", M::Waiting),
        number("vllm:num_requests_swapped", M::Swapped),
        number("vllm:kv_cache_usage_perc", M::KvUsage),
        number("vllm:gpu_cache_usage_perc", M::KvUsage),
        number("vllm:gpu_cache_usage_perc", M::GpuCacheUsage),
        number("vllm:kv_cache_usage_perc", M::GpuCacheUsage),
        number("vllm:cpu_cache_usage_perc", M::CpuCacheUsage),
        number("vllm:prompt_tokens", M::PromptTokens),
        number("vllm:generation_tokens", M::GenerationTokens),
        number("vllm:prefix_cache_queries", M::PrefixQueries),
        number("vllm:prefix_cache_hits", M::PrefixHits),
        number("vllm:external_prefix_cache_queries", M::ExternalPrefixQueries),
        number("vllm:external_prefix_cache_hits", M::ExternalPrefixHits),
        number("vllm:nixl_num_failed_transfers", M::NixlFailedTransfers),
        number("vllm:nixl_num_failed_notifications", M::NixlFailedNotifications),
        number("http_requests", M::HttpRequests),
        number("vllm:http_requests", M::HttpRequests),
        // xLLM and its kin, which have no prefix.
        number("kv_cache_utilization", M::KvUsage),
        number("engine_utilization", M::Utilization),
    ],
    histograms: &[
        histogram("vllm:e2e_request_latency_seconds", H::E2e),
        histogram("vllm:request_queue_time_seconds", H::Queue),
        histogram("vllm:request_inference_time_seconds", H::Inference),
        histogram("vllm:request_prefill_time_seconds", H::Prefill),
        histogram("vllm:request_decode_time_seconds", H::Decode),
        histogram("vllm:time_to_first_token_seconds", H::FirstToken),
        histogram("vllm:time_per_output_token_seconds", H::OutputToken),
        histogram("vllm:inter_token_latency_seconds", H::OutputToken),
        histogram("http_request_duration_seconds", H::HttpDuration),
        histogram("http_request_duration_highr_seconds", H::HttpDurationFine),
        histogram("vllm:iteration_tokens_total", H::IterationTokens),
        histogram("vllm:request_prompt_tokens", H::PromptLength),
        histogram("vllm:request_generation_tokens", H::OutputLength),
        histogram("vllm:nixl_xfer_time_seconds", H::NixlTransfer),
        histogram("vllm:nixl_post_time_seconds", H::NixlPost),
        histogram("vllm:nixl_bytes_transferred", H::NixlBytes),
        histogram("vllm:nixl_num_descriptors", H::NixlDescriptors),
    ],
};

const SGLANG: Sources = Sources {
    numbers: &[
        number("sglang:num_running_reqs", M::Running),
        number("sglang:num_queue_reqs", M::Waiting),
        number("sglang:num_retracted_reqs", M::Swapped),
        number("sglang:num_prefill_bootstrap_queue_reqs", M::PrefillPrealloc),
        number("sglang:num_prefill_prealloc_queue_reqs", M::PrefillPrealloc),
        number("sglang:num_decode_prealloc_queue_reqs", M::DecodePrealloc),
        number("sglang:token_usage", M::KvUsage),
        number("sglang:token_usage", M::GpuCacheUsage),
        number("sglang:gen_throughput", M::GenerationTps),
        number("sglang:prompt_tokens", M::PromptTokens),
        number("sglang:generation_tokens", M::GenerationTokens),
        number("sglang:http_requests", M::HttpRequests),
    ],
    histograms: &[
        histogram("sglang:e2e_request_latency_seconds", H::E2e),
        histogram("sglang:queue_time_seconds", H::Queue),
        histogram("sglang:per_stage_req_latency_seconds", H::Stage),
        histogram("sglang:time_to_first_token_seconds", H::FirstToken),
        histogram("sglang:inter_token_latency_seconds", H::OutputToken),
    ],
};

const TRTLLM: Sources = Sources {
    numbers: &[
        number("trtllm_num_requests_running", M::Running),
        number("trtllm_num_requests_waiting", M::Waiting),
        number("trtllm_kv_cache_utilization", M::KvUsage),
        number("trtllm_prompt_tokens", M::PromptTokens),
        number("trtllm_generation_tokens", M::GenerationTokens),
    ],
    histograms: &[
        histogram("trtllm_e2e_request_latency_seconds", H::E2e),
        histogram("trtllm_request_queue_time_seconds", H::Queue),
        histogram("trtllm_request_inference_time_seconds", H::Inference),
        histogram("trtllm_request_prefill_time_seconds", H::Prefill),
        histogram("trtllm_request_decode_time_seconds", H::Decode),
        histogram("trtllm_time_to_first_token_seconds", H::FirstToken),
        histogram("trtllm_time_per_output_token_seconds", H::OutputToken),
    ],
};

/// One histogram while it is read.
#[derive(Clone, Debug, Default)]
struct Buckets<'a> {
    borders: Vec<(f64, Total<'a>)>,
    count: Total<'a>,
    sum: Total<'a>,
}

/// Reads what is passed on of a page of `engine`, for `model`. Of the series of one name only the total counts, as in
/// [`super::parse_page`].
pub fn export_page(page: &[u8], engine: Engine, model: &str) -> EngineValues {
    match std::str::from_utf8(page) {
        Ok(text) => export_text(text, engine, model),
        Err(_) => export_text(&String::from_utf8_lossy(page), engine, model),
    }
}

fn export_text(text: &str, engine: Engine, model: &str) -> EngineValues {
    let sources = match engine {
        Engine::Vllm | Engine::Other => VLLM,
        Engine::Sglang => SGLANG,
        Engine::Trtllm => TRTLLM,
    };
    let one_rank = engine == Engine::Sglang;
    let mut numbers: Vec<Total<'_>> = vec![Total::default(); sources.numbers.len()];
    let mut histograms: Vec<Buckets<'_>> = vec![Buckets::default(); sources.histograms.len()];
    let mut asleep: Vec<(&str, Total<'_>)> = Vec::new();
    for line in text.split('\n') {
        let line = line.trim_start();
        let end = line.find(['{', ' ', '\t']).unwrap_or(line.len());
        let Some((name, rest)) = line.split_at_checked(end).filter(|(name, _)| !name.starts_with('#')) else {
            continue;
        };
        let Some(place) = Place::of(name, &sources) else { continue };
        let Some((labels, rest)) = split_labels(rest) else { continue };
        let (Some(value), labels) = (value(rest), Labels::read(labels)) else { continue };
        match place {
            Place::Sleep => {
                let known = asleep.iter().position(|(state, _)| *state == labels.sleep_state);
                if known.is_none() && asleep.len() < MAX_BORDERS {
                    asleep.push((labels.sleep_state, Total::default()));
                }
                if let Some((_, total)) = asleep.iter_mut().find(|(state, _)| *state == labels.sleep_state) {
                    total.add(series::Join::Max, value, &labels, one_rank);
                }
            }
            Place::Number(stem) => {
                // A name may stand for two metrics.
                for ((known, metric), total) in sources.numbers.iter().zip(&mut numbers) {
                    if *known == stem {
                        total.add(join(*metric), value, &labels, one_rank);
                    }
                }
            }
            Place::Histogram(index, part) => {
                if let Some(buckets) = histograms.get_mut(index) {
                    buckets.add(part, value, &labels, one_rank);
                }
            }
        }
    }
    let mut values = EngineValues::default();
    for ((_, metric), total) in sources.numbers.iter().zip(&numbers) {
        if let (None, Some(value)) = (values.get(*metric), total.of(join(*metric), model)) {
            values.set(*metric, value);
        }
    }
    for (state, total) in &asleep {
        if let Some(value) = total.of(series::Join::Max, model) {
            values.set_asleep(state, value);
        }
    }
    for ((_, histogram), buckets) in sources.histograms.iter().zip(histograms) {
        if let (None, Some(distribution)) = (values.histogram(*histogram), buckets.distribution(model)) {
            values.set_histogram(*histogram, distribution);
        }
    }
    values
}

fn join(metric: M) -> series::Join {
    match metric.join() {
        Join::Sum => series::Join::Sum,
        Join::Max => series::Join::Max,
    }
}

/// The part of a histogram that a line tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Bucket,
    Count,
    Sum,
}

/// What a line is about.
enum Place<'a> {
    Number(&'a str),
    Histogram(usize, Part),
    Sleep,
}

impl<'a> Place<'a> {
    fn of(name: &'a str, sources: &Sources) -> Option<Place<'a>> {
        if name == SLEEP {
            return Some(Place::Sleep);
        }
        for (suffix, part) in [("_bucket", Part::Bucket), ("_count", Part::Count), ("_sum", Part::Sum)] {
            if let Some(stem) = name.strip_suffix(suffix) {
                let index = sources.histograms.iter().position(|(known, _)| *known == stem)?;
                return Some(Place::Histogram(index, part));
            }
        }
        let stem = name.strip_suffix("_total").unwrap_or(name);
        sources.numbers.iter().any(|(known, _)| *known == stem).then_some(Place::Number(stem))
    }
}

impl<'a> Buckets<'a> {
    fn add(&mut self, part: Part, value: f64, labels: &Labels<'a>, one_rank: bool) {
        let sum = series::Join::Sum;
        match part {
            Part::Count => self.count.add(sum, value, labels, one_rank),
            Part::Sum => self.sum.add(sum, value, labels, one_rank),
            Part::Bucket => {
                let Some(border) = labels.border.filter(|border| !border.is_nan()) else { return };
                let index = match self.borders.iter().position(|(known, _)| *known == border) {
                    Some(index) => index,
                    None if self.borders.len() >= MAX_BORDERS => return,
                    None => {
                        self.borders.push((border, Total::default()));
                        self.borders.len() - 1
                    }
                };
                if let Some((_, total)) = self.borders.get_mut(index) {
                    total.add(sum, value, labels, one_rank);
                }
            }
        }
    }

    fn distribution(mut self, model: &str) -> Option<Distribution> {
        let total = |total: &Total<'_>| total.of(series::Join::Sum, model);
        self.borders.sort_by(|one, other| one.0.total_cmp(&other.0));
        let buckets: Vec<(f64, f64)> =
            self.borders.iter().filter_map(|(border, counted)| Some((*border, total(counted)?))).collect();
        let last = buckets.last().map(|(_, count)| *count);
        let count = total(&self.count).or(last)?;
        Some(Distribution { buckets, count, sum: total(&self.sum).unwrap_or(0.0) })
    }
}
