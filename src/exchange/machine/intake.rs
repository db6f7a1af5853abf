//! From the head to a parsed request whose model and plan are known.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_ENCODING;
use http::{HeaderMap, HeaderValue, Method};

use super::stored::{Locating, previous_response};
use super::{Exchange, Routing, State, Unresolved};
use crate::clock::Tick;
use crate::engines::{self, Protocol};
use crate::error::{ApiError, Reason};
use crate::exchange::admission::Reservation;
use crate::exchange::decode::{DecodeJob, Decoded};
use crate::exchange::event::{Adapter, Effect, RequestHead, WakeCall};
use crate::exchange::headers::{caller_request_id, names_to_strip, names_to_strip_in_passing, text, withhold_token};
use crate::exchange::prepare::Prepared;
use crate::exchange::{answer, auto, plan};
use crate::fleet::{ClaimState, Model, Pod, join_host_port};
use crate::request::{
    ACCEPTED_CODINGS, BodyError, Coding, DecodeError, Endpoint, ParsedBody, StoredResponse, UnreadableForm, embeddings,
};
use crate::routing::{PromptLength, Strategy};
use crate::telemetry::{Limit, Outcome, moment};

/// When a client of a model without pods may ask again, seconds (the reference's, for sleeping models).
pub(super) const RETRY_AFTER: &str = "10";

impl Exchange {
    pub(super) fn on_head(&mut self, now: Tick, mut head: RequestHead, effects: &mut Vec<Effect>) -> State {
        self.record.request_id.clone_from(&head.request_id);
        self.record.client_request_id = caller_request_id(&head.headers);
        self.about = StoredResponse::from_path(&head.path).filter(|_| Endpoint::from_path(&head.path).is_none());
        if self.about.is_none() && passes(self.adapter, &head) {
            return self.pass(now, head, effects);
        }
        let checked = self.check_head(&head).and_then(|checked| self.reserve(head.size()).map(|()| checked));
        let mut remove = names_to_strip(&head.headers);
        remove.extend(self.withhold(&mut head.headers));
        if head.headers.remove(CONTENT_ENCODING).is_some() {
            remove.push(CONTENT_ENCODING.as_str().to_owned());
        }
        let end = head.end;
        self.head = Some(head);
        match checked {
            Err(error) => self.refuse(now, error, effects),
            Ok((endpoint, codings)) => {
                self.endpoint = Some(endpoint);
                self.codings = codings;
                self.record.endpoint = self.about.as_ref().map_or(endpoint.path(), |about| about.endpoint);
                if end {
                    self.unanswered = remove;
                    return self.on_whole_body(now, Bytes::new(), effects);
                }
                effects.push(Effect::AcceptHead { remove });
                State::AwaitBody
            }
        }
    }

    /// Envoy's routes answer it, or say that they cannot: the gateway keeps nothing of it. Whoever wants into the house shows
    /// the token here as well.
    fn pass(&mut self, now: Tick, mut head: RequestHead, effects: &mut Vec<Effect>) -> State {
        if let Err(error) = self.check_token(&head) {
            return self.refuse(now, error, effects);
        }
        let mut remove = names_to_strip_in_passing(&head.headers);
        remove.extend(self.withhold(&mut head.headers));
        effects.push(Effect::Pass { remove });
        self.end(now, Outcome::Passed, effects)
    }

    /// Where the gateway has a token, the request has to show it.
    fn check_token(&self, head: &RequestHead) -> Result<(), ApiError> {
        let path = head.path.split_once('?').map_or(head.path.as_str(), |(path, _)| path);
        let messages = path == "/v1/messages" || path.starts_with("/v1/messages/");
        answer::check_api_key(self.world.knobs.auth_bearer_token.as_ref(), messages, &head.headers)
    }

