//! Watches that end, expire, or say nothing.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use serde_json::json;
use tandem::discovery::kubernetes::{Pace, RouteObject};
use tandem::knobs::KubernetesKnobs;

use super::{Scene, each_within_a_second, found, pod, quick, routable};
use crate::harness::kube_api::{KubeApi, Mood};
use crate::harness::{SOON, Task, eventually};

const LISTS: &str = "tandem_kubernetes_lists_total";
const FAILURES: &str = "tandem_kubernetes_failures_total";

/// A pod vanishes while the watch does not look, and the versions from then on are gone.
#[tokio::test(flavor = "multi_thread")]
async fn r89_410_in_the_middle_of_a_watch_is_a_new_list_within_a_second() {
    each_within_a_second(async || {
        let scene = Scene::with(&[pod("a", 1), pod("b", 2)], Pace::default()).await;
        scene.api.mood("pods", Mood::Stalled);
        scene.api.delete("pods", "default", "b");
        scene.api.put("pods", pod("c", 3).manifest());
        scene.api.compact();
        scene.api.mood("pods", Mood::Well);
        let took = scene.shows("the new list", |fleet| routable(fleet) == ["default/a", "default/c"]).await;
        assert!(scene.metric(LISTS, &[("resource", "pods"), ("reason", "gone")]) >= 1.0);
        assert!(scene.metric(FAILURES, &[("resource", "pods"), ("verb", "watch"), ("reason", "gone")]) >= 1.0);
        assert_eq!(scene.cluster.words().notes, [""; 0], "410 is nothing to tell anybody");
        scene.api.end_watches("pods", true);
        scene.api.delete("pods", "default", "c");
        let again = scene.shows("once more", |fleet| routable(fleet) == ["default/a"]).await;
        vec![("410 after a compaction", took), ("410 out of the blue", again)]
    })
    .await;
}

/// The version of every list is too old at once: each time a list is taken, but not without end.
#[tokio::test(flavor = "multi_thread")]
async fn r89_410_at_the_start_of_every_watch_is_answered_by_lists_that_keep_their_distance() {
    for mood in [Mood::Gone, Mood::GoneByEvent] {
        let api = KubeApi::start().await;
        api.put("pods", pod("a", 1).manifest());
        api.mood("pods", mood);
        let scene = Scene::start(api, KubernetesKnobs::default(), Pace::default()).await;
        scene.shows("the list", |fleet| routable(fleet) == ["default/a"]).await;
        scene.counts(LISTS, &[("resource", "pods"), ("reason", "gone")], 3.0).await;
        // What happens in between arrives by the lists.
        scene.api.put("pods", pod("b", 2).manifest());
        scene.shows("the next list", |fleet| routable(fleet) == ["default/a", "default/b"]).await;
        let began = tokio::time::Instant::now();
        let before = scene.api.count("list", "pods");
        tokio::time::sleep(Duration::from_secs(3)).await;
        // The waits double from 0.2 s on; half of each is chance.
        let (lists, took) = (scene.api.count("list", "pods") - before, began.elapsed());
        assert!(lists as f64 <= took.as_secs_f64() / 0.7 + 1.0, "{mood:?}: {lists} lists in {took:?}");
        scene.api.mood("pods", Mood::Well);
        scene.api.delete("pods", "default", "a");
        scene.shows("the watch", |fleet| routable(fleet) == ["default/b"]).await;
    }
}

/// 200 and an end, again and again: the same version is asked for, ever more rarely, and nothing is lost.
#[tokio::test(flavor = "multi_thread")]
async fn r89_watches_that_close_at_once_are_not_opened_in_a_loop() {
    let api = KubeApi::start().await;
    api.put("pods", pod("a", 1).manifest());
    api.mood("pods", Mood::Closing);
    let scene = Scene::start(api, KubernetesKnobs::default(), Pace::default()).await;
    scene.shows("the list", |fleet| routable(fleet) == ["default/a"]).await;
    scene.api.delete("pods", "default", "a");
    scene.api.put("pods", pod("b", 2).manifest());
    tokio::time::sleep(Duration::from_secs(3)).await;
    let watches: Vec<_> =
        scene.api.asked().into_iter().filter(|asked| asked.verb == "watch" && asked.plural == "pods").collect();
    assert!((2..=7).contains(&watches.len()), "{} watches in about 3 s", watches.len());
    assert!(watches.iter().all(|asked| asked.query["resourceVersion"] == watches[0].query["resourceVersion"]));
    assert_eq!(routable(&scene.fleet()), ["default/a"], "what was known stays");
    scene.says("the note", |_, notes| notes.iter().any(|note| note.contains("ends as soon as it is open"))).await;
    scene.api.mood("pods", Mood::Well);
    scene.shows("the watch", |fleet| routable(fleet) == ["default/b"]).await;
    assert_eq!(scene.api.count("list", "pods"), 1, "the watch went on where the list ended");
    scene.says("nothing to note", |_, notes| notes.is_empty()).await;
}

