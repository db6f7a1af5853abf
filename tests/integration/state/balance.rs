//! Both grades in real time: four replicas over a real Redis place requests on modelled engines.
//!
//! The engines are those of the staleness study: a prefill pod computes 8,000 tokens/s, first come first served, and 5 ms
//! per request; a decode pod takes 30 ms per token. What is compared with one replica that sees everything is the time to
//! first token and the spread of KV tokens, on the same arrivals. Minutes long: only with `TANDEM_SLOW_TESTS`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem::knobs::{DecodePolicy, Grade, PdKnobs, PrefillPolicy};
use tandem::load::Peers;
use tandem::rng::Rng;
use tandem::routing::Charges;
use tandem::state::plane::{ClaimOrder, Claimed, StatePlane};
use tokio::sync::Mutex;

use super::replicas::{Replica, fleet, leave, pairs, select};
use crate::harness::redis::Redis;

const PAIRS: usize = 16;

/// A request.
#[derive(Clone, Copy)]
struct Arrival {
    at: Duration,
    prompt: u64,
    answer: u64,
}

/// Poisson arrivals at `rate` with lengths like those of conversations: long-tailed prompts of about 1,000 tokens, answers
/// of about 200.
fn arrivals(rate: f64, seconds: f64) -> Vec<Arrival> {
    let (mut rng, mut at, mut arrivals) = (Rng::new(11), 0.0, Vec::new());
    while at < seconds {
        at -= (1.0 - rng.unit()).ln() / rate;
        let tail = |rng: &mut Rng, mean: f64| (mean * 0.5 * (1.0 - rng.unit()).powf(-0.5)).min(mean * 12.0) as u64;
        let (prompt, answer) = (tail(&mut rng, 1_000.0), tail(&mut rng, 150.0));
        arrivals.push(Arrival { at: Duration::from_secs_f64(at), prompt, answer });
    }
    arrivals
}

/// When each prefill pod is free again, and the KV tokens on each decode pod.
#[derive(Default)]
struct Engines {
    free: std::collections::BTreeMap<String, Instant>,
    kv: std::collections::BTreeMap<String, u64>,
}

/// Selects, and claims where that is the grade.
async fn place(replica: &Replica, prompt: u64, seed: u64, knobs: &PdKnobs, shared: bool) -> (String, String, Charges) {
    let model = replica.model("m");
    for tries in 0..16 {
        let since = model.port.claim_since();
        let peers = if shared && since.is_none() { model.peers.view() } else { Peers::ALONE };
        let ([prefill, decode], charges) =
            select(&model, replica.clock, &replica.prefix, knobs, peers, prompt, seed * 17 + tries);
        let names = (prefill.spec.key.name.to_string(), decode.spec.key.name.to_string());
        let Some(since) = since else { return (names.0, names.1, charges) };
        let pods = vec![Arc::clone(&prefill.state), Arc::clone(&decode.state)];
        match replica.plane.claim(ClaimOrder { model: Arc::clone(&model.name), pods, since }).await {
            Claimed::Again => drop(charges),
            _ => return (names.0, names.1, charges),
        }
    }
    panic!("a claim that never ends")
}

