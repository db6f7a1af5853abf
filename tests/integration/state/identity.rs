//! What the replicas of one Redis agree on: a number each, one seed; and ids that no two attempts share.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use tandem::state::identity::{Identity, IdentityCall, NUMBERS};
use tandem::state::redis::{Plane, RedisConfig};

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, base};
use crate::harness::redis::Redis;
use crate::harness::{SOON, eventually, within};

const LEASE: Duration = Duration::from_mins(10);
const CALL: Duration = Duration::from_secs(5);

async fn connected(redis: &Redis) -> Plane {
    let plane = Plane::connect(&RedisConfig::from_url(&redis.url()).expect("a URL")).expect("a plane");
    eventually(SOON, "a connection", async || plane.is_connected().then_some(())).await;
    plane
}

async fn ask(plane: &Plane, replica: &str, number: u16, seed: u64, lease: Duration) -> Identity {
    let call = IdentityCall { replica: replica.to_owned(), number, seed, lease };
    plane.identity(&call, CALL).await.expect("an identity")
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_get_a_number_each_and_one_seed() {
    let redis = Redis::start().await;
    let plane = connected(&redis).await;

    // All want the same number at once.
    let names: Vec<String> = (0..16).map(|index| format!("replica-{index}")).collect();
    let asked = names.iter().enumerate().map(|(seed, name)| ask(&plane, name, 1020, seed as u64, LEASE));
    let given = futures_util::future::join_all(asked).await;
    let numbers: BTreeSet<u16> = given.iter().filter_map(|identity| identity.number).collect();
    assert_eq!(numbers, (0..12).chain(1020..NUMBERS).collect(), "the wanted one and those after it, round the end");
    let seeds: BTreeSet<u64> = given.iter().map(|identity| identity.seed).collect();
    assert_eq!(seeds.len(), 1, "{given:?}");
    // Who asks again keeps what it has, whatever it would like now.
    assert_eq!(ask(&plane, "replica-3", 7, 99, LEASE).await, given[3]);

    // Who leaves frees its number; who is silent, when its lease ends.
    let left = given[5].number.expect("a number");
    let goodbye = ask(&plane, "replica-5", 0, 0, Duration::ZERO).await;
    assert_eq!(goodbye.number, None);
    assert_eq!(ask(&plane, "another", left, 0, LEASE).await.number, Some(left));
    let short = Duration::from_millis(50);
    let silent = ask(&plane, "silent", 500, 0, short).await.number;
    assert_eq!(silent, Some(500));
    let heirs = std::sync::atomic::AtomicU32::new(0);
    eventually(SOON, "the number of the silent one to be free", async || {
        // Each heir is new: who has a number keeps it.
        let heir = format!("heir-{}", heirs.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        (ask(&plane, &heir, 500, 0, short).await.number == Some(500)).then_some(())
    })
    .await;

    // Redis loses everything: each brings its own back.
    assert_eq!(redis.command(&["FLUSHALL"]).await, "+OK");
    let mine = given[9];
    assert_eq!(ask(&plane, "replica-9", mine.number.expect("a number"), mine.seed, LEASE).await, mine);
    let other = ask(&plane, "replica-2", given[2].number.expect("a number"), mine.seed, LEASE).await;
    assert_eq!(other, given[2]);
    for key in ["until", "numbers", "seed"] {
        let ttl = redis.command(&["PTTL", &format!("tandem:{{replicas}}:identity1:{key}")]).await;
        let ttl: i64 = ttl.trim_start_matches(':').parse().expect("a time");
        assert!((1..=2 * LEASE.as_millis() as i64).contains(&ttl), "{key}: {ttl}");
    }
    plane.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_numbers_are_taken_a_replica_gets_none_and_yet_the_seed() {
    let redis = Redis::start().await;
    let plane = connected(&redis).await;
    let seed = ask(&plane, "first", 0, 77, LEASE).await.seed;
    let fill = "for i = 1, 1023 do redis.call('HSET', KEYS[1], 'r' .. i, i) end return 1";
    redis.command(&["EVAL", fill, "1", "tandem:{replicas}:identity1:numbers"]).await;
    assert_eq!(ask(&plane, "last", 3, 0, LEASE).await, Identity { number: None, seed });
    plane.close().await;
}

/// Two replicas that know nothing of one another but their Redis, and one client's trace.
#[tokio::test(flavor = "multi_thread")]
async fn requests_of_one_trace_have_different_ids_on_different_replicas() {
    let redis = Redis::start().await;
    let fleet = FleetOptions {
        replicas: 2,
        envoy: false,
        env: vec![("REDIS_URL".to_owned(), redis.url())],
        ..FleetOptions::default()
    };
    let options = SandboxOptions { fleet, ..SandboxOptions::of(tandem_sim::EngineConfig::sglang) };
    let sandbox = Sandbox::start(options).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).to_string();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    for tandem in &sandbox.fleet.tandems {
        let front = base(tandem.front().expect("a front"));
        for _ in 0..8 {
            let call = Call::post(&front, "/v1/chat/completions", body.clone()).header("traceparent", trace);
            let answer = within("an answer", call.send()).await;
            assert_eq!(answer.status, 200);
            assert!(within("its end", answer.body()).await.complete);
        }
    }
    let of = |name: &str| -> Vec<String> {
        let legs = sandbox.prefill[0].records_where(|record| record.path.starts_with("/v1/"));
        let id = |leg: &tandem_sim::Record| match name {
            "rid" => leg.json()["rid"].as_str().map(str::to_owned),
            header => leg.header(header).map(str::to_owned),
        };
        legs.iter().filter_map(id).collect()
    };
    for name in ["rid", "x-request-id"] {
        let ids = of(name);
        assert_eq!(ids.len(), 16, "{name}");
        let distinct: BTreeSet<&String> = ids.iter().collect();
        assert_eq!(distinct.len(), 16, "{name}: {ids:?}");
        // Nothing counts up from 0 nor repeats a part: that would tell how the ids are made.
        let suffixes: BTreeSet<&str> = ids.iter().filter_map(|id| id.rsplit('-').next()).map(|end| &end[..8]).collect();
        assert_eq!(suffixes.len(), 16, "{name}: {ids:?}");
    }
}
