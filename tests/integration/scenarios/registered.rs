//! What a configuration of the reference gateway may say about strategies and profiles, through Envoy and the front with
//! two replicas: nothing of it is refused.

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Hold};

use super::{ask, chat, fleet_shows, pods_of, settle};
use crate::harness::engines::{MODEL, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::{Call, base};
use crate::harness::pods::PodManifest;
use crate::harness::raw::{Connection, RawServer};
use crate::harness::redis::Redis;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually};

/// Every name that the reference registers (`docs/strategies.md` has the same table), and the one that serves it.
const REGISTERED: &[(&str, &str)] = &[
    ("random", "random"),
    ("least-request", "least-request"),
    ("least-kv-cache", "least-kv-cache"),
    ("least-gpu-cache", "least-gpu-cache"),
    ("least-latency", "least-latency"),
    ("least-utilization", "least-utilization"),
    ("least-busy-time", "least-busy-time"),
    ("throughput", "throughput"),
    ("power-of-two", "power-of-two"),
    ("prefix-cache", "prefix-cache"),
    ("prefix-cache-preble", "prefix-cache-preble"),
    ("session-affinity", "session-affinity"),
    ("load-balance", "load-balance"),
    ("lora-affinity", "lora-affinity"),
    ("vtc-basic", "vtc-basic"),
    ("slo", "least-request"),
    ("slo-pack-load", "least-request"),
    ("slo-least-load", "least-request"),
    ("slo-least-load-pulling", "least-request"),
    // Lists: what cannot be combined stands alone, a name may come twice, and one of weight 0 need not exist.
    ("least-request,slo:5,random", "least-request"),
    ("vtc-basic:2,load-balance", "load-balance,vtc-basic:2"),
    ("random:2,random:3", "random"),
    ("no-such:0,throughput: 2", "throughput"),
];

struct Plain {
    engines: Vec<Engine>,
    fleet: Fleet,
}

async fn plain(count: usize, config: &Value, env: &[(&str, &str)]) -> Plain {
    let (mut engines, mut pods) = (Vec::new(), Vec::new());
    for number in 0..count {
        let engine = start_engine(EngineConfig::combined(MODEL)).await;
        let pod = PodManifest::new(&format!("plain{number}"), MODEL, Engine::address(&engine));
        pods.push(if config.is_null() { pod } else { pod.config(config) });
        engines.push(engine);
    }
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let fleet = Fleet::start(pods, FleetOptions { env, ..FleetOptions::default() }).await;
    let scraped = |page: &Value| pods_of(page).iter().all(|pod| pod["signals"]["fresh"] == true);
    fleet_shows(&fleet.tandems, "all engines are scraped", scraped).await;
    Plain { engines, fleet }
}

impl Plain {
    async fn close(self) {
        settle(&self.fleet.tandems, &self.engines.iter().collect::<Vec<_>>()).await;
    }
}

/// By the header, by the profile, by the lock and by the variable.
#[tokio::test(flavor = "multi_thread")]
async fn every_registered_strategy_serves_wherever_it_is_named() {
    let named = |name: &&(&str, &str)| (name.0.to_owned(), json!({"routingStrategy": name.0}));
    let profiles: serde_json::Map<String, Value> = REGISTERED.iter().map(|name| named(&name)).collect();
    let plain = plain(3, &json!({"profiles": profiles}), &[("ROUTING_ALGORITHM", "slo-least-load")]).await;
    let mut refused = Vec::new();
    for path in plain.fleet.paths() {
        for (name, served) in REGISTERED {
            for header in ["routing-strategy", "config-profile"] {
                let call = ask(&path, chat(MODEL, "hello", 2, false)).header(header, name).header("user", "alice");
                let answer = call.send().await;
                let seen = (answer.status.as_u16(), answer.header("routing-strategy").to_owned());
                if seen != (200, (*served).to_owned()) {
                    refused.push(format!("{header}: {name}: {seen:?}"));
                }
                let hint = answer.header("x-tandem-strategy-note").to_owned();
                let replaced = name.starts_with("slo") || name.contains("slo");
                assert_eq!(hint.contains("is served as least-request"), replaced, "{name}: {hint:?}");
                answer.body().await;
            }
        }
        let answer = ask(&path, chat(MODEL, "hello", 2, false)).send().await;
        assert_eq!((answer.status.as_u16(), answer.header("routing-strategy")), (200, "least-request"));
        answer.body().await;
    }
    assert!(refused.is_empty(), "{refused:#?}");
    plain.close().await;
}

