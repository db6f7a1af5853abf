//! Names: of metrics, of modules, of places on somebody's disk.

use super::{File, at};

/// How the gateway's metric names begin.
const METRICS: [&str; 4] = ["gateway_", "pd_", "tandem_", "aibrix_"];

/// The file of metric names.
const HOME: &str = "src/telemetry/names.rs";

/// Files that hold other text of that form: values of the label `status`, after the reference gateway's names.
const LABEL_VALUES: [&str; 2] = ["src/error.rs", "src/telemetry/record.rs"];

/// Names under which unrelated things gather.
const DRAWERS: [&str; 7] = ["util", "utils", "common", "helper", "helpers", "misc", "shared"];

/// Metric names are written in one file.
pub fn metric_names(files: &[File]) -> Vec<String> {
    let mut broken = Vec::new();
    let elsewhere = |file: &&File| file.in_src() && file.path != HOME && !LABEL_VALUES.contains(&file.path.as_str());
    for file in files.iter().filter(elsewhere) {
        for (line, text) in file.code() {
            if let Some(start) = METRICS.iter().find(|start| text.contains(&format!("\"{start}"))) {
                broken.push(at(file, line, &format!("a name that starts with {start} belongs in {HOME}")));
            }
        }
    }
    broken
}

/// No module is named after nothing.
pub fn drawers(files: &[File]) -> Vec<String> {
    let drawer = |file: &&File| {
        let parts = file.path.split('/').map(|part| part.strip_suffix(".rs").unwrap_or(part));
        file.is_rust() && parts.into_iter().any(|part| DRAWERS.contains(&part))
    };
    files.iter().filter(drawer).map(|file| at(file, 1, "a module is named after what it holds")).collect()
}

/// Nothing depends on, or tells of, the machine it was written on.
pub fn machine_paths(files: &[File]) -> Vec<String> {
    // Put together here, so that this file does not find itself.
    let roots = ["work", "root", "Users", "home/user", "home/runner", "tmp/bash"].map(|root| format!("/{root}/"));
    let mut broken = Vec::new();
    for file in files {
        for (index, line) in file.text.lines().enumerate() {
            for root in &roots {
                // A path starts there: `foo/work/x` and `https://host/work/x` are something else.
                let starts = line.match_indices(root.as_str()).any(|(at, _)| {
                    let before = line[..at].chars().next_back();
                    !before.is_some_and(|c| c.is_alphanumeric() || "_-.}".contains(c))
                });
                if starts {
                    broken.push(at(file, index + 1, &format!("a path of one machine ({root})")));
                }
            }
        }
    }
    broken
}

#[test]
fn finds_metric_names() {
    for (path, text, expected) in [
        (HOME, "const A: &str = \"gateway_request_total\";", 0),
        ("src/error.rs", "\"gateway_req_headers_fail\"", 0),
        ("src/routing/mod.rs", "counter(\"pd_selected\")", 1),
        ("src/app.rs", "counter(\"tandem_x\")", 1),
        ("src/app.rs", "counter(\"aibrix_x\") // \"pd_x\"", 1),
        ("src/app.rs", "// \"gateway_x\"", 0),
        ("src/app.rs", "\"my_gateway_x\"", 0),
    ] {
        assert_eq!(metric_names(&[File::sample(path, text)]).len(), expected, "{path}: {text}");
    }
}

#[test]
fn finds_drawers() {
    for (path, expected) in [
        ("src/util.rs", 1),
        ("src/fleet/helpers.rs", 1),
        ("sim/src/common/mod.rs", 1),
        ("src/fleet/utility.rs", 0),
        ("docs/common.md", 0),
    ] {
        assert_eq!(drawers(&[File::sample(path, "")]).len(), expected, "{path}");
    }
}

#[test]
fn finds_machine_paths() {
    for (text, expected) in [
        (format!("see /{}/main", "work"), 1),
        (format!("`/{}/.cargo`", "root"), 1),
        (format!("https://host/{}/x", "work"), 0),
        (format!("${{x}}/{}/x", "work"), 0),
        ("/workspace/x".to_owned(), 0),
        ("/usr/bin".to_owned(), 0),
    ] {
        assert_eq!(machine_paths(&[File::sample("README.md", &text)]).len(), expected, "{text}");
    }
}
