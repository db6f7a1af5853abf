//! The machine: states and transitions.

mod intake;
mod legs;

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;

use super::admission::{Budget, Permit, Reservation};
use super::answer::{Answer, CHOSEN_PROFILE};
use super::event::{Adapter, AnswerHead, Effect, Event, RequestHead};
use super::plan::Plan;
use crate::clock::Tick;
use crate::engines::vllm::Handoff;
use crate::error::{ApiError, Reason};
use crate::fleet::{Fleet, Model, Pod};
use crate::knobs::{Knobs, KvConnector};
use crate::load::{Ledger, RateCharge, Sessions, SweepReason};
use crate::prefix::PrefixIndex;
use crate::request::{Endpoint, ParsedBody};
use crate::routing::{Charges, Journal};
use crate::telemetry::{InFlight, Limit, Metrics, Outcome, PrefillLeg, RequestRecord, Timings};

/// What every exchange of a replica shares. All of it can be used without waiting.
#[derive(Debug)]
pub struct World {
    /// The current snapshot.
    pub fleet: Arc<Fleet>,
    /// Configuration.
    pub knobs: Arc<Knobs>,
    /// Prefix index.
    pub prefix: Arc<PrefixIndex>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Bytes of request bodies held.
    pub buffered: Arc<Budget>,
    /// Open streams.
    pub streams: Arc<Budget>,
    /// Seed of the prefix hashes.
    pub hash_seed: u64,
    /// Numbers attempts, so that ids made from shared traces differ.
    pub attempts: AtomicU64,
    /// Token charges of requests in flight, and of blocks that a lease still holds.
    pub ledger: Arc<Ledger>,
    /// Last prompt sizes of sessions.
    pub sessions: Sessions,
    /// The last decisions.
    pub journal: Arc<Journal>,
}

impl World {
    /// A world in which no request has begun. `hash_seed` seeds the prefix hashes and the session table.
    pub fn new(knobs: Arc<Knobs>, fleet: Arc<Fleet>, metrics: Arc<Metrics>, hash_seed: u64) -> World {
        World {
            fleet,
            prefix: Arc::new(PrefixIndex::new(&knobs.prefix)),
            metrics,
            buffered: Budget::new(knobs.limits.max_buffered_bytes),
            streams: Budget::new(knobs.limits.max_streams),
            hash_seed,
            attempts: AtomicU64::new(0),
            ledger: Arc::default(),
            sessions: Sessions::new(knobs.max_sessions, hash_seed),
            journal: Arc::default(),
            knobs,
        }
    }
}

/// Asks for a summary of the decision (request), and is it (answer).
const EXPLAIN: &str = "x-tandem-explain";

impl World {
    /// The janitor's round over the token charges. A force-release means that a release was lost, which should not
    /// happen: it is logged and counted.
    pub fn sweep_token_charges(&self, now: Tick) {
        for swept in self.ledger.sweep(now) {
            let side = if swept.decode { "decode" } else { "prefill" };
            let (request_id, pod, tokens, age_s) = (swept.request_id, swept.pod, swept.tokens, swept.age.as_secs());
            match swept.reason {
                SweepReason::Expired => {
                    self.metrics.token_charge_forced(side);
                    tracing::warn!(request_id, pod, side, tokens, age_s, "token charge force-released after its TTL");
                }
                SweepReason::LeaseEnded => {
                    tracing::debug!(request_id, pod, tokens, age_s, "the lease of stranded KV blocks is over");
                }
            }
        }
    }
}

enum State {
    AwaitHead,
    AwaitBody,
    Resolving(Box<Unresolved>),
    Preparing(Box<Routing>),
    Prefilling(Box<Routed>),
    AwaitAnswer,
    Answering(Box<Answer>),
    Ended,
}

/// A request whose profile depends on the length of its prompt, which is being counted.
struct Unresolved {
    body: ParsedBody,
    model: Arc<Model>,
    /// Some hint asks for the length; else nothing was counted.
    asked: bool,
}

