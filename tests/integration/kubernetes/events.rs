//! Every kind of event, and how soon it shows.

use std::time::Duration;

use serde_json::{Value, json};
use tandem::discovery::kubernetes::Pace;
use tandem::fleet::{Signals, Snapshot};
use tandem::knobs::KubernetesKnobs;

use super::{Scene, each_within_a_second, found, pod, routable};
use crate::harness::kube_api::KubeApi;

type Step = (&'static str, fn(&KubeApi), fn(&Snapshot) -> bool);

fn patch(api: &KubeApi, name: &str, path: &[&str], value: Value) {
    api.patch("pods", "default", name, |pod| {
        let (last, way) = path.split_last().expect("a path");
        let at = way.iter().fold(pod, |at, key| &mut at[*key]);
        if value.is_null() {
            at.as_object_mut().expect("an object").remove(*last);
        } else {
            at[*last] = value;
        }
    });
}

fn has(fleet: &Snapshot, names: &[&str]) -> bool {
    routable(fleet) == names.iter().map(|name| format!("default/{name}")).collect::<Vec<_>>()
}

async fn play(steps: &[Step]) {
    each_within_a_second(async || {
        let scene = Scene::with(&[pod("a", 1), pod("b", 2)], Pace::default()).await;
        let mut took = Vec::new();
        for (what, change, shows) in steps {
            assert!(!shows(&scene.fleet()), "{what}: shows before");
            change(&scene.api);
            took.push((*what, scene.shows(what, shows).await));
        }
        assert_eq!(scene.api.count("list", "pods"), 1, "all of it came through one watch");
        took
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r44_pods_come_go_and_change_within_a_second() {
    play(&[
        ("a pod comes", |api| api.put("pods", pod("c", 3).manifest()), |fleet| has(fleet, &["a", "b", "c"])),
        ("a pod goes", |api| api.delete("pods", "default", "b"), |fleet| has(fleet, &["a", "c"])),
        (
            "the address changes",
            |api| patch(api, "a", &["status", "podIP"], "10.0.0.9".into()),
            |fleet| found(fleet, "default/a").is_some_and(|pod| &*pod.address == "10.0.0.9:8000"),
        ),
        (
            "the address is cleared",
            |api| patch(api, "a", &["status", "podIP"], Value::Null),
            |fleet| has(fleet, &["c"]),
        ),
        (
            "and comes back",
            |api| patch(api, "a", &["status", "podIP"], "10.0.0.1".into()),
            |fleet| has(fleet, &["a", "c"]),
        ),
        (
            "the model changes in place",
            |api| patch(api, "c", &["metadata", "labels", "model.aibrix.ai/name"], "other".into()),
            |fleet| has(fleet, &["a"]) && fleet.model("other").is_some_and(|model| model.routable.len() == 1),
        ),
        (
            "the label goes, and the pod with it",
            |api| patch(api, "c", &["metadata", "labels", "model.aibrix.ai/name"], Value::Null),
            |fleet| fleet.model("other").is_none() && found(fleet, "default/c").is_none(),
        ),
        (
            "the model is named by an annotation",
            |api| patch(api, "c", &["metadata", "annotations", "model.aibrix.ai/name"], "m".into()),
            |fleet| has(fleet, &["a", "c"]),
        ),
        (
            "the role changes in place",
            |api| patch(api, "c", &["metadata", "labels", "role-name"], "decode".into()),
            |fleet| found(fleet, "default/c").is_some_and(|pod| pod.spec.role == tandem::fleet::Role::Decode),
        ),
        (
            "the same name with another UID",
            |api| {
                api.delete("pods", "default", "c");
                api.put("pods", pod("c", 3).uid("another").manifest());
            },
            |fleet| found(fleet, "default/c").is_some_and(|pod| &*pod.spec.uid == "another"),
        ),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r46_pods_that_end_take_nothing_new_within_a_second() {
    play(&[
        (
            "a pod is told to end",
            |api| patch(api, "a", &["metadata", "deletionTimestamp"], "2026-01-01T00:00:00Z".into()),
            |fleet| has(fleet, &["b"]) && found(fleet, "default/a").is_some(),
        ),
        (
            "a pod is not ready",
            |api| patch(api, "b", &["status", "conditions"], json!([{"type": "Ready", "status": "False"}])),
            |fleet| has(fleet, &[]),
        ),
        (
            "a pod is ready again, as one condition of several",
            |api| {
                let conditions =
                    json!([{"type": "Initialized", "status": "False"}, {"type": "Ready", "status": "True"}]);
                patch(api, "b", &["status", "conditions"], conditions);
            },
            |fleet| has(fleet, &["b"]),
        ),
        ("a pod has failed", |api| patch(api, "b", &["status", "phase"], "Failed".into()), |fleet| has(fleet, &[])),
        ("a pod runs", |api| patch(api, "b", &["status", "phase"], "Running".into()), |fleet| has(fleet, &["b"])),
        ("a pod is done", |api| patch(api, "b", &["status", "phase"], "Succeeded".into()), |fleet| has(fleet, &[])),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r50_pods_of_one_name_in_two_namespaces_are_two() {
    each_within_a_second(async || {
        let both = [pod("p0", 1).namespace("ns1").uid("1"), pod("p0", 2).namespace("ns2").uid("2")];
        let scene = Scene::with(&both, Pace::default()).await;
        let states = |scene: &Scene| {
            ["ns1/p0", "ns2/p0"].map(|name| found(&scene.fleet(), name).map(|pod| std::sync::Arc::clone(&pod.state)))
        };
        let [one, two] = states(&scene).map(|state| state.expect("both are there"));
        assert!(one.slot != two.slot && !std::sync::Arc::ptr_eq(&one.load, &two.load), "ledgers of their own");
        scene.api.delete("pods", "ns2", "p0");
        let gone = scene.shows("one goes", |fleet| fleet.pods().count() == 1).await;
        assert_eq!(states(&scene)[0].as_ref().expect("the other stays").slot, one.slot);
        // Its address goes to a pod of another model.
        let heir = crate::harness::pods::PodManifest::new("p9", "other", ([10, 0, 0, 2], 8000).into()).ready(true);
        scene.api.put("pods", heir.manifest());
        let came = scene.shows("the heir", |fleet| fleet.model("other").is_some()).await;
        let fleet = scene.fleet();
        let heir = found(&fleet, "default/p9").expect("the heir");
        assert!(heir.state.slot != two.slot && !std::sync::Arc::ptr_eq(&heir.state.load, &two.load));
        assert_eq!(routable(&fleet), ["ns1/p0"]);
        vec![("one goes", gone), ("its address has an heir", came)]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r51_ports_and_configuration_change_within_a_second() {
    play(&[
        (
            "the port changes",
            |api| patch(api, "a", &["metadata", "labels", "model.aibrix.ai/port"], "9001".into()),
            |fleet| found(fleet, "default/a").is_some_and(|pod| &*pod.address == "10.0.0.1:9001"),
        ),
        (
            "the bootstrap port changes",
            |api| patch(api, "a", &["metadata", "annotations", "model.aibrix.ai/sglang-bootstrap-port"], "9002".into()),
            |fleet| found(fleet, "default/a").is_some_and(|pod| pod.spec.bootstrap_port == 9002),
        ),
        (
            "the configuration changes",
            |api| {
                let config = json!({"profiles": {"default": {"routingStrategy": "pd"}}}).to_string();
                patch(api, "a", &["metadata", "annotations", "model.aibrix.ai/config"], config.into());
            },
            |fleet| fleet.model("m").is_some_and(|model| model.config.is_some()),
        ),
    ])
    .await;
}

/// A container that restarted in place has an empty cache and no history, whatever its pod is called.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_in_place_is_another_incarnation_within_a_second() {
    each_within_a_second(async || {
        let scene = Scene::with(&[pod("a", 1), pod("b", 2)], Pace::default()).await;
        let fleet = scene.fleet();
        let before = std::sync::Arc::clone(&found(&fleet, "default/a").expect("a").state);
        before.signals.store(std::sync::Arc::new(Signals { at: Some(scene.clock.now()), ..Signals::unknown() }));
        let restarted = json!([{"name": "engine", "restartCount": 1}, {"name": "sidecar", "restartCount": 0}]);
        patch(&scene.api, "a", &["status", "containerStatuses"], restarted);
        let slot = before.slot;
        let took = scene
            .shows("the restart", |fleet| found(fleet, "default/a").is_some_and(|pod| pod.state.slot != slot))
            .await;
        let fleet = scene.fleet();
        let after = &found(&fleet, "default/a").expect("a").state;
        assert!(after.signals.load().at.is_none(), "no history");
        // What departs takes its prefix entries along.
        let departed = scene.departed.lock().expect("departed").clone();
        let departed: Vec<_> = departed.iter().map(|gone| (gone.slot, gone.name_gone)).collect();
        assert_eq!(departed, [(slot, false)]);
        vec![("a restart", took)]
    })
    .await;
}

/// With a selector the API server sends no more than it selects, and a pod that leaves it goes.
#[tokio::test(flavor = "multi_thread")]
async fn r44_a_pod_that_leaves_the_selector_goes() {
    each_within_a_second(async || {
        let api = KubeApi::start().await;
        for pod in [pod("a", 1).label("zone", "x"), pod("b", 2).label("zone", "y"), pod("c", 3).label("zone", "x")] {
            api.put("pods", pod.manifest());
        }
        let knobs = KubernetesKnobs {
            pod_selector: Some("model.aibrix.ai/name,zone=x".to_owned()),
            ..KubernetesKnobs::default()
        };
        let scene = Scene::start(api, knobs, Pace::default()).await;
        scene.shows("those of the selector", |fleet| has(fleet, &["a", "c"])).await;
        patch(&scene.api, "c", &["metadata", "labels", "zone"], "y".into());
        let left = scene.shows("one leaves", |fleet| has(fleet, &["a"])).await;
        patch(&scene.api, "b", &["metadata", "labels", "zone"], "x".into());
        let entered = scene.shows("one enters", |fleet| has(fleet, &["a", "b"])).await;
        assert!(scene.api.asked().iter().filter(|asked| asked.plural == "pods").all(|asked| {
            asked.query.get("labelSelector").is_some_and(|selector| selector == "model.aibrix.ai/name,zone=x")
        }));
        vec![("one leaves", left), ("one enters", entered)]
    })
    .await;
}

/// What the gateway does not read does not make it build anything, and is not kept.
#[tokio::test(flavor = "multi_thread")]
async fn changes_that_do_not_matter_build_nothing() {
    let scene = Scene::with(&[pod("a", 1)], Pace::default()).await;
    let version = scene.fleet().version;
    let noise = "x".repeat(100_000);
    for number in 0..20 {
        scene.api.patch("pods", "default", "a", |pod| {
            pod["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"] = noise.clone().into();
            pod["spec"]["containers"] = json!([{"env": [{"name": "SECRET", "value": number.to_string()}]}]);
            pod["status"]["conditions"][0]["lastProbeTime"] = number.into();
        });
    }
    scene.counts("tandem_kubernetes_events_total", &[("resource", "pods"), ("event", "changed")], 20.0).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(scene.fleet().version, version);
}
