//! Tests of manifests, files, endpoints and the builder.

mod builder;
mod files;
mod manifest;
mod standalone;
