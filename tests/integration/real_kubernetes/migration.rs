//! The steps of `deploy/README.md` from AIBrix's plugin to Tandem and back, as they are written there, against installations
//! like those that AIBrix's kustomization and its chart make: names, selectors and targets as there.
//!
//! It takes an API server with the controllers of Deployments and EndpointSlices, the kinds of Envoy Gateway and of the
//! Prometheus operator, no node (the test is the kubelet) and no namespace of AIBrix; and kubectl.

use std::process::Stdio;
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use super::PATIENCE;
use super::api::{RealApi, VARIABLE};
use crate::deploy::text;
use crate::harness::{Task, eventually, within_time};

const SPACE: &str = "aibrix-system";
const POLICIES: &str = "/apis/gateway.envoyproxy.io/v1alpha1/namespaces/aibrix-system";
const ROUTES: &str = "/apis/gateway.networking.k8s.io/v1/namespaces/aibrix-system/httproutes";
const NODE: &str = "tandem-test-node";

/// An installation: by which labels the plugin's service finds its pods, and what only one of them sets.
struct Installed {
    name: &'static str,
    selector: Value,
    client: Value,
    filter: Value,
}

fn installations() -> [Installed; 2] {
    [
        Installed {
            name: "kustomization",
            selector: json!({"app": "gateway-plugins"}),
            client: json!({"connection": {"bufferLimit": 4_194_304}}),
            filter: json!({"messageTimeout": "60s"}),
        },
        Installed {
            name: "chart",
            selector: json!({
                "app.kubernetes.io/name": "aibrix", "app.kubernetes.io/instance": "aibrix",
                "app.kubernetes.io/component": "aibrix-gateway-plugin",
            }),
            client: json!({
                "connection": {"bufferLimit": 4_194_304, "connectionLimit": {"value": 1024}},
                "http2": {"maxConcurrentStreams": 1024},
            }),
            filter: json!({"messageTimeout": "60s", "failOpen": false}),
        },
    ]
}

impl Installed {
    /// Paths and objects, as far as the steps touch them or depend on them.
    fn objects(&self) -> Vec<(String, Value)> {
        let gateway = json!({"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "aibrix-eg"});
        let route =
            json!({"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": "aibrix-reserved-router"});
        let backend = json!([{"name": "aibrix-gateway-plugins", "port": 50052}]);
        let mut filter = self.filter.clone();
        filter["backendRefs"] = backend.clone();
        filter["processingMode"] = json!({"request": {"body": "Buffered"}, "response": {"body": "Streamed"}});
        let mut client = self.client.clone();
        client["targetRefs"] = json!([gateway]);
        let named = |name: &str| json!({"name": name, "namespace": SPACE});
        let patch = json!({
            "type": "type.googleapis.com/envoy.config.cluster.v3.Cluster", "name": "a-cluster",
            "operation": {"op": "add", "path": "", "value": {"name": "original_destination_cluster"}},
        });
        let matches = json!([{"path": {"type": "PathPrefix", "value": "/v1/chat/completions"}}]);
        let envoy = "gateway.envoyproxy.io/v1alpha1";
        let containers = json!([{"name": "gateway-plugin", "image": "plugin"}]);
        vec![
            (
                format!("/api/v1/namespaces/{SPACE}/services"),
                json!({"apiVersion": "v1", "kind": "Service", "metadata": named("aibrix-gateway-plugins"),
                    "spec": {"selector": self.selector, "ports": [{"name": "gateway", "port": 50052}]}}),
            ),
            (
                format!("/apis/apps/v1/namespaces/{SPACE}/deployments"),
                json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": named("aibrix-gateway-plugins"),
                    "spec": {"replicas": 1, "selector": {"matchLabels": self.selector}, "template": {
                        "metadata": {"labels": self.selector},
                        "spec": {"automountServiceAccountToken": false, "containers": containers}}}}),
            ),
            (
                ROUTES.to_owned(),
                json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
                    "metadata": named("aibrix-reserved-router"),
                    "spec": {"parentRefs": [{"name": "aibrix-eg"}], "rules": [{"matches": matches, "backendRefs": backend}]}}),
            ),
            (
                format!("{POLICIES}/envoyextensionpolicies"),
                json!({"apiVersion": envoy, "kind": "EnvoyExtensionPolicy",
                    "metadata": named("aibrix-gateway-plugins-extension-policy"),
                    "spec": {"targetRef": route, "extProc": [filter]}}),
            ),
            (
                format!("{POLICIES}/envoypatchpolicies"),
                json!({"apiVersion": envoy, "kind": "EnvoyPatchPolicy", "metadata": named("aibrix-epp"),
                    "spec": {"type": "JSONPatch", "targetRef": gateway, "jsonPatches": [patch]}}),
            ),
            (
                format!("{POLICIES}/clienttrafficpolicies"),
                json!({"apiVersion": envoy, "kind": "ClientTrafficPolicy",
                    "metadata": named("aibrix-client-connection-buffersize"), "spec": client}),
            ),
        ]
    }
}