/// The front of a replica.
fn front(tandem: &Tandem) -> String {
    base(tandem.front().expect("a front"))
}

/// Sends a request whose answer is not waited for.
fn send(call: Call) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let answer = call.send().await;
        assert_eq!(answer.status, 200);
        assert!(answer.body().await.complete);
    })
}

/// Requests that the replica knows of, its own and the others'.
fn known(page: &Value) -> u64 {
    let sum = |pod: &Value, whose: &str| {
        ["decodes_pending", "decodes_running"].iter().filter_map(|field| pod[whose][*field].as_u64()).sum::<u64>()
    };
    pods_of(page).iter().map(|pod| sum(pod, "in_flight") + sum(pod, "others")).sum()
}

/// `requestsInflight` counts what all replicas have on a pod: two pods with two each take four requests, whoever sends
/// them, and the fifth is refused on every way in until one has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_per_pod_counts_all_replicas() {
    let redis = Redis::start().await;
    let config = json!({"profiles": {"default": {"routingStrategy": "random", "requestsInflight": 2}}});
    let plain = plain(2, &config, &[("REDIS_URL", &redis.url())]).await;
    let holds: Vec<Hold> = plain.engines.iter().map(Engine::hold).collect();
    let body = || chat(MODEL, "hello", 2, false);
    let mut running = Vec::new();
    for number in 0..4u64 {
        running.push(send(ask(&front(&plain.fleet.tandems[number as usize % 2]), body())));
        let all = format!("{} requests are known everywhere", number + 1);
        fleet_shows(&plain.fleet.tandems, &all, |page| known(page) == number + 1).await;
    }
    assert_eq!(holds.iter().map(Hold::waiting).collect::<Vec<_>>(), [2, 2]);
    let ways = plain.fleet.paths().into_iter().chain([front(&plain.fleet.tandems[1])]);
    for way in ways {
        let answer = ask(&way, body()).send().await;
        assert_eq!(answer.status, 429, "{way}");
        assert_eq!(answer.header("x-error-model-replica-inflight-exceeded"), "true");
        assert_eq!(answer.header("retry-after"), "1");
        let error = answer.json().await;
        assert_eq!(error["error"]["code"], "replica_inflight_exceeded", "{error}");
    }
    holds.into_iter().for_each(Hold::release);
    for request in running {
        request.await.expect("the request");
    }
    fleet_shows(&plain.fleet.tandems, "everything has ended", |page| known(page) == 0).await;
    assert_eq!(ask(&front(&plain.fleet.tandems[1]), body()).send().await.status, 200);
    plain.close().await;
}

