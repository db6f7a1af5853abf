//! Connections to engines: in the clear, or over TLS where a pod's manifest asks for it.

use std::error::Error as StdError;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
// Tower's, which hyper-util's connectors are.
use tower_service::Service;

use super::{ClientFiles, TlsError, client};

/// Whom the gateway believes among engines, and by which name.
#[derive(Clone, Debug)]
pub struct EngineTls {
    config: Arc<ClientConfig>,
    /// What certificates have to name; `None` = the address that is dialled.
    name: Option<ServerName<'static>>,
}

impl EngineTls {
    /// Reads the files.
    pub fn load(files: &ClientFiles, server_name: Option<&str>) -> Result<EngineTls, TlsError> {
        let name = server_name.map(|name| ServerName::try_from(name.to_owned())).transpose();
        let name = name.map_err(|_| TlsError::Other("the server name of engines is no name".to_owned()))?;
        Ok(EngineTls { config: client(files, b"http/1.1")?, name })
    }
}

/// No connection came about.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// TCP.
    #[error("connecting")]
    Connect(#[source] Box<dyn StdError + Send + Sync>),
    /// The handshake: most of all, a certificate that is not believed.
    #[error("TLS handshake")]
    Handshake(#[source] std::io::Error),
    /// The engine does not answer the handshake.
    #[error("no TLS handshake in time")]
    Silent,
    /// The engine wants TLS, and this gateway knows no authorities.
    #[error("TLS to engines is not set up: no certificate authorities")]
    NoTls,
    /// The host is neither an address nor a name.
    #[error("the host has no name that a certificate could hold")]
    NoName,
}

/// Opens connections for `http` and `https`.
#[derive(Clone, Debug)]
pub struct Dialer {
    tcp: HttpConnector,
    tls: Option<EngineTls>,
    timeout: Duration,
}

impl Dialer {
    /// One that gives up after `timeout`, for each of TCP and TLS.
    pub fn new(timeout: Duration, tls: Option<EngineTls>) -> Dialer {
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(timeout));
        tcp.enforce_http(false);
        Dialer { tcp, tls, timeout }
    }
}

impl Service<Uri> for Dialer {
    type Response = Dialled;
    type Error = DialError;
    type Future = BoxFuture<'static, Result<Dialled, DialError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        self.tcp.poll_ready(context).map_err(|error| DialError::Connect(Box::new(error)))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let over_tls = uri.scheme_str() == Some("https");
        let (tls, timeout) = (self.tls.clone(), self.timeout);
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
        let connecting = self.tcp.call(uri);
        Box::pin(async move {
            let tls = if over_tls { Some(tls.ok_or(DialError::NoTls)?) } else { None };
            let tcp = connecting.await.map_err(|error| DialError::Connect(Box::new(error)))?;
            let Some(tls) = tls else { return Ok(Dialled::Plain(tcp)) };
            let name = match tls.name {
                Some(name) => name,
                None => ServerName::try_from(host).map_err(|_| DialError::NoName)?,
            };
            let shaking = TlsConnector::from(tls.config).connect(name, tcp.into_inner());
            let stream = tokio::time::timeout(timeout, shaking).await.map_err(|_| DialError::Silent)?;
            Ok(Dialled::Tls(TokioIo::new(Box::new(stream.map_err(DialError::Handshake)?))))
        })
    }
}

/// A connection to an engine.
#[derive(Debug)]
pub enum Dialled {
    /// In the clear.
    Plain(TokioIo<TcpStream>),
    /// Over TLS.
    Tls(TokioIo<Box<TlsStream<TcpStream>>>),
}

impl Dialled {
    /// The TCP connection under it.
    pub fn tcp(&self) -> &TcpStream {
        match self {
            Dialled::Plain(stream) => stream.inner(),
            Dialled::Tls(stream) => stream.inner().get_ref().0,
        }
    }

    /// Whether what a failed write has taken is known to be nothing: TLS writes records, some of which may be gone.
    pub fn writes_at_once(&self) -> bool {
        matches!(self, Dialled::Plain(_))
    }
}

impl Connection for Dialled {
    fn connected(&self) -> Connected {
        self.tcp().connected()
    }
}

impl Read for Dialled {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Dialled::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Dialled::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl Write for Dialled {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        match self.get_mut() {
            Dialled::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Dialled::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        match self.get_mut() {
            Dialled::Plain(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            Dialled::Tls(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Dialled::Plain(stream) => stream.is_write_vectored(),
            Dialled::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Dialled::Plain(stream) => Pin::new(stream).poll_flush(context),
            Dialled::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Dialled::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Dialled::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
