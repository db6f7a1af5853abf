//! Pods with an engine on each of several ports, and pods that drain.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Hold};

use super::{ask, chat, fleet_shows, pod_of, pods_of, routable, settle};
use crate::harness::engines::{MODEL, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::base;
use crate::harness::pods::PodManifest;
use crate::harness::redis::Redis;
use crate::harness::{SOON, eventually, within};

/// Two engines on neighbouring ports of one address.
async fn ranks() -> [Engine; 2] {
    let bind = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 7));
    for _ in 0..100 {
        let first = start_engine(EngineConfig { bind, ..EngineConfig::combined(MODEL) }).await;
        let Some(port) = Engine::address(&first).port().checked_add(1) else { continue };
        // Some other test may have the port: then another pair.
        if let Ok(second) = tandem_sim::start(EngineConfig { bind, port, ..EngineConfig::combined(MODEL) }).await {
            return [first, second];
        }
    }
    panic!("no two neighbouring ports");
}

fn pod(name: &str, first: &Engine, ranks: usize) -> PodManifest {
    let container = json!([
        {"name": "side", "ports": [{"containerPort": 9}]},
        {"name": "engine", "env": [{"name": "data-parallel-size", "value": ranks.to_string()}],
            "ports": [{"containerPort": Engine::address(first).port()}]},
    ]);
    PodManifest::new(name, MODEL, Engine::address(first)).set(&["spec", "containers"], container)
}

/// Restarts of the engine's container and of the other one.
fn restarted(pod: PodManifest, engine: u32, side: u32) -> PodManifest {
    let statuses = json!([{"name": "side", "restartCount": side}, {"name": "engine", "restartCount": engine}]);
    pod.set(&["status", "containerStatuses"], statuses)
}

