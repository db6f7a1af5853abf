//! The immutable view that one request routes on.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;

use super::build::Identity;
use super::{Absent, ClaimState, Engine, Home, ModelConfig, Pod, PodKey, RouteTable};
use crate::bands::ModelBands;
use crate::clock::Tick;
use crate::load::{Commit, LoadCell, Pairs, PeerCell, PlanePort, RateWindow, Settled};

/// A roleset with at least one routable prefill and one routable decode replica.
#[derive(Clone, Debug)]
pub struct Roleset {
    /// Label `roleset-name`; `namespace/roleset-name` where the model has that name in several namespaces.
    pub name: Arc<str>,
    /// Routable prefill pods that serve HTTP.
    pub prefill: Vec<Arc<Pod>>,
    /// Routable decode pods that serve HTTP.
    pub decode: Vec<Arc<Pod>>,
    /// Prefill replicas by role-replica-index (or pods, without that label).
    pub prefill_replicas: usize,
    /// Decode replicas, counted alike.
    pub decode_replicas: usize,
}

/// A roleset that lacks a side, kept for error texts and `/debug/fleet`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialRoleset {
    /// Label `roleset-name`.
    pub name: Arc<str>,
    /// Routable prefill pods.
    pub prefill: usize,
    /// Routable decode pods.
    pub decode: usize,
}

/// Pods named in [`Model::config_differing`].
pub const MAX_DIFFERING: usize = 16;

/// Everything known about one model.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// The model's name as requests spell it.
    pub name: Arc<str>,
    /// Whose pods it has. An alias shares all that goes with the pods (loads, commits, health, what replicas tell one
    /// another, plans) with the model whose pods they are.
    pub home: Home,
    /// Version of the snapshot that this is a part of.
    pub snapshot_version: u64,
    /// Every known pod, routable or not, ordered by key.
    pub pods: Vec<Arc<Pod>>,
    /// The routable pods that serve HTTP, ordered by key.
    pub routable: Vec<Arc<Pod>>,
    /// Complete rolesets, ordered by name.
    pub rolesets: Vec<Roleset>,
    /// Rolesets of which a pod is known but a side is missing, ordered by name.
    pub partial: Vec<PartialRoleset>,
    /// Routable pods that may run both phases: neither prefill nor decode by label. Whether one is `combined`
    /// depends on the profile of the request.
    pub standalone: Vec<Arc<Pod>>,
    /// The model-level configuration: that of a deterministic pod.
    pub config: Option<Arc<ModelConfig>>,
    /// How many pods carry a configuration that says something else about requests than [`Model::config`].
    pub config_disagreements: usize,
    /// The pod whose configuration [`Model::config`] is.
    pub config_pod: Option<PodKey>,
    /// The first of those that disagree with it, at most [`MAX_DIFFERING`], ordered by key.
    pub config_differing: Vec<PodKey>,
    /// The engine of all routable pods; `None` when there is none or they disagree.
    pub engine: Option<Engine>,
    /// The routable pods are of several engines, which rules PD out: a body made for one must not reach another.
    pub engines_mixed: bool,
    /// Why no pod is routable, where claims on pods say so.
    pub claim: Option<ClaimState>,
    /// Serialises select-and-charge of this model without a lock; survives snapshots.
    pub commit: Arc<Commit>,
    /// This replica among those that share the loads of this model; survives snapshots.
    pub peers: Arc<PeerCell>,
    /// This replica's end of the model's state plane; survives snapshots.
    pub port: Arc<PlanePort>,
    /// Prompt lengths and the plans made from them; survives snapshots.
    pub bands: Arc<ModelBands>,
    /// Requests of the present second that a profile's limit counts; survives snapshots.
    pub rate: Arc<RateWindow>,
    /// Pairs that have failed lately; survives snapshots.
    pub pairs: Arc<Pairs>,
    /// How far this snapshot knows that nothing is ejected.
    pub settled: Settled,
}

impl Model {
    /// Its pods are those of another model, or it has none.
    pub fn is_alias(&self) -> bool {
        self.home != Home::Own
    }

    /// The model whose pods it has: the name under which replicas share their loads.
    pub fn home_name(&self) -> &Arc<str> {
        match &self.home {
            Home::Of(name) => name,
            Home::Own | Home::Nowhere => &self.name,
        }
    }
}

