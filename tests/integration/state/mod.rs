//! The state plane's scripts and state machine against a real Redis.

mod balance;
mod busy;
mod calls;
mod charges;
mod cost;
mod exactness;
mod findings;
mod late;
mod limits;
mod model;
mod processes;
mod replicas;
mod resp;
mod settings;
mod world;
