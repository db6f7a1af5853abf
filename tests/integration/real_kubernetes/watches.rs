//! The life of pods and adapters, event by event.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use super::{PATIENCE, Scene};
use crate::harness::eventually;

/// An event is in force within milliseconds; the rest is for a busy machine.
const AT_ONCE: Duration = Duration::from_secs(5);
const ADAPTERS: &str = "/apis/model.aibrix.ai/v1alpha1";

#[tokio::test(flavor = "multi_thread")]
async fn every_event_of_a_pod_is_in_force_at_once() {
    let Some(scene) = Scene::start("pods", &[]).await else { return };
    let mut slowest = Duration::ZERO;
    let mut step = async |what: &str, names: &[&str]| {
        slowest = slowest.max(scene.routable(what, names).await);
    };
    scene.pod("a", scene.labels()).await;
    scene.status("a", true).await;
    step("ready", &["a"]).await;
    scene.status("a", false).await;
    step("not ready", &[]).await;
    scene.status("a", true).await;
    step("ready again", &["a"]).await;
    // Named by an annotation only.
    let annotated = json!({"annotations": {"model.aibrix.ai/name": scene.model()}});
    scene.pod("b", annotated).await;
    scene.status("b", true).await;
    step("another, by an annotation", &["a", "b"]).await;
    scene.patch("b", json!({"metadata": {"annotations": {"model.aibrix.ai/name": null}}})).await;
    step("without it", &["a"]).await;
    // One that is told to end stays for a while.
    scene.patch("a", json!({"metadata": {"finalizers": ["tandem.test/hold"]}})).await;
    scene.delete("a").await;
    step("terminating", &[]).await;
    scene.patch("a", json!({"metadata": {"finalizers": null}})).await;
    let gone = async || {
        let page = scene.tandem.admin_json("/debug/fleet").await;
        page["models"][scene.model()].is_null().then_some(())
    };
    eventually(PATIENCE, "its end", gone).await;
    assert!(slowest < AT_ONCE, "{slowest:?}");
    scene.close().await;
}

/// Where AIBrix's kinds are installed: an adapter is a model, until it is told to end.
#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_that_is_being_deleted_takes_no_new_requests() {
    let Some(scene) = Scene::start("adapters", &[]).await else { return };
    let (status, _) = scene.api.ask(Method::GET, ADAPTERS, &Value::Null).await;
    if status == 404 {
        println!("skipped: no modeladapters on this API server");
        return scene.close().await;
    }
    scene.pod("a", scene.labels()).await;
    scene.status("a", true).await;
    scene.routable("its pod", &["a"]).await;
    let name = format!("{}-lora", scene.model());
    let kind = format!("{ADAPTERS}/namespaces/{}/modeladapters", scene.api.namespace);
    let adapter = json!({
        "apiVersion": "model.aibrix.ai/v1alpha1", "kind": "ModelAdapter",
        "metadata": {"name": name, "finalizers": ["tandem.test/hold"]},
        "spec": {
            "artifactURL": "huggingface://organisation/adapter",
            "podSelector": {"matchLabels": {"model.aibrix.ai/name": scene.model()}},
        },
    });
    scene.api.must(Method::POST, &kind, &adapter).await;
    let one = format!("{kind}/{name}");
    let status = json!({"status": {"phase": "Running", "instances": ["a"]}});
    scene.api.must(Method::PATCH, &format!("{one}/status"), &status).await;
    let known = async |known: bool| {
        let probe = async || {
            let page = scene.tandem.admin_json("/debug/fleet").await;
            (page["models"][&name].is_object() == known).then_some(())
        };
        eventually(PATIENCE, "the adapter", probe).await;
    };
    known(true).await;
    scene.api.must(Method::DELETE, &one, &Value::Null).await;
    known(false).await;
    let still = scene.api.must(Method::GET, &one, &Value::Null).await;
    assert!(still["metadata"]["deletionTimestamp"].is_string(), "it is still there");
    scene.api.must(Method::PATCH, &one, &json!({"metadata": {"finalizers": null}})).await;
    scene.close().await;
}
