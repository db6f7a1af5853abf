//! Spans as an OTLP collector receives them, the trace context that engines see, and what may be in neither.

mod across_envoy;
mod dialects;
mod failures;
mod outages;
mod parents;
mod replicas;
mod secrets;
mod trees;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::json;
use tandem_sim::Record;

use crate::harness::SOON;
use crate::harness::engines::MODEL;
use crate::harness::fleet::FleetOptions;
use crate::harness::http::base;
use crate::harness::otlp::{Collector, Span};

const CHAT: &str = "/v1/chat/completions";
const SERVICE: &str = "aibrix-gateway-plugin";
/// The client's own trace and span.
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

const HEAD: &str = "process.handle_request_headers";
const BODY: &str = "process.handle_request_body";
const SELECT: &str = "process.select_target_pod";
const ANSWER: &str = "process.handle_response_headers";
const INFERENCE: &str = "llm.inference";
const FIRST: &str = "llm.time_to_first_response_chunk";
const OTHERS: &str = "llm.time_from_first_to_last_response_chunk";
const PREFILL: &str = "tandem.prefill";
const DECODE: &str = "tandem.decode";
const LOOKUP: &str = "tandem.lookup";
const ABORT: &str = "tandem.abort";
const CLAIM: &str = "tandem.claim";

/// The steps of every streamed request that was answered, beside its legs.
const STREAMED: [&str; 7] = [HEAD, BODY, SELECT, ANSWER, INFERENCE, FIRST, OTHERS];

/// Statuses. A leg that ended well says nothing; the root says so, since the log layer would call it failed.
const UNSET: i32 = 0;
const OK: i32 = 1;
const ERROR: i32 = 2;
/// Kinds.
const INTERNAL: i32 = 1;
const SERVER: i32 = 2;
const CLIENT: i32 = 3;

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

/// The gateway's spans of a trace so far.
fn ours(collector: &Collector, trace: &str) -> Vec<Span> {
    let ours = |span: &Span| span.trace_id == trace && span.service == SERVICE;
    collector.spans().into_iter().filter(ours).collect()
}

/// Waits until the gateway's spans of the trace are the root, a child of `parent`, and exactly these children of the
/// root, and returns them in the order in which they began. Calls about a request can outlive it, so that its root need
/// not be the last to come.
async fn gathered(collector: &Collector, trace: &str, parent: &str, children: &[&str]) -> Vec<Span> {
    let mut expected = [&["tandem.request"], children].concat();
    expected.sort_unstable();
    let complete = async {
        loop {
            let mut spans = ours(collector, trace);
            let mut names: Vec<&str> = spans.iter().map(|span| &*span.name).collect();
            names.sort_unstable();
            if names == expected {
                spans.sort_by_key(|span| span.start);
                return spans;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let Ok(spans) = tokio::time::timeout(SOON, complete).await else {
        panic!("expected {expected:?}, got:\n{}", rendered(&ours(collector, trace)));
    };
    let root = one(&spans, "tandem.request");
    assert_eq!((root.parent_id.as_str(), root.kind), (parent, SERVER));
    for span in &spans {
        assert_eq!(span.scope, "envoy-ext-proc-server", "{span:?}");
        if span.span_id != root.span_id {
            assert_eq!(span.parent_id, root.span_id, "{span:?}");
            let calls = [PREFILL, DECODE, LOOKUP, ABORT, CLAIM, "tandem.limits"].contains(&span.name.as_str());
            assert_eq!(span.kind, if calls { CLIENT } else { INTERNAL }, "{span:?}");
        }
    }
    spans
}

/// The spans of this name, in order.
fn all<'a>(spans: &'a [Span], name: &str) -> Vec<&'a Span> {
    spans.iter().filter(|span| span.name == name).collect()
}

/// The one span of this name.
fn one<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let found = all(spans, name);
    assert_eq!(found.len(), 1, "{name}:\n{}", rendered(spans));
    found[0]
}

fn assert_attributes(span: &Span, expected: &[(&str, &str)]) {
    for (name, value) in expected {
        assert_eq!(span.attributes.get(*name).map(String::as_str), Some(*value), "{name} of {span:?}");
    }
}

/// A trace for people: a line for each span and event, indented below its parent, with its beginning and duration in
/// milliseconds.
fn rendered(spans: &[Span]) -> String {
    fn below(spans: &[Span], parent: Option<&str>, depth: usize, zero: u64, text: &mut String) {
        let known = |id: &str| spans.iter().any(|span| span.span_id == id);
        let mut children: Vec<&Span> = spans
            .iter()
            .filter(|span| match parent {
                Some(parent) => span.parent_id == parent,
                None => !known(&span.parent_id),
            })
            .collect();
        children.sort_by_key(|span| span.start);
        let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
        for span in children {
            let name = format!("{}{}", "  ".repeat(depth), span.name);
            let (at, took) = (ms(zero, span.start), ms(span.start, span.end));
            let failed = if span.status == ERROR { "  error" } else { "" };
            let _ = writeln!(text, "{name:<64} {at:>9.2} {took:>9.2}  {}{failed}", span.service);
            for moment in &span.moments {
                let name = format!("{}  · {}", "  ".repeat(depth), moment.name);
                let _ = writeln!(text, "{name:<64} {:>9.2}", ms(zero, moment.at));
            }
            below(spans, Some(&span.span_id), depth + 1, zero, text);
        }
    }
    let mut text = String::new();
    let zero = spans.iter().map(|span| span.start).min().unwrap_or_default();
    below(spans, None, 0, zero, &mut text);
    text
}
