//! How routing strategies are spelt: one name, or a weighted list `a:2,b` (reference gateway, section 10).
//!
//! Here, because `ROUTING_ALGORITHM`, profiles and request headers must agree on it. What a strategy does is
//! `routing`'s business.

/// Every strategy. `routing::Strategy::SINGLES` has the same order; a test compares them.
pub const STRATEGIES: [&str; 12] = [
    "pd",
    "random",
    "least-request",
    "least-kv-cache",
    "least-gpu-cache",
    "least-latency",
    "least-utilization",
    "least-busy-time",
    "throughput",
    "power-of-two",
    "prefix-cache",
    "session-affinity",
];

/// The strategy that decides about two pods, and so cannot be summed up with those that decide about one.
const ALONE: &str = "pd";

/// The largest weight of a list's member.
pub const MAX_STRATEGY_WEIGHT: u32 = 1_000_000;

/// The weight of each of [`STRATEGIES`]; 0 = not in the list. A single strategy is a list of one.
pub type StrategyWeights = [u32; STRATEGIES.len()];

/// Why a text names no strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StrategyError {
    /// A name that is not in [`STRATEGIES`]; names are exact.
    #[error("no such strategy")]
    Unknown,
    /// Nothing between two commas, or nothing at all.
    #[error("a strategy name is missing")]
    Empty,
    /// Not a whole number, or too large.
    #[error("a weight must be a whole number from 0 to 1000000")]
    Weight,
    /// It cannot be told which of the two weights is meant.
    #[error("a strategy is named twice")]
    Twice,
    /// `pd` with a weight, or beside others.
    #[error("pd cannot be weighted or combined")]
    Alone,
    /// Weight 0 drops a strategy, and nothing is left.
    #[error("all weights are 0")]
    Nothing,
}

/// Reads a strategy: a name, or names with optional weights, separated by commas. Blanks around a member do not
/// matter.
pub fn parse_strategy(text: &str) -> Result<StrategyWeights, StrategyError> {
    let mut named: [Option<u32>; STRATEGIES.len()] = [None; STRATEGIES.len()];
    let alone = text.trim() == ALONE;
    // An unknown or repeated name ends the loop, so that no text makes it long.
    for member in text.split(',').map(str::trim) {
        let (name, weight) = match member.split_once(':') {
            None => (member, 1),
            Some((name, weight)) => (name, parse_weight(weight)?),
        };
        if name.is_empty() {
            return Err(StrategyError::Empty);
        }
        if name == ALONE && !alone {
            return Err(StrategyError::Alone);
        }
        let known = STRATEGIES.iter().zip(&mut named).find(|(known, _)| **known == name);
        match known {
            None => return Err(StrategyError::Unknown),
            Some((_, Some(_))) => return Err(StrategyError::Twice),
            Some((_, slot)) => *slot = Some(weight),
        }
    }
    let weights = named.map(Option::unwrap_or_default);
    if weights == [0; STRATEGIES.len()] { Err(StrategyError::Nothing) } else { Ok(weights) }
}

/// Digits only: no sign, no blanks.
fn parse_weight(text: &str) -> Result<u32, StrategyError> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let weight = digits.then(|| text.parse().ok()).flatten();
    weight.filter(|weight| *weight <= MAX_STRATEGY_WEIGHT).ok_or(StrategyError::Weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members and their weights, in the order of the list.
    fn members(text: &str) -> Result<Vec<(&'static str, u32)>, StrategyError> {
        let weights = parse_strategy(text)?;
        Ok(STRATEGIES.into_iter().zip(weights).filter(|(_, weight)| *weight > 0).collect())
    }

    #[test]
    fn every_name_alone() {
        for name in STRATEGIES {
            assert_eq!(members(name), Ok(vec![(name, 1)]));
            assert_eq!(members(&format!(" {name}\t")), Ok(vec![(name, 1)]));
        }
    }

    #[test]
    fn lists() {
        for (text, expected) in [
            ("least-request:2,prefix-cache", vec![("least-request", 2), ("prefix-cache", 1)]),
            ("prefix-cache , least-request:2", vec![("least-request", 2), ("prefix-cache", 1)]),
            ("random:0,throughput:1000000", vec![("throughput", 1_000_000)]),
            ("random:1,throughput:0", vec![("random", 1)]),
            ("random:007", vec![("random", 7)]),
        ] {
            assert_eq!(members(text), Ok(expected), "{text}");
        }
    }

    /// R92: what is not understood is an error, never some other strategy.
    #[test]
    fn r92_bad_spellings() {
        use StrategyError::{Alone, Empty, Nothing, Twice, Unknown, Weight};
        for (text, expected) in [
            ("", Empty),
            (",", Empty),
            ("random,", Empty),
            (",random", Empty),
            ("random,,throughput", Empty),
            (":2", Empty),
            ("Random", Unknown),
            ("least_request", Unknown),
            ("vtc-basic", Unknown),
            ("random;throughput", Unknown),
            ("random throughput", Unknown),
            ("no-such:0,random", Unknown),
            ("random :2", Unknown),
            ("random:", Weight),
            ("random: 2", Weight),
            ("random:+2", Weight),
            ("random:-1", Weight),
            ("random:1.5", Weight),
            ("random:NaN", Weight),
            ("random:inf", Weight),
            ("random:1:2", Weight),
            ("random:1000001", Weight),
            ("random:99999999999999999999", Weight),
            ("random:٣", Weight),
            ("random,random", Twice),
            ("random:1,throughput,random:0", Twice),
            ("random:0", Nothing),
            ("random:0,throughput:0", Nothing),
            ("pd:1", Alone),
            ("pd:0,random", Alone),
            ("pd,pd", Alone),
            ("random,pd:2", Alone),
            ("pd,", Alone),
        ] {
            assert_eq!(parse_strategy(text), Err(expected), "{text:?}");
        }
    }
}
