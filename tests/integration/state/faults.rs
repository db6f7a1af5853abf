//! What goes wrong between replicas and Redis does not reach requests: three replicas of either grade select and charge
//! all the time, over a proxy that breaks things, before, while and after.

use std::time::{Duration, Instant};

use tandem::knobs::{Grade, PlaneKnobs};
use tandem::load::DecodeCharge;
use tandem::state::redis::RedisConfig;
use tokio_util::sync::CancellationToken;

use super::replicas::{MEET, Replica, leave, met, pairs};
use super::under_load::{Measured, agree, alone, bound, busy_bound, drive, idle, percentile, slow};
use crate::harness::eventually;
use crate::harness::fault_proxy::{Fault, FaultProxy, Hole};
use crate::harness::redis::Redis;

const REPLICAS: usize = 3;
const PAIRS: usize = 8;
/// Connections of all replicas: each has one for calls and one for announcements.
const CONNECTIONS: u64 = 2 * 2 * REPLICAS as u64;
/// Longer than by default: a debug build on a busy machine takes some time for a claim, and this is no test of that.
const CLAIM_DEADLINE: Duration = Duration::from_millis(60);
/// Requests a second at the three replicas of a grade.
const RATE: u32 = 150;
/// How long after the end of what was wrong everything may be in order again.
const HEALS: Duration = Duration::from_secs(3);

/// Both fleets behind one proxy.
struct Stage {
    redis: Option<Redis>,
    proxy: FaultProxy,
    paced: Vec<Replica>,
    claim: Vec<Replica>,
}

/// What a fault is expected to do.
struct Expected {
    /// Claims stop meanwhile.
    stops_claims: bool,
    /// Connections made while it lasts, per connection that is needed.
    reconnects: u64,
}

fn start(url: &str, grade: Grade, seed: u64) -> Vec<Replica> {
    let config = RedisConfig::from_url(url).expect("a URL");
    let knobs = PlaneKnobs { grade, claim_deadline: CLAIM_DEADLINE, ..PlaneKnobs::default() };
    let specs = pairs(grade.name(), PAIRS);
    (0..REPLICAS as u64).map(|replica| Replica::start_with(&config, &knobs, &specs, seed + replica)).collect()
}

impl Stage {
    async fn set() -> Stage {
        let redis = Redis::start().await;
        let proxy = FaultProxy::start(redis.address()).await;
        let (paced, claim) = (start(&proxy.url(), Grade::Paced, 1), start(&proxy.url(), Grade::Claim, 11));
        let stage = Stage { redis: Some(redis), proxy, paced, claim };
        met(&stage.paced, "paced").await;
        met(&stage.claim, "claim").await;
        eventually(MEET, "claims", async || stage.claims_are(true).then_some(())).await;
        stage
    }

    fn replicas(&self) -> impl Iterator<Item = (&'static str, &Replica)> {
        let of = |name, replicas| std::iter::repeat(name).zip::<&[Replica]>(replicas);
        of("paced", &self.paced).chain(of("claim", &self.claim))
    }

    fn claims_are(&self, made: bool) -> bool {
        self.claim.iter().all(|replica| replica.model("claim").port.claim_since().is_some() == made)
    }

    /// Every replica hears of all others, and claims are made.
    fn is_whole(&self) -> bool {
        self.replicas().all(|(model, replica)| {
            let status = replica.status(model).expect("a status");
            let age = replica.model(model).port.age(replica.clock.now());
            status.members as usize == REPLICAS && age.is_some_and(|age| age < Duration::from_secs(1))
        }) && self.claims_are(true)
    }

