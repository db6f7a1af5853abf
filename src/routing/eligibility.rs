//! Who may serve the request at all (step 0), and what an error says when nobody may.
//!
//! Nothing here depends on loads, so it is done once per request.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;

use super::{RequestFacts, RoutingError, SingleReason, Splittable, Strategy, bucket};
use crate::fleet::{Model, Pod, Role, Selector};
use crate::knobs::PdKnobs;

/// A pod of a roleset.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    /// The pod.
    pub(super) pod: &'a Arc<Pod>,
    /// Its roleset, as an index into [`Model::rolesets`].
    pub(super) roleset: usize,
}

/// The pods a request may go to.
#[derive(Clone, Debug)]
pub(super) enum Pool<'a> {
    /// Complete pairs, and the combined pods that may take over when the pairs are loaded (bucketing only).
    Pairs {
        /// Prefill pods; none of the two lists is empty.
        prefills: Vec<Candidate<'a>>,
        /// Decode pods of the same rolesets.
        decodes: Vec<Candidate<'a>>,
        /// Combined pods whose range fits.
        combined: Vec<&'a Arc<Pod>>,
    },
    /// Combined pods only, not empty.
    Combined(Vec<&'a Arc<Pod>>, SingleReason),
    /// Decode pods, not empty, for a request that cannot be split.
    DecodeOnly(Vec<Candidate<'a>>),
    /// Any routable pod that the client's selector lets pass, not empty: strategies other than `pd`.
    Any(Cow<'a, [Arc<Pod>]>),
}

impl<'a> Pool<'a> {
    /// Collects the pods for this request.
    pub(super) fn gather(
        model: &'a Model,
        request: &RequestFacts<'_>,
        strategy: Strategy,
        knobs: &PdKnobs,
    ) -> Result<Pool<'a>, RoutingError> {
        if model.routable.is_empty() {
            return Err(RoutingError::NoPods);
        }
        // Label look-ups are slow and a client chooses how many there are: once for each pod.
        let passing: Option<HashSet<u32>> = request.filter.map(|filter| {
            let passing = model.routable.iter().filter(|pod| filter.matches(&pod.spec.labels));
            passing.map(|pod| pod.state.slot).collect()
        });
        if passing.as_ref().is_some_and(HashSet::is_empty) {
            return Err(RoutingError::Filtered { routable: model.routable.len() });
        }
        let passes = |pod: &Pod| passing.as_ref().is_none_or(|passing| passing.contains(&pod.state.slot));
        if strategy != Strategy::Pd {
            return Ok(Pool::Any(match request.filter {
                None => Cow::Borrowed(&model.routable),
                Some(_) => model.routable.iter().filter(|pod| passes(pod)).cloned().collect(),
            }));
        }
        let bucketing = knobs.prompt_length_bucketing;
        let fits = |pod: &Pod| passes(pod) && (!bucketing || bucket::pod_fits(pod, request.profile, request.length));
        let combined = |ranges: bool| -> Vec<&'a Arc<Pod>> {
            let runs_both = |pod: &Pod| {
                let profile = pod.spec.config.as_ref().and_then(|config| config.profile(request.profile));
                passes(pod) && profile.is_some_and(|profile| profile.combined)
            };
            model.standalone.iter().filter(|pod| runs_both(pod) && (!ranges || fits(pod))).collect()
        };
        if request.splittable == Splittable::No {
            return Self::unsplittable(model, request.filter, &[&fits, &passes], combined);
        }
        let (prefills, decodes) = pairs(model, &fits);
        let fitting = combined(true);
        if !prefills.is_empty() && !decodes.is_empty() {
            let combined = if bucketing { fitting } else { Vec::new() };
            return Ok(Pool::Pairs { prefills, decodes, combined });
        }
        if !fitting.is_empty() {
            return Ok(Pool::Combined(fitting, SingleReason::CombinedFallback));
        }
        if bucketing && !pairs(model, &passes).0.is_empty() {
            return Err(RoutingError::NoBucket { length: bucket::at_least(request.length) });
        }
        Err(incomplete(model, request.filter))
    }

    /// A range is respected where something fits it, and ignored rather than refuse the request.
    fn unsplittable(
        model: &'a Model,
        filter: Option<&Selector>,
        fitting: &[&dyn Fn(&Pod) -> bool],
        combined: impl Fn(bool) -> Vec<&'a Arc<Pod>>,
    ) -> Result<Pool<'a>, RoutingError> {
        for ranges in [true, false] {
            let combined = combined(ranges);
            if !combined.is_empty() {
                return Ok(Pool::Combined(combined, SingleReason::CombinedUnsplittable));
            }
        }
        for fits in fitting {
            let (_, decodes) = pairs(model, fits);
            if !decodes.is_empty() {
                return Ok(Pool::DecodeOnly(decodes));
            }
        }
        Err(incomplete(model, filter))
    }
}

