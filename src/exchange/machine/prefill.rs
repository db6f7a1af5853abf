//! What becomes of a prefill leg.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;

use super::{Exchange, Legs, Prefilling, State};
use crate::clock::Tick;
use crate::engines::leg::{LegFailure, LegOutcome, LegRequest};
use crate::engines::{self, Handoff, Merged, Protocol};
use crate::error::{ApiError, Reason};
use crate::exchange::event::Effect;
use crate::fleet::PodState;
use crate::telemetry::{AbortResult, AbortTrigger, Outcome, PrefillOutcome, PrefillStage, RetryReason};

/// How long a decode pod has for taking in a request that nobody waits for.
const DELIVERY: Duration = Duration::from_secs(1);

impl Exchange {
    /// The leg is over, well or not: it does not burden its pod any more.
    fn prefill_ended(&mut self, now: Tick) {
        self.record.timings.prefill_end = Some(now);
        if let Some(charges) = &mut self.charges {
            charges.prefill = None;
            charges.tokens.prefill_done(now);
            if self.record.timings.handed_over.is_some() {
                charges.decode.hand_over();
            }
        }
    }

    /// How old a hand-off that has just arrived may be: it was not there when the task last looked. Far more than the
    /// present only after the whole process has been stopped.
    fn handoff_age(&self, now: Tick) -> Duration {
        now.since(self.leg_pending_at)
    }

    /// A leg ended that the decode leg waited for.
    pub(super) fn on_prefill(
        &mut self,
        now: Tick,
        prefilling: Prefilling,
        outcome: &LegOutcome,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.prefill_ended(now);
        let Prefilling { legs, leg } = prefilling;
        let merged = engines::accept_prefill(outcome).and_then(|answer| self.merge(&legs, answer));
        match merged {
            Err(error) => {
                // It did its work, and holds blocks that nobody can be told of.
                self.unclaimed = engines::accept_prefill(outcome).is_ok();
                self.lease = legs.lease();
                let class = outcome.failure_class();
                leg.finish(outcome.metric_outcome());
                self.world.metrics.pd_prefill_failed(class, PrefillStage::BeforeResponse);
                self.faults.of_prefill_leg(legs.protocol, outcome);
                if outcome.never_sent() {
                    let slot = legs.prefill.state.slot;
                    if let Some(state) = self.again(now, RetryReason::PrefillUnreachable, Some(slot), effects) {
                        return state;
                    }
                }
                self.refuse(now, error, effects)
            }
            Ok(Merged::Finished(finished)) => {
                leg.finish(PrefillOutcome::Success);
                self.answer_with(now, finished, effects)
            }
            Ok(Merged::Decode { body, handoff, lease }) => {
                leg.finish(PrefillOutcome::Success);
                self.record.handoff = handoff.label();
                self.lease = lease;
                note_loss(&legs.prefill.state, handoff);
                if handoff == Handoff::Relayed && self.handoff_age(now) > self.world.knobs.pd.handoff_deadline {
                    return self.too_late(now, effects);
                }
                self.hand_over(now, Some(&legs.decode), body, Some(legs.attempt.id), effects)
            }
        }
    }

    /// The blocks that a hand-off names may be another prompt's by now.
    pub(super) fn too_late(&mut self, now: Tick, effects: &mut Vec<Effect>) -> State {
        tracing::warn!(request_id = self.record.request_id, "the hand-off is too old to be used");
        // While the process was stopped, engines have closed the connections that it kept.
        effects.push(Effect::ForgetConnections);
        if let Some(state) = self.again(now, RetryReason::HandoffExpired, None, effects) {
            return state;
        }
        let text = engines::failure_text(LegFailure::Timeout, "the hand-off came too late to be used");
        self.refuse(now, ApiError::new(Reason::PrefillFailed, text), effects)
    }

    fn merge(&self, legs: &Legs, answer: &[u8]) -> Result<Merged, ApiError> {
        let Some(asked) = &self.asked else {
            return Err(ApiError::new(Reason::Internal, "the request was lost on its way"));
        };
        engines::merge(legs.protocol, &asked.body, answer, &legs.prefill.spec.host).map_err(|error| {
            let text = engines::failure_text(LegFailure::BadResponse, &error.to_string());
            ApiError::new(Reason::HandoffInvalid, text)
        })
    }

