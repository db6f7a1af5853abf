//! What a prefill pod has to be asked before a request can be sent to it: TensorRT-LLM's `/server_info`, the engine id of
//! Mooncake's bootstrap server (`engine-protocols` sections 2.3 and 4.4).
//!
//! Answers are kept for a while, failures never. However many requests want to know, one asks; and as the question is a
//! task of its own, a request that leaves takes it from nobody.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderValue, StatusCode};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use super::leg::{EngineClient, LegFailure, LegOutcome};
use super::trtllm::{ServerInfo, ServerInfoError};
use super::vllm::mooncake::{self, EngineIdError, RankEngine};
use crate::clock::Tick;
use crate::fleet::scheme_of;

/// Answers kept; beyond, the oldest go.
const MAX_ENTRIES: usize = 1024;

/// Longest answer, bytes.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// One incarnation of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LookupKey {
    /// Its UID.
    pub uid: Arc<str>,
    /// Sum of its containers' restart counts.
    pub restarts: u32,
    /// Its serving address, `host:port`, IPv6 in brackets; over TLS, with `https://` before it.
    pub address: Arc<str>,
}

/// What to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LookupKind {
    /// `/server_info` of a TensorRT-LLM context worker.
    ServerInfo,
    /// `/query` of the Mooncake bootstrap server on the pod's host.
    MooncakeQuery {
        /// The bootstrap server's port.
        port: u16,
        /// The data-parallel rank that is asked for.
        rank: u16,
    },
}

impl LookupKind {
    /// Its path.
    pub fn path(self) -> &'static str {
        match self {
            LookupKind::ServerInfo => "/server_info",
            LookupKind::MooncakeQuery { .. } => "/query",
        }
    }

    /// Bound on the whole exchange.
    fn timeout(self) -> Duration {
        match self {
            LookupKind::ServerInfo => Duration::from_secs(3),
            LookupKind::MooncakeQuery { .. } => Duration::from_secs(5),
        }
    }

    /// For how long an answer is good.
    fn time_to_live(self) -> Duration {
        match self {
            LookupKind::ServerInfo => Duration::from_mins(1),
            LookupKind::MooncakeQuery { .. } => Duration::from_mins(5),
        }
    }

    /// `host:port` to ask.
    pub fn address(self, serving: &str) -> String {
        match self {
            LookupKind::ServerInfo => serving.to_owned(),
            LookupKind::MooncakeQuery { port, .. } => {
                // A server of its own, which speaks no TLS.
                let (_, serving) = scheme_of(serving);
                let host = serving.rsplit_once(':').map_or(serving, |(host, _)| host);
                format!("{host}:{port}")
            }
        }
    }

    fn read(self, answer: &[u8]) -> Result<LookedUp, LookupError> {
        Ok(match self {
            LookupKind::ServerInfo => LookedUp::ServerInfo(ServerInfo::parse(answer)?),
            LookupKind::MooncakeQuery { rank, .. } => LookedUp::Engine(mooncake::engine_of(answer, rank)?),
        })
    }
}

/// A pod's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookedUp {
    /// To [`LookupKind::ServerInfo`].
    ServerInfo(ServerInfo),
    /// To [`LookupKind::MooncakeQuery`].
    Engine(RankEngine),
}

