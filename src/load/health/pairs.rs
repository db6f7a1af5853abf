//! The pairs of a model that have failed, and whether anything of the model is ejected at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{EjectionPolicy, Health, HealthView, Report};
use crate::clock::Tick;
use crate::fleet::PodState;

/// Pairs remembered per model. A fleet of 64 prefill and 64 decode pods that all fail each other is as large; of a
/// larger one some pairs would be noticed as failing pods only.
pub const MAX_PAIRS: usize = 4096;

/// A prefill and a decode incarnation, by [`PodState::slot`].
type Key = (u32, u32);

/// The living health of a model: one entry for each pair that has failed and has not made up for it, and a count of
/// ejections. Outlives snapshots.
#[derive(Debug, Default)]
pub struct Pairs {
    entries: papaya::HashMap<Key, Arc<Health>, foldhash::fast::RandomState>,
    /// Ejections of pods and pairs so far; only grows.
    ejections: AtomicU64,
}

/// How many of [`Pairs`]' ejections are known to be over, as one snapshot sees it. Each snapshot has its own, since an
/// older one does not know all pods.
#[derive(Debug, Default)]
pub struct Settled(AtomicU64);

impl Clone for Settled {
    /// The copy has yet to find out: its pods may become others.
    fn clone(&self) -> Self {
        Settled::default()
    }
}

/// What a request says about its pods and about the two together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdicts {
    /// About the prefill pod.
    pub prefill: Report,
    /// About the decode or only pod.
    pub decode: Report,
    /// About the way between the two.
    pub pair: Report,
}

/// Who was ejected by a report, and for how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ejections {
    /// The prefill pod.
    pub prefill: Option<Duration>,
    /// The decode or only pod.
    pub decode: Option<Duration>,
    /// The pair.
    pub pair: Option<Duration>,
}

impl Ejections {
    /// Pods ejected.
    pub fn pods(&self) -> u64 {
        u64::from(self.prefill.is_some()) + u64::from(self.decode.is_some())
    }

    /// Whether nobody was.
    pub fn is_empty(&self) -> bool {
        *self == Ejections::default()
    }
}

/// One entry of [`Pairs`] at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairHealth {
    /// Slot of the prefill incarnation.
    pub prefill: u32,
    /// Slot of the decode incarnation.
    pub decode: u32,
    /// Its health.
    pub health: HealthView,
}

impl Pairs {
    /// Takes note of what a request says at its end, or as soon as it knows; each verdict once. `prefill` is `None` for
    /// a single pod, whose verdict is the decode one; the other two then count for nothing. `jitter` is any random
    /// number.
    pub fn report(
        &self,
        prefill: Option<&PodState>,
        decode: &PodState,
        verdicts: Verdicts,
        policy: &EjectionPolicy,
        now: Tick,
        jitter: u64,
    ) -> Ejections {
        // Independent of each other, or two subjects ejected together would come back together.
        let jitters = [jitter, jitter.rotate_left(21), jitter.rotate_left(42)];
        let ejections = Ejections {
            prefill: prefill.and_then(|pod| pod.health.report(verdicts.prefill, policy, now, jitters[0])),
            decode: decode.health.report(verdicts.decode, policy, now, jitters[1]),
            pair: prefill.and_then(|prefill| {
                self.report_pair((prefill.slot, decode.slot), verdicts.pair, policy, now, jitters[2])
            }),
        };
        if !ejections.is_empty() {
            // After the states: whoever reads this count also sees what it stands for.
            self.ejections.fetch_add(1, Ordering::AcqRel);
        }
        ejections
    }

