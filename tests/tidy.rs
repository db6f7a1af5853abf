//! The house rules, checked over the text of the repository. Each rule is a pure function over files, and each is
//! tried on a bad sample, so that a rule that finds nothing is known to be able to.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests fail by panicking")]

mod tidy_rules;

use std::path::Path;

use tidy_rules::{File, floors, imports, lua, names, shape};

/// Every text file of the repository that is ours.
fn repository() -> Vec<File> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    collect(root, root, &mut files);
    assert!(files.iter().any(|file| file.path == "src/lib.rs"), "the walk found the sources");
    files
}

fn collect(root: &Path, directory: &Path, files: &mut Vec<File>) {
    for entry in std::fs::read_dir(directory).expect("read directory") {
        let path = entry.expect("directory entry").path();
        let relative = path.strip_prefix(root).expect("below the root").to_string_lossy().replace('\\', "/");
        let skipped = ["target", ".git", "fuzz/target", "Cargo.lock", "fuzz/Cargo.lock"];
        if skipped.contains(&relative.as_str()) || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            collect(root, &path, files);
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            // What is not UTF-8 is data.
            files.push(File { path: relative, text });
        }
    }
}

/// Runs a rule over the repository.
fn keep(rule: fn(&[File]) -> Vec<String>) {
    let broken = rule(&repository());
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

#[test]
fn pure_modules_do_no_io() {
    keep(imports::pure_modules);
}

#[test]
fn each_library_stays_in_its_place() {
    keep(imports::libraries);
}

#[test]
fn no_module_imports_a_higher_floor() {
    keep(floors::upward_imports);
}

#[test]
fn every_module_has_a_floor() {
    keep(floors::modules_without_floor);
}

#[test]
fn clocks_environment_and_tasks_have_one_door() {
    keep(imports::single_doors);
}

#[test]
fn metric_names_stand_in_one_file() {
    keep(names::metric_names);
}

#[test]
fn files_and_traits_stay_small() {
    keep(shape::long_files);
    keep(shape::wide_traits);
}

#[test]
fn no_module_is_a_drawer() {
    keep(names::drawers);
}

#[test]
fn nothing_is_left_to_be_done() {
    keep(shape::unfinished);
}

#[test]
fn every_script_says_what_it_touches() {
    keep(lua::headers);
}

#[test]
fn no_path_of_a_machine() {
    keep(names::machine_paths);
}
