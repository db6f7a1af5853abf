//! What is passed on of pages as engines write them.

use crate::fleet::Engine;
use crate::scrape::export_page;
use crate::telemetry::{EngineHistogram as H, EngineMetric as M, EngineValues};

/// Lines of a page of vLLM 0.32 that served 28 requests, and those of its HTTP server.
const VLLM: &str = "\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 3.0
vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 1.0
vllm:num_requests_waiting_by_reason{engine=\"0\",model_name=\"tiny\",reason=\"capacity\"} 9.0
vllm:engine_sleep_state{engine=\"0\",model_name=\"tiny\",sleep_state=\"awake\"} 1.0
vllm:engine_sleep_state{engine=\"0\",model_name=\"tiny\",sleep_state=\"weights_offloaded\"} 0.0
vllm:engine_sleep_state{engine=\"0\",model_name=\"tiny\",sleep_state=\"discard_all\"} 0.0
vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.25
vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"tiny\"} 1415.0
vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"tiny\"} 7.0
vllm:prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 1389.0
vllm:prompt_tokens_by_source_total{engine=\"0\",model_name=\"tiny\",source=\"local_compute\"} 1389.0
vllm:generation_tokens_total{engine=\"0\",model_name=\"tiny\"} 206.0
vllm:nixl_num_failed_transfers_total{engine=\"0\",model_name=\"tiny\"} 2.0
vllm:iteration_tokens_total_bucket{engine=\"0\",le=\"1.0\",model_name=\"tiny\"} 176.0
vllm:iteration_tokens_total_bucket{engine=\"0\",le=\"8.0\",model_name=\"tiny\"} 181.0
vllm:iteration_tokens_total_bucket{engine=\"0\",le=\"+Inf\",model_name=\"tiny\"} 204.0
vllm:iteration_tokens_total_count{engine=\"0\",model_name=\"tiny\"} 204.0
vllm:iteration_tokens_total_sum{engine=\"0\",model_name=\"tiny\"} 1595.0
vllm:e2e_request_latency_seconds_bucket{engine=\"0\",le=\"0.3\",model_name=\"tiny\"} 15.0
vllm:e2e_request_latency_seconds_bucket{engine=\"0\",le=\"0.5\",model_name=\"tiny\"} 25.0
vllm:e2e_request_latency_seconds_bucket{engine=\"0\",le=\"+Inf\",model_name=\"tiny\"} 28.0
vllm:e2e_request_latency_seconds_count{engine=\"0\",model_name=\"tiny\"} 28.0
vllm:e2e_request_latency_seconds_sum{engine=\"0\",model_name=\"tiny\"} 30.86011552810669
http_requests_total{handler=\"/v1/chat/completions\",method=\"POST\",status=\"2xx\"} 20.0
http_requests_total{handler=\"/v1/models\",method=\"GET\",status=\"2xx\"} 8.0
http_request_duration_seconds_bucket{handler=\"/v1/chat/completions\",le=\"0.1\",method=\"POST\"} 10.0
http_request_duration_seconds_bucket{handler=\"/v1/chat/completions\",le=\"+Inf\",method=\"POST\"} 20.0
http_request_duration_seconds_bucket{handler=\"/v1/models\",le=\"0.1\",method=\"GET\"} 8.0
http_request_duration_seconds_bucket{handler=\"/v1/models\",le=\"+Inf\",method=\"GET\"} 8.0
http_request_duration_seconds_count{handler=\"/v1/chat/completions\",method=\"POST\"} 20.0
http_request_duration_seconds_count{handler=\"/v1/models\",method=\"GET\"} 8.0
";

/// Lines of SGLang 0.5.23; priorities as with priority scheduling.
const SGLANG: &str = "\
sglang:num_running_reqs{engine_type=\"decode\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"} 10.0
sglang:num_running_reqs{engine_type=\"decode\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",priority=\"1\",tp_rank=\"0\"} 10.0
sglang:num_queue_reqs{engine_type=\"decode\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"} 2.0
sglang:token_usage{engine_type=\"decode\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"} 0.5
sglang:num_decode_prealloc_queue_reqs{engine_type=\"decode\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"} 4.0
sglang:generation_tokens_total{engine_type=\"decode\",is_streaming=\"false\",model_name=\"tiny\"} 80.0
sglang:generation_tokens_total{engine_type=\"decode\",is_streaming=\"true\",model_name=\"tiny\"} 6.0
sglang:e2e_request_latency_seconds_bucket{engine_type=\"decode\",is_streaming=\"false\",le=\"0.1\",model_name=\"tiny\"} 4.0
sglang:e2e_request_latency_seconds_bucket{engine_type=\"decode\",is_streaming=\"true\",le=\"0.1\",model_name=\"tiny\"} 4.0
sglang:e2e_request_latency_seconds_bucket{engine_type=\"decode\",is_streaming=\"false\",le=\"+Inf\",model_name=\"tiny\"} 4.0
sglang:e2e_request_latency_seconds_bucket{engine_type=\"decode\",is_streaming=\"true\",le=\"+Inf\",model_name=\"tiny\"} 6.0
sglang:per_stage_req_latency_seconds_bucket{le=\"0.001\",model_name=\"tiny\",stage=\"a\",tp_rank=\"0\"} 1.0
sglang:per_stage_req_latency_seconds_bucket{le=\"0.001\",model_name=\"tiny\",stage=\"b\",tp_rank=\"0\"} 1.0
";

fn vllm(page: &str) -> EngineValues {
    export_page(page.as_bytes(), Engine::Vllm, "tiny")
}

#[test]
fn a_vllm_page() {
    let values = vllm(VLLM);
    for (metric, expected) in [
        (M::Running, Some(3.0)),
        (M::Waiting, Some(1.0)),
        (M::KvUsage, Some(0.25)),
        (M::GpuCacheUsage, Some(0.25)),
        (M::PrefixQueries, Some(1415.0)),
        (M::PrefixHits, Some(7.0)),
        (M::PromptTokens, Some(1389.0)),
        (M::GenerationTokens, Some(206.0)),
        (M::NixlFailedTransfers, Some(2.0)),
        (M::HttpRequests, Some(28.0)),
        (M::NixlFailedNotifications, None),
        (M::CpuCacheUsage, None),
    ] {
        assert_eq!(values.get(metric), expected, "{metric:?}");
    }
    let steps = values.histogram(H::IterationTokens).expect("steps");
    let buckets = [(1.0, 176.0), (8.0, 181.0), (f64::INFINITY, 204.0)];
    assert_eq!((steps.buckets.as_slice(), steps.count, steps.sum), (buckets.as_slice(), 204.0, 1595.0));
    let e2e = values.histogram(H::E2e).expect("requests");
    assert_eq!(e2e.quantile(0.5).map(|p50| (p50 * 1e6).round()), Some(280_000.0));
    let http = values.histogram(H::HttpDuration).expect("of all handlers");
    assert_eq!((http.buckets.as_slice(), http.count), ([(0.1, 18.0), (f64::INFINITY, 28.0)].as_slice(), 28.0));
    assert!(values.histogram(H::Queue).is_none());
    let mut awake = EngineValues::default();
    awake.set_asleep("weights_offloaded", 0.0);
    let asleep = vllm("vllm:engine_sleep_state{model_name=\"tiny\",sleep_state=\"weights_offloaded\"} 0.0\n");
    assert_eq!(asleep, awake);
}

#[test]
fn an_sglang_page() {
    let values = export_page(SGLANG.as_bytes(), Engine::Sglang, "tiny");
    for (metric, expected) in [
        (M::Running, Some(10.0)),
        (M::Waiting, Some(2.0)),
        (M::KvUsage, Some(0.5)),
        (M::DecodePrealloc, Some(4.0)),
        (M::GenerationTokens, Some(86.0)),
        (M::PrefillPrealloc, None),
    ] {
        assert_eq!(values.get(metric), expected, "{metric:?}");
    }
    let e2e = values.histogram(H::E2e).expect("requests");
    assert_eq!((e2e.buckets.as_slice(), e2e.count), ([(0.1, 8.0), (f64::INFINITY, 10.0)].as_slice(), 10.0));
    assert_eq!(values.histogram(H::Stage).map(|stages| stages.count), Some(2.0));
}

#[test]
fn pages_of_other_engines() {
    let trtllm = "trtllm_kv_cache_utilization{model_name=\"undefined\"} 0.5\ntrtllm_num_requests_running 7\n";
    let values = export_page(trtllm.as_bytes(), Engine::Trtllm, "tiny");
    assert_eq!([M::KvUsage, M::Running].map(|metric| values.get(metric)), [Some(0.5), Some(7.0)]);
    let xllm = "kv_cache_utilization 0.5\nengine_utilization 0.75\n";
    let values = export_page(xllm.as_bytes(), Engine::Other, "tiny");
    assert_eq!([M::KvUsage, M::Utilization].map(|metric| values.get(metric)), [Some(0.5), Some(0.75)]);
}

#[test]
fn pages_are_bounded_and_nonsense_is_survived() {
    let lines = |line: fn(usize) -> String| (0..1000).map(line).collect::<Vec<_>>().concat();
    let many = lines(|n| format!("vllm:e2e_request_latency_seconds_bucket{{le=\"{n}\"}} {n}\n"));
    assert_eq!(vllm(&many).histogram(H::E2e).map(|e2e| e2e.buckets.len()), Some(128));
    let states = lines(|n| format!("vllm:engine_sleep_state{{sleep_state=\"s{n}\"}} 1\n"));
    assert_eq!(vllm(&states), EngineValues::default());
    for page in
        ["", "\n", "{", "vllm:e2e_request_latency_seconds_bucket 3", "_bucket{le=\"x\"} 1", "_total 1", "# vllm:x"]
    {
        assert_eq!(vllm(page), EngineValues::default(), "{page}");
    }
    let values = export_page(b"vllm:num_requests_running{x=\"\xff\"} 3\n", Engine::Vllm, "tiny");
    assert_eq!(values.get(M::Running), Some(3.0));
}
