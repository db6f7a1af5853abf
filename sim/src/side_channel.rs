//! The KV side channel: a small HTTP service of prefill engines, and the decode engine's client for it.
//!
//! `POST /pull`, `/take`, `/extend` and `/free` take `{"engine_id", "request_id"}`. A pull answers 200 with the prompt's
//! identity and size, once; otherwise a 4xx with `{"error": reason}`. A take waits until there is something to pull. What
//! gateways ask of the same port is in `bootstrap`. Real engines speak ZeroMQ and RDMA here: only what
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
use crate::bootstrap;
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
    if head.method == Method::GET {
        return bootstrap::answer(&core, &head).await;
    }
    let body = Limited::new(body, LONGEST_MESSAGE).collect().await.map(http_body_util::Collected::to_bytes);
    let key = body.ok().and_then(|body| serde_json::from_slice::<Key>(&body).ok());
    let (status, body) = match key {
        Some(key) if head.method == Method::POST => decide(&core, head.uri.path(), &key).await,
        _ => (400, Vec::new()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
    response
}

async fn decide(core: &Core, path: &str, key: &Key) -> (u16, Vec<u8>) {
    core.expire_leases();
    let refuse = |error| (409, serde_json::to_vec(&Refusal { error }).unwrap_or_default());
    // SGLang's and TensorRT-LLM's decode engines know no engine id.
    if !key.engine_id.is_empty() && key.engine_id != core.engine_id {
        return refuse(NoPull::WrongEngine);
    }
    let pulled = |outcome: Result<Pulled, NoPull>| match outcome {
        Ok(pulled) => (200, serde_json::to_vec(&pulled).unwrap_or_default()),
        Err(why) => {
            if why == NoPull::Expired {
                core.meters.count(|counts| counts.pulls_after_expiry += 1);
            }
            refuse(why)
        }
    };
    let answer = match path {
        "/pull" => pulled(core.handoffs.pull(&key.request_id)),
        "/take" => pulled(take(core, &key.request_id).await),
        "/extend" if core.handoffs.extend(&key.request_id, ambient::now()) => (200, Vec::new()),
        "/free" if core.handoffs.free(&key.request_id) => (200, Vec::new()),
        _ => (404, Vec::new()),
    };
    core.meetings.ring(&key.request_id);
    core.changed();
    answer
}

/// Pulls as soon as there is something to pull.
async fn take(core: &Core, id: &str) -> Result<Pulled, NoPull> {
    let seat = core.meetings.take(id);
    core.changed();
    loop {
        let bell = seat.bell.notified();
        match core.handoffs.pull(id) {
            Err(NoPull::Unknown) => bell.await,
            outcome => return outcome,
        }
    }
}

/// Why a pull brought nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PullError {
    /// The prefill engine said no.
    Refused(NoPull),
    /// It could not be reached.
    Unreachable,
    /// It died, or spoke nonsense.
    Lost,
    /// It waited in vain for the other leg.
    Alone,
}

/// How a decode engine asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// For KV that is there already (vLLM's NIXL, TensorRT-LLM's context_first). Giving up frees it.
    Pull,
    /// For KV that may still be made (vLLM's Mooncake, TensorRT-LLM's generation_first). Giving up is not told to anybody.
    Take,
    /// As before, in an SGLang room of the data-parallel rank given or computed.
    Room {
        /// The room.
        room: u64,
        /// The prefill engine's rank, if the request names it.
        rank: Option<u64>,
    },
}

/// A hand-off that this decode engine was given. Unless it was pulled, the prefill engine is told to free the blocks when
/// the last clone drops: the request was rejected, or its client left.
#[derive(Debug)]
pub(crate) struct Claim {
    core: Arc<Core>,
    key: Key,
    address: Result<IpAddr, String>,
    port: u16,
    manner: Manner,
    /// Whether there is nothing to free any more.
    settled: AtomicBool,
}

