//! A metrics page (Prometheus text or OpenMetrics) → the few values that routing reads. Pure and tolerant: a line that
//! makes no sense is skipped, never an error.
//!
//! Cost: one pass over the page. A line whose name is not wanted costs the search for its end and a look at its first
//! bytes; labels are read only in wanted lines. Nothing is allocated for vLLM and TensorRT-LLM; SGLang takes one small
//! entry for each reporting rank.

use super::names::{Names, Quantity, expected, label, names};
use crate::fleet::Engine;

/// Ranks that are told apart on one page; series of further ones are left out.
const MAX_RANKS: usize = 1024;

/// What one page said. `None` = not reported (or not a number).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// Running requests, summed over ranks.
    pub running: Option<f64>,
    /// Waiting requests, summed over ranks.
    pub waiting: Option<f64>,
    /// SGLang prefill side: requests waiting for a decode pod, summed.
    pub prefill_prealloc_queue: Option<f64>,
    /// SGLang decode side: requests waiting for preallocation, summed.
    pub decode_prealloc_queue: Option<f64>,
    /// KV-cache usage of the fullest rank, 0..=1.
    pub kv_usage: Option<f64>,
    /// Generated tokens per second, summed, where the engine itself reports it.
    pub generation_tps: Option<f64>,
    /// Prompt tokens per second, summed, where the engine itself reports it.
    pub prompt_tps: Option<f64>,
    /// Tokens generated since the engine started.
    pub generation_tokens: Option<f64>,
    /// Prompt tokens processed since the engine started.
    pub prompt_tokens: Option<f64>,
    /// Mean of the prefill-time histogram since the engine started, seconds.
    pub prefill_seconds_mean: Option<f64>,
    /// What this engine is expected to report and did not, by the names of the reference's section 6.2.
    pub missing: Vec<&'static str>,
}

/// Reads a page of `engine` for `model`. Bytes that are not UTF-8 spoil only the labels they are in.
///
/// Series of another `model_name` are left out; `undefined` or no such label counts as ours. When not one series of a
/// metric is ours (the engine may report a served name or an adapter), all of them count.
pub fn parse_page(bytes: &[u8], engine: Engine, model: &str) -> Page {
    // Checking is several times quicker than the repairing conversion, which is hardly ever needed.
    match std::str::from_utf8(bytes) {
        Ok(text) => parse_text(text, engine, model),
        Err(_) => parse_text(&String::from_utf8_lossy(bytes), engine, model),
    }
}

fn parse_text(text: &str, engine: Engine, model: &str) -> Page {
    let names = names(engine);
    let table = names.aliases;
    let mut sums: Vec<Sum> = vec![Sum::default(); table.len()];
    let one_rank = engine == Engine::Sglang;
    for line in text.split('\n') {
        let Some((index, rest)) = wanted(line, names) else { continue };
        let Some((labels, rest)) = split_labels(rest) else { continue };
        let Some(value) = value(rest) else { continue };
        let (Some(alias), Some(sum)) = (table.get(index), sums.get_mut(index)) else { continue };
        sum.add(alias.quantity, value, &Series::read(labels, model), one_rank);
    }
    let get = |quantity: Quantity| {
        table.iter().zip(&sums).filter(|(alias, _)| alias.quantity == quantity).find_map(|(_, sum)| sum.total(quantity))
    };
    let mean = match (get(Quantity::PrefillSecondsSum), get(Quantity::PrefillSecondsCount)) {
        (Some(sum), Some(count)) if count > 0.0 && sum >= 0.0 => Some(sum / count),
        _ => None,
    };
    Page {
        running: get(Quantity::Running),
        waiting: get(Quantity::Waiting),
        prefill_prealloc_queue: get(Quantity::PrefillPrealloc),
        decode_prealloc_queue: get(Quantity::DecodePrealloc),
        kv_usage: get(Quantity::KvUsage).map(|usage| usage.min(1.0)),
        generation_tps: get(Quantity::GenerationTps),
        prompt_tps: get(Quantity::PromptTps),
        generation_tokens: get(Quantity::GenerationTokens),
        prompt_tokens: get(Quantity::PromptTokens),
        prefill_seconds_mean: mean,
        missing: expected(engine).iter().filter(|quantity| get(**quantity).is_none()).map(|q| label(*q)).collect(),
    }
}

/// The alias a line is about, and the rest of the line from its `{` or blank on.
fn wanted(line: &str, names: Names) -> Option<(usize, &str)> {
    let line = line.strip_prefix(names.prefix).or_else(|| line.trim_start().strip_prefix(names.prefix))?;
    let first = line.bytes().next()?;
    names.aliases.iter().enumerate().find_map(|(index, alias)| {
        // Most lines fall at this comparison, which is much cheaper than the next.
        if alias.name.bytes().next() != Some(first) {
            return None;
        }
        let rest = line.strip_prefix(alias.name)?;
        let rest = rest.strip_prefix("_total").unwrap_or(rest);
        rest.starts_with(['{', ' ', '\t']).then_some((index, rest))
    })
}

