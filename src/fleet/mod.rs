//! What is known about the fleet: pods, rolesets, profiles, and the immutable [`Snapshot`] that routing reads.
//!
//! A [`PodSpec`] is plain data from discovery. [`build`] turns specs into a snapshot, carrying over the
//! [`PodState`] (load cell, scraped signals) of every incarnation that is still there. Readers load one
//! `Arc<Snapshot>` and keep it to the end of their request.

mod absent;
mod aliases;
mod build;
#[cfg(test)]
pub(crate) mod fixture;
mod hints;
mod profile;
mod routes;
mod selector;
mod signals;
mod snapshot;
mod strategy_fields;
#[cfg(test)]
mod tests;
mod values;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::Bytes;

pub use absent::{Absent, MAX_ABSENT};
pub use aliases::{AdapterSpec, Home};
pub use build::{build, build_all};
pub use hints::{Features, Hints};
pub use profile::{AUTO, BucketRange, ModelConfig, Profile, ProfileError, RateLimit};
pub use routes::{ROUTE_NAMESPACE, RouteFault, RouteParent, RouteTable, route_name};
pub use selector::{MAX_SELECTOR_BYTES, MAX_SELECTOR_REQUIREMENTS, Selector, SelectorError};
pub use signals::{Adapters, Signals};
pub use snapshot::{Fleet, Model, PartialRoleset, Roleset, Snapshot};

use crate::knobs::KvConnector;
use crate::load::{Health, LoadCell, Mark, PlanePort, RecentWork};
use crate::telemetry::PodLabels;

/// A pod's name: unique among living pods.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodKey {
    /// Kubernetes namespace.
    pub namespace: Arc<str>,
    /// Pod name.
    pub name: Arc<str>,
}

impl std::fmt::Display for PodKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The engine dialect a pod speaks (label `model.aibrix.ai/engine`; default vLLM).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    Trtllm,
    /// Anything else; the label's text is kept in [`PodSpec::labels`].
    Other,
}

impl Engine {
    /// The engine of that label value; no or an empty value means vLLM.
    pub fn from_label(label: Option<&str>) -> Engine {
        match label.unwrap_or_default().trim().to_ascii_lowercase().as_str() {
            "" | "vllm" => Engine::Vllm,
            "sglang" => Engine::Sglang,
            "trtllm" => Engine::Trtllm,
            _ => Engine::Other,
        }
    }

    /// The label value.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Vllm => "vllm",
            Engine::Sglang => "sglang",
            Engine::Trtllm => "trtllm",
            Engine::Other => "other",
        }
    }
}

/// A pod's part in PD disaggregation (label `role-name`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Computes prompts.
    Prefill,
    /// Generates tokens.
    Decode,
    /// Any other value, or none: runs both phases.
    Other,
}

impl Role {
    /// The role of that label value.
    pub fn from_label(label: Option<&str>) -> Role {
        match label {
            Some("prefill") => Role::Prefill,
            Some("decode") => Role::Decode,
            _ => Role::Other,
        }
    }
}

/// What a pod says of a model that it serves beside its own, if it can (annotations `modelclaim.aibrix.ai/…`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimState {
    /// Its engine serves.
    Active,
    /// Its engine starts, or wakes.
    Activating,
    /// Its engine sleeps.
    Sleeping,
    /// Its engine did not start.
    Failed,
}

