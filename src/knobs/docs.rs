//! `docs/configuration.md`, made from the tables that the code itself uses.

use std::fmt::Write as _;

use super::{inert, settings};

/// The text of `docs/configuration.md`.
pub fn configuration_markdown() -> String {
    let mut page = String::from(
        "# Configuration\n\n\
         <!-- Generated from src/knobs; `TANDEM_REWRITE_DOCS=1 cargo test --lib generated` writes it anew. -->\n\n\
         Tandem is configured by environment variables, read once at the start. A value that cannot be used leaves the \
         default in place, is named in one warning, and counts in the gauge `tandem_config_errors`. An empty value counts \
         as unset. Booleans are spelled as in Go: `1`, `t`, `T`, `true`, `TRUE`, `True`, and `0`, `f`, `F`, `false`, \
         `FALSE`, `False`.\n\n\
         The column *profile* names the field of `routingConfig` in the pod annotation `model.aibrix.ai/config` that \
         overrides a setting for the requests of that profile.\n",
    );
    for group in settings::GROUPS {
        // Writing to a string cannot fail.
        let _ = write!(
            page,
            "\n## {}\n\n| variable | default | unit | profile | meaning |\n|---|---|---|---|---|\n",
            group.title
        );
        for setting in group.settings {
            let profile = if setting.profile.is_empty() { String::new() } else { format!("`{}`", setting.profile) };
            let _ = writeln!(
                page,
                "| `{}` | {} | {} | {profile} | {} |",
                setting.name, setting.default, setting.unit, setting.meaning
            );
        }
    }
    page.push_str(
        "\n## Variables without effect\n\n\
         Setting one of these is reported with a warning at the start, as is any other variable whose name begins with \
         `AIBRIX_` or `TANDEM_`. A value that asks for nothing (the default of the AIBrix gateway plugin, such as `false` for \
         what is off there and absent here) is not reported. [Migrating from AIBrix](migrating-from-aibrix.md) has all its names.\n\n| variable | why |\n|---|---|\n",
    );
    for row in inert::inert() {
        let _ = writeln!(page, "| `{}` | {} |", row.name, row.note);
    }
    page
}

/// The table of strategies in `docs/strategies.md`.
#[cfg(test)]
pub(crate) fn registered_markdown() -> String {
    let mut table = String::from("| name | served as | what is the same and what is not |\n|---|---|---|\n");
    for entry in super::REGISTERED {
        let served = if entry.name == entry.served_as { String::new() } else { format!("`{}`", entry.served_as) };
        let _ = writeln!(table, "| `{}` | {served} | {} |", entry.name, entry.what);
    }
    table
}

/// Every variable that acts, with the profile field that overrides it (under `routingConfig`; empty = none).
#[cfg(test)]
pub(crate) fn described() -> Vec<(&'static str, &'static str)> {
    settings::GROUPS.iter().flat_map(|group| group.settings).map(|setting| (setting.name, setting.profile)).collect()
}

/// Every variable without effect.
#[cfg(test)]
pub(crate) fn inert_names() -> impl Iterator<Item = &'static str> {
    inert::inert().map(|row| row.name)
}

/// Compares a generated page with its file, or writes the file when `TANDEM_REWRITE_DOCS` is 1.
#[cfg(test)]
pub(crate) fn assert_generated(file: &str, page: &str) {
    use super::{Environment, ProcessEnvironment};
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    if ProcessEnvironment.get("TANDEM_REWRITE_DOCS").as_deref() == Some("1") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, page).unwrap();
    }
    let on_disk = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(on_disk == page, "{file} is out of step: run TANDEM_REWRITE_DOCS=1 cargo test --lib generated");
}
