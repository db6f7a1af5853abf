//! Kubernetes Pod manifests: text → the few fields that matter → [`PodSpec`] (reference section 3). Pure.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use serde::Deserialize;

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

const DEFAULT_PORT: u16 = 8000;
const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

/// One Pod object: the fields the gateway reads. Values of labels and annotations that are `null` count as absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Manifest {
    kind: Option<String>,
    metadata: Option<Metadata>,
    status: Option<Status>,
    items: Option<Vec<Manifest>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    labels: Option<BTreeMap<String, Option<String>>>,
    annotations: Option<BTreeMap<String, Option<String>>>,
    deletion_timestamp: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Status {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    conditions: Option<Vec<Condition>>,
    container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Condition {
    r#type: Option<String>,
    status: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ContainerStatus {
    restart_count: u32,
}

impl Manifest {
    /// Namespace and name, as far as they are said.
    pub(super) fn key(&self) -> (Option<&str>, Option<&str>) {
        let metadata = self.metadata.as_ref();
        let of = |field: fn(&Metadata) -> Option<&str>| metadata.and_then(field);
        (of(|metadata| metadata.namespace.as_deref()), of(|metadata| metadata.name.as_deref()))
    }

    /// Has a `status.podIP`.
    pub(super) fn has_address(&self) -> bool {
        self.status.as_ref().and_then(|status| status.pod_ip.as_deref()).is_some_and(|ip| !ip.is_empty())
    }
}

/// A document that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("document {document}{}: {text}", .pod.as_ref().map(|pod| format!(" (pod {pod})")).unwrap_or_default())]
pub struct ManifestError {
    /// Its number in the file, from 1.
    pub document: usize,
    /// The pod's name, where it could be made out.
    pub pod: Option<String>,
    /// What is wrong. Never quotes the document, which may hold secrets.
    pub text: String,
}

/// The documents of one file: pods (a list is taken apart), and what could not be read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Documents {
    /// Pod objects in the order of the text.
    pub pods: Vec<Manifest>,
    /// Broken documents.
    pub broken: Vec<ManifestError>,
    /// Documents of another kind, as sentences.
    pub foreign: Vec<String>,
}

/// Splits a text into documents and reads each by itself, so that one broken document does not hide the others.
pub fn read_documents(text: &str) -> Documents {
    let text = text.trim_start_matches('\u{feff}');
    let mut documents = Documents::default();
    // Inside JSON no line can begin so: its strings hold no line breaks.
    let separated = text.lines().any(|line| line.starts_with("---"));
    let is_json = !separated && text.trim_start().starts_with(['{', '[']);
    if is_json && read_json(text, &mut documents) {
        return documents;
    }
    // YAML's own rule: `---` at the start of a line, then a blank or the end of the line, whatever surrounds it.
    let (mut number, mut start, mut offset) = (0, 0, 0);
    let mut pieces = Vec::new();
    for line in text.split_inclusive('\n') {
        if line.strip_prefix("---").is_some_and(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace)) {
            pieces.push(text.get(start..offset).unwrap_or_default());
            start = offset;
        }
        offset += line.len();
    }
    pieces.push(text.get(start..).unwrap_or_default());
    for piece in pieces {
        match serde_saphyr::from_str_with_options::<Option<Manifest>>(piece, yaml_options()) {
            Ok(None) => {}
            Ok(Some(manifest)) => {
                number += 1;
                take(manifest, number, &mut documents);
            }
            Err(error) => {
                number += 1;
                documents.broken.push(ManifestError {
                    document: number,
                    pod: name_of_broken(piece),
                    text: error.to_string(),
                });
            }
        }
    }
    documents
}

/// Reads JSON documents one after another. False when the text is not JSON from its first document on, in which case
/// it may still be YAML in flow style.
fn read_json(text: &str, documents: &mut Documents) -> bool {
    let mut number = 0;
    for manifest in serde_json::Deserializer::from_str(text).into_iter::<Manifest>() {
        number += 1;
        match manifest {
            Ok(manifest) => take(manifest, number, documents),
            Err(error) if error.is_syntax() && number == 1 => return false,
            Err(error) => {
                let pod = name_of_broken(text).filter(|_| number == 1);
                documents.broken.push(ManifestError { document: number, pod, text: error.to_string() });
                break;
            }
        }
    }
    true
}

fn yaml_options() -> serde_saphyr::Options {
    // Snippets would quote the document in the log. The budget is for lists of thousands of whole pods.
    serde_saphyr::options! {
        with_snippet: false,
        budget: serde_saphyr::budget! { max_events: 16_000_000, max_nodes: 8_000_000 },
    }
}

fn take(manifest: Manifest, document: usize, documents: &mut Documents) {
    match manifest.kind.as_deref() {
        Some("List" | "PodList") => {
            for item in manifest.items.unwrap_or_default() {
                // The items of a typed list have no kind of their own.
                if matches!(item.kind.as_deref(), None | Some("Pod")) {
                    take_pod(item, document, documents);
                } else {
                    foreign(&item, document, documents);
                }
            }
        }
        None | Some("Pod") => take_pod(manifest, document, documents),
        Some(_) => foreign(&manifest, document, documents),
    }
}

