//! vLLM, case 15: the client leaves. Every way of an engine to hear of it is a closed connection.

use std::time::Duration;

use tandem_sim::{End, Engine, Fault, Timing};
use tokio::time::Instant;

use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;
use crate::harness::within;

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
