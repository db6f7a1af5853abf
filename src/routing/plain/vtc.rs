//! `vtc-basic`: a user has a place among the pods by the tokens it was given lately, and gets a pod near it that is not
//! too busy (reference gateway, section 10; a simple form of the virtual token counter).

use super::view::View;
use crate::knobs::VtcKnobs;
use crate::load::UserTokens;
use crate::rng::Rng;

/// What chance adds, so that equals do not all go the same way.
const CHANCE: f64 = 0.1;

/// Tokens of an answer that are expected for each of the prompt.
const OUTPUT_RATIO: f64 = 1.5;

/// What a request of so many prompt tokens counts for its user.
pub fn weighted_tokens(prompt_tokens: u64, knobs: &VtcKnobs) -> f64 {
    let input = prompt_tokens as f64;
    input * knobs.input_weight + (input * OUTPUT_RATIO).ceil() * knobs.output_weight
}

/// One score per view; without a user nobody is preferred.
pub(super) fn scores(views: &[View<'_>], user: Option<UserTokens>, knobs: &VtcKnobs, rng: &mut Rng) -> Vec<f64> {
    let Some(user) = user else { return vec![0.0; views.len()] };
    // Without bounds no user has tokens, and each is at the first pod.
    let middle = user.bounds.map_or(0.0, |(least, most)| f64::midpoint(least, most));
    let step = knobs.min_tokens.max(middle);
    let place = (user.tokens / step).min(views.len().saturating_sub(1) as f64);
    let score = |(id, view): (usize, &View<'_>)| {
        let load = (view.in_flight / knobs.max_pod_load).min(1.0);
        let fairness = knobs.fairness_weight * (id as f64 - place).abs();
        let score = fairness + knobs.utilization_weight * load + rng.unit() * CHANCE;
        // Weights are as large as somebody writes them.
        if score.is_finite() { score.min(1e300) } else { 1e300 }
    };
    views.iter().enumerate().map(score).collect()
}
