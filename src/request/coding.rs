//! Content codings of request bodies (RFC 9110, section 8.4). A body is decoded before it is read, and goes on decoded:
//! engines read none of them.
//!
//! Decoding is hostile input's favourite place: the output is bounded while it is made, so are members and frames, and a
//! zstd window as RFC 9659 bounds it.

use std::io::Read;

use bytes::Bytes;
use flate2::bufread::GzDecoder;
use flate2::{Decompress, FlushDecompress, Status};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};

/// What [`Coding::read`] takes, for the header `accept-encoding` of a refusal.
pub const ACCEPTED: &str = "gzip, deflate, zstd, identity";

/// Codings that may lie over one another.
const MAX_CODINGS: usize = 3;

/// Members of a gzip body, and frames of a zstd body.
const MAX_MEMBERS: usize = 1024;

/// The largest window of a zstd frame, bytes (RFC 9659, section 3).
const MAX_WINDOW: u64 = 8 << 20;

/// What is decoded, and accounted for, at a time, bytes.
const STEP: usize = 64 * 1024;

/// Longest name of a coding or charset that a refusal repeats, bytes.
const MAX_SHOWN: usize = 32;

/// A coding that can be undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// `gzip`, `x-gzip`.
    Gzip,
    /// `deflate`: zlib, or, as some clients take it, deflate alone.
    Deflate,
    /// `zstd`.
    Zstd,
}

/// A body in a form that is not read. Each becomes a 415.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnreadableForm {
    /// An unknown coding.
    #[error("content-encoding {0} is not supported; {ACCEPTED} are")]
    Coding(String),
    /// Too many of them.
    #[error("a request body may have {MAX_CODINGS} content codings at most")]
    TooMany,
    /// A charset other than UTF-8 and its subset.
    #[error("charset {0} is not supported; utf-8 is")]
    Charset(String),
}

/// A body that cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Not of its coding, or cut short.
    #[error("the request body is not valid {0}")]
    Corrupt(&'static str),
    /// Longer than the limit; nothing beyond it was decoded.
    #[error("the request body is longer than {0} bytes when decoded")]
    TooLong(usize),
    /// There is no room for it.
    #[error("too many request bytes are being held by this gateway replica")]
    NoRoom,
}

impl Coding {
    /// The codings of a body, the outermost first; empty = it can be read as it is.
    pub fn read(headers: &HeaderMap) -> Result<Vec<Coding>, UnreadableForm> {
        charset(headers)?;
        let mut codings = Vec::new();
        for value in headers.get_all(CONTENT_ENCODING) {
            for name in value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
                match name.to_ascii_lowercase().as_slice() {
                    b"" | b"identity" => {}
                    b"gzip" | b"x-gzip" => codings.push(Coding::Gzip),
                    b"deflate" => codings.push(Coding::Deflate),
                    b"zstd" => codings.push(Coding::Zstd),
                    _ => return Err(UnreadableForm::Coding(shown(name))),
                }
                if codings.len() > MAX_CODINGS {
                    return Err(UnreadableForm::TooMany);
                }
            }
        }
        codings.reverse();
        Ok(codings)
    }

    fn name(self) -> &'static str {
        match self {
            Coding::Gzip => "gzip",
            Coding::Deflate => "deflate",
            Coding::Zstd => "zstd",
        }
    }

    fn decode(self, body: &[u8], sink: &mut Sink<'_>) -> Result<(), Failure> {
        match self {
            Coding::Gzip => gzip(body, sink),
            Coding::Deflate => deflate(body, sink),
            Coding::Zstd => zstd(body, sink),
        }
    }
}

/// Undoes codings, the first one first. The result has at most `limit` bytes, and so has what lies between two codings.
/// `take` is asked for room before bytes are kept.
pub fn decode(
    codings: &[Coding],
    body: &Bytes,
    limit: usize,
    take: &mut dyn FnMut(usize) -> bool,
) -> Result<Bytes, DecodeError> {
    let mut body = body.clone();
    for coding in codings {
        let mut sink = Sink { out: Vec::new(), limit, take };
        coding.decode(&body, &mut sink).map_err(|failure| match failure {
            Failure::Corrupt => DecodeError::Corrupt(coding.name()),
            Failure::TooLong => DecodeError::TooLong(limit),
            Failure::NoRoom => DecodeError::NoRoom,
        })?;
        body = sink.out.into();
    }
    Ok(body)
}

