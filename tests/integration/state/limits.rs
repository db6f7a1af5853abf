//! Request-rate limits over several real replicas and a real Redis.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tandem_sim::Fault;

use crate::harness::engines::{MODEL, Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, base};
use crate::harness::redis::Redis;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually};

const CHAT: &str = "/v1/chat/completions";
/// Where replicas are counted.
const CENSUS: &str = "tandem:census1";

/// Replicas that share one Redis, without Envoy. On a busy machine a request may wait for long: it is for the server to
/// say who passes.
async fn replicas(redis: &Redis, count: usize, more: &[(&str, &str)]) -> Sandbox {
    let mut fleet = FleetOptions { replicas: count, envoy: false, ..FleetOptions::default() };
    let mut env =
        vec![("REDIS_URL".to_owned(), redis.url()), ("TANDEM_RATE_LIMIT_WAIT_MS".to_owned(), "20000".to_owned())];
    env.extend(more.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    fleet.env = env;
    let pod = |pod: crate::harness::pods::PodManifest| {
        pod.config(&json!({"profiles": {
            "default": {"routingStrategy": "pd"},
            "slow": {"routingStrategy": "pd", "requestsPerSecond": 5},
        }}))
    };
    let sandbox = Sandbox::start(SandboxOptions { pod, fleet, ..SandboxOptions::default() }).await;
    // Before a replica is connected, its limits are as if Redis were gone. Who is counted has been heard.
    eventually(SOON, "every replica is connected", async || {
        (redis.command(&["ZCARD", CENSUS]).await == format!(":{count}")).then_some(())
    })
    .await;
    sandbox
}

fn fronts(sandbox: &Sandbox) -> Vec<String> {
    sandbox.fleet.tandems.iter().map(|tandem| base(tandem.front().expect("a front"))).collect()
}

async fn store_user(redis: &Redis, name: &str, rpm: i64, tpm: i64) {
    let record = json!({"name": name, "rpm": rpm, "tpm": tpm}).to_string();
    assert_eq!(redis.command(&["SET", &format!("aibrix-users/{name}"), &record]).await, "+OK");
}

fn body(stream: bool) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": stream})
}

fn ask(front: &str, user: &str) -> Call {
    Call::post(front, CHAT, body(false).to_string()).header("user", user)
}

/// What came of a request: its status, and which marker it carried.
async fn outcome(call: Call) -> (u16, String) {
    let answer = call.send().await;
    let marker = answer.headers.keys().map(http::HeaderName::as_str).find(|name| name.starts_with("x-error-"));
    let outcome = (answer.status.as_u16(), marker.unwrap_or_default().to_owned());
    assert!(answer.body().await.complete);
    outcome
}

/// How often each outcome came, of this many requests at once, sent round-robin.
async fn burst(fronts: &[String], count: usize, call: impl Fn(&str) -> Call) -> BTreeMap<(u16, String), usize> {
    let calls = (0..count).map(|index| outcome(call(&fronts[index % fronts.len()])));
    let mut outcomes = BTreeMap::new();
    for outcome in futures_util::future::join_all(calls).await {
        *outcomes.entry(outcome).or_default() += 1;
    }
    outcomes
}

fn passed(outcomes: &BTreeMap<(u16, String), usize>) -> usize {
    outcomes.get(&(200, String::new())).copied().unwrap_or(0)
}

/// Waits for a minute of the server's clock that lasts for at least so long yet.
async fn minute_with(redis: &Redis, room: Duration) {
    let script = "return tonumber(redis.call('TIME')[1]) % 60";
    let reply = redis.command(&["EVAL", script, "0"]).await;
    let second: u64 = reply.trim_start_matches(':').parse().expect("a number");
    if 60 - second < room.as_secs() {
        tokio::time::sleep(Duration::from_secs(61 - second)).await;
    }
}

/// All replicas, who are all counted by now, have heard of one another: each was answered once more.
async fn introduced(redis: &Redis, count: usize) {
    let script = "local t = redis.call('TIME') return string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000))";
    let now: u64 = redis.command(&["EVAL", script, "0"]).await.parse().expect("a time in ms");
    // With the second answer after now the first has certainly been taken in.
    for after in [now, now + 1_000] {
        let after = format!("({after}");
        eventually(SOON, "every replica is answered", async || {
            (redis.command(&["ZCOUNT", CENSUS, &after, "+inf"]).await == format!(":{count}")).then_some(())
        })
        .await;
    }
}

async fn sum(tandems: &[Tandem], name: &str, labels: &[(&str, &str)]) -> f64 {
    let mut sum = 0.0;
    for tandem in tandems {
        sum += tandem.metrics().await.sum(name, labels);
    }
    sum
}

