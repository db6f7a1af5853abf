//! The state plane's scripts and state machine against a real Redis.

mod announcements;
mod calls;
mod cluster;
mod cost;
mod exactness;
mod faults;
mod findings;
mod late;
mod limits;
mod model;
mod replicas;
mod resp;
mod sentinel;
mod shared;
mod tls;
mod under_load;
mod world;
