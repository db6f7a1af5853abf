//! How many objects are asked for in one page of a list. Pure.

use std::time::Duration;

/// Objects in one page, unless that takes too long.
const LARGEST: u32 = 500;
/// How much smaller the next one is when one took too long.
const SHRINK: u32 = 4;
/// How much larger the next one is when one came quickly.
const GROWTH: u32 = 2;
/// The part of the patience for an answer within which a page has come quickly.
const QUICK: f64 = 0.125;

/// The size of the next page: smaller after one that took too long, larger after quick ones.
#[derive(Clone, Debug)]
pub(super) struct PageSize(u32);

impl Default for PageSize {
    fn default() -> PageSize {
        PageSize(LARGEST)
    }
}

impl PageSize {
    /// Objects to ask for.
    pub(super) fn limit(&self) -> u32 {
        self.0
    }

    /// A page took too long. False when it cannot be smaller.
    pub(super) fn shrink(&mut self) -> bool {
        let before = self.0;
        self.0 = (before / SHRINK).max(1);
        self.0 < before
    }

    /// A page came after `took`.
    pub(super) fn came(&mut self, took: Duration, answer: Duration) {
        if took < answer.mul_f64(QUICK) {
            self.0 = self.0.saturating_mul(GROWTH).min(LARGEST);
        }
    }
}
