//! Watching an answer go by: usage, end marker, error events. Never changes or delays a byte.

mod usage;
mod watch;

pub use usage::Usage;
pub use watch::{AnswerKind, AnswerWatch};
