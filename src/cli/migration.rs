//! `docs/migrating-from-aibrix.md`, made from the lists of the reference gateway's names, each of which is compared with what
//! the program has: its settings, strategies and metrics, and the names in its source.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use clap::CommandFactory as _;

use crate::knobs::aibrix::{self, Row, Verdict};
use crate::knobs::{REGISTERED, assert_generated, described, inert_names};

/// One list: its heading, what the second field is called, what to know, and the rows.
struct List {
    title: &'static str,
    there: &'static str,
    about: &'static str,
    text: &'static str,
}

const VARIABLES: List = List {
    title: "Environment variables",
    there: "default there",
    about: "Carried over as they are, the variables of AIBrix's manifests cost nothing but what the start-up report says, one line \
            each. What is absent is reported when it is set to anything but its default there. Settings, their units and \
            those that have no counterpart there are in [configuration.md](configuration.md).",
    text: aibrix::VARIABLES,
};
const PODS: List = List {
    title: "Labels, annotations and container variables of pods",
    there: "where",
    about: "Further labels and annotations that only exist here are in [models.md](models.md).",
    text: include_str!("../knobs/aibrix/labels.txt"),
};
const HEADERS: List =
    List { title: "Headers", there: "set by", about: "", text: include_str!("../knobs/aibrix/headers.txt") };
const METRICS: List = List {
    title: "Metrics",
    there: "labels there",
    about: "`pod` among the labels stands for the labels of a pod: `namespace`, `pod`, `model`, `engine_type`, `roleset`, `role`, \
            `role_replica_index`, `gateway_pod`. What each metric means is in [metrics.md](metrics.md).",
    text: include_str!("../knobs/aibrix/metrics.txt"),
};
const ROUTING: List = List {
    title: "Strategies",
    there: "",
    about: "See [strategies.md](strategies.md).",
    text: include_str!("../knobs/aibrix/strategies.txt"),
};
const PROFILES: List = List {
    title: "Profiles",
    there: "where",
    about: "Fields of the annotation `model.aibrix.ai/config`; see [profiles.md](profiles.md).",
    text: include_str!("../knobs/aibrix/profiles.txt"),
};
const FLAGS: List =
    List { title: "Flags", there: "default there", about: "", text: include_str!("../knobs/aibrix/flags.txt") };
const LISTS: [&List; 7] = [&VARIABLES, &FLAGS, &PODS, &PROFILES, &HEADERS, &METRICS, &ROUTING];

impl List {
    fn rows(&self) -> impl Iterator<Item = Row> {
        aibrix::rows(self.text)
    }

    fn write(&self, page: &mut String) {
        let there = if self.there.is_empty() { String::new() } else { format!(" {} |", self.there) };
        let rule = if self.there.is_empty() { "" } else { "---|" };
        let head = format!("| name |{there} here | how it differs, or why it is absent |\n|---|{rule}---|---|\n");
        let _ = write!(page, "\n## {}\n\n", self.title);
        if !self.about.is_empty() {
            let _ = write!(page, "{}\n\n", self.about);
        }
        let mut open = false;
        for line in self.text.lines() {
            if let Some(title) = line.strip_prefix("## ") {
                let _ = write!(page, "{}### {title}\n\n{head}", if open { "\n" } else { "" });
                open = true;
            } else if let Some(row) = aibrix::row(line) {
                if !open {
                    page.push_str(&head);
                    open = true;
                }
                let there = if self.there.is_empty() { String::new() } else { format!(" {} |", row.there) };
                let here = format!("{:?}", row.verdict).to_lowercase();
                let _ = writeln!(page, "| `{}` |{there} {here} | {} |", row.name, row.note);
            }
        }
    }
}

fn page() -> String {
    let mut page = String::from(
        "# Migrating from AIBrix\n\n\
         <!-- Generated from src/knobs/aibrix; `TANDEM_REWRITE_DOCS=1 cargo test --lib generated` writes it anew. -->\n\n\
         What becomes of each name that the AIBrix gateway plugin (0.7) reads, sets or exports: *same*, *differs* (how), or \
         *absent* (why). Tests compare each row with the program. The steps of a migration are in \
         [the deployment guide](../deploy/README.md).\n",
    );
    for list in LISTS {
        list.write(&mut page);
    }
    page
}

#[test]
fn generated_migration_page() {
    assert_generated("docs/migrating-from-aibrix.md", &page());
}

#[test]
fn every_line_of_a_list_is_a_row_and_every_name_comes_once() {
    for list in LISTS {
        let mut names = BTreeSet::new();
        for line in list.text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let row = aibrix::row(line).unwrap_or_else(|| panic!("{}: no row: {line}", list.title));
            assert!(names.insert(row.name), "{} comes twice", row.name);
            let silent = row.verdict != Verdict::Same && row.note.is_empty();
            assert!(!silent, "{} is {:?} and must say how or why", row.name, row.verdict);
        }
        assert!(names.len() > 5, "{}", list.title);
    }
}

/// Each row that the program contradicts.
fn contradictions(list: &List, is_here: impl Fn(&Row) -> bool) -> Vec<String> {
    let wrong = |row: &Row| is_here(row) == (row.verdict == Verdict::Absent);
    list.rows()
        .filter(wrong)
        .map(|row| format!("{} is said to be {:?}, and the program says otherwise", row.name, row.verdict))
        .collect()
}

