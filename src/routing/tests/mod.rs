//! The cascade as a whole.

mod bands;
mod properties;
mod reports;
mod steps;
mod tokens;
