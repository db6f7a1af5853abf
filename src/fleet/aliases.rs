//! Models that are served by the pods of another one: LoRA adapters, and further names of an engine. Pure.
//!
//! A pod has one home, the model of its label. Every other model that it serves holds the same pod, with the same load
//! cell, so that whoever looks at a load sees all of it, whichever name the work came under. What walks over all pods
//! walks over homes ([`Snapshot::homes`]).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::build::assemble;
use super::{Model, Pod, PodKey, Snapshot};

/// A `ModelAdapter` object (reference section 3.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSpec {
    /// Its namespace, which is that of its instances too.
    pub namespace: Arc<str>,
    /// Its name: that of a model.
    pub name: Arc<str>,
    /// `status.instances`: names of the pods that have it loaded.
    pub instances: Vec<Arc<str>>,
}

/// Whose pods a model has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Home {
    /// Its own.
    #[default]
    Own,
    /// Those of the model with this name.
    Of(Arc<str>),
    /// Nobody's, for now: no pod is known that serves it.
    Nowhere,
}

/// The aliases beside these models, and what is wrong with those that cannot be.
pub(super) fn aliases(
    previous: &Snapshot,
    homes: &HashMap<Arc<str>, Arc<Model>>,
    adapters: &[AdapterSpec],
) -> (Vec<Model>, Vec<String>) {
    let mut wanted: BTreeMap<&Arc<str>, BTreeSet<PodKey>> = BTreeMap::new();
    let pods = || homes.values().flat_map(|model| &model.pods);
    let mut ranks: HashMap<PodKey, Vec<&PodKey>> = HashMap::new();
    for pod in pods().filter(|pod| pod.spec.rank > 0) {
        ranks.entry(pod.spec.pod()).or_default().push(&pod.spec.key);
    }
    for adapter in adapters {
        let keys = wanted.entry(&adapter.name).or_default();
        for instance in &adapter.instances {
            let key = PodKey { namespace: Arc::clone(&adapter.namespace), name: Arc::clone(instance) };
            // What is said of a pod holds for all its data-parallel ranks.
            keys.extend(ranks.get(&key).into_iter().flatten().map(|rank| PodKey::clone(rank)));
            keys.insert(key);
        }
    }
    for pod in pods() {
        for name in &pod.spec.also {
            wanted.entry(name).or_default().insert(pod.spec.key.clone());
        }
    }
    if wanted.is_empty() {
        return (Vec::new(), Vec::new());
    }
    let by_key: HashMap<&PodKey, &Arc<Pod>> = pods().map(|pod| (&pod.spec.key, pod)).collect();
    let (mut models, mut problems) = (Vec::new(), Vec::new());
    for (name, keys) in wanted {
        if homes.contains_key(name) {
            problems.push(format!(
                "model {name} has pods of its own, so an adapter or a claim of that name on other pods is not served"
            ));
            continue;
        }
        let mut found: Vec<Arc<Pod>> = keys.iter().filter_map(|key| by_key.get(key).copied().cloned()).collect();
        let rate = previous.models.get(name).map(|model| Arc::clone(&model.rate)).unwrap_or_default();
        let Some(base) = found.first().and_then(|pod| homes.get(&pod.spec.model)) else {
            models.push(Model { name: Arc::clone(name), home: Home::Nowhere, rate, ..Model::default() });
            continue;
        };
        let all = found.len();
        found.retain(|pod| pod.spec.model == base.name);
        if found.len() < all {
            problems.push(format!(
                "model {name} is said to be on pods of several models; those of {} count, the other {} do not",
                base.name,
                all - found.len()
            ));
        }
        models.push(Model { name: Arc::clone(name), rate, ..alias(base, found) });
    }
    (models, problems)
}

/// A model of some of `base`'s pods.
fn alias(base: &Model, pods: Vec<Arc<Pod>>) -> Model {
    let mut model = assemble(pods);
    for roleset in &mut model.rolesets {
        // Where the base model has to tell namespaces apart, so does what is said about its pods' rolesets.
        let slot = roleset.prefill.first().map(|pod| pod.state.slot);
        let same = base.rolesets.iter().find(|set| set.prefill.iter().any(|pod| Some(pod.state.slot) == slot));
        if let Some(same) = same {
            roleset.name = Arc::clone(&same.name);
        }
    }
    model.rolesets.sort_by(|a, b| a.name.cmp(&b.name));
    Model {
        home: Home::Of(Arc::clone(&base.name)),
        config: base.config.clone(),
        config_pod: base.config_pod.clone(),
        config_disagreements: 0,
        config_differing: Vec::new(),
        commit: Arc::clone(&base.commit),
        peers: Arc::clone(&base.peers),
        port: Arc::clone(&base.port),
        bands: Arc::clone(&base.bands),
        pairs: Arc::clone(&base.pairs),
        ..model
    }
}
