//! The answer of the decode (or single) pod goes by.
//!
//! Behind Envoy it is passed on as it comes. The front holds a stream back until something was generated, where the request
//! can still start over: an engine that cannot get at the KV cache says so inside a stream that has begun with 200. Where it
//! cannot, nothing is held but a head with nothing behind it, which an engine may send before it has anything: a leg that
//! fails by then is told by a status.
//!
//! What follows an error event is not passed on. Where the event is the API's own way of ending a failed answer, the stream
//! then ends well; any other is broken off, lest it look complete.

use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, StatusCode};

use super::{Exchange, State};
use crate::clock::Tick;
use crate::engines::Finished;
use crate::error::{ApiError, Reason};
use crate::exchange::answer::Answer;
use crate::exchange::event::{Adapter, AnswerHead, Effect, OwnAnswer, RoutePlan};
use crate::fleet::Pod;
use crate::response::{AnswerKind, AnswerWatch, Api};
use crate::telemetry::{AbortTrigger, Outcome, RetryReason, WatchdogPhase};

impl Exchange {
    pub(super) fn on_answer_head(&mut self, now: Tick, head: &AnswerHead, effects: &mut Vec<Effect>) -> State {
        self.record.timings.answer_head = Some(now);
        self.record.status = head.status.as_u16();
        let api = self.endpoint.map(Api::of).unwrap_or_default();
        let mut answer = Answer::new(head, self.record.stream, api);
        if self.adapter == Adapter::Front && self.legs.is_some() && answer.can_be_held() {
            answer.hold(self.may_start_over());
        } else {
            // A pod that answers has the request.
            self.forget_request();
            effects.push(Effect::ForwardHead(self.answer_headers.clone()));
        }
        if head.end { self.end_answer(now, answer, effects) } else { State::Answering(Box::new(answer)) }
    }

    pub(super) fn on_answer_chunk(
        &mut self,
        now: Tick,
        mut answer: Box<Answer>,
        data: &Bytes,
        end: bool,
        effects: &mut Vec<Effect>,
    ) -> State {
        // An error went by before: nothing after it may look like a good end.
        if answer.has_failed() {
            return self.after_error(now, answer, data, end, effects);
        }
        let before = answer.bytes();
        answer.feed(data, now, &mut self.record);
        self.remember_response(now, &answer);
        if let Some(charges) = &self.charges {
            charges.tokens.touch(now);
        }
        if let Some(watchdog) = &mut self.watchdog {
            watchdog.progress(now, answer.progress());
        }
        // What its clients understand is passed on, where there is no second attempt.
        let understood = answer.has_failed_as_documented() && !answer.is_held_for_content();
        if answer.has_failed() && answer.is_held() && !understood {
            return self.failed_before_content(now, *answer, effects);
        }
        if let Some(held) = answer.release(end) {
            self.forget_request();
            effects.push(Effect::ForwardHead(self.answer_headers.clone()));
            effects.extend(held.into_iter().map(Effect::ForwardHeld));
        }
        if answer.is_held() {
            answer.keep(data.clone());
            return State::Answering(answer);
        }
        let error_end = answer.error_end().map(|end| usize::try_from(end.saturating_sub(before)).unwrap_or(usize::MAX));
        match error_end {
            Some(error_end) if error_end < data.len() => {
                effects.push(Effect::ReplaceChunk(data.slice(..error_end)));
                // Envoy is told with its next message, so that this one reaches the client.
                if self.adapter == Adapter::Front && !answer.has_failed_as_documented() {
                    return self.cut_after_error(now, *answer, effects);
                }
            }
            _ => effects.push(Effect::ForwardChunk),
        }
        if self.adapter == Adapter::Front && answer.has_failed_as_documented() {
            // The client has all that it waits for, and the pod may take its time.
            effects.push(Effect::CompleteAnswer);
            return self.end_answer(now, *answer, effects);
        }
        if end { self.end_answer(now, *answer, effects) } else { State::Answering(answer) }
    }

