//! The shared plane of whole replicas over a real Redis: what one charges, all see.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tandem::knobs::Grade;
use tandem::load::{DecodeCharge, Peers, PrefillCharge};
use tandem::rng::Rng;
use tandem::routing::Charges;
use tandem::state::plane::{ClaimOrder, Claimed, StatePlane};

use super::replicas::{MEET, Replica, fleet, leave, pairs, select};
use crate::harness::eventually;
use crate::harness::redis::Redis;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r63_what_one_replica_charges_all_see() {
    let redis = Redis::start().await;
    let replicas = fleet(&redis.url(), Grade::Paced, 3, &pairs("m", 2)).await;
    let [one, two, three] = &replicas[..] else { panic!("three replicas") };
    let held = (PrefillCharge::open(&one.pod("m", "p-0")), DecodeCharge::open(&one.pod("m", "d-1")));
    let mut more = DecodeCharge::open(&two.pod("m", "d-1"));
    more.hand_over();
    for replica in [one, two, three] {
        eventually(MEET, "the same view", async || {
            let (prefill, decode) = (replica.sees("m", "p-0"), replica.sees("m", "d-1"));
            ((prefill.prefills, decode.pending, decode.running) == (1, 1, 1)).then_some(())
        })
        .await;
        assert_eq!(replica.sees("m", "d-0").in_flight() + replica.sees("m", "p-1").in_flight(), 0);
    }
    drop((held, more));
    for replica in &replicas {
        eventually(MEET, "an idle view", async || {
            ["p-0", "p-1", "d-0", "d-1"].iter().all(|pod| replica.sees("m", pod).in_flight() == 0).then_some(())
        })
        .await;
    }
    redis.assert_keys_expire().await;
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_leaves_takes_its_work_along_at_once() {
    let redis = Redis::start().await;
    let mut replicas = fleet(&redis.url(), Grade::Paced, 2, &pairs("m", 1)).await;
    let leaver = replicas.pop().expect("a replica");
    let stays = &replicas[0];
    let _held = DecodeCharge::open(&leaver.pod("m", "d-0"));
    eventually(MEET, "the charge", async || (stays.sees("m", "d-0").pending == 1).then_some(())).await;
    let left = Instant::now();
    leaver.plane.leave().await;
    eventually(MEET, "the charge to go", async || (stays.sees("m", "d-0").pending == 0).then_some(())).await;
    assert!(left.elapsed() < Duration::from_millis(2_500), "not only when the lease is over: {:?}", left.elapsed());
    eventually(MEET, "to be alone", async || (stays.status("m")?.members == 1).then_some(())).await;
    leave(replicas).await;
}

/// Pods come and go on one side while they are charged on the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_on_pods_that_are_discovered_later_is_there_when_they_are() {
    let redis = Redis::start().await;
    let mut replicas = fleet(&redis.url(), Grade::Paced, 2, &pairs("m", 1)).await;
    let more = pairs("m", 2);
    replicas[0].discover(&more);
    let held = DecodeCharge::open(&replicas[0].pod("m", "d-1"));
    let other = &replicas[1];
    eventually(MEET, "the charge", async || (other.status("m")?.remote_pods == 1).then_some(())).await;
    replicas[1].discover(&more);
    let other = &replicas[1];
    eventually(MEET, "the charge on its pod", async || (other.sees("m", "d-1").pending == 1).then_some(())).await;
    // The pod leaves with the charge open, and the charge ends.
    replicas[0].discover(&pairs("m", 1));
    drop(held);
    let other = &replicas[1];
    eventually(MEET, "the charge to go", async || (other.sees("m", "d-1").pending == 0).then_some(())).await;
    // The model goes and comes back: the link is another one.
    replicas[0].discover(&pairs("other", 1));
    replicas[0].discover(&more);
    let held = DecodeCharge::open(&replicas[0].pod("m", "d-0"));
    let other = &replicas[1];
    eventually(MEET, "the charge on the new link", async || (other.sees("m", "d-0").pending == 1).then_some(())).await;
    drop(held);
    leave(replicas).await;
}

