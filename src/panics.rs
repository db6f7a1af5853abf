//! What becomes of a panic.
//!
//! In a request, on a connection, in one look at a pod: it is caught where that is guarded, and costs just that. Anywhere
//! else, in a task that serves all requests, it leaves something undone that nothing else will do; so the process drains
//! and ends, and whatever supervises it starts another. Each one is counted.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

use crate::telemetry::Metrics;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Something panicked, was caught, and has told the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it panicked")]
pub struct Panicked;

/// What this thread does panics at its own cost, until this is dropped.
struct Guard(bool);

impl Guard {
    fn new() -> Guard {
        Guard(GUARDED.replace(true))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        GUARDED.set(self.0);
    }
}

/// Runs `future` to its end, or to its panic.
pub async fn guarded<F: Future>(future: F) -> Result<F::Output, Panicked> {
    AssertUnwindSafe(Polled(pin!(future))).catch_unwind().await.map_err(|_| Panicked)
}

/// The same for work on a thread of its own.
pub fn guarded_work<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    let _guard = Guard::new();
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| Panicked)
}

struct Polled<'a, F>(Pin<&'a mut F>);

impl<F: Future> Future for Polled<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let _guard = Guard::new();
        self.0.as_mut().poll(context)
    }
}

/// From now on every panic of this process is counted, and one that nothing guards cancels `fatal`.
pub fn watch(metrics: Arc<Metrics>, fatal: CancellationToken) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        before(panic);
        judge(&metrics, &fatal);
    }));
}

fn judge(metrics: &Metrics, fatal: &CancellationToken) {
    metrics.panic_caught();
    if !GUARDED.get() {
        tracing::error!("a background task panicked; the process drains and ends");
        fatal.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Tick;
    use crate::telemetry::FleetGauges;

    #[test]
    fn each_panic_is_counted_and_an_unguarded_one_is_fatal() {
        let (metrics, fatal) = (Metrics::new("gateway"), CancellationToken::new());
        let counted = |count: u64| {
            metrics
                .render(&FleetGauges::default(), Tick::default())
                .contains(&format!("tandem_panics_caught_total {count}\n"))
        };
        guarded_work(|| judge(&metrics, &fatal)).unwrap();
        assert!(counted(1) && !fatal.is_cancelled());
        judge(&metrics, &fatal);
        assert!(counted(2) && fatal.is_cancelled());
    }

    #[tokio::test]
    async fn a_guard_holds_while_its_work_runs_and_no_longer() {
        assert!(!GUARDED.get());
        let seen = guarded(async {
            let first = GUARDED.get();
            tokio::task::yield_now().await;
            (first, GUARDED.get())
        });
        assert_eq!(seen.await, Ok((true, true)));
        assert!(!GUARDED.get());
        assert_eq!(guarded(async { panic!("in a request") }).await, Err::<(), _>(Panicked));
        assert_eq!(guarded_work(|| panic!("on a thread")), Err::<(), _>(Panicked));
        assert_eq!(guarded_work(|| GUARDED.get()), Ok(true));
        assert!(!GUARDED.get(), "a panic lets go of its guard");
    }
}
