//! What one replica finds out, the others know a moment later.

use std::sync::Arc;
use std::time::Duration;

use tandem::bands::Keepers;
use tandem::knobs::{Grade, PdKnobs};
use tandem::state::codec::encode;
use tandem::state::findings::Finding;
use tandem::state::keys::ModelKeys;
use tandem::state::payload::PrefixUpdate;
use tandem::state::plane::StatePlane;
use tandem::state::redis::{Plane, RedisConfig};

use super::replicas::{MEET, Replica, fleet, leave, pairs};
use crate::harness::eventually;
use crate::harness::redis::Redis;

/// How much of a prompt a pod holds, as the replica knows it.
fn matched(replica: &Replica, pod: &str, blocks: &[u64]) -> Option<u8> {
    replica.prefix.drain(replica.clock.now());
    replica.prefix.match_percents("m", blocks, &[replica.pod("m", pod).slot]).first().copied()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_sessions_and_failures_are_told() {
    let redis = Redis::start().await;
    let replicas = fleet(&redis.url(), Grade::Paced, 2, &pairs("m", 2)).await;
    let [one, two] = &replicas[..] else { panic!("two replicas") };
    let model: Arc<str> = Arc::from("m");
    let blocks = vec![11, 12, 13, 14];
    one.plane.tell(&model, Finding::Prefix { pod: one.pod("m", "p-1").id, blocks: blocks.clone() });
    eventually(MEET, "the prefix", async || (matched(two, "p-1", &blocks) == Some(100)).then_some(())).await;
    assert_eq!(matched(two, "p-0", &blocks), Some(0));

    let (key, hour) = (b"a session", Duration::from_hours(1));
    let session = tandem::load::Sessions::number("m", key, 0).expect("a key that counts");
    one.plane.tell(&model, Finding::Session { session, tokens: 700 });
    eventually(MEET, "the session", async || (two.sessions.len() == 1).then_some(())).await;
    assert_eq!(two.sessions.grow(session, 1_000, hour, two.clock.now()), Some(300));

    let ejected = |replica: &Replica, pod: &str| replica.pod("m", pod).health.ejected();
    one.plane.tell(&model, Finding::PodFails { pod: one.pod("m", "d-0").id });
    eventually(MEET, "the failing pod", async || ejected(two, "d-0").then_some(())).await;
    let (prefill, decode) = (one.pod("m", "p-1").id, one.pod("m", "d-1").id);
    one.plane.tell(&model, Finding::PairFails { prefill, decode });
    let ours = (two.pod("m", "p-1").slot, two.pod("m", "d-1").slot);
    eventually(MEET, "the failing pair", async || {
        two.model("m").pairs.get(ours.0, ours.1).filter(|health| health.ejected()).map(drop)
    })
    .await;
    assert!(!ejected(two, "p-1") && !ejected(two, "d-1"), "each may be well with others");
    assert!(!ejected(one, "d-0"), "who tells does not hear itself");
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_comes_later_reads_what_is_kept_and_versions_mix() {
    let redis = Redis::start().await;
    let config = RedisConfig::from_url(&redis.url()).expect("a URL");
    let plane = Plane::connect(&config).expect("a plane");
    eventually(MEET, "a connection", async || plane.is_connected().then_some(())).await;
    let keys = ModelKeys::new("m");
    let pod = pairs("m", 1).first().expect("a pod").id();
    let old = |blocks: Vec<u64>| encode(&PrefixUpdate { replica: 99, pod, blocks }).expect("bytes");
    // As a replica of the version before, one of a later version, and noise.
    let entries = [old(vec![1, 2]), vec![0xd7, 77, 1], b"noise".to_vec(), old(vec![5, 6])];
    let ttl = Duration::from_mins(1);
    plane.prefix_append(&keys, &entries, 1_000, ttl, MEET).await.expect("to append");
    let replicas = fleet(&redis.url(), Grade::Paced, 1, &pairs("m", 1)).await;
    let late = &replicas[0];
    eventually(MEET, "both prefixes", async || {
        (matched(late, "p-0", &[1, 2]) == Some(100) && matched(late, "p-0", &[5, 6]) == Some(100)).then_some(())
    })
    .await;
    plane.close().await;
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lengths_that_one_replica_observes_are_in_the_plans_of_all() {
    let redis = Redis::start().await;
    // Rolesets without a range take every length, so there is something to plan.
    let replicas = fleet(&redis.url(), Grade::Paced, 2, &pairs("m", 2)).await;
    let knobs = PdKnobs { prompt_length_bucketing: true, bucket_serve: true, ..PdKnobs::default() };
    let mut keepers = [Keepers::default(), Keepers::default()];
    let on = |replica: &Replica| replica.model("m").bands.is_on();
    let mut refresh = |replicas: &[Replica]| {
        for (keepers, replica) in keepers.iter_mut().zip(replicas) {
            keepers.refresh(&replica.fleet.load(), &knobs, replica.clock.now());
        }
    };
    refresh(&replicas);
    assert!(on(&replicas[0]) && on(&replicas[1]));
    // A plan needs somebody's observations; this one has only the other replica's.
    for _ in 0..200 {
        replicas[0].model("m").bands.observe(100);
        replicas[0].model("m").bands.observe(3_000);
    }
    assert!(replicas[1].model("m").bands.plans().is_empty());
    let mut turn = 0;
    while replicas[1].model("m").bands.plans().is_empty() {
        turn += 1;
        assert!(turn < 200, "no plan");
        // The sketch is kept from the first telling on.
        replicas[0].model("m").bands.observe(100);
        replicas[0].model("m").bands.observe(3_000);
        refresh(&replicas);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    leave(replicas).await;
}