const FALLBACKS: &str = "tandem_rate_limit_fallbacks_total";
const SETTLED: &str = "tandem_rate_limit_settlements_total";

#[tokio::test(flavor = "multi_thread")]
async fn r71_of_500_at_once_over_three_replicas_exactly_60_pass() {
    let redis = Redis::start().await;
    store_user(&redis, "alice", 60, 1_000_000).await;
    let sandbox = replicas(&redis, 3, &[]).await;
    let fronts = fronts(&sandbox);
    minute_with(&redis, Duration::from_secs(40)).await;
    let outcomes = burst(&fronts, 500, |front| ask(front, "alice")).await;
    assert_eq!(passed(&outcomes), 60, "{outcomes:?}");
    assert_eq!(outcomes.get(&(429, "x-error-rpm-exceeded".to_owned())), Some(&440), "{outcomes:?}");
    // Another user is another user.
    store_user(&redis, "bob", 1, 0).await;
    let answer = ask(&fronts[0], "bob").send().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-update-rpm"), answer.header("x-update-tpm")), (200, "1", "0"));
    assert!(answer.body().await.complete);
    let refused = ask(&fronts[1], "bob").send().await;
    assert_eq!(refused.status, 429);
    let seconds: u64 = refused.header("retry-after").parse().expect("seconds");
    assert!((1..=60).contains(&seconds));
    let error = refused.json().await;
    assert_eq!(
        (&error["error"]["code"], &error["error"]["type"]),
        (&"rate_limit_exceeded".into(), &"rate_limit_error".into())
    );
    assert_eq!(sum(&sandbox.fleet.tandems, FALLBACKS, &[]).await, 0.0);
    redis.assert_keys_expire().await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_not_served_gives_its_shared_place_back() {
    let redis = Redis::start().await;
    store_user(&redis, "alice", 2, 0).await;
    let sandbox = replicas(&redis, 2, &[]).await;
    let fronts = fronts(&sandbox);
    minute_with(&redis, Duration::from_secs(30)).await;
    for turn in 0..6 {
        sandbox.prefill[0].script(Fault::on(CHAT).answer(400, "application/json", "{}"));
        assert_eq!(outcome(ask(&fronts[turn % 2], "alice")).await.0, 400, "{turn}");
        let done = (turn + 1) as f64;
        eventually(SOON, "the place is given back", async || {
            (sum(&sandbox.fleet.tandems, SETTLED, &[("what", "refund"), ("result", "done")]).await == done)
                .then_some(())
        })
        .await;
    }
    for (turn, expected) in [200, 200, 429].into_iter().enumerate() {
        assert_eq!(outcome(ask(&fronts[turn % 2], "alice")).await.0, expected);
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_share_the_requests_per_second_of_a_model() {
    let redis = Redis::start().await;
    let sandbox = replicas(&redis, 2, &[]).await;
    let fronts = fronts(&sandbox);
    let call = |front: &str| Call::post(front, CHAT, body(false).to_string()).header("config-profile", "slow");
    // However long it takes: the seconds that it touches, at five each, and one alone never sees them full.
    let second = async || -> u64 {
        redis.command(&["EVAL", "return redis.call('TIME')[1]", "0"]).await.parse().expect("a number")
    };
    let before = second().await;
    let outcomes = burst(&fronts, 60, call).await;
    let seconds = usize::try_from(second().await - before + 1).expect("a few");
    let passed = passed(&outcomes);
    assert!((5..=5 * seconds).contains(&passed), "{passed} in {seconds} s: {outcomes:?}");
    let refused = outcomes.get(&(429, "x-error-model-rps-exceeded".to_owned())).copied().unwrap_or(0);
    assert_eq!(passed + refused, 60, "{outcomes:?}");
    let granted = [("limit", "model"), ("verdict", "granted")];
    assert_eq!(sum(&sandbox.fleet.tandems, "tandem_rate_limit_verdicts_total", &granted).await, passed as f64);
    assert_eq!(sum(&sandbox.fleet.tandems, FALLBACKS, &[]).await, 0.0);
    redis.assert_keys_expire().await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_are_looked_up_and_their_tokens_counted() {
    let redis = Redis::start().await;
    store_user(&redis, "frugal", 50, 3).await;
    store_user(&redis, "free", 50, 0).await;
    redis.command(&["SET", "aibrix-users/broken", "?"]).await;
    let sandbox = replicas(&redis, 2, &[]).await;
    let fronts = fronts(&sandbox);
    minute_with(&redis, Duration::from_secs(30)).await;
    for user in ["nobody", "broken", &"x".repeat(300)] {
        assert_eq!(outcome(ask(&fronts[0], user)).await, (500, "x-error-user".to_owned()), "{user}");
    }
    // Unlimited: no user, or an empty name.
    assert_eq!(outcome(ask(&fronts[0], "")).await.0, 200);
    // A stream says how many tokens it took, or is refused; the place goes back.
    let stream = |user: &str| Call::post(&fronts[0], CHAT, body(true).to_string()).header("user", user);
    assert_eq!(outcome(stream("frugal")).await, (400, "x-error-no-stream-options-include-usage".to_owned()));
    assert_eq!(outcome(stream("free")).await.0, 200);
    // The first answer uses the tokens up; any replica knows.
    assert_eq!(outcome(ask(&fronts[0], "frugal")).await.0, 200);
    eventually(SOON, "the tokens are counted", async || {
        (sum(&sandbox.fleet.tandems, SETTLED, &[("what", "tokens"), ("result", "done")]).await >= 1.0).then_some(())
    })
    .await;
    let refused = outcome(ask(&fronts[1], "frugal")).await;
    assert_eq!(refused, (429, "x-error-tpm-exceeded".to_owned()));
    // A user that is stored now exists within the time for which a record is believed.
    store_user(&redis, "nobody", 1, 0).await;
    assert_eq!(outcome(ask(&fronts[0], "nobody")).await.0, 200);
    redis.assert_keys_expire().await;
    sandbox.close().await;
}

/// Redis dies under a fleet of three: what passes then.
async fn after_the_end_of_redis(fallback: &str) {
    let redis = Redis::start().await;
    store_user(&redis, "alice", 30, 0).await;
    let waits = [("TANDEM_RATE_LIMIT_FALLBACK", fallback), ("TANDEM_RATE_LIMIT_WAIT_MS", "2000")];
    let sandbox = replicas(&redis, 3, &waits).await;
    let fronts = fronts(&sandbox);
    // Each replica has read the record, and knows how many they are.
    for front in &fronts {
        assert_eq!(outcome(ask(front, "alice")).await.0, 200);
    }
    introduced(&redis, 3).await;
    redis.process().kill();
    let tandems = &sandbox.fleet.tandems;
    let action = [("limit", "user"), ("action", fallback)];
    for (front, tandem) in fronts.iter().zip(tandems) {
        eventually(SOON, "the end is noticed", async || {
            outcome(ask(front, "alice")).await;
            (tandem.metrics().await.sum(FALLBACKS, &action) >= 1.0).then_some(())
        })
        .await;
    }
    let before = sum(tandems, FALLBACKS, &action).await;
    let outcomes = burst(&fronts, 120, |front| ask(front, "alice")).await;
    assert_eq!(sum(tandems, FALLBACKS, &action).await - before, 120.0, "{outcomes:?}");
    match fallback {
        // Ten each; some may have passed before the burst, and this replica's minute may end within it.
        "local" => {
            let refused = outcomes.get(&(429, "x-error-rpm-exceeded".to_owned())).copied().unwrap_or(0);
            assert_eq!(passed(&outcomes) + refused, 120, "{outcomes:?}");
            assert!((60..120).contains(&refused) && passed(&outcomes) <= 60, "{outcomes:?}");
        }
        "open" => assert_eq!(passed(&outcomes), 120, "{outcomes:?}"),
        _ => assert_eq!(passed(&outcomes), 0, "{outcomes:?}"),
    }
    // A user whose record nobody has read, and a model.
    let unknown = outcome(ask(&fronts[0], "stranger")).await;
    let model = Call::post(&fronts[0], CHAT, body(false).to_string()).header("config-profile", "slow");
    let model = outcome(model).await;
    if fallback == "closed" {
        assert_eq!(unknown, (500, "x-error-user".to_owned()));
        assert_eq!(model, (500, "x-error-incr-model-rps".to_owned()));
    } else {
        assert_eq!((unknown.0, model.0), (200, 200));
    }
    // Who has no limit notices nothing.
    assert_eq!(outcome(Call::post(&fronts[0], CHAT, body(false).to_string())).await.0, 200);
    // It comes back, without data, and the limits are shared again.
    let again = Redis::start_on(redis.address()).await.expect("the same port");
    store_user(&again, "alice", 1, 0).await;
    minute_with(&again, Duration::from_secs(20)).await;
    for front in &fronts {
        eventually(SOON, "shared again", async || {
            let before = sum(tandems, FALLBACKS, &[]).await;
            let refused = outcome(ask(front, "alice")).await == (429, "x-error-rpm-exceeded".to_owned());
            (refused && sum(tandems, FALLBACKS, &[]).await == before).then_some(())
        })
        .await;
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r71_without_redis_each_replica_counts_its_part() {
    after_the_end_of_redis("local").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r71_without_redis_everything_passes_where_that_is_wished() {
    after_the_end_of_redis("open").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r71_without_redis_nothing_passes_where_that_is_wished() {
    after_the_end_of_redis("closed").await;
}
