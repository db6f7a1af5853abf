//! From a plan to the pod that answers: selection, prefill leg, hand-over.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::{EXPLAIN, Exchange, Routed, Routing, State};
use crate::bands;
use crate::clock::Tick;
use crate::engines::leg::{LegFailure, LegOutcome, LegRequest};
use crate::engines::vllm::Handoff;
use crate::engines::{self, vllm};
use crate::error::{ApiError, Reason};
use crate::exchange::admission::Reservation;
use crate::exchange::answer;
use crate::exchange::event::{Adapter, Effect, RequestHead, RoutePlan};
use crate::exchange::headers::{leg_headers, text};
use crate::exchange::plan::{self, Plan};
use crate::exchange::prepare::Prepared;
use crate::exchange::session::{SESSION_ID, session_id};
use crate::fleet::{Model, Pod};
use crate::prefix::PrefixUpdate;
use crate::request::ParsedBody;
use crate::routing::{
    self, Context, Decision, DecisionRecord, PromptLength, RequestFacts, SingleReason, Strategy, Target,
};
use crate::telemetry::{DecisionEssentials, Outcome, PrefillOutcome, PrefillStage};

/// How long a decode pod has for taking in a request that nobody waits for.
const DELIVERY: Duration = Duration::from_secs(1);

/// What the token ledgers count as one token, bytes of the request body (the PD document, "Token Load Scoring Policy").
const BYTES_PER_TOKEN: u64 = 4;

impl Exchange {
    pub(super) fn route(
        &mut self,
        now: Tick,
        routing: Routing,
        prepared: &Prepared,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Routing { body, model, plan } = routing;
        let Some(strategy) = plan.strategy else {
            self.record.timings.routed = Some(now);
            return self.hand_over(now, &body, None, vllm::plain_body(&body), None, effects);
        };
        let prompt_tokens = self.record.body_bytes as u64 / BYTES_PER_TOKEN;
        let facts = RequestFacts {
            length: plan::bucket_length(&body, prepared.length),
            hashes: &prepared.hashes,
            splittable: plan.splittable,
            profile: plan.profile.as_deref(),
            filter: plan.filter.as_ref(),
            affinity: plan.session.affinity(),
            prompt_tokens,
            prefix_tokens: prepared.prefix_tokens,
            session_growth: self.session_growth(now, &model, &plan, prompt_tokens),
        };
        let context = Context {
            now,
            seed: self.seed,
            max_metric_age: self.world.knobs.scrape.max_age,
            prefix: &self.world.prefix,
            peers: model.peers.view(),
        };
        let selected = routing::select_and_charge(&model, &facts, strategy, &plan.knobs, context);
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
        match (&record.outcome, charges) {
            (Ok(decision), Some(mut charges)) => {
                self.world.ledger.watch(&self.record.request_id, &mut charges.tokens);
                if charges.conflicts > 0 {
                    self.world.metrics.selection_conflicts(u64::from(charges.conflicts));
                }
                if charges.blind {
                    self.world.metrics.blind_commit();
                }
                for signal in decision.missing.names() {
                    self.world.metrics.routing_signal_missing(&model.name, signal);
                }
                self.note_bands(&model, &plan, facts.length, decision);
                self.charges = Some(charges);
                self.record.timings.routed = Some(now);
                self.record.ready_pods = model.routable.len();
                self.record.candidate_pods = decision.candidates.1;
                self.start_legs(now, body, &plan, decision, &prepared.hashes, effects)
            }
            (Err(error), _) => {
                if strategy == Strategy::Pd {
                    self.world.metrics.selection_failed(Some(&model.name));
                }
                let text = format!("error on selecting target pod: {error}");
                self.refuse(now, ApiError::new(Reason::SelectionFailed, text), effects)
            }
            (Ok(_), None) => self.refuse(now, ApiError::new(Reason::Internal, "a selection without charges"), effects),
        }
    }

