//! A client that leaves around the hand-over strands no KV: in the moment between the gateway's reply and Envoy's dispatch
//! nobody but the gateway knows of the hand-off.

use std::time::Duration;

use serde_json::json;
use tandem_sim::EngineConfig;

use crate::harness::engines::{Backend, Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::Call;
use crate::harness::oracle::oracle;
use crate::harness::{SOON, eventually, within};

const TRIES: u32 = 120;
/// From before the prefill's answer reaches the gateway until the decode pod has surely been asked.
const AIM: Duration = Duration::from_millis(6);

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_around_the_hand_over_strands_no_kv() {
    let sandbox = Sandbox::start(SandboxOptions {
        // What is stranded stays.
        engine: |config: EngineConfig| config.lease(Duration::from_mins(30)),
        fleet: FleetOptions { replicas: 1, front: false, ..FleetOptions::default() },
        ..SandboxOptions::default()
    })
    .await;
    let (prefill, base) = (&sandbox.prefill[0], sandbox.fleet.paths().remove(0));
    let (mut left, mut stranded) = (0, Vec::new());
    for number in 0..TRIES {
        let offset = AIM * number / TRIES;
        let hold = prefill.hold();
        let body = json!({"model": "m", "prompt": format!("question {number}"), "max_tokens": 4000, "stream": true});
        let call = tokio::spawn(Call::post(&base, "/v1/completions", body.to_string()).try_send());
        within("prefill is asked", hold.wait_for(1)).await;
        hold.release();
        // Real time: Envoy and the gateway are processes of their own.
        tokio::time::sleep(offset).await;
        call.abort();
        left += usize::from(call.await.is_err());
        eventually(SOON, "the request ends", async || {
            let metrics = sandbox.fleet.tandems[0].metrics().await;
            (metrics.sum("gateway_in_flight_requests", &[]) == 0.0).then_some(())
        })
        .await;
        let settled = tokio::time::timeout(
            Duration::from_secs(2),
            prefill.wait_until(|prefill| prefill.stats().pinned_requests <= stranded.len()),
        );
        if settled.await.is_err() {
            stranded.push(offset);
        }
    }
    println!("{left} of {TRIES} left without an answer, {} stranded: {stranded:?}", stranded.len());
    assert!(left >= 20, "only {left} of {TRIES} left before the answer");
    // On a busy machine a leg can be cancelled in the very moment of its answer: that is the prefill pod's to notice.
    assert!(stranded.len() <= 2, "{} of {TRIES} stranded, with these offsets: {stranded:?}", stranded.len());
    // A decode engine to which Envoy had sent it after all has the hand-off twice, and says so: no more than that is asked of
    // the engines here.
    let engines: Vec<&dyn Backend> = sandbox.engines().map(|engine| engine as &dyn Backend).collect();
    oracle(&sandbox.fleet.tandems, &engines).await;
}
