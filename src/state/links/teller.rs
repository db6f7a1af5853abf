//! Tells the others what this replica finds out, and takes in what they do: one task for all models.
//!
//! Every beat it appends what was found to each model's stream and reads on in it: at once that a pod fails, the rest once
//! in a period. A model of which nothing is heard is read less often. What cannot be told is dropped and counted, never kept: the next request finds it out again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio_util::sync::CancellationToken;

use super::sketches::Sketches;
use crate::clock::{Clock, Tick};
use crate::fleet::{Fleet, Model, PodState};
use crate::knobs::{Ejection, VtcKnobs};
use crate::load::{Sessions, Users};
use crate::prefix::{PrefixIndex, PrefixUpdate};
use crate::rng::Rng;
use crate::state::codec::{decode, encode};
use crate::state::findings::{Finding, Told};
use crate::state::keys::ModelKeys;
use crate::state::redis::{Plane, Reconnects, StreamId};
use crate::telemetry::Metrics;

/// Findings that wait to be told.
const MAX_WAITING: usize = 8_192;
/// Bytes of findings that wait to be told.
const MAX_WAITING_BYTES: usize = 16 << 20;
/// Bytes of findings in one entry of the stream, about.
const ENTRY_BYTES: usize = 64 << 10;
/// Entries in one call.
const MAX_ENTRIES: usize = 16;
/// Entries that a stream keeps, about.
const KEPT: u64 = 4_096;
/// How long a stream outlives its last entry: as long as the prefix index keeps what nobody asks for.
const TTL: Duration = Duration::from_mins(20);
/// Entries read at a time.
const READ: u32 = 128;
/// Time between two beats, at most: how late it is told that a pod fails.
const BEAT: Duration = Duration::from_millis(100);
/// Failures that wait to be told.
const MAX_FAILURES: usize = 1_024;
/// Beats between two looks at a quiet stream, at most.
const MOST_BEATS: u64 = 10;
/// Time for a call.
const DEADLINE: Duration = Duration::from_secs(1);

/// Findings on their way to the task that tells them.
#[derive(Debug)]
pub(super) struct Findings {
    waiting: ArrayQueue<(Arc<str>, Finding)>,
    failures: ArrayQueue<(Arc<str>, Finding)>,
    bytes: AtomicUsize,
    prefixes: bool,
    metrics: Arc<Metrics>,
}

impl Findings {
    /// `prefixes`: whether it is told which prefixes pods hold.
    pub(super) fn new(prefixes: bool, metrics: Arc<Metrics>) -> Findings {
        Findings {
            waiting: ArrayQueue::new(MAX_WAITING),
            failures: ArrayQueue::new(MAX_FAILURES),
            bytes: AtomicUsize::new(0),
            prefixes,
            metrics,
        }
    }

    /// Takes a finding; drops it, and counts that, when too much waits already. Never waits.
    pub(super) fn push(&self, model: &Arc<str>, finding: Finding) {
        match finding {
            Finding::Prefix { .. } if !self.prefixes => return,
            Finding::Prefix { .. } | Finding::Session { .. } | Finding::User { .. } => {}
            Finding::PodFails { .. } | Finding::PairFails { .. } => {
                if self.failures.push((Arc::clone(model), finding)).is_err() {
                    self.metrics.findings_dropped(1);
                }
                return;
            }
        }
        let size = finding.size();
        let before = self.bytes.fetch_add(size, Ordering::AcqRel);
        if before.saturating_add(size) > MAX_WAITING_BYTES || self.waiting.push((Arc::clone(model), finding)).is_err() {
            self.bytes.fetch_sub(size, Ordering::AcqRel);
            self.metrics.findings_dropped(1);
        }
    }

    /// What fails, and with `all`, what else was found.
    fn take(&self, all: bool) -> BTreeMap<Arc<str>, Vec<Finding>> {
        let mut taken: BTreeMap<Arc<str>, Vec<Finding>> = BTreeMap::new();
        for _ in 0..MAX_FAILURES {
            let Some((model, finding)) = self.failures.pop() else { break };
            taken.entry(model).or_default().push(finding);
        }
        for _ in 0..if all { MAX_WAITING } else { 0 } {
            let Some((model, finding)) = self.waiting.pop() else { break };
            self.bytes.fetch_sub(finding.size(), Ordering::AcqRel);
            taken.entry(model).or_default().push(finding);
        }
        taken
    }
}

/// Where what the others find goes.
#[derive(Clone, Debug)]
pub struct Listeners {
    /// Prefixes that pods hold.
    pub prefix: Arc<PrefixIndex>,
    /// Sizes of sessions' prompts.
    pub sessions: Arc<Sessions>,
    /// Tokens of users.
    pub users: Arc<Users>,
    /// For how long those count.
    pub vtc: VtcKnobs,
    /// How pods that fail are treated.
    pub ejection: Ejection,
}

