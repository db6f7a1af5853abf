//! What is a sign of life and what is not: kinds that do not change, pages that come slowly, refusals that pass.

use std::time::Duration;

use serde_json::json;
use tandem::discovery::kubernetes::Pace;
use tandem::knobs::KubernetesKnobs;
use tokio::time::Instant;

use super::{Scene, pod, quick, routable};
use crate::harness::drip::Drip;
use crate::harness::kube_api::{KubeApi, Mood};
use crate::harness::{SOON, eventually};

const LISTS: &str = "tandem_kubernetes_lists_total";
const FAILURES: &str = "tandem_kubernetes_failures_total";

/// What takes longer waits for something that has nothing to do with it, such as the next bookmark.
const AT_ONCE: Duration = Duration::from_secs(5);

/// A real API server says nothing of a kind that does not change, and sends no bookmarks either; but it ends watches when it
/// was asked to.
#[tokio::test(flavor = "multi_thread")]
async fn r89_a_kind_that_does_not_change_is_not_stalled() {
    let api = KubeApi::start().await;
    api.bookmarks(None);
    api.put("pods", pod("a", 1).manifest());
    let pace = Pace { stall: Duration::from_secs(2), ..Pace::default() };
    let scene = Scene::start(api, KubernetesKnobs::default(), pace).await;
    eventually(SOON, "the sixth watch", async || (scene.api.count("watch", "pods") >= 6).then_some(())).await;
    assert_eq!(scene.api.count("list", "pods"), 1, "nothing was wrong");
    assert_eq!(scene.metric(FAILURES, &[("resource", "pods")]), 0.0);
    assert_eq!(scene.metric(LISTS, &[("resource", "pods"), ("reason", "stall")]), 0.0);
    assert_eq!(scene.cluster.words().notes, [""; 0]);
    // What happens then is heard of, whichever watch it falls into.
    scene.api.put("pods", pod("b", 2).manifest());
    let took = scene.shows("an event", |fleet| routable(fleet).len() == 2).await;
    assert!(took < AT_ONCE, "{took:?}");
}

/// One stall is one stall, however many lists it takes until one is complete.
#[tokio::test(flavor = "multi_thread")]
async fn r89_a_stall_is_counted_once() {
    let pace = Pace { stall: Duration::from_secs(1), ..quick() };
    let scene = Scene::with(&[pod("a", 1)], pace).await;
    let stalls = |scene: &Scene| scene.metric(LISTS, &[("resource", "pods"), ("reason", "stall")]);
    assert_eq!(stalls(&scene), 0.0);
    scene.api.refuse("list", "pods", None, 503);
    scene.api.mood("pods", Mood::Stalled);
    scene.counts(FAILURES, &[("resource", "pods"), ("verb", "list"), ("reason", "refused")], 4.0).await;
    assert_eq!(stalls(&scene), 1.0);
    assert!(scene.metric(LISTS, &[("resource", "pods"), ("reason", "failed")]) >= 3.0, "further tries");
    assert_eq!(scene.metric(FAILURES, &[("resource", "pods"), ("verb", "watch"), ("reason", "stall")]), 1.0);
}

/// Three hundred pods of nine kilobytes through a link that carries them, but not within the time of one page; and through an
/// API server that breaks off what takes too long.
#[tokio::test(flavor = "multi_thread")]
async fn r89_a_slow_link_brings_a_large_list_in_smaller_pages() {
    for cut in [None, Some(Duration::from_secs(2))] {
        let api = KubeApi::start().await;
        for number in 0..300u16 {
            let [high, low] = number.to_be_bytes();
            let name = format!("p{number:03}");
            let mut pod = pod(&name, low).set(&["status", "podIP"], json!(format!("10.0.{high}.{low}")));
            pod = pod.set(&["metadata", "annotations", "of-a-tool"], "x".repeat(9_000).into());
            api.put("pods", pod.manifest());
        }
        api.drip(Some(Drip { rate: 1_200_000, cut }));
        let pace = Pace { answer: Duration::from_millis(500), page: Duration::from_secs(2), ..quick() };
        let pace = if cut.is_some() { Pace { page: SOON, ..pace } } else { pace };
        let scene = Scene::start(api, KubernetesKnobs::default(), pace).await;
        let took = scene.shows("all pods", |fleet| fleet.pods().count() == 300).await;
        println!("cut {cut:?}: 300 pods after {took:?}");
        let asked = scene.api.asked();
        let limits: Vec<&str> = asked
            .iter()
            .filter(|asked| asked.verb == "list" && asked.plural == "pods")
            .map(|asked| &*asked.query["limit"])
            .collect();
        assert_eq!(limits[..2], ["500", "125"], "{limits:?}");
        let late = if cut.is_some() { "unreachable" } else { "late" };
        let failed = scene.metric(FAILURES, &[("resource", "pods"), ("verb", "list"), ("reason", late)]);
        assert!(failed >= 1.0, "{cut:?}");
        // It goes on where it was: the list began once.
        assert_eq!(scene.metric(LISTS, &[("resource", "pods")]), 1.0);
    }
}

/// Refusals that an API server gives in its first moments, on top of an outage, do not keep adapters away for a minute.
#[tokio::test(flavor = "multi_thread")]
async fn r90_forbidden_for_a_moment_is_asked_for_again_soon() {
    let api = KubeApi::start().await;
    api.put(
        "modeladapters",
        &json!({"metadata": {"namespace": "default", "name": "lora"}, "status": {"instances": ["a"]}}),
    );
    api.refuse("list", "modeladapters", None, 503);
    let pace = Pace { absent: Duration::from_mins(1), ..quick() };
    let scene = Scene::start(api, KubernetesKnobs::default(), pace).await;
    let asked = |scene: &Scene| scene.api.count("list", "modeladapters");
    eventually(SOON, "an outage", async || (asked(&scene) >= 10).then_some(())).await;
    scene.api.allow_everything();
    scene.api.refuse("list", "modeladapters", None, 403);
    let before = asked(&scene);
    eventually(SOON, "refusals", async || (asked(&scene) >= before + 3).then_some(())).await;
    scene.api.allow_everything();
    let began = Instant::now();
    let known = || scene.cluster.adapters.available().is_some_and(|all| all.len() == 1);
    eventually(SOON, "the adapter", async || known().then_some(())).await;
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
}

/// What stays forbidden is asked for ever more rarely.
#[tokio::test(flavor = "multi_thread")]
async fn r90_what_stays_forbidden_is_asked_for_rarely() {
    let api = KubeApi::start().await;
    api.put("pods", pod("a", 1).manifest());
    api.refuse("list", "httproutes", None, 403);
    let pace = Pace { absent: Duration::from_secs(1), ..quick() };
    let scene = Scene::start(api, KubernetesKnobs::default(), pace).await;
    let asked = |scene: &Scene| scene.api.count("list", "httproutes");
    tokio::time::sleep(Duration::from_secs(3)).await;
    let (before, began) = (asked(&scene), Instant::now());
    tokio::time::sleep(Duration::from_secs(3)).await;
    // From then on at least half a second each.
    let most = began.elapsed().as_secs_f64() / 0.5 + 1.0;
    let more = asked(&scene) - before;
    assert!((1.0..=most).contains(&(more as f64)), "{more}");
}
