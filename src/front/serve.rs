//! Accepting connections.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::EXPECT;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming as HyperBody;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::util::option_layer;
use tower::{Layer as _, service_fn};

use super::body::{FrontBody, full};
use super::cors;
use super::peer::{FrontPeer, Reply, error_response};
use super::stall::StallGuard;
use crate::drive::Driver;
use crate::error::{ApiError, Reason};
use crate::exchange::Budget;
use crate::panics::guarded;
use crate::telemetry::Limit;
use crate::tls::Incoming;

/// A client that takes longer to send its request head is cut off; so is a connection without a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// A longer request head gets 431, and no more than this is buffered of one connection in either direction, bytes. What
/// arrives together may exceed it once.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// Longest pause and longest time for which, and most bytes that, a refused client may still send; see [`discard`].
const DISCARD_PAUSE: Duration = Duration::from_secs(1);
const DISCARD_TIME: Duration = Duration::from_secs(10);
const DISCARD_BYTES: usize = 128 << 20;

/// Answers `GET /v1/models` and, with an id, `GET /v1/models/{id}`: a status and JSON.
pub type Models = dyn Fn(Option<&str>) -> (StatusCode, Bytes) + Send + Sync;

/// Serves the front until `stop`; then accepts no more, and connections end with their current request.
pub async fn serve(
    mut incoming: Incoming,
    driver: Arc<Driver>,
    models: Arc<Models>,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    let limits = driver.world().knobs.limits.clone();
    let cors = cors::layer(&limits.front_origins);
    let connections = Budget::new(limits.max_front_connections);
    loop {
        let (stream, _) = tokio::select! {
            accepted = incoming.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let metrics = Arc::clone(&driver.world().metrics);
        let Some(permit) = connections.permit() else {
            metrics.rejected(Limit::FrontConnections);
            continue;
        };
        let stream = StallGuard::new(stream, limits.front_stall_timeout, move || metrics.rejected(Limit::FrontStall));
        let (driver, models, stop) = (Arc::clone(&driver), Arc::clone(&models), stop.clone());
        let (discards, cors) = (tasks.clone(), cors.clone());
        let serving = async move {
            let _permit = permit;
            let service = service_fn(|request| {
                let (driver, models, discards) = (Arc::clone(&driver), Arc::clone(&models), discards.clone());
                async move { Ok::<_, Infallible>(handle(request, &driver, &*models, &discards).await) }
            });
            let service = TowerToHyperService::new(option_layer(cors).layer(service));
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .max_buf_size(MAX_HEAD_BYTES)
                .half_close(false)
                .serve_connection(TokioIo::new(stream), service);
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                _ = connection.as_mut() => {}
                () = stop.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    let _ = connection.await;
                }
            }
        };
        // A panic costs its connection.
        tasks.spawn(async move { guarded(serving).await });
    }
}

async fn handle(
    request: Request<HyperBody>,
    driver: &Arc<Driver>,
    models: &Models,
    discards: &TaskTracker,
) -> Response<FrontBody> {
    if let Some(id) = asks_for_models(&request) {
        let (status, page) = models(Some(id.as_str()).filter(|id| !id.is_empty()));
        let mut response = Response::new(full(page));
        *response.status_mut() = status;
        response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
        return response;
    }
    // Such a client sends nothing before it is asked to; reading on would ask.
    let waits = request.headers().contains_key(EXPECT);
    let (respond, response) = oneshot::channel();
    let body_timeout = driver.world().knobs.limits.front_body_timeout;
    driver.spawn(FrontPeer::new(request, body_timeout, driver.client().clone(), respond), HeaderMap::new());
    let Ok(Reply { response, unread }) = response.await else {
        return error_response(&ApiError::new(Reason::Internal, "internal error"));
    };
    if let Some(body) = unread.filter(|_| !waits) {
        discards.spawn(discard(body));
    }
    response
}

/// The model that `GET /v1/models…` asks for; empty = all of them. Names hold slashes, with or without escapes.
fn asks_for_models(request: &Request<HyperBody>) -> Option<String> {
    let rest = request.uri().path().strip_prefix("/v1/models").filter(|_| request.method() == Method::GET)?;
    let id = if rest.is_empty() { rest } else { rest.strip_prefix('/')? };
    Some(percent_encoding::percent_decode_str(id).decode_utf8_lossy().into_owned())
}

/// Reads on, and throws away, what a client sends that has its answer already. A connection that is closed with bytes
/// unread is reset, and the client would see the reset instead of the answer.
async fn discard(mut body: HyperBody) {
    let reading = async {
        let mut left = DISCARD_BYTES;
        while let Ok(Some(Ok(frame))) = tokio::time::timeout(DISCARD_PAUSE, body.frame()).await {
            let length = frame.data_ref().map_or(0, Bytes::len);
            if length > left {
                return;
            }
            left -= length;
        }
    };
    // Whoever is not done by then is cut off.
    let _ = tokio::time::timeout(DISCARD_TIME, reading).await;
}
