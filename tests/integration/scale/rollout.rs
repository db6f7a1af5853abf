//! R91: replicas that leave and come while requests run.

use std::net::SocketAddr;
use std::time::Duration;

use tandem_sim::{EngineConfig, Fault, Timing};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::load::{Failed, complete, open_loop, streamed_chat};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::ext_proc::{ExtProcClient, Reply};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, base};
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::{SOON, eventually, within, within_time};

/// Requests per second, unless [`RATE`] says otherwise.
const SAFE_RATE: u32 = 50;
/// Sets another rate: 200 is what the report asks for, and a release build on two cores can do it.
const RATE: &str = "TANDEM_TEST_RATE";
/// Tokens of each answer, one every [`STEP`].
const TOKENS: usize = 8;
/// Time between two tokens: answers run for most of a second, so that each restart finds some of them in the middle.
const STEP: Duration = Duration::from_millis(80);

fn rate() -> u32 {
    let wanted = std::env::var(RATE).ok().map(|text| text.parse().expect("a number of requests per second"));
    wanted.unwrap_or(SAFE_RATE)
}

fn at_a_speaking_pace(config: EngineConfig) -> EngineConfig {
    config.timing(Timing { decode_base: STEP, ..Timing::instant() })
}

/// Another replica on the port of one that has ended.
async fn successor(sandbox: &Sandbox, index: usize, grpc: SocketAddr) -> Tandem {
    let tandem = Tandem::start(TandemOptions {
        pods: sandbox.fleet.pods.path(),
        env: vec![("POD_NAME".to_owned(), format!("gateway-{index}-again"))],
        front: true,
        args: vec!["--grpc-bind-address".to_owned(), grpc.to_string()],
    })
    .await;
    tandem.wait_ready().await;
    tandem
}

async fn healthy(sandbox: &Sandbox, count: usize) {
    let envoy = sandbox.fleet.envoy.as_ref().expect("envoy");
    let what = format!("envoy sees {count} replicas");
    eventually(SOON, &what, async || (envoy.healthy_replicas().await == count).then_some(())).await;
}

/// Everything as shipped: health checks, propagation time, drain timeout.
#[tokio::test(flavor = "multi_thread")]
async fn r91_a_rolling_restart_fails_no_request() {
    const REPLICAS: usize = 3;
    let fleet = FleetOptions { replicas: REPLICAS, ..FleetOptions::default() };
    let options = SandboxOptions { pairs: 2, engine: at_a_speaking_pace, fleet, ..SandboxOptions::default() };
    let mut sandbox = Sandbox::start(options).await;
    let base = sandbox.fleet.envoy.as_ref().expect("envoy").base();
    let (stop, stopped) = oneshot::channel::<()>();
    let load = tokio::spawn(async move {
        open_loop(&base, rate(), TOKENS, async {
            let _ = stopped.await;
        })
        .await
    });
    for index in 0..REPLICAS {
        let leaving = &sandbox.fleet.tandems[index];
        leaving.sigterm();
        eventually(SOON, "it is not ready any more", async || (leaving.readiness().await? == 503).then_some(())).await;
        let status = leaving.exited(SOON).await;
        assert!(status.success(), "{status}");
        let grpc = leaving.grpc();
        let next = successor(&sandbox, index, grpc).await;
        drop(std::mem::replace(&mut sandbox.fleet.tandems[index], next));
        healthy(&sandbox, REPLICAS).await;
    }
    let _ = stop.send(());
    let result = within_time(2 * SOON, "the last answers", load).await.expect("the load");
    println!("{} requests at {:.0}/s, {} failed", result.sent, result.rate(), result.failed.len());
    assert!(result.failed.is_empty(), "{} of {} failed: {:#?}", result.failed.len(), result.sent, result.failed);
    assert!(result.rate() > 0.9 * f64::from(rate()), "only {:.0} requests per second were sent", result.rate());
    sandbox.close().await;
}

