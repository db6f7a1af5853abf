//! The cascade as a whole.

mod bands;
mod filters;
mod health;
pub(super) mod properties;
mod replicas;
mod reports;
mod steps;
mod strategies;
mod stress;
mod tokens;
