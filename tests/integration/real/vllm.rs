//! A real vLLM pair that moves KV with NIXL, and a plain server beside it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::answers::{Api, Question, Said, failure, success};
use super::relay::{Relay, Way};
use super::servers::{Server, Servers};
use super::{PATIENCE, asked_for, options, scenario};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::Call;
use crate::harness::oracle::oracle;
use crate::harness::{eventually, within_time};

/// The lease of the prefill server in seconds: less than vLLM's 30, since its end is waited for. Not much less: on a busy
/// machine the decode server itself has let ten seconds pass between the request and the fetching of its blocks.
const LEASE_SECONDS: u64 = 20;

/// Blocks of 32 tokens that the prefill server has: few, so that freed ones are soon written over.
const BLOCKS: u64 = 160;

/// The most tokens of one prompt and its answer.
const CONTEXT: u64 = 4096;

#[tokio::test(flavor = "multi_thread")]
async fn real_vllm_over_nixl() {
    if !asked_for("TANDEM_REAL_VLLM") {
        return;
    }
    let (lease, blocks) = (LEASE_SECONDS.to_string(), BLOCKS.to_string());
    let env = [("TANDEM_REAL_KV_LEASE_SECONDS", lease.as_str()), ("TANDEM_REAL_KV_BLOCKS", blocks.as_str())];
    let servers = Servers::start("vllm", &env).await;
    scenario("greedy answers equal the plain server's", greedy_answers(&servers)).await;
    scenario("client hand-offs kill nobody", client_hand_offs(&servers)).await;
    scenario("a client that leaves mid-stream frees the blocks", leaves_mid_stream(&servers)).await;
    scenario("a client that leaves during prefill frees the blocks", leaves_during_prefill(&servers)).await;
    scenario("an expired lease by hand gives another answer", expired_by_hand(&servers)).await;
    scenario("an expired lease through Tandem cannot happen", expired_through_tandem(&servers)).await;
    // Last, since the prefill server does not come back.
    scenario("prefill killed between the legs", prefill_killed(&servers)).await;
}

/// Tandem and Envoy before the pair, without relays.
async fn before(servers: &Servers) -> Fleet {
    let (prefill, decode) = (servers.prefill.address, servers.decode.address);
    servers.fleet(prefill, decode, |pod| pod, options()).await
}

/// Prompt tokens whose KV the server was given by another one.
async fn transferred(server: &Server) -> f64 {
    server.metrics().await.sum("vllm:prompt_tokens_by_source_total", &[("source", "external_kv_transfer")])
}

/// Hand-offs that nobody fetched in time.
async fn expired(server: &Server) -> f64 {
    server.metrics().await.sum("vllm:nixl_num_kv_expired_reqs_total", &[])
}

/// Running and waiting requests, and the used share of the KV cache.
async fn load(server: &Server) -> [f64; 3] {
    let metrics = server.metrics().await;
    ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
        .map(|gauge| metrics.sum(gauge, &[]))
}

/// Waits until the server works on nothing and holds no blocks; how long that took.
async fn idle(server: &Server, limit: Duration) -> Duration {
    let since = Instant::now();
    eventually(limit, "the server is idle and its blocks are free", async || {
        // The gauges are written when the engine takes a step, and an idle engine takes none.
        Question::fresh(Api::Completions, 1, 1).ask(&server.base(), false).await;
        (load(server).await == [0.0; 3]).then_some(())
    })
    .await;
    since.elapsed()
}

async fn greedy_answers(servers: &Servers) {
    // Or the comparison below proves nothing: what comes out must depend on the first words of the prompt too.
    let long = Question::fresh(Api::Completions, 100, 24);
    let other = Question { prompt: format!("north {}", long.prompt), ..long.clone() };
    let plain = servers.plain.base();
    assert_ne!(long.ask(&plain, false).await.text, other.ask(&plain, false).await.text);

    let fleet = before(servers).await;
    for path in fleet.paths() {
        for api in Api::ALL {
            for stream in [false, true] {
                // Around one block of 32 tokens, and many of them.
                for words in [14, 300] {
                    let question = Question::fresh(api, words, 24);
                    let before = transferred(&servers.decode).await;
                    let call = question.call(&path, stream, &Value::Null);
                    let answer = within_time(PATIENCE, "an answer", call.try_send()).await.expect("an answer");
                    assert_eq!(answer.header("target-pod"), "decode");
                    assert_eq!(answer.header("prefill-target-pod"), "prefill");
                    let said = success(answer, stream).await;
                    assert_eq!(said, question.ask(&plain, stream).await, "{path} {question:?}");
                    let prompt = said.prompt_tokens as f64;
                    let grown = eventually(PATIENCE, "the transfer is counted", async || {
                        Some(transferred(&servers.decode).await - before).filter(|grown| *grown > 0.0)
                    });
                    assert_eq!(grown.await, prompt, "{path} {question:?}");
                }
            }
        }
    }
    oracle(&fleet.tandems, &[]).await;
    idle(&servers.prefill, PATIENCE).await;
    assert_eq!(expired(&servers.prefill).await, 0.0, "all hand-offs were fetched");
}

