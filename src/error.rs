//! Why a request failed: one closed [`Reason`] for status, blame, marker header, metric label and client text.
//!
//! Inside the house every module has its own typed error. At the border to the client each becomes an [`ApiError`],
//! the one JSON error object that clients see (OpenAI's error shape).

use std::borrow::Cow;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

/// Who has to act on a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The client sent something that cannot work; retrying the same thing is pointless.
    Client,
    /// An engine failed or refused.
    Engine,
    /// The fleet has nothing that could serve the request now.
    Fleet,
    /// The gateway itself.
    Gateway,
}

/// Every way in which the gateway itself ends a request. Closed on purpose: it is a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The API key is missing or wrong.
    InvalidApiKey,
    /// The body is not usable: syntax, types, missing fields, duplicate controlled keys outside PD.
    BodyInvalid,
    /// The body names no model.
    ModelMissing,
    /// The body is larger than the configured limit.
    BodyTooLarge,
    /// Fewer or more body bytes arrived than `content-length` announced.
    BodyTruncated,
    /// The body did not arrive within the time that an upload may take (HTTP front only).
    BodyTimeout,
    /// The path is none of the endpoints.
    UnknownPath,
    /// The endpoint exists, but not for this method.
    MethodNotAllowed,
    /// A multipart body is not usable.
    MultipartInvalid,
    /// The body has a content coding, or a charset, that is not read.
    UnsupportedCoding,
    /// No pod of the fleet serves the model.
    ModelUnknown,
    /// Pods of the model exist, but none is routable.
    NoRoutablePods,
    /// The model is claimed by pods whose engines start, sleep or have failed.
    ModelNotUp,
    /// No strategy chooses a pod, and Envoy has no route of its own for the model.
    NoRoute,
    /// Nobody knows a stored response of this id, or the pod that had it is gone.
    ResponseUnknown,
    /// The routing strategy does not exist.
    BadStrategy,
    /// `external-filter` is not a label selector.
    BadFilter,
    /// The model takes no more requests in this second.
    RateLimited,
    /// The model's requests cannot be counted now.
    RateUncountable,
    /// The user does not exist, or its record cannot be read.
    UserUnknown,
    /// The user's requests cannot be counted now.
    UserUncountable,
    /// The user has had its requests of this minute.
    UserRequestsExceeded,
    /// The user has used up its tokens of this minute.
    UserTokensExceeded,
    /// A stream of a user whose tokens count does not say how many it took.
    UsageNotAsked,
    /// No target could be selected: an incomplete roleset, no matching bucket.
    SelectionFailed,
    /// Each pod that could serve the request has as many as its profile lets it have at a time.
    PodsSaturated,
    /// The request cannot be disaggregated: duplicate controlled keys, or a field that needs a pod which serves requests
    /// whole where there is none.
    InvalidPdRequest,
    /// The prefill pod answered 4xx: its status and message are passed on.
    PrefillRejected,
    /// The prefill leg failed: transport, timeout, 5xx, unusable answer.
    PrefillFailed,
    /// The prefill answer cannot be merged into the decode request.
    HandoffInvalid,
    /// The decode pod could not be reached or broke off before its response headers (HTTP front only; behind Envoy
    /// this is Envoy's own answer).
    DecodeFailed,
    /// The decode pod did not answer in time.
    DecodeTimeout,
    /// A limit of this replica is reached: streams or buffered bytes.
    Overloaded,
    /// This replica is shutting down.
    ShuttingDown,
    /// A defect of the gateway.
    Internal,
}

impl Reason {
    /// Every reason, for tables and tests.
    pub const ALL: [Reason; 35] = [
        Reason::InvalidApiKey,
        Reason::BodyInvalid,
        Reason::ModelMissing,
        Reason::BodyTooLarge,
        Reason::BodyTruncated,
        Reason::BodyTimeout,
        Reason::UnknownPath,
        Reason::MethodNotAllowed,
        Reason::MultipartInvalid,
        Reason::UnsupportedCoding,
        Reason::ModelUnknown,
        Reason::NoRoutablePods,
        Reason::ModelNotUp,
        Reason::NoRoute,
        Reason::ResponseUnknown,
        Reason::BadStrategy,
        Reason::BadFilter,
        Reason::RateLimited,
        Reason::RateUncountable,
        Reason::UserUnknown,
        Reason::UserUncountable,
        Reason::UserRequestsExceeded,
        Reason::UserTokensExceeded,
        Reason::UsageNotAsked,
        Reason::SelectionFailed,
        Reason::PodsSaturated,
        Reason::InvalidPdRequest,
        Reason::PrefillRejected,
        Reason::PrefillFailed,
        Reason::HandoffInvalid,
        Reason::DecodeFailed,
        Reason::DecodeTimeout,
        Reason::Overloaded,
        Reason::ShuttingDown,
        Reason::Internal,
    ];

