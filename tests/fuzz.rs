//! The entries of `fuzz/`, over random changes of known inputs: no fuzzer needed. Without arguments a short round;
//! `TANDEM_FUZZ_SECONDS=600 cargo test --test fuzz` takes that long for each entry, with other numbers every time.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests fail by panicking")]

#[path = "../fuzz/entries.rs"]
mod entries;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use tandem::clock::Clock;
use tandem::knobs::{Environment as _, ProcessEnvironment};
use tandem::rng::Rng;

/// Inputs of the short round, for each entry.
const ROUND: usize = 4000;
/// Inputs do not grow beyond this.
const LONGEST: usize = 4096;

const SEEDS: [&str; 16] = [
    r#"{"model":"m","prompt":"hello","max_tokens":8,"stream":true,"stream_options":{"include_usage":true},"n":1}"#,
    r#"{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"\u00e9\ud83e\udd80"}]},{"role":"assistant","content":null,"tool_calls":[{}]}],"tools":[{"b":1,"a":1.10}],"min_tokens":2}"#,
    r#" { "model" : "m" , "prompt" : [[1,2],[3]] , "kv_transfer_params" : null , "max\u005ftokens" : 1 , "x" : -0.0e5 } "#,
    r#"{"model":"m","input":[{"role":"user","content":"x"}],"instructions":"i","disagg_prefill_resp":{"a":[]},"query":"q","documents":["d"],"best_of":"2"}"#,
    "--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n\0\r\n--x--\r\n",
    "xdata: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}],\"usage\":null}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7}}\r\n\r\ndata: [DONE]\n\n",
    "\u{feff}event: message_start\rdata: {\"message\":{\"usage\":{\"input_tokens\":3}}}\r\revent: ping\ndata: {}\n\nevent: message_delta\ndata: {\"usage\":\ndata: {\"output_tokens\":4}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n: comment\nid: 1\nretry: 5\n\nevent: error\ndata: {\"error\":{\"message\":\"m\"}}\n\n",
    r#"x{"id":"x","choices":[{"finish_reason":"abort"}],"usage":{"prompt_tokens":3,"completion_tokens":4},"error":null,"object":"error"}"#,
    r#"{"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e","remote_block_ids":[[1,2],[]],"remote_request_id":"r","remote_host":"localhost","remote_port":5600},"choices":[]}"#,
    r#"{"error":{"message":"too long","type":"t"},"detail":[{"loc":["body",0],"msg":"m"},"c"],"message":"m"}"#,
    "apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\n  namespace: ns\n  uid: u\n  labels:\n    model.aibrix.ai/name: m\n    model.aibrix.ai/port: \"8000\"\n    role-name: prefill\n    roleset-name: r\n  annotations:\n    model.aibrix.ai/config: '{\"profiles\": {\"default\": {\"routingStrategy\": \"pd\"}}}'\nstatus:\n  podIP: fd00::1\n  conditions: [{type: Ready, status: \"True\"}]\n  containerStatuses: [{restartCount: 1}]\n---\nkind: Service\n",
    r#"{"kind":"List","items":[{"metadata":{"name":"a","labels":{"model.aibrix.ai/name":"m"}},"status":{"podIP":"10.0.0.1"}}]}{"kind":"Pod"}"#,
    "models:\n- name: a/b\n  engine: vllm\n  endpoints: [\"h:1\", \"[::1]:2\", \"10.0.0.1\"]\n- name: c\n  rolesets:\n  - {name: r, prefill: [\"p:1\"], decode: [\"d\"]}\n",
    r#"{"lockedRoutingStrategy":"pd","defaultProfile":"d","profiles":{"d":{"routingStrategy":"pd","routingConfig":{"combined":true,"promptLenBucketMinLength":1,"promptLenBucketMaxLength":2048,"pd":{"prefillRequestTimeout":5,"decodeScoreRatioThreshold":1.5,"minMatchPct":50,"decodeLBWeightRunning":2},"prefixCache":{"standardDeviationFactor":2}}}}}"#,
    "# HELP x\nvllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\nvllm:num_requests_waiting{model_name=\"a\\\"\\\\\\n}\"} 1e3 1700000000\nvllm:kv_cache_usage_perc 0.5\nvllm:generation_tokens_total 10 # {a=\"b\"} 1\nvllm:request_prefill_time_seconds_sum 1\nvllm:request_prefill_time_seconds_count 2\n",
    "sglang:num_running_reqs{tp_rank=\"0\",dp_rank=\"1\"} 3\nsglang:num_running_reqs{tp_rank=\"1\",dp_rank=\"1\"} 3\nsglang:token_usage 1.5\nsglang:gen_throughput NaN\ntrtllm_kv_cache_utilization{} +Inf\n",
];

/// Texts that parsers trip over.
const PIECES: [&str; 24] = [
    "\"",
    "\\",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\n",
    "\r",
    "\r\n\r\n",
    "---\n",
    "null",
    "1e999",
    "-0",
    "\\ud800",
    "\u{feff}",
    "\0",
    "18446744073709551616",
    "é",
    "data:",
    "\"usage\":",
    "[DONE]",
    "&a *a",
];

fn changed(rng: &mut Rng) -> Vec<u8> {
    let mut bytes = SEEDS[rng.below(SEEDS.len())].as_bytes().to_vec();
    for _ in 0..rng.below(8) {
        let at = rng.below(bytes.len() + 1);
        let to = (at + rng.below(32)).min(bytes.len());
        match rng.below(7) {
            0 => drop(bytes.drain(at..to)),
            1 => drop(bytes.splice(at..at, PIECES[rng.below(PIECES.len())].bytes())),
            2 => bytes.truncate(at),
            3 if at < bytes.len() => bytes[at] = rng.next_u64() as u8,
            4 => {
                let piece = bytes[at..to].to_vec();
                let back = rng.below(bytes.len() + 1);
                bytes.splice(back..back, piece);
            }
            5 => {
                let other = SEEDS[rng.below(SEEDS.len())].as_bytes();
                let from = rng.below(other.len());
                bytes.splice(at..at, other[from..(from + rng.below(64)).min(other.len())].iter().copied());
            }
            _ => {
                let piece = PIECES[rng.below(PIECES.len())].repeat(rng.below(200));
                bytes.splice(at..at, piece.bytes());
            }
        }
        bytes.truncate(LONGEST);
    }
    bytes
}

#[test]
fn entries_hold_for_changed_inputs() {
    let long: Option<u64> = ProcessEnvironment.get("TANDEM_FUZZ_SECONDS").and_then(|text| text.parse().ok());
    let first = if long.is_some() { u64::from(std::process::id()) << 32 } else { 1 };
    let clock = Clock::system();
    for (name, entry) in entries::ALL {
        let started = clock.now();
        let more = |count: usize| match long {
            Some(seconds) => clock.now().since(started) < Duration::from_secs(seconds),
            None => count < ROUND,
        };
        let mut rng = Rng::new(first);
        let mut count = 0;
        while more(count) {
            let input = changed(&mut rng);
            let held = catch_unwind(AssertUnwindSafe(|| entry(&input)));
            assert!(held.is_ok(), "{name}, input {count}: {:?}", String::from_utf8_lossy(&input));
            count += 1;
        }
        for seed in SEEDS {
            entry(seed.as_bytes());
        }
        entry(b"");
    }
}
