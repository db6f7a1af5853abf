//! The machine: states and transitions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method};

use super::admission::{Budget, Permit, Reservation};
use super::answer::{self, Answer};
use super::event::{Adapter, AnswerHead, Effect, Event, RequestHead, RoutePlan};
use super::headers::{leg_headers, names_to_strip, text};
use super::plan::{self, Plan};
use super::prepare::Prepared;
use crate::clock::Tick;
use crate::engines::leg::{LegFailure, LegOutcome, LegRequest};
use crate::engines::{self, vllm};
use crate::error::{ApiError, Reason};
use crate::fleet::{Fleet, Model, Pod};
use crate::knobs::{Knobs, KvConnector};
use crate::prefix::{PrefixIndex, PrefixUpdate};
use crate::request::{BodyError, Endpoint, ParsedBody};
use crate::routing::{self, Charges, Context, Decision, RequestFacts, SingleReason, Strategy, Target};
use crate::telemetry::{
    InFlight, Limit, Metrics, Outcome, PrefillLeg, PrefillOutcome, PrefillStage, RequestRecord, Timings,
};

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
}

enum State {
    AwaitHead,
    AwaitBody,
    Preparing(Box<Routing>),
    Prefilling(Box<Routed>),
    AwaitAnswer,
    Answering(Box<Answer>),
    Ended,
}

