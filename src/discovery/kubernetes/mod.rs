//! Discovery from the Kubernetes API: pods, and what else the cluster says about models.
//!
//! - Each kind is listed and watched by a task of its own, and known in full or not at all: half a list is never in force.
//! - What the API server says last stays in force while it says nothing, whatever the reason; routing never waits for it.
//! - Of each object only what routing needs is kept, and as much of that as there is a bound for.
//! - Missing permissions, certificates and connections are told in readiness, by verb, resource, group and namespace.

mod api;
mod backoff;
mod feed;
mod objects;
mod outage;
mod page;
mod pods;
mod status;
mod store;
mod wire;
mod workloads;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use api::{ApiError, ConnectError};
pub use feed::Pace;
pub use objects::{AdapterObject, MAX_LISTED, PodObject, RouteCondition, RouteObject, RouteParent, Watched};
pub use status::{FeedStatus, Word};
pub use store::Store;
pub use wire::Refusal;

use api::Resource;
use feed::Feed;
use outage::{ApiServer, Outage};
use page::PageSize;
use pods::Pods;
use workloads::Workloads;

use super::{FleetBuilder, PodReader};
use crate::clock::{Clock, Tick};
use crate::fleet::{ROUTE_NAMESPACE, Selector};
use crate::knobs::{KubernetesKnobs, PdKnobs};
use crate::rng::Rng;
use crate::telemetry::{KubernetesGauge, Metrics};

/// What the tasks need around them.
#[derive(Clone)]
pub struct Around {
    /// The writer of the fleet.
    pub builder: Arc<FleetBuilder>,
    /// Gateway-wide knobs, from which the pods' profiles start.
    pub base: Arc<PdKnobs>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// For ages.
    pub clock: Clock,
    /// For jitter.
    pub seed: u64,
}

/// The cluster as it is watched.
pub struct Cluster {
    /// LoRA adapters.
    pub adapters: Arc<Store<AdapterObject>>,
    /// Routes of the namespace [`ROUTE_NAMESPACE`].
    pub routes: Arc<Store<RouteObject>>,
    pods: Arc<Store<PodObject>>,
    workloads: Arc<Workloads>,
    feeds: Vec<Arc<FeedStatus>>,
    clock: Clock,
}

/// What the cluster has to say about readiness.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// Why this replica wants no traffic yet.
    pub reasons: Vec<String>,
    /// What somebody should know.
    pub notes: Vec<String>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("pods", &self.pods.len()).finish_non_exhaustive()
    }
}

impl Cluster {
    /// Begins to watch the cluster of `kubeconfig`, or the one that this process finds itself in. Does not wait for it.
    ///
    /// # Errors
    /// When there is no configuration that could be used; whether the cluster answers is seen later, in [`Cluster::words`].
    pub async fn start(
        kubeconfig: Option<&Path>,
        knobs: &KubernetesKnobs,
        pace: Pace,
        around: Around,
        tracker: &TaskTracker,
        stop: &CancellationToken,
    ) -> Result<Cluster, ConnectError> {
        if let Some(selector) = &knobs.pod_selector {
            Selector::parse(selector).map_err(ConnectError::Selector)?;
        }
        let client = api::connect(kubeconfig).await?;
        let scopes: Vec<Option<Arc<str>>> = if knobs.namespaces.is_empty() {
            vec![None]
        } else {
            knobs.namespaces.iter().map(|name| Some(Arc::from(name.as_str()))).collect()
        };
        let mut cluster = Cluster {
            adapters: Arc::new(Store::new(scopes.len())),
            routes: Arc::new(Store::new(1)),
            pods: Arc::new(Store::new(scopes.len())),
            workloads: Arc::new(Workloads::new(if knobs.workloads { scopes.len() } else { 0 })),
            feeds: Vec::new(),
            clock: around.clock,
        };
        let building = Pods {
            watched: Arc::clone(&cluster.pods),
            adapters: Arc::clone(&cluster.adapters),
            routes: Arc::clone(&cluster.routes),
            workloads: Arc::clone(&cluster.workloads),
            builder: around.builder,
            reader: PodReader::new(around.base),
            gather: pace.gather,
            clock: around.clock,
            tracker: tracker.clone(),
        };
        tracker.spawn(building.run(stop.clone()));
        let route_scope = [Some(Arc::from(ROUTE_NAMESPACE))];
        let mut tasks = Tasks {
            client,
            pace,
            metrics: around.metrics,
            clock: around.clock,
            rng: Rng::new(around.seed),
            server: Arc::default(),
            tracker,
            stop,
        };
        let (pods, adapters, routes) =
            (Arc::clone(&cluster.pods), Arc::clone(&cluster.adapters), Arc::clone(&cluster.routes));
        cluster.feeds.extend(tasks.follow(&pods, &scopes, knobs.pod_selector.as_deref()));
        cluster.feeds.extend(tasks.follow(&adapters, &scopes, None));
        cluster.feeds.extend(tasks.follow(&routes, &route_scope, None));
        if knobs.workloads {
            let workloads = Arc::clone(&cluster.workloads);
            cluster.feeds.extend(tasks.follow(&workloads.deployments, &scopes, None));
            cluster.feeds.extend(tasks.follow(&workloads.stateful_sets, &scopes, None));
            cluster.feeds.extend(tasks.follow(&workloads.storm_services, &scopes, None));
            cluster.feeds.extend(tasks.follow(&workloads.ray_cluster_fleets, &scopes, None));
        }
        Ok(cluster)
    }

