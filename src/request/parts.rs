//! Parts of a prompt that are no text: images, audio, video, files, in the words of every API.
//!
//! What such a part costs an engine has nothing to do with the length of its base64, nor with that of an address. It is
//! counted, kept out of the text that is measured, and stands in the prefix key as the hash of its bytes.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::ops::Range;

use xxhash_rust::xxh64::xxh64;

use super::scan::{JsonObject, decode_key, decode_string, each_element, each_member, span_in};

/// Parts in parts (results of tools, documents) are looked for this deep.
const MAX_DEPTH: usize = 6;

/// Types of parts that are no text.
const TYPES: &[&str] = &[
    "image",
    "image_url",
    "input_image",
    "image_embeds",
    "image_file",
    "image_pil",
    "image_generation_call",
    "computer_screenshot",
    "audio",
    "audio_url",
    "input_audio",
    "audio_embeds",
    "video",
    "video_url",
    "input_video",
    "video_embeds",
    "file",
    "file_url",
    "input_file",
    "document",
];

/// Types of parts that are text, whatever members they have.
const TEXT_TYPES: &[&str] =
    &["text", "input_text", "output_text", "refusal", "thinking", "reasoning_text", "summary_text"];

/// Members that say the same of a part without a type that is known.
const MEMBERS: &[&str] = &[
    "image",
    "image_url",
    "image_data",
    "image_embeds",
    "input_image",
    "audio",
    "audio_url",
    "audio_data",
    "input_audio",
    "video",
    "video_url",
    "video_data",
    "file_data",
    "file_url",
    "file_id",
];

/// Members of a whole body that are no text.
const OF_BODY: &[&str] = &[
    "image",
    "images",
    "image_url",
    "image_data",
    "input_reference",
    "mask",
    "audio",
    "audio_data",
    "video",
    "video_data",
    "prompt_embeds",
    "input_embeds",
];

/// How many such parts there are, and how many bytes of the body they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NonText {
    /// Parts.
    pub parts: usize,
    /// Bytes.
    pub bytes: usize,
}

impl NonText {
    /// Adds a part of so many bytes.
    pub(super) fn add(&mut self, bytes: usize) {
        self.parts += 1;
        self.bytes += bytes;
    }
}

/// A value without the parts of it that are no text.
#[derive(Debug)]
pub(super) struct Stripped<'a> {
    /// The text of the value as it was sent, less those parts.
    pub(super) text: Cow<'a, str>,
    /// The same, with a hash in the place of each.
    pub(super) key: Cow<'a, str>,
}

/// Takes what is no text out of a value of a prompt and counts it.
pub(super) fn strip<'a>(value: &'a str, found: &mut NonText) -> Stripped<'a> {
    let mut spans = Vec::new();
    find(value, value, MAX_DEPTH, &mut spans);
    if spans.is_empty() {
        return Stripped { text: Cow::Borrowed(value), key: Cow::Borrowed(value) };
    }
    let (mut text, mut key) = (String::new(), String::new());
    let mut end = 0;
    let slice = |range: Range<usize>| value.get(range).unwrap_or_default();
    for span in spans {
        let before = slice(end..span.start);
        text.push_str(before);
        key.push_str(before);
        let _ = write!(key, "{:016x}", xxh64(slice(span.clone()).as_bytes(), 0));
        found.add(span.len());
        end = span.end;
    }
    text.push_str(slice(end..value.len()));
    key.push_str(slice(end..value.len()));
    Stripped { text: text.into(), key: key.into() }
}

/// Counts the members of a body that are no text, and such parts in the others; both where no prompt is read.
pub(super) fn count_in_body(body: &JsonObject<'_>, whole: bool) -> NonText {
    let mut found = NonText::default();
    for field in body.fields() {
        let Some(value) = body.get_non_null(&field.key) else { continue };
        if OF_BODY.contains(&field.key.as_str()) {
            found.bytes += value.len();
            found.parts += count_items(value, MAX_DEPTH);
        } else if whole {
            let mut spans = Vec::new();
            find(value, value, MAX_DEPTH, &mut spans);
            for span in spans {
                found.add(span.len());
            }
        }
    }
    found
}

/// One for each thing in nested lists; numbers are those of a vector, which is one thing.
fn count_items(value: &str, depth: usize) -> usize {
    if !value.starts_with('[') || depth == 0 {
        return 1;
    }
    let (mut items, mut numbers) = (0, false);
    let _ = each_element(value, |element| {
        match element.as_bytes().first() {
            Some(b'-' | b'0'..=b'9') => {
                numbers = true;
                return false;
            }
            Some(b'n') => {}
            _ => items += count_items(element, depth - 1),
        }
        true
    });
    if numbers { 1 } else { items }
}

/// A hash of each member of a body that is no text, for the prefix key.
pub(super) fn hashes_of_members<'b>(body: &'b JsonObject<'_>) -> impl Iterator<Item = (&'static str, String)> + 'b {
    OF_BODY.iter().filter_map(|name| {
        let value = body.get_non_null(name)?;
        Some((*name, format!("{:016x}", xxh64(value.as_bytes(), 0))))
    })
}

/// Finds the parts in `value`, which lies in `whole`, in order.
fn find(whole: &str, value: &str, depth: usize, spans: &mut Vec<Range<usize>>) {
    let Some(depth) = depth.checked_sub(1) else { return };
    if value.starts_with('[') {
        // The body was scanned as a whole before, so this cannot fail.
        let _ = each_element(value, |element| {
            if element.starts_with(['{', '[']) {
                find(whole, element, depth, spans);
            }
            true
        });
    } else if value.starts_with('{') {
        match Part::of(value) {
            Part::Text => {}
            Part::Other => spans.push(span_in(whole, value)),
            Part::Holds(inner) => inner.into_iter().flatten().for_each(|inner| find(whole, inner, depth, spans)),
        }
    }
}

/// What an object in a prompt is.
enum Part<'a> {
    Text,
    /// No text.
    Other,
    /// It holds parts (a message, the result of a tool, a document to be ranked): in these.
    Holds([Option<&'a str>; 3]),
}

impl<'a> Part<'a> {
    fn of(object: &'a str) -> Part<'a> {
        let (mut kind, mut other, mut source, mut content, mut output) = (None, false, None, None, None);
        let _ = each_member(object, |key, value| {
            let nested = || Some(value).filter(|value| value.starts_with(['[', '{']));
            match decode_key(key).as_ref() {
                "type" => kind = decode_string(value),
                "source" => source = nested(),
                "content" => content = nested(),
                "output" => output = nested(),
                name => other |= value != "null" && MEMBERS.contains(&name),
            }
            true
        });
        match kind.as_deref() {
            Some(kind) if TEXT_TYPES.contains(&kind) => Part::Text,
            Some(kind) if TYPES.contains(&kind) => Part::of_source(source),
            _ if other => Part::Other,
            _ if content.is_some() || output.is_some() => Part::Holds([None, content, output]),
            // Types to come.
            Some(_) if memchr::memmem::find(object.as_bytes(), b";base64,").is_some() => Part::Other,
            _ => Part::Text,
        }
    }

    /// Documents of the Messages API may be text, or hold parts of their own.
    fn of_source(source: Option<&'a str>) -> Part<'a> {
        let Some(source) = source.and_then(|source| JsonObject::parse(source.as_bytes()).ok()) else {
            return Part::Other;
        };
        match source.get("type") {
            Some("\"text\"") => Part::Text,
            Some("\"content\"") => Part::Holds([source.get("content"), None, None]),
            _ => Part::Other,
        }
    }
}
