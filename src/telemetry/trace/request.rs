//! The root span of a request.

use http::HeaderMap;
use opentelemetry::trace::{SpanKind, Status, TraceContextExt, TraceId, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::SdkTracer;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::leg::{LegSpan, count};
use super::{SPAN_TARGET, TraceParent};
use crate::telemetry::durations::Durations;
use crate::telemetry::{Outcome, PodLabels, RequestRecord};

const ROOT: &str = "tandem.request";

/// Makes the spans of requests; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Tracer {
    sdk: Option<SdkTracer>,
}

impl Tracer {
    /// Makes no spans.
    pub fn off() -> Tracer {
        Tracer::default()
    }

    pub(super) fn on(sdk: SdkTracer) -> Tracer {
        Tracer { sdk: Some(sdk) }
    }

    /// A request arrived.
    pub fn begin(&self, parent: TraceParent) -> RequestTrace {
        let log = tracing::info_span!(
            target: SPAN_TARGET, parent: None, "tandem.request",
            otel.kind = "server",
            request_id = tracing::field::Empty,
        );
        let on = self.sdk.as_ref().map(|sdk| {
            let remote = match parent.remote {
                Some(remote) => Context::new().with_remote_span_context(remote),
                None => Context::new(),
            };
            // Fails when the layer is not installed, which is seen below.
            let _ = log.set_parent(remote.clone());
            let root = log.context();
            if root.span().span_context().is_valid() {
                return On { sdk: sdk.clone(), root, layered: true };
            }
            let span = sdk.build_with_context(sdk.span_builder(ROOT).with_kind(SpanKind::Server), &remote);
            On { sdk: sdk.clone(), root: remote.with_span(span), layered: false }
        });
        RequestTrace { log, on, client: parent.client, finished: false }
    }
}

/// What was selected.
#[derive(Clone, Copy, Debug)]
pub struct SelectedTarget<'a> {
    /// The strategy.
    pub strategy: &'a str,
    /// Pods that were candidates.
    pub candidate_pods: usize,
    /// Routable pods of the model.
    pub ready_pods: usize,
    /// The decode, combined or only pod.
    pub pod: &'a PodLabels,
    /// Its host, without the port.
    pub host: &'a str,
    /// Requests that this replica had on it before.
    pub outstanding: u64,
    /// How long the selection took.
    pub took: std::time::Duration,
}

#[derive(Debug)]
struct On {
    sdk: SdkTracer,
    root: Context,
    /// The root span is the one of the `tracing` span.
    layered: bool,
}

/// The trace of one request; its span ends when this is finished or dropped.
#[derive(Debug)]
pub struct RequestTrace {
    log: tracing::Span,
    on: Option<On>,
    client: HeaderMap,
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

    /// The same, only when the trace is sampled, so that somebody may find it.
    pub fn sampled_trace_id(&self) -> Option<TraceId> {
        self.trace_id().filter(|_| self.on.as_ref().is_some_and(|on| on.root.span().span_context().is_sampled()))
    }

    /// The request got its id.
    pub fn set_request_id(&self, request_id: &str) {
        self.log.record("request_id", request_id);
        if let Some(on) = self.on.as_ref().filter(|on| !on.layered) {
            on.root.span().set_attribute(KeyValue::new("request_id", request_id.to_owned()));
        }
    }

    /// The request was understood. `model` only if the fleet knows it.
    pub fn understood(&self, endpoint: &'static str, model: &str, stream: bool) {
        self.set([
            KeyValue::new("request_path", endpoint),
            KeyValue::new("model", model.to_owned()),
            KeyValue::new("gen_ai.request.model", model.to_owned()),
            KeyValue::new("stream", stream),
        ]);
    }

    /// The target was selected.
    pub fn selected(&self, target: &SelectedTarget<'_>) {
        self.set([
            KeyValue::new("routing_strategy", target.strategy.to_owned()),
            KeyValue::new("candidate_pods", count(target.candidate_pods as u64)),
            KeyValue::new("ready_pods", count(target.ready_pods as u64)),
            KeyValue::new("target_pod", target.pod.pod.clone()),
            KeyValue::new("target_pod_ip", target.host.to_owned()),
            KeyValue::new("outstanding_requests_at_start", count(target.outstanding)),
            KeyValue::new("routing_time_taken_ms", target.took.as_secs_f64() * 1000.0),
        ]);
    }

