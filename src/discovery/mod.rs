//! Where pods come from: the Kubernetes API, manifest files (`--pods`) or a fixed list of endpoints (`--standalone`).
//!
//! A source delivers the whole fleet as a list of [`crate::fleet::PodSpec`]; a [`FleetBuilder`] turns it into the
//! snapshot that requests read. Parsing is pure; the tasks here are those that watch files or the API.

mod builder;
mod claims;
mod containers;
mod documents;
mod files;
pub mod kubernetes;
mod manifest;
mod ranks;
mod standalone;
mod translate;

#[cfg(test)]
mod tests;

pub use builder::{Applied, Departed, DepartedListener, FleetBuilder, ProblemList};
pub use documents::{Documents, ManifestError, read_documents};
pub use files::{Found, POLL_INTERVAL, PodFiles, watch_files};
pub use manifest::{Manifest, PodReader, Reading};
pub use standalone::{EndpointsError, load_endpoints, parse_endpoints};
pub use translate::route_table;
