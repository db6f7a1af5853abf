//! Prefill policies `token_load` and `hybrid_cache_load`, and what a request is charged under them.

use crate::knobs::{PdKnobs, PrefillPolicy};
use crate::load::TokenView;
use crate::routing::RequestFacts;

/// `active + weight · kv`, tokens (the PD document, step 3).
pub(super) fn load(tokens: TokenView, knobs: &PdKnobs) -> f64 {
    tokens.active as f64 + knobs.token_load_kv_weight * tokens.kv as f64
}

/// The load, discounted by the square of the match; an idle pod (load below 1) scores the bare discount, so that among
/// idle pods the best match wins.
pub(super) fn hybrid(load: f64, match_percent: u8, factor: f64) -> f64 {
    let matched = f64::from(match_percent.min(100)) / 100.0;
    let discount = 1.0 - matched * matched * factor;
    if load >= 1.0 { load * discount } else { discount }
}

/// Tokens that the chosen prefill pod is charged: the fixed cost, and the part of the prompt that it has to compute by
/// the first rule that applies (reference section 4.12): growth of the session, what the prefix match leaves, all of it.
/// `match_percent` is the match as scoring sees it; only `hybrid_cache_load` counts it.
pub(in super::super) fn charge(request: &RequestFacts<'_>, match_percent: u8, knobs: &PdKnobs) -> Option<u64> {
    if !knobs.prefill_policy.charges_tokens() {
        return None;
    }
    let computed = match request.session_growth {
        Some(growth) => growth,
        None if knobs.prefill_policy == PrefillPolicy::HybridCacheLoad => {
            let rest = u64::from(100 - match_percent.min(100));
            u64::try_from(u128::from(request.prompt_tokens) * u128::from(rest) / 100).unwrap_or(u64::MAX)
        }
        None => request.prompt_tokens,
    };
    Some(knobs.token_load_request_cost.saturating_add(computed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_active_and_a_share_of_what_is_resident() {
        let view = |active, kv| TokenView { active, kv, ..TokenView::default() };
        let knobs = PdKnobs::default();
        for (tokens, expected) in [(view(0, 0), 0.0), (view(4000, 4000), 5200.0), (view(0, 10), 3.0)] {
            assert!((load(tokens, &knobs) - expected).abs() < 1e-9, "{tokens:?}");
        }
    }

    #[test]
    fn the_match_decides_between_idle_pods_and_discounts_busy_ones() {
        for (load, percent, factor, expected) in [
            (0.0, 0, 0.5, 1.0),
            (0.0, 100, 0.5, 0.5),
            (0.999, 100, 0.5, 0.5),
            (1.0, 100, 0.5, 0.5),
            (1.0, 0, 0.5, 1.0),
            (1000.0, 30, 0.5, 955.0),
            (1000.0, 70, 0.5, 755.0),
            (1000.0, 100, 0.5, 500.0),
            (1000.0, 100, 1.0, 0.0),
            (1000.0, 100, 0.0, 1000.0),
            (1000.0, 255, 0.5, 500.0),
        ] {
            assert!((hybrid(load, percent, factor) - expected).abs() < 1e-9, "{load} {percent} {factor}");
        }
    }

    #[test]
    fn charge_follows_the_first_rule_that_applies() {
        use PrefillPolicy::{Conductor, HybridCacheLoad, LeastRequest, PrefixCache, TokenLoad};
        for (policy, growth, percent, expected) in [
            (TokenLoad, None, 0, Some(4500)),
            (TokenLoad, None, 90, Some(4500)),
            (TokenLoad, Some(7), 90, Some(3507)),
            (HybridCacheLoad, Some(7), 90, Some(3507)),
            (HybridCacheLoad, None, 0, Some(4500)),
            (HybridCacheLoad, None, 90, Some(3600)),
            (HybridCacheLoad, None, 100, Some(3500)),
            (HybridCacheLoad, None, 255, Some(3500)),
            (PrefixCache, None, 0, None),
            (LeastRequest, None, 0, None),
            (Conductor, Some(7), 0, None),
        ] {
            let knobs = PdKnobs { prefill_policy: policy, ..PdKnobs::default() };
            let request = RequestFacts { prompt_tokens: 1000, session_growth: growth, ..RequestFacts::default() };
            assert_eq!(charge(&request, percent, &knobs), expected, "{policy:?} {growth:?} {percent}");
        }
        // Whole numbers only: 99 % of 199 leaves 1.
        let knobs = PdKnobs { prefill_policy: HybridCacheLoad, token_load_request_cost: 1, ..PdKnobs::default() };
        let request = RequestFacts { prompt_tokens: 199, ..RequestFacts::default() };
        assert_eq!(charge(&request, 99, &knobs), Some(2));
        let request = RequestFacts { prompt_tokens: u64::MAX, ..RequestFacts::default() };
        assert_eq!(charge(&request, 0, &knobs), Some(u64::MAX));
    }
}
