//! An HTTP/1.1 client with a pool of connections, towards engines.
//!
//! A request whose connection ends before a byte of it was sent goes over a new connection, once: nothing has seen it.
//! There are three ways to that. The engine had closed an idle connection unheard (see [`stream`]). Or hyper gives the
//! request back, because its connection ended while the request waited to be written. Or hyper loses it: a request that is
//! handed to a connection in the instant in which that ends can enter the queue between the two tasks after the queue was
//! emptied for the last time, and its response is then waited for without end. So it is counted what is handed to a
//! connection and what it begins to write, and a request that was not begun when its connection is over is not waited for.

mod stream;

use std::error::Error as StdError;
use std::time::Duration;

use bytes::Bytes;
use http::{Extensions, Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::{Connected, capture_connection};
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioTimer};

use stream::{EngineConnector, Life, closed_before};

use crate::tls::{Dialer, EngineTls};

/// How many connections a client keeps, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Pooling {
    /// Idle connections kept for one address.
    pub idle_per_host: usize,
    /// How long a connection may have been idle to be used again.
    pub idle_time: Duration,
    /// An address that does not accept a connection for this long is not there.
    pub connect_timeout: Duration,
}

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No connection could be opened.
    #[error("{}", root_cause(.0))]
    Connect(legacy::Error),
    /// Connections were opened and ended before a byte of the request was sent.
    #[error("the connection was closed before the request was sent")]
    Unsent,
    /// The request, or a part of it, was sent.
    #[error("request failed: {}", root_cause(.0))]
    Sent(legacy::Error),
}

impl RequestError {
    /// Whether the other side may have read something of the request.
    pub fn sent(&self) -> bool {
        matches!(self, RequestError::Sent(_))
    }
}

/// The client. Cheap to clone; clones share the pool. Bodies must be of one piece.
#[derive(Clone, Debug)]
pub struct HttpClient<B> {
    pooling: Client<EngineConnector, B>,
    /// Never uses a connection twice.
    fresh: Client<EngineConnector, B>,
}

impl<B> HttpClient<B>
where
    B: Body<Data = Bytes> + Clone + Send + Unpin + 'static,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    /// A client with its own pool.
    pub fn new(pooling: Pooling, tls: Option<EngineTls>) -> HttpClient<B> {
        let fresh = client(Pooling { idle_per_host: 0, ..pooling }, tls.clone());
        HttpClient { pooling: client(pooling, tls), fresh }
    }

    /// Sends a request, over a connection of the pool if there is one, and waits for the response's head. Dropping the
    /// future closes the connection.
    pub async fn request(&self, request: Request<B>) -> Result<Response<Incoming>, RequestError> {
        let again = request.clone();
        match exchange(&self.pooling, request).await {
            Err(RequestError::Unsent) => exchange(&self.fresh, again).await,
            answered => answered,
        }
    }
}

fn client<B>(pooling: Pooling, tls: Option<EngineTls>) -> Client<EngineConnector, B>
where
    B: Body + Send,
    B::Data: Send,
{
    Client::builder(TokioExecutor::new())
        .pool_idle_timeout(pooling.idle_time)
        .pool_max_idle_per_host(pooling.idle_per_host)
        .pool_timer(TokioTimer::new())
        // One request, one connection: else its end would not be the request's.
        .retry_canceled_requests(false)
        .build(EngineConnector(Dialer::new(pooling.connect_timeout, tls)))
}

/// One request over one connection.
async fn exchange<B>(
    client: &Client<EngineConnector, B>,
    mut request: Request<B>,
) -> Result<Response<Incoming>, RequestError>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    let mut connection = capture_connection(&mut request);
    let lost = async {
        let life = {
            let connected = connection.wait_for_connection_metadata().await;
            connected.as_ref().and_then(life_of)
        };
        match life {
            Some(life) => life.lost().await,
            None => std::future::pending().await,
        }
    };
    unless_lost(client.request(request), lost).await?.map_err(classified)
}

async fn unless_lost<T>(answer: impl Future<Output = T>, lost: impl Future<Output = ()>) -> Result<T, RequestError> {
    tokio::select! {
        // The answer first: with it there, nothing is lost.
        biased;
        answer = answer => Ok(answer),
        () = lost => Err(RequestError::Unsent),
    }
}

fn life_of(connected: &Connected) -> Option<Life> {
    let mut extras = Extensions::new();
    connected.get_extras(&mut extras);
    extras.remove::<Life>()
}

fn classified(error: legacy::Error) -> RequestError {
    if error.is_connect() {
        return RequestError::Connect(error);
    }
    // hyper cancels only what it has not begun to write.
    let canceled =
        sources(&error).any(|error| error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled));
    if canceled || sources(&error).any(closed_before) { RequestError::Unsent } else { RequestError::Sent(error) }
}

fn sources<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn StdError + 'static)| (*error).source())
}

/// The innermost cause: "Connection refused (os error 111)" says more than "client error (Connect)".
fn root_cause(error: &(dyn StdError + 'static)) -> String {
    sources(error).last().map(ToString::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests;
