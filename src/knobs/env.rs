//! Where configuration text comes from, and what was made of it.

use std::fmt::Write as _;

/// Where configuration text comes from: the process environment, or a map in tests.
pub trait Environment {
    /// The value of a variable, if set.
    fn get(&self, name: &str) -> Option<String>;

    /// The names of all variables, to find misspelt ones. A source that cannot list them returns none.
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    /// The machine's host name.
    fn host_name(&self) -> Option<String> {
        None
    }
}

/// The environment of this process: the one place that asks the operating system for it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessEnvironment;

impl Environment for ProcessEnvironment {
    #[allow(clippy::disallowed_methods, reason = "this is the one place that may")]
    fn get(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    #[allow(clippy::disallowed_methods, reason = "this is the one place that may")]
    fn names(&self) -> Vec<String> {
        std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect()
    }

    fn host_name(&self) -> Option<String> {
        // Linux; elsewhere shells export the variable.
        let from_kernel = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        from_kernel.or_else(|| self.get("HOSTNAME")).map(|name| name.trim().to_owned()).filter(|name| !name.is_empty())
    }
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

impl Origin {
    /// For logs and `/debug/fleet`.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Default => "default",
            Origin::Environment => "environment",
            Origin::DefaultAfterBadValue => "default (bad value)",
        }
    }
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
    /// Every setting, in the order of `docs/configuration.md`.
    pub settings: Vec<Setting>,
    /// One sentence for each value that was not usable, and for each variable that is set but has no effect here.
    pub warnings: Vec<String>,
    /// One sentence for each value that can be used and costs something.
    pub notes: Vec<String>,
    /// How many settings kept their default because the value was not usable; gauge `tandem_config_errors`.
    pub config_errors: usize,
}

impl Report {
    /// The settings that differ from their default, as an aligned table, and a last line that counts the rest.
    pub fn table(&self) -> String {
        let shown: Vec<&Setting> = self.settings.iter().filter(|setting| setting.origin != Origin::Default).collect();
        let width = shown.iter().map(|setting| setting.name.len()).max().unwrap_or(0);
        let mut table = String::new();
        for setting in &shown {
            // Writing to a string cannot fail.
            let _ = writeln!(table, "{:width$}  {}  ({})", setting.name, setting.value, setting.origin.name());
        }
        let _ = write!(table, "{} settings at their defaults", self.settings.len() - shown.len());
        table
    }

    /// Logs every setting at debug, the table and each note at info, and each warning at warn.
    pub fn log(&self) {
        for Setting { name, value, origin } in &self.settings {
            tracing::debug!(name, value, origin = origin.name(), "setting");
        }
        tracing::info!("configuration:\n{}", self.table());
        for note in &self.notes {
            tracing::info!("{note}");
        }
        for warning in &self.warnings {
            tracing::warn!("{warning}");
        }
    }
}

/// The configuration forbids to start: going on would fail every request or do something else than was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("refusing to start: {}", reasons.join("; "))]
pub struct Refusal {
    /// One sentence for each reason.
    pub reasons: Vec<String>,
}
