//! The state plane's scripts and state machine against a real Redis.

mod aliases;
mod announcements;
mod balance;
mod busy;
mod calls;
mod charges;
mod cluster;
mod cost;
mod exactness;
mod faults;
mod findings;
mod identity;
mod late;
mod limits;
mod model;
mod processes;
mod replicas;
mod resp;
mod sentinel;
mod settings;
mod tls;
mod under_load;
mod world;
