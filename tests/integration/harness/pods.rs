//! Pod manifests for `--pods`, rewritten atomically.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::kube_api::KubeApi;

/// One pod.
#[derive(Clone, Debug)]
pub struct PodManifest {
    name: String,
    manifest: Value,
}

impl PodManifest {
    /// A ready pod of `model` behind `address`, with nothing else said about it.
    pub fn new(name: &str, model: &str, address: SocketAddr) -> PodManifest {
        let manifest = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": format!("uid-of-{name}"),
                "labels": {"model.aibrix.ai/name": model, "model.aibrix.ai/port": address.port().to_string()},
                "annotations": {},
            },
            "status": {"podIP": address.ip().to_string()},
        });
        PodManifest { name: name.to_owned(), manifest }
    }

    /// A LoRA adapter on these pods: not a pod, but it lives in the same files.
    pub fn adapter(name: &str, instances: &[&str]) -> PodManifest {
        let manifest = json!({
            "apiVersion": "model.aibrix.ai/v1alpha1",
            "kind": "ModelAdapter",
            "metadata": {"name": name, "namespace": "default"},
            "status": {"phase": "Running", "instances": instances},
        });
        PodManifest { name: name.to_owned(), manifest }
    }

    /// Where it serves, by what the manifest says.
    pub fn address(&self) -> SocketAddr {
        let ip = self.manifest["status"]["podIP"].as_str().expect("an address").parse().expect("an address");
        let port = &self.manifest["metadata"]["labels"]["model.aibrix.ai/port"];
        SocketAddr::new(ip, port.as_str().expect("a port").parse().expect("a port"))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes it the `role` (`prefill`, `decode`, …) of a roleset.
    #[must_use]
    pub fn role(self, roleset: &str, role: &str) -> PodManifest {
        self.label("roleset-name", roleset).label("role-name", role)
    }

    /// Sets the engine label.
    #[must_use]
    pub fn engine(self, engine: &str) -> PodManifest {
        self.label("model.aibrix.ai/engine", engine)
    }

    /// Sets a label.
    #[must_use]
    pub fn label(self, key: &str, value: &str) -> PodManifest {
        self.set(&["metadata", "labels", key], value.into())
    }

    /// Sets an annotation.
    #[must_use]
    pub fn annotation(self, key: &str, value: &str) -> PodManifest {
        self.set(&["metadata", "annotations", key], value.into())
    }

    /// Sets the annotation that holds the routing profiles.
    #[must_use]
    pub fn config(self, config: &Value) -> PodManifest {
        self.annotation("model.aibrix.ai/config", &config.to_string())
    }

    /// Sets the namespace.
    #[must_use]
    pub fn namespace(self, namespace: &str) -> PodManifest {
        self.set(&["metadata", "namespace"], namespace.into())
    }

    /// Sets the UID: another one is another incarnation.
    #[must_use]
    pub fn uid(self, uid: &str) -> PodManifest {
        self.set(&["metadata", "uid"], uid.into())
    }

    /// Sets the address: `""` for a pod without an IP.
    #[must_use]
    pub fn ip(self, ip: &str) -> PodManifest {
        self.set(&["status", "podIP"], ip.into())
    }

    /// Sets the condition Ready.
    #[must_use]
    pub fn ready(self, ready: bool) -> PodManifest {
        let status = if ready { "True" } else { "False" };
        self.set(&["status", "conditions"], json!([{"type": "Ready", "status": status}]))
    }

    /// Marks it as being deleted.
    #[must_use]
    pub fn terminating(self) -> PodManifest {
        self.set(&["metadata", "deletionTimestamp"], "2026-01-01T00:00:00Z".into())
    }

    /// Sets any field.
    #[must_use]
    pub fn set(mut self, path: &[&str], value: Value) -> PodManifest {
        let mut at = &mut self.manifest;
        for key in path {
            at = &mut at[*key];
        }
        *at = value;
        self
    }

    /// The manifest.
    pub fn manifest(&self) -> &Value {
        &self.manifest
    }
}

/// Where replicas find their pods: the `--pods` argument (one file with a List, or a directory with one file for each
/// pod), or the Kubernetes API.
#[derive(Debug)]
pub struct PodsFile {
    directory: TempDir,
    pods: BTreeMap<String, PodManifest>,
    one_file: bool,
    api: Option<Arc<KubeApi>>,
}

impl PodsFile {
    /// All pods in one file.
    pub fn file(pods: impl IntoIterator<Item = PodManifest>) -> PodsFile {
        PodsFile::new(pods, true, None)
    }

