//! Sending spans away.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{Context, InstrumentationScope, KeyValue};
use opentelemetry_otlp::tonic_types::metadata::MetadataMap;
use opentelemetry_otlp::{Protocol, WithExportConfig, WithHttpConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider, Span, SpanData, SpanExporter,
    SpanProcessor,
};
use tokio::runtime::Handle;

use super::sync::WithSyncs;
use super::{Tracer, collector};
use crate::knobs::{OtelKnobs, OtlpProtocol, TraceSampler};
use crate::tls::TlsError;

/// Tracing is asked for, but cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TracingError {
    /// The files for TLS towards the collector are not usable.
    #[error("TLS towards the OTLP collector: {0}")]
    Tls(#[from] TlsError),
    /// The endpoint is not a URL. (It may hold a password, and is not shown.)
    #[error("the OTLP endpoint is not a URL")]
    Endpoint,
    /// A header of the configuration is none.
    #[error("OTEL_EXPORTER_OTLP_HEADERS holds {0:?}, which cannot be a header")]
    Header(String),
    /// Called outside of a tokio runtime.
    #[error("span export needs a tokio runtime")]
    NoRuntime,
    /// The exporter refuses the configuration.
    #[error("span export cannot be set up: {0}")]
    Exporter(#[from] opentelemetry_otlp::ExporterBuildError),
    /// The last spans could not be sent.
    #[error("the last spans were not sent: {0}")]
    Shutdown(String),
}

/// The running export.
#[derive(Debug)]
pub struct Tracing {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    flow: Arc<Flow>,
    propagate: bool,
}

impl Tracing {
    /// Starts the export if an endpoint is configured; `Ok(None)` if not. Must be called inside the runtime, which
    /// drives the connections. Nothing is sent yet, so that a missing collector is no error.
    pub fn start(knobs: &OtelKnobs) -> Result<Option<Tracing>, TracingError> {
        let Some(endpoint) = &knobs.endpoint else { return Ok(None) };
        let secure = endpoint.starts_with("https://");
        let runtime = Handle::try_current().map_err(|_| TracingError::NoRuntime)?;
        let exporter = match knobs.protocol {
            OtlpProtocol::Grpc => {
                let exporter = opentelemetry_otlp::SpanExporter::builder()
                    .with_tonic()
                    .with_endpoint(endpoint)
                    .with_timeout(knobs.timeout)
                    .with_metadata(MetadataMap::from_headers(headers(knobs)?));
                if secure {
                    exporter.with_channel(collector::channel(endpoint, knobs)?).build()?
                } else {
                    exporter.build()?
                }
            }
            OtlpProtocol::HttpProtobuf => {
                headers(knobs)?;
                let headers = knobs.headers.iter().map(|(name, value)| (name.clone(), value.expose().to_owned()));
                let exporter = opentelemetry_otlp::SpanExporter::builder()
                    .with_http()
                    .with_endpoint(endpoint)
                    .with_timeout(knobs.timeout)
                    .with_protocol(Protocol::HttpBinary)
                    .with_headers(headers.collect());
                if secure {
                    exporter.with_http_client(collector::http_client(knobs)?).build()?
                } else {
                    exporter.build()?
                }
            }
        };
        Ok(Some(Tracing::with_exporter(knobs, exporter, runtime)))
    }

    fn with_exporter<E: SpanExporter + 'static>(knobs: &OtelKnobs, exporter: E, runtime: Handle) -> Tracing {
        let flow = Arc::new(Flow::default());
        let exporter = RuntimeExporter { inner: exporter, runtime, flow: Arc::clone(&flow) };
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(knobs.queue_size)
            .with_max_export_batch_size(knobs.batch_size)
            .with_scheduled_delay(knobs.schedule_delay)
            .build();
        let processor = BoundedProcessor {
            inner: BatchSpanProcessor::builder(exporter).with_batch_config(batches).build(),
            limit: knobs.queue_size,
            flow: Arc::clone(&flow),
        };
        let mut attributes = vec![
            KeyValue::new("service.name", knobs.service_name.clone()),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        ];
        attributes
            .extend(knobs.resource_attributes.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone())));
        let provider = SdkTracerProvider::builder()
            .with_span_processor(processor)
            .with_sampler(WithSyncs(sampler(knobs.sampler)))
            .with_resource(Resource::builder_empty().with_attributes(attributes).build())
            .build();
        Tracing { tracer: tracer_of(&provider), provider, flow, propagate: knobs.propagate }
    }

    /// Makes spans for this export.
    pub fn tracer(&self) -> Tracer {
        Tracer::on(self.tracer.clone()).propagating(self.propagate)
    }

    pub(super) fn sdk(&self) -> SdkTracer {
        self.tracer.clone()
    }

    /// Spans lost since the start: the queue was full, or an export failed.
    pub fn dropped_spans(&self) -> u64 {
        self.flow.dropped.load(Ordering::Relaxed)
    }

    /// [`Tracing::dropped_spans`] for the metrics, which outlive this.
    pub fn dropped_counter(&self) -> impl Fn() -> u64 + Send + Sync + 'static {
        let flow = Arc::clone(&self.flow);
        move || flow.dropped.load(Ordering::Relaxed)
    }

    /// Sends what is queued, within the time, and stops. Called last, when no request makes spans any more.
    pub async fn shutdown(self, timeout: Duration) -> Result<(), TracingError> {
        // The SDK blocks until its thread is done, and that thread needs the runtime.
        let stopped = tokio::task::spawn_blocking(move || self.provider.shutdown_with_timeout(timeout)).await;
        match stopped {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(TracingError::Shutdown(error.to_string())),
            Err(error) => Err(TracingError::Shutdown(error.to_string())),
        }
    }
}