/// The whole fleet at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Grows by one with each build.
    pub version: u64,
    /// Models by name, aliases among them.
    pub models: HashMap<Arc<str>, Arc<Model>>,
    /// What is wrong with adapters and claims, one sentence each.
    pub problems: Vec<String>,
    /// Load cells of incarnations that left while requests were running on them, by model and identity. Empty most of
    /// the time; one that is released for good goes with the next build.
    pub(super) departed: HashMap<(Arc<str>, Identity), Weak<LoadCell>>,
}

impl Snapshot {
    /// A snapshot of these models, before which no pod has left.
    pub fn new(version: u64, models: HashMap<Arc<str>, Arc<Model>>) -> Snapshot {
        Snapshot { version, models, ..Snapshot::default() }
    }

    /// The model of that name.
    pub fn model(&self, name: &str) -> Option<&Arc<Model>> {
        self.models.get(name)
    }

    /// The model that a request names: by its own name, or as SGLang names an adapter of a model, `base:adapter`. An adapter
    /// that is registered for that base is served by its instances; any other by all pods of the base, whose engines know
    /// the adapters that they were started with.
    pub fn asked_for(&self, name: &str) -> Option<&Arc<Model>> {
        if let Some(model) = self.model(name) {
            return Some(model);
        }
        // A base may have a colon in its name.
        let splits = name.rmatch_indices(':').filter_map(|(at, _)| Some((name.get(..at)?, name.get(at + 1..)?)));
        let (base, adapter) = splits
            .filter_map(|(base, adapter)| Some((self.home(base)?, adapter)))
            .find(|(base, adapter)| base.engine == Some(Engine::Sglang) && !adapter.trim().is_empty())?;
        let registered = self.model(adapter).filter(|model| model.home == Home::Of(Arc::clone(&base.name)));
        Some(registered.unwrap_or(base))
    }

    /// The model of that name, if it has pods of its own.
    pub fn home(&self, name: &str) -> Option<&Arc<Model>> {
        self.models.get(name).filter(|model| !model.is_alias())
    }

    /// The models that have pods of their own, in no particular order. Each pod belongs to exactly one of them.
    pub fn homes(&self) -> impl Iterator<Item = &Arc<Model>> {
        self.models.values().filter(|model| !model.is_alias())
    }

    /// Every pod, once; the models come in no particular order.
    pub fn pods(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.homes().flat_map(|model| &model.pods)
    }
}

/// The one shared cell that holds the current snapshot.
#[derive(Debug, Default)]
pub struct Fleet {
    current: ArcSwap<Snapshot>,
    routes: ArcSwap<RouteTable>,
    absent: ArcSwap<Absent>,
}

impl Fleet {
    /// The current snapshot. Lock-free; a request calls this once.
    pub fn load(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Puts a new snapshot in place. Pairs of pods that it does not hold are forgotten.
    pub fn store(&self, snapshot: Snapshot) {
        for model in snapshot.homes() {
            let slots: HashSet<u32> = model.pods.iter().map(|pod| pod.state.slot).collect();
            model.pairs.keep(|slot| slots.contains(&slot));
        }
        self.current.store(Arc::new(snapshot));
    }

    /// What is known of Envoy's own routes. Lock-free.
    pub fn routes(&self) -> Arc<RouteTable> {
        self.routes.load_full()
    }

    /// The model of that name, if it is known although no snapshot has it: its pods went a while ago, a workload names it,
    /// or Envoy has a route for it.
    pub fn known_without_pods(&self, name: &str, now: Tick) -> Option<Arc<str>> {
        self.absent.load().get(name, now).or_else(|| self.routes.load().names(name).then(|| Arc::from(name)))
    }

    /// Models that are known and have no pod. Lock-free.
    pub fn absent(&self) -> Arc<Absent> {
        self.absent.load_full()
    }

    /// Replaces them.
    pub fn set_absent(&self, absent: Absent) {
        self.absent.store(Arc::new(absent));
    }

    /// Replaces what is known of Envoy's own routes.
    pub fn set_routes(&self, routes: RouteTable) {
        self.routes.store(Arc::new(routes));
    }
}
