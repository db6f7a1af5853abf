//! Server-sent events over arbitrary chunk borders (the WHATWG event-stream format), for reading along.
//!
//! Lines end in LF, CRLF or CR. The data lines of an event are put together; the event is looked at when its blank
//! line comes. Two liberties for the sake of accounting: a data line that is a complete JSON object by itself is an
//! event by itself when another data line follows without a blank line, and an event that the end of the body cuts
//! off is looked at as well.

use super::findings::Findings;
use super::needle::Needles;
use super::opening;

/// Longest line, and longest event, that is looked at, in bytes. A longer one is passed over: the traffic is
/// untouched, and only what it says is lost to the accounting. It has to hold the last event of a Responses stream,
/// which repeats the whole answer.
pub const MAX_EVENT_BYTES: usize = 1024 * 1024;

/// Buffers larger than this are given back after use, so that one long event does not cost a stream its memory for
/// the rest of its life.
const KEEP_CAPACITY: usize = 16 * 1024;

/// The reader of one stream.
#[derive(Debug)]
pub(super) struct EventReader {
    needles: Needles,
    /// The start of a line whose end has not come yet.
    line: Vec<u8>,
    /// The line is longer than the limit; its beginning is kept, to know its field.
    line_too_long: bool,
    /// The last byte was a CR: an LF that comes next belongs to it.
    after_cr: bool,
    /// No line has ended yet: a byte order mark may stand before the first.
    at_start: bool,
    event: Event,
    /// Events with data other than end markers and pings.
    data_events: u64,
    /// Bytes up to the end of the last line.
    ended: u64,
    /// Bytes of the line whose end has not come yet, also those beyond the limit.
    kept: usize,
}

/// The event that is being put together.
#[derive(Debug, Default)]
struct Event {
    /// Its data lines, joined by LF.
    data: Vec<u8>,
    lines: usize,
    /// Longer than the limit; the data is dropped.
    too_long: bool,
    kind: EventKind,
}

/// What the `event:` line said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum EventKind {
    #[default]
    Plain,
    /// Anthropic's keep-alive.
    Ping,
    Error,
    /// By its name, one of those with which an answer begins.
    Opening,
    Terminal(&'static str),
}

impl EventReader {
    pub(super) fn new() -> EventReader {
        EventReader {
            needles: Needles::new(),
            line: Vec::new(),
            line_too_long: false,
            after_cr: false,
            at_start: true,
            event: Event::default(),
            data_events: 0,
            ended: 0,
            kept: 0,
        }
    }

    pub(super) fn data_events(&self) -> u64 {
        self.data_events
    }

