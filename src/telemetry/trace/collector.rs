//! TLS towards the collector: one connector for both protocols.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use opentelemetry_http::hyper::HyperClient;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::transport::{Channel, Endpoint};
use tower_service::Service;

use super::TracingError;
use crate::knobs::{OtelKnobs, OtlpTls};
use crate::tls::{ClientFiles, client};

/// Where `https` is when the endpoint names no port.
const HTTPS_PORT: u16 = 443;

/// A gRPC channel to an `https` endpoint. It connects when it is first used.
pub(super) fn channel(endpoint: &str, knobs: &OtelKnobs) -> Result<Channel, TracingError> {
    let bad = |_| TracingError::Endpoint;
    let origin: Uri = endpoint.parse().map_err(|_| TracingError::Endpoint)?;
    let authority = origin.authority().ok_or(TracingError::Endpoint)?.as_str();
    // The library would begin TLS of its own on what the connector brings; the origin tells the collector the truth.
    let endpoint = Endpoint::from_shared(format!("http://{authority}")).map_err(bad)?;
    let endpoint = endpoint.origin(origin).timeout(knobs.timeout).connect_timeout(knobs.timeout);
    Ok(endpoint.connect_with_connector_lazy(Connector::new(&knobs.tls, b"h2")?))
}

/// A client for OTLP over HTTP to an `https` endpoint.
pub(super) fn http_client(knobs: &OtelKnobs) -> Result<HyperClient<Connector>, TracingError> {
    Ok(HyperClient::new(Connector::new(&knobs.tls, b"http/1.1")?, knobs.timeout, None))
}

/// Connects to the authority of a URI, whatever its scheme, over TLS.
#[derive(Clone)]
pub(super) struct Connector {
    config: Arc<ClientConfig>,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").finish_non_exhaustive()
    }
}

impl Connector {
    fn new(tls: &OtlpTls, protocol: &[u8]) -> Result<Connector, TracingError> {
        let files = ClientFiles {
            authorities: tls.authorities.clone(),
            cert: tls.client_cert.clone(),
            key: tls.client_key.clone(),
            skip_verify: tls.skip_verify,
        };
        Ok(Connector { config: client(&files, protocol)? })
    }
}

impl Service<Uri> for Connector {
    type Response = Secured;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Secured>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = TlsConnector::from(Arc::clone(&self.config));
        Box::pin(async move {
            let host = uri.host().unwrap_or_default();
            let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host).to_owned();
            let port = uri.port_u16().unwrap_or(HTTPS_PORT);
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            let name = ServerName::try_from(host).map_err(io::Error::other)?;
            // The exporter's own time-out bounds connecting and this.
            Ok(Secured(TokioIo::new(connector.connect(name, stream).await?)))
        })
    }
}

/// A connection after its handshake.
pub(super) struct Secured(TokioIo<TlsStream<TcpStream>>);

impl Connection for Secured {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for Secured {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl Write for Secured {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bufs)
    }
}