/// The commands of the section, block by block.
fn steps() -> Vec<String> {
    let readme = text("deploy/README.md");
    let section = readme.split("## In the place of AIBrix's gateway plugin").nth(1).expect("the section");
    let section = section.split("\n## ").next().expect("its end");
    let blocks = section.split("```sh\n").skip(1).map(|rest| rest.split("```").next().expect("an end"));
    let plain = |block: &str| block.lines().map(str::trim_start).collect::<Vec<_>>().join("\n");
    let steps: Vec<String> = blocks.map(plain).collect();
    assert_eq!(steps.len(), 5, "keep, start, switch, stop, back: {steps:#?}");
    steps
}

async fn run(step: &str, directory: &std::path::Path) {
    let mut command = tokio::process::Command::new("bash");
    command.args(["-euo", "pipefail", "-c", step]).current_dir(directory).kill_on_drop(true);
    command.env("KUBECONFIG", std::env::var(VARIABLE).expect(VARIABLE)).stdin(Stdio::null());
    let output = within_time(PATIENCE, step, command.output()).await.expect("bash");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{step}\n{said}");
    assert!(!said.contains("unknown field"), "{step}\n{said}");
}

/// One round of what a kubelet and a scheduler do: pods get a node and are ready, pods that are told to end are gone.
async fn play_kubelet(api: &RealApi, count: &mut u8) {
    let pods = format!("/api/v1/namespaces/{SPACE}/pods");
    let (_, list) = api.ask(Method::GET, &pods, &Value::Null).await;
    for pod in list["items"].as_array().into_iter().flatten() {
        let name = pod["metadata"]["name"].as_str().expect("a name");
        if pod["metadata"]["deletionTimestamp"].is_string() {
            api.ask(Method::DELETE, &format!("{pods}/{name}?gracePeriodSeconds=0"), &Value::Null).await;
        } else if pod["status"]["podIP"].is_null() {
            *count += 1;
            let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
                "target": {"apiVersion": "v1", "kind": "Node", "name": NODE}});
            api.ask(Method::POST, &format!("{pods}/{name}/binding"), &binding).await;
            let ip = format!("10.1.0.{count}");
            let status = json!({"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
                "conditions": [{"type": "Ready", "status": "True"}]}});
            api.ask(Method::PATCH, &format!("{pods}/{name}/status"), &status).await;
        }
    }
}

/// Ready endpoints of the service that the policy names now, and of the one behind the route; what is wrong, if anything.
async fn look(api: &RealApi) -> Vec<String> {
    let policy = format!("{POLICIES}/envoyextensionpolicies/aibrix-gateway-plugins-extension-policy");
    let (_, policy) = api.ask(Method::GET, &policy, &Value::Null).await;
    let (_, route) = api.ask(Method::GET, &format!("{ROUTES}/aibrix-reserved-router"), &Value::Null).await;
    let slices = format!("/apis/discovery.k8s.io/v1/namespaces/{SPACE}/endpointslices");
    let (_, slices) = api.ask(Method::GET, &slices, &Value::Null).await;
    let mut wrong = Vec::new();
    if policy["spec"]["targetRef"].is_null() == policy["spec"]["targetRefs"].is_null() {
        wrong.push(format!("the policy hangs on {}", policy["spec"]));
    }
    let named =
        [&policy["spec"]["extProc"][0]["backendRefs"][0]["name"], &route["spec"]["rules"][0]["backendRefs"][0]["name"]];
    for service in named {
        let of = slices["items"].as_array().into_iter().flatten();
        let of = of.filter(|slice| slice["metadata"]["labels"]["kubernetes.io/service-name"] == *service);
        let ready = of
            .flat_map(|slice| slice["endpoints"].as_array().cloned().unwrap_or_default())
            .filter(|endpoint| endpoint["conditions"]["ready"] == true)
            .count();
        if ready == 0 {
            wrong.push(format!("{service} has no endpoints"));
        }
    }
    wrong
}

async fn specs(api: &RealApi, installed: &Installed) -> Vec<Value> {
    let mut specs = Vec::new();
    for (path, object) in installed.objects() {
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        let found = api.must(Method::GET, &format!("{path}/{name}"), &Value::Null).await;
        specs.push(json!([name, found["spec"], found["metadata"]["labels"]]));
    }
    specs
}

