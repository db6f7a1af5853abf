//! What every request looked like on arrival, and how it ended.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use http::request::Parts;
use serde::Serialize;
use tokio::time::Instant;
use xxhash_rust::xxh64::xxh64;

use crate::ambient;
use crate::config::Limits;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The whole answer was handed to the connection.
    Completed,
    /// The client closed or half-closed its connection first.
    ClientGone,
    /// A scripted fault cut the connection.
    Reset,
    /// The engine died.
    Killed,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Record {
    /// Arrival order, from 0.
    pub seq: u64,
    /// Method.
    pub method: String,
    /// Path with query.
    pub path: String,
    /// Headers in the order of arrival, names in lower case, values as lossy text.
    pub headers: Vec<(String, String)>,
    /// The body; empty when it was longer than the limit or aged out (see [`Record::body_length`]).
    pub body: Bytes,
    /// Bytes the body had; 0 until it was read.
    pub body_length: usize,
    /// XXH64 of the body with seed 0.
    pub body_hash: u64,
    /// When the head arrived.
    pub received_at: Instant,
    /// The answer's status, once it is known.
    pub status: Option<u16>,
    /// When and how it ended.
    pub end: Option<(Instant, End)>,
    /// Whether another live request carried the same `X-Request-Id` at arrival.
    pub duplicate_id: bool,
}

impl Record {
    /// The first header called `name` (lower case).
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The body as JSON; null when it is not JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// How it ended, if it did.
    pub fn ended(&self) -> Option<End> {
        self.end.map(|(_, end)| end)
    }
}

#[derive(Debug, Default)]
struct Book {
    records: VecDeque<Record>,
    next: u64,
    body_bytes: usize,
    /// The `X-Request-Id` of each live request, and how many live requests share it.
    live: HashMap<u64, String>,
    sharers: HashMap<String, usize>,
}

/// A bounded book of records.
#[derive(Debug)]
pub(crate) struct Records {
    book: Mutex<Book>,
    most: usize,
    longest_body: usize,
    most_bytes: usize,
}

impl Records {
    pub fn new(limits: &Limits, keep_bodies: bool) -> Records {
        Records {
            book: Mutex::default(),
            most: limits.records.max(1),
            longest_body: if keep_bodies { usize::MAX } else { limits.recorded_body_bytes },
            most_bytes: limits.recorded_bytes_total,
        }
    }

