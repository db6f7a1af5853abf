//! From a plan to the pod that answers: selection, prefill leg, hand-over.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method};

use super::attempt::prefill_headers;
use super::intake::RETRY_AFTER;
use super::{Asked, EXPLAIN, Exchange, Legs, Prefilling, Routing, State};
use crate::clock::Tick;
use crate::engines::leg::LegRequest;
use crate::engines::lookup::{LookedUp, LookupError, LookupKey};
use crate::engines::{self, Bodies, Protocol, sglang, vllm};
use crate::error::{ApiError, Reason};
use crate::exchange::admission::Reservation;
use crate::exchange::answer;
use crate::exchange::event::{Adapter, Effect, LookupCall, RoutePlan};
use crate::exchange::plan::{self, Plan};
use crate::exchange::prepare::Prepared;
use crate::exchange::session::{SESSION_ID, session_id};
use crate::exchange::whole::Whole;
use crate::fleet::Pod;
use crate::knobs::Addressing;
use crate::load::Peers;
use crate::rng::Rng;
use crate::routing::{
    self, Context, Decision, DecisionRecord, RequestFacts, RoutingError, SingleReason, Strategy, Target,
};
use crate::telemetry::PrefillStage;

/// Answer header: what a strategy that was named comes to here, when another one serves it.
const STRATEGY_NOTE: HeaderName = HeaderName::from_static("x-tandem-strategy-note");

/// Decode pods that may take a request over, one after the other, when the chosen one cannot be reached.
const MAX_FALLBACKS: usize = 3;

impl Exchange {
    pub(super) fn route(
        &mut self,
        now: Tick,
        routing: Routing,
        prepared: Prepared,
        effects: &mut Vec<Effect>,
    ) -> State {
        if let Some(text) = prepared.over_limit {
            return self.refuse(now, ApiError::new(Reason::BodyInvalid, text).with_param("input"), effects);
        }
        let Routing { body, model, plan } = routing;
        let prompt_tokens = body.estimated_tokens(self.world.knobs.api.non_text_part_tokens);
        let session_growth = self.session_growth(now, &model, &plan, prompt_tokens);
        let user = self.counted_user(&plan);
        let asked = Box::new(Asked { body, model, plan, prepared, session_growth, user });
        if let Some(pod) = self.pinned.take() {
            return self.route_pinned(now, &asked, &pod, effects);
        }
        if asked.plan.strategy.is_none() {
            self.record.timings.routed = Some(now);
            let body = engines::plain_body(&asked.body, None);
            self.asked = Some(asked);
            return self.hand_over(now, None, body, None, effects);
        }
        match self.select(now, asked, effects) {
            Ok(state) => state,
            Err((asked, error)) => self.not_routed(now, &asked, &error, effects),
        }
    }

    /// There is no target.
    pub(super) fn not_routed(
        &mut self,
        now: Tick,
        asked: &Asked,
        error: &RoutingError,
        effects: &mut Vec<Effect>,
    ) -> State {
        if *error == RoutingError::NoCombined {
            return self.refuse(now, refusal(&asked.plan), effects);
        }
        if let RoutingError::Saturated { limit } = error {
            return self.refuse(now, saturated(&asked.model.name, *limit), effects);
        }
        if asked.plan.strategy == Some(Strategy::Pd) {
            self.world.metrics.selection_failed(Some(&asked.model.name));
        }
        let refusal = ApiError::new(Reason::SelectionFailed, format!("error on selecting target pod: {error}"));
        if !error.lacks_pods() {
            return self.refuse(now, refusal, effects);
        }
        self.world.unserved.refused(&asked.model.name, now);
        self.refuse(now, refusal.with_header("retry-after", RETRY_AFTER), effects)
    }

