//! Metrics, spans and the one log line of a request. Names live in `names`; labels are closed or bounded.

mod labels;
mod metrics;
mod record;
mod trace;

pub use labels::PodLabels;
pub use metrics::{InFlight, Metrics};
pub use record::{Outcome, RequestRecord, Timings};
pub use trace::{LegSpan, RequestTrace, TraceParent, Tracing};