    /// Writes down a request's head and returns its number.
    pub fn begin(&self, head: &Parts) -> u64 {
        let mut book = self.lock();
        let seq = book.next;
        book.next += 1;
        let header = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
            (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        let record = Record {
            seq,
            method: head.method.to_string(),
            path: head.uri.path_and_query().map_or_else(|| head.uri.path().to_owned(), ToString::to_string),
            headers: head.headers.iter().map(header).collect(),
            body: Bytes::new(),
            body_length: 0,
            body_hash: 0,
            received_at: ambient::now(),
            status: None,
            end: None,
            duplicate_id: false,
        };
        let mut duplicate = false;
        if let Some(id) = record.header("x-request-id").map(str::to_owned) {
            let sharers = book.sharers.entry(id.clone()).or_default();
            *sharers += 1;
            duplicate = *sharers > 1;
            book.live.insert(seq, id);
        }
        if book.records.len() >= self.most
            && let Some(oldest) = book.records.pop_front()
        {
            book.body_bytes -= oldest.body.len();
        }
        book.records.push_back(Record { duplicate_id: duplicate, ..record });
        seq
    }

    /// Adds the body.
    pub fn body(&self, seq: u64, body: &Bytes) {
        let hash = xxh64(body, 0);
        let mut book = self.lock();
        let kept = if body.len() <= self.longest_body { body.clone() } else { Bytes::new() };
        let added = kept.len();
        let Some(record) = book.find(seq) else { return };
        record.body = kept;
        record.body_length = body.len();
        record.body_hash = hash;
        book.body_bytes += added;
        let mut excess = book.body_bytes.saturating_sub(self.most_bytes);
        let mut shed = 0;
        for record in &mut book.records {
            if excess == 0 {
                break;
            }
            let length = std::mem::take(&mut record.body).len();
            excess = excess.saturating_sub(length);
            shed += length;
        }
        book.body_bytes -= shed;
    }

    /// Adds the status.
    pub fn status(&self, seq: u64, status: u16) {
        if let Some(record) = self.lock().find(seq) {
            record.status = Some(status);
        }
    }

    /// Adds the end, once.
    pub fn end(&self, seq: u64, end: End) {
        let mut book = self.lock();
        if let Some(id) = book.live.remove(&seq)
            && let Some(sharers) = book.sharers.get_mut(&id)
        {
            *sharers -= 1;
            if *sharers == 0 {
                book.sharers.remove(&id);
            }
        }
        if let Some(record) = book.find(seq) {
            record.end.get_or_insert((ambient::now(), end));
        }
    }

    /// Whether the request was marked as sharing its id.
    pub fn is_duplicate(&self, seq: u64) -> bool {
        self.lock().find(seq).is_some_and(|record| record.duplicate_id)
    }

    pub fn all(&self) -> Vec<Record> {
        self.matching(|_| true)
    }

    /// Those that satisfy `condition`.
    pub fn matching(&self, condition: impl Fn(&Record) -> bool) -> Vec<Record> {
        self.lock().records.iter().filter(|record| condition(record)).cloned().collect()
    }

    pub fn clear(&self) {
        let mut book = self.lock();
        book.records.clear();
        book.body_bytes = 0;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    /// Numbers in the book are consecutive, so a record's place follows from the first one's number.
    fn find(&mut self, seq: u64) -> Option<&mut Record> {
        let first = self.records.front()?.seq;
        let place = usize::try_from(seq.checked_sub(first)?).ok()?;
        self.records.get_mut(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EngineConfig;

    fn head(path: &str, id: &str) -> Parts {
        let (parts, ()) =
            http::Request::post(path).header("x-request-id", id).body(()).expect("a valid request").into_parts();
        parts
    }

    fn book(change: fn(&mut Limits), keep: bool) -> Records {
        let mut limits = EngineConfig::default().limits;
        change(&mut limits);
        Records::new(&limits, keep)
    }

    #[test]
    fn keeps_the_newest_and_finds_by_number() {
        let records = book(|limits| limits.records = 2, false);
        for path in ["/a", "/b?x=1", "/c"] {
            records.begin(&head(path, path));
        }
        records.status(0, 200);
        records.status(2, 404);
        records.end(1, End::ClientGone);
        records.end(1, End::Completed);
        let all = records.all();
        assert_eq!(all.iter().map(|r| (r.seq, r.path.as_str())).collect::<Vec<_>>(), [(1, "/b?x=1"), (2, "/c")]);
        assert_eq!((all[0].ended(), all[1].status), (Some(End::ClientGone), Some(404)));
        records.clear();
        records.end(2, End::Completed);
        assert_eq!(records.begin(&head("/d", "d")), 3);
        assert_eq!(records.all().len(), 1);
    }

    #[test]
    fn long_bodies_are_hashed_and_old_ones_shed() {
        let limits = |limits: &mut Limits| (limits.recorded_body_bytes, limits.recorded_bytes_total) = (4, 6);
        let records = book(limits, false);
        for (number, body) in ["1234", "12345", "abc"].into_iter().enumerate() {
            records.begin(&head("/", &number.to_string()));
            records.body(number as u64, &Bytes::from_static(body.as_bytes()));
        }
        let bodies: Vec<_> = records.all().iter().map(|r| (r.body.clone(), r.body_length)).collect();
        assert_eq!(bodies, [(Bytes::new(), 4), (Bytes::new(), 5), (Bytes::from_static(b"abc"), 3)]);
        assert_eq!(records.all()[1].body_hash, xxh64(b"12345", 0));
        let kept = book(limits, true);
        kept.begin(&head("/", "x"));
        kept.body(0, &Bytes::from_static(b"12345"));
        assert_eq!(kept.all()[0].body, "12345");
    }

    #[test]
    fn live_requests_with_one_id_are_noted() {
        let records = book(|_| (), false);
        records.begin(&head("/", "same"));
        records.begin(&head("/", "same"));
        records.end(0, End::Completed);
        records.end(1, End::Completed);
        records.begin(&head("/", "same"));
        assert_eq!(records.all().iter().map(|r| r.duplicate_id).collect::<Vec<_>>(), [false, true, false]);
        assert!(records.is_duplicate(1) && !records.is_duplicate(2) && !records.is_duplicate(9));
    }
}