    /// The HTTP status that the client gets unless the failure brings its own (a prefill pod's 4xx).
    pub fn status(self) -> StatusCode {
        match self {
            Reason::InvalidApiKey => StatusCode::UNAUTHORIZED,
            Reason::BodyInvalid
            | Reason::ModelMissing
            | Reason::BodyTruncated
            | Reason::MultipartInvalid
            | Reason::ModelUnknown
            | Reason::BadStrategy
            | Reason::BadFilter
            | Reason::UsageNotAsked
            | Reason::InvalidPdRequest
            | Reason::PrefillRejected => StatusCode::BAD_REQUEST,
            Reason::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Reason::UnsupportedCoding => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Reason::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Reason::RateLimited | Reason::UserRequestsExceeded | Reason::UserTokensExceeded | Reason::PodsSaturated => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Reason::ResponseUnknown => StatusCode::NOT_FOUND,
            Reason::UnknownPath => StatusCode::NOT_IMPLEMENTED,
            Reason::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Reason::NoRoutablePods
            | Reason::ModelNotUp
            | Reason::NoRoute
            | Reason::SelectionFailed
            | Reason::PrefillFailed
            | Reason::DecodeFailed
            | Reason::Overloaded
            | Reason::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
            Reason::HandoffInvalid => StatusCode::BAD_GATEWAY,
            Reason::DecodeTimeout => StatusCode::GATEWAY_TIMEOUT,
            // What the reference gateway answers (its section 8.5).
            Reason::RateUncountable | Reason::UserUnknown | Reason::UserUncountable | Reason::Internal => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        }
    }

    /// Who has to act.
    pub fn blame(self) -> Blame {
        match self {
            Reason::InvalidApiKey
            | Reason::BodyInvalid
            | Reason::ModelMissing
            | Reason::BodyTooLarge
            | Reason::BodyTruncated
            | Reason::BodyTimeout
            | Reason::UnknownPath
            | Reason::MethodNotAllowed
            | Reason::MultipartInvalid
            | Reason::UnsupportedCoding
            | Reason::ModelUnknown
            | Reason::ResponseUnknown
            | Reason::BadStrategy
            | Reason::BadFilter
            | Reason::RateLimited
            | Reason::UserRequestsExceeded
            | Reason::UserTokensExceeded
            | Reason::UsageNotAsked
            | Reason::InvalidPdRequest
            | Reason::PrefillRejected => Blame::Client,
            Reason::NoRoutablePods
            | Reason::ModelNotUp
            | Reason::NoRoute
            | Reason::SelectionFailed
            | Reason::PodsSaturated => Blame::Fleet,
            Reason::PrefillFailed | Reason::HandoffInvalid | Reason::DecodeFailed | Reason::DecodeTimeout => {
                Blame::Engine
            }
            Reason::RateUncountable
            | Reason::UserUnknown
            | Reason::UserUncountable
            | Reason::Overloaded
            | Reason::ShuttingDown
            | Reason::Internal => Blame::Gateway,
        }
    }

