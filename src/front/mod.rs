//! The HTTP adapter: serves the OpenAI API directly and streams the decode answer itself. For places without Envoy.
//!
//! HTTP/1.1 only. A client that closes its connection is noticed at once, in every phase; one that has sent more than
//! its request (pipelining) only when the next byte cannot be sent to it. What a client can hold is bounded: the size
//! and the arrival of a head, the arrival of a body, the time without taking anything in, the number of connections.

mod body;
mod cors;
mod peer;
mod serve;
mod stall;
#[cfg(test)]
mod tests;

pub use serve::serve;
