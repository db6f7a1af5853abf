//! Scripted misbehaviour: what the next matching requests get instead of, or on top of, the usual answer.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// How a connection is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// TCP reset.
    Reset,
    /// An ordinary close (FIN) in the wrong place.
    Close,
}

/// Where and how to cut an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CutAfter {
    /// Chunks that still go out.
    pub chunks: u32,
    /// How.
    pub how: Cut,
}

/// An answer given word for word. Nothing is validated, queued or computed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scripted {
    /// Status.
    pub status: u16,
    /// Headers; `content-type` is up to the script.
    #[serde(default)]
    pub headers: Vec<(String, String)>,
    /// The body, each element its own write.
    #[serde(default, deserialize_with = "texts")]
    pub body: Vec<Bytes>,
    /// Whether the body goes out chunked instead of with a `content-length`.
    #[serde(default)]
    pub chunked: bool,
}

/// One scripted fault. Parts combine: a fault may delay the head *and* stall later.
///
/// A *chunk* is one SSE event of a stream, one scripted write, or one piece of a split body; a whole body that a cut or
/// stall must hit in its middle is sent as two halves.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fault {
    /// Prefix of the request paths it applies to.
    pub path: String,
    /// A header, name in lower case and value, that requests must carry for it to apply.
    pub header: Option<(String, String)>,
    /// Matching requests it applies to; `None` means all.
    pub times: Option<u32>,
    /// Matching requests that it lets through first.
    pub skip: u32,
    /// Wait before the request is worked on.
    #[serde(rename = "head_delay_ms", deserialize_with = "millis")]
    pub head_delay: Duration,
    /// Wait between the head and the first byte of the body.
    #[serde(rename = "first_byte_delay_ms", deserialize_with = "millis")]
    pub first_byte_delay: Duration,
    /// Never answer: the client hangs before the head.
    pub hang: bool,
    /// The engine dies when this request is read: unhealthy at once, all connections reset a moment later.
    pub crash: bool,
    /// The model ends with its first token and `finish_reason: "stop"`.
    pub ends_at_once: bool,
    /// An answer word for word.
    pub answer: Option<Scripted>,
    /// The scripted answer is given when the request has been worked on, in place of the real one (a stream is not run).
    pub after_work: bool,
    /// JSON that stands in a prefill answer as `kv_transfer_params`; nothing is pinned.
    pub kv_transfer_params: Option<Box<RawValue>>,
    /// A JSON object whose members are added to the real `kv_transfer_params` and replace members of the same name.
    pub kv_transfer_params_extra: Option<Box<RawValue>>,
    /// Cut the connection instead of answering.
    pub cut_before_head: Option<Cut>,
    /// Cut the connection inside the answer.
    pub cut_after: Option<CutAfter>,
    /// Send this many chunks, then nothing for ever.
    pub stall_after: Option<u32>,
    /// Send this many SSE events, then an error event and `[DONE]`.
    pub error_event_after: Option<u32>,
    /// Sizes of the pieces that the body (or each SSE event) is written in; the last size repeats.
    pub split: Vec<usize>,
    /// Pause between those pieces, for a slow body.
    #[serde(rename = "piece_pause_ms", deserialize_with = "millis")]
    pub piece_pause: Duration,
    /// Leave out the final `data: [DONE]`.
    pub omit_done: bool,
    /// Announce and close the connection after the answer.
    pub close_connection: bool,
    /// From now on this connection is closed after being idle so long.
    #[serde(rename = "idle_close_ms", deserialize_with = "some_millis")]
    pub idle_close: Option<Duration>,
}

impl Default for Fault {
    fn default() -> Fault {
        Fault::on("/")
    }
}

