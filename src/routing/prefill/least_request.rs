//! Prefill policy `least_request`.

/// The count itself (the PD document, step 3).
pub(super) fn score(count: f64) -> f64 {
    count
}
