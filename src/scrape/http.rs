//! Fetching a metrics page over HTTP/1.1.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};

use crate::fleet::scheme_of;
use crate::http_client::{HttpClient, Pooling};
use crate::knobs::ScrapeKnobs;
use crate::tls::EngineTls;

/// An idle connection is dropped before the engine's server does it: uvicorn closes after 5 s.
const IDLE: Duration = Duration::from_secs(4);

/// Why a page could not be had. Every kind counts as one failed scrape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The address makes no URL.
    #[error("no valid url: {0}")]
    Address(String),
    /// Connecting, sending or receiving failed.
    #[error("transport: {0}")]
    Transport(String),
    /// Any status but 200.
    #[error("status {0}")]
    Status(StatusCode),
    /// The page is longer than the limit, or broke off.
    #[error("body: {0}")]
    Body(String),
    /// Not done in time.
    #[error("timed out")]
    Timeout,
}

/// Where pages come from: the network, or a test.
pub trait PageSource: Send + Sync + 'static {
    /// Gets the page at `{address}{path}`, in the clear unless `https://` is before it. Dropping the future gives the attempt up.
    fn fetch(&self, address: &str, path: &'static str) -> impl Future<Output = Result<Bytes, FetchError>> + Send;
}

/// Pages over HTTP, from a pool with one idle connection for each pod.
#[derive(Debug)]
pub struct HttpPages {
    client: HttpClient<Empty<Bytes>>,
    max_bytes: usize,
}

impl HttpPages {
    /// A client with the given limits. The scraper itself watches over the time of the whole exchange.
    pub fn new(knobs: &ScrapeKnobs, tls: Option<EngineTls>) -> HttpPages {
        let pooling = Pooling { idle_per_host: 1, idle_time: IDLE, connect_timeout: knobs.timeout };
        let client = HttpClient::new(pooling, tls);
        HttpPages { client, max_bytes: knobs.max_bytes }
    }
}

impl PageSource for HttpPages {
    async fn fetch(&self, address: &str, path: &'static str) -> Result<Bytes, FetchError> {
        let (scheme, address) = scheme_of(address);
        let uri: Uri = format!("{scheme}://{address}{path}")
            .parse()
            .map_err(|error: http::uri::InvalidUri| FetchError::Address(error.to_string()))?;
        let request = Request::get(uri)
            .header(http::header::ACCEPT, "text/plain;version=0.0.4")
            .body(Empty::new())
            .map_err(|error| FetchError::Address(error.to_string()))?;
        let response = self.client.request(request).await.map_err(|error| FetchError::Transport(error.to_string()))?;
        if response.status() != StatusCode::OK {
            return Err(FetchError::Status(response.status()));
        }
        let body = Limited::new(response.into_body(), self.max_bytes);
        #[expect(clippy::disallowed_methods, reason = "limited above")]
        let collected = body.collect().await.map_err(|error| FetchError::Body(error.to_string()))?;
        Ok(collected.to_bytes())
    }
}
