//! Step 1: the prefill pods are unevenly loaded.

use super::Matches;
use crate::knobs::PdKnobs;
use crate::rng::Rng;

use super::super::eligibility::Candidate;
use super::super::least::least;

/// Fires when `max − min` of the outstanding counts is *above* the spread, and picks a least-loaded pod.
///
/// Among equally least-loaded pods the one with the best prefix match wins, so that one hot pod does not cost everybody
/// else their cached prefixes; then the one whose roleset has the fewest decode requests per decode pod (rolesets differ
/// in size, so a short prefill queue alone says little about the decode side that it commits to); then chance.
pub(in super::super) fn fast_path(
    candidates: &[Candidate<'_>],
    counts: &[u64],
    matches: &Matches,
    decode_load: &[f64],
    knobs: &PdKnobs,
    rng: &mut Rng,
) -> Option<usize> {
    let (min, max) = (counts.iter().min()?, counts.iter().max()?);
    if max - min <= knobs.prefill_imbalance_min_spread {
        return None;
    }
    let idle = || candidates.iter().enumerate().zip(counts).filter(|(_, count)| *count == min).map(|(pair, _)| pair);
    let best_match = idle().map(|(id, _)| matches.counted(id, knobs)).max()?;
    let matching = idle().filter(|(id, _)| matches.counted(*id, knobs) == best_match);
    let load = |candidate: &Candidate<'_>| decode_load.get(candidate.roleset).copied().unwrap_or(0.0);
    least(matching.map(|(id, candidate)| (load(candidate), id)), rng).map(|(id, _)| id)
}
