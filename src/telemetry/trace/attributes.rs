//! Which attributes spans have: the reference gateway's names (its section 9.4) and OpenTelemetry's conventions for HTTP,
//! gRPC, generative AI and databases.

use opentelemetry::KeyValue;

use super::leg::count;
use crate::telemetry::durations::Durations;
use crate::telemetry::{Outcome, PodLabels, RequestRecord};

/// The call that carries a request behind Envoy.
const EXT_PROC: &str = "envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// A method by its name, if it is one of the usual ones: clients may send any word.
pub(super) fn method(method: &http::Method) -> &'static str {
    match method.as_str() {
        "POST" => "POST",
        "GET" => "GET",
        "HEAD" => "HEAD",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        "CONNECT" => "CONNECT",
        "TRACE" => "TRACE",
        _ => "_OTHER",
    }
}

/// The request as it arrives. Behind Envoy it comes in a gRPC call.
pub(super) fn arrival(verb: &http::Method, over_grpc: bool) -> Vec<KeyValue> {
    let mut attributes = vec![KeyValue::new("http.request.method", method(verb))];
    if over_grpc {
        attributes.push(KeyValue::new("rpc.system.name", "grpc"));
        attributes.push(KeyValue::new("rpc.method", EXT_PROC));
    }
    attributes
}

/// What `gen_ai.operation.name` calls an endpoint, where it has a name for it.
fn operation(endpoint: &str) -> Option<&'static str> {
    match endpoint {
        "/v1/chat/completions" => Some("chat"),
        "/v1/completions" => Some("text_completion"),
        "/v1/embeddings" => Some("embeddings"),
        _ => None,
    }
}

/// A call to `host:port` for a path that we know.
pub(super) fn call(address: &str, path: &str) -> Vec<KeyValue> {
    let mut attributes = vec![KeyValue::new("http.request.method", "POST")];
    let (scheme, address) = address.strip_prefix("https://").map_or(("http", address), |rest| ("https", rest));
    if let Some((host, port)) = address.rsplit_once(':') {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        attributes.push(KeyValue::new("server.address", host.to_owned()));
        if let Ok(port) = port.parse::<u16>() {
            attributes.push(KeyValue::new("server.port", i64::from(port)));
        }
        attributes.push(KeyValue::new("url.full", format!("{scheme}://{address}{path}")));
    }
    attributes
}

/// A leg to a pod; `resent` legs of the kind went before.
pub(super) fn leg(pod: &PodLabels, address: &str, endpoint: &str, resent: u32) -> Vec<KeyValue> {
    let mut attributes = call(address, endpoint);
    attributes.extend([
        KeyValue::new("k8s.namespace.name", pod.namespace.clone()),
        KeyValue::new("k8s.pod.name", pod.pod.clone()),
        KeyValue::new("roleset", pod.roleset.clone()),
        KeyValue::new("gen_ai.request.model", pod.model.clone()),
        KeyValue::new("gen_ai.provider.name", pod.engine_type.clone()),
    ]);
    attributes.extend(operation(endpoint).map(|name| KeyValue::new("gen_ai.operation.name", name)));
    attributes.extend(resend_count(resent));
    attributes
}

/// Absent on the first call of its kind.
pub(super) fn resend_count(resent: u32) -> Option<KeyValue> {
    (resent > 0).then(|| KeyValue::new("http.request.resend_count", i64::from(resent)))
}

/// A script in Redis.
pub(super) fn script(name: &'static str) -> Vec<KeyValue> {
    vec![
        KeyValue::new("db.system.name", "redis"),
        KeyValue::new("db.operation.name", "EVALSHA"),
        KeyValue::new("db.stored_procedure.name", name),
    ]
}

/// What is known of a request when it ends. Each name once: the SDK does not look for doubles.
pub(super) fn ending(record: &RequestRecord) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new("http.response.status_code", i64::from(record.status)),
        KeyValue::new("outcome", record.outcome.label()),
        KeyValue::new("stream", record.stream),
        KeyValue::new("http.request.body.size", count(record.body_bytes as u64)),
        KeyValue::new("http.response.body.size", count(record.answer_bytes)),
    ];
    if record.outcome != Outcome::Success {
        attributes.push(KeyValue::new("error.type", record.outcome.label()));
    }
    // A path that is none of ours is the client's text.
    if !record.endpoint.is_empty() {
        attributes.extend([
            KeyValue::new("request_path", record.endpoint),
            KeyValue::new("url.path", record.endpoint),
            KeyValue::new("http.route", record.endpoint),
        ]);
        attributes.extend(operation(record.endpoint).map(|name| KeyValue::new("gen_ai.operation.name", name)));
    }
    if let Some(model) = &record.model {
        for name in ["model", "model_name", "gen_ai.request.model"] {
            attributes.push(KeyValue::new(name, model.to_string()));
        }
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
    decision(record, &mut attributes);
    times(record, &mut attributes);
    attributes
}

