//! What a replica charges is announced: the others need not wait until they ask. Also when Redis was not there at first,
//! or was another one.

use std::time::{Duration, Instant};

use tandem::fleet::Role;
use tandem::knobs::Grade;
use tandem::load::DecodeCharge;

use super::replicas::{MEET, Replica, leave, met, pairs};
use super::under_load::{bound, percentile};
use crate::harness::eventually;
use crate::harness::processor::closed_port;
use crate::harness::redis::Redis;

const TRIES: usize = 24;
/// Half of what who only asks every 250 ms needs at the median; 24 of those would be as quick once in a thousand times.
const AT_ONCE: Duration = Duration::from_millis(62);

/// Charges of the first replica reach the second one much sooner than that asks for them.
pub async fn come_at_once(replicas: &[Replica], model: &str) {
    let first = replicas[0].model(model);
    let pod = &first.pods.iter().find(|pod| pod.spec.role == Role::Decode).expect("a pod").spec.key.name;
    let charge = || DecodeCharge::open(&replicas[0].pod(model, pod));
    let seen = || replicas[1].sees(model, pod).pending;
    let median = async || {
        let mut times = Vec::new();
        for turn in 0..TRIES {
            // Anywhere between two polls.
            tokio::time::sleep(Duration::from_millis(30 + 7 * turn as u64)).await;
            let charged = Instant::now();
            let held = charge();
            while seen() == 0 {
                assert!(charged.elapsed() < MEET, "not seen");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            times.push(charged.elapsed());
            drop(held);
            eventually(MEET, "idle again", async || (seen() == 0).then_some(())).await;
        }
        percentile(&times, 0.5)
    };
    let mut median_was = median().await;
    // On a machine that is busy with something else just now.
    for _ in 0..2 {
        if median_was >= AT_ONCE {
            median_was = median().await;
        }
    }
    println!("{model}: announced to the other one after {median_was:?} (median)");
    assert!(median_was < bound(Duration::from_millis(10), 6).max(AT_ONCE), "{median_was:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_that_were_there_before_redis_hear_of_one_another() {
    let (address, specs) = (closed_port(), pairs("m", 2));
    let url = format!("redis://{address}");
    let replicas: Vec<Replica> = (0..2).map(|seed| Replica::start(&url, Grade::Paced, &specs, 1 + seed)).collect();
    // Long enough for commands to be given up.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    let redis = Redis::start_on(address).await.expect("the port is free");
    met(&replicas, "m").await;
    come_at_once(&replicas, "m").await;
    // Another server in its place.
    let joins = |replica: &Replica| replica.status("m").map(|status| status.counts.joins);
    let before: Vec<_> = replicas.iter().map(joins).collect();
    drop(redis);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let _redis = Redis::start_on(address).await.expect("Redis comes back");
    for (replica, before) in replicas.iter().zip(before) {
        eventually(MEET, "to join anew", async || (joins(replica) > before).then_some(())).await;
    }
    met(&replicas, "m").await;
    come_at_once(&replicas, "m").await;
    leave(replicas).await;
}