fn none(contradictions: &[String]) {
    assert!(contradictions.is_empty(), "src/knobs/aibrix/*.txt:\n{}", contradictions.join("\n"));
}

#[test]
fn variables_are_those_of_the_program() {
    let settings: BTreeSet<&str> = described().into_iter().map(|(name, _)| name).collect();
    none(&contradictions(&VARIABLES, |row| settings.contains(row.name)));
    // What begins so is theirs, and has a row.
    let listed: BTreeSet<&str> = VARIABLES.rows().map(|row| row.name).collect();
    for name in settings.into_iter().chain(inert_names()) {
        assert!(!name.starts_with("AIBRIX_") || listed.contains(name), "{name} has no row");
    }
}

#[test]
fn strategies_are_those_of_the_program() {
    let expected = REGISTERED.iter().map(|entry| {
        let served = entry.name == entry.served_as;
        match entry.what {
            "the same" => (entry.name, true, String::new()),
            what if served => (entry.name, false, what.to_owned()),
            what => (entry.name, false, format!("served as `{}`: {what}", entry.served_as)),
        }
    });
    let listed = ROUTING.rows().map(|row| (row.name, row.verdict == Verdict::Same, row.note.to_owned()));
    assert_eq!(listed.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
}

fn file(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Labels of each metric of `docs/metrics.md`, which is generated from the program; those of engines have theirs together.
fn exported() -> Vec<(String, BTreeSet<String>)> {
    let field = |text: &str| text.trim().trim_matches('`').to_owned();
    let labels = |text: &str| text.split(',').map(field).filter(|label| !label.is_empty()).collect();
    let page = file("docs/metrics.md");
    let own = page.lines().filter(|line| line.starts_with("| `")).map(|line| {
        let fields: Vec<&str> = line.split(" | ").collect();
        (field(fields[0].trim_start_matches("| ")), labels(fields[2]))
    });
    let (_, engines) = page.split_once("## Metrics of engines").expect("a section");
    let (engines, _) = engines.split_once("\n## ").expect("another one after it");
    let (_, theirs) = engines.split_once("with the labels ").expect("the labels");
    let theirs: BTreeSet<String> = labels(theirs.split_once('.').expect("a sentence").0);
    let names = engines.lines().filter(|line| line.starts_with("| ") || line.starts_with("- "));
    let passed_on = names.filter_map(|line| Some((line.split('`').nth(1)?.to_owned(), theirs.clone())));
    own.chain(passed_on).collect()
}

#[test]
fn metrics_are_those_of_the_program() {
    const POD: &str = "namespace, pod, model, engine_type, roleset, role, role_replica_index, gateway_pod";
    let exported = exported();
    let here = |row: &Row| match row.name.strip_suffix('*') {
        Some(start) => exported.iter().any(|(name, _)| name.starts_with(start)),
        None => exported.iter().any(|(name, _)| name == row.name),
    };
    none(&contradictions(&METRICS, here));
    for row in METRICS.rows().filter(|row| row.verdict == Verdict::Same) {
        let (_, labels) = exported.iter().find(|(name, _)| name == row.name).expect("it is here");
        let there: BTreeSet<String> = row
            .there
            .split(", ")
            .flat_map(|label| if label == "pod" { POD } else { label }.split(", "))
            .map(str::to_owned)
            .collect();
        assert_eq!(*labels, there, "{} is said to have the same labels", row.name);
    }
    let unlisted: Vec<_> = exported
        .iter()
        .filter(|(name, _)| name.split('_').next() != Some("tandem"))
        .filter(|(name, _)| !METRICS.rows().any(|row| row.name == name))
        .collect();
    assert!(unlisted.is_empty(), "names without our prefix are theirs, and need a row: {unlisted:?}");
}

#[test]
fn flags_are_those_of_the_program() {
    let command = super::Cli::command();
    let serve = command.find_subcommand("serve").expect("serve");
    let names: Vec<&str> = serve
        .get_arguments()
        .flat_map(|flag| flag.get_long().into_iter().chain(flag.get_all_aliases().unwrap_or_default()))
        .collect();
    none(&contradictions(&FLAGS, |row| names.contains(&row.name)));
}

/// The program's source, without what only tests see.
fn source(directory: &Path, text: &mut String) {
    for entry in std::fs::read_dir(directory).expect("read directory") {
        let path = entry.expect("directory entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "tests" {
            source(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && !["tests.rs", "fixture.rs", "migration.rs"].contains(&name)
        {
            let file = std::fs::read_to_string(&path).expect("source");
            text.push_str(file.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default());
        }
    }
}

#[test]
fn headers_labels_and_fields_are_those_of_the_program() {
    let mut text = String::new();
    source(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut text);
    let text = text.to_lowercase();
    let constants = [("authorization", "AUTHORIZATION"), ("content-type", "CONTENT_TYPE")];
    for list in [&PODS, &PROFILES, &HEADERS] {
        let spelled = |row: &Row| {
            let quoted = text.contains(&format!("\"{}\"", row.name.to_lowercase()));
            quoted
                || constants.iter().any(|(name, constant)| name == &row.name && text.contains(&constant.to_lowercase()))
        };
        none(&contradictions(list, spelled));
    }
}
