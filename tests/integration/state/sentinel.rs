//! Replicas that find Redis by its sentinels, and the primary dies.

use std::time::{Duration, Instant};

use tandem::knobs::Grade;
use tandem::load::DecodeCharge;
use tokio_util::sync::CancellationToken;

use super::replicas::{MEET, fleet, leave, pairs};
use super::resp::Connection;
use super::under_load::{agree, bound, drive, idle};
use crate::harness::eventually;
use crate::harness::redis::Redis;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r69_a_failover_by_sentinels() {
    let primary = Redis::start().await;
    let at = primary.address();
    let follow = || vec!["--replicaof".to_owned(), at.ip().to_string(), at.port().to_string()];
    let replica = Redis::start_with(follow).await;
    let sentinel = Redis::start_sentinel(at).await;
    eventually(MEET, "the sentinel to know the replica, which follows", async || {
        let known = Connection::open(sentinel.address()).say("SENTINEL replicas main").list().len();
        let follows = replica.command(&["INFO", "replication"]).await.contains("master_link_status:up");
        (known == 1 && follows).then_some(())
    })
    .await;

    let url = format!("redis-sentinel://{}?sentinelServiceName=main", sentinel.address());
    let replicas = fleet(&url, Grade::Paced, 3, &pairs("m", 4)).await;
    let hold = |pod: &str| -> Vec<DecodeCharge> {
        replicas.iter().map(|replica| DecodeCharge::open(&replica.pod("m", pod))).collect()
    };
    let (before, stop) = (hold("d-0"), CancellationToken::new());
    let script = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let died = Instant::now();
        drop(primary);
        drop(before);
        let held = hold("d-1");
        eventually(MEET, "the promotion", async || {
            // A server that is promoted ends its connections.
            replica.try_command(&["INFO", "replication"]).await.ok()?.contains("role:master").then_some(())
        })
        .await;
        let promoted = Instant::now();
        eventually(MEET, "the plane to be whole", async || {
            let fresh = |replica: &super::replicas::Replica| {
                let age = replica.model("m").port.age(replica.clock.now());
                replica.status("m").is_some_and(|status| status.members == 3)
                    && age.is_some_and(|age| age < Duration::from_millis(600))
            };
            replicas.iter().all(fresh).then_some(())
        })
        .await;
        stop.cancel();
        (held, died, promoted)
    };
    let (measured, (held, died, promoted)) = tokio::join!(drive(&replicas, "m", 100, &stop), script);
    eventually(MEET, "everybody to see everything", async || agree(&replicas, "m").then_some(())).await;
    let (whole, since_promotion) = (died.elapsed(), promoted.elapsed());
    println!("failover: exact {whole:?} after the end of the primary, {since_promotion:?} after the promotion");
    println!("  {}", measured.summary());
    assert!(since_promotion < bound(Duration::from_secs(3), 4), "{since_promotion:?}");
    drop(held);
    eventually(MEET, "nothing to be left", async || idle(&replicas, "m").then_some(())).await;
    super::announcements::come_at_once(&replicas, "m").await;
    leave(replicas).await;
}
