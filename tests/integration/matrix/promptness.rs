//! How soon what happens on one side is known on the other, by the clock of the simulators: they live in the process of the
//! test, so that one clock measures everything.
//!
//! A few tries and wide bounds by default, since the machine may be busy; with `TANDEM_SLOW_TESTS=1` a thousand each, and the
//! real bounds.

use std::sync::Arc;
use std::time::Duration;

use tandem_sim::{End, Engine, Fault};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::cells::Dialect;
use super::settle;
use super::stage::{Stage, arrives, records};
use crate::harness::http::Call;
use crate::harness::within;

const PATH: &str = "/v1/chat/completions";
const BODY: &str =
    r#"{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":50,"stream":true}"#;

/// From an engine's answer to the client's.
const FAILURE: Duration = Duration::from_millis(50);
/// From a client's leaving to both engines.
const LEAVING: Duration = Duration::from_millis(100);
/// How much longer a busy machine may take.
const BUSY: u32 = 20;
/// How often a series may be tried.
const SERIES: usize = 3;
/// Tries at the same time.
const AT_ONCE: usize = 2;

fn slow() -> bool {
    std::env::var_os("TANDEM_SLOW_TESTS").is_some()
}

/// Runs `one` many times and holds the 99th percentile against `bound`. When something else keeps the machine busy in the
/// meantime, another series may do better.
async fn measure<F>(stage: &Stage, what: &str, bound: Duration, one: impl Fn(String) -> F)
where
    F: Future<Output = Duration> + Send + 'static,
{
    let (tries, bound) = if slow() { (1000, bound) } else { (40, bound * BUSY) };
    for number in 0..SERIES {
        let took = series(stage, tries, |tag| one(format!("{what}/{number}/{tag}"))).await;
        let at = |percent: usize| took[(took.len() * percent / 100).min(took.len() - 1)];
        println!("{what}: {tries} tries, p50 {:?}, p99 {:?}, most {:?}", at(50), at(99), at(100));
        if at(99) <= bound {
            return;
        }
    }
    panic!("{what}: p99 not within {bound:?} in {SERIES} series");
}

/// How long each of many tries took, sorted.
async fn series<F>(stage: &Stage, tries: usize, one: impl Fn(usize) -> F) -> Vec<Duration>
where
    F: Future<Output = Duration> + Send + 'static,
{
    let mut took = Vec::with_capacity(tries);
    let mut running = JoinSet::new();
    for number in 0..tries {
        while running.len() >= if number % 100 == 0 { 1 } else { AT_ONCE } {
            took.push(running.join_next().await.expect("one runs").expect("a try"));
        }
        if number % 100 == 0 {
            // So that looking for a try among the records costs the same for all.
            stage.engines().into_iter().for_each(Engine::clear_records);
        }
        running.spawn(one(number));
    }
    took.extend(running.join_all().await);
    took.sort();
    took
}

/// From the moment at which the prefill engine has given its answer to the moment at which the client has one.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_prefill_reaches_the_client_promptly() {
    for dialect in [Dialect::VllmShfs, Dialect::VllmMooncake, Dialect::Sglang, Dialect::TrtContextFirst] {
        // Mooncake's decode pod sends the head of a stream at once, and then the failure is a cut.
        let body =
            if dialect == Dialect::VllmMooncake { BODY.replace(",\"stream\":true", "") } else { BODY.to_owned() };
        let stage = Arc::new(Stage::set(dialect, &[]).await);
        stage
            .prefill
            .script(Fault::on("/v1/").answer(500, "application/json", r#"{"error":{"message":"no"}}"#).always());
        for (way, path) in ["Envoy", "the front"].into_iter().zip(stage.fleet.paths()) {
            let what = format!("{}: failed prefill, through {way}", dialect.title());
            measure(&stage, &what, FAILURE, |tag| {
                let (stage, path, body) = (Arc::clone(&stage), path.clone(), body.clone());
                async move {
                    let call =
                        Call::post(&path, PATH, body).header("x-cell", &tag).header("external-filter", "lane=live");
                    let answer = call.send().await;
                    let seen = Instant::now();
                    assert!(answer.status.is_server_error());
                    let body = within("the rest of the answer", answer.body()).await;
                    assert!(body.complete);
                    let (said, how) = records(&stage.prefill, &tag)[0].end.expect("it has answered");
                    assert_eq!(how, End::Completed);
                    seen.saturating_duration_since(said)
                }
            })
            .await;
        }
        stage.prefill.clear_faults();
        settle(&stage).await;
    }
}

/// From the moment at which a client leaves to the moment at which the last engine that works for it knows: its connection
/// is closed, or (SGLang's prefill pod) the abort is there and has ended the request.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_is_noticed_promptly() {
    for dialect in [
        Dialect::VllmShfs,
        Dialect::VllmMooncake,
        Dialect::Sglang,
        Dialect::TrtContextFirst,
        Dialect::TrtGenerationFirst,
    ] {
        let stage = Arc::new(Stage::set(dialect, &[]).await);
        // With both legs at once, the prefill pod of SGLang and TensorRT-LLM waits for the decode pod.
        let held = if dialect.is_concurrent() { &stage.decode } else { &stage.prefill };
        held.script(Fault::on("/v1/").hang().always());
        for (way, path) in ["Envoy", "the front"].into_iter().zip(stage.fleet.paths()) {
            let what = format!("{}: client gone, through {way}", dialect.title());
            measure(&stage, &what, LEAVING, |tag| leave(Arc::clone(&stage), path.clone(), tag)).await;
        }
        stage.decode.clear_faults();
        stage.prefill.clear_faults();
        settle(&stage).await;
    }
}

async fn leave(stage: Arc<Stage>, path: String, tag: String) -> Duration {
    let call = Call::post(&path, PATH, BODY).header("x-cell", &tag).header("external-filter", "lane=live");
    let asking = call.try_send();
    let there = async {
        arrives(&stage.prefill, &tag, |record| record.body_length > 0).await;
        if stage.dialect.is_concurrent() {
            arrives(&stage.decode, &tag, |record| record.body_length > 0).await;
        }
    };
    tokio::select! {
        _ = asking => panic!("{tag}: answered before the client left"),
        () = within("both legs", there) => {}
    }
    let left = Instant::now();
    let mut last = left;
    for engine in stage.engines() {
        let ended = engine.wait_until(|engine| records(engine, &tag).iter().all(|record| record.end.is_some()));
        within("the end of a leg", ended).await;
        last = records(engine, &tag).iter().filter_map(|record| record.end).fold(last, |last, (at, _)| last.max(at));
    }
    last - left
}
