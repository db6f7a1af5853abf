//! The machine: states and transitions.

mod again;
mod answering;
mod attempt;
mod claiming;
mod ending;
mod intake;
mod legs;
mod limits;
mod notes;
mod prefill;
mod stored;
mod watchdog;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;

use super::admission::{Permit, Reservation};
use super::answer::{Answer, CHOSEN_PROFILE};
use super::event::{Adapter, Effect, Event, RequestHead, RoutePlan};
use super::plan::Plan;
use super::prepare::Prepared;
use super::world::World;
use crate::clock::Tick;
use crate::engines::Protocol;
use crate::error::{ApiError, Reason};
use crate::fleet::{Model, Pod};
use crate::knobs::{AbortKnobs, DecodeWatchdog, StrategyNote};
use crate::load::Pairs;
use crate::request::{Coding, Endpoint, ParsedBody, StoredResponse};
use crate::routing::{Charges, PromptLength};
use crate::state::limits::Places;
use crate::telemetry::{InFlight, Limit, Outcome, PrefillLeg, PrefixRouting, RequestRecord, Timings};
use claiming::{Claiming, Claims};
use ending::Faults;
use stored::Locating;
use watchdog::Watchdog;

/// Asks for a summary of the decision (request), and is it (answer).
const EXPLAIN: &str = "x-tandem-explain";

/// How often a request whose prefill leg runs looks at the clock. A hand-off may count as older than it is by
/// twice as much.
const SIGN_OF_LIFE: Duration = Duration::from_millis(500);

