//! A connection whose peer must take in what is sent to it.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// Fails writes that make no progress for `limit`. Without it a client that never reads, and never leaves, would hold a
/// decode pod, a request and a socket for ever.
#[derive(Debug)]
pub struct StallGuard<S, F> {
    stream: S,
    limit: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
    /// Told when the limit was reached.
    stalled: F,
}

impl<S, F: FnMut() + Unpin> StallGuard<S, F> {
    /// Guards `stream`.
    pub fn new(stream: S, limit: Duration, stalled: F) -> StallGuard<S, F> {
        StallGuard { stream, limit, waiting: None, stalled }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let limit = self.limit;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        if waiting.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.waiting = None;
        (self.stalled)();
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer takes nothing in")))
    }
}

impl<S: AsyncRead + Unpin, F: FnMut() + Unpin> AsyncRead for StallGuard<S, F> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin, F: FnMut() + Unpin> AsyncWrite for StallGuard<S, F> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Under TLS the last words have to be written as well.
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.watch(cx, shut)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const LIMIT: Duration = Duration::from_mins(1);

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stops_is_given_up_after_the_limit() {
        let (client, server) = tokio::io::duplex(4);
        let mut stalls = 0;
        let mut server = StallGuard::new(server, LIMIT, || stalls += 1);
        let clock = crate::clock::Clock::system();
        let started = clock.now();
        let error = server.write_all(b"more than four").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let waited = clock.now().since(started);
        assert!((LIMIT..LIMIT + Duration::from_secs(1)).contains(&waited), "{waited:?}");
        drop((client, server));
        assert_eq!(stalls, 1);
    }

    /// A connection that cannot be closed, as one under TLS whose peer has stopped to read.
    struct Stuck;

    impl AsyncWrite for Stuck {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Pending
        }
        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    impl AsyncRead for Stuck {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_cannot_be_closed_is_given_up() {
        let mut stalls = 0;
        let error = StallGuard::new(Stuck, LIMIT, || stalls += 1).shutdown().await.unwrap_err();
        assert_eq!((error.kind(), stalls), (io::ErrorKind::TimedOut, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_is_waited_for() {
        let (mut client, server) = tokio::io::duplex(4);
        let mut server = StallGuard::new(server, LIMIT, || panic!("stalled"));
        let slow = async {
            let mut read = Vec::new();
            while read.len() < 12 {
                tokio::time::sleep(LIMIT * 9 / 10).await;
                let mut four = [0; 4];
                client.read_exact(&mut four).await.unwrap();
                read.extend_from_slice(&four);
            }
            read
        };
        let (read, written) = tokio::join!(slow, server.write_all(b"0123456789ab"));
        written.unwrap();
        assert_eq!(read, b"0123456789ab");
    }
}
