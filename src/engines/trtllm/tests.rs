//! Interop cases of `engine-protocols` section 10, as far as they are about bodies.

mod answers;
mod bodies;
mod generation;

use bytes::Bytes;

use super::*;
use crate::request::Endpoint;

const MESSAGES: &str = r#""messages":[{"role":"user","content":"h\u00e9"}]"#;

/// An id that no float can hold.
const ID: u64 = 9_007_199_254_740_993;

fn parse(endpoint: Endpoint, body: &str) -> ParsedBody {
    ParsedBody::parse(endpoint, None, Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

fn chat(members: &str) -> ParsedBody {
    parse(Endpoint::ChatCompletions, &format!("{{\"model\":\"m\",{MESSAGES}{members}}}"))
}

fn completions(members: &str) -> ParsedBody {
    parse(Endpoint::Completions, &format!("{{\"model\":\"m\",\"prompt\":\"a b\"{members}}}"))
}

fn text(bytes: &Bytes) -> &str {
    std::str::from_utf8(bytes).unwrap()
}
