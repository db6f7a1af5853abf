//! How the values of a profile's fields are read.

use std::time::Duration;

use serde_json::Value;

use crate::knobs::{BucketServeMode, DecodePolicy, MAX_TOKENS, PrefillPolicy};

/// A whole number, also when it is written as `5.0`.
pub(super) fn whole(value: &Value) -> Option<i64> {
    value
        .as_i64()
        .or_else(|| value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 1e15).map(|n| n as i64))
}

pub(super) fn positive_whole(value: &Value) -> Option<u64> {
    whole(value).filter(|&number| number > 0).map(i64::unsigned_abs)
}

pub(super) fn positive_tokens(value: &Value) -> Option<u64> {
    positive_whole(value).filter(|tokens| *tokens <= MAX_TOKENS)
}

/// Bounded to 32 bits, so that no sum of times leaves the time line.
pub(super) fn seconds_or_zero(value: &Value) -> Option<Duration> {
    whole(value).and_then(|seconds| u32::try_from(seconds).ok()).map(|seconds| Duration::from_secs(seconds.into()))
}

pub(super) const NUMBER_OF_SECONDS: &str = "a number of seconds, 0 or more";

pub(super) fn decimal_seconds_or_zero(value: &Value) -> Option<Duration> {
    value.as_f64().filter(|seconds| (0.0..=f64::from(u32::MAX)).contains(seconds)).map(Duration::from_secs_f64)
}

pub(super) fn share(value: &Value) -> Option<f64> {
    value.as_f64().filter(|share| (0.0..=1.0).contains(share))
}

pub(super) fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.is_finite() && *number > 0.0)
}

pub(super) fn percent(value: &Value) -> Option<u8> {
    whole(value).and_then(|number| u8::try_from(number).ok()).filter(|&number| number <= 100)
}

pub(super) fn prefill_policy(value: &Value) -> Option<PrefillPolicy> {
    PrefillPolicy::parse(&value.as_str()?.trim().to_ascii_lowercase())
}

pub(super) fn decode_policy(value: &Value) -> Option<DecodePolicy> {
    DecodePolicy::parse(&value.as_str()?.trim().to_ascii_lowercase())
}

/// Exactly one of the two names (reference section 2.4).
pub(super) fn bucket_serve_mode(value: &Value) -> Option<BucketServeMode> {
    [BucketServeMode::Throughput, BucketServeMode::Rps].into_iter().find(|mode| value.as_str() == Some(mode.name()))
}

/// A value for a warning, cut to a readable length.
pub(super) fn shown(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= LONGEST {
        return text;
    }
    text.chars().take(LONGEST).chain("...".chars()).collect()
}