    /// The marker headers of the reference gateway (its section 1.8), without `x-error-no-model-backends`'s model
    /// name, which [`ApiError::with_header`] adds.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Reason::BodyInvalid
            | Reason::BodyTooLarge
            | Reason::BodyTruncated
            | Reason::BodyTimeout
            | Reason::UnsupportedCoding
            | Reason::UnknownPath
            | Reason::MethodNotAllowed => &["x-error-request-body-processing"],
            Reason::ModelMissing => &["x-error-request-body-processing", "x-error-no-model-in-request"],
            Reason::MultipartInvalid => &["x-error-multipart-parsing"],
            Reason::NoRoutablePods => &["x-error-no-model-backends"],
            Reason::BadStrategy => &["x-error-routing", "x-error-invalid-routing-strategy"],
            Reason::RateLimited => &["x-error-model-rps-exceeded"],
            Reason::PodsSaturated => &["x-error-model-replica-inflight-exceeded"],
            Reason::RateUncountable => &["x-error-incr-model-rps"],
            Reason::UserUnknown => &["x-error-user"],
            Reason::UserUncountable => &["x-error-incr-rpm"],
            Reason::UserRequestsExceeded => &["x-error-rpm-exceeded"],
            Reason::UserTokensExceeded => &["x-error-tpm-exceeded"],
            Reason::UsageNotAsked => &["x-error-no-stream-options-include-usage"],
            Reason::BadFilter | Reason::NoRoute | Reason::SelectionFailed | Reason::InvalidPdRequest => {
                &["x-error-routing"]
            }
            Reason::PrefillRejected | Reason::PrefillFailed => &["x-error-pd-prefill"],
            Reason::HandoffInvalid => &["x-error-pd-prefill", "x-error-routing"],
            Reason::DecodeFailed | Reason::DecodeTimeout => &["x-error-pd-decode"],
            Reason::InvalidApiKey
            | Reason::ModelUnknown
            | Reason::ResponseUnknown
            | Reason::ModelNotUp
            | Reason::Overloaded
            | Reason::ShuttingDown
            | Reason::Internal => &[],
        }
    }

    /// The `code` of the error object.
    pub fn code(self) -> Option<&'static str> {
        match self {
            Reason::InvalidApiKey => Some("invalid_api_key"),
            Reason::ModelUnknown => Some("model_not_found"),
            Reason::ResponseUnknown => Some("response_not_found"),
            Reason::RateLimited | Reason::UserRequestsExceeded | Reason::UserTokensExceeded => {
                Some("rate_limit_exceeded")
            }
            Reason::PodsSaturated => Some("replica_inflight_exceeded"),
            Reason::NoRoutablePods
            | Reason::ModelNotUp
            | Reason::NoRoute
            | Reason::SelectionFailed
            | Reason::Overloaded
            | Reason::ShuttingDown => Some("service_unavailable"),
            _ => None,
        }
    }

    /// The `type` of the error object, where it is not that of its status.
    fn error_type(self) -> Option<&'static str> {
        (self == Reason::PodsSaturated).then_some("overloaded_error")
    }

    /// The label under which `gateway_request_model_fail_total` counts it (the reference's names: the marker header
    /// plus `_fail`, or the phase).
    pub fn label(self) -> &'static str {
        match self {
            Reason::InvalidApiKey => "gateway_req_headers_fail",
            Reason::BodyInvalid | Reason::BodyTruncated | Reason::ModelMissing => {
                "x-error-request-body-processing_fail"
            }
            Reason::BodyTooLarge => "body_too_large",
            Reason::BodyTimeout => "body_timeout",
            Reason::UnsupportedCoding => "unsupported_coding",
            Reason::UnknownPath | Reason::MethodNotAllowed => "unknown_request_path",
            Reason::MultipartInvalid => "x-error-multipart-parsing_fail",
            Reason::ModelUnknown | Reason::NoRoutablePods | Reason::ModelNotUp => "x-error-no-model-backends_fail",
            Reason::ResponseUnknown => "response_unknown",
            Reason::BadStrategy => "x-error-invalid-routing-strategy_fail",
            Reason::RateLimited => "x-error-model-rps-exceeded_fail",
            Reason::PodsSaturated => "x-error-model-replica-inflight-exceeded_fail",
            Reason::RateUncountable => "x-error-incr-model-rps_fail",
            Reason::UserUnknown => "x-error-user_fail",
            Reason::UserUncountable => "x-error-incr-rpm_fail",
            Reason::UserRequestsExceeded => "x-error-rpm-exceeded_fail",
            Reason::UserTokensExceeded => "x-error-tpm-exceeded_fail",
            Reason::UsageNotAsked => "x-error-no-stream-options-include-usage_fail",
            Reason::BadFilter | Reason::NoRoute | Reason::SelectionFailed | Reason::InvalidPdRequest => {
                "x-error-routing_fail"
            }
            Reason::PrefillRejected => "pd_prefill_rejected",
            Reason::PrefillFailed | Reason::HandoffInvalid => "pd_prefill_failure",
            Reason::DecodeFailed => "pd_decode_failure",
            Reason::DecodeTimeout => "pd_decode_watchdog",
            Reason::Overloaded => "overloaded",
            Reason::ShuttingDown => "aibrix_gateway_server_shutdown",
            Reason::Internal => "internal",
        }
    }
}

/// The `type` of an error object for a status (the reference gateway's section 1.8).
pub fn error_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        400 | 404 | 405 | 408 | 413 | 415 | 422 => "invalid_request_error",
        401 => "authentication_error",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        _ => "api_error",
    }
}

/// A failure as the client sees it.
#[derive(Clone, Debug)]
pub struct ApiError {
    /// Why.
    pub reason: Reason,
    /// The status; [`Reason::status`] unless the failure brought its own.
    pub status: StatusCode,
    /// One sentence for the client. Never holds a prompt, a secret or an internal address.
    pub message: Cow<'static, str>,
    /// The request field at fault.
    pub param: Option<&'static str>,
    /// Headers beside the markers.
    extra: Vec<(HeaderName, HeaderValue)>,
    /// A ready body that replaces the JSON error object: a prefill pod's own 4xx answer, passed on as it is.
    verbatim: Option<(HeaderValue, Bytes)>,
}

