//! Strategies other than `pd`: one pod for everything.

use std::sync::Arc;

use super::{Context, Strategy};
use crate::fleet::Pod;
use crate::rng::Rng;

use super::least::least;

/// Requests in flight on a pod: everything this gateway has there, plus other gateways' running requests while the
/// pod's metrics are fresh.
pub(super) fn in_flight(pod: &Pod, context: Context<'_>) -> f64 {
    pod.state.load.view().in_flight() as f64 + super::decode::foreign(pod, context)
}

/// The pod with the fewest requests in flight, ties at random.
pub(super) fn least_request<'a>(
    pods: impl IntoIterator<Item = &'a Arc<Pod>>,
    context: Context<'_>,
    rng: &mut Rng,
) -> Option<(&'a Arc<Pod>, f64)> {
    least(pods.into_iter().map(|pod| (in_flight(pod, context), pod)), rng)
}

/// The pod of a strategy other than `pd`. A single pod needs no look at its load.
pub(super) fn pick<'a>(
    pods: &'a [Arc<Pod>],
    strategy: Strategy,
    context: Context<'_>,
    rng: &mut Rng,
) -> Option<(&'a Arc<Pod>, Option<f64>)> {
    match (pods, strategy) {
        ([only], _) => Some((only, None)),
        (_, Strategy::Random) => pods.get(rng.below(pods.len())).map(|pod| (pod, None)),
        _ => least_request(pods, context, rng).map(|(pod, count)| (pod, Some(count))),
    }
}