/// What the task works with.
pub(super) struct Teller {
    pub(super) plane: Plane,
    pub(super) fleet: Arc<Fleet>,
    pub(super) findings: Arc<Findings>,
    pub(super) listeners: Listeners,
    pub(super) metrics: Arc<Metrics>,
    pub(super) clock: Clock,
    pub(super) period: Duration,
    pub(super) replica: u64,
    pub(super) leaving: CancellationToken,
    pub(super) reconnects: Reconnects,
}

/// How far a model's stream has been read.
#[derive(Debug, Default)]
struct Place {
    after: StreamId,
    /// Looks in a row that found nothing.
    quiet: u32,
    /// The turn at which to look next.
    next: u64,
}

impl Place {
    fn looked(&mut self, found: bool, turn: u64) {
        self.quiet = if found { 0 } else { self.quiet.saturating_add(1).min(8) };
        self.next = turn + (1 << self.quiet.saturating_sub(1)).min(MOST_BEATS);
    }
}

/// Runs until everybody leaves.
pub(super) async fn run(mut this: Teller) {
    let mut places: HashMap<Arc<str>, Place> = HashMap::new();
    let mut sketches = Sketches::new(this.replica);
    let mut beat = tokio::time::interval(this.period.min(BEAT));
    let mut rest_at = Tick(0);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut rng = Rng::new(this.replica);
    for turn in 0u64.. {
        tokio::select! {
            _ = beat.tick() => {}
            again = this.reconnects.next() => {
                if again.is_none() {
                    return;
                }
                // Another server may number its entries otherwise. Hearing something twice does no harm.
                places.clear();
                continue;
            }
            () = this.leaving.cancelled() => return,
        }
        let snapshot = this.fleet.load();
        places.retain(|name, _| snapshot.models.contains_key(name));
        let now = this.clock.now();
        let all = now >= rest_at;
        if all {
            // A beat that comes a little early counts.
            rest_at = now.plus(this.period.saturating_sub(this.period.min(BEAT) / 2));
        }
        let mut told = this.findings.take(all);
        let mut calls = FuturesUnordered::new();
        for (name, model) in &snapshot.models {
            let place = places.remove(name).unwrap_or_default();
            let findings = told.remove(name).unwrap_or_default();
            if findings.is_empty() && turn < place.next {
                places.insert(Arc::clone(name), place);
                continue;
            }
            calls.push(this.exchange(name, model, place, findings, turn, rng.next_u64()));
        }
        // What is left is about models that have gone meanwhile.
        this.metrics.findings_dropped(told.values().map(|findings| findings.len() as u64).sum());
        let mut back = Vec::new();
        while let Some(place) = calls.next().await {
            back.push(place);
        }
        drop(calls);
        places.extend(back);
        sketches.sync(&this.plane, &snapshot, this.clock.now(), DEADLINE).await;
    }
}

impl Teller {
    /// Tells and hears what there is of one model.
    async fn exchange(
        &self,
        name: &Arc<str>,
        model: &Model,
        mut place: Place,
        findings: Vec<Finding>,
        turn: u64,
        jitter: u64,
    ) -> (Arc<str>, Place) {
        let keys = ModelKeys::new(name);
        self.tell(&keys, findings).await;
        let (mut found, mut pods) = (false, None);
        // Whoever comes late reads what is kept, and no more than that at a time.
        for _ in 0..KEPT / u64::from(READ) {
            let Ok(read) = self.plane.prefix_read(&keys, &place.after, READ, DEADLINE).await else { break };
            let full = read.entries.len() >= READ as usize;
            place.after = read.after;
            for entry in read.entries {
                match decode::<Told>(&entry) {
                    Ok(told) if told.replica == self.replica => {}
                    Ok(told) => {
                        found = true;
                        self.metrics.findings_heard(told.findings.len() as u64);
                        let now = self.clock.now();
                        // Mostly there is nothing to hear, and then no need to know the pods.
                        let pods = pods.get_or_insert_with(|| {
                            model.pods.iter().map(|pod| (pod.state.id, &pod.state)).collect::<HashMap<_, _>>()
                        });
                        told.findings.into_iter().for_each(|finding| self.hear(model, pods, finding, now, jitter));
                    }
                    // A replica of another version; it is counted, and its findings are made here too.
                    Err(error) => {
                        self.metrics.findings_dropped(1);
                        tracing::debug!(model = &**name, %error, "a finding that cannot be read");
                    }
                }
            }
            if !full {
                break;
            }
        }
        place.looked(found, turn);
        (Arc::clone(name), place)
    }