fn take_pod(manifest: Manifest, document: usize, documents: &mut Documents) {
    let named = manifest.metadata.as_ref().and_then(|metadata| metadata.name.as_deref()).unwrap_or_default();
    if named.is_empty() {
        let text = "metadata.name is missing".to_owned();
        documents.broken.push(ManifestError { document, pod: None, text });
    } else {
        documents.pods.push(manifest);
    }
}

fn foreign(manifest: &Manifest, document: usize, documents: &mut Documents) {
    let kind = manifest.kind.as_deref().unwrap_or_default();
    documents.foreign.push(format!("document {document} is of kind {kind:?}, not Pod; it is ignored"));
}

/// The pod's name in a document whose types are wrong, or else the first thing that looks like `name:` in it.
fn name_of_broken(piece: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        metadata: NameOnly,
    }
    #[derive(Deserialize)]
    struct NameOnly {
        name: String,
    }
    if let Ok(named) = serde_saphyr::from_str_with_options::<Named>(piece, yaml_options()) {
        return Some(named.metadata.name);
    }
    piece.match_indices("name").find_map(|(at, word)| {
        let opens = |c: char| c.is_whitespace() || "{,\"'".contains(c);
        if !piece.get(..at)?.chars().next_back().is_none_or(opens) {
            return None;
        }
        let rest = piece.get(at + word.len()..)?.trim_start_matches(['"', '\'']).strip_prefix(':')?;
        let value = rest.trim_start_matches([' ', '"', '\'']);
        let name: String =
            value.chars().take(253).take_while(|c| c.is_ascii_alphanumeric() || "-.".contains(*c)).collect();
        (!name.is_empty()).then_some(name)
    })
}

/// A pod as read: the spec, unless the pod is none of the gateway's business, and what is odd about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// `None`: no model name, or a Ray worker.
    pub spec: Option<PodSpec>,
    /// One sentence for each label or annotation that could not be used.
    pub problems: Vec<String>,
    /// One for each thing that is wrong with the configuration and that no other pod of this pass has told already.
    pub config_problems: Vec<String>,
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
        let alive: std::collections::HashSet<_> = specs.iter().map(|spec| (&spec.key, &spec.uid)).collect();
        self.last_good.retain(|(key, uid), _| alive.contains(&(key, uid)));
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
        let (Some(model), Some(name)) = (model, metadata.name.as_deref()) else { return Reading::default() };
        if label(RAY_NODE_TYPE) == Some("worker") {
            return Reading::default();
        }
        let namespace = metadata.namespace.as_deref().filter(non_empty).unwrap_or("default");
        let key = PodKey { namespace: Arc::from(namespace), name: Arc::from(name) };
        let uid: Arc<str> = match metadata.uid.as_deref().filter(non_empty) {
            Some(uid) => Arc::from(uid),
            None => Arc::from(key.to_string()),
        };
        let mut problems = Problems { pod: key.to_string(), list: Vec::new() };

        let port = problems.port(MODEL_PORT, label(MODEL_PORT), DEFAULT_PORT);
        let metric_port = problems.port(METRIC_PORT, label(METRIC_PORT), port);
        let bootstrap_port = problems.port(BOOTSTRAP_PORT, annotation(BOOTSTRAP_PORT), DEFAULT_BOOTSTRAP_PORT);
        let kv_connector = problems.kv_connector(label(KV_CONNECTOR));
        let role = Role::from_label(label(ROLE));
        let roleset: Option<Arc<str>> = label(ROLESET).filter(non_empty).map(Arc::from);
        if role != Role::Other && roleset.is_none() {
            problems.add(format_args!("label {ROLE} without label {ROLESET}: the pod takes no part in prefill/decode"));
        }
        let status = manifest.status.as_ref();
        let host = problems.host(status.and_then(|status| status.pod_ip.as_deref()));
        let mut config_problems = Vec::new();
        let config = self.config(annotation(MODEL_CONFIG), &key, &uid, &mut config_problems);
        let labels = raw_labels
            .iter()
            .filter_map(|(name, value)| Some((name.clone(), value.clone()?)))
            .collect::<BTreeMap<_, _>>();
        let spec = PodSpec {
            uid,
            restarts: status.map_or(0, Status::restarts),
            model: Arc::from(model.trim()),
            host,
            port,
            metric_port,
            engine: Engine::from_label(label(ENGINE).filter(non_empty).or_else(|| annotation(ENGINE))),
            kv_connector,
            bootstrap_port,
            role,
            roleset,
            replica_index: label(REPLICA_INDEX).map(Arc::from),
            serves_http: matches!(label(POD_GROUP_INDEX), None | Some("0")),
            ready: status.is_none_or(Status::ready),
            terminating: metadata.deletion_timestamp.is_some() || status.is_some_and(Status::finished),
            labels: Arc::new(labels),
            config,
            key,
        };
        Reading { spec: Some(spec), problems: problems.list, config_problems }
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

    fn restarts(&self) -> u32 {
        let containers = self.container_statuses.as_deref().unwrap_or_default();
        containers.iter().fold(0, |sum: u32, container| sum.saturating_add(container.restart_count))
    }
}

struct Problems {
    pod: String,
    list: Vec<String>,
}

impl Problems {
    fn add(&mut self, text: std::fmt::Arguments<'_>) {
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