    /// What the cluster has to say about readiness.
    pub fn words(&self) -> Words {
        let now = self.clock.now();
        let mut words = Words::default();
        for word in self.feeds.iter().filter_map(|feed| feed.word(now)) {
            match word {
                Word::Reason(text) => words.reasons.push(text),
                Word::Note(text) => words.notes.push(text),
            }
        }
        words
    }

    /// How many objects of each kind there are, and since when the API server has said nothing about one of its scopes.
    pub fn gauges(&self) -> Vec<KubernetesGauge> {
        let now = self.clock.now();
        let counts = [
            (PodObject::PLURAL, self.pods.len()),
            (AdapterObject::PLURAL, self.adapters.len()),
            (RouteObject::PLURAL, self.routes.len()),
        ];
        let ages = self.ages(now);
        // Without any that is watched they would be zeros that mean nothing.
        let workloads = self.workloads.counts().into_iter().filter(|(resource, _)| ages.contains_key(resource));
        let gauge = |(resource, objects)| KubernetesGauge { resource, objects, silence: ages.get(resource).copied() };
        counts.into_iter().chain(workloads).map(gauge).collect()
    }

    /// The longest silence of each kind.
    fn ages(&self, now: Tick) -> BTreeMap<&'static str, Duration> {
        let mut ages = BTreeMap::new();
        for feed in &self.feeds {
            if let Some(age) = feed.age(now) {
                let longest = ages.entry(feed.plural).or_insert(age);
                *longest = age.max(*longest);
            }
        }
        ages
    }
}

struct Tasks<'a> {
    client: Client,
    pace: Pace,
    metrics: Arc<Metrics>,
    clock: Clock,
    rng: Rng,
    server: Arc<ApiServer>,
    tracker: &'a TaskTracker,
    stop: &'a CancellationToken,
}

impl Tasks<'_> {
    /// Starts a task for each scope of a kind.
    fn follow<T: Watched>(
        &mut self,
        store: &Arc<Store<T>>,
        scopes: &[Option<Arc<str>>],
        selector: Option<&str>,
    ) -> Vec<Arc<FeedStatus>> {
        let mut statuses = Vec::new();
        for (scope, namespace) in scopes.iter().enumerate() {
            let status = Arc::new(FeedStatus::new::<T>(namespace.clone()));
            let selector = selector.map(str::to_owned);
            let feed = Feed {
                resource: Resource::new::<T>(self.client.clone(), namespace.as_deref(), selector),
                scope,
                store: Arc::clone(store),
                status: Arc::clone(&status),
                pace: self.pace.clone(),
                page: PageSize::default(),
                outage: Outage::new(Arc::clone(&self.server)),
                rng: Rng::new(self.rng.next_u64()),
                clock: self.clock,
                metrics: Arc::clone(&self.metrics),
            };
            let stop = self.stop.clone();
            self.tracker.spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = feed.run() => {}
                }
            });
            statuses.push(status);
        }
        statuses
    }
}
