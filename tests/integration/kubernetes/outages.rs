//! What an outage of the API server leaves behind: in the words of readiness, and in the log.

use std::time::Duration;

use serde_json::json;
use tandem::knobs::KubernetesKnobs;
use tokio::time::Instant;

use super::{Scene, pod, quick};
use crate::harness::fault_proxy::{Fault, FaultProxy};
use crate::harness::kube_api::KubeApi;
use crate::harness::pods::PodManifest;
use crate::harness::processor::closed_port;
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::{SOON, eventually};

/// Longer than a list and the head of a watch take, shorter than until the next bookmark of a real API server.
const AT_ONCE: Duration = Duration::from_secs(5);

/// When all is well again, nothing is left to note, though nothing happens that a watch could tell.
#[tokio::test(flavor = "multi_thread")]
async fn r90_notes_go_when_the_outage_is_over() {
    let scene = Scene::with(&[pod("a", 1)], quick()).await;
    scene.api.bookmarks(None);
    for kind in ["pods", "modeladapters", "httproutes"] {
        scene.api.refuse("list", kind, None, 503);
        scene.api.refuse("watch", kind, None, 503);
        scene.api.end_watches(kind, false);
    }
    scene.says("three notes", |reasons, notes| reasons.is_empty() && notes.len() == 3).await;
    scene.api.allow_everything();
    let began = Instant::now();
    scene.says("nothing to note", |_, notes| notes.is_empty()).await;
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    assert_eq!(scene.api.count("list", "pods"), 1, "watches went on where they were");
}

/// Adapters that were listed once are in force, whatever the API server says now.
#[tokio::test(flavor = "multi_thread")]
async fn r90_adapters_in_force_are_not_said_to_be_done_without() {
    let api = KubeApi::start().await;
    api.put("pods", pod("a", 1).manifest());
    let adapter = json!({"metadata": {"namespace": "default", "name": "lora"}, "status": {"instances": ["a"]}});
    api.put("modeladapters", &adapter);
    let scene = Scene::start(api, KubernetesKnobs::default(), quick()).await;
    scene.shows("the adapter", |fleet| fleet.model("lora").is_some()).await;
    for verb in ["list", "watch"] {
        scene.api.refuse(verb, "modeladapters", None, 403);
    }
    scene.api.end_watches("modeladapters", true);
    scene
        .says("the note", |_, notes| {
            matches!(notes, [note] if note.contains("modeladapters") && note.contains("; serving on what was known "))
        })
        .await;
    assert!(scene.fleet().model("lora").is_some());
    // When the kind itself is gone, so is the adapter; what is forbidden after that is done without.
    scene.api.allow_everything();
    scene.api.installed("modeladapters", false);
    scene.shows("its end", |fleet| fleet.model("lora").is_none()).await;
    scene.api.refuse("list", "modeladapters", None, 403);
    scene
        .says("the note", |_, notes| matches!(notes, [note] if note.ends_with("; the gateway serves without them")))
        .await;
}

/// One line when the API server is lost, one when it is back, and none of the client library's own.
#[tokio::test(flavor = "multi_thread")]
async fn r90_an_outage_is_two_lines_in_the_log() {
    let api = KubeApi::start().await;
    api.put("pods", PodManifest::new("a", "m", closed_port()).ready(true).manifest());
    let proxy = FaultProxy::start(api.address()).await;
    let server = proxy.url().replace("redis://", "http://");
    let kubeconfig = api.kubeconfig_for("proxied", &server, crate::harness::kube_api::TOKEN);
    let args = vec!["--kubeconfig".to_owned(), kubeconfig.display().to_string()];
    let tandem = Tandem::start(TandemOptions { args, ..TandemOptions::default() }).await;
    tandem.wait_ready().await;
    eventually(SOON, "three watches", async || (api.open() == 3).then_some(())).await;
    let lines = |tandem: &Tandem| -> Vec<String> {
        let logs = tandem.process().logs();
        let told = |line: &&str| line.contains("discovery::kubernetes") || line.contains("kube_client");
        logs.lines().filter(told).map(str::to_owned).collect()
    };
    let before = lines(&tandem).len();
    proxy.set(Fault { refuses: true, ..Fault::default() });
    proxy.reset_all();
    let failures = "tandem_kubernetes_failures_total";
    let each = |least: f64| {
        move |metrics: &crate::harness::metrics::Metrics| {
            ["pods", "modeladapters", "httproutes"]
                .iter()
                .all(|kind| metrics.sum(failures, &[("resource", kind)]) >= least)
        }
    };
    tandem.wait_metrics(SOON, "failures of each kind", each(4.0)).await;
    proxy.heal();
    eventually(SOON, "three watches again", async || (api.open() == 3).then_some(())).await;
    let back = async || lines(&tandem).iter().any(|line| line.contains("serves this replica again")).then_some(());
    eventually(SOON, "the line", back).await;
    let told = lines(&tandem).split_off(before);
    let [lost, back] = &told[..] else { panic!("{told:#?}") };
    assert!(
        lost.contains("WARN") && lost.contains("does not serve this replica; what was known stays in force"),
        "{lost}"
    );
    assert!(back.contains("INFO") && back.contains("serves this replica again, after "), "{back}");
    assert_eq!(tandem.admin_json("/readyz").await["notes"], json!([]));
}