/// Prefill and decode pods of the rolesets that have both, counting only pods that fit.
fn pairs<'a>(model: &'a Model, fits: &dyn Fn(&Pod) -> bool) -> (Vec<Candidate<'a>>, Vec<Candidate<'a>>) {
    let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
    for (roleset, set) in model.rolesets.iter().enumerate() {
        let (prefill_start, decode_start) = (prefills.len(), decodes.len());
        prefills.extend(set.prefill.iter().filter(|pod| fits(pod)).map(|pod| Candidate { pod, roleset }));
        decodes.extend(set.decode.iter().filter(|pod| fits(pod)).map(|pod| Candidate { pod, roleset }));
        if prefills.len() == prefill_start || decodes.len() == decode_start {
            prefills.truncate(prefill_start);
            decodes.truncate(decode_start);
        }
    }
    (prefills, decodes)
}

/// Rolesets that an error text names.
const NAMED_ROLESETS: usize = 8;
/// Characters of a roleset name in an error text.
const NAME_CHARS: usize = 63;

/// The error for a model without a complete pair. It blames the side that has no pod at all; when both sides have
/// pods, but no roleset has both, it blames the prefill side, as the reference gateway does.
///
/// With a filter, pods that it does not let pass do not count, and the text says that there is one.
fn incomplete(model: &Model, filter: Option<&Selector>) -> RoutingError {
    let passes = |pod: &Pod| filter.is_none_or(|filter| filter.matches(&pod.spec.labels));
    let count = |role| model.routable.iter().filter(|pod| pod.spec.role == role && passes(pod)).count();
    let (prefill, decode) = (count(Role::Prefill), count(Role::Decode));
    let mut detail = detail(model);
    if filter.is_some() {
        let passing = model.routable.iter().filter(|pod| passes(pod)).count();
        let _ = write!(detail, "; external-filter matches {passing} of {} ready pods", model.routable.len());
    }
    if prefill > 0 && decode == 0 {
        RoutingError::NoDecode { prefill, decode, detail }
    } else {
        RoutingError::NoPrefill { prefill, decode, detail }
    }
}

/// Which roleset lacks what; bounded in length whatever the labels hold. Empty, or starting with "; ".
fn detail(model: &Model) -> String {
    let mut text = String::new();
    for set in model.partial.iter().take(NAMED_ROLESETS) {
        let lacks = match (set.prefill, set.decode) {
            (0, 0) => "prefill and decode",
            (0, _) => "prefill",
            (_, 0) => "decode",
            // Pods on both sides, but not a whole replica of each, or none that serves HTTP.
            _ => "a complete pair",
        };
        let name: String = set.name.chars().map(|c| if c.is_control() { '?' } else { c }).take(NAME_CHARS).collect();
        let _ = write!(text, "; roleset {name} lacks {lacks}");
    }
    if let Some(more @ 1..) = model.partial.len().checked_sub(NAMED_ROLESETS) {
        let _ = write!(text, "; {more} more rolesets are incomplete");
    }
    let homeless = |pod: &&Arc<Pod>| pod.spec.role != Role::Other && pod.spec.roleset.is_none();
    let homeless = model.routable.iter().filter(homeless).count();
    if homeless > 0 {
        let _ = write!(text, "; {homeless} prefill or decode pods have no roleset-name");
    }
    text
}