    /// Where the gateway has a token, that is what clients have in `authorization`; those of the Messages API may have it
    /// in a header of their own. Takes it out and returns the names of the headers.
    fn withhold(&self, headers: &mut HeaderMap) -> Vec<String> {
        let knobs = &self.world.knobs;
        let Some(token) = knobs.auth_bearer_token.as_ref().filter(|_| !knobs.engine_auth.forward_token) else {
            return Vec::new();
        };
        let mut names: Vec<String> = withhold_token(headers).into_iter().collect();
        let is_token = |value: &HeaderValue| token.is(value.as_bytes().trim_ascii());
        if headers.get_all(answer::X_API_KEY).iter().any(is_token) {
            headers.remove(answer::X_API_KEY);
            names.push(answer::X_API_KEY.to_owned());
        }
        names
    }

    /// What the request is sent to, and how its body is coded.
    fn check_head(&self, head: &RequestHead) -> Result<(Endpoint, Vec<Coding>), ApiError> {
        if self.permit.is_none() {
            self.world.metrics.rejected(Limit::Streams);
            return Err(ApiError::new(Reason::Overloaded, "too many requests in flight on this gateway replica"));
        }
        self.check_token(head)?;
        if let Some(about) = &self.about {
            if !about.allows(&head.method) {
                let error = ApiError::new(Reason::MethodNotAllowed, "method not allowed");
                return Err(error.with_header("allow", &about.allowed()));
            }
            return Ok((Endpoint::Responses, Vec::new()));
        }
        let endpoint = Endpoint::from_path(&head.path)
            .ok_or_else(|| ApiError::new(Reason::UnknownPath, "unknown request path"))?;
        if head.method != Method::POST {
            return Err(ApiError::new(Reason::MethodNotAllowed, "method not allowed").with_header("allow", "POST"));
        }
        if announced_length(&head.headers).is_some_and(|length| length > self.world.knobs.limits.max_body_bytes as u64)
        {
            return Err(self.too_large());
        }
        let codings = Coding::read(&head.headers).map_err(|form| {
            let error = ApiError::new(Reason::UnsupportedCoding, form.to_string());
            match form {
                UnreadableForm::Charset(_) => error,
                _ => error.with_header("accept-encoding", ACCEPTED_CODINGS),
            }
        })?;
        Ok((endpoint, codings))
    }

    /// Takes a share of the common budget, before anything is kept.
    fn reserve(&mut self, bytes: usize) -> Result<(), ApiError> {
        if self.reservation.grow(bytes) {
            return Ok(());
        }
        self.world.metrics.rejected(Limit::BufferedBytes);
        Err(ApiError::new(Reason::Overloaded, "too many request bytes are being held by this gateway replica"))
    }

    pub(super) fn too_large(&self) -> ApiError {
        let limit = self.world.knobs.limits.max_body_bytes;
        ApiError::new(Reason::BodyTooLarge, format!("the request body is longer than {limit} bytes"))
    }

