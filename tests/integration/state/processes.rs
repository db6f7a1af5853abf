//! Whole replicas of the gateway that meet in Redis: deaths, pauses, and what an operator sees.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::{Call, base};
use crate::harness::oracle::oracle;
use crate::harness::redis::Redis;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually};

/// The lease of a replica in the ledger.
const LEASE: Duration = Duration::from_secs(3);

/// One model's part of `/debug/state`.
async fn state(tandem: &Tandem) -> Value {
    let page = tandem.admin_json("/debug/state").await;
    page["models"].as_object().and_then(|models| models.values().next()).cloned().unwrap_or_default()
}

async fn met(tandems: &[Tandem], members: u64) {
    for tandem in tandems.iter().filter(|tandem| tandem.process().status().is_none()) {
        eventually(SOON, "the replicas to meet", async || {
            (state(tandem).await["members"].as_u64() == Some(members)).then_some(())
        })
        .await;
    }
}

fn options(env: &[(&str, &str)]) -> SandboxOptions {
    SandboxOptions::default().env(env)
}

fn stream(front: &str) -> Call {
    let body = serde_json::json!({
        "model": "m", "stream": true, "max_tokens": 4,
        "messages": [{"role": "user", "content": "hello"}],
    });
    Call::post(front, "/v1/chat/completions", body.to_string())
}

fn front(tandem: &Tandem) -> String {
    base(tandem.front().expect("a front"))
}

async fn remote_pods(tandem: &Tandem, wanted: u64) -> Duration {
    let begun = Instant::now();
    eventually(SOON, "the others' work", async || {
        (state(tandem).await["remote_pods"].as_u64() == Some(wanted)).then_some(())
    })
    .await;
    begun.elapsed()
}

