//! Selections of whole replicas, one after the other, while something happens to what they share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tandem::clock::Clock;
use tandem::fleet::{Model, PodSpec, Snapshot, build};
use tandem::knobs::PdKnobs;
use tandem::load::Peers;
use tandem::state::plane::{ClaimOrder, Claimed, StatePlane};
use tokio_util::sync::CancellationToken;

use super::replicas::{Replica, prefix, select};

/// Tokens of a request's prompt.
const PROMPT: u64 = 100;
/// How long a request keeps its charges.
const SERVED: Duration = Duration::from_millis(80);

/// What happened.
#[derive(Debug, Default)]
pub struct Measured {
    /// Times of selections, each with its charge.
    pub selected: Vec<Duration>,
    /// Times of claims, and what became of them.
    pub claimed: Vec<(Duration, Claimed)>,
    /// How much later than wanted this was looked at, at worst: what the machine was busy with otherwise.
    pub lag: Duration,
}

impl Measured {
    /// Percentiles of both times, and how many claims there were of each kind.
    pub fn summary(&self) -> String {
        let count = |what| self.claimed.iter().filter(|(_, claimed)| *claimed == what).count();
        format!(
            "{} selections, p50 {:?} p99 {:?}; claims: {} granted, {} again, {} unsure, longest {:?}; lag {:?}",
            self.selected.len(),
            percentile(&self.selected, 0.5),
            percentile(&self.selected, 0.99),
            count(Claimed::Granted),
            count(Claimed::Again),
            count(Claimed::Unsure),
            self.longest_claim(),
            self.lag
        )
    }

    pub fn longest_claim(&self) -> Duration {
        self.claimed.iter().map(|(took, _)| *took).max().unwrap_or_default()
    }
}

/// Of times in any order; zero of none.
pub fn percentile(times: &[Duration], part: f64) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted.get((sorted.len().saturating_sub(1) as f64 * part) as usize).copied().unwrap_or_default()
}

/// Strict bounds hold on a machine with nothing else to do; in CI they are wide.
pub fn bound(strict: Duration, factor: u32) -> Duration {
    if slow() { strict } else { strict * factor }
}

/// The same for times that a processor needs: a debug build needs more of them.
pub fn busy_bound(strict: Duration, factor: u32) -> Duration {
    if slow() && cfg!(debug_assertions) { strict * 5 } else { bound(strict, factor) }
}

/// Tests may take long.
pub fn slow() -> bool {
    std::env::var_os("TANDEM_SLOW_TESTS").is_some()
}

/// Requests at the replicas in turn, so many a second in all, until it is told to stop; ends when all have been served.
pub async fn drive(replicas: &[Replica], model: &str, per_second: u32, stop: &CancellationToken) -> Measured {
    let models: Vec<Arc<Model>> = replicas.iter().map(|replica| replica.model(model)).collect();
    let mut beat = tokio::time::interval(Duration::from_secs(1) / per_second);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut measured, mut served) = (Measured::default(), FuturesUnordered::new());
    for request in 0usize.. {
        tokio::select! {
            () = stop.cancelled() => break,
            wanted = beat.tick() => measured.lag = measured.lag.max(wanted.elapsed()),
            Some(claim) = served.next() => {
                measured.claimed.extend(claim);
                continue;
            }
        }
        let (replica, model) = (&replicas[request % replicas.len()], &models[request % replicas.len()]);
        let since = model.port.claim_since();
        let peers = if since.is_some() { Peers::ALONE } else { model.peers.view() };
        let began = Instant::now();
        let (pods, charges) =
            select(model, replica.clock, &replica.prefix, &PdKnobs::default(), peers, PROMPT, request as u64);
        measured.selected.push(began.elapsed());
        let claim = since.map(|since| {
            let pods = pods.iter().map(|pod| Arc::clone(&pod.state)).collect();
            replica.plane.claim(ClaimOrder { model: Arc::clone(&model.name), pods, since })
        });
        served.push(async move {
            let began = Instant::now();
            let claim = match claim {
                Some(claim) => Some(claim.await).map(|claimed| (began.elapsed(), claimed)),
                None => None,
            };
            // Who is to decide again gives his charges back first.
            if !matches!(claim, Some((_, Claimed::Again))) {
                tokio::time::sleep(SERVED).await;
            }
            drop(charges);
            claim
        });
    }
    while let Some(claim) = served.next().await {
        measured.claimed.extend(claim);
    }
    measured
}

/// The same selections where nobody shares anything.
pub fn alone(specs: &[PodSpec], selections: usize) -> Measured {
    let snapshot = build(&Snapshot::default(), specs, &mut 0);
    let model = snapshot.models.values().next().expect("a model");
    let (clock, prefix) = (Clock::system(), prefix());
    let mut open = std::collections::VecDeque::new();
    let mut measured = Measured::default();
    for seed in 0..selections {
        let began = Instant::now();
        let (_, charges) = select(model, clock, &prefix, &PdKnobs::default(), Peers::ALONE, PROMPT, seed as u64);
        measured.selected.push(began.elapsed());
        open.push_back(charges);
        if open.len() > 24 {
            drop(open.pop_front());
        }
    }
    measured
}

/// Every replica sees on every pod what all together have there.
pub fn agree(replicas: &[Replica], model: &str) -> bool {
    let models: Vec<Arc<Model>> = replicas.iter().map(|replica| replica.model(model)).collect();
    let sum = |pod: usize| {
        models
            .iter()
            .map(|model| model.pods[pod].state.load.view())
            .fold([0; 3], |sum, own| [sum[0] + own.prefills, sum[1] + own.pending, sum[2] + own.running])
    };
    (0..models[0].pods.len()).all(|pod| {
        let sum = sum(pod);
        replicas.iter().zip(&models).all(|(replica, model)| {
            let seen = model.pods[pod].state.load.total(replica.clock.now());
            [seen.prefills, seen.pending, seen.running] == sum
        })
    })
}

/// Nobody sees anything anywhere.
pub fn idle(replicas: &[Replica], model: &str) -> bool {
    replicas.iter().all(|replica| {
        let now = replica.clock.now();
        replica.model(model).pods.iter().all(|pod| pod.state.load.total(now).in_flight() == 0)
    })
}
