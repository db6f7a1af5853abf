//! Tests of the snapshot builder and of the profile annotation.

mod aliases;
mod build;
mod profile;
mod selector;
