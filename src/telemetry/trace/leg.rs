//! A child span: the selection, or one leg.

use http::{HeaderMap, HeaderValue};
use opentelemetry::trace::{Span as _, SpanContext, SpanKind, Status, TraceContextExt, Tracer as _};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::trace::SdkTracer;

use super::parent::{TRACEPARENT, TRACESTATE};
use crate::response::Usage;

/// A span under the request's. Does nothing when tracing is off.
#[derive(Debug)]
pub struct LegSpan {
    span: Option<opentelemetry_sdk::trace::Span>,
    /// What goes to the engine.
    headers: HeaderMap,
}

impl LegSpan {
    /// A span that is not there; the client's own trace headers go on.
    pub(super) fn off(client: HeaderMap) -> LegSpan {
        LegSpan { span: None, headers: client }
    }

    pub(super) fn start(
        tracer: &SdkTracer,
        parent: &Context,
        name: &'static str,
        kind: SpanKind,
        attributes: Vec<KeyValue>,
    ) -> LegSpan {
        let builder = tracer.span_builder(name).with_kind(kind).with_attributes(attributes);
        let span = tracer.build_with_context(builder, parent);
        // A span that is made after shutdown has no identity; its parent still has one.
        let own = span.span_context();
        let headers = if own.is_valid() { inject(own) } else { inject(parent.span().span_context()) };
        LegSpan { span: Some(span), headers }
    }

    /// `traceparent` and `tracestate` for the leg: those of this span, or, with tracing off, the client's as they came.
    /// They replace whatever the forwarded headers hold.
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// Something happened.
    pub fn event(&mut self, name: &'static str) {
        if let Some(span) = &mut self.span {
            span.add_event(name, Vec::new());
        }
    }

    /// The first body byte of the answer arrived: event `first_chunk`.
    pub fn first_chunk(&mut self) {
        self.event("first_chunk");
    }

    /// Adds an attribute.
    pub fn attribute(&mut self, name: &'static str, value: impl Into<Value>) {
        if let Some(span) = &mut self.span {
            span.set_attribute(KeyValue::new(name, value));
        }
    }

    /// Adds the token counts.
    pub fn usage(&mut self, usage: Usage) {
        if self.span.is_some() {
            self.attribute("gen_ai.usage.input_tokens", count(usage.prompt_tokens));
            self.attribute("gen_ai.usage.output_tokens", count(usage.completion_tokens));
        }
    }

    /// It ended well.
    pub fn succeed(mut self) {
        self.end(None);
    }

    /// It failed, for this reason. The text goes to the trace backend: no prompts, no secrets.
    pub fn fail(mut self, reason: &str) {
        self.end(Some(reason));
    }

    fn end(&mut self, failure: Option<&str>) {
        if let Some(mut span) = self.span.take() {
            if let Some(reason) = failure {
                span.set_status(Status::error(reason.to_owned()));
            }
            span.end();
        }
    }
}

impl Drop for LegSpan {
    fn drop(&mut self) {
        self.end(Some("abandoned"));
    }
}

/// A count as OpenTelemetry spells numbers.
pub(super) fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The headers that name a span.
pub(super) fn inject(span: &SpanContext) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if !span.is_valid() {
        return headers;
    }
    let text = format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), span.trace_flags().to_u8() & 1);
    if let Ok(value) = HeaderValue::from_str(&text) {
        headers.insert(TRACEPARENT, value);
    }
    let state = span.trace_state().header();
    if !state.is_empty()
        && let Ok(value) = HeaderValue::from_str(&state)
    {
        headers.insert(TRACESTATE, value);
    }
    headers
}
