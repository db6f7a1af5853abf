//! A listener with or without TLS.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::Error;
use tokio_rustls::server::TlsStream;

use super::reload::Server;

/// A client that takes longer for its handshake is cut off.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Handshakes at once, per listener: with rustls' buffers at most about 40 MB. Beyond it the oldest one is cut off:
/// an honest one is over within milliseconds, and so it is a silent one that goes.
const MAX_HANDSHAKES: usize = 512;
/// Pause after a failed accept (out of file descriptors), so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A connection that is ready for requests.
#[derive(Debug)]
pub enum Connection {
    /// As it came.
    Plain(TcpStream),
    /// After its handshake. Boxed: its buffers are large.
    Secure(Box<TlsStream<TcpStream>>),
}

/// Where connections come from.
#[derive(Debug)]
pub struct Incoming {
    listener: TcpListener,
    server: Option<Arc<Server>>,
    /// Handshakes at once, at most.
    places: usize,
    handshakes: JoinSet<Option<(Connection, SocketAddr)>>,
    /// Handles of handshakes that may be over.
    oldest_first: VecDeque<AbortHandle>,
}

impl Incoming {
    /// Connections of `listener`, behind TLS if there is a server for it.
    pub fn new(listener: TcpListener, server: Option<Arc<Server>>) -> Incoming {
        Incoming { listener, server, places: MAX_HANDSHAKES, handshakes: JoinSet::new(), oldest_first: VecDeque::new() }
    }

    /// The next connection that is ready. Nothing is lost when this is dropped before it is done. Dropping the whole
    /// ends all handshakes.
    pub async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                // Handshakes that failed have told already.
                Some(done) = self.handshakes.join_next() => match done {
                    Ok(Some(ready)) => return ready,
                    Ok(None) | Err(_) => continue,
                },
            };
            let Ok((stream, peer)) = accepted else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            // Answers are small and each is waited for: they must not linger in the kernel.
            let _ = stream.set_nodelay(true);
            match &self.server {
                None => return (Connection::Plain(stream), peer),
                Some(server) => {
                    let server = Arc::clone(server);
                    self.begin(server, stream, peer);
                }
            }
        }
    }

    /// The same with fewer places.
    #[cfg(test)]
    pub(super) fn with_places(self, places: usize) -> Incoming {
        Incoming { places, ..self }
    }

    /// The address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    fn begin(&mut self, server: Arc<Server>, stream: TcpStream, peer: SocketAddr) {
        if self.handshakes.len() >= self.places {
            while let Some(oldest) = self.oldest_first.pop_front() {
                if !oldest.is_finished() {
                    oldest.abort();
                    failed(&server, peer, "crowded", &"too many handshakes at once");
                    break;
                }
            }
        }
        if self.oldest_first.len() >= 2 * self.places {
            self.oldest_first.retain(|handshake| !handshake.is_finished());
        }
        let handshake = async move {
            let accepting = TlsAcceptor::from(server.config()).accept(stream);
            match tokio::time::timeout(HANDSHAKE_TIME, accepting).await {
                Ok(Ok(stream)) => Some((Connection::Secure(Box::new(stream)), peer)),
                Ok(Err(error)) => {
                    failed(&server, peer, reason(&error), &error);
                    None
                }
                Err(_) => {
                    failed(&server, peer, "timeout", &"not done in time");
                    None
                }
            }
        };
        self.oldest_first.push_back(self.handshakes.spawn(handshake));
    }
}

fn failed(server: &Server, peer: SocketAddr, reason: &'static str, detail: &dyn std::fmt::Display) {
    let listener = server.listener().name();
    server.metrics().tls_handshake_failed(listener, reason);
    tracing::debug!(listener, %peer, reason, %detail, "a TLS handshake failed");
}

/// The label of a handshake that failed: `client_certificate` (none, or not one of the authorities'), `refused` (the client
/// does not like ours), `protocol` (no TLS, or nothing in common), `closed` (the client went away).
fn reason(error: &io::Error) -> &'static str {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::NoCertificatesPresented | Error::InvalidCertificate(_)) => "client_certificate",
        Some(Error::AlertReceived(_)) => "refused",
        Some(_) => "protocol",
        None => "closed",
    }
}

/// What a server tells apart in its failures.
pub(super) const REASONS: [&str; 6] = ["client_certificate", "refused", "protocol", "closed", "timeout", "crowded"];

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Connection::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Connection::Secure(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Connection::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Connection::Secure(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Connection::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Connection::Secure(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Connection::Plain(stream) => stream.is_write_vectored(),
            Connection::Secure(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Connection::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Connection::Secure(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Connection::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Connection::Secure(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
