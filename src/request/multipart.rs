//! The two small form fields of an audio upload (`model`, `stream`), read without touching the file beside them.
//!
//! Framing as in RFC 2046 section 5.1 and RFC 7578. Costs one search over the body; keeps nothing but the values.

use memchr::memmem;

use super::NonText;

/// Most parts that a form may have.
const MAX_PARTS: usize = 128;

/// Longest header block of a part, in bytes.
const MAX_PART_HEADERS: usize = 8 * 1024;

/// Longest value of a field that is read, in bytes.
const MAX_VALUE: usize = 1024;

/// Longest boundary, in bytes (RFC 2046).
const MAX_BOUNDARY: usize = 70;

/// Why a form cannot be read. No text quotes the form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormError {
    /// The content type is something else, or has no usable boundary.
    #[error("content-type must be multipart/form-data with a boundary")]
    ContentType,
    /// The boundary never comes.
    #[error("the multipart body does not contain its boundary")]
    NoBoundary,
    /// No closing boundary.
    #[error("the multipart body ends before its closing boundary")]
    Truncated,
    /// A part without readable headers.
    #[error("a part of the multipart body has unreadable headers")]
    Headers,
    /// More than [`MAX_PARTS`].
    #[error("the multipart body has more than {MAX_PARTS} parts")]
    TooManyParts,
    /// `model` or `stream` has a value that cannot be used.
    #[error("form field \"{0}\" is not usable")]
    Value(&'static str),
    /// `model` twice.
    #[error("form field \"model\" occurs more than once")]
    DuplicateModel,
}

/// What is read of a form.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Form {
    /// `model`; `None` when absent or empty.
    pub model: Option<String>,
    /// `stream`; false when absent.
    pub stream: bool,
    /// Files.
    pub files: NonText,
}

impl Form {
    /// Reads a form.
    pub fn parse(content_type: Option<&str>, body: &[u8]) -> Result<Form, FormError> {
        let boundary = content_type.and_then(boundary).ok_or(FormError::ContentType)?;
        let delimiter = format!("\r\n--{boundary}");
        let finder = memmem::Finder::new(delimiter.as_bytes());

        // The first delimiter may stand at the very start, without the line break before it.
        let mut rest = match body.strip_prefix(delimiter.trim_start().as_bytes()).map(after_delimiter) {
            Some(After::Part(rest)) => rest,
            Some(After::End) => return Ok(Form::default()),
            _ => match next_delimiter(&finder, body) {
                Some((_, After::Part(rest))) => rest,
                Some((_, _)) => return Ok(Form::default()),
                None => return Err(FormError::NoBoundary),
            },
        };
        let mut form = Form::default();
        for _ in 0..MAX_PARTS {
            let (part, after) = next_delimiter(&finder, rest).ok_or(FormError::Truncated)?;
            form.read_part(part)?;
            match after {
                After::Part(next) => rest = next,
                _ => return Ok(form),
            }
        }
        Err(FormError::TooManyParts)
    }

    fn read_part(&mut self, part: &[u8]) -> Result<(), FormError> {
        let head = part.get(..part.len().min(MAX_PART_HEADERS)).unwrap_or_default();
        let end = memmem::find(head, b"\r\n\r\n").ok_or(FormError::Headers)?;
        let (headers, value) = part.split_at_checked(end + 4).ok_or(FormError::Headers)?;
        let headers = String::from_utf8_lossy(headers);
        let Some(disposition) = headers.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
        }) else {
            return Ok(());
        };
        if parameter(disposition, "filename").is_some() {
            self.files.add(value.len());
            return Ok(());
        }
        let usable = |field| {
            let text = std::str::from_utf8(value).ok().filter(|_| value.len() <= MAX_VALUE);
            text.map(str::trim).ok_or(FormError::Value(field))
        };
        match parameter(disposition, "name").as_deref() {
            Some("model") => {
                let model = usable("model")?;
                if self.model.is_some() {
                    return Err(FormError::DuplicateModel);
                }
                self.model = (!model.is_empty()).then(|| model.to_owned());
            }
            Some("stream") => {
                // The spellings that the engines' form validation takes for a boolean.
                self.stream = match usable("stream")?.to_ascii_lowercase().as_str() {
                    "true" | "1" | "on" | "yes" | "t" | "y" => true,
                    "false" | "0" | "off" | "no" | "f" | "n" | "" => false,
                    _ => return Err(FormError::Value("stream")),
                };
            }
            _ => {}
        }
        Ok(())
    }
}

