//! OpenTelemetry spans of a request, opt-in, and the log.
//!
//! One root span per request (`tandem.request`), with children for its steps and for each leg. The root is a
//! `tracing` span that the `tracing-opentelemetry` layer turns into an OpenTelemetry span, so that warnings logged
//! inside it become its events; the children are made with the OpenTelemetry API, so that their parent is exact
//! whatever task they run in. A span ends when its value is dropped, at the latest, and then says so.
//!
//! A request that is not sampled gets what its legs' headers need, and nothing else. What replicas tell one another has
//! spans of its own, linked to the requests that it is about ([`SyncTracer`]).
//!
//! With tracing off nothing is made, and the client's own trace headers go on to both legs as they came.

mod attributes;
mod collector;
mod export;
mod leg;
mod logging;
mod parent;
mod request;
mod sync;

#[cfg(test)]
mod tests;

pub use export::{Tracing, TracingError};
pub use leg::LegSpan;
pub use logging::{LoggingError, init_logging};
pub use parent::{TraceParent, request_id};
pub use request::{Branch, RequestTrace, Tracer};
pub use sync::{Carried, LeftCharges, SyncFacts, SyncSpan, SyncTracer};

/// Target of the `tracing` spans that become OpenTelemetry spans.
const SPAN_TARGET: &str = "tandem::trace";

/// A moment of the request whose log span is entered: an event of its span. Costs a little even where nothing is recorded,
/// so it is called for sampled requests only.
pub fn moment(name: &'static str) {
    tracing::trace!(target: SPAN_TARGET, "{name}");
}
