//! From pod specs to a snapshot: pure.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Weak};

use super::aliases::aliases;
use super::snapshot::MAX_DIFFERING;
use super::{AdapterSpec, ClaimState, Model, PartialRoleset, Pod, PodKey, PodSpec, PodState, Role, Roleset, Snapshot};
use crate::load::{LoadCell, PlanePort};

/// What makes two sightings of a pod the same incarnation. The key is part of it although a UID should be enough:
/// hand-written manifests get copied together with their UIDs, and two pods must never share one load cell.
pub(super) type Identity = (PodKey, Arc<str>, u32);

/// Builds the next snapshot. An incarnation (UID and restart count) of `previous` keeps its [`PodState`] whatever else
/// changed about it, except that a pod which moved to another model starts afresh; a model keeps its
/// [`crate::load::Commit`], its [`crate::load::PeerCell`], its [`crate::load::PlanePort`] and its [`crate::bands::ModelBands`]. An incarnation that left and comes back while requests still run on it is new in all but its
/// load: those requests are still there. `next_slot` numbers new incarnations and only grows. Of several specs with one key the
/// first counts.
///
/// The model-level configuration is that of the pod with the lowest key among those that have one, pods that are
/// going away last; so the answer depends neither on the order of `specs` nor on readiness.
pub fn build(previous: &Snapshot, specs: &[PodSpec], next_slot: &mut u32) -> Snapshot {
    build_all(previous, specs, &[], next_slot)
}

/// The same with LoRA adapters: models that some of the pods serve as well. What is odd about them is in
/// [`Snapshot::problems`].
pub fn build_all(previous: &Snapshot, specs: &[PodSpec], adapters: &[AdapterSpec], next_slot: &mut u32) -> Snapshot {
    let known: HashMap<Identity, &Arc<Pod>> = previous.pods().map(|pod| (identity(&pod.spec), pod)).collect();
    let mut seen: BTreeMap<&PodKey, &PodSpec> = BTreeMap::new();
    for spec in specs {
        seen.entry(&spec.key).or_insert(spec);
    }
    let mut by_model: BTreeMap<&Arc<str>, Vec<Arc<Pod>>> = BTreeMap::new();
    let mut ports: BTreeMap<&Arc<str>, Arc<PlanePort>> = BTreeMap::new();
    for spec in seen.into_values() {
        let pod = match known.get(&identity(spec)) {
            Some(pod) if pod.spec == *spec => Arc::clone(pod),
            Some(pod) if pod.spec.model == spec.model => made(spec, Arc::clone(&pod.state)),
            _ => {
                let slot = *next_slot;
                *next_slot = next_slot.wrapping_add(1);
                let running = previous.departed.get(&(Arc::clone(&spec.model), identity(spec)));
                let load = running.and_then(Weak::upgrade).unwrap_or_default();
                let earlier = previous.home(&spec.model).map(|model| &model.port);
                let port = ports.entry(&spec.model).or_insert_with(|| earlier.cloned().unwrap_or_default());
                let state = PodState::sharing(slot, Arc::new(spec.metric_labels()), load);
                made(spec, Arc::new(state.known_as(spec.id(), Arc::clone(port))))
            }
        };
        by_model.entry(&spec.model).or_default().push(pod);
    }
    let snapshot_version = previous.version + 1;
    let mut models: HashMap<Arc<str>, Arc<Model>> = by_model
        .into_iter()
        .map(|(name, pods)| {
            let earlier = previous.home(name);
            let commit = earlier.map(|model| Arc::clone(&model.commit)).unwrap_or_default();
            let peers = earlier.map(|model| Arc::clone(&model.peers)).unwrap_or_default();
            let earlier_port = earlier.map(|model| Arc::clone(&model.port));
            let port = earlier_port.or_else(|| ports.remove(name)).unwrap_or_default();
            let bands = earlier.map(|model| Arc::clone(&model.bands)).unwrap_or_default();
            let rate = previous.models.get(name).map(|model| Arc::clone(&model.rate)).unwrap_or_default();
            let pairs = earlier.map(|model| Arc::clone(&model.pairs)).unwrap_or_default();
            let name = Arc::clone(name);
            let living = Model {
                name: Arc::clone(&name),
                snapshot_version,
                commit,
                peers,
                port,
                bands,
                rate,
                pairs,
                ..assemble(pods)
            };
            (name, Arc::new(living))
        })
        .collect();
    let (others, problems) = aliases(previous, &models, adapters);
    for alias in others {
        models.insert(Arc::clone(&alias.name), Arc::new(Model { snapshot_version, ..alias }));
    }
    let mut next = Snapshot::new(snapshot_version, models);
    next.departed = departed(previous, &next);
    next.problems = problems;
    next
}

/// The load cells that nobody in `next` has, but running requests may.
fn departed(previous: &Snapshot, next: &Snapshot) -> HashMap<(Arc<str>, Identity), Weak<LoadCell>> {
    let staying: HashSet<*const LoadCell> = next.pods().map(|pod| Arc::as_ptr(&pod.state.load)).collect();
    let earlier = previous.departed.iter().map(|(key, load)| (key.clone(), Weak::clone(load)));
    let leaving = previous
        .pods()
        .map(|pod| ((Arc::clone(&pod.spec.model), identity(&pod.spec)), Arc::downgrade(&pod.state.load)));
    earlier.chain(leaving).filter(|(_, load)| load.strong_count() > 0 && !staying.contains(&load.as_ptr())).collect()
}

