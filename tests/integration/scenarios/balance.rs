//! Bursts over idle pods: a selection and its charge are one step.

use std::sync::Arc;

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Hold};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::{Pair, ask, chat, fleet_shows, pod_of, pods_of, settle_pairs};
use crate::harness::engines::MODEL;
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::Answer;
use crate::harness::metrics::Metrics;
use crate::harness::{SOON, eventually, within};

const PAIRS: usize = 8;

/// Both policies, chosen by the header `config-profile`.
fn profiles() -> Value {
    let least = json!({"prefillScorePolicy": "least_request", "decodeScorePolicy": "least_request"});
    json!({"profiles": {
        "default": {"routingStrategy": "pd"},
        "least": {"routingStrategy": "pd", "routingConfig": least},
    }})
}

async fn start_pairs() -> Vec<Pair> {
    let mut pairs = Vec::new();
    for number in 0..PAIRS {
        pairs.push(Pair::start(number, MODEL, |config: EngineConfig| config).await);
    }
    pairs
}

/// One replica: what several know of each other's picks is another matter.
fn one_replica() -> FleetOptions {
    FleetOptions { replicas: 1, ..FleetOptions::default() }
}

/// Sends all bodies at once.
fn burst(path: &str, profile: &str, bodies: Vec<String>) -> JoinSet<Answer> {
    let barrier = Arc::new(Barrier::new(bodies.len()));
    let mut requests = JoinSet::new();
    for body in bodies {
        let (call, barrier) = (ask(path, body).header("config-profile", profile), Arc::clone(&barrier));
        requests.spawn(async move {
            barrier.wait().await;
            call.send().await
        });
    }
    requests
}

/// Waits until `count` prefill legs are held, and says how many are held where.
async fn held(holds: &[Hold], count: usize) -> Vec<usize> {
    let look = || holds.iter().map(Hold::waiting).collect::<Vec<_>>();
    let probe = async || (look().iter().sum::<usize>() >= count).then_some(());
    eventually(SOON, &format!("{count} prefill legs are held"), probe).await;
    look()
}

/// Whoever was scraped sees nobody generating, and no pod has a past.
fn idle(page: &Value) -> bool {
    pods_of(page).into_iter().all(|pod| {
        let (signals, load) = (&pod["signals"], &pod["in_flight"]);
        signals["fresh"] == true
            && signals["generation_tps"] == 0.0
            && (signals["drain_rate"].is_null() || signals["drain_rate"] == 0.0)
            && ["prefills", "decodes_pending", "decodes_running"].iter().all(|count| load[*count] == 0)
    })
}

/// 64 requests at a barrier over 8 idle pairs whose prefill legs are held end 8 on each, three times over, through
/// Envoy and the front, by `least_request` and by the default policies.
#[tokio::test(flavor = "multi_thread")]
async fn r60_a_burst_spreads_evenly_over_idle_pairs() {
    let pairs = start_pairs().await;
    let mut fleet = Fleet::start(pairs.iter().flat_map(|pair| pair.pods(&profiles())), one_replica()).await;
    let mut round = 0;
    for path in fleet.paths() {
        for profile in ["least", "default", "least", "default", "least", "default"] {
            // Another UID is another incarnation: no throughput, no drain rate, no cached prefix is left from before.
            round += 1;
            let uid = |name: &str| format!("{name} in round {round}");
            fleet.pods.put(pairs.iter().flat_map(|pair| pair.pods(&profiles())).map(|pod| {
                let uid = uid(pod.name());
                pod.uid(&uid)
            }));
            fleet_shows(&fleet.tandems, "new, idle pods", |page| {
                let fresh = |pod: &&Pair| {
                    let names = [format!("p{}", pod.number), format!("d{}", pod.number)];
                    names
                        .iter()
                        .all(|name| pod_of(page, &format!("default/{name}")).is_some_and(|pod| pod["uid"] == uid(name)))
                };
                pairs.iter().filter(fresh).count() == PAIRS && idle(page)
            })
            .await;
            pairs.iter().flat_map(Pair::engines).for_each(Engine::clear_records);

            let holds: Vec<Hold> = pairs.iter().map(|pair| pair.prefill.hold()).collect();
            let bodies = (0..64).map(|n| chat(MODEL, &format!("{n}: round {round}"), 4, false)).collect();
            let mut requests = burst(&path, profile, bodies);
            let placed = held(&holds, 64).await;
            assert_eq!(placed, [8; PAIRS], "prefill legs, {profile} through {path}");
            let page = fleet.tandems[0].admin_json("/debug/fleet").await;
            for pair in &pairs {
                let pod = pod_of(&page, &format!("default/d{}", pair.number)).expect("a decode pod");
                assert_eq!(pod["in_flight"]["decodes_pending"], 8, "{pod}");
            }
            holds.into_iter().for_each(Hold::release);
            while let Some(answer) = within("answers", requests.join_next()).await {
                let answer = answer.expect("an answer");
                assert_eq!(answer.status, 200, "{:?}", answer.headers);
                assert!(answer.body().await.complete);
            }
            let decoded: Vec<usize> = pairs.iter().map(|pair| pair.decode.records().len()).collect();
            assert_eq!(decoded, [8; PAIRS], "decode legs, {profile} through {path}");
        }
    }
    settle_pairs(&fleet, &pairs).await;
}