    /// The client left in the moment between the legs. The prefill pod holds blocks for a decode pod that has not heard
    /// of them: it has to, once, or they stay until the lease ends.
    pub(super) fn gone_after_prefill(
        &mut self,
        now: Tick,
        prefilling: Prefilling,
        outcome: &LegOutcome,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.prefill_ended(now);
        let Prefilling { legs, leg } = prefilling;
        let merged = engines::accept_prefill(outcome).and_then(|answer| self.merge(&legs, answer));
        match merged {
            Ok(Merged::Decode { body, handoff: Handoff::Relayed, lease }) => {
                leg.finish(PrefillOutcome::Success);
                self.record.handoff = Handoff::Relayed.label();
                self.lease = lease;
                // Neuron's answer does not say what its pod keeps.
                let keeps = lease.is_some() || legs.protocol == Protocol::VllmNixl;
                if keeps && self.handoff_age(now) <= self.world.knobs.pd.handoff_deadline {
                    effects.push(Effect::Deliver(Box::new(self.delivery(&legs, body))));
                }
            }
            Ok(_) => leg.finish(PrefillOutcome::Success),
            Err(_) => leg.finish(outcome.metric_outcome()),
        }
        self.record.status = 499;
        self.end(now, Outcome::ClientGone, effects)
    }

    /// The request as its decode pod gets it from the gateway itself.
    fn delivery(&self, legs: &Legs, body: Bytes) -> LegRequest {
        LegRequest {
            address: Arc::clone(&legs.decode.dial),
            path: self.path(),
            headers: self.leg_headers(&legs.attempt.id),
            body,
            timeout: DELIVERY,
            max_answer_bytes: 0,
        }
    }

    /// The leg beside the decode leg ended (reference gateway, section 1.10; `engine-protocols`, section 1.4).
    pub(super) fn on_twin(
        &mut self,
        now: Tick,
        state: State,
        outcome: &LegOutcome,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.prefill_ended(now);
        let (Some(leg), Some(legs)) = (self.twin.take(), self.legs.clone()) else { return state };
        let answering = match &state {
            State::Answering(answer) => answer.has_begun(),
            _ => false,
        };
        let stage = if answering { PrefillStage::AfterResponse } else { PrefillStage::BeforeResponse };
        let failure = engines::failure_of(outcome);
        if let Some(class) = failure {
            self.world.metrics.pd_prefill_failed(class, stage);
        }
        let unread = failure == Some(LegFailure::BadResponse) && legs.protocol.survives_bad_response();
        let Some(class) = failure.filter(|_| !unread) else {
            leg.finish(PrefillOutcome::Success);
            self.lease = legs.lease();
            self.arm(now);
            // What the answer has brought by now counts: else a stream that stalls would be one that never began.
            if let (Some(watchdog), State::Answering(answer)) = (&mut self.watchdog, &state) {
                watchdog.progress(now, answer.progress());
            }
            return state;
        };
        leg.finish(outcome.metric_outcome());
        self.faults.of_prefill_leg(legs.protocol, outcome);
        // The decode pod has refused by itself, and the client is hearing why.
        if matches!(state, State::Answering(_)) && self.record.status >= 400 {
            return state;
        }
        // Decode has been talking, so the KV cache has landed. TensorRT-LLM's head proves nothing.
        if answering && legs.protocol != Protocol::TrtGenerationFirst {
            if legs.protocol.aborts_by_rid() {
                self.world.metrics.decode_aborted(AbortResult::SkippedStreaming, AbortTrigger::Prefill(class));
            }
            tracing::warn!(request_id = self.record.request_id, class = class.label(), "prefill failed behind decode");
            return state;
        }
        // A prefill pod that is only late still works on it, and notices the end of its connection after seconds.
        self.abort(AbortTrigger::Prefill(class), [class == LegFailure::Timeout, true], true, effects);
        let error = engines::concurrent_failure(outcome);
        self.fail(now, &state, error, effects)
    }

    /// Refuses, or cuts an answer whose head is out.
    pub(super) fn fail(&mut self, now: Tick, state: &State, error: ApiError, effects: &mut Vec<Effect>) -> State {
        match state {
            State::Answering(answer) if !answer.is_held() => {
                self.content = answer.has_content();
                // What the client would have seen, had the head not been out.
                self.record.status = error.status.as_u16();
                effects.push(Effect::Cut(error.reason));
                self.end(now, Outcome::Failed(error.reason), effects)
            }
            _ => self.refuse(now, error, effects),
        }
    }
}

/// Warns of a prefill pod whose work is lost, once for each pod: its configuration is at fault, and every request says the
/// same. How many requests it is, `tandem_handoff_total` counts.
fn note_loss(pod: &PodState, handoff: Handoff) {
    let why = match handoff {
        Handoff::Relayed | Handoff::Needless => return,
        Handoff::Absent => "its answer holds none".to_owned(),
        Handoff::Unusable(flaw) => flaw.to_string(),
    };
    if !pod.handoff_lost.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            pod = &*pod.labels.pod,
            namespace = &*pod.labels.namespace,
            why,
            "a prefill pod's hand-off cannot be used: decode pods compute its prompts again; not told again of this pod"
        );
    }
}
