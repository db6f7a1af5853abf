//! A thousand pods that change: what it costs, and what requests notice.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tandem::discovery::kubernetes::Pace;
use tandem::fleet::Fleet;

use super::{Scene, each_within_a_second};
use crate::harness::pods::PodManifest;

const PODS: usize = 1000;

fn pods() -> Vec<PodManifest> {
    let address = |number: usize| SocketAddr::from(([10, 0, (number / 250) as u8, (number % 250) as u8], 8000));
    (0..PODS).map(|number| PodManifest::new(&format!("p{number:04}"), "m", address(number)).ready(true)).collect()
}

/// What a request does with the fleet, for as long as `stop` lets it; returns how long it took each time, sorted.
fn read(fleet: &Fleet, stop: &AtomicBool) -> Vec<Duration> {
    let mut took = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let snapshot = fleet.load();
        std::hint::black_box(snapshot.model("m").map(|model| model.routable.len()));
        took.push(began.elapsed());
        std::thread::sleep(Duration::from_micros(200));
    }
    took.sort_unstable();
    took
}

/// The time that this part of all readings stays below.
fn part(took: &[Duration], part: f64) -> Duration {
    took[((took.len() - 1) as f64 * part) as usize]
}

#[tokio::test(flavor = "multi_thread")]
async fn churn_of_a_thousand_pods_is_gathered_and_holds_nobody_up() {
    each_within_a_second(async || {
        let scene = Scene::with(&pods(), Pace::default()).await;
        let before = scene.fleet().version;
        let stop = Arc::new(AtomicBool::new(false));
        let (fleet, stopped) = (Arc::clone(scene.builder.fleet()), Arc::clone(&stop));
        let reader = std::thread::spawn(move || read(&fleet, &stopped));
        let began = Instant::now();
        // Every pod changes twice, in a row and without a pause, while the fleet is built.
        for round in 1..=2u32 {
            for number in 0..PODS {
                scene.api.patch("pods", "default", &format!("p{number:04}"), |pod| {
                    pod["metadata"]["labels"]["round"] = round.to_string().into();
                });
                if number % 100 == 99 {
                    tokio::task::yield_now().await;
                }
            }
        }
        let in_force = |fleet: &tandem::fleet::Snapshot| {
            fleet.pods().all(|pod| pod.spec.labels.get("round").is_some_and(|round| round == "2"))
        };
        let last = scene.shows("the last round", in_force).await;
        let took = began.elapsed();
        stop.store(true, Ordering::Relaxed);
        let readings = reader.join().expect("the reader");
        let builds = scene.fleet().version - before;
        let most = took.as_millis() as u64 / 20 + 2;
        println!("{} changes in {took:?}: {builds} snapshots", 2 * PODS);
        println!("{} readings: median {:?}, 99 % {:?}", readings.len(), part(&readings, 0.5), part(&readings, 0.99));
        assert!(builds <= most.min(PODS as u64 / 5), "{builds} snapshots in {took:?}");
        // Not blocked: the median knows nothing of the machine's other work.
        assert!(part(&readings, 0.5) < Duration::from_micros(100), "{:?}", part(&readings, 0.5));
        vec![("the last of 2,000 changes", last)]
    })
    .await;
}
