//! What all requests of an engine share, and the guards that keep its gauges true.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use xxhash_rust::xxh64::xxh64;

use crate::ambient;
use crate::config::EngineConfig;
use crate::conn::{Busy, Conn, Ending};
use crate::fault::Faults;
use crate::handoff::Handoffs;
use crate::hold::{Gate, Hold};
use crate::kv::KvCache;
use crate::listen::Accepting;
use crate::meeting::Meetings;
use crate::meters::Meters;
use crate::prompt::BLOCK_TOKENS;
use crate::record::{End, Records};
use crate::report::{Stats, Violation, ViolationKind};
use crate::sglang::{Rids, Rooms};
use crate::trtllm::Iterations;

/// Numbers of sequences and requests in flight.
#[derive(Debug, Default)]
pub(crate) struct Load {
    waiting: AtomicUsize,
    running: AtomicUsize,
    live: AtomicUsize,
    /// Prefill requests that wait for their decode engine.
    pub bootstrapping: AtomicUsize,
    /// Prefilled sequences that wait for their KV to be taken.
    pub inflight: AtomicUsize,
    /// Decode sequences without KV blocks.
    pub preallocating: AtomicUsize,
    /// Decode sequences whose KV is on its way.
    pub receiving: AtomicUsize,
}

impl Load {
    pub fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }

    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    pub fn live_requests(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }
}

/// One counted in a gauge until it drops.
#[derive(Debug)]
pub(crate) struct Counted {
    core: Arc<Core>,
    which: fn(&Load) -> &AtomicUsize,
}

impl Counted {
    /// A sequence that waits.
    pub fn waiting(core: &Arc<Core>) -> Counted {
        Counted::new(core, |load| &load.waiting)
    }

    /// A sequence that runs.
    pub fn running(core: &Arc<Core>) -> Counted {
        Counted::new(core, |load| &load.running)
    }

    /// A request that lives.
    pub fn live(core: &Arc<Core>) -> Counted {
        Counted::new(core, |load| &load.live)
    }

    /// One in any of the gauges.
    pub fn new(core: &Arc<Core>, which: fn(&Load) -> &AtomicUsize) -> Counted {
        which(&core.load).fetch_add(1, Ordering::AcqRel);
        core.changed();
        Counted { core: core.clone(), which }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.which)(&self.core.load).fetch_sub(1, Ordering::AcqRel);
        self.core.changed();
    }
}

/// What all requests of an engine share.
#[derive(Debug)]
pub(crate) struct Core {
    pub config: EngineConfig,
    pub address: SocketAddr,
    pub side_channel_port: u16,
    pub engine_id: String,
    pub fingerprint: String,
    pub records: Records,
    pub gate: Gate,
    pub control_hold: Mutex<Option<Hold>>,
    pub faults: Faults,
    pub kv: KvCache,
    pub slots: Arc<Semaphore>,
    /// Held by whoever waits for KV room.
    pub admission: tokio::sync::Mutex<()>,
    /// Held by whoever computes a prompt, one at a time: when the previous computation was due to end.
    pub compute: tokio::sync::Mutex<Instant>,
    pub handoffs: Handoffs,
    pub meetings: Meetings,
    pub rids: Rids,
    pub rooms: Rooms,
    pub iterations: Iterations,
    pub meters: Meters,
    pub load: Load,
    pub ending: Ending,
    /// Ends every generation with `finish_reason: "abort"`.
    pub abort: CancellationToken,
    crashed: AtomicBool,
    violations: Mutex<VecDeque<Violation>>,
    violation_count: AtomicU64,
    /// Connections.
    pub connections: TaskTracker,
    /// Everything else.
    pub tasks: TaskTracker,
    pub runtime: tokio::runtime::Handle,
    pub accepting: Mutex<Option<Accepting>>,
    pub version: watch::Sender<u64>,
    ids: AtomicU64,
    seed: u64,
}

impl Core {
    pub fn new(config: EngineConfig, address: SocketAddr, side_channel_port: u16) -> Core {
        let seed = config.seed.unwrap_or_else(ambient::fresh_seed);
        let hex = |salt: u64| xxh64(&seed.to_le_bytes(), salt);
        let (high, low) = (hex(1), hex(2));
        let engine_id = format!(
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            high >> 32,
            (high >> 16) & 0xffff,
            high & 0xffff,
            low >> 48,
            low & 0xffff_ffff_ffff
        );
        Core {
            address,
            side_channel_port,
            engine_id,
            fingerprint: format!("vllm-0.32.0-{:08x}", hex(3) >> 32),
            records: Records::new(&config.limits, config.keep_bodies),
            gate: Gate::new(),
            control_hold: Mutex::default(),
            faults: Faults::default(),
            kv: KvCache::new(config.capacity.kv_tokens, config.capacity.prefix_cache),
            slots: Arc::new(Semaphore::new(config.capacity.max_running.min(Semaphore::MAX_PERMITS))),
            admission: tokio::sync::Mutex::default(),
            compute: tokio::sync::Mutex::new(ambient::now()),
            handoffs: Handoffs::new(config.lease, config.limits.finished_handoffs),
            meetings: Meetings::default(),
            rids: Rids::default(),
            rooms: Rooms::new(config.limits.finished_handoffs),
            iterations: Iterations::default(),
            meters: Meters::default(),
            load: Load::default(),
            ending: Ending::default(),
            abort: CancellationToken::new(),
            crashed: AtomicBool::new(false),
            violations: Mutex::default(),
            violation_count: AtomicU64::new(0),
            connections: TaskTracker::new(),
            tasks: TaskTracker::new(),
            runtime: tokio::runtime::Handle::current(),
            accepting: Mutex::default(),
            version: watch::Sender::new(0),
            ids: AtomicU64::new(0),
            seed,
            config,
        }
    }