/// Each of these bodies, sent to the decode server itself, ends it.
async fn client_hand_offs(servers: &Servers) {
    let fleet = before(servers).await;
    let bare = json!({"do_remote_prefill": true});
    let empty = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    for path in fleet.paths() {
        for api in Api::ALL {
            for hand_off in [&bare, &empty] {
                for strategy in ["pd", "random"] {
                    let question = Question::fresh(api, 30, 8);
                    let call = question.call(&path, false, &json!({"kv_transfer_params": hand_off}));
                    let call = call.header("routing-strategy", strategy);
                    let answer = within_time(PATIENCE, "an answer", call.try_send()).await.expect("an answer");
                    let said = success(answer, false).await;
                    assert_eq!(said, question.ask(&servers.plain.base(), false).await, "{path} {strategy}");
                }
                let unknown = json!({"kv_transfer_params": hand_off, "model": "nobody-has-this"});
                let call = Question::fresh(api, 30, 8).call(&path, false, &unknown);
                let answer = call.send().await;
                assert!((400..500).contains(&answer.status.as_u16()), "{}", answer.status);
            }
            servers.decode.assert_healthy().await;
        }
    }
    // The server answers, and not only says that it could.
    Question::fresh(Api::Chat, 30, 8).ask(&servers.decode.base(), false).await;
    oracle(&fleet.tandems, &[]).await;
}

async fn leaves_mid_stream(servers: &Servers) {
    let fleet = before(servers).await;
    for path in fleet.paths() {
        let generated = async || servers.decode.metrics().await.sum("vllm:generation_tokens_total", &[]);
        let (before, expired_before) = (generated().await, expired(&servers.prefill).await);
        let question = Question::fresh(Api::Chat, 200, 3000);
        let call = question.call(&path, true, &Value::Null);
        let answer = within_time(PATIENCE, "an answer", call.try_send()).await.expect("an answer");
        assert_eq!(answer.status, 200);
        let mut events = answer.events();
        for _ in 0..5 {
            assert!(events.next().await.is_some());
        }
        events.abandon();
        let decode = idle(&servers.decode, PATIENCE).await;
        let prefill = idle(&servers.prefill, PATIENCE).await;
        let made = generated().await - before;
        assert!(made < 2900.0, "{made} tokens: nobody told the decode server");
        assert_eq!(expired(&servers.prefill).await, expired_before);
        println!("  {path}: decode idle after {decode:?}, prefill {prefill:?}, {made} of 3000 tokens were made");
    }
    oracle(&fleet.tandems, &[]).await;
}

async fn leaves_during_prefill(servers: &Servers) {
    let fleet = before(servers).await;
    for path in fleet.paths() {
        let expired_before = expired(&servers.prefill).await;
        // Work that keeps the prefill server busy: our request waits behind it, or shares its steps.
        let mut crowd = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let (base, question) = (servers.prefill.base(), Question::fresh(Api::Completions, 1500, 1));
            crowd.spawn(async move { question.ask(&base, false).await });
        }
        let question = Question::fresh(Api::Chat, 1500, 500);
        let call = tokio::spawn(question.call(&path, false, &Value::Null).try_send());
        let requests = "gateway_prefill_outstanding_requests";
        eventually(PATIENCE, "the prefill leg is under way", async || {
            for tandem in &fleet.tandems {
                if tandem.metrics().await.sum(requests, &[]) > 0.0 {
                    return Some(());
                }
            }
            None
        })
        .await;
        call.abort();
        assert!(call.await.is_err_and(|error| error.is_cancelled()), "no answer came before the client left");
        while crowd.join_next().await.transpose().expect("the crowd is served").is_some() {}
        // Well before the lease would end: the blocks were freed, and not given up.
        let prefill = idle(&servers.prefill, Duration::from_secs(LEASE_SECONDS / 2)).await;
        let decode = idle(&servers.decode, PATIENCE).await;
        assert_eq!(expired(&servers.prefill).await, expired_before);
        println!("  {path}: prefill idle {prefill:?} after its other work, decode {decode:?}");
    }
    oracle(&fleet.tandems, &[]).await;
}

/// Waits until the prefill server has given up one more hand-off than `before`, then writes over all its blocks.
async fn lose_the_blocks(prefill: &Server, before: f64) {
    eventually(PATIENCE, "the lease ends", async || (expired(prefill).await > before).then_some(())).await;
    let mut written = 0;
    while written < BLOCKS * 32 + CONTEXT {
        written += Question::fresh(Api::Completions, 1500, 1).ask(&prefill.base(), false).await.prompt_tokens;
    }
}

