//! Lints of an Envoy bootstrap file: the settings by which Envoy and this gateway depend on each other.

use std::time::Duration;

use serde_json::Value;

use super::Finding;
use crate::knobs::{Addressing, Knobs};

/// Envoy's default for `message_timeout`.
const DEFAULT_MESSAGE_TIMEOUT: Duration = Duration::from_millis(200);
/// Envoy's default for a listener's buffer, bytes.
const DEFAULT_BUFFER: u64 = 1 << 20;
/// Envoy's default for an HTTP/2 stream since 1.36; before, it was 256 MiB.
const DEFAULT_STREAM_WINDOW: u64 = 16 << 20;
/// Envoy's default for requests of one cluster.
const DEFAULT_MAX_REQUESTS: u64 = 1024;
/// What the gateway asks for beyond the prefill timeout.
const PREFILL_MARGIN: Duration = Duration::from_secs(5);
/// Headers that must not come from clients when a cluster dials what they say.
const DIALLED: [&str; 2] = ["target-pod", "x-gateway-destination-endpoint"];

/// Checks the text of a bootstrap file.
pub fn check(text: &str, knobs: &Knobs) -> Vec<Finding> {
    let options = serde_saphyr::options! { with_snippet: false };
    let document: Value = match serde_saphyr::from_str_with_options(text, options) {
        Ok(document) => document,
        Err(error) => return vec![Finding::error(format!("not readable as YAML: {error}"))],
    };
    let mut findings = Vec::new();
    let mut filters = Vec::new();
    walk(&document, &mut |object| {
        if is_type(object, "filters.http.ext_proc.v3.ExternalProcessor") {
            filters.push(object);
        }
    });
    if filters.is_empty() {
        findings.push(Finding::error("no ext_proc filter (envoy.filters.http.ext_proc)"));
    }
    for filter in &filters {
        check_filter(filter, knobs, &mut findings);
    }
    let processors: Vec<&str> =
        filters.iter().filter_map(|filter| filter.pointer("/grpc_service/envoy_grpc/cluster_name")?.as_str()).collect();
    let mut dialled = [false; 2];
    walk(&document, &mut |object| {
        check_listener(object, knobs, &mut findings);
        check_manager(object, knobs, &mut findings);
        check_route(object, &mut findings);
        check_cluster(object, &processors, &mut findings);
        dialled[0] |= object.pointer("/original_dst_lb_config/use_http_header") == Some(&Value::Bool(true));
        dialled[1] |= is_type(object, "override_host.v3.OverrideHost");
        check_failover(object, knobs, &mut findings);
    });
    for (header, _) in DIALLED.iter().zip(dialled).filter(|(_, dialled)| *dialled) {
        check_stripping(&document, header, &mut findings);
    }
    let attributes = |filter: &&Value| {
        let list = filter.get("response_attributes").and_then(Value::as_array);
        list.is_some_and(|list| list.iter().any(|name| name == "upstream.address"))
    };
    if dialled[1] && !filters.iter().any(attributes) {
        findings.push(Finding::warning(
            "ext_proc response_attributes lack upstream.address: after a fail-over the load of a request stays with the \
             pod that failed",
        ));
    }
    findings
}

fn walk<'v>(value: &'v Value, visit: &mut dyn FnMut(&'v Value)) {
    match value {
        Value::Object(members) => {
            visit(value);
            members.values().for_each(|member| walk(member, visit));
        }
        Value::Array(items) => items.iter().for_each(|item| walk(item, visit)),
        _ => {}
    }
}

fn is_type(object: &Value, name: &str) -> bool {
    object.get("@type").and_then(Value::as_str).is_some_and(|text| text.ends_with(name))
}

