//! The KV side channel: a small HTTP service of prefill engines, and the decode engine's client for it.
//!
//! `POST /pull`, `/extend` and `/free` take `{"engine_id", "request_id"}`. A pull answers 200 with the prompt's identity
//! and size, once; otherwise a 4xx with `{"error": reason}`. Real engines speak ZeroMQ and RDMA here: only what
//! a gateway can get wrong is kept.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;

use crate::ambient;
use crate::handoff::{NoPull, Pulled};
use crate::state::Core;

const LONGEST_MESSAGE: usize = 16 << 10;

/// Names one hand-off.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Key {
    engine_id: String,
    request_id: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Refusal {
    error: NoPull,
}

/// Answers one call.
pub(crate) async fn answer(core: Arc<Core>, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let (head, body) = request.into_parts();
    let body = Limited::new(body, LONGEST_MESSAGE).collect().await.map(http_body_util::Collected::to_bytes);
    let key = body.ok().and_then(|body| serde_json::from_slice::<Key>(&body).ok());
    let (status, body) = match key {
        Some(key) if head.method == Method::POST => decide(&core, head.uri.path(), &key),
        _ => (400, Vec::new()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
    response
}

fn decide(core: &Core, path: &str, key: &Key) -> (u16, Vec<u8>) {
    core.expire_leases();
    let refuse = |error| (409, serde_json::to_vec(&Refusal { error }).unwrap_or_default());
    if key.engine_id != core.engine_id {
        return refuse(NoPull::WrongEngine);
    }
    let answer = match path {
        "/pull" => match core.handoffs.pull(&key.request_id) {
            Ok(pulled) => (200, serde_json::to_vec(&pulled).unwrap_or_default()),
            Err(why) => {
                if why == NoPull::Expired {
                    core.meters.count(|counts| counts.pulls_after_expiry += 1);
                }
                refuse(why)
            }
        },
        "/extend" if core.handoffs.extend(&key.request_id, ambient::now()) => (200, Vec::new()),
        "/free" if core.handoffs.free(&key.request_id) => (200, Vec::new()),
        _ => (404, Vec::new()),
    };
    core.changed();
    answer
}

/// Why a pull failed before the prefill engine decided anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PullError {
    /// The prefill engine said no.
    Refused(NoPull),
    /// It could not be reached, or died.
    Transport,
}

/// A hand-off that this decode engine was given. Unless it was pulled, the prefill engine is told to free the blocks when
/// the last clone drops: the request was rejected, or its client left.
#[derive(Debug)]
pub(crate) struct Claim {
    core: Arc<Core>,
    key: Key,
    address: Result<IpAddr, String>,
    port: u16,
    /// Whether a pull was tried, after which there is nothing to free.
    settled: AtomicBool,
}

impl Claim {
    pub fn new(core: &Arc<Core>, engine_id: String, request_id: String, host: &str, port: u16) -> Claim {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        Claim {
            core: core.clone(),
            key: Key { engine_id, request_id },
            address: bare.parse().map_err(|_| host.to_owned()),
            port,
            settled: AtomicBool::new(false),
        }
    }

    /// The host as given, when it is no IP address.
    pub fn host_name(&self) -> Option<&str> {
        self.address.as_ref().err().map(String::as_str)
    }

    /// Connects, spends `transfer`, and pulls.
    pub async fn pull(&self, transfer: Duration) -> Result<Pulled, PullError> {
        let Some(stream) = self.connect().await else {
            // Nobody is there to be told anything.
            self.settled.store(true, Ordering::Release);
            return Err(PullError::Transport);
        };
        ambient::pause(transfer).await;
        self.settled.store(true, Ordering::Release);
        let (status, body) = call(stream, "/pull", &self.key).await.ok_or(PullError::Transport)?;
        if status == 200 {
            return serde_json::from_slice(&body).map_err(|_| PullError::Transport);
        }
        match serde_json::from_slice::<Refusal>(&body) {
            Ok(refusal) => Err(PullError::Refused(refusal.error)),
            Err(_) => Err(PullError::Transport),
        }
    }

    /// Keeps the lease alive, for as long as it is polled.
    pub async fn keep_alive(&self) -> Infallible {
        let beat = (self.core.config.lease / 6).max(Duration::from_millis(1));
        loop {
            tokio::time::sleep(beat).await;
            self.send("/extend").await;
        }
    }

    async fn send(&self, path: &str) {
        if let Some(stream) = self.connect().await {
            let _ = tokio::time::timeout(self.core.config.handshake_timeout, call(stream, path, &self.key)).await;
        }
    }

    async fn connect(&self) -> Option<TcpStream> {
        let address = *self.address.as_ref().ok()?;
        let connecting = TcpStream::connect((address, self.port));
        tokio::time::timeout(self.core.config.handshake_timeout, connecting).await.ok()?.ok()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.settled.load(Ordering::Acquire) {
            return;
        }
        let last_word = Claim {
            core: self.core.clone(),
            key: self.key.clone(),
            address: self.address.clone(),
            port: self.port,
            settled: AtomicBool::new(true),
        };
        let kill = self.core.ending.kill.clone();
        let task = async move {
            let _ = kill.run_until_cancelled(last_word.send("/free")).await;
        };
        self.core.tasks.spawn_on(task, &self.core.runtime);
    }
}

/// One exchange on a fresh connection.
async fn call(stream: TcpStream, path: &str, key: &Key) -> Option<(u16, Bytes)> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
    let request = Request::post(path)
        .header("host", "side-channel")
        .body(Full::new(Bytes::from(serde_json::to_vec(key).unwrap_or_default())))
        .ok()?;
    let exchange = Box::pin(async move {
        let response = sender.send_request(request).await.ok()?;
        let status = response.status().as_u16();
        let body = Limited::new(response.into_body(), LONGEST_MESSAGE).collect().await.ok()?.to_bytes();
        Some((status, body))
    });
    match select(exchange, Box::pin(connection)).await {
        Either::Left((answer, _)) => answer,
        // The connection may end right after it delivered the answer.
        Either::Right((_, exchange)) => exchange.await,
    }
}