/// What stands behind a delimiter.
enum After<'a> {
    /// A part begins.
    Part(&'a [u8]),
    /// The form ends.
    End,
    /// Neither: the text only looked like the delimiter.
    Other,
}

fn after_delimiter(rest: &[u8]) -> After<'_> {
    if rest.starts_with(b"--") {
        return After::End;
    }
    let padding = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    match rest.get(padding..).and_then(|rest| rest.strip_prefix(b"\r\n")) {
        Some(part) => After::Part(part),
        None => After::Other,
    }
}

/// The bytes before the next delimiter, and what comes behind it.
fn next_delimiter<'a>(finder: &memmem::Finder<'_>, bytes: &'a [u8]) -> Option<(&'a [u8], After<'a>)> {
    // A part may be empty of headers and value, so that its delimiter's line break is the one just consumed; engines
    // refuse such a part, and so does `read_part`.
    finder.find_iter(bytes).find_map(|at| {
        let (before, found) = bytes.split_at_checked(at)?;
        match after_delimiter(found.get(finder.needle().len()..)?) {
            After::Other => None,
            after => Some((before, after)),
        }
    })
}

fn boundary(content_type: &str) -> Option<String> {
    let (kind, _) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parameter(content_type, "boundary")?;
    let usable = (1..=MAX_BOUNDARY).contains(&boundary.len()) && boundary.bytes().all(|b| (0x20..0x7f).contains(&b));
    usable.then_some(boundary)
}

/// The value of a parameter (`; name=value` or `; name="value"`) of a header value.
fn parameter(header: &str, wanted: &str) -> Option<String> {
    let (_, mut rest) = header.split_once(';')?;
    loop {
        let (name, after) = rest.split_once('=')?;
        // A parameter without a value before this one.
        let name = name.rsplit(';').next().unwrap_or(name).trim();
        let (value, tail) = if let Some(quoted) = after.trim_start().strip_prefix('"') {
            quoted_value(quoted)?
        } else {
            let (value, tail) = after.split_once(';').unwrap_or((after, ""));
            (value.trim().to_owned(), tail)
        };
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = tail;
    }
}