    async fn tell(&self, keys: &ModelKeys, findings: Vec<Finding>) {
        let mut entries: Vec<Told> = Vec::new();
        let mut size = usize::MAX;
        for finding in findings {
            size = size.saturating_add(finding.size());
            match entries.last_mut() {
                Some(last) if size <= ENTRY_BYTES => last.findings.push(finding),
                _ => {
                    size = finding.size();
                    entries.push(Told { replica: self.replica, findings: vec![finding] });
                }
            }
        }
        for entries in entries.chunks(MAX_ENTRIES) {
            let count: usize = entries.iter().map(|told| told.findings.len()).sum();
            let encoded: Result<Vec<_>, _> = entries.iter().map(encode).collect();
            let told = match encoded {
                Ok(updates) => self.plane.prefix_append(keys, &updates, KEPT, TTL, DEADLINE).await.is_ok(),
                Err(_) => false,
            };
            if told {
                self.metrics.findings_told(count as u64);
            } else {
                self.metrics.findings_dropped(count as u64);
            }
        }
    }

    fn hear(&self, model: &Model, pods: &HashMap<u64, &Arc<PodState>>, finding: Finding, now: Tick, jitter: u64) {
        match finding {
            Finding::Prefix { pod, blocks } => {
                if let Some(pod) = pods.get(&pod) {
                    self.listeners.prefix.offer(PrefixUpdate {
                        model: Arc::clone(&model.name),
                        hashes: Arc::from(blocks),
                        pod: Arc::clone(pod),
                    });
                }
            }
            Finding::Session { session, tokens } => self.listeners.sessions.learn(session, tokens, now),
            Finding::User { user, tokens } => self.listeners.users.add(user, tokens as f64, now, &self.listeners.vtc),
            Finding::PodFails { pod } => {
                if let Some(pod) = pods.get(&pod) {
                    model.pairs.eject(None, pod, &self.listeners.ejection, now, jitter);
                }
            }
            Finding::PairFails { prefill, decode } => {
                if let (Some(prefill), Some(decode)) = (pods.get(&prefill), pods.get(&decode)) {
                    model.pairs.eject(Some(prefill), decode, &self.listeners.ejection, now, jitter);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_to_be_told_is_bounded_by_number_and_by_bytes() {
        let metrics = Arc::new(Metrics::new("gateway"));
        let findings = Findings::new(true, Arc::clone(&metrics));
        let model: Arc<str> = Arc::from("m");
        for tokens in 0..MAX_WAITING as u64 + 5 {
            findings.push(&model, Finding::Session { session: 1, tokens });
        }
        assert_eq!(findings.take(true).remove(&model).map(|taken| taken.len()), Some(MAX_WAITING));
        let big = Finding::Prefix { pod: 1, blocks: vec![0; MAX_WAITING_BYTES / 8 / 4] };
        for _ in 0..5 {
            findings.push(&model, big.clone());
        }
        assert_eq!(findings.take(true).remove(&model).map(|taken| taken.len()), Some(3), "what is more was dropped");
        assert_eq!(findings.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn that_a_pod_fails_does_not_wait_for_the_rest() {
        let findings = Findings::new(true, Arc::new(Metrics::new("gateway")));
        let model: Arc<str> = Arc::from("m");
        let found = [
            Finding::Prefix { pod: 1, blocks: vec![1] },
            Finding::PodFails { pod: 1 },
            Finding::Session { session: 1, tokens: 1 },
            Finding::PairFails { prefill: 1, decode: 2 },
        ];
        for finding in &found {
            findings.push(&model, finding.clone());
        }
        let [prefix, pod, session, pair] = found;
        assert_eq!(findings.take(false).remove(&model), Some(vec![pod, pair]));
        assert_eq!(findings.take(true).remove(&model), Some(vec![prefix.clone(), session]));
        let silent = Findings::new(false, Arc::new(Metrics::new("gateway")));
        silent.push(&model, prefix);
        assert!(silent.take(true).is_empty(), "prefixes are not shared");
    }

    #[test]
    fn quiet_streams_are_looked_at_less_often() {
        let mut place = Place::default();
        let mut turns = Vec::new();
        let mut turn = 0;
        for _ in 0..8 {
            place.looked(false, turn);
            turns.push(place.next - turn);
            turn = place.next;
        }
        assert_eq!(turns, [1, 2, 4, 8, 10, 10, 10, 10]);
        place.looked(true, turn);
        assert_eq!(place.next - turn, 1);
    }
}