    /// Notes for spans, and for a client that asked, what was decided.
    fn explain(&mut self, record: &DecisionRecord) {
        if let Ok(decision) = &record.outcome {
            self.record.decision = Some(Box::new(DecisionEssentials {
                snapshot_version: record.snapshot_version,
                candidates: decision.candidates,
                steps: decision.steps(),
                prefill_score: decision.scores.prefill,
                decode_score: decision.scores.decode,
                total_score: decision.scores.total,
                prefix_match_pct: decision.prefix_match_pct,
                tied: decision.explanation.ties.total,
                conflicts: record.conflicts,
            }));
        }
        let asked = |head: &RequestHead| text(&head.headers, EXPLAIN) == Some("1");
        if self.world.knobs.explain && self.head.as_ref().is_some_and(asked) {
            self.explanation = Some(record.summary());
        }
    }

    /// The picture of prompt lengths is of what rolesets get: a request that a single pod takes does not load them.
    fn note_bands(&self, model: &Model, plan: &Plan, length: PromptLength, decision: &Decision) {
        let Target::Pair { .. } = decision.target else { return };
        let Some(tokens) = length.tokens().filter(|_| bands::enabled(&plan.knobs)) else { return };
        model.bands.observe(tokens);
        if let Some(band) = decision.band.as_ref().filter(|band| band.applied) {
            self.world.metrics.banded(&band.roleset, tokens);
        }
    }

    /// By how much the prompt of the request's session grew, for the policies that charge tokens.
    fn session_growth(&self, now: Tick, model: &Model, plan: &Plan, prompt_tokens: u64) -> Option<u64> {
        if plan.strategy != Some(Strategy::Pd) || !plan.knobs.prefill_policy.charges_tokens() {
            return None;
        }
        // Opaque to us, so it need not be text.
        let key = self.head.as_ref()?.headers.get("x-aibrix-session-key")?.as_bytes().trim_ascii();
        self.world.sessions.grow(&model.name, key, prompt_tokens, plan.knobs.token_load_session_ttl, now)
    }

    fn start_legs(
        &mut self,
        now: Tick,
        body: ParsedBody,
        plan: &Plan,
        decision: &Decision,
        hashes: &[u64],
        effects: &mut Vec<Effect>,
    ) -> State {
        if let Some((prefill, decode)) = decision.policies {
            self.record.policies = Some((prefill.name(), decode.name()));
        }
        let attempt = self.attempt_id();
        match &decision.target {
            Target::Single { pod, reason } => {
                self.record.single_reason = (*reason != SingleReason::Strategy).then(|| reason.name());
                if decision.strategy.looks_prefixes_up() {
                    self.offer_prefix(pod, hashes);
                }
                let state = self.hand_over(now, &body, Some(pod), vllm::plain_body(&body), Some(attempt), effects);
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
                self.record.timings.prefill_start = Some(now);
                self.prefill_host = Some(Arc::clone(&prefill.spec.host));
                self.world.metrics.selected_pair(&prefill.state.labels, &decode.state.labels);
                self.offer_prefix(prefill, hashes);
                let connector = prefill.spec.kv_connector.unwrap_or(plan.knobs.kv_connector);
                if !self.extended {
                    effects.push(Effect::ExtendTimeout(plan.knobs.prefill_request_timeout));
                }
                effects.push(Effect::StartPrefill(Box::new(LegRequest {
                    address: Arc::clone(&prefill.address),
                    path: self.path(),
                    headers: self.leg_headers(&attempt),
                    body: vllm::prefill_body(&body, connector),
                    timeout: plan.knobs.prefill_request_timeout,
                    max_answer_bytes: self.world.knobs.limits.max_prefill_answer_bytes,
                })));
                let leg = self.world.metrics.prefill_leg(self.record.model.clone());
                let (prefill, decode) = (Arc::clone(prefill), Arc::clone(decode));
                State::Prefilling(Box::new(Routed { body, prefill, decode, connector, attempt, leg }))
            }
        }
    }