/// `vtc-basic`: what one replica gives a user counts at the other, and Redis keeps it no longer than it has to.
#[tokio::test(flavor = "multi_thread")]
async fn users_are_the_same_at_every_replica() {
    let redis = Redis::start().await;
    let env = [("REDIS_URL", redis.url()), ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS", "1".to_owned())];
    let env: Vec<(&str, &str)> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let plain = plain(3, &json!({"profiles": {"default": {"routingStrategy": "vtc-basic"}}}), &env).await;
    let [one, two] = [0, 1].map(|number| front(&plain.fleet.tandems[number]));
    let served = async |way: &str, user: &str| {
        let answer = ask(way, chat(MODEL, "hello", 2, false)).header("user", user).send().await;
        assert_eq!(answer.status, 200);
        let pod = answer.header("target-pod").to_owned();
        assert!(answer.body().await.complete);
        pod
    };
    let exists = async |user: &str| {
        let record = format!(r#"{{"name":"{user}","rpm":1000,"tpm":1000000}}"#);
        redis.command(&["SET", &format!("aibrix-users/{user}"), &record, "EX", "600"]).await;
    };
    let heard = async || plain.fleet.tandems[1].metrics().await.sum("tandem_findings_total", &[("direction", "heard")]);
    // In their first moments, replicas have not agreed yet on the numbers of users: then another user is tried.
    let number = std::cell::Cell::new(0);
    let shared = async || {
        number.set(number.get() + 1);
        let user = format!("user-{}", number.get());
        exists(&user).await;
        let before = heard().await;
        assert_eq!(served(&one, &user).await, "plain0", "a new user is at the first pod");
        eventually(SOON, "the other replica to hear of the user", async || (heard().await > before).then_some(()))
            .await;
        (served(&two, &user).await == "plain1").then_some(())
    };
    eventually(SOON, "a user with tokens to be at the next pod of the other replica", shared).await;
    exists("bob").await;
    assert_eq!(served(&two, "bob").await, "plain0");
    redis.assert_keys_expire().await;
    plain.close().await;
}

/// The gate: a session stays with its pod until that has nine requests more than another.
#[tokio::test(flavor = "multi_thread")]
async fn the_gate_keeps_a_session_from_flooding_its_pod() {
    let plain = plain(2, &Value::Null, &[]).await;
    let way = front(&plain.fleet.tandems[0]);
    let session = |id: &str| {
        let call = ask(&way, chat(MODEL, "hello", 2, false)).header("routing-strategy", "session-affinity");
        if id.is_empty() { call } else { call.header("x-session-id", id) }
    };
    let answer = session("").send().await;
    let (home, id) = (answer.header("target-pod").to_owned(), answer.header("x-session-id").to_owned());
    assert!(answer.body().await.complete);
    let hold = plain.engines[usize::from(home == "plain1")].hold();
    let mut running = Vec::new();
    for number in 1..=9 {
        running.push(send(session(&id)));
        hold.wait_for(number).await;
    }
    let answer = session(&id).header("x-tandem-explain", "1").send().await;
    assert_ne!(answer.header("target-pod"), home, "nine apart is too far");
    assert!(answer.body().await.complete);
    hold.release();
    for request in running {
        request.await.expect("the request");
    }
    assert_eq!(session(&id).send().await.header("target-pod"), home);
    plain.close().await;
}

/// Pods of engine `xdit` serve images and videos under paths of their own; `xllm` serves those of the OpenAI API.
#[tokio::test(flavor = "multi_thread")]
async fn xdit_is_asked_under_its_own_path() {
    let answer =
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
    for (engine, path, expected) in [
        ("xdit", "/v1/images/generations", "POST /generate HTTP/1.1"),
        ("xdit", "/v1/video/generations", "POST /generatevideo HTTP/1.1"),
        ("xllm", "/v1/images/generations", "POST /v1/images/generations HTTP/1.1"),
    ] {
        let server = RawServer::answering(answer).await;
        let pod = PodManifest::new("painter", MODEL, server.address()).engine(engine);
        let fleet = Fleet::start([pod], FleetOptions::default()).await;
        for way in fleet.paths() {
            let body = json!({"model": MODEL, "prompt": "a tram"}).to_string();
            let answer = Call::post(&way, path, body).header("routing-strategy", "random").send().await;
            assert_eq!(answer.status, 200, "{engine} {path} {way}");
            assert!(answer.body().await.complete);
        }
        let heads: Vec<String> = server.connections().iter().map(Connection::head).collect();
        let posts: Vec<&str> =
            heads.iter().filter_map(|head| head.lines().next()).filter(|line| line.starts_with("POST")).collect();
        assert_eq!(posts, [expected; 2], "{engine} {path}");
    }
}
