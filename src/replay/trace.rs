//! Traces of arrivals: Mooncake JSON lines and Azure CSV, plain or gzipped.
//!
//! A line that makes no sense is an error that names it: a trace that is read in part would give numbers that mean
//! nothing.

mod azure;
mod mooncake;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use flate2::bufread::MultiGzDecoder;

/// Tokens of one hashed block in the published Mooncake traces.
pub const MOONCAKE_BLOCK_TOKENS: u64 = 512;

/// More tokens in a prompt or an answer are taken for a mistake.
const MOST_TOKENS: u64 = 1 << 24;
/// A longer line is taken for a mistake: 1 MiB are some 100,000 block ids.
const MOST_LINE_BYTES: u64 = 1 << 20;

/// The format of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.
    Mooncake,
    /// CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`.
    Azure,
}

impl Format {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Format::Mooncake => "mooncake",
            Format::Azure => "azure",
        }
    }

    /// By the first line: a JSON object, or a CSV header.
    fn of_line(line: &str) -> Option<Format> {
        match line.trim_start_matches('\u{feff}').trim_start() {
            line if line.starts_with('{') => Some(Format::Mooncake),
            line if line.starts_with(azure::TIMESTAMP) => Some(Format::Azure),
            _ => None,
        }
    }
}

/// How to read a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadOptions {
    /// The format; `None` = by the first line.
    pub format: Option<Format>,
    /// At most so many requests; `None` = all.
    pub limit: Option<usize>,
    /// Arrivals come so many times as fast.
    pub speed: f64,
    /// Tokens of one block in a Mooncake trace.
    pub block_tokens: u64,
}

impl Default for ReadOptions {
    fn default() -> ReadOptions {
        ReadOptions { format: None, limit: None, speed: 1.0, block_tokens: MOONCAKE_BLOCK_TOKENS }
    }
}

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it arrives, after the first one.
    pub at: Duration,
    /// Prompt tokens, at least 1.
    pub prompt: u64,
    /// Tokens of the answer, at least 1.
    pub output: u64,
    /// Chained hashes of the full blocks of the prompt; empty when the trace does not tell.
    pub hashes: Arc<[u64]>,
}

/// A trace, ordered by arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// What it was.
    pub format: Format,
    /// Tokens of one block.
    pub block_tokens: u64,
    /// At least one request.
    pub requests: Vec<Request>,
}

impl Trace {
    /// From the first arrival to the last.
    pub fn span(&self) -> Duration {
        self.requests.last().map_or(Duration::ZERO, |request| request.at)
    }

    /// The same requests; those that arrive in the same instant are spread evenly over the time to the next one. Undoes
    /// the coarse clock of a trace. The last instant stays as it is.
    #[must_use]
    pub fn evened(&self) -> Trace {
        let mut trace = self.clone();
        let mut next = None;
        for together in trace.requests.chunk_by_mut(|a, b| a.at == b.at).rev() {
            let at = together.first().map_or(Duration::ZERO, |request| request.at);
            let step = next.unwrap_or(at).saturating_sub(at) / u32::try_from(together.len()).unwrap_or(u32::MAX);
            for (request, turn) in together.iter_mut().zip(0u32..) {
                request.at = at + step * turn;
            }
            next = Some(at);
        }
        trace
    }

    /// The moments at which they arrive.
    pub fn arrivals(&self) -> impl Iterator<Item = Duration> {
        self.requests.iter().map(|request| request.at)
    }

    /// The same requests, arriving `factor` times as fast.
    #[must_use]
    pub fn faster(&self, factor: f64) -> Trace {
        let mut trace = self.clone();
        for request in &mut trace.requests {
            // A factor that makes no time of it leaves the arrival where it was.
            request.at = Duration::try_from_secs_f64(request.at.as_secs_f64() / factor).unwrap_or(request.at);
        }
        trace
    }
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened.
    #[error("cannot open it: {0}")]
    Open(#[source] std::io::Error),
    /// Reading failed, as it does at the end of a file that was cut.
    #[error("line {line}: cannot read it: {error}")]
    Read {
        /// The line, from 1.
        line: usize,
        /// What went wrong.
        error: std::io::Error,
    },
    /// A line makes no sense.
    #[error("line {line}: {reason}")]
    Line {
        /// The line, from 1.
        line: usize,
        /// Why.
        reason: String,
    },
    /// No request in it.
    #[error("there is no request in it")]
    Empty,
}

/// A row as a format gives it: nanoseconds on a line that starts anywhere.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    nanos: i128,
    prompt: u64,
    output: u64,
    hashes: Arc<[u64]>,
}

/// Reads a trace file.
pub fn read_file(path: &Path, options: ReadOptions) -> Result<Trace, TraceError> {
    let mut reader = BufReader::new(File::open(path).map_err(TraceError::Open)?);
    let start = reader.fill_buf().map_err(TraceError::Open)?;
    if start.starts_with(&[0x1f, 0x8b]) {
        read(BufReader::new(MultiGzDecoder::new(reader)), options)
    } else {
        read(reader, options)
    }
}

/// Reads a trace, plain text.
pub fn read(mut reader: impl BufRead, options: ReadOptions) -> Result<Trace, TraceError> {
    let mut rows: Vec<Row> = Vec::new();
    let mut format = options.format;
    let mut number = 0;
    let mut text = String::new();
    while options.limit.is_none_or(|limit| rows.len() < limit) {
        text.clear();
        number += 1;
        let failed = |error| TraceError::Read { line: number, error };
        let wrong = |reason: String| TraceError::Line { line: number, reason };
        if reader.by_ref().take(MOST_LINE_BYTES).read_line(&mut text).map_err(failed)? == 0 {
            break;
        }
        if text.len() as u64 == MOST_LINE_BYTES {
            return Err(wrong(format!("longer than {MOST_LINE_BYTES} bytes")));
        }
        let line = text.trim();
        if line.is_empty() {
            continue;
        }
        let known = format.or_else(|| Format::of_line(line));
        let known = known.ok_or_else(|| wrong("neither a JSON object nor the header of an Azure trace".to_owned()))?;
        format = Some(known);
        let row = match known {
            Format::Mooncake => mooncake::row(line, options.block_tokens).map(Some),
            Format::Azure => azure::row(line),
        };
        rows.extend(row.and_then(|row| row.map(plausible).transpose()).map_err(wrong)?);
    }
    let format = format.ok_or(TraceError::Empty)?;
    // Rows of one moment stay in their order.
    rows.sort_by_key(|row| row.nanos);
    let first = rows.first().ok_or(TraceError::Empty)?.nanos;
    let request = |row: Row| Request {
        at: Duration::from_nanos(((row.nanos - first) as f64 / options.speed).round() as u64),
        // Nothing is computed for nothing: an empty prompt or answer counts as one token.
        prompt: row.prompt.max(1),
        output: row.output.max(1),
        hashes: row.hashes,
    };
    let block_tokens = options.block_tokens.max(1);
    Ok(Trace { format, block_tokens, requests: rows.into_iter().map(request).collect() })
}

fn plausible(row: Row) -> Result<Row, String> {
    let longest = row.prompt.max(row.output);
    if longest > MOST_TOKENS { Err(format!("{longest} tokens in one request")) } else { Ok(row) }
}