/// A request whose body is parsed and whose model and plan are known.
struct Routing {
    body: ParsedBody,
    model: Arc<Model>,
    plan: Plan,
}

/// A request whose prefill leg runs.
struct Routed {
    body: ParsedBody,
    prefill: Arc<Pod>,
    decode: Arc<Pod>,
    connector: KvConnector,
    attempt: String,
    /// Counts the leg as cancelled unless its outcome arrives.
    leg: PrefillLeg,
}

/// One request from its head to its end.
pub struct Exchange {
    world: Arc<World>,
    adapter: Adapter,
    seed: u64,
    state: State,
    head: Option<RequestHead>,
    endpoint: Option<Endpoint>,
    received: Vec<Bytes>,
    received_bytes: usize,
    reservation: Reservation,
    charges: Option<Charges>,
    /// The request's place in the model's rate; kept once it goes on to the pod that answers it.
    rate: Option<RateCharge>,
    /// The profile that the hints chose, when the client asked for that.
    chosen_profile: Option<Arc<str>>,
    in_flight: Option<InFlight>,
    answer_headers: HeaderMap,
    /// The peer was asked to wait longer for the reply to the body.
    extended: bool,
    prefill_host: Option<Arc<str>>,
    /// The prefill pod holds KV blocks of which nobody could be told.
    unclaimed: bool,
    /// The answer has brought content: its pod had the KV blocks.
    content: bool,
    /// Summary of the decision, for a client that asked and may.
    explanation: Option<String>,
    record: RequestRecord,
    permit: Option<Permit>,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange").field("request_id", &self.record.request_id).finish_non_exhaustive()
    }
}

impl Exchange {
    /// A request that has just begun. `seed` fixes its random choices.
    pub fn new(world: Arc<World>, adapter: Adapter, seed: u64, now: Tick) -> Exchange {
        let permit = world.streams.permit();
        let reservation = Reservation::empty(&world.buffered);
        let in_flight = Some(world.metrics.enter(None));
        Exchange {
            adapter,
            seed,
            state: State::AwaitHead,
            head: None,
            endpoint: None,
            received: Vec::new(),
            received_bytes: 0,
            reservation,
            charges: None,
            rate: None,
            chosen_profile: None,
            in_flight,
            answer_headers: HeaderMap::new(),
            extended: false,
            prefill_host: None,
            unclaimed: false,
            content: false,
            explanation: None,
            record: RequestRecord {
                timings: Timings { received: now, ..Timings::default() },
                ..RequestRecord::empty()
            },
            permit,
            world,
        }
    }

    /// False until the head has arrived: nobody waits for an answer yet.
    pub fn begun(&self) -> bool {
        !matches!(self.state, State::AwaitHead)
    }

    /// True once [`Effect::End`] was asked for.
    pub fn ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// What is known about the request so far, for spans.
    pub fn record(&self) -> &RequestRecord {
        &self.record
    }

