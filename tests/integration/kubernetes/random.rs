//! Twenty thousand random events, with everything that happens to watches in between, against a model.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tandem::discovery::kubernetes::Pace;
use tandem::fleet::Snapshot;
use tandem::knobs::KubernetesKnobs;
use tandem::rng::Rng;

use super::{Scene, quick};
use crate::harness::kube_api::{KubeApi, Mood};

const EVENTS: usize = 20_000;
/// Events between two looks at the fleet.
const STRIDE: usize = 250;

/// A pod as the model has it.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    uid: u64,
    /// `None`: it names no model.
    model: Option<u8>,
    ip: Option<u8>,
    port: u16,
    ready: bool,
    deleting: bool,
    phase: &'static str,
    restarts: u32,
    in_annotation: bool,
}

/// What the fleet should say of it.
type Line = (String, String, String, u32, bool);

type Model = BTreeMap<(&'static str, String), Known>;

fn object((namespace, name): &(&str, String), pod: &Known) -> Value {
    let mut object = json!({
        "metadata": {
            "namespace": namespace, "name": name, "uid": pod.uid.to_string(),
            "labels": {"model.aibrix.ai/port": pod.port.to_string()}, "annotations": {},
        },
        "status": {
            "phase": pod.phase,
            "conditions": [{"type": "Ready", "status": if pod.ready { "True" } else { "False" }}],
            "containerStatuses": [{"name": "engine", "restartCount": pod.restarts}],
        },
    });
    if let Some(model) = pod.model {
        let place = if pod.in_annotation { "annotations" } else { "labels" };
        object["metadata"][place]["model.aibrix.ai/name"] = format!("model-{model}").into();
    }
    if let Some(ip) = pod.ip {
        object["status"]["podIP"] = format!("10.0.0.{ip}").into();
    }
    if pod.deleting {
        object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    }
    object
}

fn lines(model: &Model) -> Vec<Line> {
    let line = |((namespace, name), pod): (&(&str, String), &Known)| {
        let serves = format!("model-{}", pod.model?);
        let ip = pod.ip.map(|ip| format!("10.0.0.{ip}")).unwrap_or_default();
        let routable = pod.ip.is_some() && pod.ready && !pod.deleting && pod.phase == "Running";
        let uid = pod.uid.to_string();
        Some((format!("{namespace}/{name} {uid}"), serves, format!("{ip}:{}", pod.port), pod.restarts, routable))
    };
    model.iter().filter_map(line).collect()
}

fn shown(fleet: &Snapshot) -> Vec<Line> {
    let mut lines: Vec<Line> = fleet
        .pods()
        .map(|pod| {
            let spec = &pod.spec;
            let name = format!("{} {}", spec.key, spec.uid);
            (name, spec.model.to_string(), pod.address.to_string(), spec.restarts, spec.routable())
        })
        .collect();
    lines.sort();
    lines
}

/// One event, in the model and in the API.
fn happen(model: &mut Model, api: &KubeApi, dice: &mut Rng, uid: &mut u64) {
    let key = (["ns1", "ns2", "ns3"][dice.below(3)], format!("p{}", dice.below(25)));
    let Some(pod) = model.get_mut(&key) else {
        *uid += 1;
        let pod = Known {
            uid: *uid,
            model: (dice.below(8) > 0).then(|| dice.below(4) as u8),
            ip: (dice.below(3) > 0).then(|| dice.below(50) as u8),
            port: 8000,
            ready: dice.below(2) > 0,
            deleting: false,
            phase: "Running",
            restarts: 0,
            in_annotation: dice.below(4) == 0,
        };
        api.put("pods", &object(&key, &pod));
        model.insert(key, pod);
        return;
    };
    match dice.below(12) {
        0 | 1 => {
            model.remove(&key);
            return api.delete("pods", key.0, &key.1);
        }
        2 => {
            // Deleted and made anew: for a client that missed the deletion, the same name with another UID.
            api.delete("pods", key.0, &key.1);
            *uid += 1;
            (pod.uid, pod.restarts, pod.deleting) = (*uid, 0, false);
        }
        3 => pod.model = (dice.below(4) > 0).then(|| dice.below(4) as u8),
        4 | 5 => pod.ip = (dice.below(4) > 0).then(|| dice.below(50) as u8),
        6 | 7 => pod.ready = !pod.ready,
        8 => pod.port = 8000 + dice.below(5) as u16,
        9 => pod.restarts += 1,
        10 => pod.deleting = true,
        _ => pod.phase = ["Pending", "Running", "Running", "Failed", "Succeeded"][dice.below(5)],
    }
    // A pod that is pending has no address in this model's world, so that phases are told apart by one rule.
    if pod.phase == "Pending" {
        pod.phase = "Running";
        pod.ip = None;
    }
    api.put("pods", &object(&key, pod));
}

/// One thing that happens to watches. What is wrong stays wrong until the next look at the fleet.
fn trouble(api: &KubeApi, dice: &mut Rng) -> &'static str {
    match dice.below(10) {
        0 | 1 => {
            api.end_watches("pods", true);
            "410 in the middle"
        }
        2 => {
            api.mood("pods", Mood::Stalled);
            api.compact();
            "a stall, and a compaction"
        }
        3 => {
            api.mood("pods", Mood::Stalled);
            "a stall"
        }
        4 => {
            api.mood("pods", Mood::Closing);
            api.end_watches("pods", false);
            "watches that close"
        }
        5 => {
            api.mood("pods", Mood::Gone);
            api.end_watches("pods", false);
            "410 at the start"
        }
        6 => {
            api.pages(7, 1);
            api.mood("pods", Mood::GoneByEvent);
            api.end_watches("pods", false);
            "410 in watches and pages"
        }
        7 => {
            api.mood("pods", Mood::Failing(500));
            api.end_watches("pods", false);
            "500"
        }
        8 => {
            api.compact();
            "a compaction"
        }
        _ => {
            api.end_watches("pods", false);
            "an end"
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r44_r89_twenty_thousand_random_events_end_like_the_model() {
    let seed = std::env::var("TANDEM_TEST_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(20_000);
    println!("seed {seed} (TANDEM_TEST_SEED)");
    let mut dice = Rng::new(seed);
    let api = KubeApi::start().await;
    api.bookmarks(Some(Duration::from_millis(50)));
    let pace = Pace { stall: Duration::from_millis(400), relist: Duration::from_secs(5), ..quick() };
    let scene = Scene::start(api, KubernetesKnobs::default(), pace).await;
    let (mut model, mut uid, mut done) = (Model::new(), 0, 0);
    let mut happened: BTreeMap<&str, usize> = BTreeMap::new();
    let mut checks = 0;
    while done < EVENTS {
        let troubled = dice.below(STRIDE);
        for number in 0..STRIDE {
            if number == troubled {
                *happened.entry(trouble(&scene.api, &mut dice)).or_default() += 1;
            }
            happen(&mut model, &scene.api, &mut dice, &mut uid);
            if number % 50 == 49 {
                tokio::time::sleep(Duration::from_millis(dice.below(20) as u64)).await;
            }
        }
        done += STRIDE;
        let expected = lines(&model);
        if done.is_multiple_of(2 * STRIDE) || done >= EVENTS {
            // Silence and 410 are made good by lists, as long as they last. The others have to be over.
            if matches!(scene.api.mood_of("pods"), Mood::Closing | Mood::Failing(_)) {
                scene.api.mood("pods", Mood::Well);
            }
            let what = format!("the model after {done} events (seed {seed})");
            scene.shows(&what, |fleet| shown(fleet) == expected).await;
            checks += 1;
        }
        if dice.below(2) == 0 {
            scene.api.mood("pods", Mood::Well);
        }
    }
    println!("{done} events, {checks} checks, {happened:?}, {} snapshots", scene.fleet().version);
    println!("{} lists, {} watches", scene.api.count("list", "pods"), scene.api.count("watch", "pods"));
    assert_eq!(shown(&scene.fleet()), lines(&model), "seed {seed}");
    assert!(happened.len() >= 8, "{happened:?}");
    let lists = |reason| scene.metric("tandem_kubernetes_lists_total", &[("resource", "pods"), ("reason", reason)]);
    assert!(lists("gone") > 0.0 && lists("stall") > 0.0);
}
