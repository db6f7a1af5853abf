//! How a request ends: what is released, who is told, what is learnt about pods.

use std::sync::Arc;

use super::{Exchange, State};
use crate::clock::Tick;
use crate::engines::leg::{LegFailure, LegOutcome};
use crate::engines::{Handoff, Protocol, sglang};
use crate::exchange::admission::Reservation;
use crate::exchange::event::{AbortPlan, Effect};
use crate::load::{Report, Verdicts};
use crate::rng::Rng;
use crate::state::findings::Finding;
use crate::telemetry::{AbortResult, AbortTrigger, Outcome};

/// Who has shown to be broken in the course of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Faults {
    /// The prefill pod.
    pub(super) prefill: bool,
    /// The decode or single pod.
    pub(super) decode: bool,
    /// The two together: each may be well with others.
    pub(super) pair: bool,
}

impl Faults {
    /// Notes a failed prefill leg. A refusal (4xx) is the client's matter, and an overloaded pod (429, 503) is not
    /// broken.
    pub(super) fn of_prefill_leg(&mut self, protocol: Protocol, outcome: &LegOutcome) {
        match outcome {
            LegOutcome::Answered { status, .. } => {
                let broken = status.is_server_error() && status.as_u16() != 503;
                // With both legs out, the leg ends only when the transfer does, which takes two.
                self.prefill |= broken && !protocol.is_concurrent();
                self.pair |= broken && protocol.is_concurrent();
            }
            LegOutcome::Failed { class: LegFailure::Timeout, .. } if protocol.is_concurrent() => self.pair = true,
            LegOutcome::Failed {
                class: LegFailure::Transport | LegFailure::BadResponse | LegFailure::Timeout, ..
            } => self.prefill = true,
            LegOutcome::Failed { .. } => {}
        }
    }
}

impl Exchange {
    pub(super) fn gone(&mut self, now: Tick, state: State, effects: &mut Vec<Effect>) -> State {
        if matches!(state, State::Prefilling(_)) {
            effects.push(Effect::CancelPrefill);
        }
        // A client that hangs up after the last byte it cared for got its answer.
        let outcome = match state {
            State::Answering(answer) if answer.complete() => answer.finish(&mut self.record),
            State::Answering(answer) => {
                // Its pod would notice the closed connection seconds later.
                self.abort(AbortTrigger::ClientGone, [false, self.twin.is_none()], false, effects);
                answer.finish(&mut self.record);
                Outcome::ClientGone
            }
            State::AwaitAnswer => {
                self.abort(AbortTrigger::ClientGone, [false, self.twin.is_none()], true, effects);
                Outcome::ClientGone
            }
            _ => Outcome::ClientGone,
        };
        if outcome == Outcome::ClientGone {
            self.record.status = 499;
        }
        self.end(now, outcome, effects)
    }

    /// Tells the pods of the pair (prefill, decode) to drop the request, where the dialect has a way of saying so other
    /// than closing the connection. `twice`: the first call can overtake the request.
    pub(super) fn abort(
        &mut self,
        trigger: AbortTrigger,
        [prefill, decode]: [bool; 2],
        twice: bool,
        effects: &mut Vec<Effect>,
    ) {
        let Some(legs) = self.legs.as_ref().filter(|_| prefill || decode) else { return };
        let Some(rid) = &legs.attempt.rid else { return };
        let knobs = self.abort_knobs;
        if knobs.timeout.is_zero() {
            self.world.metrics.decode_aborted(AbortResult::SkippedDisabled, trigger);
            return;
        }
        let pods = [(prefill, &legs.prefill), (decode, &legs.decode)];
        effects.push(Effect::Abort(Box::new(AbortPlan {
            targets: pods.into_iter().filter(|(wanted, _)| *wanted).map(|(_, pod)| pod.dial.clone()).collect(),
            body: sglang::abort_body(rid),
            timeout: knobs.timeout,
            retry_delay: Some(knobs.retry_delay).filter(|delay| twice && !delay.is_zero()),
            trigger,
        })));
    }

    /// A prefill leg that still runs when the request ends. After a complete answer it is about to end; otherwise the
    /// pods are told in their own way. An SGLang prefill pod must hear the abort before its connection closes.
    fn let_go_of_twin(&mut self, outcome: Outcome, effects: &mut Vec<Effect>) {
        let (Some(leg), Some(legs)) = (self.twin.take(), &self.legs) else { return };
        let by_rid = legs.protocol.aborts_by_rid();
        if outcome == Outcome::Success {
            effects.push(Effect::DetachPrefill(Box::new(leg)));
        } else if by_rid {
            let gone = matches!(outcome, Outcome::ClientGone | Outcome::Shutdown);
            let trigger = if gone { AbortTrigger::ClientGone } else { AbortTrigger::DecodeFailed };
            self.abort(trigger, [true, gone], true, effects);
            effects.push(Effect::DetachPrefill(Box::new(leg)));
        } else {
            effects.push(Effect::CancelPrefill);
        }
    }

