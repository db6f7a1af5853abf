//! The prefill side: fast path (step 1), outlier rule and scores (step 3).
//!
//! The count of a pod is its outstanding prefill legs, as charged by this gateway.

mod fast_path;
mod least_request;
mod outliers;
mod prefix_cache;

pub(super) use fast_path::fast_path;

use super::eligibility::{Candidate, Pool};
use super::least::Least;
use super::{RequestFacts, Strategy};
use crate::fleet::Model;
use crate::knobs::{PdKnobs, PrefillPolicy};
use crate::prefix::PrefixIndex;
use crate::rng::Rng;

/// Prefix matches of the prefill candidates (`pd`) or of all candidates (other strategies), percent, in their order;
/// empty when nobody looks.
#[derive(Clone, Debug, Default)]
pub(super) struct Matches(Vec<u8>);

impl Matches {
    /// Asks the index, when the policy wants to know and there is something to ask.
    pub(super) fn look_up(
        model: &Model,
        pool: &Pool<'_>,
        request: &RequestFacts<'_>,
        strategy: Strategy,
        knobs: &PdKnobs,
        index: &PrefixIndex,
    ) -> Matches {
        match pool {
            Pool::Pairs { prefills, .. }
                if knobs.prefill_policy == PrefillPolicy::PrefixCache && !request.hashes.is_empty() =>
            {
                let slots: Vec<u32> = prefills.iter().map(|candidate| candidate.pod.state.slot).collect();
                Matches(index.match_percents(&model.name, request.hashes, &slots))
            }
            Pool::Any(pods) if strategy.looks_prefixes_up() && !request.hashes.is_empty() && pods.len() > 1 => {
                let slots: Vec<u32> = pods.iter().map(|pod| pod.state.slot).collect();
                Matches(index.match_percents(&model.name, request.hashes, &slots))
            }
            _ => Matches::default(),
        }
    }

    /// The match as the index gave it.
    pub(super) fn raw(&self, candidate: usize) -> Option<u8> {
        self.0.get(candidate).copied()
    }

    /// The match as scoring sees it: one below `min_match_pct` is none.
    pub(super) fn counted(&self, candidate: usize, knobs: &PdKnobs) -> u8 {
        self.raw(candidate).filter(|percent| *percent >= knobs.min_match_pct).unwrap_or(0)
    }
}

/// The best prefill pod of each roleset.
#[derive(Clone, Debug)]
pub(super) struct Scored {
    /// By roleset: candidate index and score.
    pub(super) best: Vec<Least<usize>>,
    /// The largest score, at least 1: what scores are normalised with.
    pub(super) max: f64,
}

/// Scores the candidates `ids` (indices into `candidates`, grouped by roleset) and keeps the best per roleset.
pub(super) fn score(
    candidates: &[Candidate<'_>],
    counts: &[u64],
    ids: &[usize],
    matches: &Matches,
    knobs: &PdKnobs,
    rolesets: usize,
    rng: &mut Rng,
) -> Scored {
    let count = |id: usize| counts.get(id).copied().unwrap_or(0) as f64;
    let max_count = ids.iter().map(|id| count(*id)).fold(1.0, f64::max);
    let verdicts = outliers::judge(candidates, counts, ids, knobs.standard_deviation_factor);
    let mut scored = Scored { best: vec![Least::default(); rolesets], max: 1.0 };
    for (id, verdict) in ids.iter().copied().zip(verdicts) {
        let percent = match verdict {
            outliers::Verdict::Skip => continue,
            outliers::Verdict::LoadOnly => 0,
            outliers::Verdict::Keep => matches.counted(id, knobs),
        };
        let score = match knobs.prefill_policy {
            PrefillPolicy::PrefixCache => prefix_cache::score(percent, count(id), max_count),
            PrefillPolicy::LeastRequest => least_request::score(count(id)),
        };
        scored.max = scored.max.max(score);
        if let Some(best) = candidates.get(id).and_then(|candidate| scored.best.get_mut(candidate.roleset)) {
            best.offer(score, id, rng);
        }
    }
    scored
}
