//! Decode policy `least_request`.

use super::Facts;

/// Running plus pending requests (the PD document, step 4).
pub(super) fn score(facts: &Facts) -> f64 {
    facts.count
}