    /// Requests go on all the time; something goes wrong and is mended (`fault`) a while after the start.
    async fn ordeal(&mut self, name: &str, expected: Expected, fault: impl AsyncFnOnce(&mut Trouble<'_>)) {
        let stop = CancellationToken::new();
        let mut trouble = Trouble { redis: self.redis.take(), proxy: &self.proxy };
        let hold = |pod: &str| -> Vec<DecodeCharge> {
            self.replicas().map(|(model, replica)| DecodeCharge::open(&replica.pod(model, pod))).collect()
        };
        let before = hold("d-0");
        let memory = resident_mib();
        let script = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let made = self.proxy.made();
            let stopped = async {
                if expected.stops_claims {
                    eventually(MEET, "claims to stop", async || self.claims_are(false).then_some(())).await;
                }
            };
            let during = async {
                tokio::time::sleep(Duration::from_millis(300)).await;
                // Both what comes and what goes meanwhile has to be known afterwards.
                drop(before);
                hold("d-1")
            };
            let ((), (), held) = tokio::join!(fault(&mut trouble), stopped, during);
            let healed = Instant::now();
            let made = self.proxy.made() - made;
            eventually(MEET, "the plane to be whole", async || self.is_whole().then_some(())).await;
            let whole = healed.elapsed();
            let again = self.proxy.made();
            stop.cancel();
            (healed, made, whole, again, held)
        };
        let (paced, claim, (healed, made, whole, again, held)) =
            tokio::join!(drive(&self.paced, "paced", RATE, &stop), drive(&self.claim, "claim", RATE, &stop), script);
        let agrees = || agree(&self.paced, "paced") && agree(&self.claim, "claim");
        eventually(MEET, "everybody to see everything", async || agrees().then_some(())).await;
        let exact = healed.elapsed();
        drop(held);
        let all_idle = || idle(&self.paced, "paced") && idle(&self.claim, "claim");
        eventually(MEET, "nothing to be left", async || all_idle().then_some(())).await;
        let redis = trouble.redis;
        let grown = resident_mib() - memory;

        let alone = alone(&pairs("paced", PAIRS), 500);
        println!("{name}: whole {whole:?} after it was mended, exact after {exact:?}");
        println!("  {made} connections made meanwhile of {CONNECTIONS} needed, {grown} MiB more");
        println!("  paced: {}", paced.summary());
        println!("  claim: {}", claim.summary());
        println!("  no Redis: {}", alone.summary());
        for measured in [&paced, &claim] {
            not_delayed(measured);
        }
        assert!(paced.claimed.is_empty());
        assert!(whole < bound(HEALS, 4) && exact < bound(HEALS, 4), "{name}: {whole:?} {exact:?}");
        assert!(made <= CONNECTIONS * expected.reconnects, "{name}: {made} connections");
        let calm = self.proxy.made() - again;
        assert!(calm <= CONNECTIONS, "{name}: {calm} more connections when all was well again");
        for (model, replica) in self.replicas() {
            let status = replica.status(model).expect("a status");
            assert!(status.own_pods <= 2 * PAIRS && status.remote_pods <= 2 * PAIRS, "{name}: {status:?}");
        }
        assert!(!slow() || grown < 32, "{name}: {grown} MiB");
        self.redis = redis;
    }

    async fn close(self) {
        leave(self.paced).await;
        leave(self.claim).await;
    }
}

/// What a fault may touch.
struct Trouble<'a> {
    redis: Option<Redis>,
    proxy: &'a FaultProxy,
}

impl Trouble<'_> {
    async fn set_for(&self, fault: Fault, time: Duration) {
        self.proxy.set(fault);
        tokio::time::sleep(time).await;
        self.proxy.heal();
    }
}

/// No request waited for Redis, but for its claim, and not longer than a claim may take.
fn not_delayed(measured: &Measured) {
    assert!(measured.selected.len() > 50, "{}", measured.summary());
    let p99 = percentile(&measured.selected, 0.99);
    assert!(p99 < busy_bound(Duration::from_millis(1), 40), "{}", measured.summary());
    let allowed = CLAIM_DEADLINE + measured.lag + busy_bound(Duration::from_millis(10), 40);
    assert!(measured.longest_claim() < allowed, "{}", measured.summary());
}

