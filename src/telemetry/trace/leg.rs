//! A child span: a step of a request, or one leg.

use http::{HeaderMap, HeaderValue};
use opentelemetry::trace::{Link, Span as _, SpanContext, SpanKind, Status, TraceContextExt, Tracer as _};
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

/// What a span is born with.
#[derive(Debug)]
pub(super) struct Birth {
    pub(super) name: &'static str,
    pub(super) kind: SpanKind,
    pub(super) attributes: Vec<KeyValue>,
    /// Spans that it has to do with, beside its parent.
    pub(super) links: Vec<Link>,
}

impl LegSpan {
    /// A span that is not there; the client's own trace headers go on.
    pub(super) fn off(client: HeaderMap) -> LegSpan {
        LegSpan { span: None, headers: client }
    }

    /// A span of a call that tells its peer which span that is.
    pub(super) fn start(tracer: &SdkTracer, parent: &Context, birth: Birth) -> LegSpan {
        let mut leg = LegSpan::inside(tracer, parent, birth);
        // A span that is made after shutdown has no identity; its parent still has one.
        let own = leg.context().filter(SpanContext::is_valid);
        leg.headers = own.map_or_else(|| inject(parent.span().span_context()), |own| inject(&own));
        leg
    }

    /// A span that no peer hears of.
    pub(super) fn inside(tracer: &SdkTracer, parent: &Context, birth: Birth) -> LegSpan {
        let Birth { name, kind, attributes, links } = birth;
        let mut builder = tracer.span_builder(name).with_kind(kind).with_attributes(attributes);
        if !links.is_empty() {
            builder = builder.with_links(links);
        }
        LegSpan { span: Some(tracer.build_with_context(builder, parent)), headers: HeaderMap::new() }
    }

    pub(super) fn with_headers(mut self, headers: HeaderMap) -> LegSpan {
        self.headers = headers;
        self
    }

    /// `traceparent` and `tracestate` for the leg: those of this span, or, with tracing off, the client's as they came.
    /// They replace whatever the forwarded headers hold.
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// Which span it is; `None` when tracing is off.
    pub fn context(&self) -> Option<SpanContext> {
        self.span.as_ref().map(|span| span.span_context().clone())
    }

    /// Something happened.
    pub fn event(&mut self, name: &'static str) {
        self.event_with(name, Vec::new);
    }

    /// Something happened, and more is known of it.
    pub fn event_with(&mut self, name: &'static str, attributes: impl FnOnce() -> Vec<KeyValue>) {
        if let Some(span) = self.span.as_mut().filter(|span| span.is_recording()) {
            span.add_event(name, attributes());
        }
    }

    /// The first body byte of the answer arrived: event `first_chunk`.
    pub fn first_chunk(&mut self) {
        self.event("first_chunk");
    }

    /// Adds an attribute.
    pub fn attribute(&mut self, name: &'static str, value: impl Into<Value>) {
        if let Some(span) = self.span.as_mut().filter(|span| span.is_recording()) {
            span.set_attribute(KeyValue::new(name, value));
        }
    }

    /// The status of the answer to the call.
    pub fn answered(&mut self, status: u16) {
        self.attribute("http.response.status_code", i64::from(status));
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

    /// It failed, for this reason, which is its `error.type` too: one of a few words, no text of a client's.
    pub fn fail(mut self, reason: &'static str) {
        self.attribute("error.type", reason);
        self.end(Some(reason));
    }

    fn end(&mut self, failure: Option<&'static str>) {
        if let Some(mut span) = self.span.take() {
            if let Some(reason) = failure {
                span.set_status(Status::error(reason));
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
