//! The state plane's scripts and state machine against a real Redis.

mod calls;
mod cost;
mod exactness;
mod findings;
mod late;
mod limits;
mod model;
mod replicas;
mod resp;
mod shared;
mod world;
