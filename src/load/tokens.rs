//! The guard over a request's token charge on one pod.

use std::sync::Arc;
use std::time::Duration;

use super::claim::{ACTIVE, Claim, DECODE, KV, SweepReason};
use crate::clock::Tick;
use crate::fleet::PodState;

/// A claim and the incarnation it was made on. The guard and the janitor share it.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) pod: Arc<PodState>,
    pub(super) claim: Claim,
}

impl Open {
    /// Takes everything back if its time is over.
    pub(super) fn sweep(&self, now: Tick) -> Option<SweepReason> {
        let swept = self.claim.sweep(&self.pod.load.tokens, now);
        if swept.is_some() {
            self.changed();
        }
        swept
    }

    /// Tells whoever publishes the pod's work.
    fn changed(&self) {
        self.pod.port.mark(&self.pod);
    }
}

/// A request's token charge on one pod; what is left of it is released on drop.
#[derive(Debug)]
pub struct TokenCharge(pub(super) Arc<Open>);

impl TokenCharge {
    /// A charge on a prefill pod that is [made](TokenCharge::charge) later: the tokens will count as active and as
    /// resident KV. A `ttl` of zero: the janitor never takes the charge back.
    pub fn on_prefill(pod: &Arc<PodState>, tokens: u64, now: Tick, ttl: Duration) -> TokenCharge {
        TokenCharge(Arc::new(Open { pod: Arc::clone(pod), claim: Claim::new(false, tokens, now, ttl) }))
    }

    /// The same on a decode pod.
    pub fn on_decode(pod: &Arc<PodState>, tokens: u64, now: Tick, ttl: Duration) -> TokenCharge {
        TokenCharge(Arc::new(Open { pod: Arc::clone(pod), claim: Claim::new(true, tokens, now, ttl) }))
    }

    /// Makes the charge: a few atomic additions.
    #[must_use]
    pub fn charge(self) -> TokenCharge {
        self.0.claim.charge(&self.0.pod.load.tokens);
        self.0.changed();
        self
    }

    /// Charges a prefill pod at once.
    pub fn prefill(pod: &Arc<PodState>, tokens: u64, now: Tick, ttl: Duration) -> TokenCharge {
        TokenCharge::on_prefill(pod, tokens, now, ttl).charge()
    }

    /// Charges a decode pod at once.
    pub fn decode(pod: &Arc<PodState>, tokens: u64, now: Tick, ttl: Duration) -> TokenCharge {
        TokenCharge::on_decode(pod, tokens, now, ttl).charge()
    }

    /// The tokens of the charge.
    pub fn tokens(&self) -> u64 {
        self.0.claim.tokens()
    }

    /// The prefill call has returned: the tokens are not active any more. Doing it again changes nothing.
    pub fn prefill_done(&self, now: Tick) {
        self.0.claim.release(&self.0.pod.load.tokens, ACTIVE, Some(now));
        self.0.changed();
    }

    /// The request is over: takes back what is left, and notes when.
    pub fn finish(self, now: Tick) {
        self.0.claim.release(&self.0.pod.load.tokens, ACTIVE | KV | DECODE, Some(now));
        self.0.changed();
    }

    /// The request shows that it is alive: its time to live starts anew.
    pub fn touch(&self, now: Tick) {
        self.0.claim.touch(now);
    }

    /// The request is over, but the pod keeps its blocks until `until`, since no decode pod has taken them: the KV part
    /// stays charged until then, and the janitor ends it. Only of use for a charge that a janitor watches.
    pub fn strand(self, until: Tick) {
        let load = &self.0.pod.load.tokens;
        self.0.claim.release(load, ACTIVE, None);
        self.0.claim.strand(load, until);
        self.0.changed();
    }
}

impl Drop for TokenCharge {
    fn drop(&mut self) {
        self.0.claim.release_unless_stranded(&self.0.pod.load.tokens);
        self.0.changed();
    }
}
