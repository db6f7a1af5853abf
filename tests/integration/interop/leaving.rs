//! The client leaves (vLLM: case 15), in each phase, with each engine: how its pods hear of it. All but SGLang's know by
//! the closed connection alone.

use std::time::Duration;

use serde_json::json;
use tandem_sim::{End, Engine, EngineConfig, Fault, Timing};
use tokio::time::Instant;

use super::{calls, ended, only_work};
use crate::bodies::total;
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;
use crate::harness::metrics::Metrics;
use crate::harness::{SOON, within};

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"never mind"}],"max_tokens":50}"#;

/// Longest time from the client's leaving to the end of the leg, by the engine's clock: a second, and as much again for
/// a busy machine.
const NOTICED: Duration = Duration::from_secs(2);

/// Sends the request, waits until `there` and leaves; returns when.
async fn leave_when(path: &str, there: impl Future<Output = ()>) -> Instant {
    let call = tokio::spawn(Call::post(path, PATH, BODY).try_send());
    within("the request arrives", there).await;
    call.abort();
    let left = Instant::now();
    assert!(call.await.is_err_and(|error| error.is_cancelled()), "no answer came before the client left");
    left
}

/// The engine's one request ended because its connection closed, soon after the client left.
async fn assert_gone(engine: &Engine, left: Instant) {
    within("the engine hears of it", engine.wait_until(|engine| only(engine).end.is_some())).await;
    let (ended, how) = only(engine).end.expect("an end");
    assert_eq!(how, End::ClientGone);
    assert!(ended.saturating_duration_since(left) < NOTICED, "{:?}", ended.saturating_duration_since(left));
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_15a_client_leaves_during_prefill() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        sandbox.clear();
        let hold = sandbox.prefill[0].hold();
        let left = leave_when(&path, hold.wait_for(1)).await;
        assert_gone(&sandbox.prefill[0], left).await;
        assert!(sandbox.decode[0].records().is_empty());
        hold.release();
        assert_eq!(sandbox.prefill[0].stats().pinned_requests, 0);
    }
    // Nothing was sent on later.
    assert!(sandbox.decode[0].records().is_empty());
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_15c_client_leaves_during_decode() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        // Before decode has answered at all.
        sandbox.clear();
        let hold = sandbox.decode[0].hold();
        let left = leave_when(&path, hold.wait_for(1)).await;
        assert_gone(&sandbox.decode[0], left).await;
        hold.release();

        // In the middle of the stream.
        sandbox.clear();
        sandbox.decode[0].script(Fault::on("/v1/").stall_after(3));
        let streamed = BODY.replace("50}", "50,\"stream\":true}");
        let mut events = Call::post(&path, PATH, streamed).send().await.events();
        for _ in 0..3 {
            assert!(events.next().await.is_some());
        }
        let left = Instant::now();
        events.abandon();
        assert_gone(&sandbox.decode[0], left).await;
    }
    sandbox.close().await;
}

/// The decode engine has accepted the request and pulls the KV: it tells the prefill engine to let go.
#[tokio::test(flavor = "multi_thread")]
async fn interop_15c_client_leaves_during_the_transfer() {
    let sandbox = Sandbox::start(SandboxOptions {
        engine: |config| config.timing(Timing { transfer_base: Duration::from_mins(10), ..Timing::instant() }),
        ..SandboxOptions::default()
    })
    .await;
    for path in sandbox.paths() {
        sandbox.clear();
        let decode = &sandbox.decode[0];
        let left = leave_when(&path, decode.wait_until(|decode| decode.stats().waiting == 1)).await;
        assert_gone(decode, left).await;
        let prefill = &sandbox.prefill[0];
        within("the blocks are freed", prefill.wait_until(|prefill| prefill.stats().pinned_requests == 0)).await;
        assert_eq!(prefill.stats().expired_leases, 0);
    }
    sandbox.close().await;
}

const ABORT: &str = "/abort_request";

/// Longer than any test.
const NEVER: Duration = Duration::from_mins(10);

