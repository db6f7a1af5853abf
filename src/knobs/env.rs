//! Reading the environment: the one file that does.

use super::Knobs;

/// Where configuration text comes from: the process environment, or a map in tests.
pub trait Environment {
    /// The value of a variable, if set.
    fn get(&self, name: &str) -> Option<String>;
}

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The built-in default.
    Default,
    /// The environment.
    Environment,
    /// The environment had an unusable value; the default stands.
    DefaultAfterBadValue,
}

/// One variable as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The variable.
    pub name: &'static str,
    /// The effective value as text; secrets as `[secret]`.
    pub value: String,
    /// Its origin.
    pub origin: Origin,
}

/// What start-up tells about the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Every setting, in a fixed order.
    pub settings: Vec<Setting>,
    /// One sentence for each value that was not usable, and for each variable that is set but has no effect here.
    pub warnings: Vec<String>,
}

impl Knobs {
    /// Reads and checks everything.
    pub fn read(_environment: &dyn Environment) -> (Knobs, Report) {
        unreachable!()
    }
}
