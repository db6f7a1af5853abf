//! What lies under `deploy/`, the Dockerfile and the compose file: rendered, checked against schemas, compared with the code and
//! with one another, and started as far as that goes without a cluster and without Docker.

mod beside_aibrix;
mod carried_over;
mod compose;
mod drain;
mod envoy_gateway;
mod image;
mod manifests;
mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::harness::process::tool;

/// Everything for a cluster with Envoy Gateway.
const ALL: &str = "deploy/kubernetes";
/// In the place of AIBrix's plugin.
const AIBRIX: &str = "deploy/kubernetes/overlays/aibrix";
/// With an Envoy of its own.
const BARE: &str = "deploy/kubernetes/overlays/bare-envoy";

/// TLS between Envoy and ext_proc.
const TLS: &str = "deploy/kubernetes/overlays/tls";

/// What `manifests.py` prints.
#[derive(Debug, Deserialize)]
pub struct Rendered {
    /// By folder.
    pub kustomize: BTreeMap<String, Vec<Value>>,
    /// By case.
    pub helm: BTreeMap<String, Vec<Value>>,
    compose: Value,
    problems: Vec<String>,
    without_schema: BTreeSet<String>,
}

/// A file of the repository.
fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

pub fn text(relative: &str) -> String {
    std::fs::read_to_string(path(relative)).unwrap_or_else(|error| panic!("{relative}: {error}"))
}

pub fn yaml(relative: &str) -> Value {
    serde_saphyr::from_str(&text(relative)).unwrap_or_else(|error| panic!("{relative}: {error}"))
}

/// Everything, rendered once for all tests.
pub fn rendered() -> &'static Rendered {
    static RENDERED: OnceLock<Rendered> = OnceLock::new();
    RENDERED.get_or_init(|| {
        let output = Command::new(tool("TANDEM_TEST_PYTHON", "python"))
            .arg(path("tests/integration/deploy/manifests.py"))
            .arg(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("run python");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("read what manifests.py prints")
    })
}

/// All groups of objects, by a name for messages.
pub fn groups() -> impl Iterator<Item = (String, &'static Vec<Value>)> {
    let rendered = rendered();
    let kustomize = rendered.kustomize.iter().map(|(name, objects)| (name.clone(), objects));
    kustomize.chain(rendered.helm.iter().map(|(name, objects)| (format!("helm, {name}"), objects)))
}

/// The one object of that kind and name.
fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let mut found = objects.iter().filter(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    let first = found.next().unwrap_or_else(|| panic!("no {kind} {name}"));
    assert!(found.next().is_none(), "several {kind} {name}");
    first
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// The workload that runs Tandem, and its container, in those groups that have one.
fn gateways() -> Vec<(String, &'static Value, &'static Value)> {
    let mut found = Vec::new();
    for (group, objects) in groups() {
        for kind in ["Deployment", "StatefulSet"] {
            for workload in of_kind(objects, kind) {
                let containers = list(&workload["spec"]["template"]["spec"]["containers"]);
                if let Some(container) = containers.iter().find(|container| container["name"] == "gateway-plugin") {
                    assert_eq!(containers.len(), 1, "{group}");
                    found.push((group.clone(), workload, container));
                }
            }
        }
    }
    assert!(found.len() >= 9, "{found:?}");
    found
}

/// Literal variables of a container; `None` for those that are taken from elsewhere.
fn variables(container: &Value) -> BTreeMap<&str, Option<&str>> {
    let listed = list(&container["env"]);
    let variables: BTreeMap<_, _> =
        listed.iter().map(|entry| (word(&entry["name"]), entry["value"].as_str())).collect();
    assert_eq!(variables.len(), listed.len(), "a variable twice: {listed:?}");
    variables
}

/// Names in the generated list of variables, with their defaults.
fn documented() -> BTreeMap<String, String> {
    let rows = text("docs/configuration.md");
    let rows = rows.split("## Variables without effect").next().expect("a beginning");
    let cells = |row: &str| row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let names = rows.lines().filter(|line| line.starts_with("| `")).map(cells);
    names.map(|cells| (cells[0].trim_matches('`').to_owned(), cells[1].clone())).collect()
}

/// `75s`, `0.25s`.
fn seconds(value: &Value) -> Duration {
    let number = word(value).strip_suffix('s').and_then(|number| number.parse().ok());
    Duration::from_secs_f64(number.unwrap_or_else(|| panic!("no seconds: {value}")))
}

/// `4Gi`, `67633152`, in bytes.
fn bytes(value: &Value) -> u64 {
    let text = word(value);
    let units = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("", 0)];
    let parsed = units.iter().find_map(|(unit, shift)| Some(text.strip_suffix(unit)?.parse::<u64>().ok()? << shift));
    parsed.unwrap_or_else(|| panic!("no size: {value}"))
}
