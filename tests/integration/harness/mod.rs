//! Starts what a test needs and takes it down again: Envoy with the shipped file, replicas of the gateway, Redis, an
//! OTLP collector, scripted clients and servers.
//!
//! Everything listens on ports that the kernel picks, lives in a temporary directory, and dies with the value that
//! stands for it. A failing test prints the end of the logs of the processes it had started.
#![allow(dead_code, reason = "a tool box; which tools are used changes with the scenarios")]

pub mod deadline;
pub mod drip;
pub mod engines;
pub mod envoy;
pub mod ext_proc;
pub mod fault_proxy;
pub mod fleet;
pub mod http;
pub mod kube_api;
mod kube_wire;
pub mod metrics;
pub mod oracle;
pub mod otlp;
pub mod pods;
pub mod process;
pub mod processor;
pub mod raw;
pub mod redis;
pub mod tandem;
pub mod tls;

use std::future::Future;
use std::time::Duration;

/// Longest wait for anything that should happen soon. Generous: two busy cores and a debug build.
pub const SOON: Duration = Duration::from_mins(1);

/// Runs `future`, but not longer than [`SOON`].
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    within_time(SOON, what, future).await
}

/// Runs `future`, but not longer than `limit`.
pub async fn within_time<T>(limit: Duration, what: &str, future: impl Future<Output = T>) -> T {
    let _waiting = deadline::waiting(what);
    let Ok(value) = tokio::time::timeout(limit, future).await else { panic!("{what}: not within {limit:?}") };
    value
}

/// Asks `probe` again and again until it answers `Some`.
///
/// For state that can only be polled (another process); prefer an event where there is one.
pub async fn eventually<T, F: Future<Output = Option<T>>>(
    limit: Duration,
    what: &str,
    mut probe: impl FnMut() -> F,
) -> T {
    within_time(limit, what, async {
        loop {
            if let Some(value) = probe().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// A task that ends with the value that stands for it.
#[derive(Debug)]
pub struct Task(tokio::task::JoinHandle<()>);

impl Task {
    /// Starts it.
    pub fn spawn(future: impl Future<Output = ()> + Send + 'static) -> Task {
        Task(tokio::spawn(future))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}
