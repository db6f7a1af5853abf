//! Tests of the request modules.

mod bodies;
mod coding;
mod parts;
mod prompts;
mod splicing;

use bytes::Bytes;

use super::{BodyError, Endpoint, ParsedBody};

fn parse(endpoint: Endpoint, body: impl AsRef<[u8]>) -> Result<ParsedBody, BodyError> {
    ParsedBody::parse(endpoint, None, Bytes::copy_from_slice(body.as_ref()))
}

fn chat(body: impl AsRef<[u8]>) -> ParsedBody {
    parse(Endpoint::ChatCompletions, body).unwrap()
}