/// Requests to the front of a replica that wait at the decode engine.
async fn held(
    sandbox: &Sandbox,
    tandem: &Tandem,
    count: usize,
) -> (tandem_sim::Hold, Vec<tokio::task::JoinHandle<()>>) {
    let hold = sandbox.decode[0].hold();
    let front = front(tandem);
    let requests = (0..count)
        .map(|_| {
            let call = stream(&front);
            tokio::spawn(async move {
                // The replica may die under it.
                if let Ok(answer) = call.try_send().await {
                    answer.body().await;
                }
            })
        })
        .collect();
    hold.wait_for(count).await;
    (hold, requests)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r65_with_redis_two_replicas_share_without_another_switch() {
    let redis = Redis::start().await;
    let (host, port) = (redis.address().ip().to_string(), redis.address().port().to_string());
    let sandbox = Sandbox::start(options(&[("REDIS_HOST", &host), ("REDIS_PORT", &port)])).await;
    let [one, two] = &sandbox.fleet.tandems[..] else { panic!("two replicas") };
    met(&sandbox.fleet.tandems, 2).await;
    let (hold, requests) = held(&sandbox, one, 3).await;
    remote_pods(two, 1).await;
    let page = two.admin_json("/debug/fleet").await;
    let pods = page["models"]["m"]["pods"].as_array().expect("pods");
    let others: u64 = pods.iter().filter_map(|pod| pod["others"]["decodes_running"].as_u64()).sum();
    assert_eq!(others, 3, "{page:#}");
    let own: u64 = pods.iter().filter_map(|pod| pod["in_flight"]["decodes_running"].as_u64()).sum();
    assert_eq!(own, 0, "{page:#}");
    let page = two.admin_json("/debug/state").await;
    assert_eq!((page["plane"].as_str(), page["grade"].as_str()), (Some("redis"), Some("paced")), "{page:#}");
    assert_eq!(state(two).await["leases"].as_array().map(Vec::len), Some(2), "{page:#}");
    let notes = two.admin_json("/readyz").await;
    assert_eq!(notes["notes"].as_array().map(Vec::len), Some(0), "{notes}");
    hold.release();
    for request in requests {
        request.await.expect("a request");
    }
    remote_pods(two, 0).await;
    let metrics = two.metrics().await;
    assert_eq!(metrics.sum("tandem_state_plane_connected", &[]), 1.0);
    assert!(metrics.sum("tandem_state_plane_staleness_seconds", &[]) < 5.0);
    redis.assert_keys_expire().await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_replica_is_forgotten_and_starts_at_zero() {
    let redis = Redis::start().await;
    let sandbox = Sandbox::start(options(&[("REDIS_URL", &redis.url())])).await;
    let [one, two] = &sandbox.fleet.tandems[..] else { panic!("two replicas") };
    met(&sandbox.fleet.tandems, 2).await;
    let (hold, requests) = held(&sandbox, one, 50).await;
    remote_pods(two, 1).await;
    one.kill9();
    let took = remote_pods(two, 0).await;
    println!("a replica that was killed with 50 open charges was forgotten after {took:?}");
    let slack = if std::env::var_os("TANDEM_SLOW_TESTS").is_some() { 0 } else { 10 };
    assert!(took <= LEASE + Duration::from_secs(1 + slack), "{took:?}");
    hold.release();
    for request in requests {
        let _ = request.await;
    }
    let again = crate::harness::tandem::TandemOptions {
        pods: sandbox.fleet.pods.path(),
        env: vec![("POD_NAME".to_owned(), "gateway-0".to_owned()), ("REDIS_URL".to_owned(), redis.url())],
        front: true,
        args: Vec::new(),
    };
    let again = Tandem::start(again).await;
    again.wait_ready().await;
    let restarted = [again];
    met(&restarted, 2).await;
    assert_eq!(state(&restarted[0]).await["remote_pods"], 0);
    assert_eq!(state(two).await["remote_pods"], 0);
    let answer = stream(&front(&restarted[0])).send().await;
    assert_eq!(answer.status, 200);
    answer.body().await;
    oracle(&restarted, &[]).await;
    remote_pods(two, 0).await;
    redis.assert_keys_expire().await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_was_stopped_overwrites_nothing() {
    let redis = Redis::start().await;
    // What is held here must not run out of its KV lease meanwhile.
    let patient = SandboxOptions::of(|config| config.lease(Duration::from_mins(10)));
    let sandbox = Sandbox::start(patient.env(&[("REDIS_URL", &redis.url())])).await;
    let [one, two] = &sandbox.fleet.tandems[..] else { panic!("two replicas") };
    met(&sandbox.fleet.tandems, 2).await;
    let (hold, requests) = held(&sandbox, one, 7).await;
    remote_pods(two, 1).await;
    one.stop();
    remote_pods(two, 0).await;
    let long = if std::env::var_os("TANDEM_SLOW_TESTS").is_some() { 30 } else { 1 };
    tokio::time::sleep(Duration::from_secs(long)).await;
    // Meanwhile the other one works on the same pod.
    let answer = tokio::spawn(stream(&front(two)).send());
    hold.wait_for(8).await;
    let before = state(two).await["joins"].clone();
    one.cont();
    met(&sandbox.fleet.tandems, 2).await;
    remote_pods(two, 1).await;
    remote_pods(one, 1).await;
    assert_eq!(state(two).await["joins"], before, "the one that stayed is the member that it was");
    let page = two.admin_json("/debug/fleet").await;
    let pods = page["models"]["m"]["pods"].as_array().expect("pods");
    let others: u64 = pods.iter().filter_map(|pod| pod["others"]["decodes_running"].as_u64()).sum();
    assert_eq!(others, 7, "{page:#}");
    hold.release();
    for request in requests {
        request.await.expect("a request");
    }
    answer.await.expect("an answer").body().await;
    remote_pods(one, 0).await;
    remote_pods(two, 0).await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_are_made_when_the_grade_asks_for_them() {
    let redis = Redis::start().await;
    let env = [
        ("REDIS_URL", redis.url()),
        ("TANDEM_STATE_PLANE_GRADE", "claim".to_owned()),
        // The machine may be slow; what is to be seen is that claims are made.
        ("TANDEM_CLAIM_DEADLINE_MS", "2000".to_owned()),
    ];
    let env: Vec<(&str, &str)> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let sandbox = Sandbox::start(options(&env)).await;
    met(&sandbox.fleet.tandems, 2).await;
    for tandem in &sandbox.fleet.tandems {
        eventually(SOON, "claims", async || state(tandem).await["claiming"].as_bool().filter(|claiming| *claiming))
            .await;
    }
    let ask = async |path: &str| {
        let answer = stream(path).send().await;
        assert_eq!(answer.status, 200);
        assert!(answer.body().await.complete);
    };
    for path in sandbox.paths() {
        for _ in 0..4 {
            ask(&path).await;
        }
    }
    let claims = async || {
        let mut granted = 0.0;
        for tandem in &sandbox.fleet.tandems {
            granted += tandem.metrics().await.sum("tandem_claims_total", &[("outcome", "granted")]);
        }
        granted
    };
    assert_eq!(claims().await, 8.0);
    // Without Redis requests go on, and an operator can see why they are less well balanced.
    redis.process().kill();
    let one = &sandbox.fleet.tandems[0];
    eventually(SOON, "a note", async || {
        let notes = one.admin_json("/readyz").await["notes"].to_string();
        notes.contains("no connection to Redis").then_some(())
    })
    .await;
    for path in sandbox.paths() {
        ask(&path).await;
    }
    assert_eq!(one.readiness().await, Some(200), "it wants traffic all the same");
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_password_is_used_and_shows_nowhere() {
    let redis = Redis::start().await;
    assert_eq!(redis.command(&["CONFIG", "SET", "requirepass", "hunter2secret"]).await, "+OK");
    let (host, port) = (redis.address().ip().to_string(), redis.address().port().to_string());
    let by_parts = [("REDIS_HOST", &*host), ("REDIS_PORT", &*port), ("REDIS_PASSWORD", "hunter2secret")];
    let mut options = options(&by_parts);
    options.fleet.replicas = 1;
    options.fleet.envoy = false;
    let sandbox = Sandbox::start(options).await;
    let by_url = crate::harness::tandem::TandemOptions {
        pods: sandbox.fleet.pods.path(),
        env: vec![("REDIS_URL".to_owned(), format!("redis://:hunter2secret@{}", redis.address()))],
        front: false,
        args: Vec::new(),
    };
    let other = [Tandem::start(by_url).await];
    met(&sandbox.fleet.tandems, 2).await;
    met(&other, 2).await;
    for tandem in sandbox.fleet.tandems.iter().chain(&other) {
        for page in ["/debug/state", "/debug/fleet", "/readyz"] {
            assert!(!tandem.admin_json(page).await.to_string().contains("hunter2secret"), "{page}");
        }
        assert!(!tandem.process().logs().contains("hunter2secret"));
    }
    oracle(&other, &[]).await;
    sandbox.close().await;
}
