//! The seam to the simulated engines: what the rest of the harness needs to know about something that serves
//! requests. The scripted server of `raw` fits in as well.

use std::net::SocketAddr;

use super::raw::RawServer;

/// A server that pods can stand for.
pub trait Backend {
    /// Where it listens.
    fn address(&self) -> SocketAddr;

    /// Requests that it is working on, or believes to be.
    fn open_requests(&self) -> usize;
}

impl Backend for RawServer {
    fn address(&self) -> SocketAddr {
        RawServer::address(self)
    }

    fn open_requests(&self) -> usize {
        self.connections().iter().filter(|connection| !connection.done && !connection.closed_by_peer).count()
    }
}