    fn report_pair(
        &self,
        key: Key,
        report: Report,
        policy: &EjectionPolicy,
        now: Tick,
        jitter: u64,
    ) -> Option<Duration> {
        match report {
            Report::Neutral => None,
            Report::Success => {
                if !self.entries.is_empty() {
                    let entries = self.entries.pin();
                    if let Some(health) = entries.get(&key) {
                        health.report(report, policy, now, jitter);
                        // A failure that was counted just now on the entry that goes is lost, as if it had been first.
                        let _ = entries.remove_if(&key, |_, health| health.spotless());
                    }
                }
                None
            }
            Report::Failure if policy.failures == 0 => None,
            Report::Failure => {
                let entries = self.entries.pin();
                if let Some(health) = entries.get(&key) {
                    return health.report(report, policy, now, jitter);
                }
                if entries.len() >= MAX_PAIRS {
                    return None;
                }
                entries.get_or_insert_with(key, Arc::default).report(report, policy, now, jitter)
            }
        }
    }

    /// Another replica has ejected this pod, or with a prefill pod these two together: what it has seen counts here as if
    /// it had been seen here. When they may be tried again is this replica's own matter.
    pub fn eject(
        &self,
        prefill: Option<&PodState>,
        decode: &PodState,
        policy: &EjectionPolicy,
        now: Tick,
        jitter: u64,
    ) -> Option<Duration> {
        let ejected = (0..policy.failures).find_map(|_| match prefill {
            Some(prefill) => self.report_pair((prefill.slot, decode.slot), Report::Failure, policy, now, jitter),
            None => decode.health.report(Report::Failure, policy, now, jitter),
        });
        if ejected.is_some() {
            self.ejections.fetch_add(1, Ordering::AcqRel);
        }
        ejected
    }

    /// The entry of a pair, if it has one.
    pub fn get(&self, prefill: u32, decode: u32) -> Option<Arc<Health>> {
        if self.entries.is_empty() { None } else { self.entries.pin().get(&(prefill, decode)).cloned() }
    }

    /// Whether neither this decode pod nor its pair with that prefill pod is ejected: what a request should look for that
    /// goes on to another decode pod. It is no probe, so those that wait for one do not count.
    pub fn well(&self, prefill: &PodState, decode: &PodState) -> bool {
        !decode.health.ejected() && self.get(prefill.slot, decode.slot).is_none_or(|health| !health.ejected())
    }

    /// Whether nothing of the snapshot with this mark is ejected, as far as anybody has looked.
    pub fn quiet(&self, settled: &Settled) -> bool {
        settled.0.load(Ordering::Acquire) == self.ejections.load(Ordering::Acquire)
    }

    /// Ejections so far: to be read before looking, and given to [`Pairs::settle`] if nothing was found.
    pub fn ejections(&self) -> u64 {
        self.ejections.load(Ordering::Acquire)
    }

    /// Notes that of all `ejections` none is in force any more.
    pub fn settle(&self, settled: &Settled, ejections: u64) {
        settled.0.fetch_max(ejections, Ordering::AcqRel);
    }

    /// The ejected pairs that requests keep away from, in order, and whether any pair is ejected at all.
    pub fn excluded(&self, now: Tick) -> (Vec<(u32, u32)>, bool) {
        if self.entries.is_empty() {
            return (Vec::new(), false);
        }
        let (mut excluded, mut any) = (Vec::new(), false);
        for (key, health) in &self.entries.pin() {
            any |= health.ejected();
            if health.excluded(now) {
                excluded.push(*key);
            }
        }
        excluded.sort_unstable();
        (excluded, any)
    }

    /// Every entry, in order.
    pub fn list(&self, now: Tick) -> Vec<PairHealth> {
        let entries = self.entries.pin();
        let mut list: Vec<PairHealth> = entries
            .iter()
            .map(|(&(prefill, decode), health)| PairHealth { prefill, decode, health: health.view(now) })
            .collect();
        list.sort_unstable_by_key(|pair| (pair.prefill, pair.decode));
        list
    }

    /// Pairs that are ejected.
    pub fn ejected(&self) -> usize {
        self.entries.pin().values().filter(|health| health.ejected()).count()
    }

    /// Forgets the pairs of incarnations that are not among `slots`.
    pub fn keep(&self, slots: impl Fn(u32) -> bool) {
        self.entries.pin().retain(|(prefill, decode), _| slots(*prefill) && slots(*decode));
    }
}