/// An endpoint: an engine of a pod as discovery sees it. Plain data, compared to notice changes. A pod has one, one more for
/// each further data-parallel rank (`pod/port`), and one more for each model that it claims to serve on another port
/// (`pod:claim`).
#[derive(Clone, Debug, PartialEq)]
pub struct PodSpec {
    /// Namespace and name.
    pub key: PodKey,
    /// Kubernetes UID; for manifests without one, a text derived from the key.
    pub uid: Arc<str>,
    /// How often the engine's container was started again. With the UID it names an incarnation.
    pub restarts: u32,
    /// `model.aibrix.ai/name` (label, else annotation).
    pub model: Arc<str>,
    /// Pod IP or, in standalone mode, a host name; empty = not assigned. IPv6 without brackets.
    pub host: Arc<str>,
    /// Serving port (`model.aibrix.ai/port`, default 8000); 0 = none yet.
    pub port: u16,
    /// Metrics port (`model.aibrix.ai/metric-port`, default: the serving port).
    pub metric_port: u16,
    /// Engine dialect.
    pub engine: Engine,
    /// Label `model.aibrix.ai/kv-connector-type`, when valid.
    pub kv_connector: Option<KvConnector>,
    /// Annotation `model.aibrix.ai/sglang-bootstrap-port` (8998).
    pub bootstrap_port: u16,
    /// Label `role-name`.
    pub role: Role,
    /// Label `roleset-name`.
    pub roleset: Option<Arc<str>>,
    /// Label `stormservice.orchestration.aibrix.ai/role-replica-index`.
    pub replica_index: Option<Arc<str>>,
    /// False for pods with a `pod-group-index` above 0: workers without an HTTP server.
    pub serves_http: bool,
    /// May take part in prefill/decode: it has no `pod-group-index`, or `"0"`.
    pub pd: bool,
    /// Condition Ready is True (a manifest without conditions counts as ready).
    pub ready: bool,
    /// `aibrix.ai/draining` (label or annotation): it gets no new requests, and ends those that it has.
    pub draining: bool,
    /// Annotation `model.aibrix.ai/scheme` is `https`: the engine is dialled over TLS.
    pub tls: bool,
    /// Data-parallel rank of this endpoint within its pod.
    pub rank: u16,
    /// `metadata.deletionTimestamp` is set, or the phase is Failed or Succeeded.
    pub terminating: bool,
    /// All labels, for selectors and display.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Annotation `model.aibrix.ai/config`, parsed; `None` when absent or unusable.
    pub config: Option<Arc<ModelConfig>>,
    /// Further models that the engine on this port serves.
    pub also: Vec<Arc<str>>,
    /// Of an engine that stands for a claim; `None` for the pod's own.
    pub claim: Option<ClaimState>,
}

impl PodSpec {
    /// May take new requests: it is reachable and not draining.
    pub fn routable(&self) -> bool {
        self.reachable() && !self.draining
    }

    /// Answers: it has an address and a port, is ready and not going away. Whoever must have this very pod may ask it.
    pub fn reachable(&self) -> bool {
        !self.host.is_empty() && self.port != 0 && self.ready && !self.terminating
    }

    /// The key of the pod whose data-parallel rank this is: its own, but for the rank's port.
    pub fn pod(&self) -> PodKey {
        let name = if self.rank == 0 { None } else { self.key.name.rsplit_once('/') };
        let name = name.map_or_else(|| Arc::clone(&self.key.name), |(pod, _)| Arc::from(pod));
        PodKey { namespace: Arc::clone(&self.key.namespace), name }
    }

    /// Has a page of engine metrics to offer. Pods that are not ready yet are asked too: once they are, their numbers are
    /// there.
    pub fn scraped(&self) -> bool {
        self.serves_http && !self.host.is_empty() && self.metric_port != 0 && !self.terminating
    }

    /// `host:port` as a dialler wants it, IPv6 in brackets.
    pub fn address(&self) -> String {
        join_host_port(&self.host, self.port)
    }

    /// `host:metric_port`, IPv6 in brackets; with `https://` before it where the engine itself serves metrics, over TLS.
    pub fn metric_address(&self) -> String {
        let address = join_host_port(&self.host, self.metric_port);
        if self.tls && self.metric_port == self.port { format!("{HTTPS}{address}") } else { address }
    }

    /// The engine as the label spells it; the dialect's name when there is no label.
    pub fn engine_label(&self) -> &str {
        match (self.engine, self.labels.get("model.aibrix.ai/engine")) {
            (Engine::Other, Some(label)) => label,
            (engine, _) => engine.name(),
        }
    }

    /// The number by which all replicas know this incarnation. The key is part of it as it is of the incarnation's identity:
    /// manifests get copied together with their UIDs.
    pub fn id(&self) -> u64 {
        crate::load::pod_id(&format!("{}/{}", self.key, self.uid), self.restarts)
    }

