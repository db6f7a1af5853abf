//! Header lists from and to Envoy's form.

use std::collections::HashMap;

use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{
    HeaderMap as EnvoyHeaders, HeaderValue as EnvoyHeader, HeaderValueOption,
};
use envoy_types::pb::google::protobuf::Struct;
use envoy_types::pb::google::protobuf::value::Kind;
use http::{HeaderMap, HeaderName, HeaderValue};

/// A head as Envoy sends it: pseudo headers apart.
#[derive(Debug, Default)]
pub struct Head {
    /// `:method`
    pub method: String,
    /// `:path`
    pub path: String,
    /// `:status`
    pub status: Option<u16>,
    /// The rest. What HTTP cannot carry is left out.
    pub headers: HeaderMap,
}

/// Envoy fills `raw_value` or `value`, depending on its version and runtime flags: read both, raw first.
pub fn head(envoy: EnvoyHeaders) -> Head {
    let mut head = Head::default();
    for EnvoyHeader { key, value, raw_value } in envoy.headers {
        let bytes = if raw_value.is_empty() { value.into_bytes() } else { raw_value };
        match key.as_str() {
            ":method" => head.method = String::from_utf8_lossy(&bytes).into_owned(),
            ":path" => head.path = String::from_utf8_lossy(&bytes).into_owned(),
            ":status" => head.status = std::str::from_utf8(&bytes).ok().and_then(|text| text.trim().parse().ok()),
            name if name.starts_with(':') => {}
            name => {
                if let (Ok(name), Ok(value)) =
                    (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_maybe_shared(bytes::Bytes::from(bytes)))
                {
                    // Fails beyond 32768 headers, which no proxy lets through.
                    let _ = head.headers.try_append(name, value);
                }
            }
        }
    }
    head
}

/// The address of the pod that answers, where the filter's `response_attributes` ask for `upstream.address`.
pub fn upstream_address(attributes: &HashMap<String, Struct>) -> Option<String> {
    attribute(attributes, "upstream.address").map(str::to_owned)
}

/// Whether Envoy answers in the place of a pod that it could not reach, or that broke off before the head of its answer,
/// where the filter's `response_attributes` ask for `response.code_details`; `None` where they do not.
pub fn pod_did_not_answer(attributes: &HashMap<String, Struct>) -> Option<bool> {
    let details = attribute(attributes, "response.code_details")?;
    // With the reason in braces: `remote_connection_failure`, `connection_termination`... An overflow is Envoy's own limit.
    Some(details.starts_with("upstream_reset_before_response_started{") && !details.contains("{overflow"))
}

fn attribute<'a>(attributes: &'a HashMap<String, Struct>, name: &str) -> Option<&'a str> {
    attributes.values().find_map(|group| match group.fields.get(name)?.kind.as_ref()? {
        Kind::StringValue(text) => Some(text.as_str()),
        _ => None,
    })
}

/// "Set this header to exactly this value."
pub fn set_header(name: &str, value: &[u8]) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(EnvoyHeader { key: name.to_owned(), value: String::new(), raw_value: value.to_vec() }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
        ..HeaderValueOption::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envoy(pairs: &[(&str, &str, &[u8])]) -> EnvoyHeaders {
        EnvoyHeaders {
            headers: pairs
                .iter()
                .map(|(key, value, raw)| EnvoyHeader {
                    key: (*key).to_owned(),
                    value: (*value).to_owned(),
                    raw_value: raw.to_vec(),
                })
                .collect(),
        }
    }

    #[test]
    fn a_pod_that_did_not_answer_is_known_by_envoys_details() {
        for (details, expected) in [
            ("via_upstream", false),
            ("", false),
            ("upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_111}", true),
            ("upstream_reset_before_response_started{connection_termination}", true),
            ("upstream_reset_before_response_started{overflow}", false),
            ("upstream_reset_after_response_started{connection_termination}", false),
        ] {
            let value = envoy_types::pb::google::protobuf::Value { kind: Some(Kind::StringValue(details.to_owned())) };
            let fields = [("response.code_details".to_owned(), value)].into_iter().collect();
            let attributes = HashMap::from([("envoy.filters.http.ext_proc".to_owned(), Struct { fields })]);
            assert_eq!(pod_did_not_answer(&attributes), Some(expected), "{details}");
        }
        assert_eq!(pod_did_not_answer(&HashMap::new()), None);
    }

    #[test]
    fn r77_values_come_from_either_field_in_any_case_and_survive_odd_bytes() {
        let head = head(envoy(&[
            (":method", "", b"POST"),
            (":path", "/v1/completions?x=1", b""),
            ("Routing-Strategy", "", b"pd"),
            ("X-Session-Id", "old", b"new"),
            ("x-bytes", "", b"\xff\xfe"),
            ("x-twice", "", b"1"),
            ("x-twice", "", b"2"),
            ("bad name", "x", b""),
            ("x-newline", "", b"a\nb"),
            (":authority", "", b"gateway"),
        ]));
        assert_eq!((head.method.as_str(), head.path.as_str()), ("POST", "/v1/completions?x=1"));
        assert_eq!(head.headers["routing-strategy"], "pd");
        assert_eq!(head.headers["x-session-id"], "new");
        assert_eq!(head.headers["x-bytes"].as_bytes(), b"\xff\xfe");
        assert_eq!(head.headers.get_all("x-twice").iter().count(), 2);
        assert_eq!(head.headers.len(), 5);
    }

    #[test]
    fn status_is_a_number_or_nothing() {
        assert_eq!(head(envoy(&[(":status", "", b"503")])).status, Some(503));
        assert_eq!(head(envoy(&[(":status", "abc", b"")])).status, None);
    }
}