    pub(super) fn on_body(&mut self, now: Tick, data: Bytes, end: bool, effects: &mut Vec<Effect>) -> State {
        // The share of the common budget is taken before the bytes are kept, so that many half-sent bodies cannot
        // fill the memory.
        if self.received_bytes.saturating_add(data.len()) > self.world.knobs.limits.max_body_bytes {
            return self.refuse(now, self.too_large(), effects);
        }
        if let Err(error) = self.reserve(data.len()) {
            return self.refuse(now, error, effects);
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
        let announced = self.head.as_ref().and_then(|head| announced_length(&head.headers));
        if announced.is_some_and(|length| length != body.len() as u64) {
            let text = "the request body does not have the length that content-length announces";
            return self.refuse(now, ApiError::new(Reason::BodyTruncated, text), effects);
        }
        if self.codings.is_empty() {
            return self.on_readable_body(now, body, effects);
        }
        effects.push(Effect::Decode(Box::new(DecodeJob {
            codings: std::mem::take(&mut self.codings),
            body,
            limit: self.world.knobs.limits.max_body_bytes,
            reservation: std::mem::replace(&mut self.reservation, Reservation::empty(&self.world.buffered)),
        })));
        State::Decoding
    }

    pub(super) fn on_decoded(&mut self, now: Tick, decoded: Decoded, effects: &mut Vec<Effect>) -> State {
        self.reservation = decoded.reservation;
        let reason = match decoded.body {
            Ok(body) => return self.on_readable_body(now, body, effects),
            Err(DecodeError::Corrupt(_)) => Reason::BodyInvalid,
            Err(DecodeError::TooLong(_)) => Reason::BodyTooLarge,
            Err(DecodeError::NoRoom) => {
                self.world.metrics.rejected(Limit::BufferedBytes);
                Reason::Overloaded
            }
        };
        let text = decoded.body.err().map(|error| error.to_string()).unwrap_or_default();
        self.refuse(now, ApiError::new(reason, text), effects)
    }

    fn on_readable_body(&mut self, now: Tick, body: Bytes, effects: &mut Vec<Effect>) -> State {
        self.record.body_bytes = body.len();
        if let Some(about) = &self.about {
            let id = Arc::clone(&about.id);
            return self.locate(now, id, Locating::About(body), effects);
        }
        let (body, model) = match self.examine(now, body) {
            Ok(examined) => examined,
            Err(error) => return self.refuse(now, error, effects),
        };
        if let Some(error) = self.without_pods(now, &model, effects) {
            return self.refuse(now, error, effects);
        }
        match previous_response(&body) {
            Some(id) => self.locate(now, id, Locating::FollowUp(Box::new(body), model), effects),
            None => self.on_examined(now, body, model, effects),
        }
    }

    /// The body is read, and where it has to go is known as far as it is given.
    pub(super) fn on_examined(
        &mut self,
        now: Tick,
        mut body: ParsedBody,
        model: Arc<Model>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let closed = model.config.as_deref().is_some_and(|config| config.ignores_requests);
        let wanted = self.head.as_ref().filter(|_| !closed).and_then(|head| text(&head.headers, "config-profile"));
        if !auto::asked_for(wanted) {
            let wanted = wanted.map(str::to_owned);
            return self.plan(now, body, model, wanted, None, effects);
        }
        let job = auto::count(&model, &mut body, self.world.knobs.api.non_text_part_tokens);
        let unresolved = Unresolved { body, model, asked: job.count.is_some() };
        if !job.is_heavy() {
            return self.on_counted(now, unresolved, job.run(), effects);
        }
        // Which profile's time will apply is not known yet.
        let config = unresolved.model.config.as_deref();
        let times = config.into_iter().flat_map(|config| config.profiles.values());
        // The gateway's own counts too: no profile may be chosen.
        let own = self.world.knobs.pd.prefill_request_timeout;
        let longest = times.map(|profile| profile.knobs.prefill_request_timeout).fold(own, Duration::max);
        self.extend(longest, effects);
        effects.push(Effect::Prepare(Box::new(job)));
        State::Resolving(Box::new(unresolved))
    }

    /// The prompt is counted as far as hints ask: the profile is known now.
    pub(super) fn on_counted(
        &mut self,
        now: Tick,
        unresolved: Unresolved,
        counted: Prepared,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Unresolved { mut body, model, asked } = unresolved;
        if asked {
            body.prompt.text = counted.text;
        }
        let profile = auto::choose(&model, &body, counted.length, self.world.knobs.api.non_text_part_tokens);
        self.chosen_profile = profile.map(|profile| Arc::clone(&profile.name));
        let chosen = self.chosen_profile.as_deref().map(str::to_owned);
        self.plan(now, body, model, chosen, asked.then_some(counted.length), effects)
    }

    /// Everything about the request is known but its pods. `counted` is what an earlier count came to.
    fn plan(
        &mut self,
        now: Tick,
        body: ParsedBody,
        model: Arc<Model>,
        profile: Option<String>,
        counted: Option<PromptLength>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let decided = self.decide(body, model, profile);
        let limited = decided.and_then(|routing| self.limits_of(now, &routing).map(|call| (routing, call)));
        match limited {
            Ok((routing, None)) => self.prepare(now, routing, counted, effects),
            Ok((routing, Some(call))) => self.admit(routing, counted, call, effects),
            Err(error) => self.refuse(now, error, effects),
        }
    }

    /// The request may be served: what a selection wants to know of its prompt is worked out.
    pub(super) fn prepare(
        &mut self,
        now: Tick,
        mut routing: Routing,
        counted: Option<PromptLength>,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.prepared_from = now;
        let (knobs, seed) = (&self.world.knobs, self.world.hash_seed.get());
        let mut job = routing.plan.prepare(&routing.model, &mut routing.body, knobs, seed);
        if let Some(counted) = counted {
            job.reuse(counted);
        }
        if self.endpoint == Some(Endpoint::Embeddings) {
            job.inputs = embeddings::texts_to_count(&routing.body);
        }
        if job.is_heavy() {
            self.extend(routing.plan.knobs.prefill_request_timeout, effects);
            effects.push(Effect::Prepare(Box::new(job)));
            State::Preparing(Box::new(routing))
        } else {
            self.route(now, routing, job.run(), effects)
        }
    }

    /// On a busy machine, work on a prompt waits for a thread. Envoy takes one wish for more time per message, so it
    /// covers the prefill leg too.
    pub(super) fn extend(&mut self, time: Duration, effects: &mut Vec<Effect>) {
        if !std::mem::replace(&mut self.extended, true) {
            effects.push(Effect::ExtendTimeout(time));
        }
    }

    /// Everything that can be refused before a pod is chosen, so that a refused request touches no counter of a pod.
    fn examine(&mut self, now: Tick, raw: Bytes) -> Result<(ParsedBody, Arc<Model>), ApiError> {
        let (Some(head), Some(endpoint)) = (self.head.as_ref(), self.endpoint) else {
            return Err(ApiError::new(Reason::Internal, "the body came before the head"));
        };
        let body = ParsedBody::parse(endpoint, text(&head.headers, "content-type"), raw).map_err(|error| {
            let reason = match &error {
                BodyError::Invalid(_) => Reason::BodyInvalid,
                BodyError::NoModel(_) => Reason::ModelMissing,
                BodyError::Multipart(_) => Reason::MultipartInvalid,
            };
            ApiError::new(reason, error.to_string())
        })?;
        if self.traced {
            moment("parsed");
        }
        self.record.stream = body.stream;
        if let Some(key) = engines::hidden_handoff(&body) {
            let text = format!("field \"vllm_xargs\" must not hold \"{key}\"");
            return Err(ApiError::new(Reason::BodyInvalid, text));
        }
        let snapshot = self.world.fleet.load();
        let Some(model) = snapshot.asked_for(&body.model) else {
            return Err(self.not_served(now, &body.model));
        };
        self.record.model = Some(Arc::clone(&model.name));
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.set_model(&model.name);
        }
        Ok((body, Arc::clone(model)))
    }