impl Fault {
    /// A fault for the next request whose path starts with `path`. It does nothing until a setter says what.
    pub fn on(path: &str) -> Fault {
        Fault {
            path: path.to_owned(),
            header: None,
            times: Some(1),
            skip: 0,
            head_delay: Duration::ZERO,
            first_byte_delay: Duration::ZERO,
            hang: false,
            crash: false,
            ends_at_once: false,
            answer: None,
            after_work: false,
            kv_transfer_params: None,
            kv_transfer_params_extra: None,
            cut_before_head: None,
            cut_after: None,
            stall_after: None,
            error_event_after: None,
            split: Vec::new(),
            piece_pause: Duration::ZERO,
            omit_done: false,
            close_connection: false,
            idle_close: None,
        }
    }

    /// Applies only to requests that carry this header: tests that share an engine do not disturb one another.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Fault {
        self.header = Some((name.to_ascii_lowercase(), value.to_owned()));
        self
    }

    /// Applies to `count` requests.
    #[must_use]
    pub fn times(mut self, count: u32) -> Fault {
        self.times = Some(count);
        self
    }

    /// Applies to every request.
    #[must_use]
    pub fn always(mut self) -> Fault {
        self.times = None;
        self
    }

    /// Lets `count` matching requests through first.
    #[must_use]
    pub fn skip(mut self, count: u32) -> Fault {
        self.skip = count;
        self
    }

    /// Answers with this status, content type and body.
    #[must_use]
    pub fn answer(self, status: u16, content_type: &str, body: impl Into<Bytes>) -> Fault {
        self.answer_raw(status, &[("content-type", content_type)], vec![body.into()], false)
    }

    /// Answers with these headers and this body, one write per element, with a length or chunked.
    #[must_use]
    pub fn answer_raw(mut self, status: u16, headers: &[(&str, &str)], body: Vec<Bytes>, chunked: bool) -> Fault {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        self.answer = Some(Scripted { status, headers, body, chunked });
        self
    }

    /// Answers 200 with something that is not JSON.
    #[must_use]
    pub fn bad_json(self) -> Fault {
        self.answer(200, "application/json", r#"{"choices":[{"index":0,"#)
    }

    /// Answers 200 with JSON in which every field has the wrong type.
    #[must_use]
    pub fn wrong_types(self) -> Fault {
        let body = r#"{"id":7,"choices":"none","usage":[],"kv_transfer_params":"oops","prompt_token_ids":{}}"#;
        self.answer(200, "application/json", body)
    }

    /// Gives the scripted answer only when the request has been worked on.
    #[must_use]
    pub fn after_work(mut self) -> Fault {
        self.after_work = true;
        self
    }

    /// Never answers.
    #[must_use]
    pub fn hang(mut self) -> Fault {
        self.hang = true;
        self
    }

    /// Kills the engine.
    #[must_use]
    pub fn crash(mut self) -> Fault {
        self.crash = true;
        self
    }

    /// Ends generation with the first token.
    #[must_use]
    pub fn ends_at_once(mut self) -> Fault {
        self.ends_at_once = true;
        self
    }

    /// Writes the body (or each SSE event) `size` bytes at a time, with a pause after each.
    #[must_use]
    pub fn slow_bytes(mut self, size: usize, pause: Duration) -> Fault {
        self.split = vec![size];
        self.piece_pause = pause;
        self
    }

    /// Answers 200 with an event stream made of exactly these writes.
    #[must_use]
    pub fn stream(self, writes: Vec<Bytes>) -> Fault {
        self.answer_raw(200, &[("content-type", "text/event-stream; charset=utf-8")], writes, true)
    }

    /// Waits before the request is worked on.
    #[must_use]
    pub fn head_delay(mut self, delay: Duration) -> Fault {
        self.head_delay = delay;
        self
    }

    /// Waits between the head and the first byte.
    #[must_use]
    pub fn first_byte_delay(mut self, delay: Duration) -> Fault {
        self.first_byte_delay = delay;
        self
    }

    /// Replaces the hand-off of a prefill answer by `json`.
    ///
    /// # Errors
    /// When `json` is not JSON; use [`Fault::answer`] for an answer that is not.
    pub fn kv_transfer_params(mut self, json: &str) -> serde_json::Result<Fault> {
        self.kv_transfer_params = Some(serde_json::from_str(json)?);
        Ok(self)
    }

    /// Adds the members of the object `json` to the real hand-off.
    ///
    /// # Errors
    /// When `json` is not JSON.
    pub fn kv_transfer_params_extra(mut self, json: &str) -> serde_json::Result<Fault> {
        self.kv_transfer_params_extra = Some(serde_json::from_str(json)?);
        Ok(self)
    }

    /// Cuts instead of answering.
    #[must_use]
    pub fn cut_before_head(mut self, how: Cut) -> Fault {
        self.cut_before_head = Some(how);
        self
    }

    /// Cuts after `chunks` chunks.
    #[must_use]
    pub fn cut_after(mut self, chunks: u32, how: Cut) -> Fault {
        self.cut_after = Some(CutAfter { chunks, how });
        self
    }

    /// Stalls for ever after `chunks` chunks.
    #[must_use]
    pub fn stall_after(mut self, chunks: u32) -> Fault {
        self.stall_after = Some(chunks);
        self
    }

    /// Sends an error event after `events` events.
    #[must_use]
    pub fn error_event_after(mut self, events: u32) -> Fault {
        self.error_event_after = Some(events);
        self
    }

    /// Writes the body in pieces of these sizes.
    #[must_use]
    pub fn split(mut self, sizes: &[usize]) -> Fault {
        self.split = sizes.to_vec();
        self
    }

    /// Leaves `[DONE]` out.
    #[must_use]
    pub fn omit_done(mut self) -> Fault {
        self.omit_done = true;
        self
    }

    /// Closes the connection after the answer.
    #[must_use]
    pub fn close_connection(mut self) -> Fault {
        self.close_connection = true;
        self
    }

    /// Closes the connection when it was idle for `idle`.
    #[must_use]
    pub fn idle_close(mut self, idle: Duration) -> Fault {
        self.idle_close = Some(idle);
        self
    }
}