fn identity(spec: &PodSpec) -> Identity {
    (spec.key.clone(), Arc::clone(&spec.uid), spec.restarts)
}

fn made(spec: &PodSpec, state: Arc<PodState>) -> Arc<Pod> {
    Arc::new(Pod::new(spec.clone(), state))
}

/// Everything about a model that follows from its pods, which come ordered by key.
pub(super) fn assemble(pods: Vec<Arc<Pod>>) -> Model {
    let routable: Vec<Arc<Pod>> =
        pods.iter().filter(|pod| pod.spec.routable() && pod.spec.serves_http).cloned().collect();
    let standalone = routable.iter().filter(|pod| pod.spec.role == Role::Other && pod.spec.pd).cloned().collect();
    let (rolesets, partial) = group(&pods, &routable);
    let configured = model_config(&pods);
    let claim = if routable.is_empty() { unmet_claim(&pods) } else { None };
    let mut engines = routable.iter().map(|pod| (pod.spec.engine, pod.spec.engine_label()));
    let first = engines.next();
    let engines_mixed = engines.any(|engine| Some(engine) != first);
    Model {
        engine: if engines_mixed { None } else { first.map(|(engine, _)| engine) },
        engines_mixed,
        claim,
        routable,
        rolesets,
        partial,
        standalone,
        pods,
        ..configured
    }
}

/// What keeps the model from being served, by what its claims say: the most hopeful of them.
fn unmet_claim(pods: &[Arc<Pod>]) -> Option<ClaimState> {
    let staying = pods.iter().filter(|pod| !pod.spec.terminating);
    staying.filter_map(|pod| pod.spec.claim).filter(|claim| *claim != ClaimState::Active).min()
}

/// Splits the rolesets into complete and incomplete ones. A roleset lives in a namespace: equal names in two
/// namespaces stay two rolesets, and are then told apart by a name of the form `namespace/name`.
fn group(pods: &[Arc<Pod>], routable: &[Arc<Pod>]) -> (Vec<Roleset>, Vec<PartialRoleset>) {
    let mut sides: BTreeMap<(&Arc<str>, &Arc<str>), Roleset> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| pod.spec.role != Role::Other && pod.spec.pd) {
        if let Some(name) = &pod.spec.roleset {
            sides.entry((name, &pod.spec.key.namespace)).or_insert_with(|| Roleset {
                name: Arc::clone(name),
                prefill: Vec::new(),
                decode: Vec::new(),
                prefill_replicas: 0,
                decode_replicas: 0,
            });
        }
    }
    let mut namespaces: HashMap<Arc<str>, usize> = HashMap::new();
    for (name, _) in sides.keys() {
        *namespaces.entry(Arc::clone(name)).or_default() += 1;
    }
    for pod in routable.iter().filter(|pod| pod.spec.pd) {
        let Some(name) = &pod.spec.roleset else { continue };
        let Some(roleset) = sides.get_mut(&(name, &pod.spec.key.namespace)) else { continue };
        match pod.spec.role {
            Role::Prefill => roleset.prefill.push(Arc::clone(pod)),
            Role::Decode => roleset.decode.push(Arc::clone(pod)),
            Role::Other => {}
        }
    }
    let (mut complete, mut partial) = (Vec::new(), Vec::new());
    for ((name, namespace), mut roleset) in sides {
        if namespaces.get(name).is_some_and(|&count| count > 1) {
            roleset.name = Arc::from(format!("{namespace}/{name}"));
        }
        roleset.prefill_replicas = replicas(&roleset.prefill);
        roleset.decode_replicas = replicas(&roleset.decode);
        if roleset.prefill_replicas > 0 && roleset.decode_replicas > 0 {
            complete.push(roleset);
        } else {
            let (prefill, decode) = (roleset.prefill.len(), roleset.decode.len());
            partial.push(PartialRoleset { name: roleset.name, prefill, decode });
        }
    }
    complete.sort_by(|a, b| a.name.cmp(&b.name));
    partial.sort_by(|a, b| a.name.cmp(&b.name));
    (complete, partial)
}

/// Replica cardinality (reference section 3.4): distinct replica indexes if any pod has one, else the pods, whatever the
/// number of their data-parallel ranks.
fn replicas(pods: &[Arc<Pod>]) -> usize {
    let indexes: BTreeSet<&Arc<str>> = pods.iter().filter_map(|pod| pod.spec.replica_index.as_ref()).collect();
    if indexes.is_empty() { pods.iter().filter(|pod| pod.spec.rank == 0).count() } else { indexes.len() }
}

/// The model-level configuration, and who disagrees with it.
fn model_config(pods: &[Arc<Pod>]) -> Model {
    let configs = |leaving: bool| {
        // One text for all ranks of a pod.
        let those = pods.iter().filter(move |pod| pod.spec.terminating == leaving && pod.spec.rank == 0);
        those.filter_map(|pod| Some((&pod.spec.key, pod.spec.config.as_ref()?)))
    };
    let all = || configs(false).chain(configs(true));
    let Some((key, chosen)) = all().next() else { return Model::default() };
    let mut differing: Vec<&PodKey> = all()
        .filter(|(_, other)| !Arc::ptr_eq(chosen, other) && !chosen.same_for_requests(other))
        .map(|(key, _)| key)
        .collect();
    differing.sort();
    Model {
        config: Some(Arc::clone(chosen)),
        config_pod: Some(key.clone()),
        config_disagreements: differing.len(),
        config_differing: differing.into_iter().take(MAX_DIFFERING).cloned().collect(),
        ..Model::default()
    }
}
