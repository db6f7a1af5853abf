//! The table, and the page it stands in.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use super::cells::{Cell, Dialect, LEFT_OUT, Leg};
use super::play::{Outcome, Traffic};

const FILE: &str = "docs/failures.md";
const BEGIN: &str = "<!-- matrix: written by the test `matrix`; `TANDEM_REWRITE_DOCS=1` makes it anew -->\n";
const END: &str = "<!-- end of the matrix -->\n";

/// A line without its answer column: what equal lines have in common.
type Line = (String, String);

/// The tables of all dialects through Envoy, and what is different through the front.
pub fn tables(envoy: &BTreeMap<usize, Vec<Outcome>>, front: &BTreeMap<usize, Vec<Outcome>>) -> String {
    let mut page = String::new();
    for (number, dialect) in Dialect::ALL.into_iter().enumerate() {
        let _ = writeln!(page, "\n### {}\n", dialect.title());
        page.push_str(&table(envoy[&number].iter()));
    }
    page.push_str("\n### Straight through the front\n\nOnly what differs from the tables above.\n");
    for (number, dialect) in Dialect::ALL.into_iter().enumerate() {
        let same = |outcome: &&Outcome| {
            let other = envoy[&number].iter().find(|other| other.cell == outcome.cell);
            other.is_none_or(|other| essence(other) != essence(outcome))
        };
        let _ = writeln!(page, "\n{}:\n", dialect.title());
        page.push_str(&table(front[&number].iter().filter(same)));
    }
    page
}

fn essence(outcome: &Outcome) -> (&str, &str, [String; 2]) {
    (&outcome.sees, &outcome.when, traffic(outcome))
}

/// What each engine got.
fn traffic(outcome: &Outcome) -> [String; 2] {
    [(Leg::Prefill, &outcome.prefill), (Leg::Decode, &outcome.decode)].map(|(leg, traffic)| {
        if outcome.cell.is_a_race() && outcome.cell.leg != leg {
            return "a race".to_owned();
        }
        let Traffic { requests, aborts, stopped } = traffic;
        format!("{requests} / {aborts} / {stopped}")
    })
}

fn table<'a>(outcomes: impl Iterator<Item = &'a Outcome>) -> String {
    let mut lines: Vec<(Line, Vec<&str>)> = Vec::new();
    for outcome in outcomes {
        let line = line(outcome);
        let answer = if outcome.cell.stream { "stream" } else { "whole" };
        match lines.iter_mut().find(|(other, _)| *other == line) {
            Some((_, answers)) => answers.push(answer),
            None => lines.push((line, vec![answer])),
        }
    }
    let mut page = String::from(
        "| leg | fault | answer | client | client sees | when | prefill pod | decode pod |\n|---|---|---|---|---|---|---|---|\n",
    );
    for ((before, after), answers) in lines {
        let _ = writeln!(page, "| {before} | {} | {after} |", answers.join(", "));
    }
    page
}

fn line(outcome: &Outcome) -> Line {
    let Cell { leg, fault, leaves, .. } = outcome.cell;
    let leg = match leg {
        _ if fault.name() == "none" => "–",
        Leg::Prefill => "prefill",
        Leg::Decode => "decode",
    };
    let client = if leaves { "leaves" } else { "waits" };
    let [prefill, decode] = traffic(outcome);
    (
        format!("{leg} | {}", fault.name()),
        format!("{client} | {} | {} | {prefill} | {decode}", outcome.sees, outcome.when),
    )
}

/// Compares the tables with those of the page, or writes them into it when `TANDEM_REWRITE_DOCS` is 1. The rest of the page
/// is written by people.
pub fn assert_page(tables: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
    let page = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{FILE}: {error}"));
    let (before, rest) = page.split_once(BEGIN).expect("the mark where the matrix begins");
    let (written, after) = rest.split_once(END).expect("the mark where the matrix ends");
    let made = format!("\n{LEFT_OUT}{tables}\n");
    if std::env::var("TANDEM_REWRITE_DOCS").as_deref() == Ok("1") {
        std::fs::write(&path, format!("{before}{BEGIN}{made}{END}{after}")).expect("write the page");
        return;
    }
    let lost: Vec<&str> = written.lines().filter(|line| !made.lines().any(|other| other == *line)).collect();
    let new: Vec<&str> = made.lines().filter(|line| !written.lines().any(|other| other == *line)).collect();
    assert!(
        written == made,
        "{FILE} is out of step; TANDEM_REWRITE_DOCS=1 cargo test --test integration matrix writes it anew\n- {}\n+ {}",
        lost.join("\n- "),
        new.join("\n+ ")
    );
}
