//! The other side of an exchange, as the driver sees it.

use std::future::Future;

use futures_util::future::BoxFuture;
use http::{HeaderMap, Method};

use crate::exchange::{Adapter, Effect, Event, RoutePlan};

/// What a peer says.
#[derive(Debug)]
pub enum Incoming {
    /// The head of the request.
    Head {
        /// The method.
        method: Method,
        /// Path with query.
        path: String,
        /// All headers but the pseudo headers.
        headers: HeaderMap,
        /// No body follows.
        end: bool,
    },
    /// Anything else.
    Event(Event),
}

/// One side of an exchange: an ext_proc stream, or a connection of the HTTP front.
pub trait Peer: Send + 'static {
    /// Which adapter this is.
    const ADAPTER: Adapter;

    /// The next thing that happens there. Must be safe to drop and call again.
    fn next(&mut self) -> impl Future<Output = Incoming> + Send;

    /// Carries out an effect that concerns the peer; ignores the others.
    fn apply(&mut self, effect: Effect) -> impl Future<Output = ()> + Send;

    /// Sends the request on.
    fn route(&mut self, plan: RoutePlan, trace_headers: HeaderMap) -> impl Future<Output = ()> + Send;

    /// After the end: the rest of sending a decode request that its pod may not have got whole, when the peer is who
    /// sends it. Bounded in time by the peer.
    fn undelivered(&mut self) -> Option<BoxFuture<'static, ()>> {
        None
    }

    /// The exchange panicked: answer 500, or cut.
    fn crashed(&mut self) -> impl Future<Output = ()> + Send;
}
