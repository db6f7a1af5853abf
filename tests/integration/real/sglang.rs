//! A real SGLang pair that moves KV with Mooncake over TCP, and a plain server beside it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::answers::{Api, Question, failure, success};
use super::relay::{Relay, Way};
use super::servers::{Server, Servers};
use super::{PATIENCE, asked_for, options, scenario};
use crate::harness::fleet::Fleet;
use crate::harness::http::Call;
use crate::harness::oracle::oracle;
use crate::harness::pods::PodManifest;
use crate::harness::{eventually, within_time};

/// How soon a client has to learn that its prefill failed. The decode server by itself takes 12 to 14 seconds.
const SECONDS: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread")]
async fn real_sglang_over_mooncake() {
    if !asked_for("TANDEM_REAL_SGLANG") {
        return;
    }
    let servers = Servers::start("sglang", &[]).await;
    scenario("greedy answers equal the plain server's", greedy_answers(&servers)).await;
    scenario("both legs go out at once", both_at_once(&servers)).await;
    scenario("client hand-offs are not used", client_hand_offs(&servers)).await;
    scenario("an unknown model is refused by the gateway", unknown_model(&servers)).await;
    scenario("a client that leaves mid-stream frees the slots", leaves_mid_stream(&servers)).await;
    scenario("a client that leaves before the transfer frees the slots", leaves_before_transfer(&servers)).await;
    // Last, since the prefill server does not come back.
    scenario("prefill killed before the transfer", prefill_killed(&servers)).await;
}

/// Tandem and Envoy before the pair, reached at these addresses.
async fn before(servers: &Servers, relays: Option<(&Relay, &Relay)>) -> Fleet {
    let direct = (servers.prefill.address, servers.decode.address);
    let (prefill, decode) = relays.map_or(direct, |(prefill, decode)| (prefill.address(), decode.address()));
    let port = servers.prefill.bootstrap_port.expect("the port of the bootstrap server").to_string();
    let change = |pod: PodManifest| pod.engine("sglang").annotation("model.aibrix.ai/sglang-bootstrap-port", &port);
    servers.fleet(prefill, decode, change, options()).await
}

/// Requests whose KV the prefill server has moved.
async fn transfers(servers: &Servers) -> f64 {
    servers.prefill.metrics().await.sum("sglang:kv_transfer_total_mb_count", &[])
}

/// Requests of either API that the server has received.
async fn received(server: &Server) -> f64 {
    let metrics = server.metrics().await;
    Api::ALL.map(|api| metrics.sum("sglang:http_requests_total", &[("endpoint", api.path())])).iter().sum()
}

/// Requests in any of the server's queues, those that run, and KV slots in use (cached prompts do not count).
async fn load(server: &Server) -> [u64; 4] {
    let page = Call::get(&server.base(), "/v1/loads").send().await.json().await;
    let load = &page["loads"][0];
    let count = |value: &Value| value.as_u64().unwrap_or_default();
    let inflight = count(&load["disaggregation"]["prefill_inflight_queue_reqs"]);
    ["num_running_reqs", "num_waiting_reqs", "num_used_tokens"]
        .map(|key| load[key].as_u64().unwrap_or_else(|| panic!("no {key} in {page}")))
        .into_iter()
        .chain([inflight])
        .collect::<Vec<_>>()
        .try_into()
        .expect("four numbers")
}

/// Waits until the server works on nothing and holds no slots; how long that took.
async fn idle(server: &Server, limit: Duration) -> Duration {
    let since = Instant::now();
    eventually(limit, "the server is idle and its slots are free", async || {
        (load(server).await == [0; 4]).then_some(())
    })
    .await;
    since.elapsed()
}

async fn both_idle(servers: &Servers) -> [Duration; 2] {
    [idle(&servers.prefill, PATIENCE).await, idle(&servers.decode, PATIENCE).await]
}