/// The faults of one engine, in the order in which they were scripted.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    list: Mutex<Vec<Fault>>,
}

impl Faults {
    /// Adds a fault; false when the book is full.
    pub fn add(&self, fault: Fault, most: usize) -> bool {
        let mut list = self.lock();
        if list.len() >= most {
            return false;
        }
        list.push(fault);
        true
    }

    pub fn clear(&self) {
        self.lock().clear();
    }

    /// The fault for a request to `path`: the first that matches and has nothing more to skip.
    pub fn take(&self, path: &str, headers: &HeaderMap) -> Option<Fault> {
        let mut list = self.lock();
        let mut found = None;
        for (place, fault) in list.iter_mut().enumerate() {
            let wanted = |(name, value): &(String, String)| {
                headers.get(name.as_str()).is_some_and(|given| given.as_bytes() == value.as_bytes())
            };
            if !path.starts_with(&fault.path) || !fault.header.as_ref().is_none_or(wanted) {
                continue;
            }
            if fault.skip > 0 {
                fault.skip -= 1;
                continue;
            }
            match &mut fault.times {
                Some(0) => continue,
                Some(left) => *left -= 1,
                None => (),
            }
            found = Some((place, fault.clone()));
            break;
        }
        let (place, fault) = found?;
        if fault.times == Some(0) {
            list.remove(place);
        }
        Some(fault)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Fault>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cuts `bytes` into pieces of `sizes`; the last size repeats, sizes of 0 count as 1.
pub(crate) fn pieces(mut bytes: Bytes, sizes: &[usize]) -> Vec<Bytes> {
    let Some(last) = sizes.last() else { return vec![bytes] };
    let mut pieces = Vec::new();
    let mut sizes = sizes.iter();
    while !bytes.is_empty() {
        let size = (*sizes.next().unwrap_or(last)).clamp(1, bytes.len());
        pieces.push(bytes.split_to(size));
    }
    pieces
}

fn millis<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    u64::deserialize(deserializer).map(Duration::from_millis)
}

fn some_millis<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    Ok(Option::<u64>::deserialize(deserializer)?.map(Duration::from_millis))
}

