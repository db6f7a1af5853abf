//! Adaptive bucket serving (step 2b): the roleset that the plan has for the request's length.

use std::sync::Arc;

use super::eligibility::Candidate;
use super::{BandUse, RequestFacts, Strategy};
use crate::bands;
use crate::fleet::Model;
use crate::knobs::PdKnobs;

/// Asks the live plan, once per request: a decision that is made again after a conflict must not see another plan.
/// `None` with another strategy, with the feature off, for a prompt that was not counted, and where the plan holds no band.
pub(super) fn look_up(
    model: &Model,
    request: &RequestFacts<'_>,
    strategy: Strategy,
    knobs: &PdKnobs,
    seed: u64,
) -> Option<Arc<str>> {
    if strategy != Strategy::Pd || !bands::enabled(knobs) {
        return None;
    }
    let profile = model.config.as_ref().and_then(|config| config.profile(request.profile));
    model.bands.roleset(profile.map(|profile| &*profile.name), request.length.tokens()?, seed)
}

/// Narrows both sides to the roleset of the band, if both still have candidates in it; the plan only advises.
pub(super) fn narrow(
    model: &Model,
    band: &Arc<str>,
    (prefills, prefill_ids): (&[Candidate<'_>], &mut Vec<usize>),
    (decodes, decode_ids): (&[Candidate<'_>], &mut Vec<usize>),
) -> BandUse {
    let within = |all: &[Candidate<'_>], id: usize, roleset: usize| {
        all.get(id).is_some_and(|candidate| candidate.roleset == roleset)
    };
    // The plan may be older than the snapshot, so a roleset is found by its name.
    let roleset = model.rolesets.binary_search_by(|roleset| roleset.name.cmp(band)).ok().filter(|roleset| {
        prefill_ids.iter().any(|id| within(prefills, *id, *roleset))
            && decode_ids.iter().any(|id| within(decodes, *id, *roleset))
    });
    if let Some(roleset) = roleset {
        prefill_ids.retain(|id| within(prefills, *id, roleset));
        decode_ids.retain(|id| within(decodes, *id, roleset));
    }
    BandUse { roleset: Arc::clone(band), applied: roleset.is_some() }
}