/// What this API server lacks for it.
async fn lacks(api: &RealApi) -> Option<&'static str> {
    let (status, _) = api.ask(Method::GET, &format!("/api/v1/namespaces/{SPACE}"), &Value::Null).await;
    let (_, nodes) = api.ask(Method::GET, "/api/v1/nodes", &Value::Null).await;
    let (envoy, _) = api.ask(Method::GET, &format!("{POLICIES}/envoypatchpolicies"), &Value::Null).await;
    let (monitors, _) = api.ask(Method::GET, "/apis/monitoring.coreos.com/v1/servicemonitors", &Value::Null).await;
    let ours = |node: &Value| node["metadata"]["name"] == NODE;
    match () {
        () if status != 404 => Some("a namespace that may be taken: aibrix-system exists"),
        () if !nodes["items"].as_array().into_iter().flatten().all(ours) => Some("a cluster without nodes"),
        () if envoy != 200 || monitors != 200 => Some("the kinds of Envoy Gateway and the Prometheus operator"),
        () if std::process::Command::new("kubectl").arg("version").arg("--client").output().is_err() => Some("kubectl"),
        () => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_steps_from_aibrix_to_tandem_and_back_leave_no_moment_without_endpoints() {
    let Some(api) = RealApi::start("migration").await else { return };
    if let Some(lack) = lacks(&api).await {
        println!("skipped: it needs {lack}");
        return api.close(&[]).await;
    }
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}});
    api.ask(Method::POST, "/api/v1/nodes", &node).await;
    let api = std::sync::Arc::new(api);
    for installed in installations() {
        let space = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}});
        api.must(Method::POST, "/api/v1/namespaces", &space).await;
        let plays = std::sync::Arc::clone(&api);
        let kubelet = Task::spawn(async move {
            let mut count = 0;
            loop {
                play_kubelet(&plays, &mut count).await;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
        for (path, object) in installed.objects() {
            api.must(Method::POST, &path, &object).await;
        }
        eventually(PATIENCE, "the plugin serves", async || look(&api).await.is_empty().then_some(())).await;
        walk(&api, &installed).await;
        api.must(Method::DELETE, &format!("/api/v1/namespaces/{SPACE}"), &Value::Null).await;
        let gone = async || {
            let path = format!("/api/v1/namespaces/{SPACE}");
            (api.ask(Method::GET, &path, &Value::Null).await.0 == 404).then_some(())
        };
        eventually(PATIENCE, "the namespace goes", gone).await;
        drop(kubelet);
    }
    let beside = ["/api/v1/nodes/".to_owned() + NODE, format!("/api/v1/namespaces/{}", api.namespace)];
    for path in beside {
        api.ask(Method::DELETE, &path, &Value::Null).await;
    }
}

/// There and back, looked at all the time.
async fn walk(api: &std::sync::Arc<RealApi>, installed: &Installed) {
    let before = specs(api, installed).await;
    let (looks, wrong): (std::sync::Arc<std::sync::Mutex<usize>>, std::sync::Arc<std::sync::Mutex<Vec<String>>>) =
        Default::default();
    let (counts, found, watched) =
        (std::sync::Arc::clone(&looks), std::sync::Arc::clone(&wrong), std::sync::Arc::clone(api));
    let watcher = Task::spawn(async move {
        loop {
            let seen = look(&watched).await;
            *counts.lock().expect("looks") += 1;
            found.lock().expect("wrong").extend(seen);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let directory = tempfile::tempdir().expect("a directory");
    let deploy = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    std::os::unix::fs::symlink(deploy, directory.path().join("deploy")).expect("a link");
    for (number, step) in steps().iter().enumerate() {
        run(step, directory.path()).await;
        if number == 2 {
            let policy = format!("{POLICIES}/envoyextensionpolicies/aibrix-gateway-plugins-extension-policy");
            let policy = api.must(Method::GET, &policy, &Value::Null).await;
            assert_eq!(policy["spec"]["extProc"][0]["backendRefs"][0]["name"], "tandem-gateway");
        }
        println!("{}: step {} is done", installed.name, number + 1);
    }
    drop(watcher);
    let (looks, wrong) = (*looks.lock().expect("looks"), wrong.lock().expect("wrong").clone());
    println!("{}: {looks} looks", installed.name);
    assert!(wrong.is_empty(), "{}: {wrong:#?}", installed.name);
    assert!(looks >= 10, "{looks}");
    assert_eq!(before, specs(api, installed).await, "{}: all is as it was", installed.name);
    let left = "app.kubernetes.io/part-of=tandem";
    for kind in ["/api/v1", "/apis/apps/v1", "/apis/policy/v1", "/apis/networking.k8s.io/v1"] {
        for plural in ["services", "deployments", "replicasets", "poddisruptionbudgets", "networkpolicies"] {
            let path = format!("{kind}/namespaces/{SPACE}/{plural}?labelSelector={left}");
            let none = async || {
                let (status, list) = api.ask(Method::GET, &path, &Value::Null).await;
                (status == 404 || list["items"].as_array().is_some_and(Vec::is_empty)).then_some(())
            };
            eventually(PATIENCE, &path, none).await;
        }
    }
}
