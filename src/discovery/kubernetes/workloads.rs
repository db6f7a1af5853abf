//! Workloads that name a model: while they have no replicas, the model is known all the same.
//!
//! Of each only the model's name is kept. They are watched where a setting asks for it, since that needs further rights.

use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::Deserialize;
use tokio::sync::watch;

use super::{Store, Watched};

/// The longest name of a model, bytes.
const MAX_MODEL_BYTES: usize = 512;

/// A kind of workload.
pub trait Kind: Send + Sync + 'static {
    /// API group.
    const GROUP: &'static str;
    /// API version.
    const VERSION: &'static str;
    /// The resource as RBAC spells it.
    const PLURAL: &'static str;
}

macro_rules! kinds {
    ($($(#[$meta:meta])* $name:ident $group:literal $version:literal $plural:literal)*) => {
        $($(#[$meta])*
        #[derive(Debug, PartialEq, Eq)]
        pub enum $name {}

        impl Kind for $name {
            const GROUP: &'static str = $group;
            const VERSION: &'static str = $version;
            const PLURAL: &'static str = $plural;
        })*
    };
}

kinds! {
    /// `deployments.apps`.
    Deployment "apps" "v1" "deployments"
    /// `statefulsets.apps`.
    StatefulSet "apps" "v1" "statefulsets"
    /// `stormservices.orchestration.aibrix.ai`.
    StormService "orchestration.aibrix.ai" "v1alpha1" "stormservices"
    /// `rayclusterfleets.orchestration.aibrix.ai`.
    RayClusterFleet "orchestration.aibrix.ai" "v1alpha1" "rayclusterfleets"
}

/// The model that a workload names.
#[derive(Debug, PartialEq, Eq)]
pub struct Workload<K> {
    model: Arc<str>,
    kind: PhantomData<K>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Wire {
    metadata: Metadata,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Metadata {
    labels: Option<Names>,
    annotations: Option<Names>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Names {
    #[serde(rename = "model.aibrix.ai/name")]
    model: Option<String>,
}

impl<K: Kind + PartialEq> Watched for Workload<K> {
    const GROUP: &'static str = K::GROUP;
    const VERSION: &'static str = K::VERSION;
    const PLURAL: &'static str = K::PLURAL;
    const OPTIONAL: bool = true;

    fn read(json: &str) -> Result<Option<Workload<K>>, serde_json::Error> {
        let Wire { metadata } = serde_json::from_str(json)?;
        let mut names = [metadata.labels, metadata.annotations].into_iter().flatten().filter_map(|names| names.model);
        let usable = |name: &String| !name.trim().is_empty() && name.len() <= MAX_MODEL_BYTES;
        let model = names.find(usable);
        Ok(model.map(|model| Workload { model: Arc::from(model.trim()), kind: PhantomData }))
    }
}

/// All that are watched.
#[derive(Debug)]
pub(super) struct Workloads {
    pub(super) deployments: Arc<Store<Workload<Deployment>>>,
    pub(super) stateful_sets: Arc<Store<Workload<StatefulSet>>>,
    pub(super) storm_services: Arc<Store<Workload<StormService>>>,
    pub(super) ray_cluster_fleets: Arc<Store<Workload<RayClusterFleet>>>,
}

impl Workloads {
    /// Stores of so many scopes; none, where workloads are not watched.
    pub(super) fn new(scopes: usize) -> Workloads {
        Workloads {
            deployments: Arc::new(Store::new(scopes)),
            stateful_sets: Arc::new(Store::new(scopes)),
            storm_services: Arc::new(Store::new(scopes)),
            ray_cluster_fleets: Arc::new(Store::new(scopes)),
        }
    }

    /// The models that they name, as far as they are known.
    pub(super) fn models(&self) -> BTreeSet<Arc<str>> {
        fn of<K: Kind + PartialEq>(store: &Store<Workload<K>>) -> impl Iterator<Item = Arc<str>> + use<K> {
            store.available().into_iter().flatten().map(|workload| Arc::clone(&workload.model))
        }
        let apps = of(&self.deployments).chain(of(&self.stateful_sets));
        apps.chain(of(&self.storm_services)).chain(of(&self.ray_cluster_fleets)).collect()
    }

    /// How many there are of each kind.
    pub(super) fn counts(&self) -> [(&'static str, usize); 4] {
        [
            (Deployment::PLURAL, self.deployments.len()),
            (StatefulSet::PLURAL, self.stateful_sets.len()),
            (StormService::PLURAL, self.storm_services.len()),
            (RayClusterFleet::PLURAL, self.ray_cluster_fleets.len()),
        ]
    }

    /// Learns of changes.
    pub(super) fn subscribe(&self) -> Changes {
        Changes([
            self.deployments.subscribe(),
            self.stateful_sets.subscribe(),
            self.storm_services.subscribe(),
            self.ray_cluster_fleets.subscribe(),
        ])
    }
}

/// Changes of any kind.
pub(super) struct Changes([watch::Receiver<u64>; 4]);

impl Changes {
    pub(super) fn mark_unchanged(&mut self) {
        self.0.iter_mut().for_each(watch::Receiver::mark_unchanged);
    }

    /// False when nothing will ever change again.
    pub(super) async fn changed(&mut self) -> bool {
        let [one, two, three, four] = &mut self.0;
        tokio::select! {
            changed = one.changed() => changed.is_ok(),
            changed = two.changed() => changed.is_ok(),
            changed = three.changed() => changed.is_ok(),
            changed = four.changed() => changed.is_ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workload_names_its_model_as_a_pod_does() {
        for (object, model) in [
            (r#"{"metadata":{"labels":{"model.aibrix.ai/name":"m","app":"x"}},"spec":{"replicas":0}}"#, Some("m")),
            (r#"{"metadata":{"annotations":{"model.aibrix.ai/name":"org/m"}}}"#, Some("org/m")),
            (
                r#"{"metadata":{"labels":{"model.aibrix.ai/name":"m"},"annotations":{"model.aibrix.ai/name":"n"}}}"#,
                Some("m"),
            ),
            (
                r#"{"metadata":{"labels":{"model.aibrix.ai/name":" "},"annotations":{"model.aibrix.ai/name":"n"}}}"#,
                Some("n"),
            ),
            (r#"{"metadata":{"labels":{"app":"m"}}}"#, None),
            (r#"{"metadata":{"labels":null}}"#, None),
            ("{}", None),
        ] {
            let read = Workload::<Deployment>::read(object).unwrap();
            assert_eq!(read.as_ref().map(|workload| &*workload.model), model, "{object}");
        }
        let long = format!(r#"{{"metadata":{{"labels":{{"model.aibrix.ai/name":"{}"}}}}}}"#, "x".repeat(513));
        assert_eq!(Workload::<StormService>::read(&long).unwrap(), None);
        assert!(Workload::<StatefulSet>::read("[").is_err());
    }

    #[test]
    fn without_scopes_nothing_is_known_and_nothing_waited_for() {
        let workloads = Workloads::new(0);
        assert!(workloads.models().is_empty());
        assert!(workloads.counts().iter().all(|(_, count)| *count == 0));
        assert!(Workloads::new(1).models().is_empty(), "not listed yet");
    }
}