/// One request: selected and claimed, again if need be. Returns the name of its prefill pod, its guards, and the tries.
async fn claimed(replica: &Replica, seed: u64) -> (String, Charges, u32) {
    let model = replica.model("m");
    let knobs = tandem::knobs::PdKnobs::default();
    for tries in 1.. {
        let since = model.port.claim_since().expect("claims are made");
        let ([prefill, decode], charges) =
            select(&model, replica.clock, &replica.prefix, &knobs, Peers::ALONE, 100, seed + u64::from(tries));
        let pods = vec![Arc::clone(&prefill.state), Arc::clone(&decode.state)];
        let order = ClaimOrder { model: Arc::clone(&model.name), pods, since };
        match replica.plane.claim(order).await {
            Claimed::Granted => return (prefill.spec.key.name.to_string(), charges, tries),
            Claimed::Again => drop(charges),
            Claimed::Unsure => panic!("unsure"),
        }
    }
    unreachable!("claims end")
}

/// Eight idle pairs, and a request at each of eight replicas at the same time, again and again. Replicas that do not know of
/// one another would put two or more on the same pair about 17 times in six rounds; fewer than 7 times is one chance in
/// 100,000.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r60_claims_at_eight_replicas_keep_out_of_one_anothers_way() {
    const ROUNDS: u64 = 6;
    let redis = Redis::start().await;
    let config = tandem::state::redis::RedisConfig::from_url(&redis.url()).expect("a URL");
    // Nothing may be decided by the slowness of the machine.
    let knobs = tandem::knobs::PlaneKnobs {
        grade: Grade::Claim,
        claim_deadline: Duration::from_secs(20),
        ..tandem::knobs::PlaneKnobs::default()
    };
    let replicas: Vec<Replica> =
        (0..8).map(|seed| Replica::start_with(&config, &knobs, &pairs("m", 8), seed + 1)).collect();
    super::replicas::met(&replicas, "m").await;
    for replica in &replicas {
        let model = replica.model("m");
        eventually(MEET, "claims", async || model.port.claim_since().map(drop)).await;
    }
    let (mut crowded, mut again) = (0, 0);
    for round in 0..ROUNDS {
        let requests = replicas.iter().zip(0..).map(|(replica, place)| claimed(replica, (round * 8 + place) * 1_000));
        let all = join_all(requests).await;
        let pods: std::collections::BTreeSet<&String> = all.iter().map(|(pod, _, _)| pod).collect();
        crowded += 8 - pods.len();
        again += all.iter().map(|(_, _, tries)| tries - 1).sum::<u32>();
        drop(all);
        for replica in &replicas {
            eventually(MEET, "an idle view", async || {
                (0..8).all(|set| replica.sees("m", &format!("d-{set}")).in_flight() == 0).then_some(())
            })
            .await;
        }
    }
    println!("{ROUNDS} rounds of 8 claims at once: {crowded} on a pair that had one, {again} decided again");
    assert!(crowded < 7, "{crowded}");
    assert!(again > 0, "nobody was in anybody's way");
    leave(replicas).await;
}

