//! `prefix-cache-preble`: where more than half of the prompt is, unless nobody has that much; then where the work of the
//! last minutes costs least (reference gateway; "Preble: Efficient Distributed Prompt Scheduling for LLM Serving").
//!
//! The reference adds up costs per node of a tree of prompts, here they are those of the requests themselves. Both
//! count what this gateway replica has sent.

use super::view::View;
use crate::clock::Tick;
use crate::knobs::{Gpu, PrebleKnobs};

/// A longer match than this, percent, is worth going there.
const EXPLOIT: u8 = 50;
/// What a token of an answer takes, seconds.
const OUTPUT_TOKEN: f64 = 0.15;
/// The share of the prefill time in which the GPU computes.
const EFFICIENCY: f64 = 0.9;

/// One score per view: requests lately of those that hold most, or everybody's cost.
pub(super) fn scores(views: &[View<'_>], percent: impl Fn(usize) -> u8, now: Tick, knobs: &PrebleKnobs) -> Vec<f64> {
    let longest = (0..views.len()).map(&percent).max().unwrap_or(0);
    if longest <= EXPLOIT {
        return views.iter().map(|view| view.pod.state.recent.cost(now, knobs.window)).collect();
    }
    let requests: Vec<f64> =
        views.iter().map(|view| view.pod.state.recent.requests(now, knobs.window) as f64).collect();
    let out = requests.iter().copied().fold(0.0, f64::max) + 1.0;
    requests.into_iter().enumerate().map(|(id, load)| if percent(id) == longest { load } else { out }).collect()
}

/// What a request is expected to take a pod that holds so much of it, seconds.
pub fn cost(tokens: u64, match_pct: u8, knobs: &PrebleKnobs) -> f64 {
    let decode = knobs.decoding_length as f64 * OUTPUT_TOKEN;
    let context = tokens as f64;
    let new = context * (1.0 - f64::from(match_pct.min(100)) / 100.0);
    if new <= 0.0 {
        return decode;
    }
    (new / context) * prefill_seconds(new, context, knobs.gpu) + decode
}

/// The reference's fit of measured times (Mistral 7B), seconds: linear layers, attention, and what long prompts add.
fn prefill_seconds(new: f64, context: f64, gpu: Gpu) -> f64 {
    let (linear, attention, long) = match gpu {
        Gpu::V100 => (V100_LINEAR, V100_ATTENTION, V100_LONG),
        Gpu::A6000 => (A6000_LINEAR, A6000_ATTENTION, A6000_LONG),
    };
    let linear = match new {
        n if n >= 384.0 => linear.slope * n + linear.offset,
        n if n >= 192.0 => linear.middle.0 + linear.middle.1 * n + linear.middle.2 * n * n,
        _ => linear.least,
    };
    let attention = match context {
        n if n <= 1024.0 => attention.least,
        n => {
            let full = attention.slope * n + attention.offset;
            if new <= 1024.0 { full / 2.0 } else { full }
        }
    };
    let long = if new >= 4096.0 { long.0 + long.1 * new + long.2 * new * new } else { 0.0 };
    (linear + attention + long) / 1000.0 / EFFICIENCY
}

/// Milliseconds by tokens.
struct Linear {
    least: f64,
    middle: (f64, f64, f64),
    slope: f64,
    offset: f64,
}

struct Attention {
    least: f64,
    slope: f64,
    offset: f64,
}

const V100_LINEAR: Linear =
    Linear { least: 55.0, middle: (-295.0, 3.125, -6.4e-3), slope: 0.271_064_28, offset: 10.524_442_63 };
const A6000_LINEAR: Linear =
    Linear { least: 22.0, middle: (-118.0, 1.25, -2.56e-3), slope: 0.108_425_71, offset: 4.209_777_054_806_409 };
const V100_ATTENTION: Attention = Attention { least: 0.80, slope: 4.65e-4, offset: 0.398 };
const A6000_ATTENTION: Attention = Attention { least: 0.32, slope: 1.86e-4, offset: 0.159 };
const V100_LONG: (f64, f64, f64) = (-18.425, 9.65e-3, 5.4e-6);
const A6000_LONG: (f64, f64, f64) = (-7.37, 3.86e-3, 2.16e-6);

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, milliseconds before the division by 0.9.
    #[test]
    fn prefill_times() {
        for (new, context, gpu, expected) in [
            (100.0, 100.0, Gpu::V100, 55.0 + 0.8),
            (192.0, 192.0, Gpu::V100, 69.0704 + 0.8),
            (200.0, 1000.0, Gpu::V100, -295.0 + 625.0 - 256.0 + 0.8),
            (384.0, 384.0, Gpu::V100, 114.613_126_15 + 0.8),
            (1000.0, 2000.0, Gpu::V100, 281.588_722_63 + f64::midpoint(0.93, 0.398)),
            (2000.0, 2000.0, Gpu::V100, 552.653_002_63 + 1.328),
            (5000.0, 5000.0, Gpu::V100, 1_365.845_842_63 + 2.723 + 164.825),
            (100.0, 100.0, Gpu::A6000, 22.0 + 0.32),
            (200.0, 200.0, Gpu::A6000, -118.0 + 250.0 - 102.4 + 0.32),
            (1000.0, 2000.0, Gpu::A6000, 112.635_487_05 + f64::midpoint(0.372, 0.159)),
            (5000.0, 5000.0, Gpu::A6000, 546.338_327_05 + 1.089 + 65.93),
        ] {
            let seconds = prefill_seconds(new, context, gpu);
            assert!((seconds * 900.0 - expected).abs() < 1e-4, "{new} of {context}: {}", seconds * 900.0);
        }
    }

    #[test]
    fn what_is_held_costs_nothing_but_the_answer() {
        let knobs = PrebleKnobs::default();
        let answer = 45.0 * 0.15;
        assert!((cost(1000, 100, &knobs) - answer).abs() < 1e-9);
        assert!((cost(0, 0, &knobs) - answer).abs() < 1e-9);
        let whole = cost(2000, 0, &knobs) - answer;
        assert!((whole - 0.553_981_002_63 / 0.9).abs() < 1e-6, "{whole}");
        // Half of it is new, so half of the requests like it have to be computed.
        let half = cost(2000, 50, &knobs) - answer;
        assert!((half - 0.5 * 0.282_252_722_63 / 0.9).abs() < 1e-6, "{half}");
        assert!(cost(u64::MAX, 0, &knobs).is_finite());
    }
}
