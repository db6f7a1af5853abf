//! Integration tests: real processes on real sockets. One binary, so that the harness is compiled once.
//!
//! `scripts/test.sh` fetches what these tests start (Envoy, Redis) and tells them where it is. No test depends on
//! another one, on an order, or on a fixed port; everything that waits has a deadline.
#![allow(clippy::disallowed_methods, reason = "these tests live in real time, among real processes")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests fail by panicking")]
#![allow(clippy::large_futures, reason = "a scenario is one future, made once")]

mod bodies;
mod deploy;
mod envoy_file;
mod ext_proc;
mod hardening;
mod harness;
mod harness_itself;
mod interop;
mod kubernetes;
mod matrix;
mod metrics;
mod observability;
mod openai_client;
mod readme;
mod real;
mod real_kubernetes;
mod reports;
mod scale;
mod scenarios;
mod state;
mod tls;
mod traces;
