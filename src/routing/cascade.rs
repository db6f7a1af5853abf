//! The steps in their order, for one look at the loads.

use std::sync::Arc;

use super::eligibility::{Candidate, Eligible, Pool};
use super::least::{Least, least};
use super::{
    Context, Decision, Explanation, FastPaths, Fate, MissingSignals, RequestFacts, RoutingError, Scores, SingleReason,
    Strategy, Target, Ties, TokenCost, band, capacity, combined, decode, ejections, explain, pair, plain, prefill,
    together, unsplittable,
};
use crate::fleet::{Model, Pod};
use crate::knobs::{DecodePolicy, PdKnobs, PrefillPolicy};
use crate::rng::Rng;

/// Everything about a selection that does not change while it is decided, perhaps several times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question<'a> {
    pub(super) model: &'a Model,
    pub(super) request: &'a RequestFacts<'a>,
    pub(super) strategy: Strategy,
    pub(super) knobs: &'a PdKnobs,
    pub(super) context: Context<'a>,
    /// The roleset that the plan has for the request's length.
    pub(super) band: Option<&'a Arc<str>>,
}

/// Decides on the loads as they are now.
pub(super) fn decide(
    question: Question<'_>,
    eligible: &Eligible<'_>,
    matches: &prefill::Matches,
) -> Result<Decision, RoutingError> {
    let Eligible { pool, exclusions, left_out, ignored } = eligible;
    let Question { request, strategy, knobs, context, .. } = question;
    let narrowed;
    let (pool, matches) = match knobs.strategies.requests_inflight {
        None => (pool, matches),
        Some(limit) => {
            narrowed = capacity::narrow(pool, matches, exclusions, limit, context)?;
            (&narrowed.0, &narrowed.1)
        }
    };
    let mut rng = Rng::new(context.seed);
    let single = |pod: &Arc<Pod>, reason, candidates, scores, fast_paths| Decision {
        target: Target::Single { pod: Arc::clone(pod), reason },
        strategy,
        policies: (strategy == Strategy::Pd).then_some((knobs.prefill_policy, knobs.decode_policy)),
        fast_paths,
        band: None,
        prefix_match_pct: None,
        best_match_pct: None,
        candidates: (0, candidates),
        scores,
        missing: MissingSignals::default(),
        tokens: TokenCost::default(),
        ejections_ignored: false,
        explanation: Explanation::default(),
    };
    let decision = match pool {
        Pool::Any(pods) => {
            let (affinity, user, model) = (request.affinity, request.user, &*question.model.name);
            let request = plain::Request { model, affinity, user, matches, knobs };
            plain::pick(pods, strategy, request, context, &mut rng).map(|pick| Decision {
                prefix_match_pct: matches.raw(pick.index),
                best_match_pct: matches.best(),
                missing: pick.missing,
                explanation: pick.explanation,
                ..single(
                    pick.pod,
                    SingleReason::Strategy,
                    pods.len(),
                    pick.scores,
                    FastPaths { gate: pick.gated, ..FastPaths::default() },
                )
            })
        }
        Pool::Combined(pods, reason @ SingleReason::CombinedUnsplittable) => {
            let counts: Vec<f64> = pods.iter().map(|pod| plain::in_flight(pod, context)).collect();
            least(counts.iter().copied().zip(pods), &mut rng).map(|(pod, count)| {
                let scores = Scores { decode: Some(count), decode_count: count, ..Scores::default() };
                let ties = counts.iter().filter(|other| **other == count).count();
                let explanation = explain::singles(pods, |id| counts.get(id).copied(), context, ties);
                Decision { explanation, ..single(pod, *reason, pods.len(), scores, FastPaths::default()) }
            })
        }
        Pool::Combined(pods, reason) => combined::any(pods, &mut rng).map(|pod| {
            let scores = Scores { decode_count: plain::in_flight(pod, context), ..Scores::default() };
            let explanation = explain::singles(pods, |_| None, context, pods.len());
            Decision { explanation, ..single(pod, *reason, pods.len(), scores, FastPaths::default()) }
        }),
        Pool::DecodeOnly(decodes) => unsplittable::decode_only(decodes, request, knobs, context, &mut rng).map(
            |(pod, scores, fast_paths, explanation)| {
                let tokens = TokenCost { prefill: None, decode: decode::charge(request, knobs) };
                let single = single(pod, SingleReason::DecodeOnly, decodes.len(), scores, fast_paths);
                Decision { tokens, explanation, ..single }
            },
        ),
        Pool::Pairs { prefills, decodes, combined } => {
            if let Some((pod, score, explanation)) =
                combined::idle_instead_of_loaded(combined, prefills, decodes, context, &mut rng)
            {
                let count = plain::in_flight(pod, context);
                let scores = Scores { decode: Some(score), decode_count: count, ..Scores::default() };
                let single = single(pod, SingleReason::CombinedIdle, combined.len(), scores, FastPaths::default());
                Some(Decision { explanation, ..single })
            } else {
                pick_pair(question, (prefills, decodes), exclusions, matches, &mut rng)
            }
        }
    };
    // Every list is checked not to be empty when it is gathered, so there is always somebody; if that ever breaks,
    // "no pods" is the truth about an empty list.
    let mut decision = decision.ok_or(RoutingError::NoPods)?;
    decision.ejections_ignored = *ignored;
    if !exclusions.is_empty() {
        ejections::explain(&mut decision, left_out, exclusions, context);
    }
    Ok(decision)
}

