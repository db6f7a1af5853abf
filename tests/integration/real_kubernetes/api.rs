//! The API server that the developer names, as the test sees it: with all rights, and past the proxy.

use std::net::SocketAddr;
use std::path::PathBuf;

use http::{Method, Request};
use http_body_util::BodyExt as _;
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::fault_proxy::FaultProxy;
use crate::harness::within;

/// Names a kubeconfig with all rights. Its API server gets namespaces, roles and pods that end with the test.
pub const VARIABLE: &str = "TANDEM_REAL_KUBECONFIG";

/// The API server, and a namespace on it that goes with this value.
pub struct RealApi {
    client: Client,
    cluster: Value,
    /// The namespace, which is also the suffix of everything that has none.
    pub namespace: String,
    /// The only way there that the product knows.
    pub proxy: FaultProxy,
    directory: TempDir,
}

/// What one request came to.
pub type Answer = (u16, Value);

impl RealApi {
    /// Connects; `None` when the developer names no API server, which is said.
    pub async fn start(purpose: &str) -> Option<RealApi> {
        let Ok(file) = std::env::var(VARIABLE) else {
            println!("skipped: needs an API server, set {VARIABLE}=FILE (docs/kubernetes.md)");
            return None;
        };
        let kubeconfig = Kubeconfig::read_from(&file).expect(VARIABLE);
        let cluster = cluster_of(&kubeconfig);
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.expect(VARIABLE);
        let host = config.cluster_url.host().expect("a host").to_owned();
        let port = config.cluster_url.port_u16().unwrap_or(443);
        let target: SocketAddr = within("the name of the API server", tokio::net::lookup_host((host, port)))
            .await
            .expect("resolve")
            .next()
            .expect("an address");
        let client = Client::try_from(config).expect("a client");
        let proxy = FaultProxy::start(target).await;
        let namespace = format!("tandem-test-{purpose}-{}", std::process::id());
        let directory = tempfile::tempdir().expect("a directory");
        let api = RealApi { client, cluster, namespace, proxy, directory };
        let made = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": api.namespace}});
        api.must(Method::POST, "/api/v1/namespaces", &made).await;
        Some(api)
    }

    /// One request, whatever comes of it.
    pub async fn ask(&self, method: Method, path: &str, body: &Value) -> Answer {
        let kind = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let bytes = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = Request::builder().method(method).uri(path).header("content-type", kind);
        let request = request.body(Body::from(bytes)).expect("a request");
        let answer = within(path, self.client.send(request)).await.unwrap_or_else(|error| panic!("{path}: {error}"));
        let status = answer.status().as_u16();
        let bytes = within(path, answer.into_body().collect()).await.expect("a body").to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
    }

    /// One request that has to succeed.
    pub async fn must(&self, method: Method, path: &str, body: &Value) -> Value {
        let (status, answer) = self.ask(method.clone(), path, body).await;
        assert!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        answer
    }

    /// Where the objects of a kind of the core group are, in the namespace.
    pub fn core(&self, plural: &str) -> String {
        format!("/api/v1/namespaces/{}/{plural}", self.namespace)
    }

    /// A kubeconfig by which the product comes in through the proxy, with the token in that file.
    pub fn kubeconfig(&self, token_file: &std::path::Path) -> PathBuf {
        let mut cluster = self.cluster.clone();
        let server: http::Uri = cluster["server"].as_str().expect("a server").parse().expect("a server");
        if cluster["tls-server-name"].is_null() {
            cluster["tls-server-name"] = server.host().expect("a host").into();
        }
        let scheme = server.scheme_str().unwrap_or("https");
        cluster["server"] = self.proxy.url().replace("redis", scheme).into();
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"tokenFile": token_file}}],
        });
        let path = self.directory.path().join("config");
        std::fs::write(&path, config.to_string()).expect("write a kubeconfig");
        path
    }

    /// A file beside the kubeconfig.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Takes the namespace away, and what was made beside it.
    pub async fn close(self, beside: &[String]) {
        for path in beside {
            self.ask(Method::DELETE, path, &Value::Null).await;
        }
        self.ask(Method::DELETE, &format!("/api/v1/namespaces/{}", self.namespace), &Value::Null).await;
    }
}

/// The cluster of the current context, with its certificates in it.
fn cluster_of(kubeconfig: &Kubeconfig) -> Value {
    let whole = serde_json::to_value(kubeconfig).expect("a kubeconfig");
    let named = |list: &str, name: &Value, field: &str| {
        let found = whole[list].as_array().into_iter().flatten().find(|entry| entry["name"] == *name);
        found.unwrap_or_else(|| panic!("no {name} among the {list}"))[field].clone()
    };
    let context = named("contexts", &whole["current-context"], "context");
    let mut cluster = named("clusters", &context["cluster"], "cluster");
    cluster.as_object_mut().expect("a cluster").retain(|_, value| !value.is_null());
    cluster
}
