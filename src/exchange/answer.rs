//! The answer as it goes by, and what the gateway adds to its head.

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::event::AnswerHead;
use crate::clock::Tick;
use crate::error::{ApiError, Reason};
use crate::knobs::Secret;
use crate::request::credential;
use crate::response::{AnswerKind, AnswerWatch, Api};
use crate::telemetry::{Outcome, RequestRecord};

/// The answer header that names the profile which `config-profile: auto` came to.
pub const CHOSEN_PROFILE: &str = "x-aibrix-config-profile";

/// The answer of the decode (or single) pod.
#[derive(Debug)]
pub struct Answer {
    status: StatusCode,
    kind: AnswerKind,
    announced: Option<u64>,
    watch: AnswerWatch,
    bytes: u64,
    /// What is held back, with its head; `None` once it goes by as it comes.
    held: Option<Vec<Bytes>>,
    held_bytes: usize,
    /// It is held until something was generated.
    until_content: bool,
}

/// More than this is not held back, whatever it says.
const MAX_HELD_BYTES: usize = 64 * 1024;

impl Answer {
    /// An answer whose head has arrived.
    pub fn new(head: &AnswerHead, requested_stream: bool, api: Api) -> Answer {
        let header = |name: HeaderName| head.headers.get(name).and_then(|value| value.to_str().ok());
        let kind = AnswerKind::of(header(CONTENT_TYPE), header(CONTENT_ENCODING), requested_stream);
        let announced = header(CONTENT_LENGTH).and_then(|value| value.parse().ok());
        Answer {
            status: head.status,
            kind,
            announced,
            watch: AnswerWatch::new(kind, api),
            bytes: 0,
            held: None,
            held_bytes: 0,
            until_content: false,
        }
    }

    /// Looks at the next bytes.
    pub fn feed(&mut self, data: &[u8], now: Tick, record: &mut RequestRecord) {
        if data.is_empty() {
            return;
        }
        self.bytes += data.len() as u64;
        record.answer_bytes = self.bytes;
        record.timings.first_chunk.get_or_insert(now);
        record.timings.last_chunk = Some(now);
        self.watch.feed(data);
    }

    /// Whether its head can wait for the first thing generated: a stream that has begun well.
    pub fn can_be_held(&self) -> bool {
        self.kind == AnswerKind::Stream && self.status.is_success()
    }

    /// Holds it back from now on: until something was generated, or only until something comes behind the head.
    pub fn hold(&mut self, until_content: bool) {
        self.held = Some(Vec::new());
        self.until_content = until_content;
    }

    /// Nothing of it has been passed on, nor may be yet.
    pub fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// The same, until something was generated.
    pub fn is_held_for_content(&self) -> bool {
        self.held.is_some() && self.until_content
    }

    /// Holds these bytes back too.
    pub fn keep(&mut self, data: Bytes) {
        if let Some(held) = &mut self.held {
            self.held_bytes += data.len();
            held.push(data);
        }
    }

    /// What was held back, once there is no reason any more: something was generated, or it is over.
    pub fn release(&mut self, end: bool) -> Option<Vec<Bytes>> {
        let ready =
            end || !self.until_content || self.watch.content() || self.watch.done() || self.held_bytes > MAX_HELD_BYTES;
        if ready { self.held.take() } else { None }
    }

    /// Body bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A counter that grows with every sign of work.
    pub fn progress(&self) -> u64 {
        self.watch.progress()
    }

    /// The pod has answered: the first event of a stream, or the head of any other answer, which an engine sends when it
    /// is done. (A stream's head comes before the first token, or before the KV cache.)
    pub fn has_begun(&self) -> bool {
        self.kind != AnswerKind::Stream || self.watch.progress() > 0
    }

    /// A stream reported an error, or that it was aborted.
    pub fn has_failed(&self) -> bool {
        self.kind == AnswerKind::Stream && self.watch.error_event()
    }

    /// The same, by the event with which the API itself ends a failed answer.
    pub fn has_failed_as_documented(&self) -> bool {
        self.has_failed() && self.watch.failed_as_documented()
    }

    /// Where the event that said so ends.
    pub fn error_end(&self) -> Option<u64> {
        self.watch.error_end().filter(|_| self.kind == AnswerKind::Stream)
    }

    /// Reads what is left, of an answer that nobody gets.
    pub fn finish_reading(&mut self, record: &mut RequestRecord) {
        self.watch.finish();
        record.usage = None;
    }

    /// The engine has generated something: more than the opening of a message and an error, or usage of it.
    pub fn has_content(&self) -> bool {
        match self.kind {
            AnswerKind::Stream => self.watch.content() || self.watch.usage().is_some(),
            AnswerKind::Whole | AnswerKind::Opaque => self.bytes > 0,
        }
    }

    /// The client has all that it waits for, whether or not the transport has said so.
    pub fn complete(&self) -> bool {
        match self.kind {
            AnswerKind::Stream => self.watch.done(),
            AnswerKind::Whole | AnswerKind::Opaque => self.announced == Some(self.bytes),
        }
    }

    /// No more comes: reads what is left.
    pub fn read_to_end(&mut self) {
        self.watch.finish();
    }