    pub(super) fn feed(&mut self, mut bytes: &[u8], findings: &mut Findings) {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_cr) {
                if let Some(rest) = bytes.strip_prefix(b"\n") {
                    bytes = rest;
                    self.ended += 1;
                }
                if bytes.is_empty() {
                    return;
                }
            }
            let Some((line, rest)) = memchr::memchr2(b'\n', b'\r', bytes).and_then(|end| bytes.split_at_checked(end))
            else {
                self.kept += bytes.len();
                self.keep(bytes);
                return;
            };
            self.after_cr = rest.first() == Some(&b'\r');
            bytes = rest.get(1..).unwrap_or_default();
            let before = self.ended;
            let blank = line.is_empty() && self.line.is_empty();
            self.ended += (self.kept + line.len() + 1) as u64;
            self.kept = 0;
            if self.line.is_empty() && !self.line_too_long {
                self.end_line(line, line.len() > MAX_EVENT_BYTES, findings);
            } else {
                self.keep(line);
                self.end_kept_line(findings);
            }
            if findings.error && findings.error_end.is_none() {
                // A blank line ends the event that it belongs to; any other line comes after it.
                findings.error_end = Some(if blank { self.ended } else { before });
            }
        }
    }

    pub(super) fn finish(&mut self, findings: &mut Findings) {
        if !self.line.is_empty() {
            self.end_kept_line(findings);
        }
        self.end_event(findings);
    }

    fn keep(&mut self, bytes: &[u8]) {
        let room = MAX_EVENT_BYTES - self.line.len().min(MAX_EVENT_BYTES);
        self.line_too_long |= bytes.len() > room;
        self.line.extend_from_slice(bytes.get(..bytes.len().min(room)).unwrap_or_default());
    }

    fn end_kept_line(&mut self, findings: &mut Findings) {
        let mut line = std::mem::take(&mut self.line);
        let too_long = std::mem::take(&mut self.line_too_long);
        self.end_line(&line, too_long, findings);
        if line.capacity() <= KEEP_CAPACITY {
            line.clear();
            self.line = line;
        }
    }

    fn end_line(&mut self, mut line: &[u8], too_long: bool, findings: &mut Findings) {
        if std::mem::take(&mut self.at_start) {
            line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        }
        if line.is_empty() {
            self.end_event(findings);
        } else if let Some(data) = field(line, b"data") {
            self.data_line(data, too_long, findings);
        } else if let Some(name) = field(line, b"event") {
            self.event.kind = if too_long { EventKind::Plain } else { EventKind::of(name) };
        }
        // Comments, `id:`, `retry:` and unknown fields say nothing.
    }

    fn data_line(&mut self, data: &[u8], too_long: bool, findings: &mut Findings) {
        if self.event.lines == 1 && !self.event.too_long && is_object(&self.event.data) {
            let kind = self.event.kind;
            self.end_event(findings);
            self.event.kind = kind;
        }
        if !too_long && data.trim_ascii() == b"[DONE]" {
            findings.done = true;
            return;
        }
        let event = &mut self.event;
        event.lines += 1;
        if too_long || event.data.len() + data.len() >= MAX_EVENT_BYTES {
            event.too_long = true;
        }
        if event.too_long {
            event.data = Vec::new();
            return;
        }
        if event.lines > 1 {
            event.data.push(b'\n');
        }
        event.data.extend_from_slice(data);
    }

    fn end_event(&mut self, findings: &mut Findings) {
        let mut event = std::mem::take(&mut self.event);
        if event.too_long {
            self.data_events += 1;
            findings.content = true;
        } else if event.lines > 0 && !event.data.trim_ascii().is_empty() {
            match event.kind {
                EventKind::Plain | EventKind::Ping | EventKind::Opening => {}
                EventKind::Error => findings.event_type("error"),
                EventKind::Terminal(name) => findings.event_type(name),
            }
            let ping = event.kind == EventKind::Ping || is_ping(&event.data);
            self.data_events += u64::from(!ping);
            if (findings.wants_id() || self.needles.hit(&event.data))
                && !findings.document(&event.data)
                && event.lines > 1
            {
                for line in event.data.split(|byte| *byte == b'\n') {
                    findings.document(line);
                }
            }
            if !findings.content {
                let opens = event.kind == EventKind::Opening || opening::opens(&event.data);
                findings.content = !ping && !findings.error && !opens;
            }
        }
        if event.data.capacity() <= KEEP_CAPACITY {
            event.data.clear();
            self.event.data = event.data;
        }
    }
}

impl EventKind {
    fn of(name: &[u8]) -> EventKind {
        match name.trim_ascii() {
            b"ping" => EventKind::Ping,
            b"error" => EventKind::Error,
            name if opening::NAMES.iter().any(|opening| opening.as_bytes() == name) => EventKind::Opening,
            b"message_stop" => EventKind::Terminal("message_stop"),
            b"response.completed" => EventKind::Terminal("response.completed"),
            b"response.incomplete" => EventKind::Terminal("response.incomplete"),
            b"response.failed" => EventKind::Terminal("response.failed"),
            _ => EventKind::Plain,
        }
    }
}

/// The value of a line of the field `name`, one leading space removed; `None` for any other line.
fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    match line.strip_prefix(name)? {
        [] => Some(&[]),
        [b':', b' ', value @ ..] | [b':', value @ ..] => Some(value),
        _ => None,
    }
}

/// Anthropic's keep-alive, in the form without an `event:` line.
fn is_ping(data: &[u8]) -> bool {
    data.len() <= 32 && memchr::memmem::find(data, b"\"ping\"").is_some()
}

/// Whether the text is a complete JSON object.
fn is_object(data: &[u8]) -> bool {
    let data = data.trim_ascii();
    data.starts_with(b"{") && data.ends_with(b"}") && crate::request::scan::JsonObject::parse(data).is_ok()
}