/// A protobuf duration in its JSON spelling, `5s` or `0.25s`.
fn duration(value: Option<&Value>) -> Option<Duration> {
    let seconds: f64 = value?.as_str()?.strip_suffix('s')?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

fn check_filter(filter: &Value, knobs: &Knobs, findings: &mut Vec<Finding>) {
    if filter.get("failure_mode_allow") == Some(&Value::Bool(true)) {
        findings.push(Finding::error(
            "ext_proc failure_mode_allow is true: requests pass unrouted when the gateway fails, and an answer that the \
             gateway cuts looks complete; set it to false",
        ));
    }
    let mode = |name: &str, default: &'static str| {
        filter.pointer(&format!("/processing_mode/{name}")).and_then(Value::as_str).unwrap_or(default)
    };
    let body = mode("request_body_mode", "NONE");
    if !matches!(body, "BUFFERED" | "BUFFERED_PARTIAL") {
        findings.push(Finding::error(format!("ext_proc request_body_mode is {body}: must be BUFFERED")));
    }
    for name in ["request_header_mode", "response_header_mode"] {
        if mode(name, "SEND") == "SKIP" {
            findings.push(Finding::error(format!("ext_proc {name} is SKIP: must be SEND")));
        }
    }
    let answer = mode("response_body_mode", "NONE");
    if answer != "STREAMED" {
        findings.push(Finding::warning(format!(
            "ext_proc response_body_mode is {answer}: usage, first-token times and the outcome of answers stay unknown; \
             STREAMED shows them"
        )));
    }
    let timeout = duration(filter.get("message_timeout")).unwrap_or(DEFAULT_MESSAGE_TIMEOUT);
    let most = duration(filter.get("max_message_timeout")).unwrap_or(Duration::ZERO);
    let needed = knobs.pd.prefill_request_timeout.saturating_add(PREFILL_MARGIN);
    if timeout.max(most) < needed {
        findings.push(Finding::error(format!(
            "ext_proc waits {} s at most (message_timeout, max_message_timeout), but a prefill may take {} s \
             (AIBRIX_PREFILL_REQUEST_TIMEOUT plus {} s): Envoy would answer 504 first",
            timeout.max(most).as_secs_f64(),
            needed.as_secs_f64(),
            PREFILL_MARGIN.as_secs_f64()
        )));
    }
    if timeout < Duration::from_secs(1) {
        findings.push(Finding::warning(format!(
            "ext_proc message_timeout is {} s: large bodies alone can take longer; 1 s or more is safe",
            timeout.as_secs_f64()
        )));
    }
    if filter.pointer("/grpc_service/timeout").is_some_and(|timeout| timeout.as_str() != Some("0s")) {
        findings.push(Finding::error("ext_proc grpc_service.timeout bounds the whole answer: remove it"));
    }
}

fn check_listener(object: &Value, knobs: &Knobs, findings: &mut Vec<Finding>) {
    if object.get("filter_chains").is_none() {
        return;
    }
    let buffer = object.get("per_connection_buffer_limit_bytes").and_then(Value::as_u64).unwrap_or(DEFAULT_BUFFER);
    let (body, message) = (knobs.limits.max_body_bytes as u64, knobs.limits.max_grpc_message_bytes as u64);
    if buffer < body {
        findings.push(Finding::warning(format!(
            "the listener buffers {buffer} bytes: bodies between that and the gateway's limit of {body} get Envoy's 413"
        )));
    } else if buffer > message {
        findings.push(Finding::warning(format!(
            "the listener buffers {buffer} bytes, more than the gateway's gRPC message limit of {message}: longer bodies \
             break the ext_proc stream instead of getting a 413"
        )));
    }
}

/// Envoy buffers no more of an HTTP/2 stream than its window.
fn check_manager(object: &Value, knobs: &Knobs, findings: &mut Vec<Finding>) {
    let filters = object.get("http_filters").and_then(Value::as_array);
    let is_processor = |filter: &Value| {
        filter.get("typed_config").is_some_and(|config| is_type(config, "filters.http.ext_proc.v3.ExternalProcessor"))
    };
    if !filters.is_some_and(|filters| filters.iter().any(is_processor))
        || object.get("codec_type") == Some(&"HTTP1".into())
    {
        return;
    }
    let window = object.pointer("/http2_protocol_options/initial_stream_window_size").and_then(Value::as_u64);
    let (window, body) = (window.unwrap_or(DEFAULT_STREAM_WINDOW), knobs.limits.max_body_bytes as u64);
    if window < body {
        findings.push(Finding::warning(format!(
            "HTTP/2 streams have a window of {window} bytes (http2_protocol_options.initial_stream_window_size): over HTTP/2, \
             bodies between that and the gateway's limit of {body} get Envoy's 413"
        )));
    }
}