    /// The id of the response that it brings, once that is known; of the Responses API.
    pub fn response_id(&self) -> Option<&str> {
        self.watch.response_id().filter(|_| self.status.is_success())
    }

    /// The answer is over: reads what is left of its usage and judges it.
    pub fn finish(mut self, record: &mut RequestRecord) -> Outcome {
        self.watch.finish();
        record.usage = self.watch.usage();
        if self.status.as_u16() >= 300 {
            Outcome::EngineStatus(self.status.as_u16())
        } else if self.watch.error_event() {
            Outcome::EngineErrorEvent
        } else {
            Outcome::Success
        }
    }
}

/// Envoy's own answer when it could not connect: a 503 that no server has spoken. A server with a clock dates what it says
/// (RFC 9110, section 6.6.1), and Envoy names the time that its answer took, unless told not to; what Envoy makes itself has
/// neither when filters see it. (Its type and body are whatever `local_reply_config` makes of it.)
pub fn is_connect_failure(head: &AnswerHead) -> bool {
    let spoken =
        ["date", "server", "x-envoy-upstream-service-time"].iter().any(|name| head.headers.contains_key(*name));
    head.status == StatusCode::SERVICE_UNAVAILABLE && !spoken
}

/// The response headers of the reference gateway (its section 1.6). On the response side `target-pod` is a pod
/// *name* and `target-pod-ip` its address; on the request side `target-pod` is the address.
pub fn marker_headers(record: &RequestRecord, address: Option<&str>, prefill_host: Option<&str>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let mut set = |name: &'static str, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    };
    set("x-went-into-req-headers", "true");
    set("request-id", &record.request_id);
    if let Some(id) = &record.client_request_id {
        set("x-request-id", id);
    }
    if let (Some(pod), Some(address)) = (&record.target_pod, address) {
        // None chose the pod of a stored response.
        if let Some(strategy) = &record.strategy {
            set("routing-strategy", strategy);
        }
        set("target-pod", pod_name(&pod.pod));
        set("target-pod-ip", address);
    }
    if let Some(prefill) = &record.prefill_pod {
        set("prefill-target-pod", pod_name(&prefill.pod));
        set("prefill-target-pod-ip", prefill_host.unwrap_or_default());
    }
    headers
}

/// A pod's own name, of any of its data-parallel endpoints.
fn pod_name(endpoint: &str) -> &str {
    endpoint.split_once('/').map_or(endpoint, |(pod, _)| pod)
}

/// Where clients of the Messages API send their key.
pub const X_API_KEY: &str = "x-api-key";

/// Checks `Authorization: Bearer <token>` when a token is configured (reference section 1.3); of the Messages API,
/// `x-api-key: <token>` will do.
pub fn check_api_key(token: Option<&Secret>, messages: bool, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(token) = token else { return Ok(()) };
    let key = headers.get(X_API_KEY).filter(|_| messages).map(|key| key.as_bytes().trim_ascii());
    if token.is(credential(headers, "bearer").unwrap_or_default()) || key.is_some_and(|key| token.is(key)) {
        return Ok(());
    }
    Err(ApiError::new(Reason::InvalidApiKey, "Incorrect API key provided").with_param("api_key"))
}

#[cfg(test)]
mod tests {
    use http::header::AUTHORIZATION;

    use super::*;

    fn with_authorization(value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, HeaderValue::from_str(value).unwrap());
        headers
    }

    #[test]
    fn only_envoy_itself_does_not_date_its_answers() {
        let head = |status: u16, names: &[&'static str]| {
            let headers =
                names.iter().map(|name| (HeaderName::from_static(name), HeaderValue::from_static("x"))).collect();
            AnswerHead { status: StatusCode::from_u16(status).unwrap(), headers, end: false }
        };
        assert!(is_connect_failure(&head(503, &["content-type", "content-length"])));
        for (status, names) in [
            (503, ["content-type", "date"]),
            (503, ["content-type", "server"]),
            (503, ["content-type", "x-envoy-upstream-service-time"]),
            (502, ["content-type", "content-length"]),
        ] {
            assert!(!is_connect_failure(&head(status, &names)), "{status} {names:?}");
        }
    }

    #[test]
    fn api_keys() {
        let token = Secret::new("s3cret");
        for good in ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret "] {
            assert!(check_api_key(Some(&token), false, &with_authorization(good)).is_ok(), "{good}");
        }
        for bad in ["Bearer s3cre", "Bearer s3crett", "Bearer", "Basic s3cret", "s3cret", "Bearer "] {
            let error = check_api_key(Some(&token), true, &with_authorization(bad)).unwrap_err();
            assert_eq!(error.status, StatusCode::UNAUTHORIZED, "{bad}");
        }
        assert!(check_api_key(Some(&token), true, &HeaderMap::new()).is_err());
        assert!(check_api_key(None, false, &HeaderMap::new()).is_ok());
        for (key, messages, good) in
            [("s3cret", true, true), (" s3cret ", true, true), ("s3cre", true, false), ("s3cret", false, false)]
        {
            let mut headers = HeaderMap::new();
            headers.insert(X_API_KEY, HeaderValue::from_str(key).unwrap());
            assert_eq!(check_api_key(Some(&token), messages, &headers).is_ok(), good, "{key}");
        }
    }
}