/// Percentile of sorted times.
fn at(sorted: &[Duration], part: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

/// Strict bounds hold on a machine with nothing else to do; in CI they are wide.
fn bound(strict: Duration) -> Duration {
    if std::env::var_os("TANDEM_SLOW_TESTS").is_some() { strict } else { strict * 40 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn freshness_a_charge_on_an_idle_fleet_is_seen_within_2_ms_and_a_round_trip() {
    let redis = Redis::start().await;
    let replicas = fleet(&redis.url(), Grade::Paced, 4, &pairs("m", 4)).await;
    let mut seen = Vec::new();
    let mut rng = Rng::new(1);
    for turn in 0..60 {
        // Idle: longer than any pace.
        tokio::time::sleep(Duration::from_millis(30)).await;
        let pod = format!("d-{}", rng.below(4));
        let charged = Instant::now();
        let held = DecodeCharge::open(&replicas[turn % 4].pod("m", &pod));
        while !replicas.iter().all(|replica| replica.sees("m", &pod).pending == 1) {
            assert!(charged.elapsed() < MEET, "not seen");
            tokio::task::yield_now().await;
        }
        seen.push(charged.elapsed());
        drop(held);
        eventually(MEET, "idle again", async || {
            replicas.iter().all(|replica| replica.sees("m", &pod).pending == 0).then_some(())
        })
        .await;
    }
    let syncs: Vec<Duration> = replicas.iter().filter_map(|replica| replica.status("m")?.last_sync).collect();
    seen.sort();
    println!(
        "a charge is seen by all of 4 replicas after {:?} (median), {:?} (p99); syncs took {syncs:?}",
        at(&seen, 0.5),
        at(&seen, 0.99)
    );
    assert!(at(&seen, 0.5) < bound(Duration::from_millis(3)), "{seen:?}");
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn freshness_under_a_thousand_requests_a_second() {
    let redis = Redis::start().await;
    let replicas = fleet(&redis.url(), Grade::Paced, 8, &pairs("m", 16)).await;
    let (mut ages, mut open, mut rng) = (Vec::new(), std::collections::VecDeque::new(), Rng::new(7));
    let mut beat = tokio::time::interval(Duration::from_millis(1));
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    let started = Instant::now();
    for request in 0..4_000usize {
        beat.tick().await;
        let replica = &replicas[request % 8];
        // At the moment of selection.
        if request > 500 {
            ages.push(replica.model("m").port.age(replica.clock.now()).expect("a view"));
        }
        let set = rng.below(16);
        let prefill = PrefillCharge::open(&replica.pod("m", &format!("p-{set}")));
        let mut decode = DecodeCharge::open(&replica.pod("m", &format!("d-{set}")));
        open.push_back((Some(prefill), decode));
        // Prefills take some 20 ms, answers 200 ms.
        if let Some(place) = open.len().checked_sub(20)
            && let Some((prefill, handed)) = open.get_mut(place)
        {
            drop(prefill.take());
            handed.hand_over();
        }
        if open.len() > 200 {
            (_, decode) = open.pop_front().expect("an open request");
            decode.complete();
        }
    }
    let rate = 4_000.0 / started.elapsed().as_secs_f64();
    drop(open);
    ages.sort();
    let (median, p99) = (at(&ages, 0.5), at(&ages, 0.99));
    println!("8 replicas, {rate:.0} requests/s: the view is {median:?} old at the median and {p99:?} at p99");
    assert!(median <= bound(Duration::from_millis(5)) && p99 <= bound(Duration::from_millis(15)), "{median:?} {p99:?}");
    for replica in &replicas {
        eventually(MEET, "an idle view", async || {
            (0..16).all(|set| replica.sees("m", &format!("d-{set}")).in_flight() == 0).then_some(())
        })
        .await;
    }
    redis.assert_keys_expire().await;
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r72_changes_of_the_fleet_open_no_connections() {
    let redis = Redis::start().await;
    let mut replicas = fleet(&redis.url(), Grade::Paced, 2, &pairs("m", 1)).await;
    let clients = async || {
        let info = redis.command(&["INFO", "clients"]).await;
        let line = info.lines().find_map(|line| line.strip_prefix("connected_clients:"));
        line.expect("connected clients").trim().parse::<u32>().expect("a number")
    };
    // Two of each replica, and the one that asks.
    let before = 2 * 2 + 1;
    eventually(MEET, "all connections", async || (clients().await == before).then_some(())).await;
    for change in 0..200 {
        for replica in &mut replicas {
            // Models come and go as well.
            let mut specs = pairs("m", 1 + change % 3);
            specs.extend(pairs(if change % 2 == 0 { "a" } else { "b" }, 1));
            replica.discover(&specs);
        }
        tokio::task::yield_now().await;
    }
    super::replicas::met(&replicas, "m").await;
    eventually(MEET, "as many as before", async || (clients().await == before).then_some(())).await;
    leave(replicas).await;
}
