//! The incremental watcher.

use super::Usage;

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

/// Watches the bytes of one answer.
#[derive(Debug)]
pub struct AnswerWatch {}

impl AnswerWatch {
    /// A watcher for an answer of this kind.
    pub fn new(_kind: AnswerKind) -> AnswerWatch {
        AnswerWatch {}
    }

    /// Looks at the next bytes.
    pub fn feed(&mut self, _bytes: &[u8]) {}

    /// The body ended: parse what is left.
    pub fn finish(&mut self) {}

    /// The usage seen so far (the last one wins, merged field by field).
    pub fn usage(&self) -> Option<Usage> {
        None
    }

    /// A whole `data: [DONE]` line (or an Anthropic/Responses terminal event) went by.
    pub fn done(&self) -> bool {
        false
    }

    /// An error event inside the stream, or `finish_reason: "abort"`.
    pub fn error_event(&self) -> bool {
        false
    }
}