enum State {
    AwaitHead,
    AwaitBody,
    Decoding,
    Locating(Box<Locating>),
    Resolving(Box<Unresolved>),
    Admitting(Box<Admitting>),
    Preparing(Box<Routing>),
    Claiming(Box<Claiming>),
    LookingUp(Box<Legs>),
    Prefilling(Box<Prefilling>),
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

/// The same, while its places in the limits that replicas share are being taken.
struct Admitting {
    routing: Routing,
    /// What an earlier count of the prompt came to.
    counted: Option<PromptLength>,
}

/// All that a selection needs, kept for as long as there may be another one.
struct Asked {
    body: ParsedBody,
    model: Arc<Model>,
    plan: Plan,
    prepared: Prepared,
    /// By how much the prompt of the request's session grew; asked once, since asking changes the session.
    session_growth: Option<u64>,
    /// The user, when the strategy counts users.
    user: Option<u64>,
}

/// The pods of a pair, how they are spoken to, and by which ids.
#[derive(Clone)]
struct Legs {
    prefill: Arc<Pod>,
    decode: Arc<Pod>,
    protocol: Protocol,
    attempt: Attempt,
}

impl Legs {
    /// How long the prefill pod keeps blocks that nobody fetches.
    fn lease(&self) -> Option<Duration> {
        Some(self.protocol.default_lease()).filter(|lease| !lease.is_zero())
    }
}

/// The ids of one attempt; none of them is used twice.
#[derive(Clone)]
struct Attempt {
    /// `x-request-id` of both legs.
    id: String,
    /// SGLang's `rid`; the gateway's own, so that nobody else's request has it.
    rid: Option<Arc<str>>,
    number: u64,
}

/// A prefill leg that has to end before the decode pod is asked.
struct Prefilling {
    legs: Legs,
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
    /// The stored response that the request is about, where its path says so.
    about: Option<StoredResponse>,
    /// Headers to take away of a head that ends the request: Envoy hears of them with the route.
    unanswered: Vec<String>,
    /// The pod that has the response which the request follows up.
    pinned: Option<Arc<Pod>>,
    /// The id of its own response is told.
    remembered: bool,
    /// What has to be undone before the body can be read.
    codings: Vec<Coding>,
    reservation: Reservation,
    charges: Option<Charges>,
    /// What there is to say about the strategy that was named.
    note: StrategyNote,
    /// The request's places in the limits on its model and its user; kept once it goes on to the pod that answers it.
    places: Places,
    /// The profile that the hints chose, when the client asked for that.
    chosen_profile: Option<Arc<str>>,
    in_flight: Option<InFlight>,
    answer_headers: HeaderMap,
    /// The peer was asked to wait longer for the reply to the body.
    extended: bool,
    /// What another selection would need; gone as soon as there can be none.
    asked: Option<Box<Asked>>,
    claims: Claims,
    /// The request has started over once.
    retried: bool,
    /// The pod that it must not go to again: its slot.
    avoid: Option<u32>,
    /// The pair that serves it.
    legs: Option<Legs>,
    /// The prefill leg that runs beside the decode leg.
    twin: Option<PrefillLeg>,
    /// When the task last looked whether the prefill leg has ended.
    leg_looked_at: Tick,
    /// When the outcome of the prefill leg was surely not there yet: the look before the last one. The last one proves
    /// nothing, for after a stop of the process the clock can be read before the sockets are.
    leg_pending_at: Tick,
    /// How long the prefill pod keeps the blocks of a finished prefill.
    lease: Option<Duration>,
    /// Decode pods of the roleset that may take the place of one that cannot be reached.
    fallbacks: Vec<Arc<Pod>>,
    watchdog: Option<Watchdog>,
    /// Times of the watchdog and of aborts, by the profile of the request.
    timers: DecodeWatchdog,
    /// How long a token charge may stand, by the profile of the request.
    token_load_ttl: Duration,
    abort_knobs: AbortKnobs,
    /// What was sent to the decode pod, while another one may have to get it (front only).
    routed: Option<RoutePlan>,
    faults: Faults,
    /// Where the model keeps the health of its pods.
    pairs: Option<Arc<Pairs>>,
    /// The prefill pod holds KV blocks of which nobody could be told.
    unclaimed: bool,
    /// The answer has brought content: its pod had the KV blocks.
    content: bool,
    /// When the work on the prompt began, for a selection.
    prepared_from: Tick,
    /// A selection by prefixes that has not been counted.
    prefix_routing: Option<PrefixRouting>,
    /// Summary of the decision, for a client that asked and may.
    explanation: Option<String>,
    record: RequestRecord,
    /// Moments are worth noting.
    traced: bool,
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
            about: None,
            unanswered: Vec::new(),
            pinned: None,
            remembered: false,
            codings: Vec::new(),
            reservation,
            charges: None,
            note: StrategyNote::default(),
            places: Places::default(),
            chosen_profile: None,
            in_flight,
            answer_headers: HeaderMap::new(),
            extended: false,
            asked: None,
            claims: Claims::default(),
            retried: false,
            avoid: None,
            legs: None,
            twin: None,
            leg_looked_at: now,
            leg_pending_at: now,
            lease: None,
            fallbacks: Vec::new(),
            watchdog: None,
            timers: world.knobs.pd.watchdog,
            token_load_ttl: world.knobs.pd.token_load_ttl,
            abort_knobs: world.knobs.pd.abort,
            routed: None,
            faults: Faults::default(),
            pairs: None,
            unclaimed: false,
            content: false,
            prepared_from: now,
            prefix_routing: None,
            explanation: None,
            record: RequestRecord {
                timings: Timings { received: now, ..Timings::default() },
                ..RequestRecord::empty()
            },
            traced: false,
            permit,
            world,
        }
    }

    /// The request is sampled: moments inside a transition become events of its span.
    pub fn set_traced(&mut self, traced: bool) {
        self.traced = traced;
    }

    /// The pods that the request is charged to, by the numbers that replicas know them by; `None` = it is not charged.
    pub fn charged_pods(&self) -> Option<[Option<u64>; 2]> {
        let charges = self.charges.as_ref()?;
        Some([Some(charges.decode.pod().id), charges.prefill.as_ref().map(|charge| charge.pod().id)])
    }

    /// False until the head has arrived: nobody waits for an answer yet.
    pub fn begun(&self) -> bool {
        !matches!(self.state, State::AwaitHead)
    }

    /// True while the decode pod has not heard of the request, but will once the prefill leg has ended well.
    pub fn waits_for_prefill(&self) -> bool {
        matches!(self.state, State::Prefilling(_))
    }

    /// True once [`Effect::End`] was asked for.
    pub fn ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// What is known about the request so far, for spans.
    pub fn record(&self) -> &RequestRecord {
        &self.record
    }

    /// When [`Event::Timer`] is wanted, if nothing else happens before.
    pub fn deadline(&self) -> Option<Tick> {
        match &self.state {
            // Not a limit (the call has its own), but a sign of life: see [`Exchange::handoff_age`].
            State::Prefilling(_) => Some(self.leg_looked_at.plus(SIGN_OF_LIFE)),
            State::AwaitAnswer | State::Answering(_) => self.watchdog.as_ref().and_then(Watchdog::deadline),
            _ => None,
        }
    }

    /// Takes an event in and appends what is to be done.
    pub fn on(&mut self, now: Tick, event: Event, effects: &mut Vec<Effect>) {
        let state = std::mem::replace(&mut self.state, State::Ended);
        self.state = match (state, event) {
            (State::Ended, _) => State::Ended,
            (State::Prefilling(prefilling), Event::GoneAfterPrefill(outcome)) => {
                self.gone_after_prefill(now, *prefilling, &outcome, effects)
            }
            (state, Event::GoneAfterPrefill(outcome)) if self.twin.is_some() => {
                match self.on_twin(now, state, &outcome, effects) {
                    State::Ended => State::Ended,
                    state => self.gone(now, state, effects),
                }
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
            (State::Decoding, Event::Decoded(decoded)) => self.on_decoded(now, decoded, effects),
            (State::Locating(locating), Event::ResponseFound(home)) => {
                self.on_response_found(now, *locating, home, effects)
            }
            (State::Resolving(unresolved), Event::Prepared(counted)) => {
                self.on_counted(now, *unresolved, counted, effects)
            }
            (State::Admitting(admitting), Event::LimitsCharged(verdict)) => {
                self.on_limits(now, *admitting, verdict, effects)
            }
            (State::Preparing(routing), Event::Prepared(prepared)) => self.route(now, *routing, prepared, effects),
            (State::Claiming(claiming), Event::Claimed(claimed)) => self.on_claimed(now, *claiming, claimed, effects),
            (State::LookingUp(legs), Event::LookedUp(found)) => self.on_looked_up(now, *legs, found, effects),
            (State::Prefilling(prefilling), Event::Prefill(outcome)) => {
                self.on_prefill(now, *prefilling, &outcome, effects)
            }
            (state, Event::Prefill(outcome)) if self.twin.is_some() => self.on_twin(now, state, &outcome, effects),
            (State::Prefilling(prefilling), Event::Timer) => {
                self.leg_pending_at = std::mem::replace(&mut self.leg_looked_at, now);
                State::Prefilling(prefilling)
            }
            (state, Event::Timer) => self.on_timer(now, state, effects),
            (state, Event::ServedBy(address)) => {
                self.served_by(now, &address);
                state
            }
            (state, Event::NotAnswered) => {
                self.faults.decode = true;
                state
            }
            (State::AwaitAnswer, Event::AnswerHead(head)) => self.on_answer_head(now, &head, effects),
            // The peer answers a request that was never routed: Envoy's own error (a body over its buffer limit).
            (state, Event::AnswerHead(head)) if !matches!(state, State::Answering(_)) => {
                if matches!(state, State::Prefilling(_)) {
                    effects.push(Effect::CancelPrefill);
                }
                self.on_answer_head(now, &head, effects)
            }
            (State::Answering(answer), Event::AnswerChunk { data, end }) => {
                self.on_answer_chunk(now, answer, &data, end, effects)
            }
            (state @ (State::AwaitAnswer | State::Answering(_)), Event::DecodeFailed { detail, unreachable }) => {
                self.on_decode_failed(now, &state, &detail, unreachable, effects)
            }
            (state, event) => self.out_of_order(now, state, &event, effects),
        };
    }

    fn refuse(&mut self, now: Tick, error: ApiError, effects: &mut Vec<Effect>) -> State {
        let reason = error.reason;
        self.record.status = error.status.as_u16();
        let request_id = &self.record.request_id;
        let error = if request_id.is_empty() { error } else { error.with_header("request-id", request_id) };
        let error = match &self.record.client_request_id {
            Some(id) => error.with_header("x-request-id", id),
            None => error,
        };
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

    fn shut_down(&mut self, now: Tick, state: &State, effects: &mut Vec<Effect>) -> State {
        match state {
            State::Prefilling(_) => effects.push(Effect::CancelPrefill),
            State::Answering(answer) if !answer.is_held() => {
                effects.push(Effect::Cut(Reason::ShuttingDown));
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
            (
                _,
                Event::Prefill(_)
                | Event::Decoded(_)
                | Event::ResponseFound(_)
                | Event::Prepared(_)
                | Event::LimitsCharged(_)
                | Event::LookedUp(_)
                | Event::Claimed(_)
                | Event::DecodeFailed { .. }
                | Event::BodyTimeout,
            ) => state,
            (
                State::Decoding
                | State::Locating(_)
                | State::Resolving(_)
                | State::Admitting(_)
                | State::Preparing(_)
                | State::Claiming(_)
                | State::LookingUp(_)
                | State::Prefilling(_),
                Event::Body { data, .. },
            ) if data.is_empty() => state,
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
            State::Answering(answer) if !answer.is_held() => {
                effects.push(Effect::Cut(Reason::Internal));
                return self.end(now, Outcome::Failed(Reason::Internal), effects);
            }
            _ => {}
        }
        self.refuse(now, ApiError::new(Reason::Internal, text), effects)
    }
}