    /// Tells the index that the pod is about to have this prompt in its cache.
    fn offer_prefix(&self, pod: &Pod, hashes: &[u64]) {
        if !hashes.is_empty() {
            self.world.prefix.offer(PrefixUpdate {
                model: Arc::from(&*pod.spec.model),
                hashes: Arc::from(hashes),
                pod: Arc::clone(&pod.state),
            });
        }
    }

    pub(super) fn on_prefill(
        &mut self,
        now: Tick,
        routed: Routed,
        outcome: &LegOutcome,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.record.timings.prefill_end = Some(now);
        if let Some(charges) = &mut self.charges {
            charges.prefill = None;
            charges.tokens.prefill_done(now);
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
                if engines::accept_prefill(outcome).is_ok() {
                    // It did its work, and holds blocks that nobody can be told of.
                    self.unclaimed = true;
                }
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

    /// The client left in the moment between the legs. The prefill pod holds blocks for a decode pod that has not heard
    /// of them: it has to, once, or they stay until the lease ends.
    pub(super) fn gone_after_prefill(
        &mut self,
        now: Tick,
        routed: Routed,
        outcome: &LegOutcome,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.record.timings.prefill_end = Some(now);
        let Routed { body: parsed, prefill, decode, connector, attempt, leg } = routed;
        if let Ok(answer) = engines::accept_prefill(outcome) {
            leg.finish(PrefillOutcome::Success);
            if let Ok((body, Handoff::Relayed)) = vllm::decode_body(&parsed, connector, answer, &prefill.spec.host) {
                self.record.handoff = Handoff::Relayed.label();
                effects.push(Effect::Deliver(Box::new(LegRequest {
                    address: Arc::clone(&decode.address),
                    path: self.path(),
                    headers: self.leg_headers(&attempt),
                    body,
                    timeout: DELIVERY,
                    max_answer_bytes: 0,
                })));
            }
        } else {
            leg.finish(outcome.metric_outcome());
        }
        self.record.status = 499;
        self.end(now, Outcome::ClientGone, effects)
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
        if let Some(place) = self.rate.take() {
            place.keep();
        }
        let mut set_headers = Vec::with_capacity(4);
        let attempt = attempt.unwrap_or_else(|| self.attempt_id());
        match pod {
            Some(pod) => {
                self.aim_at(pod);
                if let Some(strategy) = &self.record.strategy {
                    set_headers.push(("routing-strategy", strategy.clone().into_owned()));
                }
                set_headers.push(("target-pod", pod.address.to_string()));
            }
            None => set_headers.push(("model", parsed.model.to_string())),
        }
        set_headers.push(("x-request-id", attempt.clone()));
        self.answer_headers =
            answer::marker_headers(&self.record, pod.map(|pod| &*pod.address), self.prefill_host.as_deref());
        if let Some(name) = self.chosen_profile.as_ref().and_then(|name| HeaderValue::from_bytes(name.as_bytes()).ok())
        {
            self.answer_headers.insert(answer::CHOSEN_PROFILE, name);
        }
        if let Some(summary) = self.explanation.as_deref().and_then(|summary| HeaderValue::from_str(summary).ok()) {
            self.answer_headers.insert(HeaderName::from_static(EXPLAIN), summary);
        }
        effects.push(Effect::Route(Box::new(RoutePlan {
            address: pod.map(|pod| Arc::clone(&pod.address)),
            path: self.path(),
            set_headers,
            headers: self.leg_headers(&attempt),
            body,
        })));
        // The request's own head is not needed any more, and answers can take an hour.
        self.head = None;
        // Envoy has the body now; the front holds it until the pod answers.
        if self.adapter == Adapter::Envoy {
            self.reservation = Reservation::empty(&self.world.buffered);
        }
        State::AwaitAnswer
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
