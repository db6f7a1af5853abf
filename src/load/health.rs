//! Which pods, and which pairs of a prefill and a decode pod, have failed lately (user reports R36 and R52).
//!
//! Consecutive failures eject: the subject gets no request for a while that doubles with each ejection. When the while
//! is over, exactly one request may try it (the probe). Its success re-admits the subject, its failure ejects it again
//! for longer; a request that says nothing about the subject (its client left, the pod was only busy) gives its try
//! back. A pair is a subject of its own, since the way between two pods can be broken while each works with others.
//!
//! Promises: no lock; every transition is one compare-and-swap on one word, so of several reports exactly one ejects and
//! exactly one claim is let through; time and randomness come in as arguments; a healthy subject costs one load.
//! Nothing here decides who gets a request: `routing` does, and it never leaves itself without a target.

mod pairs;
mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use pairs::{Ejections, MAX_PAIRS, PairHealth, Pairs, Settled, Verdicts};

use self::state::State;
use crate::clock::Tick;
/// When pods and pairs are ejected, and for how long. `base` is also the time after which a probe that never reported no
/// longer keeps others away, and the time that good service takes to undo one doubling.
pub use crate::knobs::Ejection as EjectionPolicy;

/// What a request tells about a pod or a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Report {
    /// It did its part.
    Success,
    /// It did not, and it is to blame.
    Failure,
    /// Nothing: not reached, busy (429, overload), the client left, or the request itself was at fault.
    #[default]
    Neutral,
}

/// A subject's health at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthView {
    /// Consecutive failures.
    pub failures: u32,
    /// Ejections in a row: how often the next one's length is doubled.
    pub streak: u32,
    /// It is ejected; the time until a probe may try it, zero when one may now.
    pub ejected_for: Option<Duration>,
    /// A probe is under way.
    pub probing: bool,
}

/// The health of one pod incarnation, or of one pair of them.
#[derive(Debug, Default)]
pub struct Health {
    /// [`State`], packed.
    state: AtomicU64,
    /// When the claim of the probe under way expires, in ticks; 0 = no probe. Means something only while ejected.
    probe: AtomicU64,
    /// How long a claim lasts, nanoseconds: the policy's `base`, at most its `max`, at the last ejection.
    patience: AtomicU64,
}

/// A claim lasts at least this long, so that two of them never expire at the same tick.
const LEAST_PATIENCE: Duration = Duration::from_millis(1);

impl Health {
    fn state(&self) -> State {
        State::unpack(self.state.load(Ordering::Acquire))
    }

    /// Replaces the state by `change` of it, until nobody else did so meanwhile. `None` from `change` leaves it as it is.
    fn change(&self, change: impl Fn(State) -> Option<State>) -> Option<State> {
        let changed = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| change(State::unpack(word)).map(State::pack));
        changed.ok().map(State::unpack)
    }

    /// Whether requests keep away from it now: ejected, and either its time is not over or a probe is under way.
    pub fn excluded(&self, now: Tick) -> bool {
        let state = self.state();
        state.ejected && (!state.over(now) || self.probing(now))
    }

    /// Whether it is ejected, which it stays until a request succeeds on it.
    pub fn ejected(&self) -> bool {
        self.state().ejected
    }

    /// Whether nothing is left to remember about it.
    fn spotless(&self) -> bool {
        self.state.load(Ordering::Acquire) == 0
    }

    fn probing(&self, now: Tick) -> bool {
        self.probe.load(Ordering::Acquire) > now.0
    }

    /// What pages and logs show of it.
    pub fn view(&self, now: Tick) -> HealthView {
        let state = self.state();
        HealthView {
            failures: u32::from(state.failures),
            streak: u32::from(state.streak),
            ejected_for: state.ejected.then(|| state.left(now)),
            probing: state.ejected && state.over(now) && self.probing(now),
        }
    }

    /// Takes the one try of an ejected subject whose time is over. `None`: it is not ejected, its time is not over, or
    /// another request has the try.
    pub fn claim(self: &Arc<Self>, now: Tick) -> Option<Probe> {
        let state = self.state();
        if !state.ejected || !state.over(now) {
            return None;
        }
        let current = self.probe.load(Ordering::Acquire);
        if current > now.0 {
            return None;
        }
        let patience = Duration::from_nanos(self.patience.load(Ordering::Acquire)).max(LEAST_PATIENCE);
        let claim = now.plus(patience).0;
        self.probe.compare_exchange(current, claim, Ordering::AcqRel, Ordering::Acquire).ok()?;
        Some(Probe { health: Arc::clone(self), claim })
    }

    /// Takes note of a report; the length of the ejection, when it ejects. `jitter` is any random number.
    pub fn report(&self, report: Report, policy: &EjectionPolicy, now: Tick, jitter: u64) -> Option<Duration> {
        match report {
            Report::Neutral => None,
            Report::Success => {
                self.success(policy, now);
                None
            }
            Report::Failure => self.failure(policy, now, jitter),
        }
    }

    /// Re-admits and forgets the failures. The streak loses one for each `base` of good service, so that a subject that
    /// comes and goes is ejected for longer each time, and one that has recovered starts afresh.
    fn success(&self, policy: &EjectionPolicy, now: Tick) {
        if self.spotless() {
            return;
        }
        self.change(|state| state.succeeded(now, policy.base));
    }

    /// Counts, and ejects at the policy's count; after an ejection the first failure ejects. Failures while it is
    /// ejected belong to requests that were sent before: they change nothing.
    fn failure(&self, policy: &EjectionPolicy, now: Tick, jitter: u64) -> Option<Duration> {
        if policy.failures == 0 {
            return None;
        }
        let before = self.change(|state| state.failed(policy, now, jitter))?;
        let after = before.failed(policy, now, jitter)?;
        if !after.ejected {
            return None;
        }
        // No ejection is shorter, so a claim that is left over has expired when the time of this one is over.
        self.patience.store(state::nanos(policy.base.min(policy.max)), Ordering::Release);
        Some(before.length(policy, jitter))
    }
}

/// The one try of an ejected pod or pair. Its drop gives the try back, which is what a request does that ends without a
/// verdict. After a verdict it changes nothing for others.
#[derive(Debug)]
pub struct Probe {
    health: Arc<Health>,
    claim: u64,
}

impl Drop for Probe {
    fn drop(&mut self) {
        // Another value is another claim, made after this one expired.
        let _ = self.health.probe.compare_exchange(self.claim, 0, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// The tries that one request holds.
#[derive(Debug, Default)]
pub struct Probes {
    /// Of its prefill pod.
    pub prefill: Option<Probe>,
    /// Of its decode or only pod.
    pub decode: Option<Probe>,
    /// Of the two together.
    pub pair: Option<Probe>,
}

impl Probes {
    /// Whether it holds any.
    pub fn any(&self) -> bool {
        self.prefill.is_some() || self.decode.is_some() || self.pair.is_some()
    }
}
