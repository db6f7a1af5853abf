//! Selections that went by prefixes, in the metrics of the reference gateway.

use std::sync::Arc;

use crate::clock::Tick;

/// What made the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixSelection {
    /// How much of the prompt the chosen pod holds, percent.
    pub chosen: u8,
    /// How much of it the pod that holds most does.
    pub best: u8,
    /// Loads were so far apart that only the least busy pods competed.
    pub imbalanced: bool,
}

/// One selection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixRouting {
    /// The model as it was asked for.
    pub model: Arc<str>,
    /// When the request was ready for it.
    pub since: Tick,
    /// What came out; `None`: no pod.
    pub selection: Option<PrefixSelection>,
}

impl PrefixSelection {
    /// The label `match_percent_bucket`.
    pub(super) fn bucket(self) -> &'static str {
        match self.chosen {
            0 => "0",
            1..=25 => "1-25",
            26..=50 => "26-50",
            51..=75 => "51-75",
            _ => "76-100",
        }
    }

    /// The label `selection`.
    pub(super) fn method(self) -> &'static str {
        match (self.chosen, self.best) {
            (0, 0) => "least_request_fallback",
            (0, _) => "prefix_match_skipped",
            _ => "prefix_match",
        }
    }
}
