//! `deploy/envoy/drain.sh` against a real Envoy: it waits for the answers under way.

use std::time::{Duration, Instant};

use super::path;
use crate::harness::envoy::Envoy;
use crate::harness::process::{Process, Start};
use crate::harness::processor::{Action, Processor, chat, closed_port};
use crate::harness::raw::{RawServer, Step};
use crate::harness::{SOON, eventually};

fn drain(envoy: &Envoy, seconds: &str) -> Process {
    let mut start = Start::new("drain", "bash");
    start.arg(path("deploy/envoy/drain.sh")).arg(seconds);
    start.env("TANDEM_ENVOY_ADMIN_PORT", &envoy.admin().port().to_string()).env("TANDEM_ENVOY_DRAIN_SECONDS", "1");
    start.spawn()
}

#[tokio::test(flavor = "multi_thread")]
async fn r91_envoy_is_stopped_when_its_answers_are_over() {
    let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
    let engine = RawServer::start(vec![vec![Step::ReadRequest, Step::Send(head.into()), Step::AwaitClose]]).await;
    let processor = Processor::start(vec![Action::Route(engine.address())]).await;
    let envoy = Envoy::start(&[processor.address()], closed_port()).await;
    let mut answer = chat(envoy.address()).send().await;
    assert_eq!(answer.status, 200);
    answer.chunk().await.expect("a chunk").expect("a whole one");

    let draining = drain(&envoy, "120");
    eventually(SOON, "health checks fail", async || (envoy.stat("server.live").await == Some(0)).then_some(())).await;
    // Longer than its least time, and than it takes to ask for the count twice.
    let waiting = tokio::time::timeout(Duration::from_secs(4), draining.exited(SOON)).await;
    assert!(waiting.is_err(), "an answer is under way: {}", draining.logs());
    drop(answer);
    let status = draining.exited(SOON).await;
    assert!(status.success(), "{}", draining.logs());
    assert!(draining.stderr().is_empty(), "{}", draining.logs());
}

#[tokio::test(flavor = "multi_thread")]
async fn its_limit_holds_and_an_envoy_that_is_gone_is_no_reason_to_wait() {
    let engine = RawServer::start(vec![vec![Step::ReadRequest, Step::AwaitClose]]).await;
    let processor = Processor::start(vec![Action::Route(engine.address())]).await;
    let envoy = Envoy::start(&[processor.address()], closed_port()).await;
    let hanging = tokio::spawn(chat(envoy.address()).try_send());
    engine.wait_for(0, |connection| !connection.head().is_empty()).await;
    let started = Instant::now();
    let draining = drain(&envoy, "2");
    assert!(draining.exited(SOON).await.success());
    assert!(started.elapsed() >= Duration::from_secs(2));
    hanging.abort();
    envoy.process().kill();
    assert!(drain(&envoy, "60").exited(Duration::from_secs(20)).await.success());
}
