//! Prefill policy `conductor`: an estimate of the time to the first token (reference section 4.7). All times are
//! milliseconds.

/// Prompt tokens of the request that a pod with no history is assumed to have in its queue.
const ASSUMED_TOKENS: f64 = 512.0;

/// Time for tokens whose KV cache the pod already has.
fn cached(tokens: f64) -> f64 {
    if tokens > 0.0 { 0.005 * tokens + 1.0 } else { 0.0 }
}

/// Time for tokens that must be computed; attention makes it grow faster than the prompt.
fn computed(tokens: f64) -> f64 {
    if tokens > 0.0 { 0.001 * tokens * tokens.sqrt() + 5.0 } else { 0.0 }
}

/// `queue + cached prefix + computed rest`: `count` outstanding prefills of `mean_seconds` each (the engine's own
/// histogram; unknown or not above zero: the time of 512 tokens), then this prompt of `tokens` tokens, of which
/// `match_percent` are cached.
pub(super) fn score(count: f64, mean_seconds: Option<f64>, tokens: u64, match_percent: u8) -> f64 {
    let mean = mean_seconds.filter(|mean| mean.is_finite() && *mean > 0.0);
    let each = mean.map_or_else(|| computed(ASSUMED_TOKENS), |seconds| seconds * 1000.0);
    let queue = if count > 0.0 { count * each } else { 0.0 };
    let matched = tokens as f64 * f64::from(match_percent.min(100)) / 100.0;
    queue + cached(matched) + computed(tokens as f64 - matched)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formula() {
        for (count, mean, tokens, percent, expected) in [
            (0.0, None, 0, 0, 0.0),
            (0.0, Some(9.0), 0, 100, 0.0),
            (1.0, None, 0, 0, 16.585_237),
            (2.0, Some(0.25), 0, 0, 500.0),
            (2.0, Some(0.0), 0, 0, 33.170_475),
            (2.0, Some(-1.0), 0, 0, 33.170_475),
            (2.0, Some(f64::NAN), 0, 0, 33.170_475),
            (2.0, Some(f64::INFINITY), 0, 0, 33.170_475),
            (0.0, None, 10_000, 0, 1005.0),
            (0.0, None, 10_000, 100, 51.0),
            // 5000 cached: 26; 5000 to compute: 353.55 + 5.
            (0.0, None, 10_000, 50, 384.553_391),
            (0.0, None, 10_000, 255, 51.0),
            (0.0, None, 1, 0, 5.001),
        ] {
            let score = score(count, mean, tokens, percent);
            assert!((score - expected).abs() < 1e-5, "{count} {mean:?} {tokens} {percent}: {score}");
        }
    }
}
