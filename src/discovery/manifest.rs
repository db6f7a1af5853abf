//! Kubernetes Pod manifests: text → the few fields that matter → [`PodSpec`] (reference section 3). Pure.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use serde::Deserialize;

use super::claims::{self, MODEL_CLAIM_PREFIX};
use super::containers::{self, ContainerStatus, PodTemplate};
use super::ranks;
use crate::fleet::{Engine, ModelConfig, PodKey, PodSpec, Role};
use crate::knobs::{KvConnector, PdKnobs};

const MODEL_NAME: &str = "model.aibrix.ai/name";
const MODEL_PORT: &str = "model.aibrix.ai/port";
const METRIC_PORT: &str = "model.aibrix.ai/metric-port";
const ENGINE: &str = "model.aibrix.ai/engine";
const KV_CONNECTOR: &str = "model.aibrix.ai/kv-connector-type";
const BOOTSTRAP_PORT: &str = "model.aibrix.ai/sglang-bootstrap-port";
const MODEL_CONFIG: &str = "model.aibrix.ai/config";
const ROLESET: &str = "roleset-name";
const ROLE: &str = "role-name";
const POD_GROUP_INDEX: &str = "stormservice.orchestration.aibrix.ai/pod-group-index";
const REPLICA_INDEX: &str = "stormservice.orchestration.aibrix.ai/role-replica-index";
const RAY_NODE_TYPE: &str = "ray.io/node-type";
const DRAINING: &str = "aibrix.ai/draining";
const SCHEME: &str = "model.aibrix.ai/scheme";
const MAIN_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Labels kept of one pod beyond those that the gateway itself reads.
const MAX_LABELS: usize = 256;

const DEFAULT_PORT: u16 = 8000;
const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

