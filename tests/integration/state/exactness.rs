//! Exactness: whatever replicas, network and server do, the sums in Redis are those of the shares that were told, and what
//! was told is in the end what is.

use tandem::load::Share;

use super::world::{PODS, World, pod};
use crate::harness::redis::Redis;

/// Steps of one run; each is a charge, a release, a call, or a mishap.
const STEPS: u64 = 100_000;

/// The seed may be given, to repeat a run.
fn seed() -> u64 {
    let given = std::env::var("TANDEM_TEST_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().map_or(1, |elapsed| elapsed.as_micros() as u64))
}

/// A charge or a release on a random pod.
fn work(world: &mut World, index: usize) {
    let name = pod(world.rng.below(PODS as usize) as u64);
    let started = world.now(index);
    let start = world.replicas[index].ledger.clock().ms_at(started).unwrap_or(1);
    let tokens = world.rng.below(5_000) as u64;
    let charge = match world.rng.below(3) {
        0 => Share { pending: 1, decode_tokens: tokens, decode_open: 1, decode_start_sum_ms: start, ..Share::ZERO },
        1 => Share { prefills: 1, prefill_tokens: tokens, kv_tokens: tokens, ..Share::ZERO },
        _ => Share { running: 1, ..Share::ZERO },
    };
    let releases = world.chance(55);
    let replica = &mut world.replicas[index];
    let cell = replica.cells.entry(name).or_default();
    // A release takes everything back, so that pods often become idle.
    *cell = if releases { Share::ZERO } else { cell.plus(charge) };
    replica.ledger.set(name, *cell);
}

fn step(world: &mut World) {
    world.steps += 1;
    let index = world.rng.below(world.replicas.len());
    match world.rng.below(1_000) {
        0..300 => work(world, index),
        300..780 => world.turn(index, 15),
        780..880 => world.claim(index, 15),
        880..950 => {
            if !world.late.is_empty() {
                let which = world.rng.below(world.late.len());
                let late = world.late.swap_remove(which);
                world.arrive(&late);
            }
        }
        950..965 => {
            // Stopped for longer than its lease; whether somebody reaps it before it goes on is left to the dice.
            if let Some((_, member)) = world.replicas[index].ledger.member() {
                world.expire(member);
            }
        }
        965..972 => {
            // Killed, and started again under the same name.
            let member = world.replicas[index].ledger.member();
            world.replicas[index] = world.replica();
            if let Some((_, member)) = member {
                world.expire(member);
            }
        }
        972..980 => {
            world.redis.say("SCRIPT FLUSH");
        }
        980..982 => {
            world.redis.say("FLUSHALL");
            world.model = super::model::Model::default();
        }
        982..990 => world.copy(),
        990..993 => world.fail_over(),
        // Time passes on the dead.
        _ => world.bury_strangers(),
    }
    let lost = if world.chance(50) { 0 } else { 20 };
    world.spread_news(lost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_are_exact_whatever_happens() {
    let seed = seed();
    println!("seed {seed} (TANDEM_TEST_SEED repeats it)");
    let mut redis = Redis::start().await;
    let address = redis.address();
    let mut world = World::new(address, 4, seed);
    let began = std::time::Instant::now();
    for round in 0..20 {
        world = tokio::task::spawn_blocking(move || {
            for _ in 0..STEPS / 20 {
                step(&mut world);
            }
            world.settle();
            world
        })
        .await
        .expect("no step fails");
        if round % 5 == 3 {
            // Its memory goes with it.
            drop(redis);
            redis = Redis::start_on(address).await.expect("Redis comes back");
            world.moved(address);
        }
    }
    let world = tokio::task::spawn_blocking(move || {
        for index in 0..world.replicas.len() {
            let replica = &mut world.replicas[index];
            for (name, cell) in &mut replica.cells {
                *cell = Share::ZERO;
                replica.ledger.set(*name, Share::ZERO);
            }
        }
        world.settle();
        for name in (0..PODS).map(pod) {
            assert!(world.model.entries(name).is_empty(), "nothing is left");
        }
        let keys = world.redis.say("KEYS *").list();
        assert!(keys.len() >= 3, "{keys:?}");
        for key in keys {
            assert!(world.redis.ask(&[b"PTTL", &key.bytes()]).number() > 0, "every key has a TTL");
        }
        world
    })
    .await
    .expect("everything is zero");
    let seconds = began.elapsed().as_secs_f64();
    println!("{} steps, {} calls in {seconds:.1} s", world.steps, world.calls);
    assert_eq!(world.steps, STEPS);
    drop(redis);
}
