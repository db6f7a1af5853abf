//! Who has far more requests than the others: the rule that `pd`'s prefill side and the strategy `prefix-cache` share.

/// A count this much above the least is no noise: of {0, 0, 1} nobody is busy, whatever the deviation says.
const MIN_EXCESS: f64 = 4.0;

/// Where being busy begins, for one list of counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Busy {
    bound: f64,
    min: f64,
}

impl Busy {
    /// The bound `mean + factor · σ` of these counts; σ is their sample standard deviation, 0 for one.
    pub(super) fn above(counts: impl Iterator<Item = f64> + Clone, factor: f64) -> Busy {
        let number = counts.clone().count() as f64;
        let mean = counts.clone().sum::<f64>() / number.max(1.0);
        let squares: f64 = counts.clone().map(|count| (count - mean).powi(2)).sum();
        let sigma = if number > 1.0 { (squares / (number - 1.0)).sqrt() } else { 0.0 };
        Busy { bound: mean + factor * sigma, min: counts.fold(f64::INFINITY, f64::min) }
    }

    /// Whether a pod with so many requests is: above the bound, and by no mere handful above the least.
    pub(super) fn is(self, count: f64) -> bool {
        count > self.bound && count - self.min >= MIN_EXCESS
    }
}