    /// Takes an event in and appends what is to be done.
    pub fn on(&mut self, now: Tick, event: Event, effects: &mut Vec<Effect>) {
        let state = std::mem::replace(&mut self.state, State::Ended);
        self.state = match (state, event) {
            (State::Ended, _) => State::Ended,
            (State::Prefilling(routed), Event::GoneAfterPrefill(outcome)) => {
                self.gone_after_prefill(now, *routed, &outcome, effects)
            }
            (state, Event::Gone | Event::GoneAfterPrefill(_)) => self.gone(now, state, effects),
            (state, Event::Shutdown) => self.shut_down(now, &state, effects),
            (state, Event::Misconfigured(text)) => {
                tracing::error!(text, "the peer is set up in a way that cannot work");
                self.defect(now, &state, text, effects)
            }
            (State::AwaitHead, Event::Head(head)) => self.on_head(now, head, effects),
            (State::AwaitBody, Event::Body { data, end }) => self.on_body(now, data, end, effects),
            (State::AwaitBody, Event::BodyTimeout) => {
                self.world.metrics.rejected(Limit::FrontBodyTime);
                let text = "the request body did not arrive in time";
                self.refuse(now, ApiError::new(Reason::BodyTimeout, text), effects)
            }
            (State::AwaitBody, Event::BodyTooLarge) => self.refuse(now, self.too_large(), effects),
            (State::Resolving(unresolved), Event::Prepared(counted)) => {
                self.on_counted(now, *unresolved, counted, effects)
            }
            (State::Preparing(routing), Event::Prepared(prepared)) => self.route(now, *routing, &prepared, effects),
            (State::Prefilling(routed), Event::Prefill(outcome)) => self.on_prefill(now, *routed, &outcome, effects),
            (State::AwaitAnswer, Event::AnswerHead(head)) => self.on_answer_head(now, &head, effects),
            // The peer answers a request that was never routed: Envoy's own error (a body over its buffer limit).
            (state, Event::AnswerHead(head)) if !matches!(state, State::Answering(_)) => {
                if matches!(state, State::Prefilling(_)) {
                    effects.push(Effect::CancelPrefill);
                }
                self.on_answer_head(now, &head, effects)
            }
            (State::Answering(mut answer), Event::AnswerChunk { data, end }) => {
                answer.feed(&data, now, &mut self.record);
                if let Some(charges) = &self.charges {
                    charges.tokens.touch(now);
                }
                effects.push(Effect::ForwardChunk);
                if end { self.end_answer(now, *answer, effects) } else { State::Answering(answer) }
            }
            (State::AwaitAnswer, Event::DecodeFailed { detail }) => {
                tracing::warn!(request_id = self.record.request_id, detail, "decode leg failed");
                let text = "the decode pod did not answer";
                self.refuse(now, ApiError::new(Reason::DecodeFailed, text), effects)
            }
            (State::Answering(answer), Event::DecodeFailed { detail }) => {
                self.content = answer.has_content();
                tracing::warn!(request_id = self.record.request_id, detail, "decode leg broke during the answer");
                effects.push(Effect::Cut);
                self.end(now, Outcome::AnswerCut, effects)
            }
            (state, event) => self.out_of_order(now, state, &event, effects),
        };
    }

    fn on_answer_head(&mut self, now: Tick, head: &AnswerHead, effects: &mut Vec<Effect>) -> State {
        self.record.timings.answer_head = Some(now);
        self.record.status = head.status.as_u16();
        // A pod that answers has the request: the front no longer holds its bytes.
        self.reservation = Reservation::empty(&self.world.buffered);
        effects.push(Effect::ForwardHead(self.answer_headers.clone()));
        let answer = Answer::new(head, self.record.stream);
        if head.end { self.end_answer(now, answer, effects) } else { State::Answering(Box::new(answer)) }
    }

    fn end_answer(&mut self, now: Tick, answer: Answer, effects: &mut Vec<Effect>) -> State {
        self.content = answer.has_content();
        let outcome = answer.finish(&mut self.record);
        self.end(now, outcome, effects)
    }

    fn refuse(&mut self, now: Tick, error: ApiError, effects: &mut Vec<Effect>) -> State {
        let reason = error.reason;
        self.record.status = error.status.as_u16();
        let request_id = &self.record.request_id;
        let error = if request_id.is_empty() { error } else { error.with_header("request-id", request_id) };
        let error = match &self.chosen_profile {
            Some(name) => error.with_header(CHOSEN_PROFILE, name),
            None => error,
        };
        let error = match &self.explanation {
            Some(summary) => error.with_header(EXPLAIN, summary),
            None => error,
        };
        effects.push(Effect::Refuse(Box::new(error)));
        self.end(now, Outcome::Failed(reason), effects)
    }

    fn gone(&mut self, now: Tick, state: State, effects: &mut Vec<Effect>) -> State {
        if matches!(state, State::Prefilling(_)) {
            effects.push(Effect::CancelPrefill);
        }
        // A client that hangs up after the last byte it cared for got its answer.
        let outcome = match state {
            State::Answering(answer) if answer.complete() => answer.finish(&mut self.record),
            State::Answering(answer) => {
                answer.finish(&mut self.record);
                Outcome::ClientGone
            }
            _ => Outcome::ClientGone,
        };
        if outcome == Outcome::ClientGone {
            self.record.status = 499;
        }
        self.end(now, outcome, effects)
    }