fn check_route(object: &Value, findings: &mut Vec<Finding>) {
    let Some(route) = object.get("route").filter(|_| object.get("match").is_some()) else { return };
    let matches_target = object.pointer("/match/headers").and_then(Value::as_array).is_some_and(|headers| {
        headers
            .iter()
            .filter_map(|header| header.get("name")?.as_str())
            .any(|name| DIALLED.contains(&name) || name == "routing-strategy")
    });
    if !matches_target {
        return;
    }
    let name = object.get("name").and_then(Value::as_str).unwrap_or("unnamed");
    let timeout = route.get("timeout").map_or(Some(Duration::from_secs(15)), |timeout| duration(Some(timeout)));
    if timeout.is_some_and(|timeout| !timeout.is_zero() && timeout < Duration::from_mins(2)) {
        findings.push(Finding::warning(format!(
            "route {name}: answers are cut after {} s (timeout); long generations need more, or 0s",
            timeout.unwrap_or_default().as_secs_f64()
        )));
    }
    let retries = route.pointer("/retry_policy/retry_on").and_then(Value::as_str).unwrap_or_default();
    if retries.split(',').any(|on| !matches!(on.trim(), "" | "connect-failure")) {
        findings.push(Finding::error(format!(
            "route {name}: retry_on {retries} would send a consumed KV hand-off a second time; only connect-failure is safe"
        )));
    }
}

fn check_cluster(object: &Value, processors: &[&str], findings: &mut Vec<Finding>) {
    let Some(name) = object.get("name").and_then(Value::as_str) else { return };
    if !processors.contains(&name) || object.get("load_assignment").is_none() {
        return;
    }
    let threshold = object.pointer("/circuit_breakers/thresholds/0/max_requests").and_then(Value::as_u64);
    if threshold.unwrap_or(DEFAULT_MAX_REQUESTS) <= DEFAULT_MAX_REQUESTS {
        findings.push(Finding::warning(format!(
            "cluster {name}: at most {} streams at a time (circuit_breakers.max_requests); each request in flight is one",
            threshold.unwrap_or(DEFAULT_MAX_REQUESTS)
        )));
    }
    if object.pointer("/outlier_detection/consecutive_local_origin_failure").is_none()
        || object.pointer("/outlier_detection/split_external_local_origin_errors") != Some(&Value::Bool(true))
    {
        findings.push(Finding::warning(format!(
            "cluster {name}: a dead replica is not ejected, and Envoy does not retry ext_proc streams: set \
             outlier_detection with split_external_local_origin_errors and consecutive_local_origin_failure"
        )));
    }
    if object.get("health_checks").is_none() {
        findings.push(Finding::warning(format!(
            "cluster {name}: no health check: a replica that drains loses requests; use grpc_health_check"
        )));
    }
}

/// The load-balancing policy that takes the next address of a list when a connection fails.
fn check_failover(object: &Value, knobs: &Knobs, findings: &mut Vec<Finding>) {
    if !is_type(object, "override_host.v3.OverrideHost") {
        return;
    }
    if knobs.addressing != Addressing::DestinationEndpoint {
        findings.push(Finding::error(
            "a cluster takes addresses from x-gateway-destination-endpoint, which the gateway sends only with \
             TANDEM_ADDRESSING=destination-endpoint",
        ));
    }
    let fallback = object.pointer("/fallback_policy/policies/0/typed_extension_config/typed_config");
    let nobody = fallback.is_some_and(|policy| {
        is_type(policy, "subset.v3.Subset")
            && policy.get("fallback_policy").and_then(Value::as_str).unwrap_or("NO_FALLBACK") == "NO_FALLBACK"
    });
    if !nobody {
        findings.push(Finding::error(
            "override_host falls back on a policy that chooses any pod: when no listed pod can be connected to, another one \
             gets a hand-off that is not for it; use a subset policy with NO_FALLBACK",
        ));
    }
}

