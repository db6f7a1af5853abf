//! Tandem: a horizontally scaled gateway for large-language-model serving with prefill/decode (PD) disaggregation.
//!
//! `ARCHITECTURE.md` is the map. In short, from the ground up; a module imports only what stands above it in this
//! list:
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs))]

// Floor 0: pure building blocks.
pub mod clock;
pub mod error;
pub mod http_client;
pub mod knobs;
pub mod panics;
pub mod request;
pub mod response;
pub mod rng;
pub mod telemetry;
pub mod tls;

// Floor 1: what is known about the fleet.
pub mod bands;
pub mod discovery;
pub mod fleet;
pub mod load;
pub mod prefix;
pub mod scrape;
pub mod state;

// Floor 2: decisions and engine dialects.
pub mod engines;
pub mod routing;

// Floor 3: the life of one request, without I/O.
pub mod exchange;

// Floor 4: carrying it out, and the adapters.
pub mod admin;
pub mod drive;
pub mod ext_proc;
pub mod front;
pub mod replay;

// Floor 5: composition.
pub mod app;
pub mod cli;
