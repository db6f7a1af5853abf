//! How long modelled engines take: the parameters and the formulas.
//!
//! Times are computed in nanoseconds as `f64` and rounded once, so that a run repeats itself exactly.

use std::time::Duration;

/// The parameters of every modelled engine. [`PARAMETERS`] names them and gives units and meanings.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineModel {
    /// `prefill_ms`.
    pub prefill_ms: f64,
    /// `prefill_us_per_token`.
    pub prefill_us_per_token: f64,
    /// `prefill_ns_per_token_pair`.
    pub prefill_ns_per_token_pair: f64,
    /// `prefix_cache_tokens`.
    pub prefix_cache_tokens: f64,
    /// `transfer_ms`.
    pub transfer_ms: f64,
    /// `transfer_us_per_token`.
    pub transfer_us_per_token: f64,
    /// `step_ms`.
    pub step_ms: f64,
    /// `step_us_per_sequence`.
    pub step_us_per_sequence: f64,
    /// `step_ns_per_kv_token`.
    pub step_ns_per_kv_token: f64,
    /// `kv_tokens`.
    pub kv_tokens: f64,
    /// `max_batch`.
    pub max_batch: f64,
}

/// One parameter for `--engine`, the documentation and the report.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Its name; it ends in the unit.
    pub name: &'static str,
    /// The default.
    pub default: f64,
    /// The least value.
    pub least: f64,
    /// The largest value.
    pub most: f64,
    /// What it does.
    pub meaning: &'static str,
    field: fn(&mut EngineModel) -> &mut f64,
    value: fn(&EngineModel) -> f64,
}

macro_rules! parameter {
    ($field:ident, $default:expr, $range:expr, $meaning:expr) => {
        Parameter {
            name: stringify!($field),
            default: $default,
            least: *$range.start(),
            most: *$range.end(),
            meaning: $meaning,
            field: |model| &mut model.$field,
            value: |model| model.$field,
        }
    };
}

/// Every parameter. The defaults are of the order of a model of 7 to 8 billion parameters with grouped-query attention
/// (128 KiB of KV cache per token) on one accelerator. The upper bounds keep every sum of times far from the end of a
/// [`crate::clock::Tick`].
pub const PARAMETERS: [Parameter; 11] = [
    parameter!(prefill_ms, 12.0, 0.0..=1e6, "Fixed part of a prefill."),
    parameter!(
        prefill_us_per_token,
        125.0,
        0.0..=1e5,
        "Part of a prefill for each prompt token not found in the cache."
    ),
    parameter!(
        prefill_ns_per_token_pair,
        0.5,
        0.0..=1e3,
        "Attention: part of a prefill for each pair of a token not found in the cache and a token of the prompt."
    ),
    parameter!(prefix_cache_tokens, 400_000.0, 0.0..=1e12, "Prefix cache of a prefill pod; 0 turns it off."),
    parameter!(transfer_ms, 3.0, 0.0..=1e6, "Fixed part of a KV transfer."),
    parameter!(
        transfer_us_per_token,
        6.0,
        0.0..=1e5,
        "Part of a KV transfer for each prompt token (128 KiB at 22 GB/s)."
    ),
    parameter!(step_ms, 12.0, 0.001..=1e6, "Fixed part of a decode step."),
    parameter!(step_us_per_sequence, 150.0, 0.0..=1e5, "Part of a decode step for each sequence of the batch."),
    parameter!(
        step_ns_per_kv_token,
        40.0,
        0.0..=1e3,
        "Part of a decode step for each KV token of the batch (128 KiB at 3.3 TB/s)."
    ),
    parameter!(kv_tokens, 400_000.0, 1.0..=1e12, "KV cache of a decode pod."),
    parameter!(max_batch, 256.0, 1.0..=1e6, "Sequences that a decode pod admits at once."),
];

impl Default for EngineModel {
    fn default() -> EngineModel {
        let mut model = EngineModel {
            prefill_ms: 0.0,
            prefill_us_per_token: 0.0,
            prefill_ns_per_token_pair: 0.0,
            prefix_cache_tokens: 0.0,
            transfer_ms: 0.0,
            transfer_us_per_token: 0.0,
            step_ms: 0.0,
            step_us_per_sequence: 0.0,
            step_ns_per_kv_token: 0.0,
            kv_tokens: 0.0,
            max_batch: 0.0,
        };
        for parameter in PARAMETERS {
            *(parameter.field)(&mut model) = parameter.default;
        }
        model
    }
}

/// A text that sets no parameter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParameterError {
    /// Not `name=value`.
    #[error("{0:?} is not NAME=VALUE")]
    Form(String),
    /// No such name.
    #[error("there is no engine parameter {0:?}; there are {names}", names = PARAMETERS.map(|one| one.name).join(", "))]
    Unknown(String),
    /// Not a number, or out of range.
    #[error("{name} must be a number from {least} to {most}")]
    Value {
        /// The parameter.
        name: &'static str,
        /// Its least value.
        least: String,
        /// Its largest value.
        most: String,
    },
}

impl EngineModel {
    /// Sets one parameter from `name=value`.
    pub fn set(&mut self, text: &str) -> Result<(), ParameterError> {
        let (name, value) = text.split_once('=').ok_or_else(|| ParameterError::Form(text.to_owned()))?;
        let (name, value) = (name.trim(), value.trim());
        let found = PARAMETERS.into_iter().find(|parameter| parameter.name == name);
        let parameter = found.ok_or_else(|| ParameterError::Unknown(name.to_owned()))?;
        let range = parameter.least..=parameter.most;
        // NaN is in no range.
        let value = value.parse().ok().filter(|value| range.contains(value)).ok_or_else(|| ParameterError::Value {
            name: parameter.name,
            least: parameter.least.to_string(),
            most: parameter.most.to_string(),
        })?;
        *(parameter.field)(self) = value;
        Ok(())
    }

    /// Every parameter with its value, in the order of [`PARAMETERS`].
    pub fn values(&self) -> impl Iterator<Item = (&'static str, f64)> {
        PARAMETERS.into_iter().map(|parameter| (parameter.name, (parameter.value)(self)))
    }

    /// `prefill_ms + prefill_us_per_token · new + prefill_ns_per_token_pair · new · total`, where `new` of the
    /// prompt's `total` tokens are not in the cache.
    pub fn prefill(&self, new: u64, total: u64) -> Duration {
        let (new, total) = (new as f64, total as f64);
        let nanos = self.prefill_ms * 1e6
            + self.prefill_us_per_token * 1e3 * new
            + self.prefill_ns_per_token_pair * new * total;
        duration(nanos)
    }

    /// `transfer_ms + transfer_us_per_token · tokens`.
    pub fn transfer(&self, tokens: u64) -> Duration {
        duration(self.transfer_ms * 1e6 + self.transfer_us_per_token * 1e3 * tokens as f64)
    }

    /// `step_ms + step_us_per_sequence · batch + step_ns_per_kv_token · kv`, in nanoseconds.
    pub fn step_nanos(&self, batch: usize, kv: u64) -> f64 {
        self.step_ms * 1e6 + self.step_us_per_sequence * 1e3 * batch as f64 + self.step_ns_per_kv_token * kv as f64
    }

    /// By how much each step of an unchanging batch takes longer than the one before, in nanoseconds: its KV cache
    /// grew by one token for each sequence.
    pub fn step_growth_nanos(&self, batch: usize) -> f64 {
        self.step_ns_per_kv_token * batch as f64
    }
}

fn duration(nanos: f64) -> Duration {
    // A cast of a float saturates.
    Duration::from_nanos(nanos.round() as u64)
}