/// The text up to the closing quote, and what follows it. `None` without a closing quote.
fn quoted_value(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '"' => return Some((value, characters.as_str())),
            // Browsers escape only quotes; a backslash before anything else is part of a file name.
            '\\' => {
                if let Some(escaped @ ('"' | '\\')) = characters.clone().next() {
                    characters.next();
                    value.push(escaped);
                } else {
                    value.push('\\');
                }
            }
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn form(parts: &[(&str, &str)]) -> Vec<u8> {
        let mut body = Vec::new();
        for (headers, value) in parts {
            body.extend_from_slice(format!("--XyZ\r\n{headers}\r\n\r\n{value}\r\n").as_bytes());
        }
        body.extend_from_slice(b"--XyZ--\r\n");
        body
    }

    const TYPE: Option<&str> = Some("multipart/form-data; boundary=XyZ");
    const MODEL: &str = "Content-Disposition: form-data; name=\"model\"";
    const STREAM: &str = "content-disposition: form-data; name=stream";

    #[test]
    fn fields_are_found_beside_a_binary_file() {
        let file = "Content-Disposition: form-data; name=\"file\"; filename=\"a\\\"b; name=model.wav\"\r\nContent-Type: audio/wav";
        let body = form(&[
            (file, "RIFF\0\r\n--Xy\r\n--XyZa\r\n--XyZ-\r\n\r\nmodel"),
            (MODEL, "whisper"),
            (STREAM, "True"),
            ("Content-Disposition: form-data; name=\"temperature\"", "0"),
        ]);
        let files = NonText { parts: 1, bytes: 36 };
        let expected = Form { model: Some("whisper".into()), stream: true, files };
        assert_eq!(Form::parse(TYPE, &body), Ok(expected.clone()));
        // A preamble, padding behind the boundary, and a quoted boundary in the header.
        let mut with_preamble = b"ignored\r\n".to_vec();
        with_preamble.extend_from_slice(&body);
        let quoted = Some("Multipart/Form-Data; charset=utf-8; Boundary=\"XyZ\"");
        assert_eq!(Form::parse(quoted, &with_preamble), Ok(expected));
    }

    #[test]
    fn a_file_named_like_a_field_is_no_field() {
        let body = form(&[("Content-Disposition: form-data; name=\"model\"; filename=\"m\"", "x"), (MODEL, "y")]);
        assert_eq!(Form::parse(TYPE, &body).unwrap().model.as_deref(), Some("y"));
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        let body = form(&[(MODEL, "m")]);
        let long = "x".repeat(MAX_VALUE + 1);
        let long_boundary = format!("multipart/form-data; boundary={}", "x".repeat(MAX_BOUNDARY + 1));
        let many: Vec<_> = vec![("Content-Disposition: form-data; name=\"x\"", ""); MAX_PARTS + 1];
        let cases: [(Option<&str>, Vec<u8>, FormError); 14] = [
            (None, body.clone(), FormError::ContentType),
            (Some("application/json"), body.clone(), FormError::ContentType),
            (Some("multipart/form-data"), body.clone(), FormError::ContentType),
            (Some("multipart/form-data; boundary=\"\""), body.clone(), FormError::ContentType),
            (Some(&long_boundary), body.clone(), FormError::ContentType),
            (Some("multipart/form-data; boundary=abc"), body.clone(), FormError::NoBoundary),
            (TYPE, Vec::new(), FormError::NoBoundary),
            (TYPE, body[..body.len() - 8].to_vec(), FormError::Truncated),
            (TYPE, b"--XyZ\r\nno headers\r\n--XyZ--".to_vec(), FormError::Headers),
            (TYPE, form(&many), FormError::TooManyParts),
            (TYPE, form(&[(MODEL, &long)]), FormError::Value("model")),
            (TYPE, form(&[(STREAM, "maybe")]), FormError::Value("stream")),
            (TYPE, form(&[(MODEL, "a"), (MODEL, "b")]), FormError::DuplicateModel),
            (TYPE, form(&[(&"x".repeat(MAX_PART_HEADERS), "b")]), FormError::Headers),
        ];
        for (content_type, body, expected) in cases {
            assert_eq!(Form::parse(content_type, &body), Err(expected));
        }
    }

    #[test]
    fn limits_are_inclusive() {
        let longest = "x".repeat(MAX_VALUE);
        let parts: Vec<_> = vec![("Content-Disposition: form-data; name=\"x\"", ""); MAX_PARTS - 1];
        let mut all = parts.clone();
        all.push((MODEL, &longest));
        assert_eq!(Form::parse(TYPE, &form(&all)).unwrap().model, Some(longest.clone()));
        assert_eq!(Form::parse(TYPE, &form(&[])), Ok(Form::default()));
        assert_eq!(Form::parse(TYPE, &form(&[(MODEL, " ")])), Ok(Form::default()));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(content_type in ".{0,40}", body in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Form::parse(Some(&content_type), &body);
            let _ = Form::parse(TYPE, &body);
            let _ = Form::parse(Some(&format!("multipart/form-data;{content_type}")), &body);
        }

        #[test]
        fn values_come_back(value in "[a-zA-Z0-9./:_-]{1,60}", file in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut body = b"--XyZ\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n".to_vec();
            body.extend_from_slice(&file);
            body.extend_from_slice(format!("\r\n--XyZ\r\n{MODEL}\r\n\r\n{value}\r\n--XyZ--").as_bytes());
            prop_assert_eq!(Form::parse(TYPE, &body).unwrap().model, Some(value));
        }
    }
}
