//! The rules: right by `promtool`, about metrics that exist, tested each, and explained each.

use std::collections::BTreeSet;

use serde_json::Value;
use tandem::error::{Blame, Reason};

use super::{ALERTS, Known, alert, read, rules, text};
use crate::harness::process::{Start, tool};
use crate::harness::within_time;
use std::time::Duration;

const TESTS: &str = "deploy/prometheus/alerts_test.yaml";
const RUNBOOK: &str = "docs/operations.md";

/// `promtool` evaluates some hundred minutes, one after the other, on a machine that is busy.
const PATIENCE: Duration = Duration::from_mins(2);

fn names() -> Vec<String> {
    rules().iter().filter_map(alert).map(str::to_owned).collect()
}

async fn promtool(arguments: &[&str]) {
    let mut start = Start::new("promtool", tool("TANDEM_TEST_PROMTOOL", "promtool"));
    start.args(arguments);
    let process = start.spawn();
    let status = process.exited(PATIENCE).await;
    assert!(status.success(), "{}", process.logs());
}

#[tokio::test]
async fn promtool_accepts_the_rules_and_their_tests_pass() {
    let file = |relative: &str| super::path(relative).to_string_lossy().into_owned();
    promtool(&["check", "rules", &file(ALERTS)]).await;
    within_time(PATIENCE, "the tests of the rules", promtool(&["test", "rules", &file(TESTS)])).await;
}

#[test]
fn every_metric_and_label_of_every_rule_exists() {
    let known = Known::new();
    let mut missing: Vec<String> = Vec::new();
    for rule in rules() {
        let name = rule["alert"].as_str().or(rule["record"].as_str()).expect("a name").to_owned();
        missing.extend(known.missing(text(&rule, "expr")).into_iter().map(|what| format!("{name}: {what}")));
    }
    assert!(missing.is_empty(), "\n{}", missing.join("\n"));
}

#[test]
fn alerts_say_what_somebody_who_is_woken_needs() {
    let names = names();
    assert!(names.len() > 35, "{names:?}");
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "a name twice");
    for rule in rules().iter().filter(|rule| alert(rule).is_some()) {
        let name = text(rule, "alert");
        assert!(name.starts_with("Tandem"), "{name}");
        assert!(["critical", "warning", "info"].contains(&text(&rule["labels"], "severity")), "{name}");
        let notes = &rule["annotations"];
        for note in ["summary", "description"] {
            assert!(text(notes, note).ends_with('.'), "{name}: the {note} is a sentence");
        }
        assert_eq!(text(notes, "runbook_url"), format!("{RUNBOOK}#{}", name.to_lowercase()));
    }
}

/// A test that fires and one that does not.
#[test]
fn every_alert_has_its_test() {
    let file: Value = serde_saphyr::from_str(&read(TESTS)).expect("parse the tests");
    let (mut fires, mut rests) = (BTreeSet::new(), BTreeSet::new());
    for test in file["tests"].as_array().expect("tests") {
        for check in test["promql_expr_test"].as_array().expect("checks") {
            let query = text(check, "expr");
            let name = text(test, "name");
            assert_eq!(query, format!("ALERTS{{alertname=\"{name}\", alertstate=\"firing\"}}"));
            let samples = check["exp_samples"].as_array().expect("samples");
            let seen = if samples.is_empty() { &mut rests } else { &mut fires };
            seen.insert(name.to_owned());
        }
    }
    let names: BTreeSet<String> = names().into_iter().collect();
    assert_eq!(names, fires, "fire in their test");
    // One alert has a test of exactly who fires among several, and no moment at which nobody does.
    let silent: Vec<_> = names.difference(&rests).map(String::as_str).collect();
    assert_eq!(silent, ["TandemRequestsRefused"]);
}

