//! All token charges of this replica, so that the janitor can end those that nobody else ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::claim::SweepReason;
use super::tokens::{Open, TokenCharge};
use crate::clock::Tick;
use crate::fleet::PodState;

/// A request's token charges, each absent when its policy does not count tokens.
#[derive(Debug, Default)]
pub struct TokenCharges {
    /// On the prefill pod.
    pub prefill: Option<TokenCharge>,
    /// On the decode pod.
    pub decode: Option<TokenCharge>,
    watch: Option<Watch>,
}

impl TokenCharges {
    /// Charges that nobody watches yet: see [`Ledger::watch`].
    pub fn new(prefill: Option<TokenCharge>, decode: Option<TokenCharge>) -> TokenCharges {
        TokenCharges { prefill, decode, watch: None }
    }

    /// The request shows that it is alive.
    pub fn touch(&self, now: Tick) {
        for charge in [&self.prefill, &self.decode].into_iter().flatten() {
            charge.touch(now);
        }
    }

    /// The prefill call has returned.
    pub fn prefill_done(&self, now: Tick) {
        if let Some(charge) = &self.prefill {
            charge.prefill_done(now);
        }
    }

    /// The request is over.
    pub fn finish(mut self, now: Tick) {
        for charge in [self.prefill.take(), self.decode.take()].into_iter().flatten() {
            charge.finish(now);
        }
    }

    /// The request is over, its decode pod did not take the KV blocks: they stay charged until `until`, if that is still to come.
    pub fn strand(mut self, until: Tick, now: Tick) {
        if until > now
            && self.watch.is_some()
            && let Some(charge) = self.prefill.take()
        {
            charge.strand(until);
        }
        self.finish(now);
    }
}

/// Ends the watch, unless something stays charged.
#[derive(Debug)]
struct Watch {
    ledger: Arc<Ledger>,
    id: u64,
}

/// What the janitor watches of one request.
#[derive(Debug)]
struct Watched {
    request_id: Box<str>,
    charges: [Option<Arc<Open>>; 2],
}

impl Watched {
    fn is_done(&self) -> bool {
        self.charges.iter().flatten().all(|open| open.claim.is_done())
    }
}

/// A charge that the janitor took back.
#[derive(Clone, Debug)]
pub struct Swept {
    /// The request it belonged to.
    pub request_id: String,
    /// `namespace/name` of the pod.
    pub pod: String,
    /// True for a charge on a decode pod.
    pub decode: bool,
    /// Its tokens.
    pub tokens: u64,
    /// How long it was charged.
    pub age: std::time::Duration,
    /// Why it was taken back.
    pub reason: SweepReason,
}

/// Every watched charge of this replica. Bounded by the requests in flight, and by the lease of stranded blocks.
#[derive(Debug, Default)]
pub struct Ledger {
    open: papaya::HashMap<u64, Watched, foldhash::fast::RandomState>,
    next: AtomicU64,
}

impl Ledger {
    /// An empty ledger.
    pub fn new() -> Ledger {
        Ledger::default()
    }

    /// Watches the charges of a request from now on. Not part of the charging itself, which must be short.
    pub fn watch(self: &Arc<Self>, request_id: &str, charges: &mut TokenCharges) {
        let opened =
            [&charges.prefill, &charges.decode].map(|charge| charge.as_ref().map(|guard| Arc::clone(&guard.0)));
        if opened.iter().all(Option::is_none) {
            return;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.pin().insert(id, Watched { request_id: request_id.into(), charges: opened });
        charges.watch = Some(Watch { ledger: Arc::clone(self), id });
    }

    /// Requests that are watched.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Nothing is watched.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// The janitor's round: takes back what is older than its TTL without a sign of life, and stranded blocks whose
    /// lease is over. A release that comes later finds nothing to do.
    pub fn sweep(&self, now: Tick) -> Vec<Swept> {
        let mut swept = Vec::new();
        let open = self.open.pin();
        for (id, watched) in &open {
            for charge in watched.charges.iter().flatten() {
                if let Some(reason) = charge.sweep(now) {
                    swept.push(Swept {
                        request_id: watched.request_id.to_string(),
                        pod: pod_name(&charge.pod),
                        decode: charge.claim.is_decode(),
                        tokens: charge.claim.tokens(),
                        age: now.since(charge.claim.charged_at()),
                        reason,
                    });
                }
            }
            if watched.is_done() {
                open.remove(id);
            }
        }
        swept
    }
}

fn pod_name(pod: &PodState) -> String {
    format!("{}/{}", pod.labels.namespace, pod.labels.pod)
}

impl Drop for TokenCharges {
    fn drop(&mut self) {
        self.prefill = None;
        self.decode = None;
        if let Some(watch) = self.watch.take() {
            let open = watch.ledger.open.pin();
            if open.get(&watch.id).is_some_and(Watched::is_done) {
                open.remove(&watch.id);
            }
        }
    }
}
