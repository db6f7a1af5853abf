//! The cascade as a whole.

mod properties;
mod reports;
mod steps;
mod tokens;