    /// Selects, charges, and starts the legs, or first claims what was charged. Without a target everything comes back.
    pub(super) fn select(
        &mut self,
        now: Tick,
        asked: Box<Asked>,
        effects: &mut Vec<Effect>,
    ) -> Result<State, (Box<Asked>, RoutingError)> {
        let Asked { body, model, plan, prepared, session_growth, user } = &*asked;
        let Some(strategy) = plan.strategy else { return Err((asked, RoutingError::NoPods)) };
        let non_text_part = self.world.knobs.api.non_text_part_tokens;
        let facts = RequestFacts {
            length: plan::bucket_length(body, prepared.length, non_text_part),
            hashes: &prepared.hashes,
            splittable: plan.splittable,
            profile: plan.profile.as_deref(),
            filter: plan.filter.as_ref(),
            affinity: plan.session.affinity(),
            user: user.map(|user| self.world.users.look(user, now, &plan.knobs.strategies.vtc)),
            prompt_tokens: body.estimated_tokens(non_text_part),
            prefix_tokens: prepared.prefix_tokens,
            session_growth: *session_growth,
            avoid: self.avoid,
        };
        // Before the loads are looked at.
        let since = model.port.claim_since();
        let context = Context {
            now,
            seed: if self.retried { self.seed.wrapping_add(1) } else { self.seed },
            max_metric_age: self.world.knobs.scrape.max_age,
            prefix: &self.world.prefix,
            // Who asks the others before anything is sent need not guess what they do.
            peers: if since.is_some() { Peers::ALONE } else { model.peers.view() },
        };
        let selected = routing::select_and_charge(model, &facts, strategy, &plan.knobs, context);
        let (outcome, charges) = match selected {
            Ok((decision, charges)) => (Ok(decision), Some(charges)),
            Err(error) => (Err(error), None),
        };
        let record = Arc::new(DecisionRecord {
            at: now,
            request_id: self.record.request_id.clone(),
            model: Arc::clone(&model.name),
            snapshot_version: model.snapshot_version,
            profile: plan.profile.as_deref().map(|name| name.chars().take(64).collect()),
            length: facts.length,
            prompt_tokens: facts.prompt_tokens,
            conflicts: charges.as_ref().map_or(0, |charges| charges.conflicts),
            blind: charges.as_ref().is_some_and(|charges| charges.blind),
            outcome,
        });
        self.world.journal.push(Arc::clone(&record));
        self.explain(&record);
        self.note_prefix_routing(strategy, &plan.knobs, &record);
        let (decision, mut charges) = match (&record.outcome, charges) {
            (Ok(decision), Some(charges)) => (decision, charges),
            (Err(error), _) => return Err((asked, error.clone())),
            (Ok(_), None) => return Err((asked, RoutingError::NoPods)),
        };
        self.world.ledger.watch(&self.record.request_id, &mut charges.tokens);
        if charges.conflicts > 0 {
            self.world.metrics.selection_conflicts(u64::from(charges.conflicts));
        }
        if charges.blind {
            self.world.metrics.blind_commit();
        }
        if decision.ejections_ignored {
            self.world.metrics.ejection_ignored();
        }
        for signal in decision.missing.names() {
            self.world.metrics.routing_signal_missing(&model.name, signal);
        }
        self.note_bands(model, plan, facts.length, decision);
        self.pairs = Some(Arc::clone(&model.pairs));
        self.charges = Some(charges);
        self.record.timings.routed = Some(now);
        self.record.ready_pods = model.routable.len();
        self.record.candidate_pods = decision.candidates.1;
        self.note_view(now, &model.port);
        match since {
            Some(since) => {
                let record = Arc::clone(&record);
                Ok(self.claim(now, asked, record, since, effects))
            }
            None => Ok(self.start_legs(now, asked, decision, effects)),
        }
    }

