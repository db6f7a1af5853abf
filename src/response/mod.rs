//! Watching an answer go by: usage, end marker, error events. Never changes or delays a byte, never fails.

mod findings;
mod lines;
mod needle;
mod opening;
#[cfg(test)]
mod tests;
mod usage;
mod watch;
mod whole;

pub use lines::MAX_EVENT_BYTES;
pub use usage::{Api, Usage};
pub use watch::{AnswerKind, AnswerWatch};
pub use whole::MAX_DOCUMENT_BYTES;