/// The scope has the name that the reference gateway gives its tracer.
pub(super) fn tracer_of(provider: &SdkTracerProvider) -> SdkTracer {
    let scope = InstrumentationScope::builder("envoy-ext-proc-server").with_version(env!("CARGO_PKG_VERSION")).build();
    provider.tracer_with_scope(scope)
}

fn headers(knobs: &OtelKnobs) -> Result<HeaderMap, TracingError> {
    let mut headers = HeaderMap::new();
    for (name, value) in &knobs.headers {
        let bad = || TracingError::Header(name.clone());
        let parsed = HeaderName::try_from(name.as_str()).map_err(|_| bad())?;
        let mut value = HeaderValue::try_from(value.expose()).map_err(|_| bad())?;
        value.set_sensitive(true);
        headers.insert(parsed, value);
    }
    Ok(headers)
}

fn sampler(knobs: TraceSampler) -> Sampler {
    let base = if knobs.ratio >= 1.0 {
        Sampler::AlwaysOn
    } else if knobs.ratio <= 0.0 {
        Sampler::AlwaysOff
    } else {
        Sampler::TraceIdRatioBased(knobs.ratio)
    };
    if knobs.parent_based { Sampler::ParentBased(Box::new(base)) } else { base }
}

/// Spans on their way.
#[derive(Debug, Default)]
struct Flow {
    queued: AtomicUsize,
    dropped: AtomicU64,
}

/// The SDK drops silently when its queue is full. This one keeps its own count in front of it, no larger than that
/// queue, so that each dropped span is counted.
#[derive(Debug)]
struct BoundedProcessor {
    inner: BatchSpanProcessor,
    limit: usize,
    flow: Arc<Flow>,
}

impl SpanProcessor for BoundedProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.inner.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        if self.flow.queued.fetch_add(1, Ordering::Relaxed) >= self.limit {
            self.flow.queued.fetch_sub(1, Ordering::Relaxed);
            self.flow.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.inner.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// The SDK exports on a thread of its own, outside of the runtime that the clients of both protocols need: this one
/// enters it at each poll.
#[derive(Debug)]
struct RuntimeExporter<E> {
    inner: E,
    runtime: Handle,
    flow: Arc<Flow>,
}

impl<E: SpanExporter> SpanExporter for RuntimeExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        self.flow.queued.fetch_sub(spans, Ordering::Relaxed);
        let mut export = pin!(self.inner.export(batch));
        let result = std::future::poll_fn(|context| {
            let _entered = self.runtime.enter();
            export.as_mut().poll(context)
        })
        .await;
        if result.is_err() {
            self.flow.dropped.fetch_add(spans as u64, Ordering::Relaxed);
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        let _entered = self.runtime.enter();
        self.inner.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

#[cfg(test)]
pub(super) mod testing {
    //! The real pipeline with an exporter that a test chooses.

    use super::{Handle, OtelKnobs, SpanExporter, Tracing};

    pub(in crate::telemetry::trace) fn start<E: SpanExporter + 'static>(knobs: &OtelKnobs, exporter: E) -> Tracing {
        Tracing::with_exporter(knobs, exporter, Handle::current())
    }
}