    /// Something happened: an abort, a retry.
    pub fn event(&self, name: &'static str) {
        if let Some(on) = &self.on {
            on.root.span().add_event(name, Vec::new());
        }
    }

    /// The selection starts.
    pub fn select(&self) -> LegSpan {
        self.child("process.select_target_pod", SpanKind::Internal, Vec::new)
    }

    /// A prefill leg to this pod starts; a retry is another one beside it.
    pub fn prefill(&self, pod: &PodLabels, address: &str) -> LegSpan {
        self.child("tandem.prefill", SpanKind::Client, || leg_attributes(pod, address))
    }

    /// The decode leg (or only leg) to this pod starts.
    pub fn decode(&self, pod: &PodLabels, address: &str) -> LegSpan {
        self.child("tandem.decode", SpanKind::Client, || leg_attributes(pod, address))
    }

    /// The request ended; the root span gets what is known of it.
    pub fn finish(mut self, record: &RequestRecord) {
        self.finished = true;
        let Some(on) = &self.on else { return };
        let root = on.root.span();
        if root.is_recording() {
            root.set_attributes(final_attributes(record));
            // Explicit, since the layer calls a span failed in which an error was logged.
            root.set_status(match record.outcome {
                Outcome::Success => Status::Ok,
                outcome => Status::error(outcome.label()),
            });
        }
        root.end();
    }

    fn set<const N: usize>(&self, attributes: [KeyValue; N]) {
        if let Some(on) = &self.on {
            on.root.span().set_attributes(attributes);
        }
    }

    fn child(&self, name: &'static str, kind: SpanKind, attributes: impl FnOnce() -> Vec<KeyValue>) -> LegSpan {
        match &self.on {
            None => LegSpan::off(self.client.clone()),
            Some(on) => {
                let attributes = if on.root.span().is_recording() { attributes() } else { Vec::new() };
                LegSpan::start(&on.sdk, &on.root, name, kind, attributes)
            }
        }
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

fn leg_attributes(pod: &PodLabels, address: &str) -> Vec<KeyValue> {
    vec![
        KeyValue::new("k8s.namespace.name", pod.namespace.clone()),
        KeyValue::new("k8s.pod.name", pod.pod.clone()),
        KeyValue::new("server.address", address.to_owned()),
        KeyValue::new("roleset", pod.roleset.clone()),
        KeyValue::new("gen_ai.request.model", pod.model.clone()),
    ]
}

/// The reference gateway's names (its section 9.4) and the conventions for generative AI.
fn final_attributes(record: &RequestRecord) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new("http.response.status_code", i64::from(record.status)),
        KeyValue::new("outcome", record.outcome.label()),
    ];
    if let Some(model) = &record.model {
        attributes.push(KeyValue::new("model_name", model.to_string()));
    }
    if !record.handoff.is_empty() {
        attributes.push(KeyValue::new("handoff", record.handoff));
    }
    if let Some(usage) = record.usage {
        attributes.extend([
            KeyValue::new("prompt_tokens", count(usage.prompt_tokens)),
            KeyValue::new("completion_tokens", count(usage.completion_tokens)),
            KeyValue::new("total_tokens", count(usage.total_tokens)),
            KeyValue::new("gen_ai.usage.input_tokens", count(usage.prompt_tokens)),
            KeyValue::new("gen_ai.usage.output_tokens", count(usage.completion_tokens)),
        ]);
    }
    let durations = Durations::of(record);
    let named = [
        ("routing_time_taken", durations.routing),
        ("ttft", durations.ttft),
        ("prefill_time_taken", durations.prefill),
        ("kv_transfer_time_taken", durations.kv_transfer),
        ("decode_time_taken", durations.decode),
        ("total_time_taken", durations.total),
    ];
    for (name, duration) in named {
        if let Some(duration) = duration {
            attributes.push(KeyValue::new(name, format!("{duration:?}")));
        }
    }
    attributes
}