/// Blocks in a replica's prefix index.
fn entries(metrics: &Metrics) -> f64 {
    metrics.sum("tandem_prefix_index_entries", &[])
}

/// Prompts of 100 blocks of the prefix index of which the first `common` are the same.
fn sharing(common: usize, count: usize) -> Vec<String> {
    let text = |n: usize| {
        let mut dice = super::Dice(n as u64);
        let own: String = (0..(100 - common) * 128).map(|_| char::from(b'd' + dice.below(20) as u8)).collect();
        // The role and its separators take the first bytes of the first block.
        "c".repeat(common * 128) + &own
    };
    (0..count).map(|n| chat(MODEL, &text(n + 1), 1, false)).collect()
}

/// Prompts that share little do not follow the first of them, and those that share much do.
#[tokio::test(flavor = "multi_thread")]
async fn r74_a_small_common_prefix_does_not_attract_a_burst() {
    let pairs = start_pairs().await;
    let options = FleetOptions { env: vec![("AIBRIX_MIN_MATCH_PCT".to_owned(), "30".to_owned())], ..one_replica() };
    let fleet = Fleet::start(pairs.iter().flat_map(|pair| pair.pods(&profiles())), options).await;
    let path = fleet.envoy.as_ref().expect("envoy").base();
    fleet_shows(&fleet.tandems, "idle pods", idle).await;

    for (common, burst_size) in [(1, 200), (25, 80)] {
        // The prefix becomes known by a request that is given up, so that every pod stays idle.
        let holds: Vec<Hold> = pairs.iter().map(|pair| pair.prefill.hold()).collect();
        let before = entries(&fleet.tandems[0].metrics().await);
        let first = burst(&path, "default", sharing(common, 1));
        held(&holds, 1).await;
        fleet.tandems[0].wait_metrics(SOON, "the prefix is indexed", |now| entries(now) > before).await;
        drop(first);
        fleet_shows(&fleet.tandems, "idle again", idle).await;

        let requests = burst(&path, "default", sharing(common, burst_size + 1).split_off(1));
        let placed = held(&holds, burst_size).await;
        let (least, most) = (placed.iter().min().expect("pods"), placed.iter().max().expect("pods"));
        assert!(most - least <= 1, "{common} % in common: {placed:?}");
        drop(requests);
        fleet_shows(&fleet.tandems, "idle again", idle).await;
    }

    // The other side of it: the same prompt again goes where it was computed.
    let body = sharing(0, 1).remove(0);
    let mut chosen = Vec::new();
    for _ in 0..6 {
        let before = entries(&fleet.tandems[0].metrics().await);
        let answer = ask(&path, body.clone()).send().await;
        chosen.push(answer.header("prefill-target-pod").to_owned());
        assert!(answer.body().await.complete);
        if chosen.len() == 1 {
            fleet.tandems[0].wait_metrics(SOON, "the prompt is indexed", |now| entries(now) > before).await;
        }
    }
    assert!(chosen.iter().all(|pod| *pod == chosen[0]), "{chosen:?}");
    settle_pairs(&fleet, &pairs).await;
}
