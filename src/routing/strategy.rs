//! Which strategy is in force, and how it is spelt.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::knobs::{STRATEGIES, StrategyError, StrategyNote, StrategyWeights, parse_strategy};

/// A routing strategy (`routing-strategy`). `docs/strategies.md` says what each looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// `pd`
    Pd,
    /// `random`
    Random,
    /// `least-request`
    LeastRequest,
    /// `least-kv-cache`
    LeastKvCache,
    /// `least-gpu-cache`
    LeastGpuCache,
    /// `least-latency`
    LeastLatency,
    /// `least-utilization`
    LeastUtilization,
    /// `least-busy-time`
    LeastBusyTime,
    /// `throughput`
    Throughput,
    /// `power-of-two`
    PowerOfTwo,
    /// `prefix-cache`
    PrefixCache,
    /// `session-affinity`
    SessionAffinity,
    /// `load-balance`
    LoadBalance,
    /// `vtc-basic`
    VtcBasic,
    /// `prefix-cache-preble`
    Preble,
    /// `lora-affinity`
    LoraAffinity,
    /// A weighted list of at least two others, without `pd`.
    Weighted(Weights),
}

/// The members of a weighted list and their weights, 1 to 1,000,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Weights(StrategyWeights);

impl Weights {
    /// Members with their weights, in the order of [`Strategy::SINGLES`] whatever the order they were written in.
    pub fn members(&self) -> impl Iterator<Item = (Strategy, u32)> + use<> {
        Strategy::SINGLES.into_iter().zip(self.0).filter(|(_, weight)| *weight > 0)
    }
}

impl Strategy {
    /// Every single strategy, in the order of [`STRATEGIES`].
    pub const SINGLES: [Strategy; STRATEGIES.len()] = [
        Strategy::Pd,
        Strategy::Random,
        Strategy::LeastRequest,
        Strategy::LeastKvCache,
        Strategy::LeastGpuCache,
        Strategy::LeastLatency,
        Strategy::LeastUtilization,
        Strategy::LeastBusyTime,
        Strategy::Throughput,
        Strategy::PowerOfTwo,
        Strategy::PrefixCache,
        Strategy::SessionAffinity,
        Strategy::LoadBalance,
        Strategy::VtcBasic,
        Strategy::Preble,
        Strategy::LoraAffinity,
    ];

    /// Reads a name, or a list `a:2,b`. A list of which one member is left is that member.
    pub fn parse(text: &str) -> Result<Strategy, StrategyError> {
        Strategy::parse_noting(text).map(|(strategy, _)| strategy)
    }

    /// The same, with what there is to say about the text.
    pub fn parse_noting(text: &str) -> Result<(Strategy, StrategyNote), StrategyError> {
        let (weights, note) = parse_strategy(text)?;
        let weights = Weights(weights);
        let mut members = weights.members();
        let strategy = match (members.next(), members.next()) {
            (Some((only, _)), None) => only,
            _ => Strategy::Weighted(weights),
        };
        Ok((strategy, note))
    }

    /// Its name; a list as [`Strategy::parse`] takes it, in one fixed order.
    pub fn name(self) -> Cow<'static, str> {
        if let Strategy::Weighted(weights) = self {
            let mut text = String::new();
            for (member, weight) in weights.members() {
                let comma = if text.is_empty() { "" } else { "," };
                let _ = write!(text, "{comma}{}", member.name());
                if weight != 1 {
                    let _ = write!(text, ":{weight}");
                }
            }
            return Cow::Owned(text);
        }
        let single = Strategy::SINGLES.iter().zip(STRATEGIES).find(|(strategy, _)| **strategy == self);
        Cow::Borrowed(single.map_or("", |(_, name)| name))
    }

    /// Whether it is `wanted`, or a list with that member.
    fn includes(self, wanted: Strategy) -> bool {
        match self {
            Strategy::Weighted(weights) => weights.members().any(|(member, _)| member == wanted),
            single => single == wanted,
        }
    }

    /// It asks the prefix index, so the prompt has to be hashed, and the index to be told of the pod. Whether `pd` does
    /// depends on its prefill policy.
    pub fn looks_prefixes_up(self) -> bool {
        self.includes(Strategy::PrefixCache) || self.includes(Strategy::Preble)
    }

    /// It counts the tokens of users.
    pub fn counts_users(self) -> bool {
        self.includes(Strategy::VtcBasic)
    }

    /// It weighs what each pod was given lately.
    pub fn counts_recent_work(self) -> bool {
        self.includes(Strategy::Preble)
    }

    /// It honours sessions, so the answer names the pod's.
    pub fn keeps_sessions(self) -> bool {
        self.includes(Strategy::SessionAffinity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_one_spelling() {
        for (text, expected) in [
            ("prefix-cache:2,least-request", "least-request,prefix-cache:2"),
            (" least-request , prefix-cache:2", "least-request,prefix-cache:2"),
            ("least-request:1,random:1000000,throughput:0", "random:1000000,least-request"),
            ("throughput:7", "throughput"),
            ("throughput:7,random:0", "throughput"),
        ] {
            let strategy = Strategy::parse(text).unwrap();
            assert_eq!(strategy.name(), expected, "{text}");
            assert_eq!(Strategy::parse(expected), Ok(strategy));
            assert_eq!(matches!(strategy, Strategy::Weighted(_)), expected.contains(','));
        }
    }

    #[test]
    fn what_a_strategy_needs() {
        for (text, prefixes, sessions) in [
            ("pd", false, false),
            ("prefix-cache", true, false),
            ("session-affinity", false, true),
            ("session-affinity:3,prefix-cache", true, true),
            ("session-affinity:0,prefix-cache:0,random", false, false),
            ("prefix-cache-preble", true, false),
        ] {
            let strategy = Strategy::parse(text).unwrap();
            assert_eq!((strategy.looks_prefixes_up(), strategy.keeps_sessions()), (prefixes, sessions), "{text}");
        }
    }
}
