use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::clock::Clock;
use crate::discovery::FleetBuilder;
use crate::fleet::fixture::spec;
use crate::fleet::{Engine, Fleet, PodSpec, PodState, Role, Signals};
use crate::knobs::{MetricLabels, ScrapeKnobs};
use crate::load::{DecodeCharge, PrefillCharge};
use crate::scrape::{FetchError, PageSource, ScrapeObserver, Scraper, start};
use crate::telemetry::PodLabels;

const INTERVAL: Duration = Duration::from_millis(50);
const TIMEOUT: Duration = Duration::from_secs(1);
/// How long a healthy pod takes to answer.
const ANSWER: Duration = Duration::from_millis(5);

/// What a simulated pod does when asked.
#[derive(Clone)]
enum Behaviour {
    Page(&'static str),
    BlackHole,
    Refuse,
}

#[derive(Default)]
struct Pods {
    behaviour: Mutex<HashMap<String, Behaviour>>,
    requests: Mutex<Vec<(String, &'static str)>>,
    in_flight: Mutex<HashMap<String, usize>>,
    most_in_flight: Mutex<usize>,
    failures: Mutex<usize>,
    missing: Mutex<Vec<(Engine, &'static str)>>,
    not_kept: Mutex<usize>,
}

impl Pods {
    fn set(&self, address: &str, behaviour: Behaviour) {
        self.behaviour.lock().unwrap().insert(address.to_owned(), behaviour);
    }

    fn requests_to(&self, address: &str) -> usize {
        self.requests.lock().unwrap().iter().filter(|(to, _)| to == address).count()
    }
}

/// Takes a request off the count when its future ends or is dropped.
struct InFlight<'a>(&'a Pods, String);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        *self.0.in_flight.lock().unwrap().get_mut(&self.1).unwrap() -= 1;
    }
}

struct Network(Arc<Pods>);

impl PageSource for Network {
    async fn fetch(&self, address: &str, path: &'static str) -> Result<Bytes, FetchError> {
        self.0.requests.lock().unwrap().push((address.to_owned(), path));
        let now = {
            let mut in_flight = self.0.in_flight.lock().unwrap();
            let now = in_flight.entry(address.to_owned()).or_default();
            *now += 1;
            *now
        };
        let _guard = InFlight(&self.0, address.to_owned());
        {
            let mut most = self.0.most_in_flight.lock().unwrap();
            *most = now.max(*most);
        }
        let behaviour = self.0.behaviour.lock().unwrap().get(address).cloned().unwrap_or(Behaviour::Refuse);
        match behaviour {
            Behaviour::BlackHole => std::future::pending().await,
            Behaviour::Refuse => Err(FetchError::Transport("refused".to_owned())),
            Behaviour::Page(text) => {
                tokio::time::sleep(ANSWER).await;
                Ok(Bytes::from_static(text.as_bytes()))
            }
        }
    }
}

struct Observer(Arc<Pods>);

impl ScrapeObserver for Observer {
    fn not_kept(&self) {
        *self.0.not_kept.lock().unwrap() += 1;
    }

    fn fail(&self, _pod: &PodLabels) {
        *self.0.failures.lock().unwrap() += 1;
    }

    fn missing(&self, engine: Engine, metric: &'static str) {
        self.0.missing.lock().unwrap().push((engine, metric));
    }
}

struct Rig {
    pods: Arc<Pods>,
    builder: FleetBuilder,
    clock: Clock,
    tracker: TaskTracker,
    cancel: CancellationToken,
}

/// A scraper on virtual time.
fn rig() -> Rig {
    let pods = Arc::new(Pods::default());
    let builder = FleetBuilder::new(Arc::new(Fleet::default()), Vec::new());
    let (clock, tracker, cancel) = (Clock::system(), TaskTracker::new(), CancellationToken::new());
    let scraper = Scraper {
        knobs: ScrapeKnobs {
            interval: INTERVAL,
            timeout: TIMEOUT,
            max_age: Duration::from_secs(3),
            max_bytes: 2 << 20,
            labels: MetricLabels::Aibrix,
        },
        pages: Network(Arc::clone(&pods)),
        observer: Observer(Arc::clone(&pods)),
        clock,
        seed: 7,
    };
    let (fleet, changes) = (Arc::clone(builder.fleet()), builder.subscribe());
    start(Arc::new(scraper), fleet, changes, &tracker, cancel.clone());
    Rig { pods, builder, clock, tracker, cancel }
}

impl Rig {
    fn state(&self, name: &str) -> Arc<PodState> {
        let snapshot = self.builder.fleet().load();
        let pod = snapshot.pods().find(|pod| &*pod.spec.key.name == name).unwrap();
        Arc::clone(&pod.state)
    }

