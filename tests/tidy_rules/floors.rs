//! The floors: a module never imports one from above. The table is the module list of `src/lib.rs`.

use std::collections::BTreeMap;

use super::{File, at};

/// Modules with their floors, read from the comments `// Floor N:` of the crate's root.
pub fn table(root: &str) -> BTreeMap<String, u32> {
    let mut floors = BTreeMap::new();
    let mut floor = None;
    for line in root.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("// Floor ") {
            floor = rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok());
        }
        let module = ["pub mod ", "pub(crate) mod ", "mod "].iter().find_map(|start| line.strip_prefix(start));
        if let (Some(module), Some(floor)) = (module.and_then(|rest| rest.strip_suffix(';')), floor) {
            floors.insert(module.to_owned(), floor);
        }
    }
    floors
}

fn root(files: &[File]) -> BTreeMap<String, u32> {
    let root = files.iter().find(|file| file.path == "src/lib.rs").expect("src/lib.rs");
    table(&root.text)
}

fn module(file: &File) -> &str {
    let first = file.in_crate().split('/').next().unwrap_or_default();
    first.strip_suffix(".rs").unwrap_or(first)
}

/// Every module of the crate stands on a floor.
pub fn modules_without_floor(files: &[File]) -> Vec<String> {
    let floors = root(files);
    let mut broken: Vec<String> = files
        .iter()
        .filter(|file| file.in_src() && !["src/lib.rs", "src/main.rs"].contains(&file.path.as_str()))
        .filter(|file| !floors.contains_key(module(file)))
        .map(|file| at(file, 1, "its module stands on no floor in src/lib.rs"))
        .collect();
    if floors.len() < 5 {
        broken.push("src/lib.rs: the floors cannot be read".to_owned());
    }
    broken
}

/// No import goes up.
pub fn upward_imports(files: &[File]) -> Vec<String> {
    let floors = root(files);
    let mut broken = Vec::new();
    for file in files.iter().filter(|file| file.in_src()) {
        let Some(own) = floors.get(module(file)) else { continue };
        let code = file.code();
        for (index, (line, text)) in code.iter().enumerate() {
            for (start, _) in text.match_indices("crate::") {
                let mut path = text[start + "crate::".len()..].to_owned();
                if path.starts_with('{') {
                    // A list may go on over the next lines; what follows its closing brace does no harm.
                    path.extend(code[index + 1..].iter().map(|(_, text)| *text));
                }
                for imported in first_names(&path) {
                    if floors.get(imported.as_str()).is_some_and(|floor| floor > own) {
                        broken.push(at(file, *line, &format!("floor {own} imports {imported}, which is above")));
                    }
                }
            }
        }
    }
    broken
}

/// The first names of the paths in `a::b` or `{a::b, c::{d, e}}`.
fn first_names(path: &str) -> Vec<String> {
    let name =
        |text: &str| text.trim().split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("").to_owned();
    let Some(list) = path.strip_prefix('{') else { return vec![name(path)] };
    let mut names = Vec::new();
    let mut depth = 0;
    let mut from = 0;
    for (index, character) in list.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => {
                names.push(name(&list[from..index]));
                return names;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(name(&list[from..index]));
                from = index + 1;
            }
            _ => {}
        }
    }
    names
}

#[cfg(test)]
const SAMPLE: &str = "// Floor 0: ground.\npub mod clock;\npub mod error;\n\n// Floor 1.\npub mod fleet;\npub mod load;\n\
                      // Floor 5: roof.\npub mod app;\n";

#[test]
fn reads_the_table() {
    let table = table(SAMPLE);
    assert_eq!(table.len(), 5);
    assert_eq!((table["error"], table["load"], table["app"]), (0, 1, 5));
}

#[test]
fn finds_imports_that_go_up() {
    for (path, text, expected) in [
        ("src/clock.rs", "use crate::fleet::Pod;", 1),
        ("src/load/mod.rs", "use crate::fleet::Pod;", 0),
        ("src/app.rs", "use crate::fleet::Pod;", 0),
        ("src/load/cell.rs", "fn f() -> crate::app::App {}", 1),
        ("src/error.rs", "use crate::{clock::Tick, fleet::{Pod, Role}, app};", 2),
        ("src/error.rs", "use crate::{\n    clock::Tick,\n    load::Cell,\n};\nuse crate::clock;", 1),
        ("src/error.rs", "// crate::app\n#[cfg(test)]\nmod tests {\n use crate::app;\n}", 0),
    ] {
        let files = [File::sample("src/lib.rs", SAMPLE), File::sample(path, text)];
        assert_eq!(upward_imports(&files).len(), expected, "{path}: {text}: {:?}", upward_imports(&files));
    }
}

#[test]
fn finds_modules_without_floor() {
    let files = |path: &str| [File::sample("src/lib.rs", SAMPLE), File::sample(path, "")];
    assert_eq!(modules_without_floor(&files("src/attic/mod.rs")).len(), 1);
    assert!(modules_without_floor(&files("src/fleet/mod.rs")).is_empty());
    assert_eq!(modules_without_floor(&[File::sample("src/lib.rs", "pub mod app;")]).len(), 1);
}