    pub(super) fn start_legs(
        &mut self,
        now: Tick,
        asked: Box<Asked>,
        decision: &Decision,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.timers = asked.plan.knobs.watchdog;
        self.token_load_ttl = asked.plan.knobs.token_load_ttl;
        self.abort_knobs = asked.plan.knobs.abort;
        if let Some((prefill, decode)) = decision.policies {
            self.record.policies = Some((prefill.name(), decode.name()));
        }
        match &decision.target {
            Target::Single { pod, reason } => {
                self.record.single_reason = (*reason != SingleReason::Strategy).then(|| reason.name());
                if decision.strategy.looks_prefixes_up() {
                    self.offer_prefix(&asked.model.name, pod, &asked.prepared.hashes, decision.prefix_match_pct);
                }
                self.note_work(now, &asked, decision, pod);
                let body = engines::plain_body(&asked.body, Some(pod.spec.engine));
                self.asked = Some(asked);
                let state = self.hand_over(now, Some(pod), body, None, effects);
                if decision.strategy.keeps_sessions()
                    && let Ok(id) = HeaderValue::from_str(&session_id(&pod.address))
                {
                    self.answer_headers.insert(SESSION_ID, id);
                }
                state
            }
            Target::Pair { prefill, decode } => {
                self.record.roleset.clone_from(&prefill.state.labels.roleset);
                self.record.prefill_pod = Some(Arc::clone(&prefill.state.labels));
                self.aim_at(decode);
                self.world.metrics.selected_pair(&prefill.state.labels, &decode.state.labels);
                self.offer_prefix(&asked.model.name, prefill, &asked.prepared.hashes, decision.prefix_match_pct);
                let knobs = &asked.plan.knobs;
                let connector = prefill.spec.kv_connector.unwrap_or(knobs.kv_connector);
                let protocol = Protocol::of(prefill.spec.engine, connector, knobs.trt_generation_first);
                let attempt = self.attempt(protocol);
                let legs = Legs { prefill: Arc::clone(prefill), decode: Arc::clone(decode), protocol, attempt };
                self.fallbacks = if protocol.decode_failover() { fallbacks(&asked, &legs) } else { Vec::new() };
                self.legs = Some(legs.clone());
                let kind = protocol.needs_lookup(knobs.mooncake_port, prefill.spec.rank);
                if kind.is_some() || !protocol.is_concurrent() {
                    self.extend(knobs.prefill_request_timeout, effects);
                }
                self.asked = Some(asked);
                let Some(kind) = kind else { return self.dispatch(now, legs, None, effects) };
                let key = LookupKey {
                    uid: Arc::clone(&prefill.spec.uid),
                    restarts: prefill.spec.restarts,
                    address: Arc::clone(&prefill.dial),
                };
                effects.push(Effect::LookUp(Box::new(LookupCall { key, kind })));
                State::LookingUp(Box::new(legs))
            }
        }
    }

    pub(super) fn on_looked_up(
        &mut self,
        now: Tick,
        legs: Legs,
        found: Result<Arc<LookedUp>, LookupError>,
        effects: &mut Vec<Effect>,
    ) -> State {
        match found {
            Ok(found) => self.dispatch(now, legs, Some(&found), effects),
            Err(error) => {
                tracing::warn!(request_id = self.record.request_id, %error, "the prefill pod cannot be asked");
                self.faults.prefill = true;
                self.world.metrics.pd_prefill_failed(error.class(), PrefillStage::BeforeResponse);
                self.refuse(now, engines::lookup_failure(&error), effects)
            }
        }
    }

    /// Starts the prefill leg, and with a dialect that wants it so, the decode leg at once.
    fn dispatch(&mut self, now: Tick, legs: Legs, found: Option<&LookedUp>, effects: &mut Vec<Effect>) -> State {
        let Some(asked) = self.asked.take() else { return self.lost(now, effects) };
        let bodies = match self.bodies(now, &asked.body, &legs, found) {
            Ok(bodies) => bodies,
            Err(error) => return self.refuse(now, error, effects),
        };
        let knobs = &asked.plan.knobs;
        self.record.timings.prefill_start = Some(now);
        (self.leg_looked_at, self.leg_pending_at) = (now, now);
        effects.push(Effect::StartPrefill(Box::new(LegRequest {
            address: Arc::clone(&legs.prefill.dial),
            path: self.path(),
            headers: prefill_headers(self.leg_headers(&legs.attempt.id), found),
            body: bodies.prefill,
            timeout: knobs.prefill_request_timeout,
            max_answer_bytes: self.world.knobs.limits.max_prefill_answer_bytes,
        })));
        let leg = self.world.metrics.prefill_leg(self.record.model.clone());
        self.asked = Some(asked);
        if !legs.protocol.is_concurrent() {
            return State::Prefilling(Box::new(Prefilling { legs, leg }));
        }
        self.record.handoff = Protocol::AT_ONCE;
        self.twin = Some(leg);
        let decode = Arc::clone(&legs.decode);
        self.hand_over(now, Some(&decode), bodies.decode, Some(legs.attempt.id), effects)
    }

