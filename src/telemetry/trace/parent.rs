//! W3C trace context: which span a request belongs to, and its id.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(super) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The remote parent of a request.
#[derive(Clone, Debug, Default)]
pub struct TraceParent {
    /// The span to hang under, if there is one.
    pub(super) remote: Option<SpanContext>,
    /// The client's own trace headers, unchanged.
    pub(super) client: HeaderMap,
}

impl TraceParent {
    /// Chooses between the client's headers and the metadata of the ext_proc call, where Envoy puts its own span (R88).
    ///
    /// When both are of one trace, Envoy's span lies between the client's and ours, so it is the parent. When they are
    /// of two traces, Envoy did not understand or did not take up the client's: the client's wins if it is sampled.
    /// A client that is sampled is never overruled by metadata that is not.
    pub fn extract(client: &HeaderMap, metadata: &HeaderMap) -> TraceParent {
        let remote = match (parse(client), parse(metadata)) {
            (Some(client), Some(envoy)) => {
                let same_trace = client.trace_id() == envoy.trace_id();
                let keep_client = client.is_sampled() && !(same_trace && envoy.is_sampled());
                Some(if keep_client { client } else { envoy })
            }
            (client, envoy) => client.or(envoy),
        };
        let mut kept = HeaderMap::new();
        for name in [TRACEPARENT, TRACESTATE] {
            for value in client.get_all(&name) {
                kept.append(name.clone(), value.clone());
            }
        }
        TraceParent { remote, client: kept }
    }
}

/// The span context of `traceparent` and `tracestate`, if valid; more than one `traceparent` is not.
fn parse(headers: &HeaderMap) -> Option<SpanContext> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let text = values.next()?.to_str().ok()?.trim();
    if values.next().is_some() {
        return None;
    }
    let mut parts = text.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    // Later versions may append fields; this one may not.
    if !is_hex(version, 2) || version == "ff" || (version == "00" && parts.next().is_some()) {
        return None;
    }
    if !is_hex(trace, 32) || !is_hex(span, 16) || !is_hex(flags, 2) {
        return None;
    }
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        flags,
        true,
        trace_state(headers),
    );
    context.is_valid().then_some(context)
}

/// An unusable `tracestate` does not spoil the `traceparent`.
fn trace_state(headers: &HeaderMap) -> TraceState {
    let values: Vec<&str> = headers.get_all(TRACESTATE).iter().filter_map(|value| value.to_str().ok()).collect();
    values.join(",").parse().unwrap_or_default()
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// The id that a client sees as `request-id` (the reference gateway, section 1.3): the trace id of the request's own
/// span, else the trace id that the client's `traceparent` spells, else the given random one.
///
/// The reference takes any 32 characters for a trace id, whatever the rest of the header holds. So does this, as far as
/// they are hexadecimal, since the id goes into headers and logs.
pub fn request_id(span: Option<TraceId>, traceparent: Option<&HeaderValue>, random: uuid::Uuid) -> String {
    if let Some(trace) = span.filter(|trace| *trace != TraceId::INVALID) {
        return trace.to_string();
    }
    traceparent
        .and_then(|value| value.to_str().ok())
        .and_then(spelled_trace_id)
        .map_or_else(|| random.to_string(), str::to_owned)
}

fn spelled_trace_id(traceparent: &str) -> Option<&str> {
    let mut parts = traceparent.trim().split('-');
    let trace = parts.nth(1)?;
    let enough_parts = parts.count() >= 2;
    let usable = trace.len() == 32 && trace.bytes().all(|byte| byte.is_ascii_hexdigit());
    (enough_parts && usable && trace.bytes().any(|byte| byte != b'0')).then_some(trace)
}
