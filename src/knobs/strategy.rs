//! How routing strategies are spelt: one name, or a weighted list `a:2,b` (reference gateway, section 10).
//!
//! Here, because `ROUTING_ALGORITHM`, profiles and request headers must agree on it. What a strategy does is
//! `routing`'s business.

/// Every strategy that is built. `routing::Strategy::SINGLES` has the same order; a test compares them.
pub const STRATEGIES: [&str; 16] = [
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
    "load-balance",
    "vtc-basic",
    "prefix-cache-preble",
    "lora-affinity",
];

/// A strategy that the reference gateway registers, and what serves its requests here.
#[derive(Clone, Copy, Debug)]
pub struct Registered {
    /// Its name there.
    pub name: &'static str,
    /// One of [`STRATEGIES`]: the same name, or the nearest one.
    pub served_as: &'static str,
    /// What is the same and what is not.
    pub what: &'static str,
}

const fn same(name: &'static str, what: &'static str) -> Registered {
    Registered { name, served_as: name, what }
}

const fn replaced(name: &'static str, served_as: &'static str, what: &'static str) -> Registered {
    Registered { name, served_as, what }
}

const NO_PROFILES: &str =
    "it goes by the GPU optimizer's load profiles and, without them, by `least-request` there too";

/// Every name that some version of the reference registers. `docs/strategies.md` shows this table.
pub const REGISTERED: &[Registered] = &[
    same("pd", "as documented; see [policies](policies.md)"),
    same("random", "the same"),
    same("least-request", "the same"),
    same("least-kv-cache", "the same"),
    same("least-gpu-cache", "the same as `least-kv-cache`, as engines report one usage only"),
    same("least-latency", "the queue and the batch of the moment instead of means since the engine's start"),
    same("least-utilization", "KV usage and batch instead of a metric that engines do not have"),
    same("least-busy-time", "requests in the engine instead of a metric that engines do not have"),
    same("throughput", "rates of the engines' own counters instead of Prometheus queries"),
    same("power-of-two", "the same"),
    same("prefix-cache", "the same; nothing is blended in"),
    same("session-affinity", "the same"),
    same("load-balance", "the same; a pod without a drain rate counts as an average one"),
    same("vtc-basic", "the same formula; counts of users are shared by replicas"),
    same("prefix-cache-preble", "the same choice and cost model; the cost is that of requests instead of tree nodes"),
    same("lora-affinity", "the same; the engine's limit of adapters is read, where the reference reads another metric"),
    replaced("slo", "least-request", NO_PROFILES),
    replaced("slo-pack-load", "least-request", NO_PROFILES),
    replaced("slo-least-load", "least-request", NO_PROFILES),
    replaced("slo-least-load-pulling", "least-request", NO_PROFILES),
    replaced("least-request-top-k", "least-request", "of branches of the reference; the first of its k pods is taken"),
    replaced("dualmap", "prefix-cache", "of branches of the reference; it maps prefixes to two pods each"),
    replaced("l-metric-local", "prefix-cache", "of branches of the reference; it weighs new tokens by the queue"),
    replaced("kv-aware", "prefix-cache", "of branches of the reference; it goes by KV events"),
    replaced("chained", "least-request", "of branches of the reference; a weighted list says the same"),
    replaced("external", "least-request", "external scorers are not asked"),
];

/// What a configuration should be told of the strategy that it names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StrategyNote {
    /// The registered name that another one serves: an index into [`REGISTERED`].
    pub replaced: Option<usize>,
    /// The strategy that cannot be combined, so that the other members of its list do not count.
    pub alone: Option<&'static str>,
}

impl StrategyNote {
    /// One sentence; `None` when there is nothing to know.
    pub fn text(&self) -> Option<String> {
        if let Some(entry) = self.replaced.and_then(|index| REGISTERED.get(index)) {
            return Some(format!("{} is served as {}: {}", entry.name, entry.served_as, entry.what.replace('`', "")));
        }
        self.alone.map(|name| format!("{name} cannot be combined: the other members of the list do not count"))
    }
}

/// The largest weight of a list's member.
pub const MAX_STRATEGY_WEIGHT: u32 = 1_000_000;

