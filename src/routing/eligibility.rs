//! Who may serve the request at all (step 0), and what an error says when nobody may.
//!
//! Nothing here depends on loads, so it is done once per request, and again only when somebody's health has changed.
//!
//! Promise: ejections narrow the choice and never end it. If nobody is left who could serve the request, they do not
//! count.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;

use super::ejections::{Exclusions, LeftOut};
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

/// The outcome of step 0.
#[derive(Clone, Debug)]
pub(super) struct Eligible<'a> {
    /// Who may serve the request.
    pub(super) pool: Pool<'a>,
    /// Pairs of the pool that must not be formed. Each of its pods has a partner with which it may.
    pub(super) exclusions: Exclusions,
    /// Who is missing from it because of ejections.
    pub(super) left_out: LeftOut,
    /// Everybody is ejected, so that ejections do not count.
    pub(super) ignored: bool,
}

/// Collects the pods for this request.
pub(super) fn gather<'a>(
    model: &'a Model,
    request: &RequestFacts<'_>,
    strategy: Strategy,
    knobs: &PdKnobs,
    exclusions: &Exclusions,
) -> Result<Eligible<'a>, RoutingError> {
    let routable = model.routable.len();
    if model.routable.is_empty() {
        return Err(RoutingError::NoPods);
    }
    // Label look-ups are slow and a client chooses how many there are: once for each pod.
    let passing: Option<HashSet<u32>> = request.filter.map(|filter| {
        let passing = model.routable.iter().filter(|pod| filter.matches(&pod.spec.labels));
        passing.map(|pod| pod.state.slot).collect()
    });
    if passing.as_ref().is_some_and(HashSet::is_empty) {
        return Err(RoutingError::Filtered { routable });
    }
    let pool = |avoid: Option<u32>, exclusions: &Exclusions| {
        let passes = |pod: &Pod| {
            let slot = pod.state.slot;
            avoid != Some(slot) && passing.as_ref().is_none_or(|passing| passing.contains(&slot))
        };
        let all = request.filter.is_none() && avoid.is_none();
        Search { model, request, strategy, knobs, passes: &passes, all, exclusions }.pool()
    };
    let nothing = Exclusions::default();
    let everybody = pool(request.avoid, &nothing).map_err(|error| {
        let avoided = request.avoid.is_some() && pool(None, &nothing).is_ok();
        if avoided { RoutingError::NoOther { routable } } else { error }
    })?;
    if exclusions.is_empty() {
        let left_out = LeftOut::default();
        return Ok(Eligible { pool: everybody, exclusions: nothing, left_out, ignored: false });
    }
    Ok(match pool(request.avoid, exclusions) {
        Ok(pool) => {
            let left_out = everybody.without(&pool);
            Eligible { pool, exclusions: exclusions.clone(), left_out, ignored: false }
        }
        Err(_) => Eligible { pool: everybody, exclusions: nothing, left_out: LeftOut::default(), ignored: true },
    })
}

/// One way to collect the pods.
#[derive(Clone, Copy)]
struct Search<'a, 's> {
    model: &'a Model,
    request: &'s RequestFacts<'s>,
    strategy: Strategy,
    knobs: &'s PdKnobs,
    /// The client lets the request go there, and it is not the pod to avoid.
    passes: &'s dyn Fn(&Pod) -> bool,
    /// Every pod passes.
    all: bool,
    exclusions: &'s Exclusions,
}