    fn signals(&self, name: &str) -> Arc<Signals> {
        self.state(name).signals.load_full()
    }
}

fn at(name: &str, host: &str) -> PodSpec {
    PodSpec { host: Arc::from(host), ..spec(name) }
}

const IDLE: &str = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n\
                    vllm:generation_tokens_total 0\nvllm:prompt_tokens_total 0\n";
const BUSY: &str = "vllm:num_requests_running 8\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n\
                    vllm:generation_tokens_total 0\nvllm:prompt_tokens_total 0\n";

#[tokio::test(start_paused = true)]
async fn r53_black_holes_do_not_delay_the_healthy() {
    let rig = rig();
    let specs: Vec<PodSpec> = (0..64).map(|i| at(&format!("p{i}"), &format!("10.0.0.{i}"))).collect();
    for i in 0..64 {
        let behaviour = if i < 32 { Behaviour::Page(IDLE) } else { Behaviour::BlackHole };
        rig.pods.set(&format!("10.0.0.{i}:8000"), behaviour);
    }
    rig.builder.apply(specs);
    let mut worst = Duration::ZERO;
    for step in 0..1000 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        if step >= 20 {
            for i in 0..32 {
                let at = rig.signals(&format!("p{i}")).at.expect("a healthy pod was never scraped");
                worst = worst.max(rig.clock.now().since(at));
            }
        }
    }
    assert!(worst < 2 * INTERVAL, "{worst:?}");
    assert_eq!(*rig.pods.most_in_flight.lock().unwrap(), 1, "never two scrapes of one pod at once");
    for i in 0..64 {
        let requests = rig.pods.requests_to(&format!("10.0.0.{i}:8000"));
        // Ten seconds: at most one every 45 ms; the black holes cost a timeout each and are asked less and less.
        assert!(
            if i < 32 { (150..=223).contains(&requests) } else { (3..=10).contains(&requests) },
            "p{i}: {requests}"
        );
    }
    assert!((1..=32).all(|i| rig.state(&format!("p{}", i + 31)).signals.load().at.is_none()));
}

#[tokio::test(start_paused = true)]
async fn r55_a_pod_that_falls_silent_becomes_unknown_not_idle() {
    let rig = rig();
    rig.pods.set("10.0.0.1:8000", Behaviour::Page(IDLE));
    rig.builder.apply(vec![at("a", "10.0.0.1")]);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let max_age = Duration::from_secs(3);
    let signals = rig.signals("a");
    assert!(signals.fresh(rig.clock.now(), max_age));
    assert_eq!(signals.running, Some(0.0));
    rig.pods.set("10.0.0.1:8000", Behaviour::BlackHole);
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(!rig.signals("a").fresh(rig.clock.now(), max_age));
    rig.pods.set("10.0.0.1:8000", Behaviour::Page(BUSY));
    tokio::time::sleep(Duration::from_secs(7)).await;
    let signals = rig.signals("a");
    assert!(signals.fresh(rig.clock.now(), max_age), "back within the longest backoff");
    assert_eq!((signals.running, signals.kv_usage), (Some(8.0), Some(0.5)));
}

#[tokio::test(start_paused = true)]
async fn r53_a_failing_pod_is_asked_less_and_less() {
    let rig = rig();
    rig.builder.apply(vec![at("a", "10.0.0.1")]);
    tokio::time::sleep(Duration::from_mins(1)).await;
    let requests = rig.pods.requests_to("10.0.0.1:8000");
    // 50, 100, 200, … 3200 ms take 6.35 s; then one every 5 s, each ±10 %.
    assert!((15..=21).contains(&requests), "{requests}");
    assert_eq!(*rig.pods.failures.lock().unwrap(), requests);
}

