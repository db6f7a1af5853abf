//! Engine dialects: body edits as pure functions from bytes to bytes, hand-off validation, leg plans; and the one
//! place that makes the prefill call.

pub mod errors;
pub mod leg;
pub mod vllm;