/// A request whose body is parsed and whose model is known.
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
    in_flight: Option<InFlight>,
    answer_headers: HeaderMap,
    prefill_host: Option<Arc<str>>,
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
            in_flight,
            answer_headers: HeaderMap::new(),
            prefill_host: None,
            record: RequestRecord {
                timings: Timings { received: now, ..Timings::default() },
                ..RequestRecord::empty()
            },
            permit,
            world,
        }
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
            (state, Event::Gone) => self.gone(now, state, effects),
            (state, Event::Shutdown) => self.shut_down(now, &state, effects),
            (State::AwaitHead, Event::Head(head)) => self.on_head(now, head, effects),
            (State::AwaitBody, Event::Body { data, end }) => self.on_body(now, data, end, effects),
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
                effects.push(Effect::ForwardChunk);
                if end { self.end_answer(now, *answer, effects) } else { State::Answering(answer) }
            }
            (State::AwaitAnswer, Event::DecodeFailed { detail }) => {
                tracing::warn!(request_id = self.record.request_id, detail, "decode leg failed");
                let text = "the decode pod did not answer";
                self.refuse(now, ApiError::new(Reason::DecodeFailed, text), effects)
            }
            (State::Answering(_), Event::DecodeFailed { detail }) => {
                tracing::warn!(request_id = self.record.request_id, detail, "decode leg broke during the answer");
                effects.push(Effect::Cut);
                self.end(now, Outcome::AnswerCut, effects)
            }
            (state, event) => self.out_of_order(now, state, &event, effects),
        };
    }

    fn on_head(&mut self, now: Tick, head: RequestHead, effects: &mut Vec<Effect>) -> State {
        self.record.request_id.clone_from(&head.request_id);
        let checked = self.check_head(&head);
        let remove = names_to_strip(&head.headers);
        let end = head.end;
        self.head = Some(head);
        match checked {
            Err(error) => self.refuse(now, error, effects),
            Ok(endpoint) => {
                self.endpoint = Some(endpoint);
                self.record.endpoint = endpoint.path();
                if end {
                    return self.on_whole_body(now, Bytes::new(), effects);
                }
                effects.push(Effect::AcceptHead { remove });
                State::AwaitBody
            }
        }
    }

    fn check_head(&self, head: &RequestHead) -> Result<Endpoint, ApiError> {
        if self.permit.is_none() {
            self.world.metrics.rejected(Limit::Streams);
            return Err(ApiError::new(Reason::Overloaded, "too many requests in flight on this gateway replica"));
        }
        answer::check_api_key(self.world.knobs.auth_bearer_token.as_ref(), &head.headers)?;
        let endpoint = Endpoint::from_path(&head.path)
            .ok_or_else(|| ApiError::new(Reason::UnknownPath, "unknown request path"))?;
        if head.method != Method::POST {
            return Err(ApiError::new(Reason::MethodNotAllowed, "method not allowed").with_header("allow", "POST"));
        }
        if announced_length(&head.headers).is_some_and(|length| length > self.world.knobs.limits.max_body_bytes as u64)
        {
            return Err(self.too_large());
        }
        Ok(endpoint)
    }

    fn too_large(&self) -> ApiError {
        let limit = self.world.knobs.limits.max_body_bytes;
        ApiError::new(Reason::BodyTooLarge, format!("the request body is longer than {limit} bytes"))
    }

    fn on_body(&mut self, now: Tick, data: Bytes, end: bool, effects: &mut Vec<Effect>) -> State {
        // The share of the common budget is taken before the bytes are kept, so that many half-sent bodies cannot
        // fill the memory.
        if self.received_bytes.saturating_add(data.len()) > self.world.knobs.limits.max_body_bytes {
            return self.refuse(now, self.too_large(), effects);
        }
        if !self.reservation.grow(data.len()) {
            self.world.metrics.rejected(Limit::BufferedBytes);
            let text = "too many request bytes are being held by this gateway replica";
            return self.refuse(now, ApiError::new(Reason::Overloaded, text), effects);
        }
        self.received_bytes += data.len();
        self.received.push(data);
        if !end {
            return State::AwaitBody;
        }
        let body = match std::mem::take(&mut self.received) {
            mut parts if parts.len() == 1 => parts.pop().unwrap_or_default(),
            parts => {
                let mut whole = BytesMut::with_capacity(self.received_bytes);
                for part in &parts {
                    whole.extend_from_slice(part);
                }
                whole.freeze()
            }
        };
        self.on_whole_body(now, body, effects)
    }

    fn on_whole_body(&mut self, now: Tick, body: Bytes, effects: &mut Vec<Effect>) -> State {
        self.record.body_bytes = body.len();
        match self.examine(body) {
            Err(error) => self.refuse(now, error, effects),
            Ok(routing) => {
                let job = routing.plan.prepare(&routing.model, &routing.body, &self.world.knobs, self.world.hash_seed);
                if job.is_heavy() {
                    effects.push(Effect::Prepare(Box::new(job)));
                    State::Preparing(Box::new(routing))
                } else {
                    self.route(now, routing, &job.run(), effects)
                }
            }
        }
    }

    /// Everything that can be refused before a pod is chosen, so that a refused request touches no counter of a pod.
    fn examine(&mut self, raw: Bytes) -> Result<Routing, ApiError> {
        let (Some(head), Some(endpoint)) = (self.head.as_ref(), self.endpoint) else {
            return Err(ApiError::new(Reason::Internal, "the body came before the head"));
        };
        if announced_length(&head.headers).is_some_and(|length| length != raw.len() as u64) {
            let text = "the request body does not have the length that content-length announces";
            return Err(ApiError::new(Reason::BodyTruncated, text));
        }
        let body = ParsedBody::parse(endpoint, text(&head.headers, "content-type"), raw).map_err(|error| {
            let reason = match &error {
                BodyError::Invalid(_) => Reason::BodyInvalid,
                BodyError::NoModel(_) => Reason::ModelMissing,
                BodyError::Multipart(_) => Reason::MultipartInvalid,
            };
            ApiError::new(reason, error.to_string())
        })?;
        self.record.stream = body.stream;
        let snapshot = self.world.fleet.load();
        let Some(model) = snapshot.model(&body.model) else {
            let shown: String = body.model.chars().take(128).collect();
            return Err(ApiError::new(Reason::ModelUnknown, format!("model {shown} does not exist"))
                .with_param("model")
                .with_header("x-error-no-model-backends", &shown));
        };
        self.record.model = Some(Arc::clone(&model.name));
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.set_model(&model.name);
        }
        if model.routable.is_empty() {
            let text = format!("error on getting pods for model {}", model.name);
            return Err(ApiError::new(Reason::NoRoutablePods, text));
        }
        let plan = plan::plan(self.adapter, model, &head.headers, &body, &self.world.knobs)?;
        self.record.strategy = plan.strategy.map(Strategy::name);
        if plan.strategy == Some(Strategy::Pd) {
            plan::check_engine(model)?;
            if let Some(key) = body.duplicate_of(&vllm::CONTROLLED_KEYS) {
                let text = format!("duplicate top-level key \"{key}\" in request body");
                return Err(ApiError::new(Reason::InvalidPdRequest, text));
            }
        }
        Ok(Routing { body, model: Arc::clone(model), plan })
    }

    fn route(&mut self, now: Tick, routing: Routing, prepared: &Prepared, effects: &mut Vec<Effect>) -> State {
        let Routing { body, model, plan } = routing;
        let Some(strategy) = plan.strategy else {
            self.record.timings.routed = Some(now);
            return self.hand_over(now, &body, None, vllm::plain_body(&body), None, effects);
        };
        let facts = RequestFacts {
            length: plan::bucket_length(&body, prepared.length),
            hashes: &prepared.hashes,
            splittable: plan.splittable,
            profile: plan.profile.as_deref(),
        };
        let context = Context {
            now,
            seed: self.seed,
            max_metric_age: self.world.knobs.scrape.max_age,
            prefix: &self.world.prefix,
        };
        match routing::select_and_charge(&model, &facts, strategy, &plan.knobs, context) {
            Err(error) => {
                if strategy == Strategy::Pd {
                    self.world.metrics.selection_failed(Some(&model.name));
                }
                let text = format!("error on selecting target pod: {error}");
                self.refuse(now, ApiError::new(Reason::SelectionFailed, text), effects)
            }
            Ok((decision, charges)) => {
                self.record.timings.routed = Some(now);
                if charges.conflicts > 0 {
                    self.world.metrics.selection_conflicts(u64::from(charges.conflicts));
                }
                if charges.blind {
                    self.world.metrics.blind_commit();
                }
                self.charges = Some(charges);
                self.record.ready_pods = model.routable.len();
                self.record.candidate_pods = decision.candidates.1;
                self.start_legs(now, body, &plan, decision, &prepared.hashes, effects)
            }
        }
    }

    fn start_legs(
        &mut self,
        now: Tick,
        body: ParsedBody,
        plan: &Plan,
        decision: Decision,
        hashes: &[u64],
        effects: &mut Vec<Effect>,
    ) -> State {
        if let Some((prefill, decode)) = decision.policies {
            self.record.policies = Some((prefill.name(), decode.name()));
        }
        let attempt = self.attempt_id();
        match decision.target {
            Target::Single { pod, reason } => {
                self.record.single_reason = (reason != SingleReason::Strategy).then(|| single_reason(reason));
                self.hand_over(now, &body, Some(&pod), vllm::plain_body(&body), Some(attempt), effects)
            }
            Target::Pair { prefill, decode } => {
                self.record.roleset.clone_from(&prefill.state.labels.roleset);
                self.record.prefill_pod = Some(Arc::clone(&prefill.state.labels));
                self.aim_at(&decode);
                self.record.timings.prefill_start = Some(now);
                self.prefill_host = Some(Arc::clone(&prefill.spec.host));
                self.world.metrics.selected_pair(&prefill.state.labels, &decode.state.labels);
                if !hashes.is_empty() {
                    self.world.prefix.offer(PrefixUpdate {
                        model: Arc::from(&*prefill.spec.model),
                        hashes: Arc::from(hashes),
                        pod: Arc::clone(&prefill.state),
                    });
                }
                let connector = prefill.spec.kv_connector.unwrap_or(plan.knobs.kv_connector);
                effects.push(Effect::ExtendTimeout(plan.knobs.prefill_request_timeout));
                effects.push(Effect::StartPrefill(Box::new(LegRequest {
                    address: Arc::clone(&prefill.address),
                    path: self.path(),
                    headers: self.leg_headers(&attempt),
                    body: vllm::prefill_body(&body, connector),
                    timeout: plan.knobs.prefill_request_timeout,
                    max_answer_bytes: self.world.knobs.limits.max_prefill_answer_bytes,
                })));
                let leg = self.world.metrics.prefill_leg(self.record.model.clone());
                State::Prefilling(Box::new(Routed { body, prefill, decode, connector, attempt, leg }))
            }
        }
    }

    fn on_prefill(&mut self, now: Tick, routed: Routed, outcome: &LegOutcome, effects: &mut Vec<Effect>) -> State {
        self.record.timings.prefill_end = Some(now);
        if let Some(charges) = &mut self.charges {
            charges.prefill = None;
        }
        let Routed { body: parsed, prefill, decode, connector, attempt, leg } = routed;
        let merged = engines::accept_prefill(outcome).and_then(|answer| {
            vllm::decode_body(&parsed, connector, answer, &prefill.spec.host).map_err(|error| {
                let text = engines::failure_text(LegFailure::BadResponse, &error.to_string());
                ApiError::new(Reason::HandoffInvalid, text)
            })
        });
        match merged {
            Err(error) => {
                let class = outcome.failure_class();
                leg.finish(outcome.metric_outcome());
                self.world.metrics.pd_prefill_failed(class, PrefillStage::BeforeResponse);
                self.refuse(now, error, effects)
            }
            Ok((body, handoff)) => {
                leg.finish(PrefillOutcome::Success);
                self.record.handoff = handoff.label();
                self.hand_over(now, &parsed, Some(&decode), body, Some(attempt), effects)
            }
        }
    }

    /// The request goes on: to `pod`, or wherever Envoy's own routes lead.
    fn hand_over(
        &mut self,
        now: Tick,
        parsed: &ParsedBody,
        pod: Option<&Arc<Pod>>,
        body: Bytes,
        attempt: Option<String>,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.record.timings.handed_over = Some(now);
        if let Some(charges) = &mut self.charges {
            charges.decode.hand_over();
        }
        let mut set_headers = Vec::with_capacity(4);
        let attempt = attempt.unwrap_or_else(|| self.attempt_id());
        match pod {
            Some(pod) => {
                self.aim_at(pod);
                if let Some(strategy) = self.record.strategy {
                    set_headers.push(("routing-strategy", strategy.to_owned()));
                }
                set_headers.push(("target-pod", pod.address.to_string()));
            }
            None => set_headers.push(("model", parsed.model.to_string())),
        }
        set_headers.push(("x-request-id", attempt.clone()));
        self.answer_headers =
            answer::marker_headers(&self.record, pod.map(|pod| &*pod.address), self.prefill_host.as_deref());
        effects.push(Effect::Route(Box::new(RoutePlan {
            address: pod.map(|pod| Arc::clone(&pod.address)),
            path: self.path(),
            set_headers,
            headers: self.leg_headers(&attempt),
            body,
        })));
        // The body is the peer's now.
        self.reservation = Reservation::empty(&self.world.buffered);
        State::AwaitAnswer
    }

    fn on_answer_head(&mut self, now: Tick, head: &AnswerHead, effects: &mut Vec<Effect>) -> State {
        self.record.timings.answer_head = Some(now);
        self.record.status = head.status.as_u16();
        effects.push(Effect::ForwardHead(self.answer_headers.clone()));
        let answer = Answer::new(head, self.record.stream);
        if head.end { self.end_answer(now, answer, effects) } else { State::Answering(Box::new(answer)) }
    }

    /// Notes the pod that will answer. Its load includes this request already.
    fn aim_at(&mut self, pod: &Pod) {
        if self.record.target_pod.is_none() {
            let load = pod.state.load.view();
            self.record.outstanding_at_start = (load.pending + load.running).saturating_sub(1);
        }
        self.record.target_pod = Some(Arc::clone(&pod.state.labels));
        self.record.target_host = pod.spec.host.to_string();
    }

    fn end_answer(&mut self, now: Tick, answer: Answer, effects: &mut Vec<Effect>) -> State {
        let outcome = answer.finish(&mut self.record);
        self.end(now, outcome, effects)
    }

    fn refuse(&mut self, now: Tick, error: ApiError, effects: &mut Vec<Effect>) -> State {
        let reason = error.reason;
        self.record.status = error.status.as_u16();
        let request_id = &self.record.request_id;
        let error = if request_id.is_empty() { error } else { error.with_header("request-id", request_id) };
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
            (_, Event::Prefill(_) | Event::Prepared(_) | Event::DecodeFailed { .. }) => state,
            (State::Preparing(_) | State::Prefilling(_), Event::Body { data, .. }) if data.is_empty() => state,
            _ => {
                if matches!(state, State::Prefilling(_)) {
                    effects.push(Effect::CancelPrefill);
                }
                let text = "the request's parts came in an order that cannot be";
                self.refuse(now, ApiError::new(Reason::Internal, text), effects)
            }
        }
    }

    fn end(&mut self, now: Tick, outcome: Outcome, effects: &mut Vec<Effect>) -> State {
        self.record.timings.ended = Some(now);
        self.record.outcome = outcome;
        match self.charges.take() {
            Some(charges) if outcome == Outcome::Success => charges.decode.complete(),
            charges => drop(charges),
        }
        self.in_flight = None;
        self.reservation = Reservation::empty(&self.world.buffered);
        self.received = Vec::new();
        effects.push(Effect::End(Box::new(self.record.clone())));
        State::Ended
    }

    /// The id that both legs of this attempt carry: the request id itself when nobody else can have it.
    fn attempt_id(&self) -> String {
        let number = self.world.attempts.fetch_add(1, Ordering::Relaxed);
        match &self.head {
            Some(head) if head.id_is_unique => head.request_id.clone(),
            Some(head) => format!("{}-{:08x}{:08x}", head.request_id, self.world.hash_seed as u32, number as u32),
            None => String::new(),
        }
    }

    fn path(&self) -> String {
        self.head.as_ref().map(|head| head.path.clone()).unwrap_or_default()
    }

    fn leg_headers(&self, attempt: &str) -> HeaderMap {
        self.head.as_ref().map(|head| leg_headers(&head.headers, attempt)).unwrap_or_default()
    }
}

/// `content-length`, when it is a number.
fn announced_length(headers: &HeaderMap) -> Option<u64> {
    text(headers, "content-length").and_then(|value| value.parse().ok())
}

fn single_reason(reason: SingleReason) -> &'static str {
    match reason {
        SingleReason::CombinedFallback => "combined_fallback",
        SingleReason::CombinedIdle => "combined_idle",
        SingleReason::CombinedUnsplittable => "combined_unsplittable",
        SingleReason::DecodeOnly => "decode_only",
        SingleReason::Strategy => "strategy",
    }
}
