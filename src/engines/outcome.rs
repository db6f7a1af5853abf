//! What a prefill outcome means for the client (design section 4; `engine-protocols` section 1.4).

use bytes::Bytes;
use http::{HeaderValue, StatusCode};

use super::errors::{CUT, MAX_MESSAGE_BYTES, cut_message, error_message};
use super::leg::{LegFailure, LegOutcome};
use super::lookup::LookupError;
use crate::error::{ApiError, Reason};
use crate::request::scan::JsonObject;

/// A prefill pod's own error object up to this size is passed on as it is.
const MAX_VERBATIM_BYTES: usize = 64 * 1024;

/// The answer to merge, or what the client gets instead. A 4xx is the client's own error and passes through once; all
/// else is a 503.
pub fn accept_prefill(outcome: &LegOutcome) -> Result<&Bytes, ApiError> {
    match outcome {
        LegOutcome::Answered { status: StatusCode::OK, body, .. } => Ok(body),
        LegOutcome::Answered { status, advice, body } if status.is_client_error() => {
            Err(rejected(*status, body).with_headers(advice))
        }
        LegOutcome::Answered { status, advice, body } => {
            let said = error_message(body).unwrap_or_else(|| format!("status {}", status.as_u16()));
            Err(failed(LegFailure::HttpStatus, &said).with_headers(advice))
        }
        LegOutcome::Failed { class, detail, .. } => Err(failed(*class, detail)),
    }
}

/// The class in which a prefill leg failed; `None` when it did what it was asked for: a 200 with a JSON object. Where
/// nobody needs the object, [`super::Protocol::survives_bad_response`] says that a `bad_response` is no failure.
pub fn failure_of(outcome: &LegOutcome) -> Option<LegFailure> {
    match outcome {
        LegOutcome::Answered { status: StatusCode::OK, body, .. } if JsonObject::parse(body).is_ok() => None,
        _ => Some(outcome.failure_class()),
    }
}

/// What the client gets when the prefill leg failed while the decode leg, which was sent along with it, has not answered
/// (`engine-protocols` section 1.4): the pod's own status where it is an error that Envoy has a name for, 502 for any
/// other, 503 when there was no answer. The text is the message only; a 4xx of TensorRT-LLM in particular proves no
/// mistake of the client.
pub fn concurrent_failure(outcome: &LegOutcome) -> ApiError {
    let class = outcome.failure_class();
    match outcome {
        LegOutcome::Failed { detail, .. } => failed(class, detail),
        LegOutcome::Answered { status: StatusCode::OK, .. } => failed(class, "the answer is not a JSON object"),
        LegOutcome::Answered { status, advice, body } => {
            let said = error_message(body).unwrap_or_else(|| format!("status {}", status.as_u16()));
            let passed = if is_known_error(status.as_u16()) { *status } else { StatusCode::BAD_GATEWAY };
            failed(class, &said).with_status(passed).with_headers(advice)
        }
    }
}

/// What the client gets when a prefill pod could not be asked what the legs need to know. Neither was sent.
pub fn lookup_failure(error: &LookupError) -> ApiError {
    failed(error.class(), &error.to_string())
}

/// The errors among the statuses that Envoy sends in answers of its own (its `StatusCode` enumeration).
fn is_known_error(status: u16) -> bool {
    matches!(status, 400..=417 | 421..=424 | 426 | 428 | 429 | 431 | 500..=508 | 510 | 511)
}

fn rejected(status: StatusCode, body: &Bytes) -> ApiError {
    let message = error_message(body).unwrap_or_else(|| format!("the prefill pod answered {}", status.as_u16()));
    let error = ApiError::new(Reason::PrefillRejected, message).with_status(status);
    // An OpenAI error object stays byte for byte; any other shape becomes one.
    if body.len() <= MAX_VERBATIM_BYTES && is_openai_error(body) {
        return error.with_verbatim_body(HeaderValue::from_static("application/json"), body.clone());
    }
    error
}

fn is_openai_error(body: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(body)
        .is_ok_and(|value| value.get("error").is_some_and(|error| error.get("message").is_some()))
}

fn failed(class: LegFailure, detail: &str) -> ApiError {
    ApiError::new(Reason::PrefillFailed, failure_text(class, detail))
}

