//! The very roles and ServiceAccount of the manifests: enough for all that is watched; and what happens when they go.

use http::Method;
use serde_json::{Value, json};

use super::api::RealApi;
use super::{PATIENCE, Scene};
use crate::harness::eventually;

const ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
const ACCOUNT: &str = "tandem-gateway";

fn manifest(name: &str) -> Value {
    let path = format!("{}/deploy/kubernetes/base/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    serde_saphyr::from_str(&std::fs::read_to_string(&path).expect(&path)).expect(&path)
}

async fn make_account(api: &RealApi) {
    let mut account = manifest("service-account");
    account["metadata"]["namespace"] = (*api.namespace).into();
    assert_eq!(account["metadata"]["name"], ACCOUNT);
    api.must(Method::POST, &api.core("serviceaccounts"), &account).await;
}

async fn bind(api: &RealApi) {
    let mut binding = manifest("cluster-role-binding");
    binding["metadata"]["name"] = (*api.namespace).into();
    binding["roleRef"]["name"] = (*api.namespace).into();
    binding["subjects"][0]["namespace"] = (*api.namespace).into();
    api.must(Method::POST, BINDINGS, &binding).await;
}

/// Makes the account and its rights. Returns what has to be taken away.
pub async fn grant(api: &RealApi) -> Vec<String> {
    make_account(api).await;
    let mut role = manifest("cluster-role");
    role["metadata"]["name"] = (*api.namespace).into();
    api.must(Method::POST, ROLES, &role).await;
    bind(api).await;
    [ROLES, BINDINGS].map(|kind| format!("{kind}/{}", api.namespace)).into()
}

/// Writes a fresh token of the account into the file of the kubeconfig.
pub async fn write_token(api: &RealApi) {
    let wanted = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600},
    });
    let path = format!("{}/{ACCOUNT}/token", api.core("serviceaccounts"));
    let token = api.must(Method::POST, &path, &wanted).await;
    let token = token["status"]["token"].as_str().expect("a token");
    std::fs::write(api.file("token"), token).expect("write a token");
}

/// Rights that go are noted and what is known stays; when they are back, so is everything, and the notes are gone.
#[tokio::test(flavor = "multi_thread")]
async fn rights_may_go_and_come_back() {
    let Some(scene) = Scene::start("rights", &[]).await else { return };
    let failures = "tandem_kubernetes_failures_total";
    let forbidden = scene.tandem.metrics().await.sum(failures, &[("reason", "forbidden")]);
    assert!(forbidden < 1.0, "the roles of the manifests are enough");
    assert_eq!(scene.notes().await, [""; 0]);
    scene.pod("a", scene.labels()).await;
    scene.status("a", true).await;
    scene.routable("a pod", &["a"]).await;
    scene.api.must(Method::DELETE, &format!("{BINDINGS}/{}", scene.api.namespace), &Value::Null).await;
    // What is open stays open: the authorizer is asked when a watch begins.
    let refused = async || {
        scene.api.proxy.reset_all();
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        scene.notes().await.iter().any(|note| note.contains("403 Forbidden")).then_some(())
    };
    eventually(PATIENCE, "refusals", refused).await;
    let noted = |notes: &[String]| notes.iter().any(|note| note.contains("; serving on what was known "));
    scene.notes_are("the note of pods", noted).await;
    assert!(scene.notes().await.iter().all(|note| !note.contains("without them")), "they are in force");
    scene.routable("what was known", &["a"]).await;
    bind(&scene.api).await;
    scene.notes_are("nothing to note", <[String]>::is_empty).await;
    scene.pod("b", scene.labels()).await;
    scene.status("b", true).await;
    scene.routable("another pod", &["a", "b"]).await;
    scene.close().await;
}

/// A token that is no longer good (its account is gone), and a new one in the same file.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_is_revoked_is_replaced_by_the_next_one_in_the_file() {
    let Some(scene) = Scene::start("token", &[]).await else { return };
    scene.pod("a", scene.labels()).await;
    scene.status("a", true).await;
    scene.routable("a pod", &["a"]).await;
    let account = format!("{}/{ACCOUNT}", scene.api.core("serviceaccounts"));
    scene.api.must(Method::DELETE, &account, &Value::Null).await;
    let refused = async || {
        scene.api.proxy.reset_all();
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        scene.notes().await.iter().any(|note| note.contains("401 Unauthorized")).then_some(())
    };
    eventually(PATIENCE, "the refusal", refused).await;
    scene.routable("what was known", &["a"]).await;
    make_account(&scene.api).await;
    write_token(&scene.api).await;
    scene.notes_are("nothing to note", <[String]>::is_empty).await;
    scene.status("a", false).await;
    scene.routable("the next event", &[]).await;
    scene.close().await;
}
