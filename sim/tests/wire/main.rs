//! Engines on real sockets, seen from the wire.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod aibrix;
mod client;
mod control;
mod disconnect;
mod faults;
mod handoff;
mod load;
mod mooncake;
mod sglang;
mod shapes;
mod trtllm;
mod validation;