/// The weight of each of [`STRATEGIES`]; 0 = not in the list. A single strategy is a list of one.
pub type StrategyWeights = [u32; STRATEGIES.len()];

/// Why a text names no strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StrategyError {
    /// A name that is not in [`REGISTERED`]; names are exact.
    #[error("no such strategy")]
    Unknown,
    /// Nothing between two commas, or nothing at all.
    #[error("a strategy name is missing")]
    Empty,
    /// Not a whole number, or too large.
    #[error("a weight must be a whole number from 0 to 1000000")]
    Weight,
    /// More members than a configuration has a use for.
    #[error("the list has too many members")]
    TooMany,
    /// Weight 0 drops a strategy, and nothing is left.
    #[error("all weights are 0")]
    Nothing,
}

/// Members that a list may have; the header of a request is no place for more.
const MAX_MEMBERS: usize = 64;

/// Whether it decides alone: `pd` about two pods, and the reference's `slo` family about a queue. Of several in a list,
/// the first is meant.
fn decides_alone(name: &str) -> bool {
    name == "pd" || name.starts_with("slo")
}

/// Reads a strategy: a name, or names with optional weights, separated by commas, by the rules of the reference. Blanks
/// around names and weights do not matter; a member of weight 0 is left out, whatever its name; the weights of one that
/// comes twice add up; `pd` and the `slo` family leave the others out.
pub fn parse_strategy(text: &str) -> Result<(StrategyWeights, StrategyNote), StrategyError> {
    let (mut weights, mut note) = ([0; STRATEGIES.len()], StrategyNote::default());
    let (mut alone, mut unknown, mut any) = (None, false, false);
    for (count, member) in text.split(',').map(str::trim).enumerate() {
        if count == MAX_MEMBERS {
            return Err(StrategyError::TooMany);
        }
        let (name, weight) = match member.split_once(':') {
            None => (member, 1),
            Some((name, weight)) => (name.trim(), parse_weight(weight.trim())?),
        };
        if name.is_empty() {
            return Err(StrategyError::Empty);
        }
        if weight == 0 {
            continue;
        }
        any = true;
        let Some((index, served)) = look_up(name) else {
            unknown = true;
            continue;
        };
        if alone.is_none() && decides_alone(name) {
            alone = Some((index, served));
        }
        if note.replaced.is_none() && REGISTERED.get(index).is_some_and(|entry| entry.name != entry.served_as) {
            note.replaced = Some(index);
        }
        if let Some(slot) = weights.get_mut(served) {
            *slot = weight.saturating_add(*slot).min(MAX_STRATEGY_WEIGHT);
        }
    }
    if let Some((index, served)) = alone {
        let entry = REGISTERED.get(index);
        let others = text.contains(',');
        weights = std::array::from_fn(|slot| u32::from(slot == served));
        note = StrategyNote {
            replaced: entry.filter(|entry| entry.name != entry.served_as).map(|_| index),
            alone: entry.filter(|_| others).map(|entry| entry.name),
        };
        return Ok((weights, note));
    }
    match (unknown, any) {
        (true, _) => Err(StrategyError::Unknown),
        (false, false) => Err(StrategyError::Nothing),
        (false, true) => Ok((weights, note)),
    }
}

/// Index into [`REGISTERED`], and into [`STRATEGIES`] of what serves it.
fn look_up(name: &str) -> Option<(usize, usize)> {
    let index = REGISTERED.iter().position(|entry| entry.name == name)?;
    let served = REGISTERED.get(index)?.served_as;
    Some((index, STRATEGIES.iter().position(|known| *known == served)?))
}

