//! `power-of-two`: of two pods drawn at random, the one with fewer requests in flight.
//!
//! The reference counts requests per pod and hour in Redis (its section 8.4); here it is what this replica has in flight
//! and what it sees of other gateways' requests.

use crate::rng::Rng;

/// The chosen one of `candidates`, and its count. Both draws are uniform and distinct; of equal counts the first wins,
/// which is chance as well.
pub(super) fn pick(candidates: usize, count: impl Fn(usize) -> Option<f64>, rng: &mut Rng) -> Option<(usize, f64)> {
    let first = rng.below(candidates);
    let count_of = |id| count(id).map(|count| (id, count));
    if candidates < 2 {
        return count_of(first);
    }
    let other = rng.below(candidates - 1);
    let second = other + usize::from(other >= first);
    let (first, second) = (count_of(first)?, count_of(second)?);
    Some(if second.1 < first.1 { second } else { first })
}
