//! The seam to the simulated engines: what the rest of the harness needs to know about something that serves
//! requests, and a fleet of pods over simulators.

use std::net::SocketAddr;

use serde_json::json;
use tandem_sim::{Connector, Dialect, Engine, EngineConfig, Record};

use super::fleet::{Fleet, FleetOptions};
use super::oracle::oracle;
use super::pods::PodManifest;
use super::raw::RawServer;

/// A server that pods can stand for.
pub trait Backend {
    /// Where it listens.
    fn address(&self) -> SocketAddr;

    /// Requests that it is working on, or believes to be.
    fn open_requests(&self) -> usize;
}

impl Backend for RawServer {
    fn address(&self) -> SocketAddr {
        RawServer::address(self)
    }

    fn open_requests(&self) -> usize {
        self.connections().iter().filter(|connection| !connection.done && !connection.closed_by_peer).count()
    }
}

impl Backend for Engine {
    fn address(&self) -> SocketAddr {
        Engine::address(self)
    }

    fn open_requests(&self) -> usize {
        self.stats().live_requests
    }
}

/// The model that [`Sandbox`] serves.
pub const MODEL: &str = "m";

/// Strict simulated engines (vLLM, unless configured otherwise), the pods that stand for them, and replicas (with Envoy,
/// unless switched off).
/// Engine `i` of a role belongs to roleset `rs<i>`; pods are called `p<i>`, `d<i>` and `c<i>` (combined).
pub struct Sandbox {
    pub prefill: Vec<Engine>,
    pub decode: Vec<Engine>,
    pub combined: Vec<Engine>,
    pub fleet: Fleet,
}

/// What to build.
#[derive(Clone, Debug)]
pub struct SandboxOptions {
    /// Pairs of a prefill and a decode engine.
    pub pairs: usize,
    /// Combined engines.
    pub combined: usize,
    /// Applied to each engine's configuration.
    pub engine: fn(EngineConfig) -> EngineConfig,
    /// Applied to each pod.
    pub pod: fn(PodManifest) -> PodManifest,
    /// Replicas, Envoy, environment.
    pub fleet: FleetOptions,
}

impl Default for SandboxOptions {
    fn default() -> SandboxOptions {
        SandboxOptions {
            pairs: 1,
            combined: 0,
            engine: |config| config,
            pod: |pod| pod,
            fleet: FleetOptions::default(),
        }
    }
}

impl SandboxOptions {
    /// Sandboxes of engines like this.
    pub fn of(engine: fn(EngineConfig) -> EngineConfig) -> SandboxOptions {
        SandboxOptions { engine, ..SandboxOptions::default() }
    }

    /// Replicas with these variables too.
    #[must_use]
    pub fn env(mut self, variables: &[(&str, &str)]) -> SandboxOptions {
        self.fleet.env.extend(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self
    }
}

impl Sandbox {
    /// Starts everything and waits until it serves.
    pub async fn start(options: SandboxOptions) -> Sandbox {
        let (mut prefill, mut decode, mut combined, mut pods) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for index in 0..options.pairs {
            let roleset = format!("rs{index}");
            for (role, engines, config) in [
                ("prefill", &mut prefill, EngineConfig::prefill(MODEL)),
                ("decode", &mut decode, EngineConfig::decode(MODEL)),
            ] {
                let engine = start_engine((options.engine)(config)).await;
                let letter = &role[..1];
                let pod = PodManifest::new(&format!("{letter}{index}"), MODEL, engine.address());
                let pod = described(pod.role(&roleset, role).config(&pd_by_default()), &engine);
                pods.push((options.pod)(pod));
                engines.push(engine);
            }
        }
        for index in 0..options.combined {
            let engine = start_engine((options.engine)(EngineConfig::combined(MODEL))).await;
            let config =
                json!({"profiles": {"default": {"routingStrategy": "pd", "routingConfig": {"combined": true}}}});
            let pod = PodManifest::new(&format!("c{index}"), MODEL, engine.address()).config(&config);
            pods.push((options.pod)(described(pod, &engine)));
            combined.push(engine);
        }
        let mut fleet = options.fleet;
        // One port for all prefill pods: each has an address of its own, outside of tests.
        if let Some(engine) = prefill.first().filter(|engine| engine.config().connector == Connector::Mooncake) {
            fleet.env.push(("AIBRIX_MOONCAKE_BOOTSTRAP_PORT".to_owned(), engine.bootstrap_port().to_string()));
        }
        Sandbox { prefill, decode, combined, fleet: Fleet::start(pods, fleet).await }
    }

    /// The ways in: through Envoy, and straight into the front of the first replica.
    pub fn paths(&self) -> Vec<String> {
        self.fleet.paths()
    }

    /// All engines.
    pub fn engines(&self) -> impl Iterator<Item = &Engine> {
        self.prefill.iter().chain(&self.decode).chain(&self.combined)
    }

    /// Forgets what the engines recorded.
    pub fn clear(&self) {
        self.engines().for_each(Engine::clear_records);
    }

    /// The closing check: the oracle, and no engine saw its protocol broken.
    pub async fn close(self) {
        let engines: Vec<&dyn Backend> = self.engines().map(|engine| engine as &dyn Backend).collect();
        oracle(&self.fleet.tandems, &engines).await;
        for engine in self.engines() {
            assert!(engine.violations().is_empty(), "{}: {:?}", Engine::address(engine), engine.violations());
        }
    }
}

/// What a pod has to say of the engine in it.
pub fn described(pod: PodManifest, engine: &Engine) -> PodManifest {
    match (engine.config().dialect, engine.config().connector) {
        (Dialect::Vllm, Connector::Nixl | Connector::Aibrix) => pod,
        (Dialect::Vllm, Connector::Mooncake) => pod.label("model.aibrix.ai/kv-connector-type", "mooncake"),
        (Dialect::Trtllm, _) => pod.engine("trtllm"),
        (Dialect::Sglang, _) => match engine.bootstrap_port() {
            0 => pod.engine("sglang"),
            port => pod.engine("sglang").annotation("model.aibrix.ai/sglang-bootstrap-port", &port.to_string()),
        },
    }
}

/// Starts an engine.
pub async fn start_engine(config: EngineConfig) -> Engine {
    tandem_sim::start(config).await.expect("an engine starts")
}

/// The annotation that makes `pd` the default of a model.
pub fn pd_by_default() -> serde_json::Value {
    json!({"profiles": {"default": {"routingStrategy": "pd"}}})
}

/// The one request that an engine has recorded.
pub fn only(engine: &Engine) -> Record {
    let records = engine.records();
    assert_eq!(records.len(), 1, "{records:?}");
    records.into_iter().next().expect("one record")
}
