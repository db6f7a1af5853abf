//! The interop cases of the engine protocols, each through real Envoy and through the HTTP front, against strict
//! simulated engines.

mod vllm;
