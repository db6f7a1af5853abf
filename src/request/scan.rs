//! Reading JSON one level at a time, without building values: members and elements come as raw text in the order in
//! which they were sent. Nested values are skipped by a loop, not by recursion, so no depth of nesting can overflow
//! the stack. Nothing here keeps or quotes what it read.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::Deserializer as _;
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Most top-level members that one object may have. Real requests have some dozens; the bound keeps a body of
/// millions of tiny members from costing many times its own size in memory.
pub const MAX_MEMBERS: usize = 1024;

/// One member of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// The key, escapes decoded.
    pub key: String,
    /// Byte range of the key in the body, with its quotes.
    pub key_span: Range<usize>,
    /// Byte range of the value.
    pub value_span: Range<usize>,
}

/// The bytes are not an object that can be read here. The texts say where, never what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    /// Nothing but white space.
    #[error("it is empty")]
    Empty,
    /// It starts with U+FEFF.
    #[error("it starts with a byte order mark")]
    ByteOrderMark,
    /// Not UTF-8.
    #[error("it is not valid UTF-8")]
    NotUtf8,
    /// JSON perhaps, but no object.
    #[error("it is not a JSON object")]
    NotObject,
    /// The end came too early.
    #[error("it is not valid JSON: it ends too early")]
    Truncated,
    /// Not JSON.
    #[error("it is not valid JSON (line {line}, column {column})")]
    Syntax {
        /// Line of the error, from 1.
        line: usize,
        /// Column of the error in bytes, from 1.
        column: usize,
    },
    /// More than [`MAX_MEMBERS`] members.
    #[error("it has more than {MAX_MEMBERS} top-level members")]
    TooManyMembers,
}

/// The top level of a JSON object.
#[derive(Clone, Debug)]
pub struct JsonObject<'a> {
    text: &'a str,
    fields: Vec<Field>,
}

impl<'a> JsonObject<'a> {
    /// Scans an object; white space around it is allowed, anything else is not.
    pub fn parse(raw: &'a [u8]) -> Result<JsonObject<'a>, ScanError> {
        if raw.starts_with(b"\xef\xbb\xbf") {
            return Err(ScanError::ByteOrderMark);
        }
        let text = std::str::from_utf8(raw).map_err(|_| ScanError::NotUtf8)?;
        match text.bytes().find(|byte| !byte.is_ascii_whitespace()) {
            None => return Err(ScanError::Empty),
            Some(b'{') => {}
            // Text that is no JSON at all gets the syntax error; `[]` or `"x"` the clearer one.
            Some(_) => {
                return Err(match serde_json::from_str::<&RawValue>(text) {
                    Ok(_) => ScanError::NotObject,
                    Err(error) => syntax(&error),
                });
            }
        }
        let mut fields = Vec::new();
        let mut too_many = false;
        let scanned = each_member(text, |key, value| {
            too_many = fields.len() >= MAX_MEMBERS;
            if !too_many {
                fields.push(Field {
                    key: decode_key(key).into_owned(),
                    key_span: span_in(text, key),
                    value_span: span_in(text, value),
                });
            }
            !too_many
        });
        match scanned {
            Ok(()) => Ok(JsonObject { text, fields }),
            Err(_) if too_many => Err(ScanError::TooManyMembers),
            Err(error) => Err(syntax(&error)),
        }
    }

    /// The raw text of a value; the last one when the key occurs more than once, which is what Python reads.
    pub fn get(&self, key: &str) -> Option<&'a str> {
        let field = self.fields.iter().rev().find(|field| field.key == key)?;
        self.text.get(field.value_span.clone())
    }

    /// Like [`JsonObject::get`], but a `null` counts as absent.
    pub fn get_non_null(&self, key: &str) -> Option<&'a str> {
        self.get(key).filter(|value| *value != "null")
    }

    /// The members.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// The members, for keeping.
    pub fn into_fields(self) -> Vec<Field> {
        self.fields
    }
}

fn syntax(error: &serde_json::Error) -> ScanError {
    if error.is_eof() { ScanError::Truncated } else { ScanError::Syntax { line: error.line(), column: error.column() } }
}

/// Where `part`, which was borrowed from `text`, lies in it.
pub fn span_in(text: &str, part: &str) -> Range<usize> {
    let start = part.as_ptr().addr().saturating_sub(text.as_ptr().addr());
    start..start.saturating_add(part.len())
}

/// A key as a reader sees it. One that holds a lone surrogate cannot be decoded; its raw text, which has a backslash
/// and so equals no name that anybody looks for, stands in.
pub fn decode_key(key: &str) -> Cow<'_, str> {
    decode_string(key).unwrap_or(Cow::Borrowed(key))
}

/// The text of a JSON string; `None` when the value is no string, or holds a lone surrogate.
pub fn decode_string(value: &str) -> Option<Cow<'_, str>> {
    let inner = value.strip_prefix('"')?.strip_suffix('"')?;
    if memchr::memchr(b'\\', inner.as_bytes()).is_none() {
        return Some(Cow::Borrowed(inner));
    }
    serde_json::from_str::<String>(value).ok().map(Cow::Owned)
}

/// Calls `visit` with the raw key (quotes included) and value of each member of an object, until it says `false`,
/// which ends the scan with an error.
pub fn each_member<'a>(object: &'a str, visit: impl FnMut(&'a str, &'a str) -> bool) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(object);
    deserializer.deserialize_map(Members(visit))?;
    deserializer.end()
}

/// Calls `visit` with the raw text of each element of an array, until it says `false`, which ends the scan with an
/// error.
pub fn each_element<'a>(array: &'a str, visit: impl FnMut(&'a str) -> bool) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(array);
    deserializer.deserialize_seq(Elements(visit))?;
    deserializer.end()
}

struct Members<F>(F);

impl<'de, F: FnMut(&'de str, &'de str) -> bool> Visitor<'de> for Members<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some((key, value)) = map.next_entry::<&'de RawValue, &'de RawValue>()? {
            if !(self.0)(key.get(), value.get()) {
                return Err(A::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}

struct Elements<F>(F);

impl<'de, F: FnMut(&'de str) -> bool> Visitor<'de> for Elements<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        while let Some(element) = seq.next_element::<&'de RawValue>()? {
            if !(self.0)(element.get()) {
                return Err(A::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}
