//! A place that Redis gives when nobody waits for it any more goes back.

use std::sync::Arc;
use std::time::Duration;

use tandem::clock::Clock;
use tandem::knobs::RateFallback;
use tandem::state::limits::{LimitCall, LimitParts, SharedLimits};
use tandem::state::redis::{Plane, RedisConfig};
use tandem::telemetry::Metrics;
use tokio_util::task::TaskTracker;

use crate::harness::redis::Redis;
use crate::harness::{SOON, eventually, within};

const REQUESTS: &str = "tandem:{user:alice}:rate1:rpm";

fn alice() -> LimitCall {
    LimitCall { user: Some("alice".into()), model: None }
}

/// Places that are still taken, once every call has ended.
async fn taken(redis: &Redis, tasks: &TaskTracker) -> String {
    tasks.close();
    within("the end of all calls", tasks.wait()).await;
    tasks.reopen();
    redis.command(&["HGET", REQUESTS, "n"]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r71_a_place_that_comes_too_late_goes_back() {
    let redis = Redis::start().await;
    redis.command(&["SET", "aibrix-users/alice", r#"{"rpm":1000}"#]).await;
    let plane = Plane::connect(&RedisConfig::from_url(&redis.url()).expect("a URL")).expect("a plane");
    eventually(SOON, "a connection", async || plane.is_connected().then_some(())).await;
    let tasks = TaskTracker::new();
    let limits = |wait: Duration| {
        let parts = LimitParts {
            fallback: RateFallback::Open,
            wait,
            replica: "r".to_owned(),
            clock: Clock::system(),
            metrics: Arc::new(Metrics::new("gateway")),
            tasks: tasks.clone(),
        };
        SharedLimits::new(plane.clone(), parts)
    };
    // A new minute would empty the counter between two looks.
    let second = redis.command(&["EVAL", "return tonumber(redis.call('TIME')[1]) % 60", "0"]).await;
    let second: u64 = second.trim_start_matches(':').parse().expect("a number");
    if second > 40 {
        tokio::time::sleep(Duration::from_secs(61 - second)).await;
    }

    // Taken and kept; taken and not used.
    let patient = limits(SOON);
    let mut places = patient.charge(alice()).await.expect("a place");
    assert_eq!(places.user_counts().map(|counts| counts.requests), Some(1));
    places.keep();
    drop(places);
    assert_eq!(taken(&redis, &tasks).await, "1");
    let unused = patient.charge(alice()).await.expect("a place");
    assert_eq!(unused.user_counts().map(|counts| counts.requests), Some(2));
    drop(unused);
    assert_eq!(taken(&redis, &tasks).await, "1");

    // The request leaves while Redis is asked.
    let _ = patient.charge(alice()).await.expect("a record that is fresh");
    redis.process().signal("STOP");
    let asking = tokio::time::timeout(Duration::from_millis(50), patient.charge(alice())).await;
    assert!(asking.is_err(), "Redis stands still");
    redis.process().signal("CONT");
    assert_eq!(taken(&redis, &tasks).await, "1");

    // It goes on without an answer, which comes later.
    let hasty = limits(Duration::from_millis(50));
    let first = hasty.charge(alice()).await;
    redis.process().signal("STOP");
    let second = hasty.charge(alice()).await.expect("it passes");
    assert!(second.user_counts().is_none(), "Redis has not counted it");
    redis.process().signal("CONT");
    drop((first, second));
    assert_eq!(taken(&redis, &tasks).await, "1");
    // How many replicas there are is known as soon as Redis says so.
    let census = tokio::spawn(Arc::clone(&patient).keep_census(tokio_util::sync::CancellationToken::new()));
    redis.command(&["ZADD", "tandem:census1", "9999999999999", "another", "1", "dead"]).await;
    eventually(SOON, "two live", async || (patient.members() == 2).then_some(())).await;
    patient.leave().await;
    within("the end of the census", census).await.expect("no panic");
    assert_eq!(redis.command(&["ZRANGE", "tandem:census1", "0", "-1"]).await, "*1", "one has left, one was dead");
    plane.close().await;
}