async fn greedy_answers(servers: &Servers) {
    // Or the comparison below proves nothing: what comes out must depend on the first words of the prompt too.
    let long = Question::fresh(Api::Completions, 100, 24);
    let other = Question { prompt: format!("north {}", long.prompt), ..long.clone() };
    let plain = servers.plain.base();
    assert_ne!(long.ask(&plain, false).await.text, other.ask(&plain, false).await.text);

    let fleet = before(servers, None).await;
    for path in fleet.paths() {
        for api in Api::ALL {
            for stream in [false, true] {
                for words in [14, 300] {
                    let question = Question::fresh(api, words, 24);
                    let before = transfers(servers).await;
                    let call = question.call(&path, stream, &Value::Null);
                    let answer = within_time(PATIENCE, "an answer", call.try_send()).await.expect("an answer");
                    assert_eq!(answer.header("target-pod"), "decode");
                    assert_eq!(answer.header("prefill-target-pod"), "prefill");
                    let said = success(answer, stream).await;
                    assert_eq!(said, question.ask(&plain, stream).await, "{path} {question:?}");
                    let grown = eventually(PATIENCE, "the transfer is counted", async || {
                        Some(transfers(servers).await - before).filter(|grown| *grown > 0.0)
                    });
                    assert_eq!(grown.await, 1.0, "{path} {question:?}");
                }
            }
        }
    }
    oracle(&fleet.tandems, &[]).await;
    both_idle(servers).await;
}

/// Relays before both servers hold what is sent to them: both requests come, though none has an answer.
async fn both_at_once(servers: &Servers) {
    let (prefill, decode) = (Relay::start(servers.prefill.address).await, Relay::start(servers.decode.address).await);
    let fleet = before(servers, Some((&prefill, &decode))).await;
    for path in fleet.paths() {
        let question = Question::fresh(Api::Chat, 60, 24);
        for relay in [&prefill, &decode] {
            relay.hold(Way::Requests);
        }
        let call = tokio::spawn(question.call(&path, false, &Value::Null).try_send());
        prefill.wait_held(Way::Requests, 1).await;
        decode.wait_held(Way::Requests, 1).await;
        for relay in [&prefill, &decode] {
            relay.release(Way::Requests);
        }
        let answer = within_time(PATIENCE, "an answer", call).await.expect("the call's task").expect("an answer");
        assert_eq!(success(answer, false).await, question.ask(&servers.plain.base(), false).await, "{path}");
    }
    oracle(&fleet.tandems, &[]).await;
}

/// SGLang takes this host for a test that wants no KV at all, and makes text of whatever its slots hold.
async fn client_hand_offs(servers: &Servers) {
    let fleet = before(servers, None).await;
    let fake = json!({"bootstrap_host": "2.2.2.2", "bootstrap_port": 1, "bootstrap_room": 7, "rid": "mine"});
    for path in fleet.paths() {
        for api in Api::ALL {
            let question = Question::fresh(api, 60, 24);
            let said = question.ask_with(&path, false, &fake).await;
            assert_eq!(said, question.ask(&servers.plain.base(), false).await, "{path} {api:?}");
        }
    }
    oracle(&fleet.tandems, &[]).await;
}

/// SGLang itself answers 200 to any name.
async fn unknown_model(servers: &Servers) {
    let fleet = before(servers, None).await;
    let before = [received(&servers.prefill).await, received(&servers.decode).await];
    for path in fleet.paths() {
        for api in Api::ALL {
            let unknown = json!({"model": "nobody-has-this"});
            let answer = Question::fresh(api, 30, 8).call(&path, false, &unknown).send().await;
            let status = answer.status.as_u16();
            assert!((400..500).contains(&status), "{status}");
            assert!(answer.json().await["error"]["message"].is_string());
        }
    }
    assert_eq!(before, [received(&servers.prefill).await, received(&servers.decode).await], "no server was asked");
    oracle(&fleet.tandems, &[]).await;
}

