//! Starting over, and another decode pod in the place of one that cannot be reached.
//!
//! A request starts over at most once, and never after a byte of an answer went out. A pod that may have seen it is not
//! asked again with the same ids.

use std::sync::Arc;

use super::{Exchange, State};
use crate::clock::Tick;
use crate::engines::Handoff;
use crate::exchange::event::{Adapter, Effect, RoutePlan};
use crate::fleet::Pod;
use crate::telemetry::RetryReason;

impl Exchange {
    /// Starts over on other pods; `avoid` is the slot of one that must not be among them. `None` when the request has
    /// done so before, is not here any more, or finds no other pods: the failure at hand is then the answer.
    pub(super) fn again(
        &mut self,
        now: Tick,
        reason: RetryReason,
        avoid: Option<u32>,
        effects: &mut Vec<Effect>,
    ) -> Option<State> {
        if self.retried {
            return None;
        }
        let asked = self.asked.take()?;
        self.retried = true;
        self.avoid = avoid;
        self.report_health(now, None);
        // What the first attempt has used goes, except blocks that a finished prefill left behind.
        self.release_charges(now, self.unclaimed || self.record.handoff == Handoff::RELAYED);
        let first = std::mem::take(&mut self.record.handoff);
        let timings = self.record.timings;
        self.record.timings.prefill_start = None;
        self.record.timings.prefill_end = None;
        self.record.timings.handed_over = None;
        self.record.timings.answer_head = None;
        // An error in place of content was no first token.
        self.record.timings.first_chunk = None;
        self.record.timings.last_chunk = None;
        let pods = (self.record.prefill_pod.take(), self.record.target_pod.take());
        let (legs, lease) = (self.legs.take(), self.lease.take());
        match self.select(now, asked, effects) {
            Ok(state) => {
                tracing::info!(request_id = self.record.request_id, reason = reason.label(), "starting over");
                self.world.metrics.retried(reason);
                self.record.retry = Some(reason);
                self.unclaimed = false;
                self.watchdog = None;
                Some(state)
            }
            Err((_, error)) => {
                tracing::debug!(request_id = self.record.request_id, %error, "no other pods to start over on");
                self.record.handoff = first;
                self.record.timings = timings;
                (self.record.prefill_pod, self.record.target_pod) = pods;
                (self.legs, self.lease) = (legs, lease);
                None
            }
        }
    }

    /// The decode pod could not be reached, so the next of its roleset gets the same hand-off, which nobody has used.
    pub(super) fn next_decode_pod(&mut self, now: Tick, plan: RoutePlan, effects: &mut Vec<Effect>) -> Option<State> {
        if self.adapter != Adapter::Front || self.fallbacks.is_empty() || self.handoff_too_old(now) {
            return None;
        }
        let next = self.fallbacks.remove(0);
        self.move_to(now, &next);
        let address = Some(Arc::clone(&next.dial));
        effects.push(Effect::Route(Box::new(RoutePlan { address, ..plan })));
        Some(State::AwaitAnswer)
    }

    /// Whether the hand-off has been waiting for too long. Connecting takes up to five seconds more.
    pub(super) fn handoff_too_old(&self, now: Tick) -> bool {
        let since = self.record.timings.prefill_end.unwrap_or(now);
        now.since(since).saturating_add(crate::engines::leg::CONNECT_TIMEOUT) > self.world.knobs.pd.handoff_deadline
    }

    /// Envoy says who answers. It may have taken the next address of the list that it was given.
    pub(super) fn served_by(&mut self, now: Tick, address: &str) {
        let Some(index) = self.fallbacks.iter().position(|pod| &*pod.address == address) else { return };
        let pod = self.fallbacks.remove(index);
        self.move_to(now, &pod);
    }

    /// The request is with this decode pod now, and so is what it is charged.
    fn move_to(&mut self, now: Tick, pod: &Arc<Pod>) {
        self.faults.decode = true;
        self.report_health(now, None);
        self.world.metrics.decode_failover();
        if let Some(charges) = &mut self.charges {
            charges.follow(&pod.state, self.token_load_ttl, now);
            self.world.ledger.watch(&self.record.request_id, &mut charges.tokens);
        }
        if let Some(legs) = &mut self.legs {
            legs.decode = Arc::clone(pod);
        }
        self.aim_at(pod);
        self.remark(Some(&pod.address));
    }
}
