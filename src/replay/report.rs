//! From the courses of requests to numbers, a table and JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::compare::Comparison;
use super::options::{Policies, ReplayOptions};
use super::trace::Trace;
use super::world::{Failure, Outcome};
use crate::clock::Tick;

/// A distribution, in the unit of its field. All zero when there was nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// The least value that half of all do not exceed (nearest rank).
    pub p50: f64,
    /// The same for nine of ten.
    pub p90: f64,
    /// The same for 99 of 100.
    pub p99: f64,
}

impl Spread {
    /// Of values with how often each came.
    pub fn of(mut values: Vec<(f64, u64)>) -> Spread {
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        let count: u64 = values.iter().map(|(_, times)| times).sum();
        if count == 0 {
            return Spread::default();
        }
        let sum: f64 = values.iter().map(|(value, times)| value * *times as f64).sum();
        let rank = |percent: u64| {
            let wanted = (count * percent).div_ceil(100).max(1);
            let mut seen = 0;
            let found = values.iter().find(|(_, times)| {
                seen += times;
                seen >= wanted
            });
            found.map_or(0.0, |(value, _)| *value)
        };
        Spread { mean: sum / count as f64, p50: rank(50), p90: rank(90), p99: rank(99) }
    }
}

/// Requests that were not answered, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Errors {
    /// Routing found no target.
    pub not_routed: usize,
    /// The prefill leg took longer than `AIBRIX_PREFILL_REQUEST_TIMEOUT`.
    pub prefill_timeout: usize,
    /// Prompt and answer do not fit into the KV cache of a decode pod.
    pub too_long: usize,
}

impl Errors {
    /// All of them.
    pub fn total(self) -> usize {
        self.not_routed + self.prefill_timeout + self.too_long
    }
}

/// What one pair of policies made of the trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairReport {
    /// Prefill policy.
    pub prefill_policy: &'static str,
    /// Decode policy.
    pub decode_policy: &'static str,
    /// Requests with a whole answer.
    pub completed: usize,
    /// Requests without.
    pub errors: Errors,
    /// Arrival to first token, seconds, of answered requests.
    pub ttft_seconds: Spread,
    /// Every gap between two tokens of an answer, seconds.
    pub itl_seconds: Spread,
    /// Arrival to last token, seconds, of answered requests.
    pub e2e_seconds: Spread,
    /// Share of the prompt tokens of computed prompts that prefill engines found in their caches, 0 to 1.
    pub prefix_hit_share: f64,
    /// KV tokens on decode pods: the time average of the fullest pod's over that of the mean.
    pub kv_imbalance: f64,
    /// The same for the prompt tokens queued and being computed on prefill pods.
    pub prefill_imbalance: f64,
    /// From the first arrival to the end of the last request, virtual seconds.
    pub virtual_seconds: f64,
}

impl PairReport {
    /// Sums up a run.
    pub fn of((prefill, decode): Policies, trace: &Trace, outcome: Outcome) -> PairReport {
        let seconds = |from: Tick, to: Tick| to.since(from).as_secs_f64();
        let mut errors = Errors::default();
        let (mut ttft, mut e2e) = (Vec::new(), Vec::new());
        let (mut prompt_tokens, mut cached) = (0, 0);
        for (course, request) in outcome.courses.iter().zip(&trace.requests) {
            match course.failure {
                Some(Failure::NotRouted) => errors.not_routed += 1,
                Some(Failure::PrefillTimeout) => errors.prefill_timeout += 1,
                Some(Failure::TooLong) => errors.too_long += 1,
                None => {
                    ttft.extend(course.first_token.map(|at| (seconds(course.arrived, at), 1)));
                    e2e.extend(course.ended.map(|at| (seconds(course.arrived, at), 1)));
                }
            }
            if course.prefill_ended.is_some() {
                prompt_tokens += request.prompt;
                cached += course.cached;
            }
        }
        let started = outcome.courses.first().map_or(Tick(0), |course| course.arrived);
        PairReport {
            prefill_policy: prefill.name(),
            decode_policy: decode.name(),
            completed: e2e.len(),
            errors,
            ttft_seconds: Spread::of(ttft),
            itl_seconds: Spread::of(outcome.gaps.into_iter().map(|(nanos, count)| (nanos / 1e9, count)).collect()),
            e2e_seconds: Spread::of(e2e),
            prefix_hit_share: if prompt_tokens > 0 { cached as f64 / prompt_tokens as f64 } else { 0.0 },
            kv_imbalance: outcome.kv.ratio(),
            prefill_imbalance: outcome.prefill.ratio(),
            virtual_seconds: seconds(started, outcome.ended),
        }
    }
}

