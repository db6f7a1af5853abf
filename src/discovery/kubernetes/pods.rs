//! From the watched objects to the fleet: at once after a change, but not once for each change of many.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::store::Store;
use super::workloads::Workloads;
use super::{AdapterObject, PodObject, RouteObject};
use crate::clock::Clock;
use crate::discovery::{FleetBuilder, PodReader, route_table};
use crate::fleet::{AdapterSpec, RouteTable};

/// Building may take this part of one core, so that churn in a big cluster leaves room for requests.
const SHARE_OF_A_CORE: f64 = 0.2;
/// A change waits no longer than this for that, so that it is in force within a second whatever the machine does.
const LONGEST_PAUSE: Duration = Duration::from_millis(400);

/// What turns objects into a fleet.
pub(super) struct Pods {
    pub(super) watched: Arc<Store<PodObject>>,
    pub(super) adapters: Arc<Store<AdapterObject>>,
    pub(super) routes: Arc<Store<RouteObject>>,
    pub(super) workloads: Arc<Workloads>,
    pub(super) builder: Arc<FleetBuilder>,
    pub(super) reader: PodReader,
    pub(super) gather: Duration,
    pub(super) clock: Clock,
    pub(super) tracker: TaskTracker,
}

impl Pods {
    /// Builds until `stop`. Begins when every scope of pods was listed, and it is known whether there are adapters.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let (mut pods, mut adapters) = (self.watched.subscribe(), self.adapters.subscribe());
        let (mut routes, mut workloads) = (self.routes.subscribe(), self.workloads.subscribe());
        loop {
            // What is read after this is at least as new as what is marked as seen here.
            pods.mark_unchanged();
            adapters.mark_unchanged();
            routes.mark_unchanged();
            workloads.mark_unchanged();
            let began = self.clock.now();
            let Some(same) = self.build().await else { return };
            self = same;
            let took = self.clock.now().since(began);
            let pause = self.gather.max(took.mul_f64(1.0 / SHARE_OF_A_CORE - 1.0).min(LONGEST_PAUSE));
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            let changed = async {
                tokio::select! {
                    changed = pods.changed() => changed.is_ok(),
                    changed = adapters.changed() => changed.is_ok(),
                    changed = routes.changed() => changed.is_ok(),
                    there = workloads.changed() => there,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                there = changed => if !there { return },
            }
        }
    }

    /// One snapshot, on a thread that serves no requests. `None` when the runtime is going down.
    async fn build(mut self) -> Option<Pods> {
        let tracker = self.tracker.clone();
        let built = tracker.spawn_blocking(move || {
            self.apply();
            self
        });
        match built.await {
            Ok(same) => Some(same),
            Err(error) => {
                tracing::error!(%error, "pods are no longer followed");
                None
            }
        }
    }

    fn apply(&mut self) {
        let routes = self.routes.all();
        self.builder.set_routes(routes.map_or(RouteTable::Absent, |all| route_table(all.iter().map(|route| &**route))));
        self.builder.set_workloads(self.workloads.models());
        let (Some(pods), Some(adapters)) = (self.watched.all(), self.adapters.available()) else { return };
        let (mut specs, mut problems) = (Vec::with_capacity(pods.len()), Vec::new());
        for pod in &pods {
            let mut reading = self.reader.read(&pod.0);
            problems.append(&mut reading.problems);
            problems.append(&mut reading.config_problems);
            specs.extend(reading.specs());
        }
        self.reader.retain(&specs);
        self.builder.set_problems(problems);
        self.builder.apply_all(specs, adapters.iter().map(|adapter| AdapterSpec::from(&**adapter)).collect());
    }
}