/// TTFT at the median and p99 in ms, and the time average of the largest over the mean KV tokens per decode pod.
async fn run(replicas: &[Replica], arrivals: &[Arrival], shared: bool) -> [f64; 3] {
    let knobs = Arc::new(PdKnobs {
        prefill_policy: PrefillPolicy::TokenLoad,
        decode_policy: DecodePolicy::TokenLoad,
        ..PdKnobs::default()
    });
    let engines = Arc::new(Mutex::new(Engines::default()));
    let (begun, times) = (tokio::time::Instant::now(), Arc::new(Mutex::new(Vec::new())));
    let (mut requests, mut imbalance, mut looks) = (Vec::new(), 0.0, 0u32);
    for (index, arrival) in arrivals.iter().enumerate() {
        tokio::time::sleep_until(begun + arrival.at).await;
        if index % 20 == 0 {
            let engines = engines.lock().await;
            let (most, sum) = (engines.kv.values().max().copied().unwrap_or(0), engines.kv.values().sum::<u64>());
            if sum > 0 {
                imbalance += most as f64 * PAIRS as f64 / sum as f64;
                looks += 1;
            }
        }
        let came = Instant::now();
        let replica = &replicas[index % replicas.len()];
        let (prefill, decode, mut charges) = place(replica, arrival.prompt, index as u64, &knobs, shared).await;
        let takes = Duration::from_secs_f64(arrival.prompt as f64 / 8_000.0 + 0.005);
        let ready = {
            let mut engines = engines.lock().await;
            let free = engines.free.entry(prefill).or_insert(came);
            *free = (*free).max(came) + takes;
            *free
        };
        let (arrival, clock) = (*arrival, replica.clock);
        let (engines, times) = (Arc::clone(&engines), Arc::clone(&times));
        requests.push(tokio::spawn(async move {
            tokio::time::sleep_until(ready.into()).await;
            times.lock().await.push((ready - came).as_secs_f64() * 1e3);
            if let Some(tokens) = &charges.tokens.prefill {
                tokens.prefill_done(clock.now());
            }
            drop(charges.prefill.take());
            charges.decode.hand_over();
            *engines.lock().await.kv.entry(decode.clone()).or_default() += arrival.prompt + arrival.answer;
            tokio::time::sleep(Duration::from_millis(30 * arrival.answer)).await;
            if let Some(kv) = engines.lock().await.kv.get_mut(&decode) {
                *kv -= arrival.prompt + arrival.answer;
            }
            charges.tokens.finish(clock.now());
        }));
    }
    for request in requests {
        request.await.expect("a request");
    }
    let mut times = times.lock().await.clone();
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    [at(0.5), at(0.99), imbalance / f64::from(looks.max(1))]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_grades_in_real_time() {
    if std::env::var_os("TANDEM_SLOW_TESTS").is_none() {
        println!("skipped: set TANDEM_SLOW_TESTS to run it");
        return;
    }
    let redis = Redis::start().await;
    let nowhere = Redis::start().await;
    // 16 prefill pods at 8,000 tokens/s: about 0.6 of what they can do.
    let arrivals = arrivals(70.0, 60.0);
    let load =
        arrivals.iter().map(|arrival| arrival.prompt as f64 / 8_000.0 + 0.005).sum::<f64>() / 60.0 / PAIRS as f64;
    let mut one = None;
    println!(
        "{} requests in 60 s, a load of {load:.2}; TTFT p50, p99 and KV imbalance, and as multiples of one replica",
        arrivals.len()
    );
    for (name, grade, count) in [
        ("one replica", None, 1),
        ("paced", Some(Grade::Paced), 4),
        ("claim", Some(Grade::Claim), 4),
        ("nothing shared", None, 4),
    ] {
        let replicas = if let Some(grade) = grade {
            fleet(&redis.url(), grade, count, &pairs("m", PAIRS)).await
        } else {
            // Replicas that have left the plane know only themselves.
            let mut alone = Vec::new();
            for _ in 0..count {
                alone.extend(fleet(&nowhere.url(), Grade::Paced, 1, &pairs("m", PAIRS)).await);
                if let Some(replica) = alone.last() {
                    replica.plane.leave().await;
                }
                nowhere.command(&["FLUSHALL"]).await;
            }
            alone
        };
        let figures = run(&replicas, &arrivals, grade.is_some()).await;
        let base = *one.get_or_insert(figures);
        let [p50, p99, kv] = figures;
        println!(
            "{name}: {p50:.0} ms, {p99:.0} ms, {kv:.3}; {:.2} / {:.2} / {:.2}",
            p50 / base[0],
            p99 / base[1],
            kv / base[2]
        );
        if grade.is_some() {
            leave(replicas).await;
        }
    }
}
