//! Replicas of the state plane in this process: a fleet of pods each, no requests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tandem::clock::Clock;
use tandem::fleet::{
    AdapterSpec, Engine, Fleet, Model, Pod, PodKey, PodSpec, PodState, Role, Snapshot, build, build_all,
};
use tandem::knobs::{Ejection, Grade, PdKnobs, PlaneKnobs, PrefixKnobs, Tokenizer};
use tandem::load::{LoadView, Peers, Sessions};
use tandem::prefix::PrefixIndex;
use tandem::routing::{self, Affinity, Charges, Context, PromptLength, RequestFacts, Splittable, Strategy, Target};
use tandem::state::links::{Listeners, SharedPlane, Surroundings};
use tandem::state::plane::{ModelStatus, StatePlane};
use tandem::state::redis::{Plane, RedisConfig};
use tandem::telemetry::Metrics;
use tokio::sync::watch;

use crate::harness::eventually;

/// How long a fleet may take to find together.
pub const MEET: Duration = Duration::from_secs(20);

fn spec(model: &str, roleset: usize, role: Role) -> PodSpec {
    let name = format!("{}-{roleset}", if role == Role::Prefill { "p" } else { "d" });
    PodSpec {
        key: PodKey { namespace: Arc::from("ns"), name: Arc::from(name.as_str()) },
        uid: Arc::from(format!("uid-{model}-{name}")),
        restarts: 0,
        model: Arc::from(model),
        host: Arc::from("10.0.0.5"),
        port: 8000,
        metric_port: 8000,
        engine: Engine::Vllm,
        kv_connector: None,
        bootstrap_port: 8998,
        role,
        roleset: Some(Arc::from(format!("rs-{roleset}"))),
        replica_index: None,
        serves_http: true,
        pd: true,
        draining: false,
        tls: false,
        rank: 0,
        ready: true,
        terminating: false,
        labels: Arc::new(BTreeMap::new()),
        config: None,
        also: Vec::new(),
        claim: None,
    }
}

/// Pairs of a prefill and a decode pod each, of one model.
pub fn pairs(model: &str, pairs: usize) -> Vec<PodSpec> {
    (0..pairs).flat_map(|set| [spec(model, set, Role::Prefill), spec(model, set, Role::Decode)]).collect()
}

/// A small index.
pub fn prefix() -> PrefixIndex {
    PrefixIndex::new(&PrefixKnobs {
        tokenizer: Tokenizer::Character,
        block_size: 128,
        hash_seed: None,
        budget_bytes: 1 << 20,
        max_blocks: None,
        max_idle: Duration::from_mins(1),
    })
}

/// One replica.
pub struct Replica {
    pub plane: SharedPlane,
    pub fleet: Arc<Fleet>,
    pub clock: Clock,
    pub prefix: Arc<PrefixIndex>,
    pub sessions: Arc<Sessions>,
    snapshots: watch::Sender<u64>,
    slots: u32,
}

impl Replica {
    pub fn start(url: &str, grade: Grade, specs: &[PodSpec], seed: u64) -> Replica {
        Replica::start_with(
            &RedisConfig::from_url(url).expect("a URL"),
            &PlaneKnobs { grade, ..PlaneKnobs::default() },
            specs,
            seed,
        )
    }

    pub fn start_with(config: &RedisConfig, knobs: &PlaneKnobs, specs: &[PodSpec], seed: u64) -> Replica {
        let (fleet, clock, metrics) = (Arc::new(Fleet::default()), Clock::system(), Arc::new(Metrics::new("gateway")));
        let mut slots = 0;
        fleet.store(build(&Snapshot::default(), specs, &mut slots));
        let (snapshots, watched) = watch::channel(1);
        let prefix = Arc::new(prefix());
        let sessions = Arc::new(Sessions::new(1_000));
        let around = Surroundings {
            fleet: Arc::clone(&fleet),
            snapshots: watched,
            metrics,
            clock,
            tracer: tandem::telemetry::Tracer::off(),
            listeners: Listeners {
                users: Arc::default(),
                vtc: tandem::knobs::VtcKnobs::default(),
                prefix: Arc::clone(&prefix),
                sessions: Arc::clone(&sessions),
                ejection: Ejection::default(),
            },
            seed,
        };
        let plane =
            SharedPlane::start(Plane::connect(config).expect("a plane"), config, knobs, around).expect("shared");
        Replica { plane, fleet, clock, prefix, sessions, snapshots, slots }
    }

    /// Replaces the pods.
    pub fn discover(&mut self, specs: &[PodSpec]) {
        self.discover_all(specs, &[]);
    }

    /// Replaces the pods and the adapters.
    pub fn discover_all(&mut self, specs: &[PodSpec], adapters: &[AdapterSpec]) {
        self.fleet.store(build_all(&self.fleet.load(), specs, adapters, &mut self.slots));
        self.snapshots.send_modify(|version| *version += 1);
    }

    pub fn model(&self, name: &str) -> Arc<Model> {
        Arc::clone(self.fleet.load().model(name).expect("a model"))
    }

    pub fn pod(&self, model: &str, name: &str) -> Arc<PodState> {
        let model = self.model(model);
        let pod = model.pods.iter().find(|pod| &*pod.spec.key.name == name).expect("a pod");
        Arc::clone(&pod.state)
    }

    /// What this replica believes to be on a pod, everybody's work counted.
    pub fn sees(&self, model: &str, pod: &str) -> LoadView {
        self.pod(model, pod).load.total(self.clock.now())
    }

    pub fn status(&self, model: &str) -> Option<ModelStatus> {
        self.plane.status(self.clock.now()).models.into_iter().find(|status| &*status.model == model)
    }
}

/// Replicas that have all met.
pub async fn fleet(url: &str, grade: Grade, count: usize, specs: &[PodSpec]) -> Vec<Replica> {
    let replicas: Vec<Replica> = (0..count).map(|seed| Replica::start(url, grade, specs, 1 + seed as u64)).collect();
    met(&replicas, &specs.first().expect("a pod").model).await;
    replicas
}

/// Waits until every replica knows of all.
pub async fn met(replicas: &[Replica], model: &str) {
    for replica in replicas {
        eventually(MEET, "the replicas to meet", async || {
            let status = replica.status(model)?;
            (status.members as usize == replicas.len() && status.age.is_some()).then_some(())
        })
        .await;
    }
}

/// Says goodbye one after the other.
pub async fn leave(replicas: Vec<Replica>) {
    for replica in replicas {
        replica.plane.leave().await;
    }
}

/// Selects and charges a pair of the model for a request of so many prompt tokens.
pub fn select(
    model: &Model,
    clock: Clock,
    prefix: &PrefixIndex,
    knobs: &PdKnobs,
    peers: Peers,
    prompt_tokens: u64,
    seed: u64,
) -> ([Arc<Pod>; 2], Charges) {
    let facts = RequestFacts {
        length: PromptLength::Unknown,
        hashes: &[],
        splittable: Splittable::Yes,
        profile: None,
        filter: None,
        affinity: Affinity::default(),
        user: None,
        prompt_tokens,
        prefix_tokens: 0,
        session_growth: None,
        avoid: None,
    };
    let context = Context { now: clock.now(), seed, max_metric_age: Duration::from_secs(5), prefix, peers };
    let (decision, charges) = routing::select_and_charge(model, &facts, Strategy::Pd, knobs, context).expect("a pair");
    let Target::Pair { prefill, decode } = &decision.target else { panic!("no pair") };
    ([Arc::clone(prefill), Arc::clone(decode)], charges)
}