/// Each alert has a section of its name, and no section is about an alert that is gone.
#[test]
fn every_alert_has_its_entry_in_the_runbook() {
    let page = read(RUNBOOK);
    let mut sections: Vec<(String, String)> = Vec::new();
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("### ").filter(|title| title.starts_with("Tandem")) {
            sections.push((title.to_owned(), String::new()));
        } else if line.starts_with('#') {
            sections.push((String::new(), String::new()));
        } else if let Some((_, body)) = sections.last_mut() {
            body.push_str(line);
            body.push('\n');
        }
    }
    sections.retain(|(title, _)| !title.is_empty());
    let titles: Vec<&String> = sections.iter().map(|(title, _)| title).collect();
    assert_eq!(titles, names().iter().collect::<Vec<_>>(), "in the order of the rules");
    for (title, body) in &sections {
        for part in ["**Means**", "**Users see**", "**Look**", "**Do**", "**Do not**"] {
            assert!(body.contains(part), "{title} has no {part}");
        }
    }
}

/// Links of the page lead to files and headings that exist.
#[test]
fn the_runbook_points_at_what_exists() {
    let page = read(RUNBOOK);
    let anchor = |title: &str| -> String {
        let kept = title.to_lowercase();
        kept.chars()
            .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect()
    };
    for target in page.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let (file, heading) = target.split_once('#').unwrap_or((target, ""));
        let file = if file.is_empty() { RUNBOOK.to_owned() } else { format!("docs/{file}") };
        let text = read(&file);
        let titles = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
        let found = heading.is_empty() || titles.map(anchor).any(|title| title == heading);
        assert!(found, "{target}");
    }
    let known = Known::new();
    for name in
        page.split('`').skip(1).step_by(2).filter(|code| code.starts_with("tandem_") || code.starts_with("gateway_"))
    {
        let metric: String = name.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let there = known.0.keys().any(|known| known == &metric || *known == format!("{metric}_bucket"));
        assert!(there, "{name} is no metric");
    }
}

/// The rules attribute each failure to whom the gateway does.
#[test]
fn blame_is_the_gateways_own() {
    let rules = rules();
    let record = "tandem:request_failures:rate5m";
    let blamed = |status: &str, code: &str| -> Vec<String> {
        let by_rule = rules.iter().filter(|rule| rule["record"] == record && counts(text(rule, "expr"), status, code));
        by_rule.map(|rule| text(&rule["labels"], "blame").to_owned()).collect()
    };
    for reason in Reason::ALL {
        let expected = match reason.blame() {
            Blame::Client => "client",
            Blame::Engine => "engine",
            Blame::Fleet => "fleet",
            Blame::Gateway => "gateway",
        };
        assert_eq!(blamed(reason.label(), reason.status().as_str()), [expected], "{reason:?}");
    }
    for (status, code, expected) in [
        ("gateway_rsp_headers_fail", "400", "client"),
        ("gateway_rsp_headers_fail", "500", "engine"),
        ("engine_error_event", "200", "engine"),
        ("gateway_rsp_body_fail", "200", "engine"),
        ("client_cancelled_eof", "499", "client"),
        ("aibrix_gateway_server_shutdown", "503", "gateway"),
    ] {
        assert_eq!(blamed(status, code), [expected], "{status} {code}");
    }
}

/// Does one of the query's selectors of failed requests take this series?
fn counts(query: &str, status: &str, code: &str) -> bool {
    query.split("gateway_request_model_fail_total{").skip(1).any(|rest| {
        let matchers = rest.split('}').next().expect("an end");
        matchers.split(", ").all(|matcher| {
            let at = matcher.find(['=', '!']).expect("an operator");
            let value = if &matcher[..at] == "status" { status } else { code };
            let pattern = matcher[at..].trim_start_matches(['=', '!', '~']).trim_matches('"');
            let matches = pattern.split('|').any(|one| match one.strip_suffix("..") {
                Some(start) => value.len() == start.len() + 2 && value.starts_with(start),
                None => value == one,
            });
            matches != matcher[at..].starts_with('!')
        })
    })
}