/// Splits `{labels} value…` (or ` value…`) at the brace that closes the labels. `None` when it does not close.
fn split_labels(rest: &str) -> Option<(&str, &str)> {
    let Some(inside) = rest.strip_prefix('{') else { return Some(("", rest)) };
    let (mut quoted, mut escaped) = (false, false);
    let end = inside.bytes().position(|byte| {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return true,
            _ => {}
        }
        false
    })?;
    Some((inside.get(..end)?, inside.get(end + 1..)?))
}

/// The sample's value: the first word; a timestamp or an exemplar may follow. Only finite values that are not negative
/// are values: none of the wanted metrics can be anything else.
fn value(rest: &str) -> Option<f64> {
    let value: f64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some(value)
}

/// Where a series comes from.
#[derive(Debug)]
struct Series {
    ours: bool,
    rank: Rank,
}

/// A reporting process: data-parallel group first, then its place within the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    dp: u32,
    within: (u32, u32, u32),
}

impl Series {
    fn read(mut labels: &str, model: &str) -> Series {
        let mut series = Series { ours: true, rank: Rank::default() };
        while let Some((name, text, rest)) = next_label(labels) {
            labels = rest;
            let number = || text.parse().unwrap_or(0);
            match name {
                "model_name" => series.ours = text == "undefined" || unescaped_equals(text, model),
                "dp_rank" => series.rank.dp = number(),
                "pp_rank" => series.rank.within.0 = number(),
                "tp_rank" => series.rank.within.1 = number(),
                "moe_ep_rank" => series.rank.within.2 = number(),
                _ => {}
            }
        }
        series
    }
}

/// The next `name="text"` and what follows it; the text is still escaped.
fn next_label(labels: &str) -> Option<(&str, &str, &str)> {
    let (name, rest) = labels.split_once('=')?;
    let rest = rest.trim_start().strip_prefix('"')?;
    let mut escaped = false;
    let end = rest.bytes().position(|byte| {
        if escaped {
            escaped = false;
            return false;
        }
        escaped = byte == b'\\';
        byte == b'"'
    })?;
    Some((name.trim_matches([',', ' ', '\t']), rest.get(..end)?, rest.get(end + 1..)?))
}

/// Compares a label text that may hold `\\`, `\"` and `\n` with a plain text.
fn unescaped_equals(text: &str, plain: &str) -> bool {
    if !text.contains('\\') {
        return text == plain;
    }
    let mut characters = text.chars();
    let unescaped = std::iter::from_fn(|| match characters.next()? {
        '\\' => Some(match characters.next() {
            Some('n') => '\n',
            Some(other) => other,
            None => '\\',
        }),
        other => Some(other),
    });
    unescaped.eq(plain.chars())
}

/// The series of one name, added up twice: ours, and all.
#[derive(Clone, Debug, Default)]
struct Sum {
    ours: Tally,
    all: Tally,
}

#[derive(Clone, Debug, Default)]
struct Tally {
    plain: Option<f64>,
    /// Only where one rank speaks for its data-parallel group.
    ranks: Vec<(Rank, f64)>,
}

impl Sum {
    fn add(&mut self, quantity: Quantity, value: f64, series: &Series, one_rank: bool) {
        self.all.add(quantity, value, series.rank, one_rank);
        if series.ours {
            self.ours.add(quantity, value, series.rank, one_rank);
        }
    }

    fn total(&self, quantity: Quantity) -> Option<f64> {
        self.ours.total(quantity).or_else(|| self.all.total(quantity))
    }
}

impl Tally {
    fn add(&mut self, quantity: Quantity, value: f64, rank: Rank, one_rank: bool) {
        if !one_rank {
            self.plain = Some(self.plain.map_or(value, |sum| join(quantity, sum, value)));
        } else if let Some((_, sum)) = self.ranks.iter_mut().find(|(known, _)| *known == rank) {
            *sum = join(quantity, *sum, value);
        } else if self.ranks.len() < MAX_RANKS {
            self.ranks.push((rank, value));
        }
    }

    /// With rank labels: of each data-parallel group the lowest rank counts. Normally it is the only one that
    /// reports; when all do, each repeats the same numbers.
    fn total(&self, quantity: Quantity) -> Option<f64> {
        let lowest = self
            .ranks
            .iter()
            .filter(|(rank, _)| !self.ranks.iter().any(|(other, _)| other.dp == rank.dp && other.within < rank.within));
        lowest
            .map(|(_, value)| *value)
            .fold(self.plain, |sum, value| Some(sum.map_or(value, |sum| join(quantity, sum, value))))
    }
}

/// A share does not add up; everything else does.
fn join(quantity: Quantity, a: f64, b: f64) -> f64 {
    if quantity == Quantity::KvUsage { a.max(b) } else { a + b }
}
