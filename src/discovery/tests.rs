//! Tests of manifests, files, endpoints and the builder.

mod builder;
mod claims;
mod files;
mod manifest;
mod ranks;
mod standalone;
