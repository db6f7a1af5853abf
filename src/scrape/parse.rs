//! A metrics page (Prometheus text or OpenMetrics) → the few values that routing reads. Pure and tolerant: a line that
//! makes no sense is skipped, never an error.
//!
//! Cost: one pass over the page. A line whose name is not wanted costs the search for its end and a look at its first
//! bytes; labels are read only in wanted lines. Each wanted name takes one small entry for each model and reporting rank.

use super::names::{Names, Quantity, expected, label, names};
use super::series::{Join, Labels, Total, next_label, split_labels, value};
use crate::fleet::{Adapters, Engine};

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
    /// LoRA adapters that run or wait, and how many may be loaded.
    pub adapters: Option<Adapters>,
    /// What this engine is expected to report and did not, by the names of the reference's section 6.2.
    pub missing: Vec<&'static str>,
}

/// Reads a page of `engine` for `model`. Bytes that are not UTF-8 spoil only the labels they are in.
///
/// Of the series of one name only the total counts, see [`Total`]. Series of another `model_name` are left out; where none
/// names ours, those without that label or with `undefined` are ours, and when all name others (the engine may report a
/// served name or an adapter), all of them count.
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
    let mut totals: Vec<Total<'_>> = vec![Total::default(); table.len()];
    let one_rank = engine == Engine::Sglang;
    // The value is the time of the report, and reports of the past stay on the page.
    let mut latest: Option<(f64, &str)> = None;
    for line in text.split('\n') {
        let Some((index, rest)) = wanted(line, names) else { continue };
        let Some((labels, rest)) = split_labels(rest) else { continue };
        let Some(value) = value(rest) else { continue };
        let (Some(alias), Some(total)) = (table.get(index), totals.get_mut(index)) else { continue };
        if alias.quantity == Quantity::Adapters {
            latest = latest.filter(|(at, _)| *at > value).or(Some((value, labels)));
            continue;
        }
        total.add(join(alias.quantity), value, &Labels::read(labels), one_rank);
    }
    let get = |quantity: Quantity| {
        let named = table.iter().zip(&totals).filter(|(alias, _)| alias.quantity == quantity);
        named.map(|(_, total)| total).find_map(|total| total.of(join(quantity), model))
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
        adapters: latest.map(|(_, labels)| adapters(labels)),
        missing: expected(engine).iter().filter(|quantity| get(**quantity).is_none()).map(|q| label(*q)).collect(),
    }
}

/// What the labels of vLLM's report of its adapters say.
fn adapters(mut labels: &str) -> Adapters {
    let (mut max, mut running, mut waiting) = (0, "", "");
    while let Some((name, text, rest)) = next_label(labels) {
        labels = rest;
        match name {
            "max_lora" => max = text.parse().unwrap_or(0),
            "running_lora_adapters" => running = text,
            "waiting_lora_adapters" => waiting = text,
            _ => {}
        }
    }
    Adapters::new(max, [running, waiting])
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

/// A share does not add up; everything else does.
fn join(quantity: Quantity) -> Join {
    if quantity == Quantity::KvUsage { Join::Max } else { Join::Sum }
}
