//! Who is blamed for a failure that Envoy answers for: the gateway sees only what Envoy makes of it.

use tandem_sim::{Cut, Fault};

use super::cells::Dialect;
use super::settle;
use super::stage::Stage;
use crate::harness::http::Call;

const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":2}"#;

/// Pods that were ejected so far.
async fn ejections(stage: &Stage) -> f64 {
    stage.fleet.tandems[0].metrics().await.sum("tandem_ejections_total", &[("scope", "pod")])
}

async fn ask(stage: &Stage, lane: &str) -> u16 {
    let call = Call::post(&stage.fleet.paths()[0], "/v1/chat/completions", BODY);
    let answer = call.header("external-filter", &format!("lane={lane}")).send().await;
    let status = answer.status.as_u16();
    assert!(answer.body().await.complete);
    status
}

#[tokio::test(flavor = "multi_thread")]
async fn envoys_own_answers_are_told_from_those_of_pods() {
    let stage = Stage::set(Dialect::VllmShfs, &[("TANDEM_EJECTION_FAILURES", "2")]).await;
    // An overloaded pod is not broken, even if it says so in plain text.
    stage.decode.script(Fault::on("/v1/").answer(503, "text/plain", "overloaded").times(4));
    for _ in 0..4 {
        assert_eq!(ask(&stage, "live").await, 503);
    }
    assert_eq!(ejections(&stage).await, 0.0);
    // A pod that resets before its answer's head has failed; so has one that nobody can connect to.
    stage.decode.script(Fault::on("/v1/").cut_before_head(Cut::Reset).times(2));
    for (lane, ejected) in [("live", 1.0), ("no-decode", 2.0)] {
        for _ in 0..2 {
            assert_eq!(ask(&stage, lane).await, 503);
        }
        let what = format!("{ejected} pods are ejected");
        let shows = move |metrics: &crate::harness::metrics::Metrics| {
            metrics.sum("tandem_ejections_total", &[("scope", "pod")]) == ejected
        };
        stage.fleet.tandems[0].wait_metrics(crate::harness::SOON, &what, shows).await;
    }
    settle(&stage).await;
}