impl<'a> Search<'a, '_> {
    fn pool(self) -> Result<Pool<'a>, RoutingError> {
        let Search { model, request, passes, exclusions, .. } = self;
        let healthy = |pod: &Pod| passes(pod) && !exclusions.pod(pod);
        if self.strategy != Strategy::Pd {
            if self.all && exclusions.is_empty() {
                return Ok(Pool::Any(Cow::Borrowed(&model.routable)));
            }
            let pods: Vec<Arc<Pod>> = model.routable.iter().filter(|pod| healthy(pod)).cloned().collect();
            return if pods.is_empty() { Err(RoutingError::NoPods) } else { Ok(Pool::Any(Cow::Owned(pods))) };
        }
        let bucketing = self.knobs.prompt_length_bucketing;
        let in_range = |pod: &Pod| !bucketing || bucket::pod_fits(pod, request.profile, request.length);
        let combined = |ranges: bool| -> Vec<&'a Arc<Pod>> {
            let fits = |pod: &Pod| healthy(pod) && runs_both(pod, request) && (!ranges || in_range(pod));
            model.standalone.iter().filter(|pod| fits(pod)).collect()
        };
        if request.splittable != Splittable::Yes {
            let fits = |pod: &Pod| passes(pod) && in_range(pod);
            return self.unsplittable(&[&fits, passes], combined);
        }
        let (prefills, decodes) = pairs(model, &|pod| healthy(pod) && in_range(pod), exclusions);
        let fitting = combined(true);
        if !prefills.is_empty() && !decodes.is_empty() {
            let combined = if bucketing { fitting } else { Vec::new() };
            return Ok(Pool::Pairs { prefills, decodes, combined });
        }
        if !fitting.is_empty() {
            return Ok(Pool::Combined(fitting, SingleReason::CombinedFallback));
        }
        if bucketing && !pairs(model, passes, &Exclusions::default()).0.is_empty() {
            return Err(RoutingError::NoBucket { length: bucket::at_least(request.length) });
        }
        Err(incomplete(model, request.filter))
    }

    /// A range is respected where something fits it, and ignored rather than refuse the request. The health of prefill
    /// pods and pairs is nothing to a decode pod that does everything.
    fn unsplittable(
        self,
        fitting: &[&dyn Fn(&Pod) -> bool],
        combined: impl Fn(bool) -> Vec<&'a Arc<Pod>>,
    ) -> Result<Pool<'a>, RoutingError> {
        let Search { model, request, exclusions, .. } = self;
        for ranges in [true, false] {
            let combined = combined(ranges);
            if !combined.is_empty() {
                return Ok(Pool::Combined(combined, SingleReason::CombinedUnsplittable));
            }
        }
        if request.splittable == Splittable::CombinedOnly {
            // Who waits for a pod that is on its way has asked for nothing wrong.
            let lets_pass = |pod: &Pod| request.filter.is_none_or(|filter| filter.matches(&pod.spec.labels));
            let known = model.pods.iter().filter(|pod| {
                pod.spec.role == Role::Other
                    && pod.spec.serves_http
                    && pod.spec.pd
                    && runs_both(pod, request)
                    && lets_pass(pod)
            });
            return Err(match known.count() {
                0 => RoutingError::NoCombined,
                known => RoutingError::CombinedNotReady { known },
            });
        }
        for fits in fitting {
            let (_, mut decodes) = pairs(model, fits, &Exclusions::default());
            decodes.retain(|candidate| !exclusions.pod(candidate.pod));
            if !decodes.is_empty() {
                return Ok(Pool::DecodeOnly(decodes));
            }
        }
        Err(incomplete(model, request.filter))
    }
}

/// Whether the profile of the request makes it a combined pod.
fn runs_both(pod: &Pod, request: &RequestFacts<'_>) -> bool {
    let profile = pod.spec.config.as_ref().and_then(|config| config.profile(request.profile));
    profile.is_some_and(|profile| profile.combined)
}

impl Pool<'_> {
    /// The prefill pods, and all others.
    fn sides(&self) -> [Vec<&Arc<Pod>>; 2] {
        match self {
            Pool::Pairs { prefills, decodes, combined } => [
                prefills.iter().map(|candidate| candidate.pod).collect(),
                decodes.iter().map(|candidate| candidate.pod).chain(combined.iter().copied()).collect(),
            ],
            Pool::Combined(pods, _) => [Vec::new(), pods.clone()],
            Pool::DecodeOnly(decodes) => [Vec::new(), decodes.iter().map(|candidate| candidate.pod).collect()],
            Pool::Any(pods) => [Vec::new(), pods.iter().collect()],
        }
    }

    /// Whom `narrower` lacks.
    fn without(&self, narrower: &Pool<'_>) -> LeftOut {
        let there: HashSet<u32> = narrower.sides().into_iter().flatten().map(|pod| pod.state.slot).collect();
        let [prefills, decodes] = self.sides().map(|side| {
            side.into_iter().filter(|pod| !there.contains(&pod.state.slot)).cloned().collect::<Vec<Arc<Pod>>>()
        });
        LeftOut { prefills, decodes }
    }
}

/// Prefill and decode pods of the rolesets that have both, counting only pods that fit, and that have somebody to form a
/// pair with.
fn pairs<'a>(
    model: &'a Model,
    fits: &dyn Fn(&Pod) -> bool,
    exclusions: &Exclusions,
) -> (Vec<Candidate<'a>>, Vec<Candidate<'a>>) {
    let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
    for (roleset, set) in model.rolesets.iter().enumerate() {
        let (prefill_start, decode_start) = (prefills.len(), decodes.len());
        prefills.extend(set.prefill.iter().filter(|pod| fits(pod)).map(|pod| Candidate { pod, roleset }));
        decodes.extend(set.decode.iter().filter(|pod| fits(pod)).map(|pod| Candidate { pod, roleset }));
        if exclusions.any_pair() {
            let (ours, theirs) = (prefills.split_off(prefill_start), decodes.split_off(decode_start));
            let may = |prefill: &Candidate<'_>, decode: &Candidate<'_>| {
                !exclusions.pair(prefill.pod.state.slot, decode.pod.state.slot)
            };
            // Whoever has a partner is one for that partner, so once is enough.
            prefills.extend(ours.iter().filter(|prefill| theirs.iter().any(|decode| may(prefill, decode))));
            decodes.extend(theirs.iter().filter(|decode| ours.iter().any(|prefill| may(prefill, decode))));
        }
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