fn slow_prefill() -> Timing {
    Timing { prefill_base: NEVER, ..Timing::instant() }
}

fn slow_decode() -> Timing {
    Timing { decode_base: NEVER, ..Timing::instant() }
}

/// The engine's leg ended because its connection closed, soon after the client left.
async fn assert_leg_gone(engine: &Engine, left: Instant) {
    let (at, how) = ended(engine).await.end.expect("an end");
    assert_eq!(how, End::ClientGone);
    assert!(at.saturating_duration_since(left) < NOTICED, "{:?}", at.saturating_duration_since(left));
}

/// Starts a stream, reads `events` of it and leaves.
async fn leave_stream_after(path: &str, events: usize) -> Instant {
    let streamed = BODY.replace("50}", "50,\"stream\":true}");
    let mut answer = Call::post(path, PATH, streamed).send().await.events();
    for _ in 0..events {
        assert!(answer.next().await.is_some());
    }
    let left = Instant::now();
    answer.abandon();
    left
}

/// The same of SGLang, where the abort may be there before the end of the connection.
async fn assert_leg_over(engine: &Engine, left: Instant) {
    let record = ended(engine).await;
    let (at, how) = record.end.expect("an end");
    assert!(how == End::ClientGone || how == End::Completed, "{how:?}");
    assert!(at.saturating_duration_since(left) < NOTICED, "{:?}", at.saturating_duration_since(left));
}

fn sglang(timing: fn(EngineConfig) -> EngineConfig) -> SandboxOptions {
    SandboxOptions::of(timing).env(&[("AIBRIX_DECODE_ABORT_RETRY_DELAY", "0.2")])
}