fn check_stripping(document: &Value, header: &str, findings: &mut Vec<Finding>) {
    let mut removed = Vec::new();
    walk(document, &mut |object| {
        if is_type(object, "early_header_mutation.header_mutation.v3.HeaderMutation") {
            let mutations = object.get("mutations").and_then(Value::as_array).into_iter().flatten();
            removed.extend(mutations.filter_map(|mutation| mutation.get("remove")?.as_str()));
        }
    });
    if !removed.contains(&header) {
        findings.push(Finding::error(format!(
            "clients can choose the address that is dialled: remove {header} before routing \
             (early_header_mutation_extensions)"
        )));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;
    use crate::knobs::Environment;

    struct Nothing;

    impl Environment for Nothing {
        fn get(&self, _name: &str) -> Option<String> {
            None
        }
    }

    const SHIPPED: &str = include_str!("../../../deploy/envoy/envoy.yaml");

    fn findings(text: &str) -> Vec<Finding> {
        check(text, &Knobs::read(&Nothing).unwrap().0)
    }

    #[test]
    fn the_shipped_file_is_clean() {
        assert_eq!(findings(SHIPPED), []);
    }

    const FAILOVER: &str = include_str!("../../../deploy/envoy/envoy-failover.yaml");

    #[test]
    fn the_file_with_failover_is_clean_and_must_be() {
        let mut knobs = Knobs::read(&Nothing).unwrap().0;
        assert!(check(FAILOVER, &knobs).iter().any(|found| found.text.contains("TANDEM_ADDRESSING")));
        knobs.addressing = Addressing::DestinationEndpoint;
        assert_eq!(check(FAILOVER, &knobs), []);
        for (from, to, level, said) in [
            (
                "- remove: x-gateway-destination-endpoint\n",
                "- remove: x\n",
                Level::Error,
                "x-gateway-destination-endpoint",
            ),
            ("response_attributes: [\"upstream.address\"", "x: [\"y\"", Level::Warning, "stays with"),
            ("fallback_policy: NO_FALLBACK", "fallback_policy: ANY_ENDPOINT", Level::Error, "any pod"),
            ("retry_on: connect-failure\n", "retry_on: reset\n", Level::Error, "second time"),
        ] {
            assert!(FAILOVER.contains(from), "{from}");
            let found = check(&FAILOVER.replacen(from, to, 1), &knobs);
            assert!(found.iter().any(|f| f.level == level && f.text.contains(said)), "{to}: {found:?}");
        }
    }

    #[test]
    fn each_bad_setting_is_found() {
        for (from, to, level, said) in [
            ("failure_mode_allow: false", "failure_mode_allow: true", Level::Error, "failure_mode_allow"),
            ("request_body_mode: BUFFERED", "request_body_mode: STREAMED", Level::Error, "must be BUFFERED"),
            ("response_body_mode: STREAMED", "response_body_mode: NONE", Level::Warning, "stay unknown"),
            ("max_message_timeout: 600s", "max_message_timeout: 30s", Level::Error, "504 first"),
            ("message_timeout: 5s\n", "message_timeout: 0.2s\n", Level::Warning, "large bodies"),
            ("- remove: target-pod\n", "- remove: other\n", Level::Error, "clients can choose"),
            ("            timeout: 0s\n", "            timeout: 15s\n", Level::Warning, "cut after 15 s"),
            ("            timeout: 0s\n", "            retry_policy: { retry_on: 5xx }\n", Level::Error, "second time"),
            ("per_connection_buffer_limit_bytes: 67633152", "x: 1", Level::Warning, "Envoy's 413"),
            (
                "per_connection_buffer_limit_bytes: 67633152",
                "per_connection_buffer_limit_bytes: 99000000",
                Level::Warning,
                "gRPC message limit",
            ),
            (
                "initial_stream_window_size: 67633152",
                "initial_stream_window_size: 67108863",
                Level::Warning,
                "over HTTP/2, bodies between",
            ),
            (
                "initial_stream_window_size: 67633152",
                "allow_connect: false",
                Level::Warning,
                "a window of 16777216 bytes",
            ),
            ("max_requests: 100000", "max_requests: 1024", Level::Warning, "at most 1024 streams"),
            (
                "split_external_local_origin_errors: true",
                "split_external_local_origin_errors: false",
                Level::Warning,
                "not ejected",
            ),
            ("      health_checks:", "      no_checks:", Level::Warning, "no health check"),
        ] {
            assert!(SHIPPED.contains(from), "{from}");
            let found = findings(&SHIPPED.replacen(from, to, 1));
            assert!(found.iter().any(|f| f.level == level && f.text.contains(said)), "{to}: {found:?}");
        }
        assert!(findings("static_resources: {}").iter().any(|found| found.text.contains("no ext_proc filter")));
        assert!(findings("{").iter().any(|found| found.text.contains("not readable")));
    }

    #[test]
    fn durations_are_read_as_protobuf_spells_them() {
        let of = |text: &str| duration(Some(&Value::String(text.to_owned())));
        assert_eq!(of("0.25s"), Some(Duration::from_millis(250)));
        assert_eq!(of("5s"), Some(Duration::from_secs(5)));
        assert_eq!(of("5"), None);
        assert_eq!(of("-1s"), None);
    }
}