/// One Pod object: the fields the gateway reads. Values of labels and annotations that are `null` count as absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Manifest {
    pub(super) kind: Option<String>,
    pub(super) metadata: Option<Metadata>,
    spec: Option<PodTemplate>,
    pub(super) status: Option<Status>,
    pub(super) items: Option<Vec<Manifest>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) name: Option<String>,
    pub(super) namespace: Option<String>,
    uid: Option<String>,
    labels: Option<BTreeMap<String, Option<String>>>,
    annotations: Option<BTreeMap<String, Option<String>>>,
    pub(super) deletion_timestamp: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Status {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    conditions: Option<Vec<Condition>>,
    container_statuses: Option<Vec<ContainerStatus>>,
    /// Of an adapter.
    pub(super) instances: Option<Vec<String>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Condition {
    r#type: Option<String>,
    status: Option<String>,
}

impl Manifest {
    /// Namespace and name, as far as they are said.
    pub(super) fn key(&self) -> (Option<&str>, Option<&str>) {
        let metadata = self.metadata.as_ref();
        let of = |field: fn(&Metadata) -> Option<&str>| metadata.and_then(field);
        (of(|metadata| metadata.namespace.as_deref()), of(|metadata| metadata.name.as_deref()))
    }

    /// It names a model: by label, by annotation, or by a model claim.
    pub(super) fn concerns_routing(&self) -> bool {
        let Some(metadata) = &self.metadata else { return false };
        let labels = metadata.labels.iter().flatten();
        let annotations = metadata.annotations.iter().flatten();
        labels.map(|(name, _)| name).any(|name| name == MODEL_NAME)
            || annotations.map(|(name, _)| name).any(|name| name == MODEL_NAME || name.starts_with(MODEL_CLAIM_PREFIX))
    }

    /// The same pod without what [`PodReader::read`] does not look at, so that what is kept of it is bounded: other
    /// annotations, conditions other than Ready, variables and ports of containers, and labels beyond a generous number.
    pub(super) fn reduced(mut self) -> Manifest {
        self.items = None;
        let port = self.metadata.as_ref().map_or(DEFAULT_PORT, Metadata::serving_port);
        let ports = port..=port.saturating_add(containers::MAX_RANKS - 1);
        self.spec = self.spec.take().and_then(|spec| spec.reduced(ports));
        if let Some(metadata) = &mut self.metadata {
            if let Some(annotations) = &mut metadata.annotations {
                let read = [MODEL_NAME, ENGINE, BOOTSTRAP_PORT, MODEL_CONFIG, DRAINING, SCHEME, MAIN_CONTAINER];
                annotations.retain(|name, _| read.contains(&name.as_str()) || name.starts_with(MODEL_CLAIM_PREFIX));
            }
            if let Some(labels) = &mut metadata.labels
                && labels.len() > MAX_LABELS
            {
                let mut room = MAX_LABELS;
                labels.retain(|name, _| {
                    let stays = room > 0 || is_read(name);
                    room = room.saturating_sub(1);
                    stays
                });
            }
            metadata.deletion_timestamp = metadata.deletion_timestamp.take().map(|_| String::new());
        }
        if let Some(status) = &mut self.status {
            status.container_statuses = status.container_statuses.take().and_then(containers::reduced_statuses);
            if let Some(conditions) = &mut status.conditions {
                // Without Ready among them they still say that the pod is not ready.
                conditions.sort_by_key(|condition| condition.r#type.as_deref() != Some("Ready"));
                conditions.truncate(1);
                conditions.shrink_to_fit();
            }
        }
        self
    }

    /// Has a `status.podIP`.
    pub(super) fn has_address(&self) -> bool {
        self.status.as_ref().and_then(|status| status.pod_ip.as_deref()).is_some_and(|ip| !ip.is_empty())
    }
}

/// A label that [`PodReader::read`] looks at.
fn is_read(label: &str) -> bool {
    [
        MODEL_NAME,
        MODEL_PORT,
        METRIC_PORT,
        ENGINE,
        KV_CONNECTOR,
        ROLESET,
        ROLE,
        POD_GROUP_INDEX,
        REPLICA_INDEX,
        RAY_NODE_TYPE,
        DRAINING,
    ]
    .contains(&label)
}

/// A pod as read: the spec, unless the pod is none of the gateway's business, and what is odd about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// Its own engine. `None`: no model name, or a Ray worker.
    pub spec: Option<PodSpec>,
    /// Its data-parallel ranks beyond the first, which `spec` stands for.
    pub ranks: Vec<PodSpec>,
    /// The engines of its model claims.
    pub claims: Vec<PodSpec>,
    /// One sentence for each label or annotation that could not be used.
    pub problems: Vec<String>,
    /// One for each thing that is wrong with the configuration and that no other pod of this pass has told already.
    pub config_problems: Vec<String>,
}

impl Reading {
    /// Everything that the pod serves.
    pub fn specs(self) -> impl Iterator<Item = PodSpec> {
        self.spec.into_iter().chain(self.ranks).chain(self.claims)
    }
}

/// Turns manifests into specs. Remembers each pod's last usable `model.aibrix.ai/config`, which stays in force while
/// the present one is broken; removing the annotation removes it.
#[derive(Debug)]
pub struct PodReader {
    base: Arc<PdKnobs>,
    last_good: HashMap<(PodKey, Arc<str>), Arc<ModelConfig>>,
    /// Pods of one deployment carry one text; they share one parsed value. Holds the texts of the running pass.
    parsed: HashMap<String, Arc<ModelConfig>>,
    /// What is wrong with configurations, each with the pod it was first seen on, and whether the running pass has
    /// told it. So a thing has one sentence, however many pods share it, which stays the same while they come and go.
    wrong: HashMap<String, (String, bool)>,
}

impl PodReader {
    /// A reader whose profiles start from the gateway-wide knobs `base`.
    pub fn new(base: Arc<PdKnobs>) -> PodReader {
        PodReader { base, last_good: HashMap::new(), parsed: HashMap::new(), wrong: HashMap::new() }
    }

    /// Forgets the configurations of pods that are no longer among `specs`. Call it after each pass over all pods.
    pub fn retain(&mut self, specs: &[PodSpec]) {
        let alive: std::collections::HashSet<_> = specs.iter().map(claims::owner).collect();
        self.last_good.retain(|pod, _| alive.contains(pod));
        self.parsed.clear();
        self.wrong.retain(|_, (_, told)| std::mem::take(told));
    }

    /// Reads one pod.
    pub fn read(&mut self, manifest: &Manifest) -> Reading {
        let empty = BTreeMap::new();
        let Some(metadata) = &manifest.metadata else { return Reading::default() };
        let raw_labels = metadata.labels.as_ref().unwrap_or(&empty);
        let annotations = metadata.annotations.as_ref().unwrap_or(&empty);
        let label = |name: &str| raw_labels.get(name).and_then(Option::as_deref);
        let annotation = |name: &str| annotations.get(name).and_then(Option::as_deref);
        let non_empty = |text: &&str| !text.trim().is_empty();
        let model = label(MODEL_NAME).filter(non_empty).or_else(|| annotation(MODEL_NAME).filter(non_empty));
        let Some(name) = metadata.name.as_deref() else { return Reading::default() };
        let (claimed, unusable) = claims::read(annotations);
        if (model.is_none() && claimed.is_empty() && unusable.is_empty()) || label(RAY_NODE_TYPE) == Some("worker") {
            return Reading::default();
        }
        let namespace = metadata.namespace.as_deref().filter(non_empty).unwrap_or("default");
        let key = PodKey { namespace: Arc::from(namespace), name: Arc::from(name) };
        let uid: Arc<str> = match metadata.uid.as_deref().filter(non_empty) {
            Some(uid) => Arc::from(uid),
            None => Arc::from(key.to_string()),
        };
        let mut problems = Problems { pod: key.to_string(), list: Vec::new() };
        for text in &unusable {
            problems.add(format_args!("{text}"));
        }
        if model.is_none() && claimed.is_empty() {
            return Reading { problems: problems.list, ..Reading::default() };
        }

        let port = problems.port(MODEL_PORT, label(MODEL_PORT), DEFAULT_PORT);
        let metric_port = problems.port(METRIC_PORT, label(METRIC_PORT), port);
        let bootstrap_port = problems.port(BOOTSTRAP_PORT, annotation(BOOTSTRAP_PORT), DEFAULT_BOOTSTRAP_PORT);
        let kv_connector = problems.kv_connector(label(KV_CONNECTOR));
        let role = Role::from_label(label(ROLE));
        let roleset: Option<Arc<str>> = label(ROLESET).filter(non_empty).map(Arc::from);
        if role != Role::Other && roleset.is_none() {
            problems.add(format_args!("label {ROLE} without label {ROLESET}: the pod takes no part in prefill/decode"));
        }
        let (serves_http, pd) = problems.group_index(label(POD_GROUP_INDEX));
        let draining = [label(DRAINING), annotation(DRAINING)].map(|text| problems.draining(text)).contains(&true);
        let tls = problems.scheme(annotation(SCHEME));
        let template = manifest.spec.clone().unwrap_or_default();
        let status = manifest.status.as_ref();
        let statuses = status.and_then(|status| status.container_statuses.as_deref()).unwrap_or_default();
        let host = problems.host(status.and_then(|status| status.pod_ip.as_deref()));
        let mut config_problems = Vec::new();
        let config = self.config(annotation(MODEL_CONFIG), &key, &uid, &mut config_problems);
        let labels = raw_labels
            .iter()
            .filter_map(|(name, value)| Some((name.clone(), value.clone()?)))
            .collect::<BTreeMap<_, _>>();
        let spec = PodSpec {
            uid,
            restarts: containers::all_restarts(statuses),
            model: Arc::from(model.unwrap_or_default().trim()),
            host,
            port,
            metric_port,
            engine: Engine::from_label(label(ENGINE).filter(non_empty).or_else(|| annotation(ENGINE))),
            kv_connector,
            bootstrap_port,
            role,
            roleset,
            replica_index: label(REPLICA_INDEX).map(Arc::from),
            serves_http,
            pd,
            ready: status.is_none_or(Status::ready),
            draining,
            tls,
            rank: 0,
            terminating: metadata.deletion_timestamp.is_some() || status.is_some_and(Status::finished),
            labels: Arc::new(labels),
            config,
            also: Vec::new(),
            claim: None,
            key,
        };
        // Nothing but a claim: its engine may run in any container.
        if model.is_none() {
            let claims = claims::expand(&spec, &mut [], claimed);
            return Reading { claims, problems: problems.list, config_problems, ..Reading::default() };
        }
        let mut engines = ranks::expand(&spec, &template, statuses, annotation(MAIN_CONTAINER), &mut problems);
        let claims = claims::expand(&spec, &mut engines, claimed);
        let ranks = engines.split_off(1.min(engines.len()));
        Reading { spec: engines.pop(), ranks, claims, problems: problems.list, config_problems }
    }

    fn config(
        &mut self,
        text: Option<&str>,
        key: &PodKey,
        uid: &Arc<str>,
        problems: &mut Vec<String>,
    ) -> Option<Arc<ModelConfig>> {
        let identity = (key.clone(), Arc::clone(uid));
        let Some(text) = text.filter(|text| !text.trim().is_empty()) else {
            self.last_good.remove(&identity);
            return None;
        };
        let config = if let Some(config) = self.parsed.get(text) {
            Arc::clone(config)
        } else {
            let (result, warnings) = ModelConfig::parse(text, &self.base);
            for warning in warnings {
                self.tell(format!("{MODEL_CONFIG}: {warning}"), key, problems);
            }
            match result {
                Ok(config) => {
                    let config = Arc::new(config);
                    self.parsed.insert(text.to_owned(), Arc::clone(&config));
                    config
                }
                Err(error) => {
                    let last = self.last_good.get(&identity).cloned();
                    let remains = if last.is_some() { "the last usable one stays in force" } else { "it is ignored" };
                    self.tell(format!("{error}; {remains}"), key, problems);
                    return last;
                }
            }
        };
        self.last_good.insert(identity, Arc::clone(&config));
        Some(config)
    }

    /// Tells what is wrong with a pod's configuration, unless the running pass has told it.
    fn tell(&mut self, text: String, pod: &PodKey, problems: &mut Vec<String>) {
        let sentence = |pod: &str| format!("{text} (first seen on pod {pod})");
        if let Some((first, told)) = self.wrong.get_mut(&text) {
            if !std::mem::replace(told, true) {
                problems.push(sentence(first));
            }
        } else {
            problems.push(sentence(&pod.to_string()));
            self.wrong.insert(text, (pod.to_string(), true));
        }
    }
}

impl Metadata {
    /// As [`PodReader::read`] finds it.
    fn serving_port(&self) -> u16 {
        let label = self.labels.as_ref().and_then(|labels| labels.get(MODEL_PORT)?.as_deref());
        label.and_then(|text| text.trim().parse().ok()).filter(|port| *port > 0).unwrap_or(DEFAULT_PORT)
    }
}

impl Status {
    /// Condition Ready is True. No conditions at all (a hand-written manifest) counts as ready; conditions without
    /// Ready are a pod that the kubelet has only begun with.
    fn ready(&self) -> bool {
        let conditions = self.conditions.as_deref().unwrap_or_default();
        conditions.is_empty()
            || conditions.iter().any(|condition| {
                condition.r#type.as_deref() == Some("Ready") && condition.status.as_deref() == Some("True")
            })
    }

    fn finished(&self) -> bool {
        matches!(self.phase.as_deref(), Some("Failed" | "Succeeded"))
    }
}

/// What is odd about one pod.
pub(super) struct Problems {
    pod: String,
    list: Vec<String>,
}

impl Problems {
    pub(super) fn add(&mut self, text: std::fmt::Arguments<'_>) {
        self.list.push(format!("pod {}: {text}", self.pod));
    }

    fn port(&mut self, name: &str, text: Option<&str>, default: u16) -> u16 {
        let Some(text) = text else { return default };
        match text.trim().parse::<u16>() {
            Ok(port) if port > 0 => port,
            _ => {
                self.add(format_args!("{name} {text:?} is not a port; {default} is used"));
                default
            }
        }
    }

    /// Whether the pod serves HTTP, and whether it takes part in prefill/decode. As in the reference, numbers above 0 are
    /// workers, and PD wants exactly "0" or no label at all, so that a pod with anything else serves unsplit requests.
    fn group_index(&mut self, text: Option<&str>) -> (bool, bool) {
        let Some(text) = text else { return (true, true) };
        if text == "0" {
            return (true, true);
        }
        let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        if is_number && !text.starts_with('-') && digits.bytes().any(|digit| digit != b'0') {
            return (false, false);
        }
        let shown: String = text.chars().take(64).collect();
        self.add(format_args!("{POD_GROUP_INDEX} {shown:?} is no index: the pod takes no part in prefill/decode"));
        (true, false)
    }

    fn draining(&mut self, text: Option<&str>) -> bool {
        match text.map(|text| text.trim().to_ascii_lowercase()).as_deref() {
            Some("true") => true,
            None | Some("" | "false") => false,
            Some(_) => {
                self.add(format_args!("{DRAINING} is neither \"true\" nor \"false\"; the pod is not draining"));
                false
            }
        }
    }

    /// Whether the engine wants TLS.
    fn scheme(&mut self, text: Option<&str>) -> bool {
        match text.map(|text| text.trim().to_ascii_lowercase()).as_deref() {
            Some("https") => true,
            None | Some("" | "http") => false,
            Some(_) => {
                self.add(format_args!("{SCHEME} is neither \"http\" nor \"https\"; http is used"));
                false
            }
        }
    }

    fn kv_connector(&mut self, text: Option<&str>) -> Option<KvConnector> {
        match text?.trim().to_ascii_lowercase().as_str() {
            "shfs" => Some(KvConnector::Shfs),
            "nixl" => Some(KvConnector::Nixl),
            "mooncake" => Some(KvConnector::Mooncake),
            "" => None,
            other => {
                self.add(format_args!("{KV_CONNECTOR} {other:?} is unknown; the gateway's setting is used"));
                None
            }
        }
    }

    /// The address, IPv6 without brackets; empty when there is none to dial.
    fn host(&mut self, text: Option<&str>) -> Arc<str> {
        let text = text.unwrap_or_default().trim();
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        if bare.is_empty() || bare.parse::<IpAddr>().is_ok() || is_host_name(bare) {
            return Arc::from(bare);
        }
        self.add(format_args!("status.podIP {text:?} is not an address; the pod gets no requests"));
        Arc::from("")
    }
}

/// A DNS name: letters, digits, `-` and `.`, and not just a misspelt IPv4 address.
pub(super) fn is_host_name(text: &str) -> bool {
    text.len() <= 253
        && text.split('.').all(|part| {
            !part.is_empty()
                && part.len() <= 63
                && !part.starts_with('-')
                && !part.ends_with('-')
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        })
        && text.split('.').next_back().is_some_and(|last| !last.bytes().all(|byte| byte.is_ascii_digit()))
}