/// The signals that the policies want and that no candidate has (user report R43). What is known decides without them.
fn missing(knobs: &PdKnobs, facts: &[decode::Facts], any_mean: bool) -> MissingSignals {
    let mut missing = MissingSignals::default();
    let wants_rates = match knobs.decode_policy {
        DecodePolicy::LoadBalancing | DecodePolicy::Conductor => true,
        DecodePolicy::TokenLoad => knobs.decode_output_growth,
        DecodePolicy::LeastRequest => false,
    };
    if wants_rates && facts.iter().all(|facts| facts.throughput.is_none()) {
        missing.add(plain::Signal::Throughput);
    }
    if knobs.prefill_policy == PrefillPolicy::Conductor && !any_mean {
        missing.add(plain::Signal::PrefillTime);
    }
    missing
}

/// How many shared the score of the best of the roleset; 1 when another was chosen in its place.
fn ties(best: &[Least<usize>], roleset: usize, chosen: usize) -> usize {
    let best = best.get(roleset).filter(|best| best.winner().is_some_and(|(id, _)| id == chosen));
    best.map_or(1, Least::ties)
}

fn pick_pair(
    question: Question<'_>,
    (prefills, decodes): (&[Candidate<'_>], &[Candidate<'_>]),
    exclusions: &ejections::Exclusions,
    matches: &prefill::Matches,
    rng: &mut Rng,
) -> Option<Decision> {
    let Question { model, request, knobs, context, .. } = question;
    let rolesets = model.rolesets.len();
    let counts: Vec<u64> =
        prefills.iter().map(|candidate| candidate.pod.state.load.total(context.now).prefills).collect();
    let facts = decode::Facts::read_all(decodes, context);
    let mut prefill_ids: Vec<usize> = (0..prefills.len()).collect();
    let mut decode_ids: Vec<usize> = (0..decodes.len()).collect();
    let mut fast_paths = FastPaths::default();

    // Each pod of the pool has such a partner, so no step that narrows one side to a pod leaves the other side empty.
    let partners = |prefill: &Candidate<'_>, decode: &Candidate<'_>| {
        prefill.roleset == decode.roleset && !exclusions.pair(prefill.pod.state.slot, decode.pod.state.slot)
    };

    let decode_load = decode::load_per_roleset(decodes, &facts, rolesets);
    let ahead = together::ahead(context.peers);
    let mut dice = together::Dice::new(context.peers, rng);
    let prefill_path =
        |counts: &Vec<u64>| prefill::fast_path(prefills, counts, matches, &decode_load, knobs, dice.of(0));
    let one_more = |counts: &mut Vec<u64>, id: usize| counts.iter_mut().skip(id).take(1).for_each(|count| *count += 1);
    if let Some(id) = together::after(ahead, &counts, prefill_path, one_more) {
        fast_paths.prefill_spread = true;
        let prefill = prefills.get(id)?;
        prefill_ids = vec![id];
        decode_ids.retain(|id| decodes.get(*id).is_some_and(|decode| partners(prefill, decode)));
    }
    // `token_load` replaces what these checks go by: a pod that holds one long prompt has the fewest requests.
    if !knobs.decode_policy.charges_tokens()
        && let Some((id, check)) = decode::fast_path_after(ahead, &facts, &decode_ids, knobs, dice.of(1))
    {
        fast_paths.decode = Some(check);
        let decode = decodes.get(id)?;
        decode_ids = vec![id];
        // After step 1 this changes nothing: step 2 saw only partners of its pod. So both can fire and still agree.
        prefill_ids.retain(|id| prefills.get(*id).is_some_and(|prefill| partners(prefill, decode)));
    }

    let band =
        question.band.map(|band| band::narrow(model, band, (prefills, &mut prefill_ids), (decodes, &mut decode_ids)));

    let scoring = prefill::Scoring { request, counts: &counts, matches, knobs, context, rolesets };
    let prefill_scored = prefill::score(prefills, &prefill_ids, scoring, dice.own);
    let decode_scored = decode::score(&facts, &decode_ids, knobs);
    let mut decode_best = vec![Least::default(); rolesets];
    for (id, score) in decode_ids.iter().zip(&decode_scored.scores) {
        if let Some(best) = decodes.get(*id).and_then(|candidate| decode_best.get_mut(candidate.roleset)) {
            best.offer(*score, *id, dice.own);
        }
    }
    let maxima = (prefill_scored.max, decode_scored.max);
    let may = |prefill: usize, decode: usize| {
        let pair = prefills.get(prefill).zip(decodes.get(decode));
        !exclusions.any_pair() || pair.is_some_and(|(prefill, decode)| partners(prefill, decode))
    };
    let mend = |roleset: usize, best: pair::Found, rng: &mut Rng| {
        if may(best.prefill.0, best.decode.0) {
            return Some(best);
        }
        let ours = |id: usize| prefills.get(id).is_some_and(|prefill| prefill.roleset == roleset);
        let prefills = prefill_ids.iter().copied().zip(prefill_scored.fates.iter().map(|(_, score)| *score));
        let prefills = prefills.filter(|(id, _)| ours(*id)).filter_map(|(id, score)| Some((id, score?)));
        let decodes = || decode_ids.iter().copied().zip(decode_scored.scores.iter().copied());
        pair::best_of_partners(prefills, decodes, maxima, may, rng)
    };
    let winner = if ahead == 0 && !together::company(context.peers) {
        pair::best(&prefill_scored.best, &decode_best, maxima, mend, dice.own)?
    } else {
        let scored = prefill_ids.iter().zip(&prefill_scored.fates);
        let scored = scored.filter_map(|(id, (_, score))| Some((prefills.get(*id)?.roleset, (*score)?, *id)));
        let step = prefill::step(prefills, &prefill_ids, scoring);
        let prefill_side = together::Side::new(rolesets, scored, step, maxima.0);
        let scored = decode_ids.iter().zip(&decode_scored.scores);
        let scored = scored.filter_map(|(id, score)| Some((decodes.get(*id)?.roleset, *score, *id)));
        let step = decode::step(&facts, &decode_ids, request, knobs);
        let decode_side = together::Side::new(rolesets, scored, step, maxima.1);
        together::pair([prefill_side, decode_side], ahead, may, dice.of(2))?
    };
    let (prefill, decode) = (prefills.get(winner.prefill)?, decodes.get(winner.decode)?);
    let decode_facts = facts.get(winner.decode)?;
    let roleset = prefill.roleset;
    let explanation = Explanation {
        prefills: explain::describe(
            prefills.len(),
            |id| explain::found(&prefill_ids, &prefill_scored.fates, id).and_then(|(_, score)| score),
            |id| {
                let fate = explain::found(&prefill_ids, &prefill_scored.fates, id).unwrap_or((Fate::LeftOut, None));
                let (candidate, count) = (prefills.get(id)?, counts.get(id).copied()?);
                Some(prefill::considered(candidate.pod, fate, count, matches.counted(id, knobs), context))
            },
        ),
        decodes: decode::explain(decodes, &facts, &decode_ids, &decode_scored, context.now),
        ties: Ties {
            prefill: ties(&prefill_scored.best, roleset, winner.prefill),
            decode: ties(&decode_best, roleset, winner.decode),
            total: winner.ties,
        },
        maxima,
        ahead,
    };
    Some(Decision {
        explanation,
        ejections_ignored: false,
        target: Target::Pair { prefill: Arc::clone(prefill.pod), decode: Arc::clone(decode.pod) },
        strategy: Strategy::Pd,
        policies: Some((knobs.prefill_policy, knobs.decode_policy)),
        fast_paths,
        band,
        prefix_match_pct: matches.raw(winner.prefill),
        best_match_pct: matches.best(),
        candidates: (prefills.len(), decodes.len()),
        tokens: TokenCost {
            prefill: prefill::charge(request, matches.counted(winner.prefill, knobs), knobs),
            decode: decode::charge(request, knobs),
        },
        scores: Scores {
            prefill: Some(winner.prefill_score),
            decode: Some(winner.decode_score),
            total: Some(winner.total),
            prefill_count: counts.get(winner.prefill).copied()?,
            decode_count: decode_facts.count,
            cold_start: decode_scored.cold_start && !decode_facts.fresh,
        },
        missing: missing(knobs, &facts, prefill_scored.any_mean),
    })
}