/// The table for people: one line for each pair.
pub fn table(reports: &[PairReport]) -> String {
    let name = |report: &PairReport| format!("{}/{}", report.prefill_policy, report.decode_policy);
    let width = reports.iter().map(|report| name(report).len()).max().unwrap_or(0).max("policies".len());
    let mut text = format!(
        "{:width$}  {:^23}  {:^20}  {:^23}  {:>6}  {:>7}  {:>7}  {:>6}\n",
        "policies", "TTFT s p50/p90/p99", "ITL ms p50/p90/p99", "end to end s", "prefix", "KV", "prefill", "errors"
    );
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{:width$}  {:23}  {:20}  {:^23}  {:>6}  {:>7}  {:>7}",
        "", "", "", "p50/p90/p99", "hits", "max/avg", "max/avg"
    );
    for report in reports {
        let PairReport { ttft_seconds: ttft, itl_seconds: itl, e2e_seconds: e2e, .. } = report;
        let _ = writeln!(
            text,
            "{:width$}  {:7.3} {:7.3} {:7.3}  {:6.1} {:6.1} {:6.1}  {:7.2} {:7.2} {:7.2}  {:5.1}%  {:7.3}  {:7.3}  {:6}",
            name(report),
            ttft.p50,
            ttft.p90,
            ttft.p99,
            itl.p50 * 1e3,
            itl.p90 * 1e3,
            itl.p99 * 1e3,
            e2e.p50,
            e2e.p90,
            e2e.p99,
            report.prefix_hit_share * 100.0,
            report.kv_imbalance,
            report.prefill_imbalance,
            report.errors.total(),
        );
    }
    text
}

/// What was replayed, for the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Source {
    /// The file as it was named.
    pub trace: String,
    /// Its format.
    pub format: &'static str,
    /// Requests taken from it.
    pub requests: usize,
    /// Prompt tokens of all of them.
    pub prompt_tokens: u64,
    /// Answer tokens of all of them.
    pub output_tokens: u64,
    /// Tokens of one hashed block.
    pub block_tokens: u64,
    /// How many times as fast requests arrived.
    pub speed: f64,
    /// First to last arrival, virtual seconds.
    pub span_seconds: f64,
}

impl Source {
    /// Of a trace that was read from `name`.
    pub fn of(name: String, trace: &Trace, speed: f64) -> Source {
        Source {
            trace: name,
            format: trace.format.name(),
            requests: trace.requests.len(),
            prompt_tokens: trace.requests.iter().map(|request| request.prompt).sum(),
            output_tokens: trace.requests.iter().map(|request| request.output).sum(),
            block_tokens: trace.block_tokens,
            speed,
            span_seconds: trace.span().as_secs_f64(),
        }
    }
}

/// The same of a comparison of fleets.
pub fn comparison_json(
    sources: &[Source],
    options: &ReplayOptions,
    seeds: u64,
    settings: &[(&str, &str)],
    compared: &[Comparison],
) -> serde_json::Value {
    serde_json::json!({
        "sources": sources,
        "seed": options.seed,
        "seeds": seeds,
        "fleet": {
            "prefill": options.shape.prefill,
            "decode": options.shape.decode,
            "rolesets": options.shape.rolesets,
        },
        "pace_seconds": options.pace.as_secs_f64(),
        "round_trip_seconds": options.round_trip.as_secs_f64(),
        "engine": engine(options),
        "settings": named(settings),
        "fleets": compared,
    })
}

fn engine(options: &ReplayOptions) -> serde_json::Map<String, serde_json::Value> {
    options.engine.values().map(|(name, value)| (name.to_owned(), value.into())).collect()
}

fn named(settings: &[(&str, &str)]) -> serde_json::Map<String, serde_json::Value> {
    settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect()
}

/// Everything that a run depended on, and what came out. `settings` are the variables that are not at their defaults.
pub fn json(
    source: &Source,
    options: &ReplayOptions,
    settings: &[(&str, &str)],
    reports: &[PairReport],
) -> serde_json::Value {
    serde_json::json!({
        "source": source,
        "seed": options.seed,
        "fleet": {
            "prefill": options.shape.prefill,
            "decode": options.shape.decode,
            "rolesets": options.shape.rolesets,
            "gateways": options.gateways,
        },
        "engine": engine(options),
        "settings": named(settings),
        "pairs": reports,
    })
}
