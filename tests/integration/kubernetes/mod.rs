//! Discovery from the Kubernetes API: the real client, against a stand-in for the API server.
//!
//! Here: the watches and the fleet they feed, without a gateway around them, so that each test has its own times.

mod access;
mod churn;
mod events;
mod outages;
mod random;
mod requests;
mod settings;
mod signs_of_life;
mod watches;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tandem::clock::Clock;
use tandem::discovery::kubernetes::{Around, Cluster, Pace};
use tandem::discovery::{Departed, FleetBuilder};
use tandem::fleet::{Fleet, Pod, Snapshot};
use tandem::knobs::{KubernetesKnobs, PdKnobs};
use tandem::telemetry::{FleetGauges, Metrics};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::harness::kube_api::KubeApi;
use crate::harness::pods::PodManifest;
use crate::harness::{SOON, within};

/// What every event kind keeps to.
const SECOND: Duration = Duration::from_secs(1);

/// A stand-in and the fleet that is made of it.
struct Scene {
    api: KubeApi,
    builder: Arc<FleetBuilder>,
    cluster: Cluster,
    metrics: Arc<Metrics>,
    clock: Clock,
    departed: Arc<Mutex<Vec<Departed>>>,
    stop: CancellationToken,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Scene {
    /// Watches `api`.
    async fn start(api: KubeApi, knobs: KubernetesKnobs, pace: Pace) -> Scene {
        let kubeconfig = api.kubeconfig();
        Scene::start_from(api, &kubeconfig, knobs, pace).await
    }

    /// The same through another kubeconfig.
    async fn start_from(api: KubeApi, kubeconfig: &Path, knobs: KubernetesKnobs, pace: Pace) -> Scene {
        let (clock, metrics, stop) = (Clock::system(), Arc::new(Metrics::new("gw")), CancellationToken::new());
        let departed: Arc<Mutex<Vec<Departed>>> = Arc::default();
        let heard = Arc::clone(&departed);
        let listener = Arc::new(move |gone: &[Departed]| heard.lock().expect("departed").extend_from_slice(gone));
        let builder = Arc::new(FleetBuilder::new(Arc::new(Fleet::default()), vec![listener]));
        let around = Around {
            builder: Arc::clone(&builder),
            base: Arc::new(PdKnobs::default()),
            metrics: Arc::clone(&metrics),
            clock,
            seed: 7,
        };
        let tracker = TaskTracker::new();
        let cluster = Cluster::start(Some(kubeconfig), &knobs, pace, around, &tracker, &stop).await.expect("a client");
        Scene { api, builder, cluster, metrics, clock, departed, stop }
    }

    /// A cluster with these pods, known to the fleet.
    async fn with(pods: &[PodManifest], pace: Pace) -> Scene {
        let api = KubeApi::start().await;
        for pod in pods {
            api.put("pods", pod.manifest());
        }
        let scene = Scene::start(api, KubernetesKnobs::default(), pace).await;
        let count = pods.len();
        scene.shows("the pods", |fleet| fleet.pods().count() == count).await;
        within("the watch is open", async {
            while scene.api.count("watch", "pods") == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        scene
    }

    fn fleet(&self) -> Arc<Snapshot> {
        self.builder.fleet().load()
    }

    /// Waits until the fleet is like this; returns how long that took.
    async fn shows(&self, what: &str, condition: impl Fn(&Snapshot) -> bool) -> Duration {
        let began = Instant::now();
        let mut versions = self.builder.subscribe();
        within(what, async {
            while !condition(&self.fleet()) {
                versions.changed().await.expect("a builder");
            }
        })
        .await;
        began.elapsed()
    }

    /// Waits until the cluster's words are like this.
    async fn says(&self, what: &str, condition: impl Fn(&[String], &[String]) -> bool) {
        let began = Instant::now();
        loop {
            let words = self.cluster.words();
            if condition(&words.reasons, &words.notes) {
                return;
            }
            assert!(began.elapsed() < SOON, "{what}: {words:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The value of a metric.
    fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.metrics.set_kubernetes(&self.cluster.gauges());
        let page = self.metrics.render(&FleetGauges::default(), self.clock.now());
        crate::harness::metrics::Metrics::parse(&page).expect("metrics").sum(name, labels)
    }

    /// Waits until a metric has at least this value.
    async fn counts(&self, name: &str, labels: &[(&str, &str)], least: f64) {
        within(name, async {
            while self.metric(name, labels) < least {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }
}

/// Times for tests that are about failures.
fn quick() -> Pace {
    let brief = Duration::from_millis(200);
    Pace {
        retry: Duration::from_millis(20),
        retry_max: brief,
        first_retry_max: brief,
        absent: brief,
        worked: brief,
        ..Pace::default()
    }
}

/// Runs a scene that returns what it did and how long each thing took to show. On a busy machine a time may be long by
/// chance: the scene may be repeated, twice.
async fn each_within_a_second(scene: impl AsyncFn() -> Vec<(&'static str, Duration)>) {
    let mut slow = Vec::new();
    for _ in 0..3 {
        let took = scene().await;
        let longest = took.iter().max_by_key(|(_, took)| *took).expect("something was measured");
        println!("slowest of {}: {} in {:?}", took.len(), longest.0, longest.1);
        if longest.1 < SECOND {
            return;
        }
        slow.push(*longest);
    }
    panic!("longer than a second, three times: {slow:?}");
}

/// A ready pod of model `m` at `10.0.0.<number>:8000`.
fn pod(name: &str, number: u8) -> PodManifest {
    PodManifest::new(name, "m", SocketAddr::from(([10, 0, 0, number], 8000))).ready(true)
}

/// A pod of the fleet by `namespace/name`.
fn found<'a>(fleet: &'a Snapshot, name: &str) -> Option<&'a Arc<Pod>> {
    fleet.pods().find(|pod| pod.spec.key.to_string() == name)
}

/// Names of the pods that model `m` routes to.
fn routable(fleet: &Snapshot) -> Vec<String> {
    fleet.model("m").map_or_else(Vec::new, |model| model.routable.iter().map(|pod| pod.spec.key.to_string()).collect())
}