/// A watch that is open but dead, with a deletion inside. Ten minutes of silence, as two seconds.
#[tokio::test(flavor = "multi_thread")]
async fn r89_a_silent_watch_is_given_up_and_the_list_read_again() {
    let pace = Pace { stall: Duration::from_secs(2), ..Pace::default() };
    let scene = Scene::with(&[pod("a", 1), pod("b", 2)], pace).await;
    // Bookmarks are no silence, though nothing happens.
    scene.api.bookmarks(Some(Duration::from_millis(100)));
    scene.counts("tandem_kubernetes_events_total", &[("resource", "pods"), ("event", "bookmark")], 30.0).await;
    assert_eq!(scene.api.count("list", "pods"), 1);
    scene.api.mood("pods", Mood::Stalled);
    scene.api.delete("pods", "default", "b");
    let took = scene.shows("the deletion", |fleet| routable(fleet) == ["default/a"]).await;
    assert!(took >= Duration::from_millis(1500), "it came with the end of the silence: {took:?}");
    assert!(scene.metric(LISTS, &[("resource", "pods"), ("reason", "stall")]) >= 1.0);
    // And as long as it lasts, again.
    scene.api.delete("pods", "default", "a");
    scene.shows("the next deletion", |fleet| routable(fleet).is_empty()).await;
    assert_eq!(scene.cluster.words().reasons, [""; 0], "it serves on what it knows");
}

/// How long the API server has said nothing shows in a gauge.
#[tokio::test(flavor = "multi_thread")]
async fn r89_silence_is_measured() {
    let scene = Scene::with(&[pod("a", 1)], Pace::default()).await;
    let silence = |scene: &Scene| scene.metric("tandem_kubernetes_silence_seconds", &[("resource", "pods")]);
    scene.api.mood("pods", Mood::Stalled);
    eventually(SOON, "silence grows", async || (silence(&scene) > 1.5).then_some(())).await;
    assert_eq!(scene.metric("tandem_kubernetes_objects", &[("resource", "pods")]), 1.0);
    scene.api.mood("pods", Mood::Well);
    scene.api.put("pods", pod("b", 2).manifest());
    scene.shows("the word", |fleet| fleet.pods().count() == 2).await;
    assert!(silence(&scene) < 1.5);
}

/// A safety net under watches that lose events: the list is read again after a while.
#[tokio::test(flavor = "multi_thread")]
async fn r89_the_list_is_read_again_from_time_to_time() {
    let pace = Pace { relist: Duration::from_secs(1), ..quick() };
    let scene = Scene::with(&[pod("a", 1)], pace).await;
    let version = scene.fleet().version;
    scene.counts(LISTS, &[("resource", "pods"), ("reason", "periodic")], 2.0).await;
    assert_eq!(scene.fleet().version, version, "lists that say nothing new build nothing");
}

/// Pages that expire in the middle of a list: it begins again, and what is in force is never a part of it.
#[tokio::test(flavor = "multi_thread")]
async fn r89_half_a_list_is_never_in_force() {
    let api = KubeApi::start().await;
    for number in 0..10 {
        api.put("pods", pod(&format!("p{number}"), number).manifest());
    }
    api.pages(3, 2);
    let scene = Scene::start(api, KubernetesKnobs::default(), quick()).await;
    let seen: Arc<Mutex<Vec<usize>>> = Arc::default();
    let (builder, record) = (Arc::clone(&scene.builder), Arc::clone(&seen));
    let _watch = Task::spawn(async move {
        let mut versions = builder.subscribe();
        while versions.changed().await.is_ok() {
            record.lock().expect("seen").push(builder.fleet().load().pods().count());
        }
    });
    scene.shows("all pods", |fleet| fleet.pods().count() == 10).await;
    assert_eq!(scene.metric(FAILURES, &[("resource", "pods"), ("verb", "list"), ("reason", "gone")]), 2.0);
    for round in 0..5u8 {
        scene.api.pages(3, 2);
        scene.api.mood("pods", Mood::Stalled);
        let name = format!("p{round}");
        scene.api.put("pods", pod(&name, 100 + round).manifest());
        scene.api.compact();
        scene.api.mood("pods", Mood::Well);
        let address = format!("10.0.0.{}:8000", 100 + round);
        let there = |fleet: &_| found(fleet, &format!("default/{name}")).is_some_and(|pod| *pod.address == *address);
        scene.shows("the change", there).await;
    }
    assert!(seen.lock().expect("seen").iter().all(|count| *count == 10), "{seen:?}");
}