    fn shut_down(&mut self, now: Tick, state: &State, effects: &mut Vec<Effect>) -> State {
        match state {
            State::Prefilling(_) => effects.push(Effect::CancelPrefill),
            State::Answering(_) => {
                effects.push(Effect::Cut);
                return self.end(now, Outcome::Shutdown, effects);
            }
            _ => {}
        }
        let text = "server shutdown in progress";
        self.refuse(now, ApiError::new(Reason::ShuttingDown, text), effects)
    }

    fn out_of_order(&mut self, now: Tick, state: State, event: &Event, effects: &mut Vec<Effect>) -> State {
        match (&state, event) {
            // Late outcomes of work that the machine has moved on from.
            (_, Event::Prefill(_) | Event::Prepared(_) | Event::DecodeFailed { .. } | Event::BodyTimeout) => state,
            (State::Resolving(_) | State::Preparing(_) | State::Prefilling(_), Event::Body { data, .. })
                if data.is_empty() =>
            {
                state
            }
            _ => self.defect(now, &state, "the request's parts came in an order that cannot be", effects),
        }
    }

    /// Something that must not happen. An answer whose head is out can only be cut.
    fn defect(
        &mut self,
        now: Tick,
        state: &State,
        text: impl Into<Cow<'static, str>>,
        effects: &mut Vec<Effect>,
    ) -> State {
        match state {
            State::Prefilling(_) => effects.push(Effect::CancelPrefill),
            State::Answering(_) => {
                effects.push(Effect::Cut);
                return self.end(now, Outcome::Failed(Reason::Internal), effects);
            }
            _ => {}
        }
        self.refuse(now, ApiError::new(Reason::Internal, text), effects)
    }

    /// The prefill pod holds KV blocks that no decode pod will fetch. That is so when the hand-off was of no use, when
    /// the decode pod was not reached, and when it failed before any content. A refusal in the engine's own words (400,
    /// 404, 422) is none of these: an engine that refuses a request has its blocks freed.
    fn blocks_left_behind(&self, outcome: Outcome) -> bool {
        let relayed = self.record.handoff == Handoff::Relayed.label();
        let unanswered = match outcome {
            Outcome::EngineStatus(status) => status >= 400 && ![400, 404, 422].contains(&status),
            Outcome::Failed(_) => self.record.timings.answer_head.is_none(),
            Outcome::EngineErrorEvent | Outcome::AnswerCut => !self.content,
            Outcome::Success | Outcome::ClientGone | Outcome::Shutdown => false,
        };
        self.unclaimed || self.record.handoff == Handoff::Unusable.label() || relayed && unanswered
    }

    fn end(&mut self, now: Tick, outcome: Outcome, effects: &mut Vec<Effect>) -> State {
        self.record.timings.ended = Some(now);
        self.record.outcome = outcome;
        if let Some(charges) = self.charges.take() {
            if outcome == Outcome::Success {
                charges.decode.complete();
            }
            if self.blocks_left_behind(outcome) {
                // The lease began when the prefill ended.
                let prefilled = self.record.timings.prefill_end.unwrap_or(now);
                charges.tokens.strand(prefilled.plus(self.world.knobs.pd.kv_lease.unwrap_or(Duration::from_secs(30))), now);
            } else {
                charges.tokens.finish(now);
            }
        }
        // Not served: its place is free for another one. A client that leaves while a pod works for it has used its place,
        // or hanging up would get around the limit.
        if let Some(rate) =
            self.rate.take().filter(|_| outcome == Outcome::ClientGone && self.record.timings.prefill_start.is_some())
        {
            rate.keep();
        }
        self.in_flight = None;
        self.reservation = Reservation::empty(&self.world.buffered);
        self.received = Vec::new();
        effects.push(Effect::End(Box::new(self.record.clone())));
        State::Ended
    }
}
