//! Turns what a source found into the fleet's snapshot, and says what went.

use std::collections::{BTreeSet, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::clock::Clock;
use crate::fleet::{AdapterSpec, Fleet, PodKey, PodSpec, RouteTable, build_all};

/// Problems kept for display; further ones are only counted.
const MAX_PROBLEMS: usize = 200;
/// Characters of one problem text.
const MAX_PROBLEM_CHARS: usize = 400;
/// Distinct texts remembered as logged. When it is full it starts afresh, so that a text may be logged again.
const MAX_LOGGED: usize = 4096;

/// An incarnation that is no longer part of the fleet. Requests that still run on it keep its state alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departed {
    /// The incarnation, as [`crate::fleet::PodState::slot`].
    pub slot: u32,
    /// The pod's name; a new incarnation may live on under it.
    pub key: PodKey,
    /// The model it served.
    pub model: Arc<str>,
    /// No pod of that name is left in the fleet, so series labelled with it can go.
    pub name_gone: bool,
}

/// Told after each snapshot that lacks incarnations of the one before. Runs on the discovery task: keep it short.
pub type DepartedListener = Arc<dyn Fn(&[Departed]) + Send + Sync>;

/// What one [`FleetBuilder::apply`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// The version of the snapshot in force.
    pub version: u64,
    /// False when the specs were those of the last call, so that no snapshot was built.
    pub changed: bool,
    /// Incarnations that went with this snapshot.
    pub departed: Vec<Departed>,
}

/// The problems that the sources see at the moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProblemList {
    /// One sentence each; at most 200.
    pub texts: Vec<String>,
    /// How many more there are.
    pub omitted: usize,
}

/// The one writer of a [`Fleet`]. Its lock is never taken by requests.
pub struct FleetBuilder {
    fleet: Arc<Fleet>,
    listeners: Vec<DepartedListener>,
    versions: watch::Sender<u64>,
    /// For how long models without pods are remembered.
    memory: Option<(Clock, Duration)>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    specs: Option<(Vec<PodSpec>, Vec<AdapterSpec>)>,
    next_slot: u32,
    /// What the source has told, and what the snapshot has.
    told: [Vec<String>; 2],
    /// Models that workloads name, with or without pods.
    workloads: BTreeSet<Arc<str>>,
    problems: ProblemList,
    logged: HashSet<u64>,
    hasher: RandomState,
}

impl std::fmt::Debug for FleetBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FleetBuilder").field("version", &*self.versions.borrow()).finish_non_exhaustive()
    }
}

impl FleetBuilder {
    /// A builder for `fleet`, which nobody else may write to.
    pub fn new(fleet: Arc<Fleet>, listeners: Vec<DepartedListener>) -> FleetBuilder {
        let versions = watch::Sender::new(fleet.load().version);
        FleetBuilder { fleet, listeners, versions, memory: None, inner: Mutex::default() }
    }

    /// Remembers models whose last pod went for so long.
    #[must_use]
    pub fn with_memory(mut self, clock: Clock, memory: Duration) -> FleetBuilder {
        self.memory = Some((clock, memory));
        self
    }

