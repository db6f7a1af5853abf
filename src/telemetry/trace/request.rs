//! The root span of a request.

use std::sync::Arc;

use http::HeaderMap;
use opentelemetry::trace::{Link, SpanContext, SpanKind, Status, TraceContextExt, TraceId, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::SdkTracer;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::leg::{Birth, LegSpan};
use super::{SPAN_TARGET, TraceParent, attributes};
use crate::telemetry::{Outcome, PodLabels, RequestRecord};

const ROOT: &str = "tandem.request";

/// Makes the spans of requests; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Tracer {
    pub(super) sdk: Option<SdkTracer>,
    /// Callers' trace context is left alone.
    aloof: bool,
}

impl Tracer {
    /// Makes no spans.
    pub fn off() -> Tracer {
        Tracer::default()
    }

    pub(super) fn on(sdk: SdkTracer) -> Tracer {
        Tracer { sdk: Some(sdk), aloof: false }
    }

    /// Whether callers' trace context is taken up, and engines are sent ours.
    pub(super) fn propagating(self, propagate: bool) -> Tracer {
        Tracer { aloof: !propagate, ..self }
    }

    /// A request arrived.
    pub fn begin(&self, parent: TraceParent) -> RequestTrace {
        let log = tracing::info_span!(
            target: SPAN_TARGET, parent: None, "tandem.request",
            otel.kind = "server",
            request_id = tracing::field::Empty,
        );
        let on = self.sdk.as_ref().map(|sdk| {
            let remote = match parent.remote.filter(|_| !self.aloof) {
                Some(remote) => Context::new().with_remote_span_context(remote),
                None => Context::new(),
            };
            // Fails when the layer is not installed, which is seen below.
            let _ = log.set_parent(remote.clone());
            let root = log.context();
            let (root, layered) = if root.span().span_context().is_valid() {
                (root, true)
            } else {
                let span = sdk.build_with_context(sdk.span_builder(ROOT).with_kind(SpanKind::Server), &remote);
                (remote.with_span(span), false)
            };
            On { sdk: sdk.clone(), recording: root.span().is_recording(), root, layered }
        });
        RequestTrace { log, on, client: parent.client, aloof: self.aloof, finished: false }
    }
}

#[derive(Debug)]
struct On {
    sdk: SdkTracer,
    root: Context,
    /// The root span is the one of the `tracing` span.
    layered: bool,
    /// The trace is sampled: what is noted arrives somewhere.
    recording: bool,
}

/// The trace of one request; its span ends when this is finished or dropped.
#[derive(Debug)]
pub struct RequestTrace {
    log: tracing::Span,
    on: Option<On>,
    client: HeaderMap,
    aloof: bool,
    finished: bool,
}

impl RequestTrace {
    /// The span to run the request's task in, so that its log lines carry the request id and join the trace.
    pub fn log_span(&self) -> &tracing::Span {
        &self.log
    }

    /// The trace id of the request's own span: the first choice of [`super::request_id`].
    pub fn trace_id(&self) -> Option<TraceId> {
        self.on.as_ref().map(|on| on.root.span().span_context().trace_id()).filter(|id| *id != TraceId::INVALID)
    }

    /// The trace is sampled. Where not, whatever is not needed for the legs' headers is not worth doing.
    pub fn records(&self) -> bool {
        self.recorded().is_some()
    }

    fn recorded(&self) -> Option<&On> {
        self.on.as_ref().filter(|on| on.recording)
    }

    /// The span that others may link to; `None` where nothing is recorded.
    pub fn context(&self) -> Option<SpanContext> {
        self.recorded().map(|on| on.root.span().span_context().clone())
    }

    /// The request's head arrived, behind Envoy in a gRPC call.
    pub fn arrived(&self, method: &http::Method, over_grpc: bool) {
        if let Some(on) = self.recorded() {
            on.root.span().set_attributes(attributes::arrival(method, over_grpc));
        }
    }

    /// The trace id, only when the trace is sampled, so that somebody may find it.
    pub fn sampled_trace_id(&self) -> Option<TraceId> {
        self.trace_id().filter(|_| self.on.as_ref().is_some_and(|on| on.root.span().span_context().is_sampled()))
    }

    /// The request got its id.
    pub fn set_request_id(&self, request_id: &str) {
        self.log.record("request_id", request_id);
        if let Some(on) = self.recorded().filter(|on| !on.layered) {
            on.root.span().set_attribute(KeyValue::new("request_id", request_id.to_owned()));
        }
    }

