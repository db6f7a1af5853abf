//! OpenTelemetry spans of one request and of its legs.

/// Placeholder.
#[derive(Debug)]
pub struct Tracing;
/// Placeholder.
#[derive(Debug)]
pub struct TraceParent;
/// Placeholder.
#[derive(Debug)]
pub struct RequestTrace;
/// Placeholder.
#[derive(Debug)]
pub struct LegSpan;
