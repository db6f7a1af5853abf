//! The prefill call: one HTTP/1.1 exchange with one pod. Dropping the future closes the connection, which is how an
//! engine learns that nobody waits any more.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};

use crate::fleet::scheme_of;
use crate::http_client::{HttpClient, Pooling, RequestError};
/// Why a prefill leg failed.
pub use crate::telemetry::PrefillFailureClass as LegFailure;
use crate::telemetry::PrefillOutcome;
use crate::tls::EngineTls;

/// How a prefill leg ended.
#[derive(Clone, Debug)]
pub enum LegOutcome {
    /// The pod answered; any status.
    Answered {
        /// Its status.
        status: StatusCode,
        /// What it says about trying again, when it is a refusal; see [`advice`].
        advice: HeaderMap,
        /// Its whole body.
        body: Bytes,
    },
    /// It did not.
    Failed {
        /// The class.
        class: LegFailure,
        /// For the log and, shortened, for the client. Names no address.
        detail: String,
        /// Whether the pod may have read something of the call: `false` only when there never was a connection.
        sent: bool,
    },
}

impl LegOutcome {
    /// There never was a connection, so that the pod knows nothing of the call.
    pub fn never_sent(&self) -> bool {
        matches!(self, LegOutcome::Failed { sent: false, .. })
    }

    /// The class of a failed leg. An answer of 200 that got here could not be used.
    pub fn failure_class(&self) -> LegFailure {
        match self {
            LegOutcome::Failed { class, .. } => *class,
            LegOutcome::Answered { status: StatusCode::OK, .. } => LegFailure::BadResponse,
            LegOutcome::Answered { .. } => LegFailure::HttpStatus,
        }
    }

    /// How the metrics of the leg count a failure.
    pub fn metric_outcome(&self) -> PrefillOutcome {
        match self {
            LegOutcome::Answered { status, .. } if *status != StatusCode::OK => {
                PrefillOutcome::HttpError(status.as_u16())
            }
            LegOutcome::Failed { class: LegFailure::Timeout, .. } => PrefillOutcome::DeadlineExceeded,
            LegOutcome::Failed { class: LegFailure::Canceled, .. } => PrefillOutcome::Canceled,
            LegOutcome::Answered { .. } | LegOutcome::Failed { .. } => PrefillOutcome::Error,
        }
    }
}

/// The call to make.
#[derive(Clone, Debug)]
pub struct LegRequest {
    /// `host:port`, IPv6 in brackets; over TLS, with `https://` before it.
    pub address: std::sync::Arc<str>,
    /// Path with query.
    pub path: String,
    /// Complete headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// Bound on the whole exchange.
    pub timeout: Duration,
    /// Bound on the answer, bytes.
    pub max_answer_bytes: usize,
}

/// How long a connection may have been idle to be used again. A request that meets an engine closing its connection fails,
/// and must not be sent twice, since nobody can tell whether it was read (unless the close is there before a byte is
/// sent: see [`crate::http_client`]). So this lies far below the keep-alive time of
/// any usual server (gunicorn: 2 s, uvicorn: 5 s) and only serves pods that are busy; to the others, connecting is cheap.
const POOL_IDLE: Duration = Duration::from_millis(500);
/// A pod that does not even accept a connection for this long is not there.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle connections kept for one pod.
const POOL_PER_HOST: usize = 64;

/// An HTTP client for engines. Cheap to clone; clones share the pool.
#[derive(Clone, Debug)]
pub struct EngineClient {
    http: Arc<ArcSwap<HttpClient<Full<Bytes>>>>,
    tls: Option<EngineTls>,
}

impl Default for EngineClient {
    fn default() -> Self {
        EngineClient::new()
    }
}

fn client(tls: Option<EngineTls>) -> HttpClient<Full<Bytes>> {
    let pooling = Pooling { idle_per_host: POOL_PER_HOST, idle_time: POOL_IDLE, connect_timeout: CONNECT_TIMEOUT };
    HttpClient::new(pooling, tls)
}

impl EngineClient {
    /// A client with its own pool, for engines that speak in the clear.
    pub fn new() -> EngineClient {
        EngineClient::with_tls(None)
    }

    /// The same, and for addresses that begin with `https://`.
    pub fn with_tls(tls: Option<EngineTls>) -> EngineClient {
        EngineClient { http: Arc::new(ArcSwap::from_pointee(client(tls.clone()))), tls }
    }

    /// Uses none of the connections again that there are now. For a process that was stopped, or whose machine was: what
    /// its clock takes for a moment may have been an hour, and the engines have closed them, perhaps unheard.
    pub fn forget_connections(&self) {
        self.http.store(Arc::new(client(self.tls.clone())));
    }