    /// Something happened: a retry, a hand-over.
    pub fn event(&self, name: &'static str, attributes: impl FnOnce() -> Vec<KeyValue>) {
        if let Some(on) = self.recorded() {
            on.root.span().add_event(name, attributes());
        }
    }

    /// A step inside the gateway starts; `None` where nothing is recorded.
    pub fn step(&self, name: &'static str) -> Option<LegSpan> {
        self.inside(name, SpanKind::Internal, Vec::new())
    }

    /// A call of a script in Redis starts, for which the request waits.
    pub fn script(&self, name: &'static str, script: &'static str) -> Option<LegSpan> {
        self.records().then(|| attributes::script(script)).and_then(|call| self.inside(name, SpanKind::Client, call))
    }

    /// A question to a pod starts that is no leg, and that other requests may wait for as well.
    pub fn question(&self, name: &'static str, address: &str, path: &str) -> Option<LegSpan> {
        let call = self.records().then(|| {
            let mut call = attributes::call(address, path);
            // The only call that is no POST.
            call.iter_mut().filter(|pair| pair.key.as_str() == "http.request.method").for_each(|pair| {
                pair.value = "GET".into();
            });
            call
        });
        call.and_then(|call| self.inside(name, SpanKind::Client, call))
    }

    fn inside(&self, name: &'static str, kind: SpanKind, attributes: Vec<KeyValue>) -> Option<LegSpan> {
        let on = self.recorded()?;
        Some(LegSpan::inside(&on.sdk, &on.root, Birth { name, kind, attributes, links: Vec::new() }))
    }

    /// A prefill leg to this pod starts. A retry is another one beside it: `resent` = how many went before.
    pub fn prefill(&self, pod: &PodLabels, address: &str, endpoint: &str, resent: u32) -> LegSpan {
        self.leg("tandem.prefill", || attributes::leg(pod, address, endpoint, resent))
    }

    /// The decode leg (or only leg) to this pod starts.
    pub fn decode(&self, pod: &PodLabels, address: &str, endpoint: &str, resent: u32) -> LegSpan {
        self.leg("tandem.decode", || attributes::leg(pod, address, endpoint, resent))
    }

    fn leg(&self, name: &'static str, attributes: impl FnOnce() -> Vec<KeyValue>) -> LegSpan {
        match &self.on {
            None => LegSpan::off(self.client.clone()),
            Some(on) => {
                let attributes = if on.recording { attributes() } else { Vec::new() };
                let birth = Birth { name, kind: SpanKind::Client, attributes, links: Vec::new() };
                let leg = LegSpan::start(&on.sdk, &on.root, birth);
                if self.aloof { leg.with_headers(self.client.clone()) } else { leg }
            }
        }
    }

    /// For calls that go out when the request has ended, or is about to.
    pub fn branch(&self) -> Branch {
        Branch { on: self.recorded().map(|on| (on.sdk.clone(), on.root.clone())) }
    }

    /// The request ended; the root span gets what is known of it.
    pub fn finish(mut self, record: &RequestRecord) {
        self.finished = true;
        let Some(on) = &self.on else { return };
        let root = on.root.span();
        if on.recording {
            root.set_attributes(attributes::ending(record));
            // Explicit, since the layer calls a span failed in which an error was logged.
            root.set_status(match record.outcome {
                Outcome::Success | Outcome::Passed => Status::Ok,
                outcome => Status::error(outcome.label()),
            });
        }
        root.end();
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        if let Some(on) = self.on.as_ref().filter(|_| !self.finished) {
            on.root.span().set_status(Status::error("abandoned"));
            on.root.span().end();
        }
    }
}

/// Makes spans under that of a request from another task, and after its end. Does nothing where nothing is recorded.
#[derive(Clone, Debug, Default)]
pub struct Branch {
    on: Option<(SdkTracer, Context)>,
}

impl Branch {
    /// An abort call to this pod starts; `of`: the leg that it is about. Its headers go with the call.
    pub fn abort(&self, target: &Arc<str>, path: &str, resent: u32, of: Option<&SpanContext>) -> LegSpan {
        let Some((sdk, root)) = &self.on else { return LegSpan::off(HeaderMap::new()) };
        let mut attributes = attributes::call(target, path);
        attributes.extend(attributes::resend_count(resent));
        let links = of.cloned().map(Link::with_context).into_iter().collect();
        LegSpan::start(sdk, root, Birth { name: "tandem.abort", kind: SpanKind::Client, attributes, links })
    }
}
