//! The incremental watcher.

use super::findings::Findings;
use super::lines::EventReader;
use super::whole::DocumentReader;
use super::{Api, Usage};

/// How the body is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerKind {
    /// Server-sent events.
    Stream,
    /// One JSON document.
    Whole,
    /// Something that cannot be read here (compressed, binary): only bytes are counted.
    Opaque,
}

impl AnswerKind {
    /// The framing that the response headers announce. The content type decides; what the request asked for counts
    /// only when there is none (an engine answers an error to a streaming request with one JSON document).
    pub fn of(content_type: Option<&str>, content_encoding: Option<&str>, requested_stream: bool) -> AnswerKind {
        let encoded = content_encoding.is_some_and(|list| {
            list.split(',').any(|one| !matches!(one.trim().to_ascii_lowercase().as_str(), "" | "identity"))
        });
        if encoded {
            return AnswerKind::Opaque;
        }
        let essence = content_type.and_then(|value| value.split(';').next()).unwrap_or_default();
        match essence.trim().to_ascii_lowercase().as_str() {
            "text/event-stream" => AnswerKind::Stream,
            "" if requested_stream => AnswerKind::Stream,
            "" | "application/json" => AnswerKind::Whole,
            other if other.ends_with("+json") => AnswerKind::Whole,
            _ => AnswerKind::Opaque,
        }
    }
}

/// Watches the bytes of one answer. However they were cut into chunks, the findings are the same.
#[derive(Debug)]
pub struct AnswerWatch {
    reader: Reader,
    findings: Findings,
    bytes: u64,
    /// Chunks that were not empty, for bodies without events.
    chunks: u64,
}

#[derive(Debug)]
enum Reader {
    Stream(Box<EventReader>),
    Whole(DocumentReader),
    Opaque,
}

impl AnswerWatch {
    /// A watcher for an answer of this kind.
    pub fn new(kind: AnswerKind, api: Api) -> AnswerWatch {
        let reader = match kind {
            AnswerKind::Stream => Reader::Stream(Box::new(EventReader::new())),
            AnswerKind::Whole => Reader::Whole(DocumentReader::new()),
            AnswerKind::Opaque => Reader::Opaque,
        };
        AnswerWatch { reader, findings: Findings { api, ..Findings::default() }, bytes: 0, chunks: 0 }
    }

    /// Looks at the next bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes = self.bytes.saturating_add(bytes.len() as u64);
        self.chunks = self.chunks.saturating_add(u64::from(!bytes.is_empty()));
        match &mut self.reader {
            Reader::Stream(events) => events.feed(bytes, &mut self.findings),
            Reader::Whole(document) => document.feed(bytes, &mut self.findings),
            Reader::Opaque => {}
        }
    }

    /// The body ended: parse what is left.
    pub fn finish(&mut self) {
        match &mut self.reader {
            Reader::Stream(events) => events.finish(&mut self.findings),
            Reader::Whole(document) => document.finish(&mut self.findings),
            Reader::Opaque => {}
        }
    }

    /// The usage seen so far (the last one wins, merged field by field). That of a whole document shows after
    /// [`AnswerWatch::finish`].
    pub fn usage(&self) -> Option<Usage> {
        self.findings.usage.usage()
    }

    /// A whole `data: [DONE]` line (or an Anthropic/Responses terminal event) went by.
    pub fn done(&self) -> bool {
        self.findings.done
    }

    /// An error event inside the stream (an `error` object in a whole document), or `finish_reason: "abort"`.
    pub fn error_event(&self) -> bool {
        self.findings.error
    }

    /// The error event is the one by which the API itself ends a failed stream, so that nothing after it can be taken for a
    /// good end.
    pub fn failed_as_documented(&self) -> bool {
        self.findings.own_failure
    }

    /// The id of the response, as the Responses API has it; of a whole document after [`AnswerWatch::finish`].
    pub fn response_id(&self) -> Option<&str> {
        self.findings.response_id.as_deref()
    }

    /// Where the first such event of a stream ends, in bytes from the start of the body: what follows must not make the
    /// answer look complete.
    pub fn error_end(&self) -> Option<u64> {
        self.findings.error_end
    }

    /// A stream has brought something generated: more than the opening of a message, keep-alives, or an error.
    pub fn content(&self) -> bool {
        self.findings.content
    }

    /// A counter that grows with every sign of work: in a stream, events with data that are neither keep-alives nor
    /// the end marker (a comment is no progress); in any other body, chunks.
    pub fn progress(&self) -> u64 {
        match &self.reader {
            Reader::Stream(events) => events.data_events(),
            Reader::Whole(_) | Reader::Opaque => self.chunks,
        }
    }

    /// JSON documents that had to be parsed. All else costs a substring scan.
    pub fn parsed(&self) -> u64 {
        self.findings.parsed
    }

    /// Bytes seen so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
