//! The log, and the bridge from its spans to OpenTelemetry.

use opentelemetry_sdk::trace::SdkTracer;
use tracing::Level;
use tracing::subscriber::SetGlobalDefaultError;
use tracing_subscriber::filter::{EnvFilter, ParseError, filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{Layer, Registry};

use super::{SPAN_TARGET, Tracing};
use crate::knobs::{LogFormat, LogKnobs};

/// The log cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    /// The filter is none.
    #[error("unusable log filter: {0}")]
    Filter(#[from] ParseError),
    /// There is one already.
    #[error("the log is set up already")]
    Twice(#[from] SetGlobalDefaultError),
}

/// Sets up the log of the process, on standard error, and, with tracing on, the layer that makes OpenTelemetry spans of
/// request spans and span events of the warnings inside them.
pub fn init_logging(knobs: &LogKnobs, tracing: Option<&Tracing>) -> Result<(), LoggingError> {
    let subscriber = subscriber(knobs, tracing.map(Tracing::sdk), std::io::stderr)?;
    Ok(tracing::subscriber::set_global_default(subscriber)?)
}

/// What a client library of Kubernetes says of each request that fails, as an error: the gateway counts and tells these
/// itself, once for an outage.
const QUIET: &str = "kube_client::client::builder";

/// The filter, in which libraries are quiet that tell what the gateway tells better, unless it names them.
fn with_quiet_clients(filter: &str) -> String {
    if filter.contains("kube_client") { filter.to_owned() } else { format!("{filter},{QUIET}=off") }
}

pub(super) fn subscriber<W>(
    knobs: &LogKnobs,
    tracer: Option<SdkTracer>,
    writer: W,
) -> Result<impl tracing::Subscriber + Send + Sync, LoggingError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let bridge = tracer.map(|tracer| {
        tracing_opentelemetry::layer()
            .with_tracer(tracer)
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_filter(filter_fn(|metadata| {
                if metadata.is_span() {
                    metadata.target() == SPAN_TARGET
                } else {
                    metadata.target() == SPAN_TARGET
                        || metadata.target().starts_with("tandem") && *metadata.level() <= Level::WARN
                }
            }))
    });
    let filter = EnvFilter::try_new(with_quiet_clients(&knobs.filter))?;
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines = match knobs.format {
        LogFormat::Text => lines.with_ansi(false).with_filter(filter).boxed(),
        LogFormat::Json => lines.json().with_span_list(false).with_filter(filter).boxed(),
    };
    Ok(Registry::default().with(bridge).with(lines))
}
