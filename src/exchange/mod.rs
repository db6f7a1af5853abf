//! The life of one request as a state machine without I/O.
//!
//! Events go in (head, body, prefill outcome, answer bytes, the client leaving), effects come out (accept, start the
//! prefill leg, route, refuse, forward, end). Both adapters drive the same machine; a request without a prefill leg
//! is a plan variant, not another router. Every order of events ends in exactly one [`Effect::End`], and by then all
//! that the request charged is released.
//!
//! ```text
//! AwaitHead ─▶ AwaitBody ─▶ Resolving ─▶ Admitting ─▶ Preparing ─▶ Claiming ─▶ LookingUp ─▶ Prefilling ─▶ AwaitAnswer ─▶ Answering ─▶ Ended
//!                  │  (no count, no shared limit) ──────▲ │ (nothing to ask) ────────▲             ▲              │
//!                  │                                      │  (no prefill leg, or both legs at once) ┘              │
//!                  └────────────┴────────────┴────────────┴── refused, cancelled ──────────────────────────────────┴──▶ Ended
//! ```
//!
//! A body with a content coding is decoded between `AwaitBody` and `Resolving` (`Decoding`).

mod admission;
mod answer;
mod auto;
mod decode;
mod event;
mod headers;
mod machine;
mod native;
mod plan;
mod prepare;
mod session;
#[cfg(test)]
mod tests;
mod whole;
mod world;

pub use admission::{Budget, Permit, Reservation};
pub use answer::is_connect_failure;
pub use decode::{DecodeJob, Decoded};
pub use event::{
    AbortPlan, Adapter, AnswerHead, Effect, Event, LookupCall, OwnAnswer, RequestHead, RoutePlan, WakeCall,
};
pub use headers::{leg_headers, strip_hop_by_hop};
pub use machine::Exchange;
pub use prepare::{PrepareJob, Prepared};
pub use world::{World, WorldSeeds};