    /// Sends a POST and hands out the answer as it streams. Used for the decode leg of the HTTP front.
    pub async fn post(
        &self,
        address: &str,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<http::Response<hyper::body::Incoming>, LegError> {
        self.send(build(Method::POST, address, path, headers, body)?).await
    }

    /// The same by another method.
    pub async fn call(
        &self,
        method: Method,
        address: &str,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<http::Response<hyper::body::Incoming>, LegError> {
        self.send(build(method, address, path, headers, body)?).await
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<http::Response<hyper::body::Incoming>, LegError> {
        let http = Arc::clone(&self.http.load());
        http.request(request).await.map_err(|error| LegError::from_client(&error))
    }

    /// Makes a prefill call.
    pub async fn prefill(&self, call: LegRequest) -> LegOutcome {
        let LegRequest { address, path, headers, body, timeout, max_answer_bytes } = call;
        let response = self.post(&address, &path, headers, body);
        outcome(response, timeout, max_answer_bytes).await
    }

    /// Sends a GET and reads the answer, `timeout` bounding the whole exchange. A redirect is an answer, and is not
    /// followed.
    pub async fn ask(
        &self,
        address: &str,
        path: &str,
        headers: HeaderMap,
        timeout: Duration,
        max_answer_bytes: usize,
    ) -> LegOutcome {
        let response = async { self.send(build(Method::GET, address, path, headers, Bytes::new())?).await };
        outcome(response, timeout, max_answer_bytes).await
    }
}

/// Waits for a response and reads it.
async fn outcome(
    response: impl Future<Output = Result<http::Response<hyper::body::Incoming>, LegError>>,
    timeout: Duration,
    max_answer_bytes: usize,
) -> LegOutcome {
    let exchange = async {
        let (head, body) = response.await?.into_parts();
        #[expect(clippy::disallowed_methods, reason = "limited here")]
        let body = Limited::new(body, max_answer_bytes).collect().await.map_err(|error| {
            let (class, detail) = if error.is::<LengthLimitError>() {
                (LegFailure::BadResponse, format!("answer longer than {max_answer_bytes} bytes"))
            } else {
                (LegFailure::Transport, "connection broke during the answer".to_owned())
            };
            LegError { class, detail, sent: true }
        })?;
        Ok(LegOutcome::Answered {
            status: head.status,
            advice: if head.status == StatusCode::OK { HeaderMap::new() } else { advice(&head.headers) },
            body: body.to_bytes(),
        })
    };
    match tokio::time::timeout(timeout, exchange).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(LegError { class, detail, sent })) => LegOutcome::Failed { class, detail, sent },
        Err(_) => LegOutcome::Failed {
            class: LegFailure::Timeout,
            detail: format!("no answer within {} s", timeout.as_secs_f64()),
            sent: true,
        },
    }
}

/// Headers by which a server tells a client when to try again, and how much it may ask for.
const ADVICE: [&str; 5] = ["retry-after", "retry-after-ms", "x-should-retry", "ratelimit", "ratelimit-policy"];

/// Beginnings of the names of others.
const ADVICE_PREFIXES: [&str; 3] = ["ratelimit-", "x-ratelimit-", "anthropic-ratelimit-"];

/// Most headers of that kind that are passed on, and the longest value, bytes.
const MAX_ADVICE: usize = 16;
const MAX_ADVICE_BYTES: usize = 256;

/// The headers of a refusal that the client gets from a prefill pod as it would from the pod that answers. Few and short
/// ones: an engine is no source to be trusted with memory.
pub fn advice(headers: &HeaderMap) -> HeaderMap {
    let is_advice =
        |name: &str| ADVICE.contains(&name) || ADVICE_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let advice = headers.iter().filter(|(name, value)| is_advice(name.as_str()) && value.len() <= MAX_ADVICE_BYTES);
    advice.take(MAX_ADVICE).map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// A call that brought no answer.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}: {detail}", class.label())]
pub struct LegError {
    /// The class.
    pub class: LegFailure,
    /// What happened, without addresses.
    pub detail: String,
    /// Whether the pod may have read something of the call: `false` only when there never was a connection.
    pub sent: bool,
}

impl LegError {
    fn from_client(error: &RequestError) -> LegError {
        LegError { class: LegFailure::Transport, detail: error.to_string(), sent: error.sent() }
    }
}

fn build(
    method: Method,
    address: &str,
    path: &str,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Request<Full<Bytes>>, LegError> {
    let refuse = |detail| LegError { class: LegFailure::RequestSetup, detail, sent: false };
    let setup = |error: http::Error| refuse(error.to_string());
    // Anything else would run into the authority: `http://10.0.0.1:8000` followed by `*`, or by `@evil`.
    if !path.starts_with('/') {
        return Err(refuse("the path does not start with /".to_owned()));
    }
    let (scheme, authority) = scheme_of(address);
    let uri = Uri::builder().scheme(scheme).authority(authority).path_and_query(path).build().map_err(setup)?;
    let mut request = Request::builder().method(method).uri(uri).body(Full::new(body)).map_err(setup)?;
    *request.headers_mut() = headers;
    Ok(request)
}

#[cfg(test)]
mod tests;
