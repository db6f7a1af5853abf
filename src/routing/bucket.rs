//! Prompt-length ranges (step 0).

use super::PromptLength;
use crate::fleet::{BucketRange, Model, Pod};

/// Whether a range takes a prompt. `min` > `max` takes none. A prompt that was counted only up to the largest finite
/// bound counts as one token more; one that was not counted fits every range, because then no range has a finite bound.
pub(super) fn fits(range: BucketRange, length: PromptLength) -> bool {
    let max = range.max.unwrap_or(u64::MAX);
    if range.min > max {
        return false;
    }
    match length {
        PromptLength::Unknown => true,
        PromptLength::Exactly(tokens) => (range.min..=max).contains(&tokens),
        PromptLength::MoreThan(tokens) => (range.min..=max).contains(&tokens.saturating_add(1)),
    }
}

/// Whether a pod takes a prompt, by its own profile; without a configuration or profile it takes any.
pub(super) fn pod_fits(pod: &Pod, profile: Option<&str>, length: PromptLength) -> bool {
    pod.spec
        .config
        .as_ref()
        .and_then(|config| config.profile(profile))
        .is_none_or(|profile| fits(profile.bucket, length))
}

/// The length as an error text names it: a lower bound when the prompt was not counted to its end.
pub(super) fn at_least(length: PromptLength) -> u64 {
    match length {
        PromptLength::Exactly(tokens) => tokens,
        PromptLength::MoreThan(tokens) => tokens.saturating_add(1),
        PromptLength::Unknown => 0,
    }
}

/// The largest finite prompt-length bound any routable pod of the model declares for this profile: counting further
/// than this decides nothing. `None` when no bound is finite.
pub fn largest_bound(model: &Model, profile: Option<&str>) -> Option<u64> {
    let bound = |pod: &Pod| {
        let range = pod.spec.config.as_ref()?.profile(profile)?.bucket;
        // A lower bound of 0 tells nothing apart, and neither does a range that takes nobody.
        match range.max {
            Some(max) if range.min <= max => Some(max),
            None if range.min > 0 => Some(range.min),
            _ => None,
        }
    };
    model.routable.iter().filter_map(|pod| bound(pod)).max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use PromptLength::{Exactly, MoreThan, Unknown};

    #[test]
    fn ranges_are_inclusive() {
        let range = |min, max| BucketRange { min, max };
        for (range, length, expected) in [
            (range(0, None), Exactly(0), true),
            (range(0, None), Exactly(u64::MAX), true),
            (range(0, None), MoreThan(u64::MAX), true),
            (range(0, None), Unknown, true),
            (range(10, Some(20)), Exactly(9), false),
            (range(10, Some(20)), Exactly(10), true),
            (range(10, Some(20)), Exactly(20), true),
            (range(10, Some(20)), Exactly(21), false),
            (range(10, Some(20)), MoreThan(20), false),
            (range(10, Some(20)), Unknown, true),
            (range(20, None), MoreThan(20), true),
            (range(21, None), MoreThan(20), true),
            (range(20, None), Exactly(19), false),
            (range(30, Some(20)), Exactly(25), false),
            (range(30, Some(20)), Unknown, false),
            (range(7, Some(7)), Exactly(7), true),
        ] {
            assert_eq!(fits(range, length), expected, "{range:?} {length:?}");
        }
    }
}
