//! Models for tests, built by hand.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Context, RequestFacts, Target};
use crate::clock::Tick;
use crate::fleet::{
    BucketRange, Engine, Model, ModelConfig, PartialRoleset, Pod, PodKey, PodSpec, PodState, Profile, Role, Roleset,
    Signals,
};
use crate::knobs::{PdKnobs, PrefixKnobs, Tokenizer};
use crate::load::{Commit, Peers};
use crate::prefix::PrefixIndex;
use crate::telemetry::PodLabels;

/// "Now" in tests, and the age limit of signals.
pub(super) const NOW: Tick = Tick::from_millis(100_000);
pub(super) const MAX_AGE: Duration = Duration::from_secs(3);

/// A model under construction.
pub(super) struct Builder {
    pods: Vec<Arc<Pod>>,
    partial: Vec<PartialRoleset>,
}

/// A range, and whether the pod is combined.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Setup {
    pub(super) range: Option<(u64, Option<u64>)>,
    pub(super) combined: bool,
}

impl Builder {
    pub(super) fn new() -> Builder {
        Builder { pods: Vec::new(), partial: Vec::new() }
    }

    pub(super) fn pod(mut self, role: Role, roleset: Option<&str>, setup: Setup) -> Builder {
        let slot = self.pods.len() as u32;
        let profile = Profile {
            name: "default".into(),
            routing_strategy: None,
            rate_limit: None,
            ttft_threshold: None,
            hints: crate::fleet::Hints::default(),
            bucket: setup.range.map_or(BucketRange { min: 0, max: None }, |(min, max)| BucketRange { min, max }),
            combined: setup.combined,
            knobs: Arc::new(PdKnobs::default()),
        };
        let config = (setup.range.is_some() || setup.combined).then(|| {
            Arc::new(ModelConfig {
                locked_strategy: None,
                ignores_requests: false,
                default_profile: None,
                profiles: BTreeMap::from([("default".into(), Arc::new(profile))]),
            })
        });
        let spec = PodSpec {
            key: PodKey { namespace: "ns".into(), name: format!("pod-{slot}").into() },
            uid: format!("uid-{slot}").into(),
            restarts: 0,
            model: "m".into(),
            host: format!("10.0.0.{slot}").into(),
            port: 8000,
            metric_port: 8000,
            engine: Engine::Vllm,
            kv_connector: None,
            bootstrap_port: 8998,
            role,
            roleset: roleset.map(Into::into),
            replica_index: None,
            serves_http: true,
            pd: true,
            draining: false,
            tls: false,
            rank: 0,
            ready: true,
            terminating: false,
            labels: Arc::default(),
            config,
            also: Vec::new(),
            claim: None,
        };
        let state = Arc::new(PodState::new(slot, Arc::new(PodLabels::default())));
        self.pods.push(Arc::new(Pod::new(spec, state)));
        self
    }

    /// A roleset of so many prefill and decode pods.
    pub(super) fn roleset(self, name: &str, prefill: usize, decode: usize) -> Builder {
        self.ranged(name, prefill, decode, Setup::default())
    }

    pub(super) fn ranged(mut self, name: &str, prefill: usize, decode: usize, setup: Setup) -> Builder {
        for _ in 0..prefill {
            self = self.pod(Role::Prefill, Some(name), setup);
        }
        for _ in 0..decode {
            self = self.pod(Role::Decode, Some(name), setup);
        }
        self
    }

    /// So many rolesets of equal size.
    pub(super) fn rolesets(mut self, count: usize, prefill: usize, decode: usize) -> Builder {
        for i in 0..count {
            self = self.roleset(&format!("rs-{i:02}"), prefill, decode);
        }
        self
    }

    pub(super) fn combined(self, range: Option<(u64, Option<u64>)>) -> Builder {
        self.pod(Role::Other, None, Setup { range, combined: true })
    }

    /// Gives the last pod a label.
    pub(super) fn label(mut self, key: &str, value: &str) -> Builder {
        if let Some(pod) = self.pods.last_mut() {
            let labels = &mut Arc::make_mut(pod).spec.labels;
            Arc::make_mut(labels).insert(key.to_owned(), value.to_owned());
        }
        self
    }

    pub(super) fn build(mut self) -> Model {
        let mut names: Vec<Arc<str>> = self.pods.iter().filter_map(|pod| pod.spec.roleset.clone()).collect();
        names.sort();
        names.dedup();
        let mut rolesets = Vec::new();
        for name in names {
            let of = |role| -> Vec<Arc<Pod>> {
                let mine = |pod: &&Arc<Pod>| pod.spec.roleset.as_ref() == Some(&name) && pod.spec.role == role;
                self.pods.iter().filter(mine).cloned().collect()
            };
            let (prefill, decode) = (of(Role::Prefill), of(Role::Decode));
            let (prefill_replicas, decode_replicas) = (prefill.len(), decode.len());
            if prefill.is_empty() || decode.is_empty() {
                self.partial.push(PartialRoleset { name, prefill: prefill_replicas, decode: decode_replicas });
            } else {
                rolesets.push(Roleset { name, prefill, decode, prefill_replicas, decode_replicas });
            }
        }
        Model {
            name: "m".into(),
            standalone: self.pods.iter().filter(|pod| pod.spec.role == Role::Other).cloned().collect(),
            routable: self.pods.clone(),
            pods: self.pods,
            rolesets,
            partial: self.partial,
            config: None,
            config_disagreements: 0,
            commit: Arc::new(Commit::default()),
            ..Model::default()
        }
    }
}

/// An empty index of 8 MiB.
pub(super) fn index() -> PrefixIndex {
    PrefixIndex::new(&PrefixKnobs {
        tokenizer: Tokenizer::Character,
        block_size: 128,
        hash_seed: Some(0),
        budget_bytes: 8 << 20,
        max_blocks: None,
        max_idle: Duration::from_mins(20),
    })
}

pub(super) fn context(prefix: &PrefixIndex, seed: u64) -> Context<'_> {
    Context { now: NOW, seed, max_metric_age: MAX_AGE, prefix, peers: Peers::ALONE }
}

/// A request about which nothing special is known.
pub(super) fn request() -> RequestFacts<'static> {
    RequestFacts::default()
}

/// Fresh signals.
pub(super) fn fresh() -> Signals {
    Signals { at: Some(NOW), ..Signals::unknown() }
}

pub(super) fn set(pod: &Pod, signals: Signals) {
    pod.state.signals.store(Arc::new(signals));
}

/// The pods of a decision: (prefill, decode or single).
pub(super) fn slots(target: &Target) -> (Option<u32>, u32) {
    match target {
        Target::Pair { prefill, decode } => (Some(prefill.state.slot), decode.state.slot),
        Target::Single { pod, .. } => (None, pod.state.slot),
    }
}