    /// No pod of the snapshot serves a model of that name. It may be known all the same: scaled to zero, it comes back.
    fn not_served(&mut self, now: Tick, name: &str) -> ApiError {
        let Some(model) = self.world.fleet.known_without_pods(name, now) else {
            let shown: String = name.chars().take(128).collect();
            return ApiError::new(Reason::ModelUnknown, format!("model {shown} does not exist"))
                .with_param("model")
                .with_header("x-error-no-model-backends", &shown);
        };
        self.record.model = Some(Arc::clone(&model));
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.set_model(&model);
        }
        self.world.unserved.refused(&model, now);
        no_pods(&model)
    }

    /// What a client of a model is told that has no ready pod; a sleeping one is woken.
    fn without_pods(&self, now: Tick, model: &Model, effects: &mut Vec<Effect>) -> Option<ApiError> {
        if let Some(claim) = model.claim {
            self.world.unserved.refused(&model.name, now);
            if claim == ClaimState::Sleeping && self.world.knobs.models.wake {
                effects.extend(wake(model, self.world.knobs.models.runtime_port).map(Box::new).map(Effect::Wake));
            }
            return Some(not_up(&model.name, claim));
        }
        if !model.routable.is_empty() {
            return None;
        }
        self.world.unserved.refused(&model.name, now);
        Some(no_pods(&model.name))
    }

    /// Strategy, knobs and limit of the request.
    fn decide(&mut self, body: ParsedBody, model: Arc<Model>, profile: Option<String>) -> Result<Routing, ApiError> {
        let none = HeaderMap::new();
        let headers = self.head.as_ref().map_or(&none, |head| &head.headers);
        let plan = plan::plan(self.adapter, &model, headers, profile, &body, &self.world.knobs)?;
        self.record.strategy = plan.strategy.map(Strategy::name);
        self.record.ttft_threshold = plan.ttft_threshold;
        self.note_strategy(plan.note);
        if plan.strategy.is_none() {
            let route = self.world.fleet.routes().check(&model.name);
            route.map_err(|fault| ApiError::new(Reason::NoRoute, fault.to_string()))?;
        }
        if plan.strategy == Some(Strategy::Pd) {
            let protocol = Protocol::of(plan.engine, plan.knobs.kv_connector, plan.knobs.trt_generation_first);
            // Of an endpoint with a limit of its own, that is edited too.
            let limit = [engines::limit_field(body.endpoint)];
            if let Some(key) = body.duplicate_of(protocol.controlled_keys()).or_else(|| body.duplicate_of(&limit)) {
                let text = format!("duplicate top-level key \"{key}\" in request body");
                return Err(ApiError::new(Reason::InvalidPdRequest, text));
            }
        }
        Ok(Routing { body, model, plan })
    }
}

