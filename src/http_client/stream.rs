//! Connections to engines that look, before a request goes over them again, whether the engine has closed them.
//!
//! hyper takes an idle connection for usable until it has read the engine's close, and tokio reads it after its next
//! look at epoll. A process that was stopped, or is just very busy, can send a request in between: into a socket whose
//! other end is gone. Nobody reads such a request, but from its failure alone that cannot be told. So the kernel is asked
//! before the first byte is written, and a request that is stopped there may be sent again.

use std::io;
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use futures_util::TryFutureExt as _;
use futures_util::future::MapOk;
use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use tokio_util::sync::{CancellationToken, DropGuard};
// Tower's, which hyper-util's connectors are.
use tower_service::Service;

use crate::tls::{Dialer, Dialled};

/// Why a request was not written: its connection is closed, and nothing of it was sent.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the engine had closed the connection before the request was sent")]
struct ClosedBefore;

/// Whether an error says that the engine had closed the connection before a byte of the request was sent.
pub(super) fn closed_before(error: &(dyn std::error::Error + 'static)) -> bool {
    let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    inner.is_some_and(<dyn std::error::Error + Send + Sync>::is::<ClosedBefore>)
}

/// What is known of a connection when it is over. Travels with what hyper tells of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Life {
    /// Cancelled when the stream is dropped.
    ended: CancellationToken,
    /// Requests that were handed to the connection. They follow one another.
    handed: Arc<AtomicU64>,
    /// Requests of which something was written.
    begun: Arc<AtomicU64>,
}

impl Life {
    /// A request was handed to the connection: ends when the connection ends without having begun to write it.
    pub(super) async fn lost(&self) {
        let handed = self.handed.fetch_add(1, Ordering::AcqRel) + 1;
        self.ended.cancelled().await;
        if self.begun.load(Ordering::Acquire) >= handed {
            // hyper tells how it went.
            std::future::pending::<()>().await;
        }
    }
}

/// Opens [`EngineStream`]s.
#[derive(Clone, Debug)]
pub(super) struct EngineConnector(pub Dialer);

impl Service<Uri> for EngineConnector {
    type Response = EngineStream;
    type Error = <Dialer as Service<Uri>>::Error;
    type Future = MapOk<<Dialer as Service<Uri>>::Future, fn(Dialled) -> EngineStream>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        self.0.call(uri).map_ok(EngineStream::new)
    }
}

/// Where a connection is between requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    /// Nothing yet: it has just been opened.
    Nothing,
    /// Part of a request.
    Part,
    /// Whole requests. hyper flushes when it has written all that it has, and a body of one piece is all there is.
    Whole,
}

/// A connection to an engine. Only for requests whose body is one piece.
#[derive(Debug)]
pub(super) struct EngineStream {
    stream: Dialled,
    sent: Sent,
    _ended: DropGuard,
    life: Life,
}

impl EngineStream {
    fn new(stream: Dialled) -> EngineStream {
        let life = Life::default();
        EngineStream { stream, sent: Sent::Nothing, _ended: life.ended.clone().drop_guard(), life }
    }

    /// Asks the kernel and not tokio, which only knows what the last look at epoll has told it. Between requests an
    /// engine has nothing to say, so whatever there is to read means that the connection cannot be used.
    fn is_closed(&self) -> bool {
        // Without a descriptor to spare nothing is known, as it would be without this check.
        let Ok(descriptor) = self.stream.tcp().as_fd().try_clone_to_owned() else { return false };
        match std::net::TcpStream::from(descriptor).peek(&mut [0]) {
            Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
            Ok(_) => true,
        }
    }

    /// Writes with `write`, unless that began a request on a connection that is closed.
    fn write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut Dialled>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let again = self.sent == Sent::Whole;
        if again && self.is_closed() {
            return Poll::Ready(Err(io::Error::other(ClosedBefore)));
        }
        match write(Pin::new(&mut self.stream), context) {
            Poll::Ready(Ok(length)) => {
                if self.sent != Sent::Part {
                    self.life.begun.fetch_add(1, Ordering::AcqRel);
                }
                self.sent = Sent::Part;
                Poll::Ready(Ok(length))
            }
            // The kernel took nothing of it.
            Poll::Ready(Err(_)) if again && self.stream.writes_at_once() => {
                Poll::Ready(Err(io::Error::other(ClosedBefore)))
            }
            other => other,
        }
    }
}

impl Connection for EngineStream {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(self.life.clone())
    }
}

impl Read for EngineStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl Write for EngineStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.write(context, |stream, context| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(context, |stream, context| stream.poll_write_vectored(context, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        if self.sent == Sent::Part && matches!(flushed, Poll::Ready(Ok(()))) {
            self.sent = Sent::Whole;
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