    /// Bytes after an error event. Envoy ends an answer only when its pod does, so until then they are left out.
    fn after_error(
        &mut self,
        now: Tick,
        answer: Box<Answer>,
        data: &Bytes,
        end: bool,
        effects: &mut Vec<Effect>,
    ) -> State {
        if !answer.has_failed_as_documented() {
            return self.cut_after_error(now, *answer, effects);
        }
        effects.push(if data.is_empty() { Effect::ForwardChunk } else { Effect::ReplaceChunk(Bytes::new()) });
        if end { self.end_answer(now, *answer, effects) } else { State::Answering(answer) }
    }

    /// Whether an error before any content can have the request start over: not if it has done so before, if its pods have
    /// the ids of this attempt, or if there is no other pod that would prefill it. (Whether that one fits is seen then.)
    fn may_start_over(&self) -> bool {
        let (Some(legs), Some(asked)) = (&self.legs, &self.asked) else { return false };
        let slot = legs.prefill.state.slot;
        let filter = asked.plan.filter.as_ref();
        let other =
            |pod: &Arc<Pod>| pod.state.slot != slot && filter.is_none_or(|filter| filter.matches(&pod.spec.labels));
        let mut prefills = asked.model.rolesets.iter().flat_map(|set| &set.prefill);
        !self.retried && !self.is_concurrent() && (prefills.any(other) || asked.model.standalone.iter().any(other))
    }

    fn cut_after_error(&mut self, now: Tick, answer: Answer, effects: &mut Vec<Effect>) -> State {
        effects.push(Effect::Cut(Reason::DecodeFailed));
        self.end_answer(now, answer, effects)
    }

    /// The engine reported an error inside a stream of which the client has seen nothing.
    fn failed_before_content(&mut self, now: Tick, mut answer: Answer, effects: &mut Vec<Effect>) -> State {
        answer.finish_reading(&mut self.record);
        effects.push(Effect::DropAnswer);
        self.faults.pair = true;
        let avoid = self.legs.as_ref().map(|legs| legs.prefill.state.slot);
        if !self.is_concurrent()
            && let Some(state) = self.again(now, RetryReason::ErrorBeforeContent, avoid, effects)
        {
            return state;
        }
        let text = "the decode pod reported an error before it generated anything";
        self.refuse(now, ApiError::new(Reason::DecodeFailed, text).with_status(StatusCode::BAD_GATEWAY), effects)
    }

    pub(super) fn end_answer(&mut self, now: Tick, mut answer: Answer, effects: &mut Vec<Effect>) -> State {
        self.content = answer.has_content();
        answer.read_to_end();
        self.remember_response(now, &answer);
        let outcome = answer.finish(&mut self.record);
        // What a stored response has used was counted when it was made.
        self.record.usage = self.record.usage.filter(|_| self.about.is_none());
        match outcome {
            // An overloaded pod is not broken, and a refusal is the client's matter.
            Outcome::EngineStatus(status) if status >= 500 && status != 503 => self.fault_of_answer(),
            Outcome::EngineErrorEvent if !self.content => self.fault_of_answer(),
            _ => {}
        }
        self.end(now, outcome, effects)
    }

    /// The decode pod failed after a prefill that went well: the two do not get on. A single pod has only itself.
    fn fault_of_answer(&mut self) {
        let paired = self.legs.is_some();
        self.faults.pair |= paired;
        self.faults.decode |= !paired;
    }