fn texts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Bytes>, D::Error> {
    Ok(Vec::<String>::deserialize(deserializer)?.into_iter().map(Bytes::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_may_be_for_the_requests_of_one_test() {
        let faults = Faults::default();
        assert!(faults.add(Fault::on("/v1").header("X-Cell", "7").hang(), 9));
        let headers = |value| HeaderMap::from_iter([(http::HeaderName::from_static("x-cell"), value)]);
        let seven = headers(http::HeaderValue::from_static("7"));
        assert!(faults.take("/v1/models", &HeaderMap::new()).is_none());
        assert!(faults.take("/v1/models", &headers(http::HeaderValue::from_static("77"))).is_none());
        assert!(faults.take("/health", &seven).is_none());
        assert!(faults.take("/v1/models", &seven).is_some_and(|fault| fault.hang));
        assert!(faults.take("/v1/models", &seven).is_none(), "once");
    }

    #[test]
    fn faults_apply_in_order_and_run_out() {
        let faults = Faults::default();
        assert!(faults.add(Fault::on("/v1/chat").answer(500, "text/plain", "a").times(2).skip(1), 9));
        assert!(faults.add(Fault::on("/v1").answer(501, "text/plain", "b"), 9));
        assert!(faults.add(Fault::on("/metrics").omit_done().always(), 3));
        assert!(!faults.add(Fault::on("/"), 3), "the book is full");
        let status =
            |path| faults.take(path, &HeaderMap::new()).and_then(|fault| fault.answer).map(|answer| answer.status);
        assert_eq!(status("/v1/chat/completions"), Some(501), "skipped by the first, taken by the second");
        assert_eq!(status("/v1/completions"), None);
        assert_eq!(status("/v1/chat/completions"), Some(500));
        assert_eq!(status("/v1/chat/completions"), Some(500));
        assert_eq!(status("/v1/chat/completions"), None);
        assert!(faults.take("/metrics", &HeaderMap::new()).is_some_and(|fault| fault.omit_done));
        assert!(faults.take("/metrics", &HeaderMap::new()).is_some());
        faults.clear();
        assert!(faults.take("/metrics", &HeaderMap::new()).is_none());
    }

    #[test]
    fn pieces_join_to_the_whole() {
        let whole = Bytes::from_static(b"abcdefg");
        for (sizes, expected) in [
            (vec![], vec!["abcdefg"]),
            (vec![3], vec!["abc", "def", "g"]),
            (vec![1, 2], vec!["a", "bc", "de", "fg"]),
            (vec![0, 100], vec!["a", "bcdefg"]),
        ] {
            assert_eq!(pieces(whole.clone(), &sizes), expected, "{sizes:?}");
        }
        assert!(pieces(Bytes::new(), &[1]).is_empty());
    }

    #[test]
    fn faults_come_as_json_too() {
        let fault: Fault = serde_json::from_str(
            r#"{"path":"/v1","times":null,"head_delay_ms":5,"idle_close_ms":7,"cut_after":{"chunks":2,"how":"reset"},
                "answer":{"status":503,"body":["a","b"]},"kv_transfer_params":{"x":12345678901234567890123}}"#,
        )
        .expect("a fault");
        assert_eq!((fault.times, fault.head_delay, fault.skip), (None, Duration::from_millis(5), 0));
        assert_eq!(fault.cut_after, Some(CutAfter { chunks: 2, how: Cut::Reset }));
        assert_eq!(fault.kv_transfer_params.expect("kept").get(), r#"{"x":12345678901234567890123}"#);
        let short: Fault = serde_json::from_str(r#"{"path":"/v1"}"#).expect("a fault");
        assert_eq!(short.times, Some(1));
        assert!(serde_json::from_str::<Fault>(r#"{"pathh":"/v1"}"#).is_err());
    }
}
