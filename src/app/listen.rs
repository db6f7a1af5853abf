//! Listeners, as the servers of both libraries want them.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::server::Connected;

use crate::clock::Clock;
use crate::knobs::{EngineTlsKnobs, TlsFiles, TlsKnobs};
use crate::telemetry::Metrics;
use crate::tls::{self, ClientFiles, Connection, EngineTls, Incoming, Listener, Server, TlsError};

/// TLS of all listeners.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    pub(super) grpc: Option<Arc<Server>>,
    pub(super) http: Option<Arc<Server>>,
    pub(super) front: Option<Arc<Server>>,
}

impl Tls {
    /// Reads the files. What is wrong with one of them refuses the start.
    pub(super) fn load(knobs: &TlsKnobs, front: bool, metrics: &Arc<Metrics>, clock: Clock) -> Result<Tls> {
        let server = |listener: Listener, files: &Option<TlsFiles>| {
            files.as_ref().map(|files| Server::load(listener, files, metrics, clock)).transpose()
        };
        if knobs.front.is_some() && !front {
            tracing::warn!("TLS is set up for the front, which is not open: see --front-bind-address");
        }
        Ok(Tls {
            grpc: server(Listener::Grpc, &knobs.grpc)?,
            http: server(Listener::Http, &knobs.http)?,
            front: if front { server(Listener::Front, &knobs.front)? } else { None },
        })
    }

    fn servers(&self) -> impl Iterator<Item = &Arc<Server>> {
        [&self.grpc, &self.http, &self.front].into_iter().flatten()
    }

    /// What is wrong with the files as they are now, one sentence each.
    pub(super) fn problems(&self) -> Vec<String> {
        self.servers().filter_map(|server| server.problem()).collect()
    }

    /// Keeps looking at the files.
    pub(super) fn watch(&self, tasks: TaskTracker, stop: CancellationToken) -> impl Future<Output = ()> + Send + use<> {
        tls::watch(self.servers().cloned().collect(), tls::LOOK_INTERVAL, tasks, stop)
    }
}

/// TLS towards engines. What was asked for and cannot be had refuses the start; where nothing was, a machine that trusts
/// nobody only lacks TLS.
pub(super) fn engine_tls(knobs: &EngineTlsKnobs) -> Result<Option<EngineTls>> {
    let files = ClientFiles { authorities: knobs.ca.clone(), skip_verify: knobs.skip_verify, ..ClientFiles::default() };
    match EngineTls::load(&files, knobs.server_name.as_deref()) {
        Ok(tls) => Ok(Some(tls)),
        Err(TlsError::NoAuthorities) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// For axum.
#[derive(Debug)]
pub(super) struct Pages(pub(super) Incoming);

impl axum::serve::Listener for Pages {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        self.0.accept().await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// For tonic.
pub(super) fn streams(incoming: Incoming) -> impl Stream<Item = Result<Connection, Infallible>> + Send {
    futures_util::stream::unfold(incoming, async |mut incoming| {
        let (connection, _) = incoming.accept().await;
        Some((Ok(connection), incoming))
    })
}

/// Nobody asks where Envoy's connections come from.
impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}