/// The runtime to tell that somebody asks for a sleeping model: that of the first pod which claims it.
fn wake(model: &Model, port: u16) -> Option<WakeCall> {
    let sleeping = |pod: &&Arc<Pod>| {
        let spec = &pod.spec;
        spec.claim == Some(ClaimState::Sleeping) && !spec.terminating && !spec.host.is_empty()
    };
    let pod = model.pods.iter().find(sleeping)?;
    let uid = pod.spec.uid.rsplit_once(':').map_or(&*pod.spec.uid, |(uid, _)| uid);
    let address = join_host_port(&pod.spec.host, port);
    Some(WakeCall { address, pod: Arc::from(uid), model: Arc::clone(&model.name) })
}

/// What the client is told of a model that is known and has no ready pod.
fn no_pods(model: &str) -> ApiError {
    let text = format!("error on getting pods for model {model}");
    ApiError::new(Reason::NoRoutablePods, text).with_header("retry-after", RETRY_AFTER)
}

/// What the client is told of a model whose engines are not up (reference section 1.5, step 1).
fn not_up(model: &str, claim: ClaimState) -> ApiError {
    let state = match claim {
        ClaimState::Active | ClaimState::Activating => "activating",
        ClaimState::Sleeping => "sleeping",
        ClaimState::Failed => "failed",
    };
    let shown: String = model.chars().take(128).collect();
    let error = ApiError::new(Reason::ModelNotUp, format!("model {shown} is not available now: it is {state}"))
        .with_param("model")
        .with_header("x-error-no-model-backends", &shown);
    if claim == ClaimState::Failed { error } else { error.with_header("retry-after", RETRY_AFTER) }
}

/// Whether a request goes on to Envoy's own routes without the gateway: one without a body, as with the reference, whatever
/// its path. (An inference request whose body is empty is a mistake, which the gateway explains.)
fn passes(adapter: Adapter, head: &RequestHead) -> bool {
    let inference = head.method == Method::POST && Endpoint::from_path(&head.path).is_some();
    adapter == Adapter::Envoy && head.end && !inference
}

/// `content-length`, when it is a number.
fn announced_length(headers: &HeaderMap) -> Option<u64> {
    text(headers, "content-length").and_then(|value| value.parse().ok())
}
