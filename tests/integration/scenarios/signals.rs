//! What engines report, and what becomes of it when they do not.

use std::time::Duration;

use serde_json::Value;
use tandem_sim::{Engine, EngineConfig, Fault};
use tokio::time::Instant;

use super::{Pair, ask, chat, fleet_shows, pod_of, pods_of, settle_pairs, slow};
use crate::harness::engines::{MODEL, pd_by_default};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::pods::PodManifest;
use crate::harness::raw::{RawServer, Step};
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually};

/// Pause between two scrapes of a pod in these tests.
const INTERVAL: Duration = Duration::from_secs(1);

fn healthy(pod: &Value) -> bool {
    pod["name"].as_str().is_some_and(|name| !name.contains("black"))
}

/// Looks at the ages of the healthy pods' signals for a while; the oldest that was seen.
async fn oldest(tandem: &Tandem, looking: Duration) -> Duration {
    let start = Instant::now();
    let mut oldest = Duration::ZERO;
    while start.elapsed() < looking {
        let page = tandem.admin_json("/debug/fleet").await;
        let pods: Vec<&Value> = pods_of(&page).into_iter().filter(|pod| healthy(pod)).collect();
        assert_eq!(pods.len(), 32);
        for pod in pods {
            let age = pod["signals"]["age_ms"].as_f64().unwrap_or_else(|| panic!("never scraped: {pod}"));
            oldest = oldest.max(Duration::from_secs_f64(age / 1000.0));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    oldest
}

/// 64 pods of which 32 take connections and never answer: the others' signals stay fresh, nobody is scraped more than
/// asked for, and a pod whose metrics stop counts as unknown (R55).
#[tokio::test(flavor = "multi_thread")]
async fn r53_r55_silent_pods_cost_the_others_nothing() {
    let mut pairs = Vec::new();
    for number in 0..16 {
        let probed = |config| EngineConfig { record_probes: true, ..config };
        pairs.push(Pair::start(number, MODEL, probed).await);
    }
    let hole = RawServer::start(vec![vec![Step::ReadRequest, Step::AwaitClose]]).await;
    let black = (0..32).map(|number| {
        let role = if number % 2 == 0 { "prefill" } else { "decode" };
        // Another model: their silence is the point, not what becomes of requests that they get.
        PodManifest::new(&format!("black{number}"), "black", hole.address()).role(&format!("rs{}", number / 2), role)
    });
    // A time-out that nobody healthy meets, and that would hold up everybody who stood behind a silent pod.
    let env = [("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "1000"), ("TANDEM_SCRAPE_TIMEOUT_MS", "10000")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let options = FleetOptions { replicas: 1, envoy: false, env: env.to_vec(), ..FleetOptions::default() };
    let mut fleet = Fleet::start(pairs.iter().flat_map(|pair| pair.pods(&pd_by_default())), options).await;
    let scraped =
        |page: &Value| pods_of(page).iter().filter(|pod| healthy(pod)).all(|pod| pod["signals"]["fresh"] == true);
    fleet_shows(&fleet.tandems, "every healthy pod was scraped", scraped).await;
    // What this machine can do without them is the measure for what it does with them.
    let alone = oldest(&fleet.tandems[0], 2 * INTERVAL).await;

    fleet.pods.put(black);
    eventually(SOON, "all silent pods are asked", async || (hole.connections().len() >= 32).then_some(())).await;
    let scrapes = || pairs.iter().flat_map(Pair::engines).map(|e| e.records_for("/metrics").len()).collect::<Vec<_>>();
    let (before, holes_before, start) = (scrapes(), hole.connections().len(), Instant::now());
    let among = oldest(&fleet.tandems[0], 4 * INTERVAL).await;
    assert!(among < 2 * INTERVAL.max(alone), "a healthy pod's signals were {among:?} old; alone, {alone:?}");
    let page = fleet.tandems[0].admin_json("/debug/fleet").await;
    let silent: Vec<&Value> = pods_of(&page).into_iter().filter(|pod| !healthy(pod)).collect();
    assert_eq!(silent.len(), 32);
    assert!(silent.iter().all(|pod| pod["signals"]["age_ms"].is_null()), "nothing is known of the silent ones");
    // The pause is the interval, give or take a tenth.
    let most = (start.elapsed().as_secs_f64() / (0.9 * INTERVAL.as_secs_f64())).ceil() as usize + 1;
    for (number, (before, after)) in before.iter().zip(scrapes()).enumerate() {
        let count = after - before;
        assert!((1..=most).contains(&count), "engine {number}: {count} scrapes in {:?}", start.elapsed());
    }
    let holes = hole.connections().len() - holes_before;
    assert!(holes <= 32, "each silent pod has one scrape under way until its time-out, not {holes} more");

    // One decode pod's metrics stop: unknown after the age limit, and it goes on serving its share.
    pairs[0].decode.script(Fault::on("/metrics").head_delay(Duration::from_mins(10)).always());
    let path = fleet.paths().remove(0);
    fleet_shows(&fleet.tandems, "its signals are no longer fresh", |page| {
        pod_of(page, "default/d0").is_some_and(|pod| pod["signals"]["fresh"] == false)
    })
    .await;
    let hold = pairs[0].prefill.hold();
    let mut requests = tokio::task::JoinSet::new();
    for number in 0..64 {
        requests.spawn(ask(&path, chat(MODEL, &format!("{number} of many"), 1, false)).send());
    }
    crate::harness::within("a request for the cold pod", hold.wait_for(1)).await;
    hold.release();
    for answer in requests.join_all().await {
        assert_eq!(answer.status, 200);
        assert!(answer.body().await.complete);
    }
    let share = pairs[0].decode.records_for("/v1/").len();
    assert!((1..=16).contains(&share), "{share} of 64 requests for one of 16 decode pods");
    pairs[0].decode.clear_faults();
    settle_pairs(&fleet, &pairs).await;
}

/// Nothing but a request's end changes its count: not scrapes, not health checks, not new snapshots.
#[tokio::test(flavor = "multi_thread")]
async fn r61_counts_of_long_streams_stay_as_they_are() {
    let timing = slow(Duration::ZERO, Duration::from_millis(200));
    let pairs = [Pair::start(0, MODEL, |config| config.timing(timing)).await];
    let options = FleetOptions { replicas: 1, ..FleetOptions::default() };
    let mut fleet = Fleet::start(pairs[0].pods(&pd_by_default()), options).await;
    let mut streams = Vec::new();
    for (number, path) in fleet.paths().into_iter().cycle().take(6).enumerate() {
        let answer = ask(&path, chat(MODEL, &format!("{number}"), 24, number % 3 != 0)).send();
        streams.push(tokio::spawn(answer));
    }
    let running = |page: &Value| pod_of(page, "default/d0").map(|pod| pod["in_flight"]["decodes_running"].clone());
    fleet_shows(&fleet.tandems, "six are running", |page| running(page) == Some(6.into())).await;
    // Answers take 4.8 s. For three seconds: sixty scrapes, three health checks of Envoy, new snapshots.
    let start = Instant::now();
    let mut looks = 0;
    while start.elapsed() < Duration::from_secs(3) {
        fleet.pods.change("p0", |pod| pod.label("look", &looks.to_string()));
        let page = fleet.tandems[0].admin_json("/debug/fleet").await;
        let pod = pod_of(&page, "default/d0").expect("the decode pod");
        assert_eq!(pod["in_flight"]["decodes_running"], 6, "{pod}");
        assert_eq!((&pod["in_flight"]["decodes_pending"], &pod["in_flight"]["prefills"]), (&0.into(), &0.into()));
        let metrics = fleet.tandems[0].metrics().await;
        assert_eq!(metrics.sum("gateway_in_flight_requests", &[]), 6.0);
        assert_eq!(metrics.sum("tandem_pod_decode_running", &[("pod_name", "d0")]), 6.0);
        looks += 1;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(looks >= 5, "{looks} looks");
    for stream in streams {
        let answer = stream.await.expect("task");
        assert_eq!(answer.status, 200);
        assert!(answer.body().await.complete);
    }
    settle_pairs(&fleet, &pairs).await;
    let engine: &Engine = &pairs[0].decode;
    assert_eq!(engine.stats().finished, 6);
}
