//! Peers that do what is allowed and hardly ever happens.

mod ext_proc;
