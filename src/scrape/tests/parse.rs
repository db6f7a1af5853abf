use proptest::prelude::*;

use crate::fleet::{Adapters, Engine};
use crate::scrape::{Page, parse_page};

fn vllm(text: &str) -> Page {
    parse_page(text.as_bytes(), Engine::Vllm, "tiny")
}

fn sglang(text: &str) -> Page {
    parse_page(text.as_bytes(), Engine::Sglang, "tiny")
}

#[test]
fn a_vllm_page() {
    // Lines as vLLM 0.32 writes them.
    let page = vllm(
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n\
         # TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 3.0\n\
         vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 2.0\n\
         vllm:num_requests_waiting_by_reason{engine=\"0\",model_name=\"tiny\",reason=\"capacity\"} 9.0\n\
         vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.00018311105685597795\n\
         vllm:prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 3493.0\n\
         vllm:prompt_tokens_by_source_total{engine=\"0\",model_name=\"tiny\",source=\"local_compute\"} 3333.0\n\
         vllm:prompt_tokens_created{engine=\"0\",model_name=\"tiny\"} 1.7e+09\n\
         vllm:generation_tokens_total{engine=\"0\",model_name=\"tiny\"} 92.0\n\
         vllm:request_generation_tokens_sum{engine=\"0\",model_name=\"tiny\"} 92.0\n\
         vllm:request_prefill_time_seconds_bucket{engine=\"0\",le=\"+Inf\",model_name=\"tiny\"} 50.0\n\
         vllm:request_prefill_time_seconds_count{engine=\"0\",model_name=\"tiny\"} 50.0\n\
         vllm:request_prefill_time_seconds_sum{engine=\"0\",model_name=\"tiny\"} 25.0\n",
    );
    let expected = Page {
        running: Some(3.0),
        waiting: Some(2.0),
        kv_usage: Some(0.000_183_111_056_855_977_95),
        prompt_tokens: Some(3493.0),
        generation_tokens: Some(92.0),
        prefill_seconds_mean: Some(0.5),
        ..Page::default()
    };
    assert_eq!(page, expected);
}

#[test]
fn an_sglang_page() {
    // Lines as SGLang 0.5.23 writes them; the counters come from another process and have no rank.
    let rank = "engine_type=\"decode\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"";
    let text = format!(
        "sglang:num_running_reqs{{{rank}}} 4.0\nsglang:num_queue_reqs{{{rank}}} 1.0\nsglang:gen_throughput{{{rank}}} 12.5\n\
         sglang:token_usage{{{rank}}} 0.25\nsglang:full_token_usage{{{rank}}} 0.99\n\
         sglang:num_prefill_bootstrap_queue_reqs{{{rank}}} 5.0\nsglang:num_decode_prealloc_queue_reqs{{{rank}}} 6.0\n\
         sglang:pending_prealloc_token_usage{{{rank}}} 0.5\n\
         sglang:prompt_tokens_total{{engine_type=\"decode\",is_streaming=\"false\",model_name=\"tiny\"}} 964.0\n\
         sglang:prompt_tokens_total{{engine_type=\"decode\",is_streaming=\"true\",model_name=\"tiny\"}} 94.0\n\
         sglang:generation_tokens_total{{engine_type=\"decode\",is_streaming=\"false\",model_name=\"tiny\"}} 80.0\n\
         sglang:generation_tokens_total{{engine_type=\"decode\",is_streaming=\"true\",model_name=\"tiny\"}} 6.0\n"
    );
    let expected = Page {
        running: Some(4.0),
        waiting: Some(1.0),
        generation_tps: Some(12.5),
        kv_usage: Some(0.25),
        prefill_prealloc_queue: Some(5.0),
        decode_prealloc_queue: Some(6.0),
        prompt_tokens: Some(1058.0),
        generation_tokens: Some(86.0),
        ..Page::default()
    };
    assert_eq!(sglang(&text), expected);
}

#[test]
fn a_trtllm_page() {
    let text = "trtllm_kv_cache_utilization{engine_type=\"trtllm\",model_name=\"undefined\"} 0.5\n\
                trtllm_num_requests_running{model_name=\"undefined\"} 7\ntrtllm_generation_tokens_total 9\n\
                trtllm_request_prefill_time_seconds_sum 3\ntrtllm_request_prefill_time_seconds_count 2\n";
    let page = parse_page(text.as_bytes(), Engine::Trtllm, "tiny");
    let expected = Page {
        kv_usage: Some(0.5),
        running: Some(7.0),
        generation_tokens: Some(9.0),
        prefill_seconds_mean: Some(1.5),
        ..Page::default()
    };
    assert_eq!(page, expected);
}

#[test]
fn r54_old_new_and_both_names() {
    let (old, new) = ("vllm:gpu_cache_usage_perc 0.3\n", "vllm:kv_cache_usage_perc 0.4\n");
    for (text, usage) in [
        (old.to_owned(), Some(0.3)),
        (new.to_owned(), Some(0.4)),
        (format!("{old}{new}"), Some(0.4)),
        (format!("{old}vllm:kv_cache_usage_perc NaN\n"), Some(0.3)),
        (String::new(), None),
    ] {
        assert_eq!(vllm(&text).kv_usage, usage, "{text}");
    }
    let (old, new) = ("sglang:num_prefill_prealloc_queue_reqs 3\n", "sglang:num_prefill_bootstrap_queue_reqs 4\n");
    for (text, queue) in [(old.to_owned(), 3.0), (new.to_owned(), 4.0), (format!("{old}{new}"), 4.0)] {
        assert_eq!(sglang(&text).prefill_prealloc_queue, Some(queue), "{text}");
    }
    for text in ["vllm:generation_tokens 5\n", "vllm:generation_tokens_total 5\n"] {
        assert_eq!(vllm(text).generation_tokens, Some(5.0), "{text}");
    }
    let v0 = vllm("vllm:avg_generation_throughput_toks_per_s 10\nvllm:avg_prompt_throughput_toks_per_s 20\n");
    assert_eq!((v0.generation_tps, v0.prompt_tps), (Some(10.0), Some(20.0)));
}

#[test]
fn r54_a_missing_metric_is_named() {
    let all = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n\
               vllm:generation_tokens_total 0\nvllm:prompt_tokens_total 0\n";
    assert_eq!(vllm(all).missing, Vec::<&str>::new());
    assert_eq!(vllm(&all.replace("num_requests_running", "running_requests")).missing, ["num_requests_running"]);
    assert_eq!(vllm(&all.replace("usage_perc 0", "usage_perc NaN")).missing, ["kv_cache_usage_perc"]);
    assert_eq!(vllm("").missing.len(), 5);
    assert_eq!(sglang("").missing.len(), 4);
    assert_eq!(parse_page(b"", Engine::Trtllm, "m").missing, ["kv_cache_usage_perc"]);
    assert_eq!(parse_page(b"", Engine::Other, "m").missing, Vec::<&str>::new());
}

#[test]
fn r54_spellings_of_a_sample() {
    for (line, value) in [
        ("vllm:num_requests_running 3", Some(3.0)),
        ("vllm:num_requests_running{} 3", Some(3.0)),
        ("vllm:num_requests_running{engine=\"0\",} 3", Some(3.0)),
        ("  vllm:num_requests_running\t3 ", Some(3.0)),
        ("vllm:num_requests_running{engine=\"0\"}3", Some(3.0)),
        ("vllm:num_requests_running 3\r", Some(3.0)),
        ("vllm:num_requests_running 3 1700000000000", Some(3.0)),
        ("vllm:num_requests_running 3 # {trace_id=\"x\"} 7 1700000000.5", Some(3.0)),
        ("vllm:num_requests_running{a=\"}\"} 3", Some(3.0)),
        ("vllm:num_requests_running{a=\"\\\"} 9\"} 3", Some(3.0)),
        ("vllm:num_requests_running{a=\"\\\\\"} 3", Some(3.0)),
        ("vllm:num_requests_running 3e0", Some(3.0)),
        ("vllm:num_requests_running NaN", None),
        ("vllm:num_requests_running +Inf", None),
        ("vllm:num_requests_running -Inf", None),
        ("vllm:num_requests_running -1", None),
        ("vllm:num_requests_running", None),
        ("vllm:num_requests_running ", None),
        ("vllm:num_requests_running{engine=\"0\" 3", None),
        ("vllm:num_requests_running{engine=\"0", None),
        ("vllm:num_requests_running x", None),
        ("vllm:num_requests_running_max 3", None),
        ("# vllm:num_requests_running 3", None),
        ("xvllm:num_requests_running 3", None),
    ] {
        assert_eq!(vllm(line).running, value, "{line}");
        let page = vllm(&format!("\n\nother 1\n{line}\nvllm:num_requests_waiting 1\n# EOF\n"));
        assert_eq!((page.running, page.waiting), (value, Some(1.0)), "{line}");
    }
}

#[test]
fn r54_ranks_are_summed_and_usage_is_the_fullest_ones() {
    let page = vllm(
        "vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 3\n\
         vllm:num_requests_running{engine=\"1\",model_name=\"tiny\"} 4\n\
         vllm:num_requests_running{engine=\"2\",model_name=\"tiny\"} NaN\n\
         vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.2\n\
         vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"tiny\"} 0.9\n",
    );
    assert_eq!((page.running, page.kv_usage), (Some(7.0), Some(0.9)));
    assert_eq!(vllm("vllm:kv_cache_usage_perc 1.5\n").kv_usage, Some(1.0));
}

#[test]
fn one_sglang_rank_speaks_for_its_data_parallel_group() {
    let line = |name: &str, dp: Option<u32>, tp: u32, value: f64| {
        let dp = dp.map(|dp| format!("dp_rank=\"{dp}\",")).unwrap_or_default();
        format!("sglang:{name}{{{dp}model_name=\"tiny\",pp_rank=\"0\",tp_rank=\"{tp}\"}} {value}\n")
    };
    let groups: String = [(0, 1, 3.0), (0, 0, 3.0), (1, 5, 4.0), (1, 4, 4.0)]
        .map(|(dp, tp, value)| line("num_running_reqs", Some(dp), tp, value))
        .concat();
    assert_eq!(sglang(&groups).running, Some(7.0), "all schedulers report");
    let first_only = [line("num_running_reqs", Some(0), 0, 3.0), line("num_running_reqs", Some(1), 4, 4.0)].concat();
    assert_eq!(sglang(&first_only).running, Some(7.0), "the first rank of each group reports");
    let plain = [line("num_running_reqs", None, 0, 3.0), line("num_running_reqs", None, 1, 3.0)].concat();
    assert_eq!(sglang(&plain).running, Some(3.0), "tensor parallelism alone");
    let usage = [line("token_usage", Some(0), 0, 0.1), line("token_usage", Some(1), 1, 0.7)].concat();
    assert_eq!(sglang(&usage).kv_usage, Some(0.7));
}

/// The series with the fewest labels are the total; what is broken down by further ones is part of it, beside it or in its
/// place.
#[test]
fn breakdowns_are_not_added_to_their_total() {
    const SGLANG: &str = "engine_type=\"unified\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"";
    let line = |name: &str, labels: &str, more: &str, value: u32| format!("{name}{{{labels}{more}}} {value}.0\n");
    let running = |more: &str, value| line("sglang:num_running_reqs", SGLANG, more, value);
    let queued = |more: &str, value| line("sglang:num_queue_reqs", SGLANG, more, value);
    let tokens = |more: &str, value| {
        line("sglang:generation_tokens_total", "engine_type=\"unified\",model_name=\"tiny\"", more, value)
    };
    let of_rank = |rank: u32, more: &str, value| {
        let labels = format!("dp_rank=\"{rank}\",model_name=\"tiny\",tp_rank=\"{rank}\"");
        line("sglang:num_running_reqs", &labels, more, value)
    };
    let by_priority = [running(",priority=\"0\"", 7), running(",priority=\"5\"", 3)].concat();
    for (what, page, expected) in [
        ("the total first", running("", 10) + &by_priority, [Some(10.0), None, None]),
        ("the total last", by_priority.clone() + &running("", 10), [Some(10.0), None, None]),
        ("an empty label is none", running(",priority=\"\"", 10) + &by_priority, [Some(10.0), None, None]),
        ("no total", by_priority.clone(), [Some(10.0), None, None]),
        ("a total of nothing", running("", 0) + &running(",priority=\"0\"", 0), [Some(0.0), None, None]),
        (
            "two breakdowns of one total",
            by_priority.clone() + &running(",kind=\"chat\"", 10) + &running("", 10),
            [Some(10.0), None, None],
        ),
        (
            "two breakdowns without total",
            by_priority.clone() + &running(",kind=\"chat\"", 10),
            [Some(10.0), None, None],
        ),
        (
            "a breakdown within a breakdown",
            by_priority.clone() + &running(",kind=\"chat\",priority=\"0\"", 7),
            [Some(10.0), None, None],
        ),
        ("in the queue", queued("", 4) + &queued(",priority=\"1\"", 4), [None, Some(4.0), None]),
        (
            "by kind of request, as 0.5.23 does without total",
            tokens(",is_streaming=\"false\"", 14) + &tokens(",is_streaming=\"true\"", 6),
            [None, None, Some(20.0)],
        ),
        (
            "and beside a total",
            tokens("", 20) + &tokens(",is_streaming=\"false\"", 14) + &tokens(",is_streaming=\"true\"", 6),
            [None, None, Some(20.0)],
        ),
        (
            "of each data-parallel group",
            of_rank(0, "", 4)
                + &of_rank(0, ",priority=\"1\"", 4)
                + &of_rank(1, "", 6)
                + &of_rank(1, ",priority=\"2\"", 6),
            [Some(10.0), None, None],
        ),
        ("a total over all groups", of_rank(0, "", 4) + &of_rank(1, "", 6) + &running("", 9), [Some(10.0), None, None]),
    ] {
        let page = sglang(&page);
        assert_eq!([page.running, page.waiting, page.generation_tokens], expected, "{what}");
    }

    let engine = |engine: u32, more: &str, value: f64| {
        format!("vllm:num_requests_running{{engine=\"{engine}\",model_name=\"tiny\"{more}}} {value:?}\n")
    };
    let page =
        [engine(0, "", 3.0), engine(1, "", 4.0), engine(0, ",priority=\"1\"", 3.0), engine(1, ",priority=\"1\"", 4.0)];
    assert_eq!(vllm(&page.concat()).running, Some(7.0));
    let sum_of_engines = "vllm:num_requests_running{model_name=\"tiny\"} 7.0\n".to_owned() + &page.concat();
    assert_eq!(vllm(&sum_of_engines).running, Some(7.0), "a total over the engines of a pod");
    let usage = "vllm:kv_cache_usage_perc{model_name=\"tiny\",tier=\"cpu\"} 0.9\nvllm:kv_cache_usage_perc{model_name=\"tiny\"} 0.2\n";
    assert_eq!(vllm(usage).kv_usage, Some(0.2), "a share of a part is not that of the whole");
    let finished = "vllm:request_prefill_time_seconds_sum{model_name=\"tiny\"} 4\n\
                    vllm:request_prefill_time_seconds_sum{model_name=\"tiny\",priority=\"1\"} 4\n\
                    vllm:request_prefill_time_seconds_count{model_name=\"tiny\"} 2\n";
    assert_eq!(vllm(finished).prefill_seconds_mean, Some(2.0));

    let trtllm = "trtllm_num_requests_running{engine_type=\"trtllm\",model_name=\"undefined\"} 5\n\
                  trtllm_num_requests_running{engine_type=\"trtllm\",model_name=\"undefined\",priority=\"1\"} 5\n\
                  trtllm_generation_tokens_total{model_name=\"undefined\",finished_reason=\"stop\"} 8\n\
                  trtllm_generation_tokens_total{model_name=\"undefined\",finished_reason=\"length\"} 1\n";
    let page = parse_page(trtllm.as_bytes(), Engine::Trtllm, "tiny");
    assert_eq!((page.running, page.generation_tokens), (Some(5.0), Some(9.0)));
}

#[test]
fn other_models_series_count_only_when_none_is_ours() {
    let series = |model: &str, value: f64| format!("vllm:num_requests_running{{model_name=\"{model}\"}} {value}\n");
    for (text, expected) in [
        (series("tiny", 1.0) + &series("other", 5.0), 1.0),
        (series("other", 5.0) + &series("tiny", 0.0), 0.0),
        (series("undefined", 2.0) + &series("other", 5.0), 2.0),
        (series("adapter-a", 2.0) + &series("adapter-b", 5.0), 7.0),
        ("vllm:num_requests_running 4\n".to_owned() + &series("other", 5.0), 4.0),
        ("vllm:num_requests_running 9\n".to_owned() + &series("tiny", 4.0) + &series("other", 5.0), 4.0),
    ] {
        assert_eq!(vllm(&text).running, Some(expected), "{text}");
    }
    let text =
        "vllm:num_requests_running{model_name=\"a\\\\b\\\"c\\nd\"} 1\nvllm:num_requests_running{model_name=\"x\"} 5\n";
    assert_eq!(parse_page(text.as_bytes(), Engine::Vllm, "a\\b\"c\nd").running, Some(1.0));
}

#[test]
fn a_histogram_without_observations_or_with_a_broken_sum_has_no_mean() {
    for (sum, count, mean) in
        [("0", "0", None), ("1", "0", None), ("-7519.4", "17", None), ("NaN", "1", None), ("3", "2", Some(1.5))]
    {
        let text =
            format!("vllm:request_prefill_time_seconds_sum {sum}\nvllm:request_prefill_time_seconds_count {count}\n");
        assert_eq!(vllm(&text).prefill_seconds_mean, mean, "{sum} / {count}");
    }
}

#[test]
fn bytes_that_are_no_text_do_not_spoil_the_page() {
    let page = parse_page(b"\xff\xfe\nvllm:num_requests_running{x=\"\xff\"} 3\n", Engine::Vllm, "tiny");
    assert_eq!(page.running, Some(3.0));
}

proptest! {
    #[test]
    fn any_bytes_are_survived_and_values_are_sane(
        lines in proptest::collection::vec(
            r#"(vllm:num_requests_running|vllm:kv_cache_usage_perc|sglang:token_usage|sglang:num_queue_reqs)?(_total)?(\{?[a-z_]{0,10}="?[^\n]{0,8}"?,?\}?)? ?[0-9+.eINaf-]{0,6}"#, 0..30)
    ) {
        let text = lines.join("\n");
        for engine in [Engine::Vllm, Engine::Sglang, Engine::Trtllm, Engine::Other] {
            let page = parse_page(text.as_bytes(), engine, "m");
            for value in [page.running, page.waiting, page.kv_usage].into_iter().flatten() {
                prop_assert!(value.is_finite() && value >= 0.0);
            }
            prop_assert!(page.kv_usage.is_none_or(|usage| usage <= 1.0));
        }
    }
}

/// vLLM leaves its former reports of adapters on the page; the value is the time of each.
#[test]
fn the_latest_report_of_adapters_counts() {
    let line = |max: u32, running: &str, waiting: &str, at: &str| {
        format!(
            "vllm:lora_requests_info{{max_lora=\"{max}\",running_lora_adapters=\"{running}\",\
             waiting_lora_adapters=\"{waiting}\"}} {at}\n"
        )
    };
    let page = [line(4, "old", "", "1.7e9"), line(2, "a,b", "c", "1.8e9"), line(4, "older", "", "1.6e9")].concat();
    let adapters = parse_page(page.as_bytes(), Engine::Vllm, "tiny").adapters.unwrap();
    assert_eq!(adapters, Adapters::new(2, ["a,b", "c"]));
    assert!(["a", "b", "c"].iter().all(|name| adapters.has(name)) && !adapters.has("old") && !adapters.has_room());
    assert!(Adapters::new(2, ["a", ""]).has_room());
    assert_eq!(parse_page(line(1, "", "", "NaN").as_bytes(), Engine::Vllm, "tiny").adapters, None);
    assert_eq!(parse_page(page.as_bytes(), Engine::Sglang, "tiny").adapters, None);
}
