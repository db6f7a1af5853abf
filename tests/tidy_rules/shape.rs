//! Sizes, and what must not be left in.

use super::{File, at};

/// Lines of a source file, and of a file of tests.
const LINES: usize = 500;
const TEST_LINES: usize = 700;

/// Methods of a trait.
const METHODS: usize = 10;

/// No file is too long to be read at once.
pub fn long_files(files: &[File]) -> Vec<String> {
    let mut broken = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let limit = if file.is_test() { TEST_LINES } else { LINES };
        let lines = file.text.lines().count();
        if lines > limit {
            broken.push(at(file, lines, &format!("longer than {limit} lines")));
        }
    }
    broken
}

/// No trait asks for too much.
pub fn wide_traits(files: &[File]) -> Vec<String> {
    let mut broken = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let mut inside: Option<(usize, &str, usize)> = None;
        // rustfmt puts the closing brace where the line of the trait began, and the methods one step in.
        for (index, line) in file.text.lines().enumerate() {
            let indent = line.len() - line.trim_start().len();
            if let Some((start, header, methods)) = inside {
                let own = header.len() - header.trim_start().len();
                if indent == own && line.trim() == "}" {
                    if methods > METHODS {
                        broken.push(at(file, start, &format!("a trait with {methods} methods (at most {METHODS})")));
                    }
                    inside = None;
                } else if indent == own + 4 && is_function(line) {
                    inside = Some((start, header, methods + 1));
                }
            } else if is_trait(line) {
                inside = Some((index + 1, line, 0));
            }
        }
    }
    broken
}

fn is_trait(line: &str) -> bool {
    let line = line.trim_start();
    let line = line.strip_prefix("pub ").or(line.strip_prefix("pub(crate) ")).unwrap_or(line);
    line.strip_prefix("unsafe ").unwrap_or(line).starts_with("trait ") && !line.ends_with("{}")
}

fn is_function(line: &str) -> bool {
    let line = line.trim_start();
    ["fn ", "async fn ", "const fn ", "unsafe fn "].iter().any(|start| line.starts_with(start))
}

/// Nothing is left to be written.
pub fn unfinished(files: &[File]) -> Vec<String> {
    // Put together here, so that this file does not find itself.
    let marks = ["todo", "unimplemented"].map(|mark| format!("{mark}!("));
    let mut broken = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        for (index, line) in file.text.lines().enumerate() {
            if let Some(mark) = marks.iter().find(|mark| line.contains(mark.as_str())) {
                broken.push(at(file, index + 1, &format!("{mark}…) is left in")));
            }
        }
    }
    broken
}

#[test]
fn finds_long_files() {
    let lines = |count: usize| "x\n".repeat(count);
    for (path, count, expected) in [
        ("src/a.rs", 500, 0),
        ("src/a.rs", 501, 1),
        ("sim/src/a.rs", 501, 1),
        ("tests/integration/a.rs", 501, 0),
        ("src/a/tests.rs", 700, 0),
        ("src/a/tests.rs", 701, 1),
        ("README.md", 5000, 0),
    ] {
        assert_eq!(long_files(&[File::sample(path, &lines(count))]).len(), expected, "{path} {count}");
    }
}

#[test]
fn finds_wide_traits() {
    let of = |count: usize| {
        let methods = "    /// One.\n    async fn f(&self) {\n        fn inner() {}\n    }\n".repeat(count);
        format!("pub trait T {{\n{methods}}}\n\nimpl T for U {{\n{methods}{methods}}}\ntrait Empty {{}}\n")
    };
    assert!(wide_traits(&[File::sample("src/a.rs", &of(10))]).is_empty());
    assert_eq!(wide_traits(&[File::sample("src/a.rs", &of(11))]).len(), 1);
}

#[test]
fn finds_what_is_left_in() {
    for mark in ["todo", "unimplemented"] {
        assert_eq!(unfinished(&[File::sample("src/a.rs", &format!("fn f() {{ {mark}!() }}"))]).len(), 1);
    }
    assert!(unfinished(&[File::sample("src/a.rs", "// a todo list")]).is_empty());
}
