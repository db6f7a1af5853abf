//! A sandbox with several replicas, and with Envoy before them.

use super::envoy::{Envoy, EnvoyOptions};
use super::http::base;
use super::kube_api::KubeApi;
use super::pods::{PodManifest, PodsFile};
use super::tandem::{Tandem, TandemOptions};

/// What to put into the sandbox.
#[derive(Clone, Debug)]
pub struct FleetOptions {
    /// Replicas of the gateway. Two by default: one hides every mistake about shared state.
    pub replicas: usize,
    /// Put Envoy in front.
    pub envoy: bool,
    /// Envoy runs the file with fail-over to other decode pods, and replicas address pods accordingly.
    pub failover: bool,
    /// Changes to Envoy's file, see [`EnvoyOptions::edit`].
    pub edit_envoy: Option<fn(&mut serde_json::Value)>,
    /// Replicas find their pods through the Kubernetes API instead of a file.
    pub kubernetes: bool,
    /// Open the HTTP front of each replica.
    pub front: bool,
    /// Environment of the replicas.
    pub env: Vec<(String, String)>,
    /// Further arguments of the replicas.
    pub args: Vec<String>,
}

impl Default for FleetOptions {
    fn default() -> Self {
        FleetOptions {
            replicas: 2,
            envoy: true,
            failover: false,
            edit_envoy: None,
            kubernetes: false,
            front: true,
            env: Vec::new(),
            args: Vec::new(),
        }
    }
}

/// The running sandbox. Engines are started before it and outlive it.
#[derive(Debug)]
pub struct Fleet {
    // Fields are dropped in this order: first what sends requests.
    pub envoy: Option<Envoy>,
    pub tandems: Vec<Tandem>,
    pub pods: PodsFile,
}

impl Fleet {
    /// Starts everything and waits until all replicas are ready and Envoy sees them.
    pub async fn start(pods: impl IntoIterator<Item = PodManifest>, options: FleetOptions) -> Fleet {
        let pods: Vec<PodManifest> = pods.into_iter().collect();
        let failover = options.failover.then(|| pods.iter().map(PodManifest::address).collect());
        let pods =
            if options.kubernetes { PodsFile::kubernetes(pods, KubeApi::start().await) } else { PodsFile::file(pods) };
        let mut tandems = Vec::new();
        for index in 0..options.replicas {
            let mut env = vec![("POD_NAME".to_owned(), format!("gateway-{index}"))];
            env.extend(options.env.iter().cloned());
            if options.failover {
                env.push(("TANDEM_ADDRESSING".to_owned(), "destination-endpoint".to_owned()));
            }
            let mut args = options.args.clone();
            let mut path = pods.path();
            if let Some(api) = pods.api() {
                args.extend(["--kubeconfig".to_owned(), api.kubeconfig().display().to_string()]);
                path.clear();
            }
            let replica = TandemOptions { pods: path, env, front: options.front, args };
            tandems.push(Tandem::start(replica).await);
        }
        for tandem in &tandems {
            tandem.wait_ready().await;
        }
        let envoy = if options.envoy {
            let tandem_grpc = tandems.iter().map(Tandem::grpc).collect();
            let tandem_http = tandems.first().expect("a replica").http();
            let edit = options.edit_envoy;
            let options = EnvoyOptions { tandem_grpc, tandem_http, healthy: None, otel: None, failover, edit };
            Some(Envoy::start_with(options).await)
        } else {
            None
        };
        Fleet { envoy, tandems, pods }
    }

    /// The ways in, as base URLs: through Envoy, and straight into the front of the first replica. A scenario that
    /// both must pass runs once for each.
    pub fn paths(&self) -> Vec<String> {
        let envoy = self.envoy.iter().map(Envoy::base);
        let front = self.tandems.first().and_then(Tandem::front).map(base);
        envoy.chain(front).collect()
    }
}
