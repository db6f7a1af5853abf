//! R83: thousands of slow streams at once.

use std::time::Duration;

use tandem_sim::{Capacity, EngineConfig, Timing};
use tokio::task::JoinSet;

use super::load::{complete, streamed_chat};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::eventually;
use crate::harness::fleet::FleetOptions;
use crate::harness::process::allow_open_files;
use crate::harness::within_time;

/// Streams that are open at once. Envoy's defaults end at 1,024.
const STREAMS: usize = 5_000;
/// Requests that are on their way to the decode pod at once. The number of open streams is what is tried here, not a
/// burst that two busy cores cannot work off within Envoy's message timer.
const ARRIVING: usize = 400;
/// How many go on at once when all are there. Each fetches its KV over a connection of its own, whose both ends are in
/// this process: all at once would need more open files than a process may have.
const GOING_ON: usize = 1_000;
/// Long enough for all to arrive, on a loaded machine and in a debug build.
const LONGEST: Duration = Duration::from_mins(3);

#[tokio::test(flavor = "multi_thread")]
async fn r83_five_thousand_slow_streams_and_no_failure() {
    // Each stream is a connection of the client and one of Envoy, at both ends.
    allow_open_files(2 * (STREAMS + GOING_ON) + 2_000);
    let engine = |config: EngineConfig| {
        let timing = Timing { decode_base: Duration::from_millis(300), ..Timing::instant() };
        let capacity = Capacity { max_running: STREAMS, ..config.capacity };
        // Hand-offs wait at the gate until all streams are open.
        config.timing(timing).capacity(capacity).lease(LONGEST)
    };
    let fleet = FleetOptions { front: false, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { engine, fleet, ..SandboxOptions::default() }).await;
    let envoy = sandbox.fleet.envoy.as_ref().expect("envoy");
    let base = envoy.base();

    let gate = sandbox.decode[0].hold();
    let mut streams = JoinSet::new();
    within_time(LONGEST, "all streams reach the decode pod", async {
        for number in 0..STREAMS {
            gate.wait_for((number + 1).saturating_sub(ARRIVING)).await;
            streams.spawn(complete(streamed_chat(&base, number, 3)));
        }
        gate.wait_for(STREAMS).await;
    })
    .await;
    eventually(LONGEST, "the replicas count them all", async || {
        let mut running = 0.0;
        for tandem in &sandbox.fleet.tandems {
            running += tandem.metrics().await.sum("gateway_in_flight_requests", &[]);
        }
        (running as usize == STREAMS).then_some(())
    })
    .await;

    let mut failed = Vec::new();
    within_time(LONGEST, "all streams end", async {
        while !streams.is_empty() {
            gate.release_first(GOING_ON);
            for _ in 0..GOING_ON {
                let Some(ended) = streams.join_next().await else { break };
                failed.extend(ended.expect("a stream").err());
            }
        }
    })
    .await;
    gate.release();
    assert!(failed.is_empty(), "{} of {STREAMS} failed, such as {:?}", failed.len(), failed.first());
    for cluster in ["tandem", "original_destination_cluster"] {
        for overflow in ["upstream_rq_pending_overflow", "upstream_cx_overflow"] {
            assert_eq!(envoy.stat(&format!("cluster.{cluster}.{overflow}")).await, Some(0), "{cluster} {overflow}");
        }
    }
    sandbox.close().await;
}
