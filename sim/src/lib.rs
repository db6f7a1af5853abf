//! Simulated inference engines: test doubles on real sockets that speak the engines' wire protocols strictly enough to
//! catch a gateway's mistakes. `README.md` beside this crate is their behaviour table.
//!
//! An engine validates what the real one validates, models prefill time, KV capacity, KV transfer and decode speed
//! from a handful of parameters, serves the real metric names, notices disconnects, and records every request. Holds
//! and faults are scripted from outside. It is not a claim about real hardware, it runs no model, and it shares no type
//! with the gateway: both meet only on the wire.
//!
//! ```
//! # async fn example() -> std::io::Result<()> {
//! use tandem_sim::{EngineConfig, Fault, start};
//!
//! let prefill = start(EngineConfig::prefill("m")).await?;
//! let decode = start(EngineConfig::decode("m")).await?;
//! let hold = decode.hold();
//! prefill.script(Fault::on("/v1/").answer(503, "text/plain", "busy"));
//! // ... let the gateway work ...
//! hold.wait_for(1).await;
//! hold.release();
//! assert!(decode.violations().is_empty());
//! # Ok(())
//! # }
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs))]

mod admission;
mod ambient;
mod answer;
mod body;
mod bootstrap;
pub mod cli;
mod config;
mod conn;
mod control;
mod engine;
mod fault;
mod flow;
mod handoff;
mod hold;
mod kv;
mod linger;
mod listen;
mod meeting;
mod meters;
mod page;
mod prompt;
mod record;
mod report;
mod sequence;
mod serve;
mod sglang;
mod side_channel;
mod state;
mod timing;
mod trtllm;
mod vllm;

pub use config::{
    Capacity, Connector, Dialect, EngineConfig, KvLoadFailure, Limits, MetricNames, OnViolation, Role, StreamHead,
};
pub use engine::{Engine, start};
pub use fault::{Cut, CutAfter, Fault, Scripted};
pub use hold::Hold;
pub use prompt::{BLOCK_TOKENS, BYTES_PER_TOKEN};
pub use record::{End, Record};
pub use report::{Stats, Violation, ViolationKind};
pub use timing::Timing;
