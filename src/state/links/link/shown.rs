//! What a link shows of itself: to selections, to people, and to whoever looks at a trace.

use std::sync::Arc;
use std::time::Duration;

use super::Link;
use crate::clock::Tick;
use crate::knobs::Grade;
use crate::state::plane::ModelStatus;
use crate::state::redis::RedisError;
use crate::state::wire::{SyncCall, SyncReply, SyncStatus};
use crate::telemetry::{SyncFacts, SyncSpan};

/// How often what people see of it is brought up to date.
const SHOW: Duration = Duration::from_millis(50);

/// Ends the span of a sync.
pub(super) fn end(span: Option<Box<SyncSpan>>, reply: &Result<SyncReply, RedisError>) {
    let Some(span) = span else { return };
    match reply {
        Ok(reply) => {
            let status = match reply.status {
                SyncStatus::Done => "done",
                SyncStatus::Stranger => "stranger",
                SyncStatus::Overtaken => "overtaken",
            };
            span.answered(status, reply.changes.len());
        }
        Err(RedisError::Late) => span.failed("timeout"),
        Err(RedisError::Down(_) | RedisError::Address(_)) => span.failed("not_connected"),
        Err(RedisError::Refused(_)) => span.failed("refused"),
        Err(RedisError::Unreadable(_)) => span.failed("bad_response"),
    }
}

impl Link {
    /// A span for the sync, if it carries the charge of a sampled request.
    pub(super) fn span_of(&mut self, call: &SyncCall, now: Tick) -> Option<Box<SyncSpan>> {
        let name = &*self.name;
        let span = self.tracer.start(
            now,
            |pod| call.shares.iter().any(|(id, _)| *id == pod),
            || SyncFacts {
                model: name,
                shares: call.shares.len(),
                // Written once more for this, a few times a second at most.
                bytes: call.arguments().map_or(0, |arguments| arguments.iter().map(Vec::len).sum()),
            },
        );
        span.map(Box::new)
    }

    /// Tells selections on which version they decide, and people how it goes.
    pub(super) fn publish_state(&mut self, now: Tick) {
        let view = self.ledger.view();
        if let Some(as_of) = view.as_of() {
            self.port.confirm(as_of);
        }
        let claiming = self.terms.grade == Grade::Claim
            && self.ledger.member().is_some()
            && self.ledger.members() > 1
            && !view.is_partial()
            && !self.breaker.is_open()
            && !self.leaving;
        self.port.set_claims(claiming.then(|| view.version()));
        if now.since(self.shown) < SHOW {
            return;
        }
        self.shown = now;
        let (epoch, member) = self.ledger.member().unwrap_or_default();
        let epoch = if member == 0 { String::new() } else { format!("{:016x}", u64::from_be_bytes(epoch)) };
        self.status.store(Arc::new(ModelStatus {
            model: Arc::clone(&self.name),
            epoch,
            member,
            members: self.ledger.members(),
            version: view.version(),
            remote_pods: view.len(),
            own_pods: self.charged.len(),
            as_of: view.as_of(),
            age: view.age(now),
            claiming,
            counts: self.ledger.counts(),
            last_sync: self.last_sync,
        }));
    }
}
