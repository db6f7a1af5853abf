//! Requests that a pod may have at a time (profile field `requestsInflight`): pods that have as many get no more, and when
//! all have, the request is refused.
//!
//! What counts is what the gateways have there: this one exactly, as selection and charge are one step, and the others as
//! of what they last published (exactly as well, where decisions are claimed).

use std::borrow::Cow;
use std::sync::Arc;

use super::eligibility::{Candidate, Pool};
use super::prefill::Matches;
use super::{Context, RoutingError, SingleReason, ejections};
use crate::fleet::Pod;

/// The pool without the pods that have `limit` requests, and the prefix matches of those that are left.
pub(super) fn narrow<'a>(
    pool: &Pool<'a>,
    matches: &Matches,
    exclusions: &ejections::Exclusions,
    limit: u64,
    context: Context<'_>,
) -> Result<(Pool<'a>, Matches), RoutingError> {
    let load = |pod: &Pod| pod.state.load.total(context.now);
    let whole = |pod: &Arc<Pod>| load(pod).in_flight() < limit;
    let single = |pods: &[&'a Arc<Pod>]| pods.iter().copied().filter(|pod| whole(pod)).collect::<Vec<_>>();
    let narrowed = match pool {
        Pool::Any(pods) => {
            let ids: Vec<usize> = (0..pods.len()).filter(|id| pods.get(*id).is_some_and(whole)).collect();
            let left: Vec<Arc<Pod>> = ids.iter().filter_map(|id| pods.get(*id).cloned()).collect();
            (!left.is_empty()).then(|| (Pool::Any(Cow::Owned(left)), matches.only(&ids)))
        }
        Pool::Combined(pods, reason) => {
            let left = single(pods);
            (!left.is_empty()).then(|| (Pool::Combined(left, *reason), Matches::default()))
        }
        Pool::DecodeOnly(decodes) => {
            let left: Vec<Candidate<'a>> = decodes.iter().copied().filter(|one| whole(one.pod)).collect();
            (!left.is_empty()).then(|| (Pool::DecodeOnly(left), Matches::default()))
        }
        Pool::Pairs { prefills, decodes, combined } => {
            let partners = |prefill: &Candidate<'_>, decode: &Candidate<'_>| {
                prefill.roleset == decode.roleset && !exclusions.pair(prefill.pod.state.slot, decode.pod.state.slot)
            };
            let free: Vec<Candidate<'a>> =
                decodes.iter().copied().filter(|one| load(one.pod).decodes() < limit).collect();
            let may =
                |one: &Candidate<'a>| load(one.pod).prefills < limit && free.iter().any(|decode| partners(one, decode));
            let ids: Vec<usize> = (0..prefills.len()).filter(|id| prefills.get(*id).is_some_and(may)).collect();
            let left: Vec<Candidate<'a>> = ids.iter().filter_map(|id| prefills.get(*id).copied()).collect();
            let decodes: Vec<Candidate<'a>> =
                free.iter().copied().filter(|decode| left.iter().any(|one| partners(one, decode))).collect();
            let combined = single(combined);
            if !left.is_empty() {
                Some((Pool::Pairs { prefills: left, decodes, combined }, matches.only(&ids)))
            } else if !combined.is_empty() {
                Some((Pool::Combined(combined, SingleReason::CombinedFallback), Matches::default()))
            } else {
                None
            }
        }
    };
    narrowed.ok_or(RoutingError::Saturated { limit })
}