/// As Go reads a decimal number: digits, perhaps after a sign.
fn parse_weight(text: &str) -> Result<u32, StrategyError> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let weight: Option<i64> = plain.then(|| text.parse().ok()).flatten();
    let weight = weight.and_then(|weight| u32::try_from(weight).ok());
    weight.filter(|weight| *weight <= MAX_STRATEGY_WEIGHT).ok_or(StrategyError::Weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members and their weights, in the order of the list.
    fn members(text: &str) -> Result<Vec<(&'static str, u32)>, StrategyError> {
        let (weights, _) = parse_strategy(text)?;
        Ok(STRATEGIES.into_iter().zip(weights).filter(|(_, weight)| *weight > 0).collect())
    }

    #[test]
    fn every_name_alone() {
        for name in STRATEGIES {
            assert_eq!(members(name), Ok(vec![(name, 1)]));
            assert_eq!(members(&format!(" {name}\t")), Ok(vec![(name, 1)]));
            assert_eq!(parse_strategy(name).unwrap().1, StrategyNote::default());
        }
    }

    #[test]
    fn what_is_registered_is_served_and_what_is_replaced_says_so() {
        for entry in REGISTERED {
            assert_eq!(members(entry.name), Ok(vec![(entry.served_as, 1)]), "{}", entry.name);
            let note = parse_strategy(entry.name).unwrap().1.text();
            let expected = format!("{} is served as {}: ", entry.name, entry.served_as);
            assert_eq!(note.is_some_and(|note| note.starts_with(&expected)), entry.name != entry.served_as);
        }
        let built: Vec<&str> =
            REGISTERED.iter().filter(|entry| entry.name == entry.served_as).map(|e| e.name).collect();
        assert_eq!(built, STRATEGIES, "one list, in one order");
    }

    #[test]
    fn lists() {
        for (text, expected) in [
            ("least-request:2,prefix-cache", vec![("least-request", 2), ("prefix-cache", 1)]),
            ("prefix-cache , least-request:2", vec![("least-request", 2), ("prefix-cache", 1)]),
            ("random:0,throughput:1000000", vec![("throughput", 1_000_000)]),
            ("random:1,throughput:0", vec![("random", 1)]),
            ("random:007", vec![("random", 7)]),
            // What the reference takes as well.
            ("random : 2", vec![("random", 2)]),
            ("random:+2", vec![("random", 2)]),
            ("random:-0,throughput", vec![("throughput", 1)]),
            ("no-such:0,random", vec![("random", 1)]),
            ("random,random:2", vec![("random", 3)]),
            ("random:1000000,random:1000000", vec![("random", 1_000_000)]),
            ("pd:7", vec![("pd", 1)]),
            ("random,pd:2", vec![("pd", 1)]),
            ("pd,no-such", vec![("pd", 1)]),
            ("pd:0,random", vec![("random", 1)]),
            ("slo-pack-load,pd", vec![("least-request", 1)]),
            ("pd,slo", vec![("pd", 1)]),
        ] {
            assert_eq!(members(text), Ok(expected), "{text}");
        }
        let alone = |text| parse_strategy(text).unwrap().1.text().unwrap_or_default();
        assert_eq!(alone("random,pd:2"), "pd cannot be combined: the other members of the list do not count");
        assert!(alone("random,slo").starts_with("slo is served as least-request"));
        assert_eq!(alone("pd:2"), "");
    }

    /// R92: what is not understood is an error, never some other strategy.
    #[test]
    fn r92_bad_spellings() {
        use StrategyError::{Empty, Nothing, TooMany, Unknown, Weight};
        for (text, expected) in [
            ("", Empty),
            (",", Empty),
            ("random,", Empty),
            (",random", Empty),
            ("random,,throughput", Empty),
            (":2", Empty),
            (":0,random", Empty),
            ("Random", Unknown),
            ("least_request", Unknown),
            ("round-robin", Unknown),
            ("random;throughput", Unknown),
            ("random throughput", Unknown),
            ("no-such:1,random", Unknown),
            ("slo-best", Unknown),
            ("random:", Weight),
            ("random:-1", Weight),
            ("random:+-1", Weight),
            ("random:1.5", Weight),
            ("random:NaN", Weight),
            ("random:inf", Weight),
            ("random:1:2", Weight),
            ("random:1000001", Weight),
            ("random:99999999999999999999", Weight),
            ("random:٣", Weight),
            ("random:0", Nothing),
            ("random:0,throughput:0", Nothing),
            ("pd:0", Nothing),
            ("pd,", Empty),
        ] {
            assert_eq!(parse_strategy(text).map(|_| ()), Err(expected), "{text:?}");
        }
        let many = vec!["random"; MAX_MEMBERS + 1].join(",");
        assert_eq!(parse_strategy(&many), Err(TooMany));
        assert_eq!(members(&many[7..]), Ok(vec![("random", 64)]));
    }
}