fn decision(record: &RequestRecord, attributes: &mut Vec<KeyValue>) {
    if let Some(strategy) = &record.strategy {
        attributes.push(KeyValue::new("routing_strategy", strategy.clone().into_owned()));
    }
    if let (Some(pod), Some(routed)) = (&record.target_pod, record.timings.routed) {
        attributes.extend([
            KeyValue::new("candidate_pods", count(record.candidate_pods as u64)),
            KeyValue::new("ready_pods", count(record.ready_pods as u64)),
            KeyValue::new("target_pod", pod.pod.clone()),
            KeyValue::new("target_pod_ip", record.target_host.clone()),
            KeyValue::new("outstanding_requests_at_start", count(record.outstanding_at_start)),
            KeyValue::new("routing_time_taken_ms", routed.since(record.timings.received).as_secs_f64() * 1000.0),
        ]);
        if !pod.engine_type.is_empty() {
            attributes.push(KeyValue::new("gen_ai.provider.name", pod.engine_type.clone()));
        }
    }
    if let Some(reason) = record.retry {
        attributes.push(KeyValue::new("tandem.retry", reason.label()));
    }
}

fn times(record: &RequestRecord, attributes: &mut Vec<KeyValue>) {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(attributes: &[KeyValue], name: &str) -> Option<String> {
        attributes.iter().find(|pair| pair.key.as_str() == name).map(|pair| pair.value.to_string())
    }

    #[test]
    fn addresses_of_both_families() {
        let table = [
            ("10.0.0.1:8000", Some("10.0.0.1"), Some("8000"), Some("http://10.0.0.1:8000/x")),
            ("[fd00::1]:8000", Some("fd00::1"), Some("8000"), Some("http://[fd00::1]:8000/x")),
            ("host:99999", Some("host"), None, Some("http://host:99999/x")),
            ("https://10.0.0.1:8000", Some("10.0.0.1"), Some("8000"), Some("https://10.0.0.1:8000/x")),
            // Envoy's own route decides.
            ("", None, None, None),
        ];
        for (address, host, port, url) in table {
            let attributes = call(address, "/x");
            assert_eq!(value(&attributes, "server.address").as_deref(), host, "{address}");
            assert_eq!(value(&attributes, "server.port").as_deref(), port, "{address}");
            assert_eq!(value(&attributes, "url.full").as_deref(), url, "{address}");
        }
    }

    #[test]
    fn what_a_client_invents_is_no_attribute() {
        let verb = http::Method::from_bytes(b"STEAL-THE-SPAN").unwrap();
        assert_eq!(value(&arrival(&verb, true), "http.request.method").as_deref(), Some("_OTHER"));
        assert_eq!(value(&arrival(&http::Method::POST, false), "rpc.method"), None);
        let unknown = ending(&RequestRecord::empty());
        assert_eq!((value(&unknown, "url.path"), value(&unknown, "model")), (None, None));
        assert_eq!(value(&unknown, "error.type").as_deref(), Some("client_cancelled_eof"));
    }

    #[test]
    fn each_name_once() {
        let usage = crate::response::Usage { prompt_tokens: 1, completion_tokens: 2, total_tokens: 3 };
        let mut record =
            RequestRecord { endpoint: "/v1/completions", model: Some("m".into()), ..RequestRecord::empty() };
        record.usage = Some(usage);
        record.target_pod = Some(std::sync::Arc::new(PodLabels { engine_type: "vllm".into(), ..PodLabels::default() }));
        record.timings.routed = Some(record.timings.received);
        let attributes = ending(&record);
        let mut names: Vec<_> = attributes.iter().map(|pair| pair.key.as_str().to_owned()).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count, "{names:?}");
    }
}
