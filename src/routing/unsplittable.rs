//! Requests that cannot be split into two legs (several choices, several prompts).

use std::sync::Arc;

use super::eligibility::Candidate;
use super::{Context, Explanation, FastPaths, RequestFacts, Scores, Ties, decode, together};
use crate::fleet::Pod;
use crate::knobs::PdKnobs;
use crate::rng::Rng;

/// A decode pod for the whole request: step 2, then step 4, without a prefill side. A decode pod without a hand-off
/// computes the prompt itself.
pub(super) fn decode_only<'a>(
    candidates: &[Candidate<'a>],
    request: &RequestFacts<'_>,
    knobs: &PdKnobs,
    context: Context<'_>,
    rng: &mut Rng,
) -> Option<(&'a Arc<Pod>, Scores, FastPaths, Explanation)> {
    let all = decode::Facts::read_all(candidates, context);
    let mut ids: Vec<usize> = (0..candidates.len()).collect();
    let mut fast_paths = FastPaths::default();
    let ahead = together::ahead(context.peers);
    let mut dice = together::Dice::new(context.peers, rng);
    if !knobs.decode_policy.charges_tokens()
        && let Some((id, check)) = decode::fast_path_after(ahead, &all, &ids, knobs, dice.of(0))
    {
        fast_paths.decode = Some(check);
        ids = vec![id];
    }
    let scored = decode::score(&all, &ids, knobs);
    let step = if ahead > 0 { decode::step(&all, &ids, request, knobs) } else { 0.0 };
    let ((id, score), ties) =
        together::single(scored.scores.iter().copied().zip(ids.iter().copied()), step, ahead, dice.of(1))?;
    let (candidate, facts) = (candidates.get(id)?, all.get(id)?);
    let scores = Scores {
        decode: Some(score),
        decode_count: facts.count,
        cold_start: scored.cold_start && !facts.fresh,
        ..Scores::default()
    };
    let explanation = Explanation {
        decodes: decode::explain(candidates, &all, &ids, &scored, context.now),
        ties: Ties { total: ties, ..Ties::default() },
        maxima: (1.0, scored.max),
        ahead,
        ..Explanation::default()
    };
    Some((candidate.pod, scores, fast_paths, explanation))
}
