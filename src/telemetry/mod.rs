//! Metrics, spans and the one log line of a request. Names live in `names`; labels are closed or bounded.

mod buckets;
mod durations;
mod engines;
mod family;
mod histogram;
mod labels;
mod legs;
mod metrics;
mod names;
mod openmetrics;
mod page;
mod prefix;
mod record;
mod trace;

pub use engines::{Distribution, EngineGauge, EngineValues, SLEEP_STATES};
pub use histogram::SampledTrace;
pub use labels::PodLabels;
pub use legs::{AbortResult, AbortTrigger, RetryReason, WatchdogPhase};
pub use metrics::{
    ClaimFallback, EjectedGauge, FleetGauges, InFlight, KubernetesGauge, Limit, Metrics, ModelGauge, PlaneGauge,
    PodGauge, PrefillFailureClass, PrefillLeg, PrefillOutcome, PrefillStage, PrefixIndexStats, SyncOutcome, TokenGauge,
    metrics_markdown,
};
pub use names::{EngineHistogram, EngineMetric, Join};
pub use prefix::{PrefixRouting, PrefixSelection};
pub use record::{DecisionEssentials, Outcome, RequestRecord, Timings};
pub use trace::{
    Branch, Carried, LeftCharges, LegSpan, LoggingError, RequestTrace, SyncFacts, SyncSpan, SyncTracer, TraceParent,
    Tracer, Tracing, TracingError, init_logging, moment, request_id,
};
