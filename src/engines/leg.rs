//! The prefill call.
