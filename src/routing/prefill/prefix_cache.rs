//! Prefill policy `prefix_cache`.

/// `(100 − match) · 0.1 + count / max_count` (the PD document, step 3). `max_count` is at least 1.
pub(super) fn score(match_percent: u8, count: f64, max_count: f64) -> f64 {
    f64::from(100u8.saturating_sub(match_percent)) * 0.1 + count / max_count.max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formula() {
        for (percent, count, max, expected) in [
            (0, 0.0, 1.0, 10.0),
            (100, 0.0, 1.0, 0.0),
            (100, 4.0, 4.0, 1.0),
            (50, 1.0, 4.0, 5.25),
            (1, 0.0, 1.0, 9.9),
            (200, 0.0, 0.0, 0.0),
        ] {
            let score = score(percent, count, max);
            assert!((score - expected).abs() < 1e-12, "{percent} {count} {max}: {score}");
        }
    }
}