impl ApiError {
    /// A failure with the reason's own status.
    pub fn new(reason: Reason, message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError {
            reason,
            status: reason.status(),
            message: message.into(),
            param: None,
            extra: Vec::new(),
            verbatim: None,
        }
    }

    /// Names the request field at fault.
    #[must_use]
    pub fn with_param(mut self, param: &'static str) -> ApiError {
        self.param = Some(param);
        self
    }

    /// Replaces the status.
    #[must_use]
    pub fn with_status(mut self, status: StatusCode) -> ApiError {
        self.status = status;
        self
    }

    /// Adds a header. Bytes that no header may carry are replaced, and the value is cut at 256 bytes, so that client
    /// text can be put here.
    #[must_use]
    pub fn with_header(mut self, name: &'static str, value: &str) -> ApiError {
        let clean: Vec<u8> =
            value.bytes().take(1024).map(|b| if (0x20..0x7f).contains(&b) { b } else { b'?' }).collect();
        if let Ok(value) = HeaderValue::from_bytes(&clean) {
            self.extra.push((HeaderName::from_static(name), value));
        }
        self
    }

    /// Adds headers that an engine sent and that are fit for the client.
    #[must_use]
    pub fn with_headers(mut self, headers: &HeaderMap) -> ApiError {
        self.extra.extend(headers.iter().map(|(name, value)| (name.clone(), value.clone())));
        self
    }

    /// Answers with these bytes instead of the JSON error object.
    #[must_use]
    pub fn with_verbatim_body(mut self, content_type: HeaderValue, body: Bytes) -> ApiError {
        self.verbatim = Some((content_type, body));
        self
    }

    /// All response headers: content type, markers, extras.
    pub fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let content_type = match &self.verbatim {
            Some((content_type, _)) => content_type.clone(),
            None => HeaderValue::from_static("application/json"),
        };
        headers.insert(CONTENT_TYPE, content_type);
        for marker in self.reason.markers() {
            headers.insert(HeaderName::from_static(marker), HeaderValue::from_static("true"));
        }
        if matches!(self.reason, Reason::Overloaded | Reason::ShuttingDown | Reason::RateLimited) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        for (name, value) in &self.extra {
            headers.insert(name.clone(), value.clone());
        }
        headers
    }

    /// The body: one JSON error object, or the verbatim bytes.
    pub fn body(&self) -> Bytes {
        if let Some((_, body)) = &self.verbatim {
            return body.clone();
        }
        let object = serde_json::json!({
            "error": {
                "message": self.message,
                "type": self.reason.error_type().unwrap_or_else(|| error_type(self.status)),
                "code": self.reason.code(),
                "param": self.param,
            }
        });
        Bytes::from(object.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_is_one_openai_error_object() {
        let error = ApiError::new(Reason::ModelUnknown, "model \"x\" does not exist").with_param("model");
        let body: serde_json::Value = serde_json::from_slice(&error.body()).unwrap();
        assert_eq!(
            body,
            serde_json::json!({"error": {"message": "model \"x\" does not exist", "type": "invalid_request_error",
                "code": "model_not_found", "param": "model"}})
        );
        assert_eq!(error.headers()[CONTENT_TYPE], "application/json");
    }

    #[test]
    fn header_values_from_clients_are_made_harmless() {
        let long = "é\r\nset-cookie: x".to_owned() + &"y".repeat(2000);
        let error = ApiError::new(Reason::ModelUnknown, "m").with_header("x-error-no-model-backends", &long);
        let value = error.headers()["x-error-no-model-backends"].clone();
        assert_eq!(value.len(), 1024);
        assert!(value.as_bytes().starts_with(b"????set-cookie"));
    }

    #[test]
    fn every_reason_is_complete() {
        for reason in Reason::ALL {
            assert!(reason.status().as_u16() >= 400, "{reason:?}");
            assert!(!reason.label().is_empty());
            let error = ApiError::new(reason, "text");
            for marker in reason.markers() {
                assert_eq!(error.headers()[*marker], "true");
            }
            let object: serde_json::Value = serde_json::from_slice(&error.body()).unwrap();
            assert_eq!(object["error"]["message"], "text");
        }
    }

    #[test]
    fn types_follow_the_status() {
        for (status, expected) in [
            (400, "invalid_request_error"),
            (404, "invalid_request_error"),
            (401, "authentication_error"),
            (429, "rate_limit_error"),
            (429, "rate_limit_error"),
            (503, "overloaded_error"),
            (500, "api_error"),
            (501, "api_error"),
            (504, "api_error"),
        ] {
            assert_eq!(error_type(StatusCode::from_u16(status).unwrap()), expected);
        }
    }
}