    /// Both bodies of a pair that is asked at once; of any other, the decode body is made later and empty here.
    fn bodies(
        &self,
        now: Tick,
        body: &crate::request::ParsedBody,
        legs: &Legs,
        found: Option<&LookedUp>,
    ) -> Result<Bodies, ApiError> {
        let first = |prefill| Ok(Bodies { prefill, decode: Bytes::new() });
        let prefill = &legs.prefill.spec;
        match (legs.protocol, found) {
            (Protocol::VllmShfs, _) => first(vllm::prefill_body(body, crate::knobs::KvConnector::Shfs)),
            (Protocol::VllmNixl | Protocol::Plain, _) => {
                first(vllm::prefill_body(body, crate::knobs::KvConnector::Nixl))
            }
            (Protocol::TrtContextFirst, _) => {
                first(engines::trtllm::context_body(body, self.world.disagg_id(now), false))
            }
            (Protocol::Sglang, _) => {
                let mut rng = Rng::new(self.seed ^ legs.attempt.number.rotate_left(32));
                let room = sglang::room(rng.next_u64(), body.prompt.count);
                let rid = legs.attempt.rid.as_deref().unwrap_or_default();
                let bootstrap = sglang::Bootstrap { host: &prefill.host, port: prefill.bootstrap_port, room, rid };
                Ok(sglang::bodies(body, &bootstrap))
            }
            (Protocol::VllmMooncake, Some(LookedUp::Engine(engine))) => {
                let transfer = format!("xfer-{}", legs.attempt.id);
                let port = self.world.knobs.pd.mooncake_port;
                Ok(vllm::mooncake::bodies(body, &transfer, &engine.id, &prefill.host, port))
            }
            (Protocol::TrtGenerationFirst, Some(LookedUp::ServerInfo(info))) => {
                Ok(engines::trtllm::generation_bodies(body, self.world.disagg_id(now), info))
            }
            _ => Err(ApiError::new(Reason::Internal, "the prefill pod was asked for something else")),
        }
    }

    /// Cannot be: what a selection needs is kept until the request is with its pod.
    pub(super) fn lost(&mut self, now: Tick, effects: &mut Vec<Effect>) -> State {
        self.refuse(now, ApiError::new(Reason::Internal, "the request was lost on its way"), effects)
    }

    /// The request goes on: to `pod`, or wherever Envoy's own routes lead.
    pub(super) fn hand_over(
        &mut self,
        now: Tick,
        pod: Option<&Arc<Pod>>,
        body: Bytes,
        attempt: Option<String>,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.record.timings.handed_over = Some(now);
        if let Some(charges) = &mut self.charges
            && self.twin.is_none()
        {
            charges.decode.hand_over();
        }
        self.places.keep();
        let mut set_headers = Vec::with_capacity(4);
        let attempt = attempt.unwrap_or_else(|| self.attempt_id());
        if let Some(pod) = pod {
            self.aim_at(pod);
            if let Some(strategy) = &self.record.strategy {
                set_headers.push(("routing-strategy", strategy.clone().into_owned()));
            }
            set_headers.push(("target-pod", pod.address.to_string()));
            if pod.spec.tls {
                set_headers.push(("target-pod-scheme", "https".to_owned()));
            }
            if self.world.knobs.addressing == Addressing::DestinationEndpoint {
                let others = self.fallbacks.iter().map(|pod| &*pod.address);
                let all: Vec<&str> = std::iter::once(&*pod.address).chain(others).collect();
                set_headers.push(("x-gateway-destination-endpoint", all.join(",")));
            }
        } else {
            let model = self.asked.as_ref().map(|asked| asked.body.model.to_string());
            set_headers.push(("model", model.unwrap_or_default()));
        }
        let path = match self.native_path(pod.map(Arc::as_ref)) {
            Some(path) => {
                set_headers.push((":path", path.clone()));
                path
            }
            None => self.path(),
        };
        set_headers.push(("x-request-id", attempt.clone()));
        self.remark(pod.map(|pod| &*pod.address));
        let plan = RoutePlan {
            address: pod.map(|pod| Arc::clone(&pod.dial)),
            method: self.head.as_ref().map_or(Method::POST, |head| head.method.clone()),
            path,
            remove_headers: std::mem::take(&mut self.unanswered),
            set_headers,
            authorization: self.world.knobs.engine_auth.authorization.clone(),
            headers: self.leg_headers(&attempt),
            body,
        };
        self.note_route(&plan);
        effects.push(Effect::Route(Box::new(plan)));
        if self.twin.is_none() {
            self.arm(now);
        }
        // Envoy has the body now; the front holds it until the pod answers, since the request may have to start over.
        if self.adapter == Adapter::Envoy {
            self.forget_request();
        }
        State::AwaitAnswer
    }