fn charset(headers: &HeaderMap) -> Result<(), UnreadableForm> {
    let Some(kind) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    // The value of a boundary may hold anything, so that it is looked at as it is written.
    for parameter in kind.as_bytes().split(|byte| *byte == b';').skip(1) {
        let mut halves = parameter.splitn(2, |byte| *byte == b'=');
        let (name, value) = (halves.next().unwrap_or_default(), halves.next().unwrap_or_default());
        if !name.trim_ascii().eq_ignore_ascii_case(b"charset") {
            continue;
        }
        let value = value.trim_ascii();
        let value = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value);
        let known = ["", "utf-8", "utf8", "us-ascii", "ascii"];
        if !known.iter().any(|known| value.eq_ignore_ascii_case(known.as_bytes())) {
            return Err(UnreadableForm::Charset(shown(value)));
        }
    }
    Ok(())
}

fn shown(name: &[u8]) -> String {
    let graphic = |byte: &&u8| byte.is_ascii_graphic() && !b"\"\\<>".contains(byte);
    name.iter().filter(graphic).take(MAX_SHOWN).map(|byte| char::from(*byte)).collect()
}

enum Failure {
    Corrupt,
    TooLong,
    NoRoom,
}

struct Sink<'t> {
    out: Vec<u8>,
    limit: usize,
    take: &'t mut dyn FnMut(usize) -> bool,
}

impl Sink<'_> {
    fn keep(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if self.out.len().saturating_add(bytes.len()) > self.limit {
            return Err(Failure::TooLong);
        }
        if !(self.take)(bytes.len()) {
            return Err(Failure::NoRoom);
        }
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    fn drain(&mut self, decoder: &mut impl Read) -> Result<(), Failure> {
        let mut step = vec![0; STEP];
        loop {
            let read = decoder.read(&mut step).map_err(|_| Failure::Corrupt)?;
            if read == 0 {
                return Ok(());
            }
            self.keep(step.get(..read).unwrap_or_default())?;
        }
    }
}

fn gzip(mut body: &[u8], sink: &mut Sink<'_>) -> Result<(), Failure> {
    for _ in 0..MAX_MEMBERS {
        // Checks the sum and the length at the end of a member, and stops there.
        let mut member = GzDecoder::new(body);
        sink.drain(&mut member)?;
        body = member.into_inner();
        if body.is_empty() {
            return Ok(());
        }
    }
    Err(Failure::Corrupt)
}

fn deflate(mut body: &[u8], sink: &mut Sink<'_>) -> Result<(), Failure> {
    let zlib = matches!(body, [first, second, ..]
        if first & 0x0f == 8 && (u16::from(*first) << 8 | u16::from(*second)).is_multiple_of(31));
    let mut state = Decompress::new(zlib);
    let mut step = vec![0; STEP];
    loop {
        let (read, written) = (state.total_in(), state.total_out());
        let status = state.decompress(body, &mut step, FlushDecompress::None).map_err(|_| Failure::Corrupt)?;
        let (read, written) = ((state.total_in() - read) as usize, (state.total_out() - written) as usize);
        sink.keep(step.get(..written).unwrap_or_default())?;
        body = body.get(read..).unwrap_or_default();
        match status {
            Status::StreamEnd if body.is_empty() => return Ok(()),
            Status::StreamEnd => return Err(Failure::Corrupt),
            // It wants more, and there is none.
            _ if read == 0 && written == 0 => return Err(Failure::Corrupt),
            _ => {}
        }
    }
}

fn zstd(mut body: &[u8], sink: &mut Sink<'_>) -> Result<(), Failure> {
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(MAX_WINDOW);
    for _ in 0..MAX_MEMBERS {
        match StreamingDecoder::new_with_decoder(&mut body, &mut decoder) {
            Ok(mut frame) => {
                sink.drain(&mut frame)?;
                let frame = frame.into_frame_decoder();
                let told = frame.get_checksum_from_data();
                if told.is_some() && told != frame.get_calculated_checksum() {
                    return Err(Failure::Corrupt);
                }
            }
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                body = body.get(length as usize..).ok_or(Failure::Corrupt)?;
            }
            Err(_) => return Err(Failure::Corrupt),
        }
        if body.is_empty() {
            return Ok(());
        }
    }
    Err(Failure::Corrupt)
}
