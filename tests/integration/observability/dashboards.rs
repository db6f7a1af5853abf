//! The dashboards: whole, legible, and about metrics that exist.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{Known, path, read, text};

/// Variables that Grafana fills in.
const BUILT_IN: [&str; 3] = ["__rate_interval", "__range", "__all"];

/// The schema of Grafana 12.0, which 11 reads as well and later ones migrate.
const SCHEMA: u64 = 41;

/// Every dashboard by its file.
pub fn dashboards() -> BTreeMap<String, Value> {
    let files = std::fs::read_dir(path("deploy/grafana")).expect("deploy/grafana");
    let names = files.map(|file| file.expect("file").file_name().into_string().expect("a name"));
    let parsed = names.map(|name| {
        let page = read(&format!("deploy/grafana/{name}"));
        let value = serde_json::from_str(&page).unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, value)
    });
    parsed.collect()
}

fn panels(dashboard: &Value) -> &Vec<Value> {
    dashboard["panels"].as_array().expect("panels")
}

/// The queries of a panel.
pub fn queries(panel: &Value) -> Vec<&str> {
    let targets = panel["targets"].as_array().map_or(&[][..], Vec::as_slice);
    targets.iter().filter_map(|target| target["expr"].as_str()).collect()
}

/// Every query: where it stands, and its text.
pub fn all_queries() -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (file, dashboard) in dashboards() {
        for panel in panels(&dashboard) {
            let place = format!("{file}, {:?}", text(panel, "title"));
            all.extend(queries(panel).into_iter().map(|query| (place.clone(), query.to_owned())));
        }
    }
    all
}

/// What marks moments on the dashboards.
fn annotations() -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (file, dashboard) in dashboards() {
        let list = dashboard["annotations"]["list"].as_array().expect("annotations");
        all.extend(list.iter().filter_map(|one| Some((file.clone(), one["expr"].as_str()?.to_owned()))));
    }
    assert!(!all.is_empty(), "the annotations were read");
    all
}

/// A query as Prometheus can take it: everything chosen, and this range.
pub fn filled(query: &str, range: &str) -> String {
    let mut query = query.to_owned();
    for (variable, value) in [("$__rate_interval", range), ("$__range", range), ("$replica", ".*"), ("$model", ".*")] {
        query = query.replace(variable, value);
    }
    query
}

/// Names behind a `$`, with or without braces.
fn variables(text: &str) -> Vec<String> {
    let after = text.split('$').skip(1).map(|rest| rest.trim_start_matches('{'));
    after.map(|rest| rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()).collect()
}

#[test]
fn every_metric_and_label_of_every_panel_exists() {
    let known = Known::new();
    let queries = all_queries();
    assert!(queries.len() > 100, "the dashboards were read: {}", queries.len());
    let mut missing: Vec<String> = Vec::new();
    for (place, query) in queries.into_iter().chain(annotations()) {
        missing
            .extend(known.missing(&filled(&query, "1m")).into_iter().map(|what| format!("{place}: {what}: {query}")));
    }
    assert!(missing.is_empty(), "\n{}", missing.join("\n"));
}

/// What is measured is shown somewhere, but for what a better one tells.
#[test]
fn every_metric_is_on_a_dashboard() {
    let replaced = [
        // For the dashboards of AIBrix, see `aibrix`.
        "model_replicas",
        "aibrix_prefix_cache_routing_decisions_total",
        "aibrix_prefix_cache_routing_selection_total",
        "aibrix_prefix_cache_routing_errors_total",
        "aibrix_prefix_cache_load_imbalance_total",
        "aibrix_prefix_cache_routing_latency_seconds",
        "aibrix_prefix_cache_indexer_status",
        "tandem_engine_pages_dropped_total",
        "gateway_routing_time_bucket_total",
        "gateway_prefill_time_bucket_total",
        "gateway_kv_transfer_time_bucket_total",
        "gateway_ttft_bucket_total",
        "gateway_tpot_bucket_total",
        "gateway_decode_time_bucket_total",
        "gateway_total_time_bucket_total",
        "gateway_first_token_delay_over_1s_total",
        "gateway_completion_token_bucket_total",
        "gateway_requests_with_usage_total",
        "gateway_prefill_outstanding_requests",
        "tandem_snapshot_version",
        "tandem_kubernetes_objects",
        "tandem_kubernetes_lists_total",
        "tandem_kubernetes_events_total",
        "tandem_tls_reloads_total",
    ];
    let shown: String = all_queries().into_iter().map(|(_, query)| query + "\n").collect();
    let page = read("docs/metrics.md");
    let names = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let is_shown = |name: &str| {
        shown.match_indices(name).any(|(at, _)| {
            let rest = &shown[at + name.len()..];
            let rest = ["_bucket", "_sum", "_count"].iter().find_map(|end| rest.strip_prefix(end)).unwrap_or(rest);
            !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        })
    };
    let unseen: Vec<&str> = names.filter(|name| !replaced.contains(name) && !is_shown(name)).collect();
    assert!(unseen.is_empty(), "{unseen:?}");
    let both: Vec<_> = replaced.iter().filter(|name| is_shown(name)).collect();
    assert!(both.is_empty(), "shown after all: {both:?}");
}