/// A pod did not say what a request needs. The texts name no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// No answer.
    #[error("{detail}")]
    Failed {
        /// The class.
        class: LegFailure,
        /// What happened.
        detail: String,
    },
    /// An answer other than 200, redirects included.
    #[error("status {}", .0.as_u16())]
    Status(StatusCode),
    /// An answer to `/server_info` that cannot be used.
    #[error("/server_info: {0}")]
    ServerInfo(#[from] ServerInfoError),
    /// An answer to `/query` that cannot be used.
    #[error("/query: {0}")]
    EngineId(#[from] EngineIdError),
    /// The question was given up.
    #[error("the question was given up")]
    Lost,
}

impl LookupError {
    /// The class of a prefill leg that failed for this.
    pub fn class(&self) -> LegFailure {
        match self {
            LookupError::Failed { class, .. } => *class,
            LookupError::Status(_) => LegFailure::HttpStatus,
            LookupError::ServerInfo(_) | LookupError::EngineId(_) => LegFailure::BadResponse,
            LookupError::Lost => LegFailure::Canceled,
        }
    }
}

type Key = (LookupKey, LookupKind);
type Answer = Result<Arc<LookedUp>, LookupError>;

/// An answer, and when it was asked for.
#[derive(Debug)]
struct Entry {
    at: Tick,
    known: Arc<LookedUp>,
}

#[derive(Debug)]
struct Shared {
    client: EngineClient,
    /// What engines are shown.
    authorization: Option<HeaderValue>,
    /// Read without a lock; written by those who hold the one below.
    ready: papaya::HashMap<Key, Entry, foldhash::fast::RandomState>,
    running: Mutex<HashMap<Key, watch::Receiver<Option<Answer>>>>,
}

/// The cache.
#[derive(Debug)]
pub struct Lookups {
    shared: Arc<Shared>,
    tasks: TaskTracker,
}

impl Lookups {
    /// An empty one; questions show engines this `authorization`, and run as `tasks`, for a few seconds at most.
    pub fn new(client: EngineClient, authorization: Option<HeaderValue>, tasks: TaskTracker) -> Lookups {
        let ready = papaya::HashMap::with_hasher(foldhash::fast::RandomState::default());
        let shared = Shared { client, authorization, ready, running: Mutex::default() };
        Lookups { shared: Arc::new(shared), tasks }
    }

    /// The answer is remembered: nobody has to be asked.
    pub fn knows(&self, key: &LookupKey, kind: LookupKind, now: Tick) -> bool {
        self.shared.fresh(&(key.clone(), kind), now).is_some()
    }

    /// What the pod says, from memory if it was asked not long ago.
    pub async fn get(&self, key: LookupKey, kind: LookupKind, now: Tick) -> Answer {
        let key = (key, kind);
        if let Some(known) = self.shared.fresh(&key, now) {
            return Ok(known);
        }
        let mut answer = self.ask(key, now);
        match answer.wait_for(Option::is_some).await {
            Ok(answer) => answer.clone().unwrap_or(Err(LookupError::Lost)),
            Err(_) => Err(LookupError::Lost),
        }
    }

    /// Joins those who wait for an answer, or asks.
    fn ask(&self, key: Key, now: Tick) -> watch::Receiver<Option<Answer>> {
        let mut running = self.shared.running.lock().unwrap_or_else(PoisonError::into_inner);
        // It may have come since the first look.
        if let Some(known) = self.shared.fresh(&key, now) {
            return watch::channel(Some(Ok(known))).1;
        }
        // A task that was given up leaves a closed channel.
        if let Some(answer) = running.get(&key).filter(|answer| answer.has_changed().is_ok()) {
            return answer.clone();
        }
        let (tell, answer) = watch::channel(None);
        running.insert(key.clone(), answer.clone());
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(async move {
            let answer = shared.fetch(&key).await;
            shared.keep(&key, now, &answer);
            tell.send_replace(Some(answer));
        });
        answer
    }
}

impl Shared {
    fn fresh(&self, key: &Key, now: Tick) -> Option<Arc<LookedUp>> {
        let ready = self.ready.pin();
        let entry = ready.get(key)?;
        (now.since(entry.at) < key.1.time_to_live()).then(|| Arc::clone(&entry.known))
    }

    async fn fetch(&self, (pod, kind): &Key) -> Answer {
        let address = kind.address(&pod.address);
        let headers = self.authorization.iter().map(|value| (AUTHORIZATION, value.clone())).collect();
        match self.client.ask(&address, kind.path(), headers, kind.timeout(), MAX_ANSWER_BYTES).await {
            LegOutcome::Answered { status: StatusCode::OK, body, .. } => kind.read(&body).map(Arc::new),
            LegOutcome::Answered { status, .. } => Err(LookupError::Status(status)),
            LegOutcome::Failed { class, detail, .. } => Err(LookupError::Failed { class, detail }),
        }
    }

    fn keep(&self, key: &Key, at: Tick, answer: &Answer) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.remove(key);
        let Ok(known) = answer else { return };
        let ready = self.ready.pin();
        if ready.len() >= MAX_ENTRIES && ready.get(key).is_none() {
            ready.retain(|(_, kind), entry| at.since(entry.at) < kind.time_to_live());
            if ready.len() >= MAX_ENTRIES
                && let Some((oldest, _)) = ready.iter().min_by_key(|(_, entry)| entry.at)
            {
                ready.remove(oldest);
            }
        }
        ready.insert(key.clone(), Entry { at, known: Arc::clone(known) });
    }
}

#[cfg(test)]
mod tests;
