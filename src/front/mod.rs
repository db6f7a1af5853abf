//! The HTTP adapter: serves the OpenAI API directly and streams the decode answer itself. For places without Envoy.
//!
//! HTTP/1.1 only. A client that closes its connection is noticed at once, in every phase.

mod peer;
mod serve;

pub use serve::serve;
