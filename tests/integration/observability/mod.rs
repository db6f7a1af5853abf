//! What operators look at beside a replica's own pages: OpenMetrics with exemplars, the dashboards of `deploy/grafana`,
//! the rules of `deploy/prometheus`, and the runbook, each against what the others say and against a real Prometheus.

mod aibrix;
mod alerts;
mod dashboards;
mod exposition;
mod prometheus;
mod promql;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use promql::Expression;

const ALERTS: &str = "deploy/prometheus/alerts.yaml";

/// What scrapes add, and metrics that Prometheus makes itself or the process collector has.
const FOREIGN: [(&str, &[&str]); 10] = [
    ("up", &[]),
    ("ALERTS", &["alertname", "alertstate", "severity"]),
    ("process_cpu_seconds_total", &[]),
    ("process_open_fds", &[]),
    ("process_max_fds", &[]),
    ("process_virtual_memory_bytes", &[]),
    ("process_resident_memory_bytes", &[]),
    ("process_start_time_seconds", &[]),
    ("process_threads", &[]),
    ("process_virtual_memory_max_bytes", &[]),
];

fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

fn read(relative: &str) -> String {
    std::fs::read_to_string(path(relative)).unwrap_or_else(|error| panic!("{relative}: {error}"))
}

/// The groups of the rules file.
fn rules() -> Vec<Value> {
    let file: Value = serde_saphyr::from_str(&read(ALERTS)).expect("parse the rules");
    let groups = file["groups"].as_array().expect("groups");
    groups.iter().flat_map(|group| group["rules"].as_array().expect("rules")).cloned().collect()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("{key} in {value}"))
}

/// The name of an alert; `None` for a recording rule.
fn alert(rule: &Value) -> Option<&str> {
    rule["alert"].as_str()
}

/// Every series that a query may name, with its labels.
struct Known(BTreeMap<String, BTreeSet<String>>);

impl Known {
    /// From docs/metrics.md, from the rules that record, and [`FOREIGN`].
    fn new() -> Known {
        let mut known: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut add = |name: String, labels: &[&str]| {
            known.insert(name, labels.iter().chain(&["job", "instance"]).map(|label| (*label).to_owned()).collect());
        };
        for row in read("docs/metrics.md").lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let (name, labels) = (cells[1].trim_matches('`'), cells[3].split(", ").filter(|label| !label.is_empty()));
            let labels: Vec<&str> = labels.collect();
            if cells[2] == "histogram" {
                add(format!("{name}_bucket"), &[&labels[..], &["le"]].concat());
                add(format!("{name}_sum"), &labels);
                add(format!("{name}_count"), &labels);
            } else {
                add(name.to_owned(), &labels);
            }
        }
        for (name, labels) in FOREIGN {
            add(name.to_owned(), labels);
        }
        for rule in rules().iter().filter(|rule| alert(rule).is_none()) {
            add(text(rule, "record").to_owned(), &["model", "blame"]);
        }
        assert!(known.len() > 80, "the table of docs/metrics.md was read");
        Known(known)
    }

    /// What a query names that there is not.
    fn missing(&self, query: &str) -> Vec<String> {
        let expression = match Expression::read(query) {
            Ok(expression) => expression,
            Err(error) => return vec![error],
        };
        let mut missing = Vec::new();
        let mut all = BTreeSet::new();
        for selector in &expression.selectors {
            let Some(labels) = self.0.get(&selector.metric) else {
                missing.push(format!("no metric {}", selector.metric));
                continue;
            };
            all.extend(labels);
            let unknown = selector.labels.iter().filter(|label| !labels.contains(*label));
            missing.extend(unknown.map(|label| format!("no label {label} of {}", selector.metric)));
        }
        if expression.selectors.is_empty() {
            missing.push("names no metric".to_owned());
        }
        let unknown = expression.grouping.iter().filter(|label| !all.contains(label));
        missing.extend(unknown.map(|label| format!("none of its metrics has the label {label}")));
        missing
    }
}

#[test]
fn what_is_missing_is_found() {
    let known = Known::new();
    for (query, expected) in [
        ("tandem_ready", 0),
        ("sum by (instance) (tandem_ready{job=\"x\"})", 0),
        ("tandem_redy", 1),
        ("tandem_ready{model=\"m\"}", 1),
        ("sum by (model) (tandem_ready)", 1),
        ("sum by (le) (rate(tandem_routing_seconds_bucket{model=\"m\"}[5m]))", 0),
        ("tandem_routing_seconds", 1),
        ("sum by (le) (rate(tandem_routing_seconds_count[5m]))", 1),
        ("tandem:requests:rate5m{model=\"m\"} and on (blame) up", 0),
        ("vector(0)", 1),
        ("{job=\"x\"}", 1),
    ] {
        assert_eq!(known.missing(query).len(), expected, "{query}: {:?}", known.missing(query));
    }
}