    /// One file for each pod.
    pub fn directory(pods: impl IntoIterator<Item = PodManifest>) -> PodsFile {
        PodsFile::new(pods, false, None)
    }

    /// All pods in the Kubernetes API.
    pub fn kubernetes(pods: impl IntoIterator<Item = PodManifest>, api: KubeApi) -> PodsFile {
        PodsFile::new(pods, true, Some(Arc::new(api)))
    }

    /// The API that holds them, if one does.
    pub fn api(&self) -> Option<&Arc<KubeApi>> {
        self.api.as_ref()
    }

    fn new(pods: impl IntoIterator<Item = PodManifest>, one_file: bool, api: Option<Arc<KubeApi>>) -> PodsFile {
        let directory = tempfile::Builder::new().prefix("pods-").tempdir().expect("temporary directory");
        std::fs::create_dir(directory.path().join("pods")).expect("pods directory");
        let pods = pods.into_iter().map(|pod| (pod.name.clone(), pod)).collect();
        let mut file = PodsFile { directory, pods, one_file, api };
        file.write();
        file
    }

    /// What to pass to `--pods`.
    pub fn path(&self) -> PathBuf {
        if self.one_file { self.directory.path().join("pods/pods.yaml") } else { self.directory.path().join("pods") }
    }

    /// Whether there is a pod of that name.
    pub fn has(&self, name: &str) -> bool {
        self.pods.contains_key(name)
    }

    /// Adds pods, or replaces those of the same name.
    pub fn put(&mut self, pods: impl IntoIterator<Item = PodManifest>) {
        self.pods.extend(pods.into_iter().map(|pod| (pod.name.clone(), pod)));
        self.write();
    }

    /// Changes a pod.
    pub fn change(&mut self, name: &str, change: impl FnOnce(PodManifest) -> PodManifest) {
        let pod = self.pods.get(name).cloned().unwrap_or_else(|| panic!("no pod {name}"));
        self.put([change(pod)]);
    }

    /// Removes a pod.
    pub fn remove(&mut self, name: &str) {
        assert!(self.pods.remove(name).is_some(), "no pod {name}");
        self.write();
    }

    /// Each file is written beside its place and renamed into it, so that a reader sees the old or the new one.
    fn write(&mut self) {
        if let Some(api) = &self.api {
            return self.tell(api);
        }
        let pods: Vec<&Value> = self.pods.values().map(PodManifest::manifest).collect();
        if self.one_file {
            let list = json!({"apiVersion": "v1", "kind": "List", "items": pods});
            return self.replace(&self.path(), &list);
        }
        for (name, pod) in &self.pods {
            self.replace(&self.path().join(format!("{name}.json")), pod.manifest());
        }
        for entry in std::fs::read_dir(self.path()).expect("read the pods directory") {
            let path = entry.expect("directory entry").path();
            let name = path.file_stem().expect("file name").to_string_lossy().into_owned();
            if !self.pods.contains_key(&name) {
                std::fs::remove_file(path).expect("remove a manifest");
            }
        }
    }

    /// Puts what differs into the API.
    fn tell(&self, api: &KubeApi) {
        let text = |object: &Value, field: &str| object["metadata"][field].as_str().expect("a text").to_owned();
        let plural = |object: &Value| if object["kind"] == "ModelAdapter" { "modeladapters" } else { "pods" };
        let name = |object: &Value| (plural(object), text(object, "namespace"), text(object, "name"));
        let all = ["pods", "modeladapters"].into_iter().flat_map(|plural| api.all(plural));
        let mut there: BTreeMap<_, Value> = all.map(|object| (name(&object), object)).collect();
        for pod in self.pods.values() {
            let name = name(&pod.manifest);
            let mut before = there.remove(&name);
            if let Some(metadata) = before.as_mut().and_then(|pod| pod["metadata"].as_object_mut()) {
                metadata.remove("resourceVersion");
            }
            if before.as_ref() != Some(&pod.manifest) {
                api.put(name.0, &pod.manifest);
            }
        }
        for (plural, namespace, name) in there.keys() {
            api.delete(plural, namespace, name);
        }
    }

    fn replace(&self, path: &Path, content: &Value) {
        let beside = self.directory.path().join("new");
        std::fs::write(&beside, serde_json::to_vec_pretty(content).expect("JSON")).expect("write a manifest");
        std::fs::rename(beside, path).expect("move a manifest");
    }
}
