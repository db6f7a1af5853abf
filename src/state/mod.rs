//! The state plane: what replicas know of one another's work, through Redis.
//!
//! The protocol is decided in [`ledger`], a state machine without I/O, and in the scripts under `lua/`. [`redis`] carries
//! calls to a server and back, and is the only place that knows the client library. [`keys`] writes every key, [`wire`]
//! every packed value that a script opens, [`payload`] every one that none opens, with [`codec`]. [`plane`] is what the
//! gateway sees of it, [`links`] the tasks that run it; [`limits`] are the request-rate limits that replicas share,
//! [`identity`] is how they number themselves, [`responses`] says where stored responses are. Nothing
//! here is on the path of a request, save a claim, a limit and the search for a stored response, and those have a deadline.

pub mod codec;
pub mod findings;
pub mod identity;
pub mod keys;
pub mod ledger;
pub mod limits;
pub mod links;
pub mod payload;
pub mod plane;
pub mod redis;
pub mod responses;
pub mod scripts;
pub mod time;
pub mod wire;