#[tokio::test(start_paused = true)]
async fn tasks_follow_the_fleet_and_stop() {
    let rig = rig();
    for host in ["10.0.0.1", "10.0.0.2", "10.0.0.3"] {
        rig.pods.set(&format!("{host}:8000"), Behaviour::Page(IDLE));
    }
    rig.builder.apply(vec![
        at("a", "10.0.0.1"),
        PodSpec { ready: false, ..at("b", "10.0.0.2") },
        PodSpec { serves_http: false, ..at("worker", "10.0.0.3") },
        PodSpec { terminating: true, ..at("leaving", "10.0.0.3") },
        at("nowhere", ""),
    ]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(rig.signals("a").at.is_some() && rig.signals("b").at.is_some());
    assert_eq!(rig.pods.requests_to("10.0.0.3:8000"), 0);

    let old = rig.state("a");
    rig.builder.apply(vec![at("a", "10.0.0.3")]);
    tokio::time::sleep(Duration::from_millis(1)).await;
    let before = (rig.pods.requests_to("10.0.0.1:8000"), rig.pods.requests_to("10.0.0.2:8000"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(before, (rig.pods.requests_to("10.0.0.1:8000"), rig.pods.requests_to("10.0.0.2:8000")));
    assert!(rig.pods.requests_to("10.0.0.3:8000") > 15, "r51: the new address of the same incarnation");
    assert!(Arc::ptr_eq(&old, &rig.state("a")));

    rig.cancel.cancel();
    rig.tracker.close();
    tokio::time::timeout(Duration::from_secs(1), rig.tracker.wait()).await.unwrap();
    let at_end = rig.pods.requests.lock().unwrap().len();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(rig.pods.requests.lock().unwrap().len(), at_end);
}

#[tokio::test(start_paused = true)]
async fn paths_missing_metrics_and_metric_ports() {
    let rig = rig();
    for address in ["10.0.0.1:9100", "10.0.0.2:8000"] {
        rig.pods.set(address, Behaviour::Page("sglang:num_running_reqs 1\n"));
    }
    rig.builder.apply(vec![
        PodSpec { metric_port: 9100, engine: Engine::Sglang, ..at("a", "10.0.0.1") },
        PodSpec { engine: Engine::Trtllm, ..at("b", "10.0.0.2") },
    ]);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let paths = rig.pods.requests.lock().unwrap().clone();
    assert!(paths.contains(&("10.0.0.1:9100".to_owned(), "/metrics")), "{paths:?}");
    assert!(paths.contains(&("10.0.0.2:8000".to_owned(), "/prometheus/metrics")), "{paths:?}");
    let missing = rig.pods.missing.lock().unwrap().clone();
    assert!(missing.contains(&(Engine::Sglang, "num_requests_waiting")), "{missing:?}");
    assert!(missing.contains(&(Engine::Trtllm, "kv_cache_usage_perc")), "{missing:?}");
    assert!(!missing.contains(&(Engine::Sglang, "num_requests_running")), "{missing:?}");
}

#[tokio::test(start_paused = true)]
async fn foreign_work_is_what_the_engine_runs_beyond_our_own() {
    let rig = rig();
    rig.pods.set("10.0.0.1:8000", Behaviour::Page(BUSY));
    rig.builder.apply(vec![at("a", "10.0.0.1")]);
    let state = rig.state("a");
    let foreign_with = async |own: usize| {
        let mut charges: Vec<DecodeCharge> = (0..own).map(|_| DecodeCharge::open(&state)).collect();
        charges.iter_mut().for_each(DecodeCharge::hand_over);
        tokio::time::sleep(3 * INTERVAL).await;
        state.signals.load().foreign_running
    };
    assert_eq!(foreign_with(0).await, 8.0);
    assert_eq!(foreign_with(3).await, 5.0);
    assert_eq!(foreign_with(9).await, 0.0, "never negative");
    let _prefills: Vec<PrefillCharge> = (0..8).map(|_| PrefillCharge::open(&state)).collect();
    tokio::time::sleep(3 * INTERVAL).await;
    assert_eq!(state.signals.load().foreign_running, 0.0, "prefill legs are ours too");
}

#[tokio::test(start_paused = true)]
async fn r53_work_that_ends_during_a_scrape_is_not_foreign() {
    let rig = rig();
    rig.pods.set("10.0.0.1:8000", Behaviour::Page(BUSY));
    let before = rig.builder.apply(vec![at("a", "10.0.0.1")]);
    assert!(before.changed);
    let state = rig.state("a");
    let mut charges: Vec<DecodeCharge> = (0..8).map(|_| DecodeCharge::open(&state)).collect();
    charges.iter_mut().for_each(DecodeCharge::hand_over);
    // Wait until a scrape is under way, end everything, and look at what that scrape publishes.
    let in_flight = || rig.pods.in_flight.lock().unwrap().get("10.0.0.1:8000").copied().unwrap_or(0);
    while in_flight() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(charges);
    while in_flight() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tokio::task::yield_now().await;
    let signals = state.signals.load();
    assert_eq!((signals.running, signals.foreign_running), (Some(8.0), 0.0));
}

#[tokio::test(start_paused = true)]
async fn the_drain_rate_belongs_to_pods_that_generate() {
    for (role, expected) in [(Role::Decode, true), (Role::Other, true), (Role::Prefill, false)] {
        let rig = rig();
        rig.pods.set("10.0.0.1:8000", Behaviour::Page(IDLE));
        rig.builder.apply(vec![PodSpec { role, ..at("a", "10.0.0.1") }]);
        let state = rig.state("a");
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            DecodeCharge::open(&state).complete();
        }
        let rate = state.signals.load().drain_rate;
        assert_eq!(rate.is_some(), expected, "{role:?}");
        assert!(rate.is_none_or(|rate| (0.8..1.2).contains(&rate)), "{rate:?}");
    }
}