    pub(super) fn on_decode_failed(
        &mut self,
        now: Tick,
        state: &State,
        detail: &str,
        unreachable: bool,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.faults.decode = true;
        match state {
            State::Answering(answer) if !answer.is_held() => {
                self.content = answer.has_content();
                tracing::warn!(request_id = self.record.request_id, detail, "decode leg broke during the answer");
                effects.push(Effect::Cut(Reason::DecodeFailed));
                self.end(now, Outcome::AnswerCut, effects)
            }
            _ => {
                tracing::warn!(request_id = self.record.request_id, detail, "decode leg failed");
                if unreachable && let Some(state) = self.elsewhere(now, effects) {
                    return state;
                }
                let text = "the decode pod did not answer";
                self.refuse(now, ApiError::new(Reason::DecodeFailed, text), effects)
            }
        }
    }

    /// The pod that was to answer has seen nothing of the request: another decode pod of the roleset takes over, or the
    /// request starts over.
    fn elsewhere(&mut self, now: Tick, effects: &mut Vec<Effect>) -> Option<State> {
        if let Some(plan) = self.routed.clone()
            && let Some(state) = self.next_decode_pod(now, plan, effects)
        {
            return Some(state);
        }
        if self.is_concurrent() {
            return None;
        }
        let avoid = match (&self.legs, &self.charges) {
            (Some(legs), _) => Some(legs.prefill.state.slot),
            (None, Some(charges)) => Some(charges.decode.pod().slot),
            (None, None) => None,
        };
        self.again(now, RetryReason::DecodeUnreachable, avoid, effects)
    }

    /// Both pods have the ids of this attempt, and may be at work on it: the request does not start over.
    fn is_concurrent(&self) -> bool {
        self.legs.as_ref().is_some_and(|legs| legs.protocol.is_concurrent())
    }

    /// Starts the watchdog: the decode pod has all that it needs.
    pub(super) fn arm(&mut self, now: Tick) {
        let sglang = self.legs.as_ref().is_some_and(|legs| legs.protocol.aborts_by_rid());
        self.watchdog = Some(super::Watchdog::arm(&self.timers, sglang, self.record.stream, now));
    }

    pub(super) fn on_timer(&mut self, now: Tick, state: State, effects: &mut Vec<Effect>) -> State {
        let Some((phase, time)) = self.watchdog.as_ref().and_then(|watchdog| watchdog.expired(now)) else {
            return state;
        };
        self.world.metrics.decode_watchdog(phase);
        self.fault_of_answer();
        self.abort(AbortTrigger::Watchdog(phase), [false, true], false, effects);
        let pod = self.record.target_pod.as_ref().map_or("", |pod| &pod.pod);
        let verb = if phase == WatchdogPhase::Response { "finish" } else { "start" };
        let text = format!("decode pod {pod} did not {verb} responding within {} s", time.as_secs_f64());
        tracing::warn!(request_id = self.record.request_id, phase = phase.label(), text, "decode watchdog");
        self.fail(now, &state, ApiError::new(Reason::DecodeTimeout, text), effects)
    }

    /// The prefill pod had the whole answer.
    pub(super) fn answer_with(&mut self, now: Tick, finished: Finished, effects: &mut Vec<Effect>) -> State {
        self.record.status = 200;
        self.record.timings.answer_head = Some(now);
        self.record.timings.first_chunk = Some(now);
        self.record.timings.last_chunk = Some(now);
        self.record.answer_bytes = finished.body.len() as u64;
        let mut watch = AnswerWatch::new(AnswerKind::of(Some(finished.content_type), None, false), Api::OpenAi);
        watch.feed(&finished.body);
        watch.finish();
        self.record.usage = watch.usage();
        self.remark(None);
        let mut headers: HeaderMap = std::mem::take(&mut self.answer_headers);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(finished.content_type));
        effects.push(Effect::Answer(Box::new(OwnAnswer { headers, body: finished.body })));
        self.end(now, Outcome::Success, effects)
    }

    /// Keeps what another pod would be sent.
    pub(super) fn note_route(&mut self, plan: &RoutePlan) {
        self.routed = (self.adapter == Adapter::Front && !self.fallbacks.is_empty()).then(|| plan.clone());
    }
}
