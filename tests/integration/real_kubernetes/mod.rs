//! A real API server in the place of the stand-in: opt-in, because it has to come from somewhere. `docs/kubernetes.md` says how.
//!
//! Whatever `TANDEM_REAL_KUBECONFIG` names is used, with namespaces, roles and pods that end with each test. The product comes to it
//! through a proxy on loopback, as the ServiceAccount of `deploy/kubernetes`. Pods are never scheduled: the test plays the
//! kubelet and writes their status.

mod api;
mod manifests;
mod migration;
mod outages;
mod rights;
mod watches;

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use crate::harness::eventually;
use crate::harness::tandem::{Tandem, TandemOptions};
use api::RealApi;

/// A real API server has its own pace, and so have the caches of its authorizer.
const PATIENCE: Duration = Duration::from_mins(3);

/// The product, as the ServiceAccount of the manifests.
struct Scene {
    api: RealApi,
    tandem: Tandem,
    /// Paths of what has no namespace.
    beside: Vec<String>,
}

impl Scene {
    async fn start(purpose: &str, env: &[(&str, &str)]) -> Option<Scene> {
        let api = RealApi::start(purpose).await?;
        let beside = rights::grant(&api).await;
        rights::write_token(&api).await;
        let kubeconfig = api.kubeconfig(&api.file("token"));
        let args = vec!["--kubeconfig".to_owned(), kubeconfig.display().to_string()];
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let tandem = Tandem::start(TandemOptions { env, args, ..TandemOptions::default() }).await;
        eventually(PATIENCE, "ready", async || (tandem.readiness().await? == 200).then_some(())).await;
        Some(Scene { api, tandem, beside })
    }

    /// Makes a pod of the model, which nobody schedules.
    async fn pod(&self, name: &str, metadata: Value) {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata,
            "spec": {
                "schedulerName": "none", "automountServiceAccountToken": false,
                "containers": [{"name": "engine", "image": "engine"}],
            },
        });
        pod["metadata"]["name"] = name.into();
        // The ServiceAccount of a new namespace takes its controller a moment.
        let made = async || {
            let (status, answer) = self.api.ask(Method::POST, &self.api.core("pods"), &pod).await;
            assert!(status != 422, "{answer}");
            (status == 201).then_some(())
        };
        eventually(PATIENCE, name, made).await;
    }

    /// The metadata that makes it a pod of the model.
    fn labels(&self) -> Value {
        json!({"labels": {"model.aibrix.ai/name": self.model(), "model.aibrix.ai/port": "9"}})
    }

    /// A name that no other test has.
    fn model(&self) -> &str {
        &self.api.namespace
    }

    /// What a kubelet would say of it.
    async fn status(&self, name: &str, ready: bool) {
        let truth = if ready { "True" } else { "False" };
        let status = json!({"status": {
            "phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}],
            "conditions": [{"type": "Ready", "status": truth}],
        }});
        self.api.must(Method::PATCH, &format!("{}/{name}/status", self.api.core("pods")), &status).await;
    }

    async fn patch(&self, name: &str, change: Value) {
        self.api.must(Method::PATCH, &format!("{}/{name}", self.api.core("pods")), &change).await;
    }

    async fn delete(&self, name: &str) {
        self.api.must(Method::DELETE, &format!("{}/{name}", self.api.core("pods")), &Value::Null).await;
    }

    /// Names of the model's pods that are routable, once they are these.
    async fn routable(&self, what: &str, names: &[&str]) -> Duration {
        let began = std::time::Instant::now();
        let probe = async || {
            let page = self.tandem.admin_json("/debug/fleet").await;
            let pods = page["models"][self.model()]["pods"].as_array().cloned().unwrap_or_default();
            let mut found: Vec<String> = pods
                .iter()
                .filter(|pod| pod["routable"] == true)
                .filter_map(|pod| Some(pod["name"].as_str()?.rsplit('/').next()?.to_owned()))
                .collect();
            found.sort();
            (found == names).then_some(())
        };
        eventually(PATIENCE, what, probe).await;
        println!("{what}: {:?}", began.elapsed());
        began.elapsed()
    }

    /// What `/readyz` notes.
    async fn notes(&self) -> Vec<String> {
        let page = self.tandem.admin_json("/readyz").await;
        page["notes"].as_array().into_iter().flatten().filter_map(|note| Some(note.as_str()?.to_owned())).collect()
    }

    /// Waits for notes like this.
    async fn notes_are(&self, what: &str, condition: impl Fn(&[String]) -> bool) -> Duration {
        let began = std::time::Instant::now();
        eventually(PATIENCE, what, async || condition(&self.notes().await).then_some(())).await;
        println!("{what}: {:?}", began.elapsed());
        began.elapsed()
    }

    async fn close(self) {
        assert_eq!(self.tandem.negative_gauges(), [""; 0]);
        self.api.close(&self.beside).await;
    }
}
