//! Spans as an OTLP collector receives them, the trace context that engines see, and what may be in neither.

mod across_envoy;
mod parents;
mod secrets;
mod trees;

use std::collections::BTreeMap;

use serde_json::json;
use tandem_sim::Record;

use crate::harness::engines::MODEL;
use crate::harness::fleet::FleetOptions;
use crate::harness::http::base;
use crate::harness::otlp::{Collector, Span};

const CHAT: &str = "/v1/chat/completions";
const SERVICE: &str = "aibrix-gateway-plugin";
/// The client's own trace and span.
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// How spans travel.
#[derive(Clone, Copy, Debug)]
enum Protocol {
    Grpc,
    Http,
}

/// One replica with its front, and no Envoy, that exports its spans to this collector at once.
fn exporting(collector: &Collector, protocol: Protocol, env: &[(&str, &str)]) -> FleetOptions {
    let (endpoint, name) = match protocol {
        Protocol::Grpc => (base(collector.grpc()), "grpc"),
        Protocol::Http => (base(collector.http()), "http/protobuf"),
    };
    let otel = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", name),
        ("OTEL_BSP_SCHEDULE_DELAY", "20"),
    ];
    let env = otel.iter().chain(env).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    FleetOptions { replicas: 1, envoy: false, front: true, env, args: Vec::new(), ..FleetOptions::default() }
}

/// A chat request; a stream reports usage.
fn chat(stream: bool) -> String {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "tell me"}], "max_tokens": 8});
    if stream {
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
    }
    body.to_string()
}

/// `traceparent` of a sampled span.
fn traceparent(trace: &str, span: &str) -> String {
    format!("00-{trace}-{span}-01")
}

/// The one `traceparent` that an engine received: trace id, span id, flags.
fn received(record: &Record) -> (String, String, String) {
    let values: Vec<&str> =
        record.headers.iter().filter(|(name, _)| name == "traceparent").map(|(_, value)| value.as_str()).collect();
    assert_eq!(values.len(), 1, "{values:?}");
    let parts: Vec<&str> = values[0].split('-').collect();
    assert_eq!((parts.len(), parts[0]), (4, "00"), "{values:?}");
    (parts[1].to_owned(), parts[2].to_owned(), parts[3].to_owned())
}

/// Waits for the gateway's root span of a trace, which is the last to be sent, and returns the gateway's spans of that
/// trace by name.
async fn tree(collector: &Collector, trace: &str) -> BTreeMap<String, Span> {
    let of_trace = |spans: &[Span]| -> Vec<Span> {
        spans.iter().filter(|span| span.trace_id == trace && span.service == SERVICE).cloned().collect()
    };
    let spans = collector
        .wait_for("the root span", |spans| {
            Some(of_trace(spans)).filter(|spans| spans.iter().any(|span| span.name == "tandem.request"))
        })
        .await;
    let count = spans.len();
    let tree: BTreeMap<String, Span> = spans.into_iter().map(|span| (span.name.clone(), span)).collect();
    assert_eq!(tree.len(), count, "each name once: {tree:?}");
    tree
}

/// Asserts that `tree` is exactly the root and these children of it.
fn assert_shape(tree: &BTreeMap<String, Span>, parent: &str, children: &[&str]) {
    let mut expected = [&["tandem.request"], children].concat();
    expected.sort_unstable();
    assert_eq!(tree.keys().map(String::as_str).collect::<Vec<_>>(), expected);
    let root = &tree["tandem.request"];
    assert_eq!(root.parent_id, parent);
    for child in children {
        assert_eq!(tree[*child].parent_id, root.span_id, "{child}");
    }
}
