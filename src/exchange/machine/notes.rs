//! What a selection leaves behind for others: a trail for people, and what later selections and other replicas can use.

use std::sync::Arc;

use super::limits::USER;
use super::{Asked, EXPLAIN, Exchange};
use crate::bands;
use crate::clock::Tick;
use crate::exchange::event::RequestHead;
use crate::exchange::headers::text;
use crate::exchange::plan::Plan;
use crate::fleet::{Model, Pod};
use crate::knobs::{PdKnobs, StrategyNote};
use crate::load::{Sessions, Users};
use crate::prefix::PrefixUpdate;
use crate::routing::{Decision, DecisionRecord, PromptLength, Strategy, Target, preble_cost, weighted_tokens};
use crate::state::findings::{Finding, MAX_TOLD_BLOCKS};
use crate::telemetry::{DecisionEssentials, PrefixRouting, PrefixSelection};

impl Exchange {
    /// Notes for spans, and for a client that asked, what was decided.
    pub(super) fn explain(&mut self, record: &DecisionRecord) {
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

    /// A selection that went by prefixes is counted, also when it found no pod. How long it took, the task knows that runs
    /// this one ([`Exchange::take_prefix_routing`]).
    pub(super) fn note_prefix_routing(&mut self, strategy: Strategy, knobs: &PdKnobs, record: &DecisionRecord) {
        let looks =
            strategy.looks_prefixes_up() || strategy == Strategy::Pd && knobs.prefill_policy.looks_prefixes_up();
        let selection = record.outcome.as_ref().ok().map(|decision| PrefixSelection {
            chosen: decision.prefix_match_pct.unwrap_or(0),
            best: decision.best_match_pct.unwrap_or(0),
            imbalanced: decision.fast_paths.prefill_spread || decision.fast_paths.gate,
        });
        // A prefill policy has no say in what a combined pod gets.
        let looked = match &record.outcome {
            Ok(decision) => strategy != Strategy::Pd || matches!(decision.target, Target::Pair { .. }),
            Err(_) => true,
        };
        if looks && looked {
            let (model, since) = (Arc::clone(&record.model), self.prepared_from);
            self.prefix_routing = Some(PrefixRouting { model, since, selection });
        }
    }

    /// The selection by prefixes that was made since this was last asked.
    pub fn take_prefix_routing(&mut self) -> Option<PrefixRouting> {
        self.prefix_routing.take()
    }

    /// The picture of prompt lengths is of what rolesets get: a request that a single pod takes does not load them.
    pub(super) fn note_bands(&self, model: &Model, plan: &Plan, length: PromptLength, decision: &Decision) {
        let Target::Pair { .. } = decision.target else { return };
        let Some(tokens) = length.tokens().filter(|_| bands::enabled(&plan.knobs)) else { return };
        model.bands.observe(tokens);
        if let Some(band) = decision.band.as_ref().filter(|band| band.applied) {
            self.world.metrics.banded(&band.roleset, tokens);
        }
    }

    /// By how much the prompt of the request's session grew, for the policies that charge tokens.
    pub(super) fn session_growth(&self, now: Tick, model: &Model, plan: &Plan, prompt_tokens: u64) -> Option<u64> {
        if plan.strategy != Some(Strategy::Pd) || !plan.knobs.prefill_policy.charges_tokens() {
            return None;
        }
        // Opaque to us, so it need not be text.
        let key = self.head.as_ref()?.headers.get("x-aibrix-session-key")?.as_bytes().trim_ascii();
        let ttl = plan.knobs.token_load_session_ttl;
        let (plane, sessions) = (&self.world.plane, &self.world.sessions);
        // By a seed that replicas agree on: they tell one another of sessions by these numbers.
        let session = Sessions::number(&model.name, key, self.world.hash_seed.get())?;
        if plane.tells() && !ttl.is_zero() {
            plane.tell(&model.name, Finding::Session { session, tokens: prompt_tokens });
        }
        sessions.grow(session, prompt_tokens, ttl, now)
    }

    /// What there is to say about the strategy that the request or its profile names.
    pub(super) fn note_strategy(&mut self, note: StrategyNote) {
        self.note = note;
        if let Some(index) = note.replaced {
            self.world.note_replaced(index);
        }
    }

    /// The user of the request, when the strategy counts users.
    pub(super) fn counted_user(&self, plan: &Plan) -> Option<u64> {
        plan.strategy.filter(|strategy| strategy.counts_users())?;
        // Of several, the last one counts, as for limits.
        let name = self.head.as_ref()?.headers.get_all(USER).iter().next_back()?;
        Users::number(name.as_bytes(), self.world.hash_seed.get())
    }

    /// What the pod and the user of the request were given, for strategies that count it: once, however often it starts
    /// over.
    pub(super) fn note_work(&self, now: Tick, asked: &Asked, decision: &Decision, pod: &Pod) {
        if self.retried {
            return;
        }
        let knobs = &asked.plan.knobs.strategies;
        if let Some(user) = asked.user {
            let prompt = asked.body.estimated_tokens(self.world.knobs.api.non_text_part_tokens);
            let tokens = weighted_tokens(prompt, &knobs.vtc);
            self.world.users.add(user, tokens, now, &knobs.vtc);
            if self.world.plane.tells() {
                self.world.plane.tell(&asked.model.name, Finding::User { user, tokens: tokens as u64 });
            }
        }
        if decision.strategy.counts_recent_work() {
            let held = decision.prefix_match_pct.unwrap_or(0);
            let cost = preble_cost(asked.prepared.prefix_tokens, held, &knobs.preble);
            pod.state.recent.add(cost, now, knobs.preble.window);
        }
    }

    /// Tells the index that the pod is about to have this prompt in its cache, under the name of the model that was asked
    /// for: engines keep the blocks of adapters apart.
    pub(super) fn offer_prefix(&self, model: &Arc<str>, pod: &Pod, hashes: &[u64], known: Option<u8>) {
        if !hashes.is_empty() {
            // What the pod holds already, everybody has been told.
            if self.world.plane.tells() && known.is_none_or(|percent| percent < 100) {
                let blocks = hashes.iter().take(MAX_TOLD_BLOCKS).copied().collect();
                self.world.plane.tell(model, Finding::Prefix { pod: pod.state.id, blocks });
            }
            self.world.prefix.offer(PrefixUpdate {
                model: Arc::clone(model),
                hashes: Arc::from(hashes),
                pod: Arc::clone(&pod.state),
            });
        }
    }
}