/// Its own streams are lost, and no more than a few that are sent before Envoy has noticed.
#[tokio::test(flavor = "multi_thread")]
async fn r91_a_killed_replica_costs_its_streams_and_few_more() {
    /// Requests that may meet the dead replica: those between its death and the refused connection that ejects it.
    const FEW: usize = 5;
    let options = SandboxOptions { pairs: 2, engine: at_a_speaking_pace, ..SandboxOptions::default() };
    let mut sandbox = Sandbox::start(options).await;
    let base = sandbox.fleet.envoy.as_ref().expect("envoy").base();
    let (stop, stopped) = oneshot::channel::<()>();
    let started = Instant::now();
    let load = tokio::spawn(async move {
        open_loop(&base, SAFE_RATE, TOKENS, async {
            let _ = stopped.await;
        })
        .await
    });
    let dying = &sandbox.fleet.tandems[0];
    let running = dying.wait_metrics(SOON, "it serves several streams", |metrics| {
        metrics.sum("gateway_in_flight_requests", &[]) >= 5.0
    });
    let running = running.await.sum("gateway_in_flight_requests", &[]);
    let death = started.elapsed();
    dying.kill9();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let _ = stop.send(());
    let result = within_time(2 * SOON, "the last answers", load).await.expect("the load");

    // Longer than an answer takes on a busy machine: who was sent before that may have been on the dead replica.
    let answer = STEP * u32::try_from(TOKENS).expect("few") + Duration::from_secs(1);
    let (own, later): (Vec<&Failed>, Vec<&Failed>) = result.failed.iter().partition(|failed| failed.sent <= death);
    println!("{running} streams on the replica; {} sent before and {} after its death failed", own.len(), later.len());
    assert!(own.iter().all(|failed| failed.sent + answer >= death), "{own:#?}");
    assert!(later.len() <= FEW, "{later:#?}");
    let noticed = death + Duration::from_secs(2);
    assert!(later.iter().all(|failed| failed.sent <= noticed), "{later:#?}");
    healthy(&sandbox, 1).await;

    // The survivor is undisturbed, and so is the system when the other one is back.
    let grpc = sandbox.fleet.tandems[0].grpc();
    let next = successor(&sandbox, 0, grpc).await;
    drop(std::mem::replace(&mut sandbox.fleet.tandems[0], next));
    healthy(&sandbox, 2).await;
    let base = sandbox.fleet.envoy.as_ref().expect("envoy").base();
    for number in 0..10 {
        complete(streamed_chat(&base, number, 1)).await.expect("an answer");
    }
    // Engines may have seen hand-offs that nobody took up; charges and gauges are all back.
    let engines: Vec<_> = sandbox.engines().map(|engine| engine as &dyn crate::harness::engines::Backend).collect();
    crate::harness::oracle::oracle(&sandbox.fleet.tandems, &engines).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r91_idle_streams_do_not_hold_a_replica() {
    let fleet = FleetOptions {
        replicas: 1,
        envoy: false,
        env: vec![("TANDEM_DRAIN_PROPAGATION_SECONDS".to_owned(), "1".to_owned())],
        ..FleetOptions::default()
    };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let tandem = &sandbox.fleet.tandems[0];
    let client = ExtProcClient::connect(tandem.grpc()).await;
    let mut idle: Vec<_> = (0..3).map(|_| client.open(&[])).collect();
    // A client that keeps its connection to the front open.
    let front = base(tandem.front().expect("front"));
    let kept = Call::get(&front, "/v1/models").send().await;
    tandem
        .wait_metrics(SOON, "the streams are there", |metrics| metrics.sum("gateway_in_flight_requests", &[]) >= 3.0)
        .await;
    tandem.sigterm();
    // Far below the drain timeout of 300 s that is in force.
    let status = tandem.exited(SOON).await;
    assert!(status.success(), "{status}");
    for stream in &mut idle {
        assert!(matches!(stream.next().await, Reply::Immediate(_) | Reply::End(..)));
    }
    drop(kept);
}

#[tokio::test(flavor = "multi_thread")]
async fn r91_a_stream_may_end_within_the_drain_timeout_and_no_later() {
    let env = [("TANDEM_DRAIN_PROPAGATION_SECONDS", "2"), ("TANDEM_DRAIN_TIMEOUT_SECONDS", "4")];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let fleet = FleetOptions { replicas: 1, env, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let (tandem, decode) = (&sandbox.fleet.tandems[0], &sandbox.decode[0]);
    // Through Envoy and through the front: one that never ends, one that ends while the replica drains.
    let mut endless = Vec::new();
    decode.script(Fault::on("/v1/").stall_after(2).times(2));
    for path in sandbox.paths() {
        let mut events = streamed_chat(&path, 0, 8).send().await.events();
        events.next().await.expect("a first event");
        endless.push(events);
    }
    let gate = decode.hold();
    let ending: Vec<_> = sandbox.paths().iter().map(|path| tokio::spawn(complete(streamed_chat(path, 1, 8)))).collect();
    gate.wait_for(ending.len()).await;

    let began = Instant::now();
    tandem.sigterm();
    eventually(SOON, "it is not ready any more", async || (tandem.readiness().await? == 503).then_some(())).await;
    // Envoy may not have noticed yet: requests are still served.
    let late = tokio::spawn(complete(streamed_chat(&sandbox.paths()[0], 2, 1)));
    gate.wait_for(ending.len() + 1).await;
    gate.release();
    for answer in ending.into_iter().chain([late]) {
        within("an answer", answer).await.expect("a task").expect("a whole answer");
    }
    for events in endless {
        let (_, whole) = events.collect().await;
        assert!(!whole, "it was cut");
    }
    assert!(began.elapsed() >= Duration::from_secs(4), "not before the drain timeout");
    let status = tandem.exited(SOON).await;
    assert!(status.success(), "{status}");
    decode.wait_until(|engine| engine.stats().live_requests == 0).await;
    assert!(decode.violations().is_empty(), "{:?}", decode.violations());
}