impl Claim {
    pub fn new(
        core: &Arc<Core>,
        engine_id: String,
        request_id: String,
        (host, port): (&str, u16),
        manner: Manner,
    ) -> Claim {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        Claim {
            core: core.clone(),
            key: Key { engine_id, request_id },
            address: bare.parse().map_err(|_| host.to_owned()),
            port,
            manner,
            settled: AtomicBool::new(manner != Manner::Pull),
        }
    }

    /// The host as given, when it is no IP address.
    pub fn host_name(&self) -> Option<&str> {
        self.address.as_ref().err().map(String::as_str)
    }

    /// Connects, gets the KV, and spends `transfer` on it.
    pub async fn pull(&self, transfer: Duration) -> Result<Pulled, PullError> {
        if self.manner != Manner::Pull {
            let taking = tokio::time::timeout(self.core.config.meeting_timeout, self.take());
            let pulled = taking.await.map_err(|_| PullError::Alone)??;
            ambient::pause(transfer).await;
            return Ok(pulled);
        }
        let Some(stream) = self.connect().await else {
            // Nobody is there to be told anything.
            self.settled.store(true, Ordering::Release);
            return Err(PullError::Unreachable);
        };
        ambient::pause(transfer).await;
        self.settled.store(true, Ordering::Release);
        outcome(post(stream, "/pull", &self.key).await)
    }

    /// Waits for the KV to be made.
    async fn take(&self) -> Result<Pulled, PullError> {
        let mut key = self.key.clone();
        if let Manner::Room { room, rank } = self.manner {
            let stream = self.connect().await.ok_or(PullError::Unreachable)?;
            let (status, body) =
                call(stream, Method::GET, bootstrap::ROUTE, Bytes::new()).await.ok_or(PullError::Lost)?;
            let route: Option<bootstrap::Route> = serde_json::from_slice(&body).ok().filter(|_| status == 200);
            let ranks = u64::from(route.ok_or(PullError::Unreachable)?.dp_size.max(1));
            key.request_id = room_key(room, rank.unwrap_or(room % ranks));
        }
        let stream = self.connect().await.ok_or(PullError::Unreachable)?;
        outcome(post(stream, "/take", &key).await)
    }

    /// Keeps the lease alive, for as long as it is polled.
    pub async fn keep_alive(&self) -> Infallible {
        if self.manner != Manner::Pull {
            return std::future::pending().await;
        }
        let beat = (self.core.config.lease / 6).max(Duration::from_millis(1));
        loop {
            tokio::time::sleep(beat).await;
            self.send("/extend").await;
        }
    }

    async fn send(&self, path: &str) {
        if let Some(stream) = self.connect().await {
            let _ = tokio::time::timeout(self.core.config.handshake_timeout, post(stream, path, &self.key)).await;
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
            manner: self.manner,
            settled: AtomicBool::new(true),
        };
        let kill = self.core.ending.kill.clone();
        let task = async move {
            let _ = kill.run_until_cancelled(last_word.send("/free")).await;
        };
        self.core.tasks.spawn_on(task, &self.core.runtime);
    }
}

/// The id of an SGLang room at a prefill engine.
pub(crate) fn room_key(room: u64, rank: u64) -> String {
    format!("{room}/{rank}")
}

fn outcome(answer: Option<(u16, Bytes)>) -> Result<Pulled, PullError> {
    let (status, body) = answer.ok_or(PullError::Lost)?;
    if status == 200 {
        return serde_json::from_slice(&body).map_err(|_| PullError::Lost);
    }
    match serde_json::from_slice::<Refusal>(&body) {
        Ok(refusal) => Err(PullError::Refused(refusal.error)),
        Err(_) => Err(PullError::Lost),
    }
}

async fn post(stream: TcpStream, path: &str, key: &Key) -> Option<(u16, Bytes)> {
    call(stream, Method::POST, path, Bytes::from(serde_json::to_vec(key).unwrap_or_default())).await
}

/// One exchange on a fresh connection.
async fn call(stream: TcpStream, method: Method, path: &str, body: Bytes) -> Option<(u16, Bytes)> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
    let request =
        Request::builder().method(method).uri(path).header("host", "side-channel").body(Full::new(body)).ok()?;
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
