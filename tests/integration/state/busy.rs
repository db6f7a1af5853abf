//! What a busy fleet of replicas costs Redis.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tandem::knobs::Grade;
use tandem::load::{DecodeCharge, PrefillCharge};
use tandem::rng::Rng;

use super::replicas::{MEET, Replica, fleet, leave, pairs};
use super::resp::Connection;
use crate::harness::eventually;
use crate::harness::redis::Redis;

/// Processor time that the server has used so far.
fn used(connection: &mut Connection) -> Duration {
    let info = connection.ask(&[b"INFO", b"cpu"]).text();
    let of = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
        line.trim_start_matches(':').trim().parse::<f64>().expect("seconds")
    };
    Duration::from_secs_f64(of("used_cpu_user") + of("used_cpu_sys"))
}

/// Sends so many requests a second over the replicas, as many as the machine manages, and returns the rate that came
/// about. A prefill takes 20 ms, an answer 200 ms.
async fn serve(replicas: &[Replica], rate: usize, time: Duration) -> f64 {
    let mut rng = Rng::new(3);
    let pods: Vec<Vec<_>> = replicas
        .iter()
        .map(|replica| {
            (0..16).map(|set| (replica.pod("m", &format!("p-{set}")), replica.pod("m", &format!("d-{set}")))).collect()
        })
        .collect();
    let mut open: VecDeque<(Option<PrefillCharge>, DecodeCharge)> = VecDeque::new();
    let (begun, mut sent, mut prefilled) = (Instant::now(), 0usize, 0usize);
    while begun.elapsed() < time {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let elapsed = begun.elapsed().as_secs_f64();
        let due = (elapsed * rate as f64) as usize;
        while sent < due {
            let (prefill, decode) = &pods[sent % replicas.len()][rng.below(16)];
            open.push_back((Some(PrefillCharge::open(prefill)), DecodeCharge::open(decode)));
            sent += 1;
        }
        let gone = sent - open.len();
        let ready = ((elapsed - 0.02).max(0.0) * rate as f64) as usize;
        for request in prefilled.max(gone)..ready.min(sent) {
            if let Some((prefill, decode)) = open.get_mut(request - gone) {
                drop(prefill.take());
                decode.hand_over();
            }
        }
        prefilled = prefilled.max(ready);
        let over = ((elapsed - 0.2).max(0.0) * rate as f64) as usize;
        for _ in gone..over.min(sent) {
            if let Some((_, decode)) = open.pop_front() {
                decode.complete();
            }
        }
    }
    sent as f64 / begun.elapsed().as_secs_f64()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_replicas_keep_redis_cool() {
    let redis = Redis::start().await;
    let replicas = fleet(&redis.url(), Grade::Paced, 16, &pairs("m", 16)).await;
    let mut connection = Connection::open(redis.address());
    let syncs = || replicas.iter().filter_map(|replica| Some(replica.status("m")?.counts.syncs)).sum::<u64>();
    for (rate, most) in [(1_000, 0.25), (16_000, 1.0)] {
        let (cpu, made, begun) = (used(&mut connection), syncs(), Instant::now());
        let reached = serve(&replicas, rate, Duration::from_secs(3)).await;
        let wall = begun.elapsed().as_secs_f64();
        let share = used(&mut connection).saturating_sub(cpu).as_secs_f64() / wall;
        let made = (syncs() - made) as f64 / wall;
        println!("16 replicas, {reached:.0} requests/s: {share:.3} of a core of Redis, {made:.0} syncs/s");
        // A machine that does other things makes every call dearer.
        let most = if std::env::var_os("TANDEM_SLOW_TESTS").is_some() { most } else { 2.0 * most };
        assert!(share < most, "{share}");
        for replica in &replicas {
            eventually(MEET, "an idle view", async || {
                (0..16).all(|set| replica.sees("m", &format!("d-{set}")).in_flight() == 0).then_some(())
            })
            .await;
        }
    }
    let stats = connection.ask(&[b"INFO", b"commandstats"]).text();
    for command in ["keys", "scan", "hscan", "zscan", "sscan", "hgetall", "smembers"] {
        assert!(!stats.contains(&format!("cmdstat_{command}:")), "{command} was used");
    }
    leave(replicas).await;
}