    /// The fleet it writes.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// Learns of every new snapshot by its version.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.versions.subscribe()
    }

    /// True once a source has delivered, be it an empty fleet: before, "model unknown" only means "not known yet".
    pub fn primed(&self) -> bool {
        self.lock().specs.is_some()
    }

    /// Puts the whole fleet as it is now. Equal specs build nothing.
    pub fn apply(&self, specs: Vec<PodSpec>) -> Applied {
        self.apply_all(specs, Vec::new())
    }

    /// The same, with the LoRA adapters that there are now.
    pub fn apply_all(&self, specs: Vec<PodSpec>, adapters: Vec<AdapterSpec>) -> Applied {
        let mut inner = self.lock();
        let previous = self.fleet.load();
        let wanted = (specs, adapters);
        if inner.specs.as_ref() == Some(&wanted) {
            return Applied { version: previous.version, changed: false, departed: Vec::new() };
        }
        let next = build_all(&previous, &wanted.0, &wanted.1, &mut inner.next_slot);
        inner.specs = Some(wanted);
        inner.tell(1, next.problems.clone());
        let slots: HashSet<u32> = next.pods().map(|pod| pod.state.slot).collect();
        let names: HashSet<PodKey> = next.pods().map(|pod| pod.spec.key.clone()).collect();
        let mut departed: Vec<Departed> = previous
            .pods()
            .filter(|pod| !slots.contains(&pod.state.slot))
            .map(|pod| Departed {
                slot: pod.state.slot,
                key: pod.spec.key.clone(),
                model: Arc::clone(&pod.spec.model),
                name_gone: !names.contains(&pod.spec.key),
            })
            .collect();
        departed.sort_by_key(|gone| gone.slot);
        let version = next.version;
        let (pods, models) = (slots.len(), next.models.len());
        let gone: Vec<Arc<str>> = previous.homes().map(|model| Arc::clone(&model.name)).collect();
        self.fleet.store(next);
        self.remember(gone, &inner.workloads);
        drop(inner);
        tracing::info!(version, pods, models, departed = departed.len(), "fleet changed");
        if !departed.is_empty() {
            for listener in &self.listeners {
                listener(&departed);
            }
        }
        self.versions.send_replace(version);
        Applied { version, changed: true, departed }
    }

    /// Replaces the list of problems. Each distinct text is logged once.
    pub fn set_problems(&self, problems: Vec<String>) {
        self.lock().tell(0, problems);
    }

    /// Replaces the models that workloads name, which are known also while they have no pod.
    pub fn set_workloads(&self, models: BTreeSet<Arc<str>>) {
        let mut inner = self.lock();
        if inner.workloads != models {
            inner.workloads = models;
            self.remember(Vec::new(), &inner.workloads);
        }
    }

    /// Which models are known without pods, now that `had` may have lost theirs.
    fn remember(&self, had: Vec<Arc<str>>, workloads: &BTreeSet<Arc<str>>) {
        let (now, until) = self.memory.map_or_else(Default::default, |(clock, memory)| {
            let now = clock.now();
            (now, now.plus(memory))
        });
        let (present, before) = (self.fleet.load(), self.fleet.absent());
        let next = before.next(had, workloads, |name| present.model(name).is_some(), (now, until));
        if *before != next {
            self.fleet.set_absent(next);
        }
    }

    /// Replaces what is known of Envoy's own routes. Not part of the snapshot: pods change without them, and they without
    /// pods.
    pub fn set_routes(&self, routes: RouteTable) {
        if *self.fleet.routes() != routes {
            self.fleet.set_routes(routes);
        }
    }

    /// The present problems, for `/debug/fleet` and a gauge.
    pub fn problems(&self) -> ProblemList {
        self.lock().problems.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing under this lock panics half-way through a change.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Replaces what the source (0) or the snapshot (1) has to tell.
    fn tell(&mut self, from: usize, problems: Vec<String>) {
        if let Some(told) = self.told.get_mut(from) {
            *told = problems;
        }
        let all = self.told.iter().flatten();
        let omitted = all.clone().count().saturating_sub(MAX_PROBLEMS);
        let texts: Vec<String> = all.take(MAX_PROBLEMS).map(|text| readable(text)).collect();
        for text in &texts {
            let hash = self.hasher.hash_one(text);
            if self.logged.len() >= MAX_LOGGED {
                self.logged.clear();
            }
            if self.logged.insert(hash) {
                tracing::warn!(problem = %text, "discovery problem");
            }
        }
        self.problems = ProblemList { texts, omitted };
    }
}

/// One line of bounded length.
fn readable(text: &str) -> String {
    let mut line: String = text.chars().take(MAX_PROBLEM_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(MAX_PROBLEM_CHARS).is_some() {
        line.push_str("...");
    }
    line
}
