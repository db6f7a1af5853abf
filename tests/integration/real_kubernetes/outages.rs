//! Outages, through a proxy that makes them; links that are slow; kinds that do not change.

use std::time::Duration;

use http::Method;
use serde_json::json;

use super::{PATIENCE, Scene};
use crate::harness::eventually;
use crate::harness::fault_proxy::{Fault, Hole};
use crate::harness::tandem::Tandem;

const LISTS: &str = "tandem_kubernetes_lists_total";
const FAILURES: &str = "tandem_kubernetes_failures_total";
/// Longer than the longest wait between two tries, shorter than until the next bookmark.
const SOON_AFTER: Duration = Duration::from_secs(20);

fn lines(tandem: &Tandem) -> Vec<String> {
    let logs = tandem.process().stdout() + &tandem.process().stderr();
    // The client library warns of a kubeconfig that checks no certificate, at each handshake; that is not an outage's doing.
    let told = |line: &&str| {
        line.contains("discovery::kubernetes") || line.contains("kube_client") && !line.contains("cert bypassed")
    };
    logs.lines().filter(told).map(str::to_owned).collect()
}

/// Refused connections, then none: what happened meanwhile is in force soon after, nothing is left to note, and the log has a
/// line when it began and one when it was over.
#[tokio::test(flavor = "multi_thread")]
async fn an_outage_leaves_nothing_behind() {
    let Some(scene) = Scene::start("outage", &[]).await else { return };
    scene.pod("a", scene.labels()).await;
    scene.status("a", true).await;
    scene.routable("a pod", &["a"]).await;
    let before = lines(&scene.tandem).len();
    scene.api.proxy.set(Fault { refuses: true, ..Fault::default() });
    scene.api.proxy.reset_all();
    scene.notes_are("a note of each kind", |notes| notes.iter().any(|note| note.contains("pods"))).await;
    scene.status("a", false).await;
    scene.pod("b", scene.labels()).await;
    scene.status("b", true).await;
    scene.tandem.wait_metrics(PATIENCE, "tries", |page| page.sum(FAILURES, &[("resource", "pods")]) >= 8.0).await;
    assert!(scene.notes().await.iter().all(|note| note.contains("; serving on what was known ")
        || note.contains("httproutes")
        || note.contains("modeladapters")));
    scene.api.proxy.heal();
    assert!(scene.routable("what happened meanwhile", &["b"]).await < SOON_AFTER);
    assert!(scene.notes_are("nothing to note", <[String]>::is_empty).await < SOON_AFTER);
    let over = async || lines(&scene.tandem).iter().any(|line| line.contains("again, after")).then_some(());
    eventually(SOON_AFTER, "the line", over).await;
    let told = lines(&scene.tandem).split_off(before);
    assert_eq!(told.len(), 2, "{told:#?}");
    scene.close().await;
}

/// A peer that is gone without a word is one stall; a kind that does not change is none.
#[tokio::test(flavor = "multi_thread")]
async fn a_stall_is_told_from_quiet() {
    let Some(scene) = Scene::start("stall", &[("TANDEM_KUBERNETES_STALL_SECONDS", "8")]).await else { return };
    scene.pod("a", scene.labels()).await;
    scene.status("a", true).await;
    scene.routable("a pod", &["a"]).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    let page = scene.tandem.metrics().await;
    assert!(page.sum(LISTS, &[("reason", "stall")]) < 1.0, "nothing was wrong");
    assert!(page.sum(FAILURES, &[("reason", "stall")]) < 1.0);
    assert_eq!(scene.notes().await, [""; 0]);
    scene.api.proxy.set(Fault { hole: Hole::Swallows, ..Fault::default() });
    scene.status("a", false).await;
    let stalled =
        |page: &crate::harness::metrics::Metrics| page.sum(LISTS, &[("resource", "pods"), ("reason", "stall")]) >= 1.0;
    scene.tandem.wait_metrics(PATIENCE, "the stall", stalled).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    scene.api.proxy.heal();
    scene.routable("what happened meanwhile", &[]).await;
    let page = scene.tandem.metrics().await;
    assert!(page.sum(LISTS, &[("resource", "pods"), ("reason", "stall")]) < 2.0, "one stall");
    scene.close().await;
}

/// Three hundred pods of nine kilobytes through a link that takes longer than half a minute for them.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_link_brings_a_large_list() {
    let Some(scene) = Scene::start("slow", &[("TANDEM_KUBERNETES_RELIST_SECONDS", "20")]).await else { return };
    for number in 0..300 {
        let mut metadata = scene.labels();
        metadata["annotations"] = json!({"of-a-tool": "x".repeat(9_000)});
        scene.pod(&format!("p{number:03}"), metadata).await;
    }
    scene.api.proxy.set(Fault { rate: 60_000, ..Fault::default() });
    let whole = |page: &crate::harness::metrics::Metrics| {
        page.sum(LISTS, &[("resource", "pods"), ("reason", "periodic")]) >= 2.0
    };
    scene.tandem.wait_metrics(PATIENCE + PATIENCE, "a second list after a whole one", whole).await;
    assert_eq!(scene.notes().await, [""; 0]);
    scene.api.proxy.heal();
    scene.api.ask(Method::DELETE, &scene.api.core("pods"), &serde_json::Value::Null).await;
    scene.close().await;
}
