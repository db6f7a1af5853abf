//! The interop cases of the engine protocols, each through real Envoy and through the HTTP front, against strict
//! simulated engines.

mod leaving;
mod prefill_failures;
mod several;
mod vllm;
mod vllm_handoff;
