//! A model's end of the state plane: which pods' own work has changed, and how fresh the view of the others is.
//!
//! Charging marks a pod, and the task that publishes takes the marked pods from a queue without locks, each once however
//! often it was marked. Nobody marks anything while nobody listens.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crossbeam::queue::SegQueue;
use futures_util::task::AtomicWaker;

use super::sync::{AtomicU64, Ordering};
use crate::clock::Tick;
use crate::fleet::PodState;

/// The pod that was marked is waiting in the queue.
const QUEUED: u64 = 1;
const IDLE: u64 = 0;

/// Whether a pod waits to be looked at.
#[derive(Debug, Default)]
pub struct Mark(AtomicU64);

/// See the module. One per model; survives snapshots.
#[derive(Debug, Default)]
pub struct PlanePort {
    /// The number of the task that takes changes; 0 = none does.
    listener: AtomicU64,
    changed: SegQueue<Arc<PodState>>,
    waker: AtomicWaker,
    /// One more than the version that a claim may rest on; 0 = no claims.
    claims: AtomicU64,
    /// Nanoseconds of the moment at which the view was known to be whole; 0 = never.
    as_of: AtomicU64,
}

impl PlanePort {
    /// From now on changes are kept for [`PlanePort::take`], for the task of this number (not 0). It takes the place of the
    /// one before.
    pub fn listen(&self, task: u64) {
        self.listener.store(task, Ordering::Release);
    }

    /// This task does not listen any more. True if it was the one that did: nothing is kept from now on.
    pub fn ignore(&self, task: u64) -> bool {
        let ended = self.listener.compare_exchange(task, 0, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if ended {
            while self.take().is_some() {}
        }
        ended
    }

    /// The pod's own work has changed.
    pub fn mark(&self, pod: &Arc<PodState>) {
        if self.listener.load(Ordering::Acquire) == 0 || pod.mark.0.swap(QUEUED, Ordering::AcqRel) == QUEUED {
            return;
        }
        self.changed.push(Arc::clone(pod));
        self.waker.wake();
    }

    /// A pod that was marked since it was last taken. Its work is to be read after this.
    pub fn take(&self) -> Option<Arc<PodState>> {
        let pod = self.changed.pop()?;
        pod.mark.0.swap(IDLE, Ordering::AcqRel);
        Some(pod)
    }

    /// Ready when a pod is marked. For one task only.
    pub fn poll_changed(&self, context: &mut Context<'_>) -> Poll<()> {
        if !self.changed.is_empty() {
            return Poll::Ready(());
        }
        self.waker.register(context.waker());
        // A mark between the first look and the registration woke nobody.
        if self.changed.is_empty() { Poll::Pending } else { Poll::Ready(()) }
    }

    /// The version of the view that a decision has to be claimed on; `None` = decisions stand as they are. To be read
    /// before the loads are: a view that moves on meanwhile makes the claim too careful, never too bold.
    pub fn claim_since(&self) -> Option<u64> {
        self.claims.load(Ordering::Acquire).checked_sub(1)
    }

    /// Sets what [`PlanePort::claim_since`] says, once everything of that version has been applied.
    pub fn set_claims(&self, since: Option<u64>) {
        self.claims.store(since.map_or(0, |version| version.saturating_add(1)), Ordering::Release);
    }

    /// The view was whole at that moment.
    pub fn confirm(&self, at: Tick) {
        self.as_of.fetch_max(at.0.max(1), Ordering::AcqRel);
    }

    /// How old the view of the others is; `None` = there never was one.
    pub fn age(&self, now: Tick) -> Option<Duration> {
        let at = self.as_of.load(Ordering::Acquire);
        (at > 0).then(|| now.since(Tick(at)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::load::DecodeCharge;

    fn pod(port: &Arc<PlanePort>, id: u64) -> Arc<PodState> {
        Arc::new(PodState::new(0, Arc::default()).known_as(id, Arc::clone(port)))
    }

    #[test]
    fn a_pod_waits_once_however_often_it_changes() {
        let port = Arc::new(PlanePort::default());
        let (one, two) = (pod(&port, 1), pod(&port, 2));
        drop(DecodeCharge::open(&one));
        assert!(port.take().is_none(), "nobody listens");
        port.listen(7);
        let mut charge = DecodeCharge::open(&one);
        charge.hand_over();
        drop(charge);
        port.mark(&two);
        let taken: Vec<u64> = std::iter::from_fn(|| port.take()).map(|pod| pod.id).collect();
        assert_eq!(taken, [1, 2]);
        port.mark(&one);
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert_eq!(port.poll_changed(&mut context), Poll::Ready(()));
        assert!(!port.ignore(8), "somebody else listens");
        port.mark(&one);
        assert!(!port.changed.is_empty());
        assert!(port.ignore(7));
        assert_eq!(port.poll_changed(&mut context), Poll::Pending);
        assert_eq!(Arc::strong_count(&one), 1, "nothing is held for a task that is gone");
    }

    #[test]
    fn no_change_is_lost_between_threads() {
        let port = Arc::new(PlanePort::default());
        port.listen(1);
        let pods: Vec<_> = (0..4).map(|id| pod(&port, id)).collect();
        let done = AtomicBool::new(false);
        let mut last = [0u64; 4];
        std::thread::scope(|scope| {
            let chargers: Vec<_> = pods
                .iter()
                .map(|pod| {
                    scope.spawn(move || {
                        for _ in 0..20_000 {
                            DecodeCharge::open(pod).complete();
                        }
                    })
                })
                .collect();
            scope.spawn(|| {
                for thread in chargers {
                    thread.join().unwrap();
                }
                done.store(true, Ordering::Release);
            });
            loop {
                let over = done.load(Ordering::Acquire);
                while let Some(pod) = port.take() {
                    last[pod.id as usize] = pod.load.view().completed;
                }
                if over {
                    break;
                }
            }
        });
        assert_eq!(last, [20_000; 4], "the last look at each pod saw everything");
    }

    #[test]
    fn claims_rest_on_the_version_that_was_applied() {
        let port = PlanePort::default();
        assert_eq!(port.claim_since(), None);
        port.set_claims(Some(0));
        assert_eq!(port.claim_since(), Some(0));
        port.set_claims(Some(7));
        assert_eq!(port.claim_since(), Some(7));
        port.set_claims(None);
        assert_eq!(port.claim_since(), None);
        assert_eq!(port.age(Tick(5)), None);
        port.confirm(Tick(9));
        port.confirm(Tick(3));
        assert_eq!(port.age(Tick(10)), Some(Duration::from_nanos(1)));
    }
}
