//! Top-level edits by splicing bytes.
//!
//! An engine's chat template renders nested JSON as it was sent, so reordering a tool schema or respelling a number
//! would change the prompt. Edits therefore copy everything they do not name.

use bytes::Bytes;

use super::Field;

/// One top-level edit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edit<'a> {
    /// The key has this raw JSON value afterwards, exactly once: in place when it was there, else at the end.
    Set(&'a str, &'a [u8]),
    /// The key is gone afterwards, however often it was there.
    Remove(&'a str),
}

impl Edit<'_> {
    fn key(&self) -> &str {
        match self {
            Edit::Set(key, _) | Edit::Remove(key) => key,
        }
    }
}

/// Applies edits to an object whose members are `fields`; every byte that no edit names stays as it is, white space
/// and the spelling of keys included. Of two edits of one key the later one counts. The values of [`Edit::Set`] must
/// be JSON. What is no object (a multipart body) comes back unchanged.
pub fn splice(raw: &Bytes, fields: &[Field], edits: &[Edit<'_>]) -> Bytes {
    let Some(open) = raw.iter().position(|byte| !byte.is_ascii_whitespace()) else { return raw.clone() };
    if raw.get(open) != Some(&b'{') {
        return raw.clone();
    }
    let effective = |key: &str| edits.iter().rposition(|edit| edit.key() == key);
    let changes = edits.iter().any(|edit| matches!(edit, Edit::Set(..)))
        || fields.iter().any(|field| effective(&field.key).is_some());
    if !changes {
        return raw.clone();
    }
    let slice = |range: std::ops::Range<usize>| raw.get(range).unwrap_or_default();

    let added: usize = edits.iter().map(|edit| edit.key().len() + 8 + value_len(edit)).sum();
    let mut out = Vec::with_capacity(raw.len() + added);
    out.extend_from_slice(slice(0..fields.first().map_or(open + 1, |field| field.key_span.start)));

    let mut placed = vec![false; edits.len()];
    let mut first = true;
    let mut previous_end = None;
    for field in fields {
        // The text between two members holds exactly one comma; a kept member brings the one before it.
        let gap = previous_end.map(|end| slice(end..field.key_span.start)).unwrap_or_default();
        previous_end = Some(field.value_span.end);
        let replacement = match effective(&field.key).map(|at| (edits.get(at), placed.get_mut(at))) {
            None => None,
            Some((Some(Edit::Set(_, value)), Some(done))) if !*done => {
                *done = true;
                Some(*value)
            }
            Some(_) => continue,
        };
        if !first {
            out.extend_from_slice(gap);
        }
        first = false;
        match replacement {
            None => out.extend_from_slice(slice(field.key_span.start..field.value_span.end)),
            Some(value) => {
                out.extend_from_slice(slice(field.key_span.start..field.value_span.start));
                out.extend_from_slice(value);
            }
        }
    }
    for (at, edit) in edits.iter().enumerate() {
        let Edit::Set(key, value) = edit else { continue };
        if placed.get(at) == Some(&true) || effective(key) != Some(at) {
            continue;
        }
        if !first {
            out.push(b',');
        }
        first = false;
        out.extend_from_slice(serde_json::Value::from(*key).to_string().as_bytes());
        out.push(b':');
        out.extend_from_slice(value);
    }
    out.extend_from_slice(slice(previous_end.unwrap_or(open + 1)..raw.len()));
    Bytes::from(out)
}

fn value_len(edit: &Edit<'_>) -> usize {
    match edit {
        Edit::Set(_, value) => value.len(),
        Edit::Remove(_) => 0,
    }
}