    /// The prefill pod holds KV blocks that no decode pod will fetch. That is so when the hand-off was of no use, when
    /// the decode pod was not reached, and when it failed before any content. A refusal in the engine's own words (400,
    /// 404, 422) is none of these: an engine that refuses a request has its blocks freed.
    fn blocks_left_behind(&self, outcome: Outcome) -> bool {
        let relayed = self.record.handoff == Handoff::RELAYED || self.record.handoff == Protocol::AT_ONCE;
        let unanswered = match outcome {
            Outcome::EngineStatus(status) => status >= 400 && ![400, 404, 422].contains(&status),
            Outcome::Failed(_) => self.record.timings.answer_head.is_none() || !self.content,
            Outcome::EngineErrorEvent | Outcome::AnswerCut => !self.content,
            Outcome::Success | Outcome::Passed | Outcome::ClientGone | Outcome::Shutdown => false,
        };
        self.unclaimed || self.record.handoff == Handoff::UNUSABLE || relayed && unanswered
    }

    /// Gives back what the request is charged; the blocks that a finished prefill leaves behind stay charged for as long
    /// as their pod keeps them.
    pub(super) fn release_charges(&mut self, now: Tick, left_behind: bool) {
        let Some(charges) = self.charges.take() else { return };
        let prefilled = self.record.timings.prefill_end;
        // A prefill pod that keeps nothing keeps nothing for any time.
        let lease = self.lease.map(|told| self.world.knobs.pd.kv_lease.unwrap_or(told)).filter(|_| left_behind);
        match (prefilled, lease) {
            // The lease began when the prefill ended.
            (Some(prefilled), Some(lease)) => charges.tokens.strand(prefilled.plus(lease), now),
            _ => charges.tokens.finish(now),
        }
    }

    pub(super) fn end(&mut self, now: Tick, outcome: Outcome, effects: &mut Vec<Effect>) -> State {
        self.let_go_of_twin(outcome, effects);
        self.record.timings.ended = Some(now);
        self.record.outcome = outcome;
        self.report_health(now, Some(outcome));
        if outcome == Outcome::Success
            && let Some(charges) = &mut self.charges
        {
            charges.decode.note_completed();
        }
        self.release_charges(now, self.blocks_left_behind(outcome));
        self.settle_limits(outcome);
        self.in_flight = None;
        self.forget_request();
        self.reservation = Reservation::empty(&self.world.buffered);
        self.received = Vec::new();
        self.fallbacks = Vec::new();
        self.watchdog = None;
        effects.push(Effect::End(Box::new(self.record.clone())));
        State::Ended
    }

    /// Tells the health of the pods what this request has shown; `None`: another attempt follows.
    pub(super) fn report_health(&mut self, now: Tick, outcome: Option<Outcome>) {
        let faults = std::mem::take(&mut self.faults);
        let (Some(pairs), Some(charges)) = (&self.pairs, &self.charges) else { return };
        let served = outcome == Some(Outcome::Success);
        let verdict = |fault: bool| match (fault, served) {
            (true, _) => Report::Failure,
            (false, true) => Report::Success,
            (false, false) => Report::Neutral,
        };
        let verdicts =
            Verdicts { prefill: verdict(faults.prefill), decode: verdict(faults.decode), pair: verdict(faults.pair) };
        let prefill = self.legs.as_ref().map(|legs| &*legs.prefill.state);
        let jitter = Rng::new(self.seed ^ now.0).next_u64();
        let ejections = pairs.report(prefill, charges.decode.pod(), verdicts, &self.world.knobs.ejection, now, jitter);
        let decode = charges.decode.pod();
        // Pods fail whatever the name under which they were asked: it is told where all their users hear of it.
        let model: Arc<str> = Arc::from(&*decode.labels.model);
        let tell = |finding| self.world.plane.tell(&model, finding);
        if let Some(prefill) = prefill {
            if ejections.prefill.is_some() {
                tell(Finding::PodFails { pod: prefill.id });
            }
            if ejections.pair.is_some() {
                tell(Finding::PairFails { prefill: prefill.id, decode: decode.id });
            }
        }
        if ejections.decode.is_some() {
            tell(Finding::PodFails { pod: decode.id });
        }
        let named = [
            (ejections.prefill, "pod", self.record.prefill_pod.as_ref()),
            (ejections.decode, "pod", self.record.target_pod.as_ref()),
            (ejections.pair, "pair", self.record.target_pod.as_ref()),
        ];
        for (time, scope, pod) in named {
            let Some(time) = time else { continue };
            let pod = pod.map_or("", |pod| &pod.pod);
            tracing::warn!(scope, pod, seconds = time.as_secs_f64(), "ejected after failures in a row");
        }
        self.world.metrics.ejected(ejections.pods(), u64::from(ejections.pair.is_some()));
    }
}
