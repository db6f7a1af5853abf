//! The tasks of an engine: accept loops and the lease reaper. All end when the engine is killed.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::state::Core;
use crate::{conn, serve, side_channel};

/// Pause after a failed accept (out of descriptors), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// A running accept loop.
#[derive(Debug)]
pub(crate) struct Accepting {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// Starts to accept connections on `listener`.
pub(crate) fn accept(core: &Arc<Core>, listener: TcpListener) {
    let stop = core.ending.kill.child_token();
    let permits = Arc::new(Semaphore::new(core.config.limits.connections.max(1)));
    let task = core.tasks.spawn({
        let (core, stop) = (core.clone(), stop.clone());
        async move {
            // The loop itself only ends with the token.
            let _ = stop.run_until_cancelled(accept_loop(&core, &listener, &permits)).await;
        }
    });
    *core.accepting.lock().unwrap_or_else(PoisonError::into_inner) = Some(Accepting { stop, task });
}

/// Closes the listener, and returns when it is closed.
pub(crate) async fn stop_accepting(core: &Core) {
    let accepting = core.accepting.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(accepting) = accepting {
        accepting.stop.cancel();
        // The task cannot panic, and if it did its listener would be closed all the same.
        let _ = accepting.task.await;
    }
}

async fn accept_loop(core: &Arc<Core>, listener: &TcpListener, permits: &Arc<Semaphore>) -> Infallible {
    loop {
        let permit = permits.clone().acquire_owned().await;
        let stream = next(listener).await;
        let core = core.clone();
        let (idle, ending) = (core.config.keep_alive, core.ending.clone());
        let tracker = core.connections.clone();
        tracker.spawn(async move {
            conn::serve(stream, idle, ending, |conn, request| serve::handle(core.clone(), conn, request)).await;
            drop(permit);
        });
    }
}

/// Starts the KV side channel on `listener`.
pub(crate) fn side_channel(core: &Arc<Core>, listener: TcpListener) {
    let kill = core.ending.kill.clone();
    let looping = {
        let core = core.clone();
        async move {
            loop {
                let stream = next(&listener).await;
                let (core, kill) = (core.clone(), core.ending.kill.clone());
                core.tasks.clone().spawn(async move {
                    let _ = kill.run_until_cancelled(serve_side_channel(core, stream)).await;
                });
            }
        }
    };
    core.tasks.spawn(async move {
        let _: Option<Infallible> = kill.run_until_cancelled(looping).await;
    });
}

async fn serve_side_channel(core: Arc<Core>, stream: TcpStream) {
    let service = service_fn(move |request| {
        let answer = side_channel::answer(core.clone(), request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    // An error is the peer's: it left in the middle.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn next(listener: &TcpListener) -> TcpStream {
    loop {
        let accepted: io::Result<_> = listener.accept().await;
        match accepted {
            Ok((stream, _)) => return stream,
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Frees hand-offs when their leases end.
pub(crate) fn reap(core: &Arc<Core>) {
    let kill = core.ending.kill.clone();
    let looping = {
        let core = core.clone();
        async move {
            loop {
                let changed = core.handoffs.changed.notified();
                match core.handoffs.next_end() {
                    None => changed.await,
                    Some(end) => tokio::select! {
                        () = changed => (),
                        () = tokio::time::sleep_until(end) => core.expire_leases(),
                    },
                }
            }
        }
    };
    core.tasks.spawn(async move {
        let _: Option<Infallible> = kill.run_until_cancelled(looping).await;
    });
}