#[test]
fn dashboards_are_whole_and_legible() {
    let mut uids = BTreeSet::new();
    let all = dashboards();
    assert_eq!(all.len(), 4, "{:?}", all.keys());
    for (file, dashboard) in &all {
        let uid = text(dashboard, "uid");
        assert!(uid.starts_with("tandem-") && uid.len() <= 40 && uids.insert(uid.to_owned()), "{file}: uid {uid}");
        assert_eq!(dashboard["schemaVersion"], SCHEMA, "{file}");
        // An id is of one database, and an input is asked for on import only: neither can be provisioned.
        assert!(dashboard["id"].is_null() && dashboard.get("__inputs").is_none(), "{file}");
        assert!(!text(dashboard, "description").is_empty(), "{file}");
        let list = dashboard["templating"]["list"].as_array().expect("variables");
        let names: Vec<&str> = list.iter().map(|variable| text(variable, "name")).collect();
        assert_eq!(names[..3], ["datasource", "replica", "model"], "{file}");
        assert_eq!(list[0]["current"]["value"], "prometheus", "{file}: the uid that is provisioned");
        for name in variables(&dashboard.to_string()) {
            assert!(names.contains(&&*name) || BUILT_IN.contains(&&*name), "{file}: ${name}");
        }
        for (index, panel) in panels(dashboard).iter().enumerate() {
            assert_eq!(panel["id"], index + 1, "{file}: ids in order");
            check_panel(file, panel);
        }
        check_grid(file, panels(dashboard));
    }
}

fn check_panel(file: &str, panel: &Value) {
    let (title, kind) = (text(panel, "title"), text(panel, "type"));
    assert!(!title.is_empty(), "{file}: a panel without a title");
    if kind == "row" {
        return;
    }
    let place = format!("{file}, {title:?}");
    assert!(text(panel, "description").ends_with('.'), "{place}: a description is a sentence");
    let defaults = &panel["fieldConfig"]["defaults"];
    assert!(defaults["unit"].is_string() && defaults["thresholds"]["steps"][0]["color"].is_string(), "{place}");
    let targets = panel["targets"].as_array().expect("targets");
    if kind == "text" {
        assert!(text(&panel["options"], "content").len() > 100, "{place}: empty");
        return;
    }
    assert!(!targets.is_empty(), "{place}: empty");
    let expected = if kind == "traces" { ("jaeger", "${traces}") } else { ("prometheus", "${datasource}") };
    let mut letters = BTreeSet::new();
    for source in targets.iter().map(|target| &target["datasource"]).chain([&panel["datasource"]]) {
        assert_eq!((text(source, "type"), text(source, "uid")), expected, "{place}");
    }
    for target in targets {
        assert!(letters.insert(text(target, "refId").to_owned()), "{place}: a letter twice");
        let query = target["expr"].as_str().or(target["query"].as_str()).unwrap_or_default();
        assert!(!query.is_empty(), "{place}: an empty query");
        // Whoever looks at the parts of requests wants to get from a point to its trace.
        let parts =
            ["routing", "prefill", "kv_transfer", "time_to_first_token", "time_per_output_token", "decode", "request"];
        let of_requests = parts.iter().any(|part| query.contains(&format!("tandem_{part}_seconds_bucket")));
        if of_requests && kind != "stat" {
            assert_eq!(target["exemplar"], true, "{place}: no exemplars");
        }
    }
}

/// Panels lie on the grid, and not on one another.
fn check_grid(file: &str, panels: &[Value]) {
    let mut taken = BTreeSet::new();
    for panel in panels {
        let side = |key: &str| panel["gridPos"][key].as_u64().expect("a position");
        let (x, y, w, h) = (side("x"), side("y"), side("w"), side("h"));
        assert!(w > 0 && h > 0 && x + w <= 24, "{file}: {panel}");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(taken.insert(cell), "{file}: {} lies on another panel", panel["title"]);
        }
    }
}