    /// Wakes everybody who waits for a change of records, gauges or violations.
    pub fn changed(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    /// A new identifier.
    pub fn fresh_id(&self) -> u64 {
        xxh64(&self.ids.fetch_add(1, Ordering::Relaxed).to_le_bytes(), self.seed)
    }

    /// Numbers for `count` blocks.
    pub fn block_ids(&self, count: u32) -> Vec<u64> {
        let first = self.ids.fetch_add(u64::from(count), Ordering::Relaxed);
        (0..u64::from(count)).map(|place| (first + place) % self.kv.capacity() + 1).collect()
    }

    /// Writes down a breach of protocol.
    pub fn violate(&self, seq: Option<u64>, kind: ViolationKind, detail: String) {
        self.violation_count.fetch_add(1, Ordering::Relaxed);
        let mut violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        if violations.len() >= self.config.limits.violations.max(1) {
            violations.pop_front();
        }
        violations.push_back(Violation { seq, kind, detail });
        drop(violations);
        self.changed();
    }

    /// Dies as an engine does whose core process hit an assertion: unhealthy at once, gone a moment later.
    pub fn crash(&self) {
        self.crashed.store(true, Ordering::Release);
        let kill = self.ending.kill.clone();
        let last_moment = async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            kill.cancel();
        };
        self.tasks.spawn_on(last_moment, &self.runtime);
    }

    /// Whether the engine is healthy.
    pub fn healthy(&self) -> bool {
        !self.crashed.load(Ordering::Acquire)
    }

    /// Frees the blocks whose lease ended.
    pub fn expire_leases(&self) {
        let expired = self.handoffs.expire(ambient::now());
        if !expired.is_empty() {
            self.meters.count(|counts| counts.expired_leases += expired.len() as u64);
            for id in &expired {
                self.meetings.ring(id);
            }
            self.changed();
        }
    }

    pub fn stats(&self) -> Stats {
        let counts = self.meters.read();
        let pinned = self.handoffs.counts();
        Stats {
            running: self.load.running(),
            waiting: self.load.waiting(),
            bootstrapping: self.load.bootstrapping.load(Ordering::Acquire),
            transferring: self.load.inflight.load(Ordering::Acquire) + self.load.receiving.load(Ordering::Acquire),
            held: self.gate.waiting(),
            live_requests: self.load.live_requests(),
            kv_used_tokens: self.kv.active() * u64::from(BLOCK_TOKENS),
            kv_capacity_tokens: self.kv.capacity() * u64::from(BLOCK_TOKENS),
            pinned_requests: pinned.requests,
            pinned_blocks: pinned.blocks,
            computed_tokens: counts.computed_tokens,
            cache_hit_tokens: counts.cache_hit_tokens,
            transferred_tokens: counts.transferred_tokens,
            generated_tokens: counts.generated_tokens,
            finished: counts.finished_stop + counts.finished_length,
            aborted: counts.aborted_on_demand,
            errors: counts.finished_error,
            clients_gone: counts.clients_gone,
            failed_transfers: counts.failed_transfers,
            expired_leases: counts.expired_leases,
            duplicate_ids: counts.duplicate_ids,
            violations: self.violation_count.load(Ordering::Relaxed),
        }
    }

    pub fn violations(&self) -> Vec<Violation> {
        self.violations.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// A request being served: keeps its connection busy, and closes its record when it ends, whichever way.
#[derive(Debug)]
pub(crate) struct Served {
    core: Arc<Core>,
    conn: Arc<Conn>,
    seq: Option<u64>,
    end: Option<End>,
    _live: Option<Counted>,
    _busy: Busy,
}

impl Served {
    pub fn new(core: &Arc<Core>, conn: &Arc<Conn>, seq: Option<u64>, inference: bool) -> Served {
        Served {
            core: core.clone(),
            conn: conn.clone(),
            seq,
            end: None,
            _live: inference.then(|| Counted::live(core)),
            _busy: conn.busy(),
        }
    }

    /// The whole answer was handed over.
    pub fn complete(mut self) {
        self.end = Some(End::Completed);
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let Some(seq) = self.seq else { return };
        let end = self.end.unwrap_or_else(|| self.conn.end());
        if end == End::ClientGone {
            self.core.meters.count(|counts| counts.clients_gone += 1);
        }
        self.core.records.end(seq, end);
        self.core.changed();
    }
}