/// The trap itself: what a hand-off is worth after its lease, when nobody is careful. No server says a word.
async fn expired_by_hand(servers: &Servers) {
    let question = Question::fresh(Api::Completions, 120, 24);
    let plain = question.ask(&servers.plain.base(), false).await;
    let before = expired(&servers.prefill).await;
    let wanted = json!({"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false,
        "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null}});
    let call = question.call(&servers.prefill.base(), false, &wanted);
    let answer = within_time(PATIENCE, "a prefill", call.try_send()).await.expect("an answer");
    let prefilled = answer.json().await;
    let hand_off = json!({"kv_transfer_params": prefilled["kv_transfer_params"]});
    assert!(hand_off["kv_transfer_params"].is_object(), "{prefilled}");
    lose_the_blocks(&servers.prefill, before).await;
    let said = question.ask_with(&servers.decode.base(), false, &hand_off).await;
    assert_eq!(said.prompt_tokens, plain.prompt_tokens);
    assert_ne!(said.text, plain.text, "the blocks were written over");
    println!("  200, and another text: {:?} instead of {:?}", said.text, plain.text);
}

/// Envoy does not give up a replica that sleeps, as it soon would.
fn trusting(envoy: &mut Value) {
    for cluster in envoy["static_resources"]["clusters"].as_array_mut().expect("clusters") {
        if cluster["name"] == "tandem" {
            cluster["health_checks"][0]["unhealthy_threshold"] = json!(1000);
            let protocol = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
            let options = &mut cluster["typed_extension_protocol_options"][protocol];
            let http2 = &mut options["explicit_http_config"]["http2_protocol_options"];
            assert!(http2.as_object_mut().expect("options").remove("connection_keepalive").is_some());
        }
    }
}

/// The same through a gateway that slept between the prefill answer and the hand-over.
async fn expired_through_tandem(servers: &Servers) {
    let relay = Relay::start(servers.prefill.address).await;
    let mut options = FleetOptions { replicas: 1, edit_envoy: Some(trusting), ..options() };
    // Everybody waits for longer than the gateway sleeps.
    for (name, seconds) in [("TANDEM_HANDOFF_DEADLINE_SECONDS", "2"), ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "120")] {
        options.env.push((name.to_owned(), seconds.to_owned()));
    }
    let fleet = servers.fleet(relay.address(), servers.decode.address, |pod| pod, options).await;
    for (index, path) in fleet.paths().into_iter().enumerate() {
        let question = Question::fresh(Api::Chat, 120, 24);
        let plain = question.ask(&servers.plain.base(), false).await;
        let expired_before = expired(&servers.prefill).await;
        relay.hold(Way::Answers);
        let asked = question.clone();
        let to = path.clone();
        let call = tokio::spawn(async move { within_time(PATIENCE, "an answer", asked.ask(&to, false)).await });
        relay.wait_held(Way::Answers, 1).await;
        // The answer reaches a gateway that sleeps: it lies in the socket while the lease runs out.
        fleet.tandems[0].stop();
        relay.release(Way::Answers);
        lose_the_blocks(&servers.prefill, expired_before).await;
        fleet.tandems[0].cont();
        let said: Said = call.await.expect("the caller's task");
        assert_eq!(said, plain, "{path}");
        let again = fleet.tandems[0].metrics().await.sum("tandem_retries_total", &[("reason", "handoff_expired")]);
        println!("  {path}: the plain server's answer, after {again} hand-offs so far were too old");
        assert_eq!(again, (index + 1) as f64);
    }
    oracle(&fleet.tandems, &[]).await;
}

async fn prefill_killed(servers: &Servers) {
    let relay = Relay::start(servers.decode.address).await;
    let fleet = servers.fleet(servers.prefill.address, relay.address(), |pod| pod, options()).await;
    relay.hold(Way::Requests);
    let mut calls = Vec::new();
    for path in fleet.paths() {
        for api in Api::ALL {
            for stream in [false, true] {
                let call = Question::fresh(api, 60, 24).call(&path, stream, &Value::Null);
                let name = format!("{path} {api:?} {}", if stream { "streamed" } else { "whole" });
                calls.push((name, tokio::spawn(call.try_send())));
            }
        }
    }
    // Each of them has been prefilled, and its hand-off is on its way.
    relay.wait_held(Way::Requests, calls.len()).await;
    servers.prefill.kill9();
    relay.release(Way::Requests);
    for (name, call) in calls {
        let answer = within_time(PATIENCE, &name, call).await.expect("the call's task").expect("an answer");
        println!("  {name}: {}", failure(answer).await);
    }
    // A new request learns at once that there is no prefill server.
    for path in fleet.paths() {
        let since = Instant::now();
        let answer = Question::fresh(Api::Chat, 60, 24).call(&path, false, &Value::Null).send().await;
        println!("  {path}, afterwards: {} after {:?}", failure(answer).await, since.elapsed());
        assert!(since.elapsed() < Duration::from_secs(5));
    }
    servers.decode.assert_healthy().await;
    let question = Question::fresh(Api::Chat, 60, 24);
    let direct = Call::get(&servers.decode.base(), "/v1/models").send().await;
    assert_eq!(direct.status, 200);
    let (decode, plain) = (servers.decode.base(), servers.plain.base());
    assert_eq!(question.ask(&decode, false).await, question.ask(&plain, false).await);
    idle(&servers.decode, PATIENCE).await;
    oracle(&fleet.tandems, &[]).await;
}
