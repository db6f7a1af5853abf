//! Many streams, long answers, connections that engines close, replicas that come and go: the real Envoy with the
//! shipped file, real replicas, simulated engines.

mod load;
mod rollout;
mod stale_connections;
mod streams;
mod timers;