async fn leaves_mid_stream(servers: &Servers) {
    let fleet = before(servers, None).await;
    for path in fleet.paths() {
        let generated = async || servers.decode.metrics().await.sum("sglang:realtime_tokens_total", &[]);
        let before = generated().await;
        let call = Question::fresh(Api::Chat, 200, 3000).call(&path, true, &Value::Null);
        let answer = within_time(PATIENCE, "an answer", call.try_send()).await.expect("an answer");
        assert_eq!(answer.status, 200);
        let mut events = answer.events();
        for _ in 0..5 {
            assert!(events.next().await.is_some());
        }
        events.abandon();
        let [prefill, decode] = both_idle(servers).await;
        let made = generated().await - before;
        assert!(made < 2900.0, "{made} tokens: nobody told the decode server");
        println!("  {path}: decode idle after {:?}, {made} of 3000 tokens were made", prefill + decode);
    }
    oracle(&fleet.tandems, &[]).await;
}

/// The decode server never hears of the request, so the prefill server waits for it; then the client leaves.
async fn leaves_before_transfer(servers: &Servers) {
    let (prefill, decode) = (Relay::start(servers.prefill.address).await, Relay::start(servers.decode.address).await);
    let fleet = before(servers, Some((&prefill, &decode))).await;
    for path in fleet.paths() {
        let asked_before = received(&servers.prefill).await;
        decode.hold(Way::Requests);
        let call = tokio::spawn(Question::fresh(Api::Chat, 60, 24).call(&path, false, &Value::Null).try_send());
        decode.wait_held(Way::Requests, 1).await;
        eventually(PATIENCE, "the prefill server has the request", async || {
            (received(&servers.prefill).await > asked_before && load(&servers.prefill).await != [0; 4]).then_some(())
        })
        .await;
        call.abort();
        assert!(call.await.is_err_and(|error| error.is_cancelled()), "no answer came before the client left");
        decode.release(Way::Requests);
        let [prefill, decode] = both_idle(servers).await;
        println!("  {path}: prefill idle after {prefill:?}, decode {decode:?} later");
    }
    oracle(&fleet.tandems, &[]).await;
}

async fn prefill_killed(servers: &Servers) {
    let (prefill, decode) = (Relay::start(servers.prefill.address).await, Relay::start(servers.decode.address).await);
    let fleet = before(servers, Some((&prefill, &decode))).await;
    let asked_before = received(&servers.prefill).await;
    decode.hold(Way::Requests);
    let mut calls = Vec::new();
    for path in fleet.paths() {
        for stream in [false, true] {
            let call = Question::fresh(Api::Chat, 60, 24).call(&path, stream, &Value::Null);
            let name = format!("{path} {}", if stream { "streamed" } else { "whole" });
            calls.push((name, tokio::spawn(call.try_send())));
        }
    }
    // The prefill server has all of them and waits for the decode server to ask for its KV.
    decode.wait_held(Way::Requests, calls.len()).await;
    eventually(PATIENCE, "the prefill server has the requests", async || {
        (received(&servers.prefill).await - asked_before >= calls.len() as f64).then_some(())
    })
    .await;
    servers.prefill.kill9();
    decode.release(Way::Requests);
    let killed = Instant::now();
    for (name, call) in calls {
        let answer = within_time(PATIENCE, &name, call).await.expect("the call's task").expect("an answer");
        println!("  {name}: {} after {:?}", failure(answer).await, killed.elapsed());
    }
    assert!(killed.elapsed() < SECONDS, "{:?}", killed.elapsed());
    let free = idle(&servers.decode, PATIENCE).await;
    println!("  decode idle {free:?} after the last answer");
    // The oracle allows a second, and the second abort comes after two.
    oracle(&fleet.tandems, &[]).await;
    for path in fleet.paths() {
        let since = Instant::now();
        let answer = Question::fresh(Api::Chat, 60, 24).call(&path, false, &Value::Null).send().await;
        println!("  {path}, afterwards: {} after {:?}", failure(answer).await, since.elapsed());
        assert!(since.elapsed() < SECONDS);
    }
    assert_eq!(Call::get(&servers.decode.base(), "/v1/models").send().await.status, 200);
    idle(&servers.decode, PATIENCE).await;
}
