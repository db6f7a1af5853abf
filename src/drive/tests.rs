//! The driver over real simulated engines, with a peer that leaves at the worst moment.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method};
use tandem_sim::{Engine, EngineConfig, Hold};
use tokio_util::task::TaskTracker;

use super::*;
use crate::discovery::{PodReader, read_documents};
use crate::exchange::{Adapter, RoutePlan, WorldSeeds};
use crate::fleet::{Fleet, Snapshot, build};
use crate::knobs::{Environment, Knobs};
use crate::telemetry::Metrics;

struct Nothing;

impl Environment for Nothing {
    fn get(&self, _name: &str) -> Option<String> {
        None
    }
}

/// Sends one request, and is gone exactly when the prefill engine has answered: its last event is ready before the
/// driver has looked at the leg.
struct LeavesBetweenTheLegs {
    prefill: Engine,
    hold: Option<Hold>,
    step: usize,
}

impl Peer for LeavesBetweenTheLegs {
    const ADAPTER: Adapter = Adapter::Envoy;

    async fn next(&mut self) -> Incoming {
        self.step += 1;
        match self.step {
            1 => {
                let mut headers = HeaderMap::new();
                headers.insert("routing-strategy", http::HeaderValue::from_static("pd"));
                Incoming::Head { method: Method::POST, path: "/v1/completions".to_owned(), headers, end: false }
            }
            2 => {
                let data = Bytes::from_static(br#"{"model":"m","prompt":"never mind","max_tokens":40}"#);
                Incoming::Event(Event::Body { data, end: true })
            }
            _ => {
                // The leg needs this task until its request is out; the engine holds it until nobody reads the answer.
                if let Some(hold) = &self.hold {
                    hold.wait_for(1).await;
                }
                self.hold = None;
                // From here on this task is blocked, not the runtime: the engine answers, and nobody reads it. Without
                // `block_in_place` the engine's own task could sit in the slot of this worker that no other worker takes from.
                let answered = |engine: &Engine| engine.records().iter().any(|record| record.end.is_some());
                tokio::task::block_in_place(|| {
                    while !answered(&self.prefill) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
                Incoming::Event(Event::Gone)
            }
        }
    }

    async fn apply(&mut self, _effect: Effect) {}

    async fn route(&mut self, _plan: RoutePlan, _trace_headers: HeaderMap) {
        panic!("nobody is there to carry the request on");
    }

    async fn crashed(&mut self) {}
}

fn manifests(pods: &[(&str, &Engine)], label: &str) -> String {
    let mut text = String::new();
    for (role, engine) in pods {
        let (ip, port) = (engine.address().ip(), engine.address().port());
        let _ = write!(
            text,
            "---\nmetadata:\n  name: {role}\n  labels: {{model.aibrix.ai/name: m, model.aibrix.ai/port: \"{port}\", \
             model.aibrix.ai/engine: {label}, role-name: {role}, roleset-name: r}}\nstatus: {{podIP: {ip}}}\n"
        );
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn interop_15b_the_decode_engine_gets_the_request_and_then_a_hang_up() {
    let decode = leave_between_the_legs("vllm", |config| config).await;
    assert_eq!(decode["kv_transfer_params"]["remote_host"], "127.0.0.1");
}

/// The same for a context worker, which holds its blocks for a minute.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn interop_trtllm_the_generation_worker_gets_the_request_and_then_a_hang_up() {
    let generation = leave_between_the_legs("trtllm", EngineConfig::trtllm).await;
    assert_eq!(generation["disaggregated_params"]["request_type"], "generation_only");
}

/// The request that the decode engine saw; nothing is held any more.
async fn leave_between_the_legs(engine: &str, dialect: fn(EngineConfig) -> EngineConfig) -> serde_json::Value {
    let prefill = tandem_sim::start(dialect(EngineConfig::prefill("m"))).await.unwrap();
    let decode = tandem_sim::start(dialect(EngineConfig::decode("m"))).await.unwrap();
    let (knobs, _) = Knobs::read(&Nothing).unwrap();
    let mut reader = PodReader::new(Arc::clone(&knobs.pd));
    let documents = read_documents(&manifests(&[("prefill", &prefill), ("decode", &decode)], engine));
    let specs: Vec<_> = documents.pods.iter().filter_map(|pod| reader.read(pod).spec).collect();
    let fleet = Fleet::default();
    fleet.store(build(&Snapshot::default(), &specs, &mut 0));
    let world = Arc::new(World::new(
        Arc::new(knobs),
        Arc::new(fleet),
        Arc::new(Metrics::new("gateway")),
        WorldSeeds::default(),
    ));
    let tasks = TaskTracker::new();
    let driver =
        Driver::new(Arc::clone(&world), Clock::system(), Seeds::new(1), Tracer::off(), tasks.clone(), Stops::default());
    let peer = LeavesBetweenTheLegs { hold: Some(prefill.hold()), prefill: prefill.clone(), step: 0 };
    Arc::new(driver).spawn(peer, HeaderMap::new());
    tasks.close();
    tokio::time::timeout(Duration::from_secs(20), tasks.wait()).await.expect("the exchange ends");

    let ended = decode.wait_until(|engine| engine.records().iter().any(|record| record.end.is_some()));
    tokio::time::timeout(Duration::from_secs(20), ended).await.expect("the decode engine saw the request");
    let records = decode.records();
    assert_eq!(records.len(), 1);
    assert_eq!(prefill.stats().pinned_requests, 0, "the prefill engine still holds blocks");
    assert!(decode.violations().is_empty() && prefill.violations().is_empty());
    for pod in world.fleet.load().pods() {
        let load = pod.state.load.view();
        assert_eq!((load.prefills, load.pending, load.running), (0, 0, 0));
    }
    assert_eq!((world.buffered.used(), world.streams.used()), (0, 0));
    records[0].json()
}