fn running(page: &Value, name: &str, whose: &str) -> Option<u64> {
    pod_of(page, name)?[whose]["decodes_running"].as_u64()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_rank_of_a_pod_is_an_endpoint_with_a_load_of_its_own_at_every_replica() {
    let redis = Redis::start().await;
    let engines = ranks().await;
    let port = Engine::address(&engines[0]).port();
    let second = format!("default/dp/{}", port + 1);
    let env = vec![
        ("REDIS_HOST".to_owned(), redis.address().ip().to_string()),
        ("REDIS_PORT".to_owned(), redis.address().port().to_string()),
    ];
    let mut fleet =
        Fleet::start([restarted(pod("dp", &engines[0], 2), 0, 0)], FleetOptions { env, ..FleetOptions::default() })
            .await;
    routable(&fleet.tandems, &["dp", &format!("dp/{}", port + 1)]).await;
    fleet_shows(&fleet.tandems, "each rank to be scraped on its port", |page| {
        let of = |pod: &Value| (pod["metric_address"].clone(), pod["signals"]["fresh"] == true);
        let seen: BTreeMap<String, bool> = pods_of(page)
            .into_iter()
            .map(of)
            .map(|(at, fresh)| (at.as_str().unwrap_or_default().to_owned(), fresh))
            .collect();
        seen == engines.iter().map(|engine| (Engine::address(engine).to_string(), true)).collect()
    })
    .await;
    let [one, two] = &fleet.tandems[..] else { panic!("two replicas") };
    eventually(SOON, "the replicas to meet", async || {
        let page = two.admin_json("/debug/state").await;
        page["models"].as_object()?.values().next()?["members"].as_u64().filter(|members| *members == 2)
    })
    .await;

    // Four requests at the first replica: two on each rank. The second replica sees them where they are.
    let holds: Vec<Hold> = engines.iter().map(Engine::hold).collect();
    let front = base(one.front().expect("a front"));
    let mut requests = Vec::new();
    for count in 1..=4 {
        let call = ask(&front, chat(MODEL, "stay", 2, true)).header("routing-strategy", "least-request");
        requests.push(tokio::spawn(call.send()));
        eventually(SOON, "the request to be at an engine", async || {
            (holds.iter().map(Hold::waiting).sum::<usize>() == count).then_some(())
        })
        .await;
    }
    assert_eq!(holds.iter().map(Hold::waiting).collect::<Vec<_>>(), [2, 2], "balanced over the ranks");
    eventually(SOON, "the ledger to hold an entry for each rank", async || {
        let page = two.admin_json("/debug/fleet").await;
        let others = ["default/dp", &second].map(|name| running(&page, name, "others"));
        (others == [Some(2), Some(2)]).then_some(())
    })
    .await;
    // The restart of another container forgets nothing.
    let slots = |page: &Value| ["default/dp", &second].map(|name| pod_of(page, name).map(|pod| pod["slot"].clone()));
    let before = slots(&one.admin_json("/debug/fleet").await);
    fleet.pods.put([restarted(pod("dp", &engines[0], 2), 0, 3).annotation("seen", "1").label("round", "2")]);
    let filter = ("external-filter", "round=2");
    for hold in holds {
        hold.release();
    }
    for request in requests {
        let answer = within("the answer", request).await.expect("an answer");
        assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "dp"), "the name of the pod");
        let at = answer.header("target-pod-ip").to_owned();
        assert!(engines.iter().any(|engine| Engine::address(engine).to_string() == at), "{at}");
        assert!(answer.body().await.complete);
    }
    let path = fleet.envoy.as_ref().expect("Envoy").base();
    eventually(SOON, "the changed manifest to be in force", async || {
        let call = ask(&path, chat(MODEL, "hello", 2, false)).header("routing-strategy", "random");
        let answer = call.header(filter.0, filter.1).send().await;
        let served = answer.status == 200;
        answer.body().await;
        served.then_some(())
    })
    .await;
    assert_eq!(slots(&fleet.tandems[0].admin_json("/debug/fleet").await), before, "the same incarnations");

    // Sessions are of a rank: Envoy dials the very port, through whichever replica.
    engines.iter().for_each(Engine::clear_records);
    let session = |id: String| {
        let mut call = ask(&path, chat(MODEL, "hello", 2, false)).header("routing-strategy", "session-affinity");
        if !id.is_empty() {
            call = call.header("x-session-id", &id);
        }
        call.send()
    };
    let first = session(String::new()).await;
    let (id, at) = (first.header("x-session-id").to_owned(), first.header("target-pod-ip").to_owned());
    assert!(first.body().await.complete);
    for _ in 0..6 {
        let answer = session(id.clone()).await;
        assert_eq!(answer.header("target-pod-ip"), at);
        assert!(answer.body().await.complete);
    }
    let served = engines.iter().map(|engine| engine.records_for("/v1/chat/completions").len()).collect::<Vec<_>>();
    let expected = engines.iter().map(|engine| if Engine::address(engine).to_string() == at { 7 } else { 0 });
    assert_eq!(served, expected.collect::<Vec<_>>());

    // The engine's own restart is another incarnation.
    fleet.pods.change("dp", |pod| restarted(pod, 1, 3));
    fleet_shows(&fleet.tandems[..1], "new incarnations", |page| slots(page) != before).await;
    // One pod, whatever its ranks.
    let metrics = fleet.tandems[0].metrics().await;
    assert_eq!(metrics.sum("model_replicas", &[]), 1.0);
    settle(&fleet.tandems, &engines.iter().collect::<Vec<_>>()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_pod_ends_what_it_has_and_gets_nothing_new() {
    let engines =
        [start_engine(EngineConfig::combined(MODEL)).await, start_engine(EngineConfig::combined(MODEL)).await];
    let plain = |number: usize| PodManifest::new(&format!("c{number}"), MODEL, Engine::address(&engines[number]));
    let mut fleet = Fleet::start([plain(0)], FleetOptions::default()).await;
    for draining in [
        PodManifest::label as fn(PodManifest, &str, &str) -> PodManifest,
        PodManifest::annotation as fn(PodManifest, &str, &str) -> PodManifest,
    ] {
        fleet.pods.put([plain(0)]);
        routable(&fleet.tandems, if fleet.pods.has("c1") { &["c0", "c1"] } else { &["c0"] }).await;
        let path = fleet.envoy.as_ref().expect("Envoy").base();
        // A session of the pod that will drain, and a request that runs there.
        let session = |id: &str| {
            let call = ask(&path, chat(MODEL, "hello", 2, false)).header("routing-strategy", "session-affinity");
            call.header("x-session-id", id).send()
        };
        let mut id = String::new();
        while id.is_empty() {
            let answer = session("").await;
            if answer.header("target-pod") == "c0" {
                id = answer.header("x-session-id").to_owned();
            }
            assert!(answer.body().await.complete);
        }
        let hold = engines[0].hold();
        let call = ask(&path, chat(MODEL, "stay", 4, true)).header("routing-strategy", "session-affinity");
        let held = tokio::spawn(call.header("x-session-id", &id).send());
        within("the held request", hold.wait_for(1)).await;

        fleet.pods.put([draining(plain(0), "aibrix.ai/draining", "true"), plain(1)]);
        fleet_shows(&fleet.tandems, "the pod to drain", |page| {
            pod_of(page, "default/c0")
                .is_some_and(|pod| pod["draining"] == true && pod["ready"] == true && pod["routable"] == false)
                && pod_of(page, "default/c1").is_some()
        })
        .await;
        for path in fleet.paths() {
            for strategy in ["random", "least-request", "prefix-cache"] {
                let answer =
                    ask(&path, chat(MODEL, "hello", 2, false)).header("routing-strategy", strategy).send().await;
                assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "c1"), "{strategy}");
                assert!(answer.body().await.complete);
            }
        }
        let answer = session(&id).await;
        assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "c1"), "a session moves");
        assert!(answer.body().await.complete);
        let metrics = fleet.tandems[0].metrics().await.sum("tandem_pod_decode_running", &[("pod_name", "c0")])
            + fleet.tandems[1].metrics().await.sum("tandem_pod_decode_running", &[("pod_name", "c0")]);
        assert_eq!(metrics, 1.0, "what runs is still counted");
        hold.release();
        let answer = within("the held answer", held).await.expect("an answer");
        assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "c0"));
        assert!(answer.body().await.complete, "and ends");
    }
    settle(&fleet.tandems, &engines.iter().collect::<Vec<_>>()).await;
}
