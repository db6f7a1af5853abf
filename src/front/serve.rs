//! Accepting connections.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use hyper::body::Incoming as HyperBody;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::peer::{FrontBody, FrontPeer, error_response, full};
use crate::drive::Driver;
use crate::error::{ApiError, Reason};

/// A client that takes longer to send its request head is cut off.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a failed accept (out of file descriptors), so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves the front until `stop`; then accepts no more, and connections end with their current request.
/// `models` answers `GET /v1/models`.
pub async fn serve(
    listener: TcpListener,
    driver: Arc<Driver>,
    models: Arc<dyn Fn() -> Bytes + Send + Sync>,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let (driver, models, stop) = (Arc::clone(&driver), Arc::clone(&models), stop.clone());
        tasks.spawn(async move {
            let service = service_fn(|request| {
                let (driver, models) = (Arc::clone(&driver), Arc::clone(&models));
                async move { Ok::<_, Infallible>(handle(request, &driver, &*models).await) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
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
        });
    }
}

async fn handle(
    request: Request<HyperBody>,
    driver: &Arc<Driver>,
    models: &(dyn Fn() -> Bytes + Send + Sync),
) -> Response<FrontBody> {
    if request.uri().path() == "/v1/models" && request.method() == Method::GET {
        let mut response = Response::new(full(models()));
        response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
        return response;
    }
    let (respond, response) = oneshot::channel();
    driver.spawn(FrontPeer::new(request, driver.client().clone(), respond), HeaderMap::new());
    response.await.unwrap_or_else(|_| error_response(&ApiError::new(Reason::Internal, "internal error")))
}
