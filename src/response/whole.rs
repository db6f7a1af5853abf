//! Answers that are one JSON document: kept while small, searched through a window when large.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::findings::Findings;
use super::needle::Needles;

/// Longest document that is kept and parsed as a whole, in bytes.
pub const MAX_DOCUMENT_BYTES: usize = 256 * 1024;

/// Longer documents are searched for usage in windows of this many bytes.
const WINDOW: usize = 64 * 1024;

/// So much of the start of a longer document is searched for its id, in bytes.
const HEAD: usize = 4 * 1024;

/// How much of a window the next one repeats, and the longest usage object that is read from a window: so it is whole in
/// one of them. Real ones have some hundred bytes; the bound also keeps a hostile document from being read over and
/// over.
const OVERLAP: usize = 2 * 1024;

/// The reader of one document.
#[derive(Debug)]
pub(super) struct DocumentReader {
    buffer: Vec<u8>,
    /// Larger than [`MAX_DOCUMENT_BYTES`]: `buffer` is the current window. Windows lie at the same places however the
    /// body was cut into chunks.
    windowed: bool,
}

impl DocumentReader {
    pub(super) fn new() -> DocumentReader {
        DocumentReader { buffer: Vec::new(), windowed: false }
    }

    pub(super) fn feed(&mut self, bytes: &[u8], findings: &mut Findings) {
        if !self.windowed {
            if self.buffer.len() + bytes.len() <= MAX_DOCUMENT_BYTES {
                self.buffer.extend_from_slice(bytes);
                return;
            }
            self.windowed = true;
            let head = std::mem::take(&mut self.buffer);
            let start: Vec<u8> = head.iter().chain(bytes).take(HEAD).copied().collect();
            findings.head(&start);
            self.buffer.reserve_exact(WINDOW);
            self.slide(&head, findings);
        }
        self.slide(bytes, findings);
    }

    pub(super) fn finish(&mut self, findings: &mut Findings) {
        let buffer = std::mem::take(&mut self.buffer);
        if self.windowed {
            search(&buffer, findings);
        } else {
            findings.document(&buffer);
        }
    }

    fn slide(&mut self, mut bytes: &[u8], findings: &mut Findings) {
        while !bytes.is_empty() {
            let room = WINDOW.saturating_sub(self.buffer.len());
            let (now, later) = bytes.split_at_checked(room).unwrap_or((bytes, &[]));
            self.buffer.extend_from_slice(now);
            bytes = later;
            if self.buffer.len() >= WINDOW {
                search(&self.buffer, findings);
                self.buffer.drain(..WINDOW - OVERLAP);
            }
        }
    }
}

/// Takes every complete usage object of a window; a later one counts.
fn search(window: &[u8], findings: &mut Findings) {
    let needles = Needles::new();
    for value in needles.usage_values(window) {
        let value = value.get(..value.len().min(OVERLAP)).unwrap_or_default();
        let mut json = serde_json::Deserializer::from_slice(value);
        if value.starts_with(b"{")
            && let Ok(object) = <&RawValue>::deserialize(&mut json)
        {
            findings.usage.merge(object.get(), findings.api);
        }
    }
    findings.error |= needles.aborted(window);
}