/// Memory of this process in MiB.
fn resident_mib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse::<i64>().expect("a number") / 1024
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The usual length, and that of tests that may take long.
fn length(usual: u64, long: u64) -> Duration {
    Duration::from_secs(if slow() { long } else { usual })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r69_two_seconds_of_latency() {
    let mut stage = Stage::set().await;
    let expected = Expected { stops_claims: true, reconnects: 2 + length(5, 20).as_secs() };
    let slow = Fault { latency: Duration::from_secs(2), ..Fault::default() };
    stage.ordeal("2 s of latency", expected, async |trouble| trouble.set_for(slow, length(5, 20)).await).await;
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fifth_of_all_chunks_half_a_second_late() {
    let mut stage = Stage::set().await;
    let expected = Expected { stops_claims: false, reconnects: 2 };
    let slow = Fault { slow_share: 0.2, ..Fault::default() };
    stage.ordeal("20 % at 500 ms", expected, async |trouble| trouble.set_for(slow, length(4, 20)).await).await;
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r69_a_black_hole_that_lets_go() {
    let mut stage = Stage::set().await;
    let expected = Expected { stops_claims: true, reconnects: 2 + length(5, 30).as_secs() };
    let hole = Fault { hole: Hole::Stalls, ..Fault::default() };
    stage.ordeal("a stall", expected, async |trouble| trouble.set_for(hole, length(5, 30)).await).await;
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r69_a_black_hole_in_which_every_connection_is_lost() {
    let mut stage = Stage::set().await;
    let expected = Expected { stops_claims: true, reconnects: 2 + length(5, 30).as_secs() };
    let hole = Fault { hole: Hole::Swallows, ..Fault::default() };
    stage.ordeal("a black hole", expected, async |trouble| trouble.set_for(hole, length(5, 30)).await).await;
    // Announcements come again, too: without them the median is half the idle poll.
    super::announcements::come_at_once(&stage.paced, "paced").await;
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resets_every_100_ms() {
    let mut stage = Stage::set().await;
    let resets = if slow() { 200 } else { 30 };
    let expected = Expected { stops_claims: false, reconnects: resets + 1 };
    stage
        .ordeal("resets", expected, async |trouble| {
            for _ in 0..resets {
                trouble.proxy.reset_all();
                tokio::time::sleep(ms(100)).await;
            }
        })
        .await;
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r69_connections_that_are_refused_are_not_tried_all_the_time() {
    let mut stage = Stage::set().await;
    // 20 ms, 40, 80 and so on up to about a second.
    let expected = Expected { stops_claims: true, reconnects: 7 + length(4, 20).as_secs() * 2 };
    stage
        .ordeal("refused", expected, async |trouble| {
            trouble.proxy.set(Fault { refuses: true, ..Fault::default() });
            trouble.proxy.reset_all();
            tokio::time::sleep(length(4, 20)).await;
            trouble.proxy.heal();
        })
        .await;
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r67_scripts_that_are_flushed_all_the_time() {
    let mut stage = Stage::set().await;
    let failures = |stage: &Stage| -> u64 {
        stage.replicas().map(|(model, replica)| replica.status(model).expect("a status").counts.failures).sum()
    };
    let before = failures(&stage);
    let expected = Expected { stops_claims: false, reconnects: 0 };
    stage
        .ordeal("SCRIPT FLUSH", expected, async |trouble| {
            let redis = trouble.redis.as_ref().expect("Redis");
            let ends = Instant::now() + length(3, 20);
            while Instant::now() < ends {
                redis.command(&["SCRIPT", "FLUSH"]).await;
                tokio::time::sleep(ms(2)).await;
            }
        })
        .await;
    assert_eq!(failures(&stage), before, "syncs that failed");
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_without_data() {
    let mut stage = Stage::set().await;
    let expected = Expected { stops_claims: true, reconnects: 10 };
    stage
        .ordeal("a restart", expected, async |trouble| {
            let redis = trouble.redis.take().expect("Redis");
            let address = redis.address();
            drop(redis);
            tokio::time::sleep(ms(1_500)).await;
            trouble.redis = Some(Redis::start_on(address).await.expect("Redis comes back"));
        })
        .await;
    super::announcements::come_at_once(&stage.paced, "paced").await;
    stage.close().await;
}