    /// Makes the headers that the answer gets: who serves it, by which decision.
    pub(super) fn remark(&mut self, address: Option<&str>) {
        self.answer_headers = answer::marker_headers(&self.record, address, self.prefill_host());
        if let Some(name) = self.chosen_profile.as_ref().and_then(|name| HeaderValue::from_bytes(name.as_bytes()).ok())
        {
            self.answer_headers.insert(answer::CHOSEN_PROFILE, name);
        }
        if let Some(summary) = self.explanation.as_deref().and_then(|summary| HeaderValue::from_str(summary).ok()) {
            self.answer_headers.insert(HeaderName::from_static(EXPLAIN), summary);
        }
        if let Some(note) = self.note.text().and_then(|note| HeaderValue::from_str(&note).ok()) {
            self.answer_headers.insert(STRATEGY_NOTE, note);
        }
        self.tell_counts();
    }

    /// The request cannot start over any more, and answers can take an hour: its head and body go.
    pub(super) fn forget_request(&mut self) {
        self.head = None;
        self.asked = None;
        self.routed = None;
        self.reservation = Reservation::empty(&self.world.buffered);
    }

    /// Host of the prefill pod, for the answer's headers.
    pub(super) fn prefill_host(&self) -> Option<&str> {
        self.legs.as_ref().map(|legs| &*legs.prefill.spec.host)
    }
}

/// What the client is told when each pod has as many requests as it may.
fn saturated(model: &str, limit: u64) -> ApiError {
    let text = format!("model {model} takes {limit} requests at a time on each of its pods and has them");
    ApiError::new(Reason::PodsSaturated, text).with_header("retry-after", "1")
}

/// What the client is told of a request that has to be served whole and cannot be.
pub(super) fn refusal(plan: &Plan) -> ApiError {
    let text = plan.whole.map(|whole| whole.refusal(plan.engine)).unwrap_or_default();
    let error = ApiError::new(Reason::InvalidPdRequest, text);
    match plan.whole.and_then(Whole::param) {
        Some(field) => error.with_param(field),
        None => error,
    }
}

/// The other decode pods of the roleset that the request may go to, and that have not failed lately.
fn fallbacks(asked: &Asked, legs: &Legs) -> Vec<Arc<Pod>> {
    let slot = legs.decode.state.slot;
    let roleset = asked.model.rolesets.iter().find(|set| set.decode.iter().any(|pod| pod.state.slot == slot));
    let passes = |pod: &&Arc<Pod>| {
        let filter = asked.plan.filter.as_ref();
        pod.state.slot != slot
            // Envoy has a cluster for each scheme.
            && pod.spec.tls == legs.decode.spec.tls
            && asked.model.pairs.well(&legs.prefill.state, &pod.state)
            && filter.is_none_or(|filter| filter.matches(&pod.spec.labels))
    };
    roleset.into_iter().flat_map(|set| &set.decode).filter(passes).take(MAX_FALLBACKS).cloned().collect()
}
