//! How a link is told things.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::clock::Tick;
use crate::state::plane::{ClaimOrder, Claimed};
use crate::state::redis::{Reconnects, RedisError};
use crate::state::wire::{ClaimReply, News, ReapCall, ReapReply, SyncReply};
use crate::telemetry::SyncSpan;

/// A request waits for its claim.
#[derive(Debug)]
pub(super) struct ClaimRequest {
    pub(super) order: ClaimOrder,
    pub(super) answer: oneshot::Sender<Claimed>,
    /// It was made before, and a later call came first.
    pub(super) repeated: bool,
}

/// Syncs in a row that nobody answered although there is a connection.
#[derive(Debug, Default)]
pub(super) struct Unanswered(AtomicU32);

impl Unanswered {
    /// A sync has ended.
    pub(super) fn synced(&self, late: bool) {
        if late {
            self.0.fetch_add(1, Ordering::Relaxed);
        } else {
            self.0.store(0, Ordering::Relaxed);
        }
    }

    /// Whether there are so many.
    pub(super) fn reached(&self, many: u32) -> bool {
        self.0.load(Ordering::Relaxed) >= many
    }
}

/// What a link hears.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) claims: mpsc::Receiver<ClaimRequest>,
    pub(super) news: mpsc::Receiver<News>,
    /// Announcements were missed.
    pub(super) missed: Arc<Notify>,
    pub(super) snapshots: watch::Receiver<u64>,
    pub(super) reconnects: Reconnects,
    /// Say goodbye and end.
    pub(super) gone: CancellationToken,
}

/// A call that has come back.
pub(super) enum Back {
    Sync { reply: Result<SyncReply, RedisError>, sent: Tick, selections: u64, span: Option<Box<SyncSpan>> },
    Reap { call: ReapCall, reply: Result<ReapReply, RedisError> },
    Claim { sequence: u64, reply: Result<ClaimReply, RedisError>, request: ClaimRequest, selections: u64 },
}