    /// The pod's metric labels (reference section 9.1).
    pub fn metric_labels(&self) -> PodLabels {
        let text = |value: &Option<Arc<str>>| value.as_deref().unwrap_or_default().to_owned();
        PodLabels {
            namespace: self.key.namespace.to_string(),
            pod: self.key.name.to_string(),
            model: self.model.to_string(),
            engine_type: self.engine_label().to_owned(),
            roleset: text(&self.roleset),
            role: self.labels.get("role-name").cloned().unwrap_or_default(),
            role_replica_index: text(&self.replica_index),
        }
    }
}

/// What is written before an address that is dialled over TLS.
const HTTPS: &str = "https://";

/// Scheme and `host:port` of an address to dial ([`Pod::dial`]).
pub fn scheme_of(dial: &str) -> (&'static str, &str) {
    dial.strip_prefix(HTTPS).map_or(("http", dial), |address| ("https", address))
}

/// Joins a host and a port; an IPv6 address gets its brackets.
pub fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// What belongs to one incarnation of a pod (UID and restart count) and outlives snapshots: a charge holds this, so
/// its release always lands where it was charged.
#[derive(Debug)]
pub struct PodState {
    /// The number by which all replicas know this incarnation ([`crate::load::pod_id`]).
    pub id: u64,
    /// Told when the load changes.
    pub port: Arc<PlanePort>,
    /// Whether the port knows of a change already.
    pub mark: Mark,
    /// A number that names this incarnation in the process; never used twice.
    pub slot: u32,
    /// In-flight work charged by this replica. Shared with an earlier sighting of the same incarnation, if that still has
    /// some: see [`build`].
    pub load: Arc<LoadCell>,
    /// What its last requests came to. Not shared with an earlier sighting: it came back, so it may have recovered.
    pub health: Arc<Health>,
    /// What it was given lately, for strategies that weigh that.
    pub recent: RecentWork,
    /// The last scraped engine metrics.
    pub signals: ArcSwap<Signals>,
    /// A hand-off of this prefill pod could not be used, and the log says so.
    pub handoff_lost: AtomicBool,
    /// The page that they, or those of a moment before, were read from; kept where it is passed on.
    pub page: ArcSwapOption<Bytes>,
    /// Metric labels of the pod as it was first seen. They stay for the life of the incarnation, so that a gauge goes
    /// down in the series in which it went up; [`PodSpec::metric_labels`] has the present ones.
    pub labels: Arc<PodLabels>,
}

impl PodState {
    /// A fresh incarnation with nothing charged and nothing known.
    pub fn new(slot: u32, labels: Arc<PodLabels>) -> PodState {
        PodState::sharing(slot, labels, Arc::default())
    }

    /// The same over a load cell that exists.
    pub fn sharing(slot: u32, labels: Arc<PodLabels>, load: Arc<LoadCell>) -> PodState {
        PodState {
            id: u64::from(slot),
            port: Arc::default(),
            mark: Mark::default(),
            slot,
            load,
            health: Arc::default(),
            recent: RecentWork::default(),
            signals: ArcSwap::from_pointee(Signals::unknown()),
            handoff_lost: AtomicBool::new(false),
            page: ArcSwapOption::empty(),
            labels,
        }
    }

    /// The same, known to other replicas by this number, and with the port of its model.
    #[must_use]
    pub fn known_as(self, id: u64, port: Arc<PlanePort>) -> PodState {
        PodState { id, port, ..self }
    }
}

impl Pod {
    /// A pod with that state.
    pub fn new(spec: PodSpec, state: Arc<PodState>) -> Pod {
        let address: Arc<str> = Arc::from(spec.address());
        let dial = if spec.tls { Arc::from(format!("{HTTPS}{address}")) } else { Arc::clone(&address) };
        Pod { spec, address, dial, state }
    }
}

/// A pod in a snapshot.
#[derive(Clone, Debug)]
pub struct Pod {
    /// What discovery said.
    pub spec: PodSpec,
    /// `spec.address()`, made once.
    pub address: Arc<str>,
    /// The same as its engine is dialled: with `https://` before it where the engine wants TLS.
    pub dial: Arc<str>,
    /// The living part.
    pub state: Arc<PodState>,
}