/// The version that a bookmark tells is the one to resume from, although nothing has happened to pods.
#[tokio::test(flavor = "multi_thread")]
async fn bookmarks_move_the_version_on() {
    let scene = Scene::with(&[pod("a", 1)], quick()).await;
    scene.api.bookmarks(Some(Duration::from_millis(20)));
    for number in 0..50 {
        let route = json!({"metadata": {"namespace": "elsewhere", "name": format!("r{number}")}});
        scene.api.put("httproutes", &route);
    }
    // Bookmarks that were sent after that tell its version.
    let bookmarks = [("resource", "pods"), ("event", "bookmark")];
    let before = scene.metric("tandem_kubernetes_events_total", &bookmarks);
    scene.counts("tandem_kubernetes_events_total", &bookmarks, before + 3.0).await;
    scene.api.compact();
    scene.api.end_watches("pods", false);
    scene.api.put("pods", pod("b", 2).manifest());
    scene.shows("the next watch", |fleet| fleet.pods().count() == 2).await;
    assert_eq!(scene.api.count("list", "pods"), 1, "no 410: the watch resumed from the bookmark");
}

/// Statuses that pass, on lists and on watches.
#[tokio::test(flavor = "multi_thread")]
async fn errors_of_the_api_server_are_waited_out() {
    for status in [429, 500, 503, 504] {
        let scene = Scene::with(&[pod("a", 1)], quick()).await;
        scene.api.mood("pods", Mood::Failing(status));
        scene.api.refuse("list", "pods", None, status);
        scene.api.end_watches("pods", false);
        scene.counts(FAILURES, &[("resource", "pods"), ("verb", "watch")], 3.0).await;
        scene
            .says("the note", |reasons, notes| {
                let told =
                    |note: &String| note.contains(&status.to_string()) && note.contains("serving on what was known");
                reasons.is_empty() && notes.iter().any(told)
            })
            .await;
        assert_eq!(routable(&scene.fleet()), ["default/a"]);
        scene.api.allow_everything();
        scene.api.mood("pods", Mood::Well);
        scene.api.put("pods", pod("b", 2).manifest());
        scene.shows("afterwards", |fleet| fleet.pods().count() == 2).await;
        scene.says("nothing to note", |_, notes| notes.is_empty()).await;
    }
}

/// Adapters and routes come the same way.
#[tokio::test(flavor = "multi_thread")]
async fn adapters_and_routes_are_watched_too() {
    let api = KubeApi::start().await;
    let adapter = json!({
        "metadata": {"namespace": "default", "name": "lora-1", "uid": "1"},
        "spec": {"artifactURL": "s3://bucket/with?a=secret"},
        "status": {"phase": "Running", "instances": ["a", "b"]},
    });
    api.put("modeladapters", &adapter);
    let scene = Scene::start(api, KubernetesKnobs::default(), Pace::default()).await;
    let adapters = async |what: &str, names: &[&str]| {
        let known = || {
            let all = scene.cluster.adapters.available()?;
            let said: Vec<String> = all.iter().flat_map(|adapter| adapter.instances.clone()).collect();
            (said == names).then_some(())
        };
        eventually(SOON, what, async || known()).await;
    };
    adapters("the adapter", &["a", "b"]).await;
    scene.api.patch("modeladapters", "default", "lora-1", |adapter| adapter["status"]["instances"] = json!(["c"]));
    adapters("its change", &["c"]).await;
    // Being deleted: its controller still unloads it, and it takes no new requests.
    scene.api.patch("modeladapters", "default", "lora-1", |adapter| {
        adapter["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    });
    adapters("its last moments", &[]).await;
    scene.api.put("modeladapters", &adapter);
    adapters("another one", &["a", "b"]).await;
    scene.api.delete("modeladapters", "default", "lora-1");
    adapters("its end", &[]).await;

    let condition = |kind: &str| json!({"type": kind, "status": "True", "reason": "x", "lastTransitionTime": "y"});
    for namespace in ["aibrix-system", "elsewhere"] {
        let route = json!({
            "metadata": {"namespace": namespace, "name": "m-router"},
            "status": {"parents": [{"controllerName": "c", "conditions": [condition("Accepted"), condition("ResolvedRefs")]}]},
        });
        scene.api.put("httproutes", &route);
    }
    let checked = |model: &str| scene.builder.fleet().routes().check(model).is_ok();
    let routes = || -> Option<Vec<Arc<RouteObject>>> { scene.cluster.routes.all().filter(|all| !all.is_empty()) };
    let routes = eventually(SOON, "the route", async || routes()).await;
    assert_eq!(routes.len(), 1, "those of one namespace");
    assert_eq!((&*routes[0].namespace, &*routes[0].name), ("aibrix-system", "m-router"));
    let conditions: Vec<_> = routes[0].parents[0].conditions.iter().map(|c| (&*c.kind, &*c.status)).collect();
    assert_eq!(conditions, [("Accepted", "True"), ("ResolvedRefs", "True")]);
    eventually(SOON, "the table of routes", async || (checked("m") && !checked("other")).then_some(())).await;
}
