//! Tests of the snapshot builder and of the profile annotation.

mod build;
mod profile;
mod selector;
