//! The cascade as a whole.

mod bands;
mod filters;
pub(super) mod properties;
mod replicas;
mod reports;
mod steps;
mod stress;
mod tokens;
