//! Engine dialects: body edits as pure functions from bytes to bytes, hand-off validation, leg plans; and the one
//! place that makes the prefill call, and asks prefill pods what a request needs to know of them.

pub mod endpoints;
pub mod errors;
mod handoff;
pub mod leg;
pub mod lookup;
mod merge;
mod outcome;
pub mod protocol;
pub mod sglang;
pub mod trtllm;
pub mod vllm;

pub use endpoints::{hands_over, limit_field};
pub use handoff::{Bodies, Handoff, HandoffError, hidden_handoff, plain_body};
pub use merge::{Merged, merge};
pub use outcome::{accept_prefill, concurrent_failure, failure_of, failure_text, lookup_failure};
pub use protocol::Protocol;
pub use trtllm::Finished;
