//! Rows of the Mooncake traces (kvcache-ai/Mooncake, `FAST25-release/traces`).

use serde::Deserialize;
use xxhash_rust::xxh64::xxh64;

use super::Row;

#[derive(Deserialize)]
struct Fields {
    /// Milliseconds.
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    /// One for each block of the prompt, the last one perhaps in part.
    hash_ids: Vec<u64>,
}

/// Reads one row. Of its blocks, the full ones get chained hashes: what neither the gateway nor an engine can find
/// again is the rest of a block.
pub(super) fn row(line: &str, block_tokens: u64) -> Result<Row, String> {
    let fields: Fields = serde_json::from_str(line).map_err(|error| {
        // It counts lines from the start of what it was given, which is one line.
        let text = error.to_string();
        text.split(" at line ").next().unwrap_or_default().to_owned()
    })?;
    let Fields { timestamp, input_length, output_length, hash_ids } = fields;
    // 2^53 ms; NaN is in no range.
    if !(0.0..=9.0e15).contains(&timestamp) {
        return Err("timestamp is not a number of milliseconds".to_owned());
    }
    let block_tokens = block_tokens.max(1);
    if input_length.div_ceil(block_tokens) != hash_ids.len() as u64 {
        let ids = hash_ids.len();
        return Err(format!("{ids} hash_ids for {input_length} tokens in blocks of {block_tokens}"));
    }
    let full = usize::try_from(input_length / block_tokens).unwrap_or(usize::MAX);
    let chained = hash_ids.iter().take(full).scan(0, |previous, id| {
        *previous = xxh64(&id.to_le_bytes(), *previous);
        Some(*previous)
    });
    let nanos = (timestamp * 1e6).round() as i128;
    Ok(Row { nanos, prompt: input_length, output: output_length, hashes: chained.collect() })
}