/// Each abort names the engine's one request.
async fn assert_aborted(engine: &Engine, left: Instant, count: usize) {
    let aborts = calls(engine, ABORT, count).await;
    assert_eq!(aborts.len(), count, "{aborts:?}");
    assert!(aborts[0].received_at.saturating_duration_since(left) < NOTICED);
    let rid = only_work(engine).json()["rid"].clone();
    assert!(aborts.iter().all(|abort| abort.json() == json!({ "rid": rid })), "{aborts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_sglang_client_leaves_during_prefill() {
    let sandbox = Sandbox::start(sglang(|config| config.sglang().timing(slow_prefill()))).await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    for path in sandbox.paths() {
        sandbox.clear();
        let left = leave_when(&path, prefill.wait_until(|prefill| prefill.stats().running == 1)).await;
        assert_leg_over(decode, left).await;
        assert_aborted(decode, left, 2).await;
        assert_aborted(prefill, left, 2).await;
        // The prefill leg is not killed: it ends because it was told to.
        let record = ended(prefill).await;
        assert_eq!(record.ended(), Some(End::Completed), "{record:?}");
        let told = prefill.records_for(ABORT)[0].received_at;
        assert!(record.end.is_some_and(|(at, _)| at >= told));
    }
    assert_eq!(
        total(&sandbox.fleet, "gateway_pd_decode_abort_total", &[("prefill_failure_class", "client_gone")]).await,
        8.0
    );
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_sglang_client_leaves_during_decode() {
    let sandbox = Sandbox::start(sglang(|config| config.sglang().timing(slow_decode()))).await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    for path in sandbox.paths() {
        sandbox.clear();
        let there = async {
            decode.wait_until(|decode| decode.stats().running == 1).await;
            ended(prefill).await;
            // That the engine has answered is not yet that the replica knows of it.
            for tandem in &sandbox.fleet.tandems {
                let done = |metrics: &Metrics| metrics.sum("gateway_prefill_outstanding_requests", &[]) == 0.0;
                tandem.wait_metrics(SOON, "the prefill leg is over", done).await;
            }
        };
        let left = leave_when(&path, there).await;
        assert_leg_over(decode, left).await;
        assert_aborted(decode, left, 2).await;
        assert_eq!(only_work(prefill).status, Some(200));
        assert!(prefill.records_for(ABORT).is_empty(), "it has done its part");
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_sglang_client_leaves_in_the_stream() {
    let sandbox = Sandbox::start(sglang(tandem_sim::EngineConfig::sglang)).await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    for path in sandbox.paths() {
        sandbox.clear();
        decode.script(Fault::on("/v1/").stall_after(3));
        let left = leave_stream_after(&path, 3).await;
        assert_leg_over(decode, left).await;
        assert_aborted(decode, left, 1).await;
        assert_eq!(ended(prefill).await.status, Some(200));
        assert!(prefill.records_for(ABORT).is_empty());
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_trtllm_context_first_client_leaves() {
    let sandbox = Sandbox::start(SandboxOptions::of(|config| {
        config.trtllm().timing(Timing { transfer_base: NEVER, ..Timing::instant() })
    }))
    .await;
    let (context, generation) = (&sandbox.prefill[0], &sandbox.decode[0]);
    for path in sandbox.paths() {
        // The context leg runs.
        sandbox.clear();
        let hold = context.hold();
        let left = leave_when(&path, hold.wait_for(1)).await;
        assert_leg_gone(context, left).await;
        hold.release();
        assert!(generation.records().is_empty());

        // Generation has the request, and fetches the KV.
        sandbox.clear();
        let left = leave_when(&path, generation.wait_until(|generation| generation.stats().waiting == 1)).await;
        assert_leg_gone(generation, left).await;
        assert_eq!(only_work(context).status, Some(200));
        within("the blocks are freed", context.wait_until(|context| context.stats().pinned_requests == 0)).await;
    }
    assert!(generation.records_for(ABORT).is_empty() && context.records_for(ABORT).is_empty());
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_trtllm_context_first_client_leaves_in_the_stream() {
    let sandbox = Sandbox::start(SandboxOptions::of(tandem_sim::EngineConfig::trtllm)).await;
    for path in sandbox.paths() {
        sandbox.clear();
        sandbox.decode[0].script(Fault::on("/v1/").stall_after(3));
        let left = leave_stream_after(&path, 3).await;
        assert_leg_gone(&sandbox.decode[0], left).await;
        assert_eq!(sandbox.prefill[0].stats().pinned_requests, 0);
    }
    sandbox.close().await;
}

fn generation_first(timing: fn(EngineConfig) -> EngineConfig) -> SandboxOptions {
    SandboxOptions::of(timing).env(&[("AIBRIX_TRT_SCHEDULE_STYLE", "generation_first")])
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_trtllm_generation_first_client_leaves_during_prefill() {
    let sandbox = Sandbox::start(generation_first(|config| config.trtllm().timing(slow_prefill()))).await;
    let (context, generation) = (&sandbox.prefill[0], &sandbox.decode[0]);
    for path in sandbox.paths() {
        sandbox.clear();
        let there = async {
            context.wait_until(|context| context.stats().running == 1).await;
            generation.wait_until(|generation| generation.stats().transferring == 1).await;
        };
        let left = leave_when(&path, there).await;
        assert_leg_gone(context, left).await;
        assert_leg_gone(generation, left).await;
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_trtllm_generation_first_client_leaves_during_decode() {
    let sandbox = Sandbox::start(generation_first(|config| config.trtllm().timing(slow_decode()))).await;
    let (context, generation) = (&sandbox.prefill[0], &sandbox.decode[0]);
    for path in sandbox.paths() {
        sandbox.clear();
        let there = async {
            generation.wait_until(|generation| generation.stats().running == 1).await;
            ended(context).await;
        };
        let left = leave_when(&path, there).await;
        assert_leg_gone(generation, left).await;
        assert_eq!(only_work(context).status, Some(200));

        sandbox.clear();
        generation
            .script(Fault::on("/v1/").stream(vec!["data: {\"choices\":[{\"text\":\"a\"}]}\n\n".into()]).stall_after(1));
        context.script(Fault::on("/v1/").answer(200, "application/json", "{}"));
        let left = leave_stream_after(&path, 1).await;
        assert_leg_gone(generation, left).await;
    }
    sandbox.close().await;
}
