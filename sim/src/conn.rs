//! One accepted connection: HTTP/1.1 only, closed when idle for too long, cut on command.
//!
//! The client's disappearance is seen by the connection itself, in every phase: it then drops the handler's future or
//! the answer's body, and whatever they hold is given back on drop. A half-close counts as a disconnect, as with uvicorn.

use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fault::Cut;
use crate::record::End;

/// Longest request head, bytes; as in uvicorn's parser.
const LONGEST_HEAD: usize = 64 << 10;

const BY_CLIENT: u8 = 0;
const BY_FAULT: u8 = 1;
const BY_DEATH: u8 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct Activity {
    live: usize,
    served: u64,
}

/// What handlers may do to their connection.
#[derive(Debug)]
pub(crate) struct Conn {
    reset: AtomicBool,
    cause: AtomicU8,
    cut: CancellationToken,
    activity: watch::Sender<Activity>,
    idle: Mutex<Duration>,
}

impl Conn {
    fn new(idle: Duration) -> Conn {
        Conn {
            reset: AtomicBool::new(false),
            cause: AtomicU8::new(BY_CLIENT),
            cut: CancellationToken::new(),
            activity: watch::Sender::new(Activity::default()),
            idle: Mutex::new(idle),
        }
    }

    /// Cuts the connection; what it serves is recorded as [`End::Reset`].
    pub fn cut(&self, how: Cut) {
        self.cause.store(BY_FAULT, Ordering::Release);
        self.reset.store(how == Cut::Reset, Ordering::Release);
        self.cut.cancel();
    }

    /// Drops the connection because the client left.
    pub fn hang_up(&self) {
        self.cut.cancel();
    }

    /// Sets the idle time after which this connection is closed.
    pub fn set_idle(&self, idle: Duration) {
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = idle;
    }

    /// Why something that did not complete ended.
    pub fn end(&self) -> End {
        match self.cause.load(Ordering::Acquire) {
            BY_FAULT => End::Reset,
            BY_DEATH => End::Killed,
            _ => End::ClientGone,
        }
    }

    /// Marks a request as being served until the guard drops.
    pub fn busy(self: &Arc<Conn>) -> Busy {
        self.activity.send_modify(|activity| activity.live += 1);
        Busy { conn: self.clone() }
    }

    fn die(&self) {
        self.cause.store(BY_DEATH, Ordering::Release);
        self.reset.store(true, Ordering::Release);
    }

    /// Ends when the connection has served something and then was idle for its idle time.
    async fn idle(&self) {
        let mut activity = self.activity.subscribe();
        loop {
            let now = *activity.borrow_and_update();
            let idle = *self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if now.live > 0 || now.served == 0 {
                // The sender lives in `self`: no error is possible.
                let _ = activity.changed().await;
            } else {
                tokio::select! {
                    // A request that was read in the same moment is served, as by uvicorn.
                    biased;
                    _ = activity.changed() => (),
                    () = tokio::time::sleep(idle) => return,
                }
            }
        }
    }
}

/// A request being served.
#[derive(Debug)]
pub(crate) struct Busy {
    conn: Arc<Conn>,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.conn.activity.send_modify(|activity| {
            activity.live = activity.live.saturating_sub(1);
            activity.served += 1;
        });
    }
}

/// How the outside ends connections.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ending {
    /// Reset everything now.
    pub kill: CancellationToken,
    /// Finish what is being served, then close.
    pub drain: CancellationToken,
}

/// Serves one connection to its end.
pub(crate) async fn serve<F, R, B>(stream: TcpStream, idle: Duration, ending: Ending, handler: F)
where
    F: Fn(Arc<Conn>, Request<Incoming>) -> R,
    R: Future<Output = Response<B>>,
    B: http_body::Body + 'static,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    let conn = Arc::new(Conn::new(idle));
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(Socket { stream, conn: conn.clone() });
    let service = service_fn(|request| {
        let answer = handler(conn.clone(), request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let mut serving =
        pin!(http1::Builder::new().half_close(false).max_buf_size(LONGEST_HEAD).serve_connection(io, service));
    let mut draining = false;
    loop {
        tokio::select! {
            biased;
            () = ending.kill.cancelled() => { conn.die(); break; }
            () = conn.cut.cancelled() => break,
            // An error here is the client's: it left, or spoke something that is not HTTP/1.
            _ = serving.as_mut() => break,
            () = conn.idle() => break,
            () = ending.drain.cancelled(), if !draining => {
                draining = true;
                serving.as_mut().graceful_shutdown();
            }
        }
    }
}

/// The socket, which closes with a reset when its connection was told so.
#[derive(Debug)]
struct Socket {
    stream: TcpStream,
    conn: Arc<Conn>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.conn.reset.load(Ordering::Acquire) {
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