/// `prefill request failed (<class>): <text>`, the text cut to 256 bytes as in the reference gateway.
pub fn failure_text(class: LegFailure, detail: &str) -> String {
    let class = class.label();
    // What was cut before has its mark.
    let said = detail.strip_suffix(CUT).filter(|said| said.len() <= MAX_MESSAGE_BYTES);
    match said {
        Some(_) => format!("prefill request failed ({class}): {detail}"),
        None => format!("prefill request failed ({class}): {}", cut_message(detail)),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;

    use super::*;

    fn answered(status: u16, body: &'static str) -> LegOutcome {
        LegOutcome::Answered {
            status: StatusCode::from_u16(status).unwrap(),
            advice: HeaderMap::new(),
            body: Bytes::from_static(body.as_bytes()),
        }
    }

    #[test]
    fn statuses() {
        let openai = r#"{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}"#;
        assert!(accept_prefill(&answered(200, "{}")).is_ok());
        for (status, body, seen, reason, text) in [
            (400, openai, 400, Reason::PrefillRejected, "too long"),
            (404, r#"{"detail":"Not Found"}"#, 404, Reason::PrefillRejected, "Not Found"),
            (422, "", 422, Reason::PrefillRejected, "the prefill pod answered 422"),
            (429, r#"{"object":"error","message":"slow"}"#, 429, Reason::PrefillRejected, "slow"),
            (500, openai, 503, Reason::PrefillFailed, "prefill request failed (http_status): too long"),
            (204, "", 503, Reason::PrefillFailed, "prefill request failed (http_status): status 204"),
            (302, "", 503, Reason::PrefillFailed, "prefill request failed (http_status): status 302"),
        ] {
            let error = accept_prefill(&answered(status, body)).unwrap_err();
            assert_eq!((error.status.as_u16(), error.reason, &*error.message), (seen, reason, text), "{status} {body}");
            assert_eq!(error.headers()["x-error-pd-prefill"], "true");
        }
        assert_eq!(accept_prefill(&answered(400, openai)).unwrap_err().body(), openai);
    }

    #[test]
    fn failure_texts_are_cut_at_a_character() {
        assert_eq!(failure_text(LegFailure::Timeout, "x"), "prefill request failed (timeout): x");
        let text = failure_text(LegFailure::HttpStatus, &"é".repeat(200));
        assert!(text.ends_with("é..."), "{text}");
        assert!(text.len() <= 256 + 45);
        let refused = LegOutcome::Failed { class: LegFailure::Transport, detail: "refused".into(), sent: false };
        assert_eq!(accept_prefill(&refused).unwrap_err().status.as_u16(), 503);
    }

    #[test]
    fn interop_21_a_leg_sent_along_keeps_the_pods_status_and_says_why() {
        let openai = r#"{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}"#;
        let text = |rest: &str| format!("prefill request failed (http_status): {rest}");
        for (status, body, seen, expected) in [
            (400, openai, 400, text("too long")),
            (429, "", 429, text("status 429")),
            (500, r#"{"object":"error","message":"boom"}"#, 500, text("boom")),
            (503, "busy", 503, text("busy")),
            (511, "", 511, text("status 511")),
            (204, "", 502, text("status 204")),
            (302, "", 502, text("status 302")),
            (418, "", 502, text("status 418")),
            (451, "", 502, text("status 451")),
            (499, "", 502, text("status 499")),
            (520, "", 502, text("status 520")),
            (200, "oops", 503, "prefill request failed (bad_response): the answer is not a JSON object".into()),
        ] {
            let error = concurrent_failure(&answered(status, body));
            assert_eq!((error.status.as_u16(), &*error.message), (seen, &*expected), "{status} {body}");
            assert_eq!(error.headers()["x-error-pd-prefill"], "true");
            assert_eq!(error.reason, Reason::PrefillFailed);
            assert!(serde_json::from_slice::<serde_json::Value>(&error.body()).unwrap()["error"].is_object());
        }
        for class in [LegFailure::Timeout, LegFailure::Transport, LegFailure::Canceled, LegFailure::RequestSetup] {
            let error = concurrent_failure(&LegOutcome::Failed { class, detail: "why".into(), sent: true });
            assert_eq!(error.status.as_u16(), 503);
            assert_eq!(error.message, format!("prefill request failed ({}): why", class.label()));
        }
        let long = "x".repeat(300).leak();
        assert!(concurrent_failure(&answered(500, long)).message.len() <= 256 + 45);
    }

    #[test]
    fn what_a_refusal_says_about_trying_again_reaches_the_client() {
        let given = |status: u16| {
            let mut headers = HeaderMap::new();
            for (name, value) in [
                ("retry-after", "17"),
                ("retry-after-ms", "16500"),
                ("x-should-retry", "true"),
                ("ratelimit", "limit=10, remaining=0, reset=17"),
                ("ratelimit-policy", "10;w=60"),
                ("ratelimit-remaining", "0"),
                ("x-ratelimit-limit-requests", "10"),
                ("x-ratelimit-reset-tokens", "6m0s"),
                ("anthropic-ratelimit-requests-reset", "2026-12-01T00:00:00Z"),
                ("content-type", "application/json"),
                ("server", "uvicorn"),
                ("set-cookie", "a=b"),
                ("x-request-id", "theirs"),
            ] {
                headers.append(name, HeaderValue::from_static(value));
            }
            let advice = super::super::leg::advice(&headers);
            assert_eq!(advice.len(), 9, "{advice:?}");
            LegOutcome::Answered { status: StatusCode::from_u16(status).unwrap(), advice, body: Bytes::new() }
        };
        for status in [429, 503, 500] {
            for error in [accept_prefill(&given(status)).unwrap_err(), concurrent_failure(&given(status))] {
                let headers = error.headers();
                for (name, value) in
                    [("retry-after", "17"), ("ratelimit-policy", "10;w=60"), ("x-ratelimit-reset-tokens", "6m0s")]
                {
                    assert_eq!(headers[name], value, "{status}");
                }
                assert!(!headers.contains_key("server") && !headers.contains_key("set-cookie"));
            }
        }
    }

    #[test]
    fn advice_is_bounded() {
        let mut headers = HeaderMap::new();
        let long = "x".repeat(257);
        headers.insert("retry-after", HeaderValue::from_str(&long).unwrap());
        assert!(super::super::leg::advice(&headers).is_empty());
        for number in 0..40 {
            let name = http::HeaderName::from_bytes(format!("x-ratelimit-{number}").as_bytes()).unwrap();
            headers.insert(name, HeaderValue::from_static("1"));
        }
        assert_eq!(super::super::leg::advice(&headers).len(), 16);
    }

    #[test]
    fn the_statuses_passed_on_are_those_that_envoy_knows() {
        use envoy_types::pb::envoy::r#type::v3::StatusCode as Known;
        for status in 400..600 {
            assert_eq!(is_known_error(status), Known::try_from(i32::from(status)).is_ok(), "{status}");
        }
    }

    #[test]
    fn interop_23_an_unreadable_200_is_a_failure_of_its_own_class() {
        for (outcome, expected) in [
            (answered(200, "{}"), None),
            (answered(200, " {\"a\":[1]}\n"), None),
            (answered(200, "[]"), Some(LegFailure::BadResponse)),
            (answered(200, ""), Some(LegFailure::BadResponse)),
            (answered(200, "{\"cut"), Some(LegFailure::BadResponse)),
            (answered(201, "{}"), Some(LegFailure::HttpStatus)),
            (answered(404, "{}"), Some(LegFailure::HttpStatus)),
            (
                LegOutcome::Failed { class: LegFailure::Timeout, detail: String::new(), sent: true },
                Some(LegFailure::Timeout),
            ),
        ] {
            assert_eq!(failure_of(&outcome), expected, "{outcome:?}");
        }
    }

    #[test]
    fn interop_33_a_failed_question_is_told_as_a_failed_prefill() {
        use crate::engines::trtllm::ServerInfoError;
        for (error, message) in [
            (LookupError::Status(StatusCode::FOUND), "prefill request failed (http_status): status 302"),
            (
                LookupError::ServerInfo(ServerInfoError::NoRank),
                "prefill request failed (bad_response): /server_info: ctx_dp_rank is not an integer of at least 0",
            ),
            (
                LookupError::Failed { class: LegFailure::Timeout, detail: "no answer within 3 s".into() },
                "prefill request failed (timeout): no answer within 3 s",
            ),
        ] {
            let failure = lookup_failure(&error);
            assert_eq!((failure.status.as_u16(), &*failure.message), (503, message));
        }
    }
}
