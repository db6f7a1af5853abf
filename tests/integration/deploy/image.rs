//! The Dockerfile: a linter has nothing to say, what it copies is there and is all that the build reads, and the image holds
//! what the manifests assume.

use std::process::Command;

use super::{gateways, path, text, word};
use crate::harness::process::tool;

/// Instructions with their arguments, continuation lines joined, comments gone.
fn instructions() -> Vec<(String, String)> {
    let joined = text("Dockerfile").replace("\\\n", " ");
    let lines = joined.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let split = |line: &str| line.split_once(' ').map(|(word, rest)| (word.to_owned(), rest.trim().to_owned()));
    lines.map(|line| split(line).unwrap_or_else(|| panic!("{line}"))).collect()
}

#[test]
fn a_linter_has_nothing_to_say() {
    let hadolint = tool("TANDEM_TEST_PYTHON", "python").with_file_name("hadolint");
    let lint = |file: &std::path::Path| {
        let output = Command::new(&hadolint).arg("--no-color").arg(file).output().expect("run hadolint");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (clean, said) = lint(&path("Dockerfile"));
    assert!(clean && said.is_empty(), "{said}");
    let directory = tempfile::tempdir().unwrap();
    let bad = directory.path().join("Dockerfile");
    std::fs::write(&bad, text("Dockerfile").replace("debian:bookworm-slim", "debian")).unwrap();
    assert!(!lint(&bad).0, "a base without a tag is noticed");
}

#[test]
fn what_is_copied_exists_and_is_let_through() {
    let ignore = text(".dockerignore");
    let let_through: Vec<&str> = ignore.lines().filter_map(|line| line.strip_prefix('!')).collect();
    assert!(ignore.lines().any(|line| line == "*"), "everything else stays out");
    let mut copied = Vec::new();
    for (instruction, arguments) in instructions() {
        assert_ne!(instruction, "ADD");
        if instruction == "COPY" && !arguments.starts_with("--from=") {
            let mut sources: Vec<String> = arguments.split_whitespace().map(str::to_owned).collect();
            sources.pop();
            copied.extend(sources);
        }
    }
    for source in &copied {
        assert!(path(source).exists(), "{source}");
        assert!(let_through.contains(&source.as_str()), "{source} is kept out by .dockerignore");
    }
    assert_eq!(copied.len(), let_through.len(), "nothing is sent that is not copied");
    // What the code includes from elsewhere at compile time, tests aside, is copied too.
    let mut folders = vec![path("src"), path("sim/src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("list") {
            let file = entry.expect("entry").path();
            if file.is_dir() && !file.ends_with("tests") {
                folders.push(file);
            } else if file.extension().is_some_and(|extension| extension == "rs") && !file.ends_with("tests.rs") {
                let code = std::fs::read_to_string(&file).expect("read");
                let code = code.split("#[cfg(test)]").next().expect("a beginning");
                let folder = file.parent().expect("a folder");
                for included in code.split("include_str!(\"").skip(1).filter_map(|rest| rest.split('"').next()) {
                    let included = folder.join(included).canonicalize().expect(included);
                    let inside = copied.iter().any(|source| included.starts_with(path(source).canonicalize().unwrap()));
                    assert!(inside, "{} includes {}", file.display(), included.display());
                }
            }
        }
    }
}

#[test]
fn the_image_is_what_the_manifests_assume() {
    let instructions = instructions();
    let last = |wanted: &str| {
        let found = instructions.iter().rev().find(|(instruction, _)| instruction == wanted);
        &*found.unwrap_or_else(|| panic!("no {wanted}")).1
    };
    let (_, workload, container) = &gateways()[0];
    let context = &workload["spec"]["template"]["spec"]["securityContext"];
    assert_eq!(last("USER"), format!("{}:{}", context["runAsUser"], context["runAsGroup"]));
    assert_eq!((last("ENTRYPOINT"), last("CMD")), (r#"["tandem"]"#, r#"["serve"]"#));
    assert_eq!(last("EXPOSE"), "50052 8080");
    let bases = instructions.iter().filter(|(instruction, _)| instruction == "FROM");
    for (_, base) in bases {
        assert!(base.split(' ').next().is_some_and(|image| image.contains(':')), "{base}");
    }
    // The compiler is at least the one that the package asks for.
    let wanted = text("Cargo.toml");
    let wanted =
        wanted.lines().find_map(|line| line.strip_prefix("rust-version = \"")?.strip_suffix('"')).expect("a version");
    assert!(instructions[0].1.starts_with(&format!("rust:{wanted}")), "{:?}", instructions[0]);
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(word(&container["image"]), format!("tandem:{version}"));
    assert!(text("deploy/helm/tandem/Chart.yaml").contains(&format!("appVersion: {version}")));
    assert_eq!(super::rendered().compose["services"]["tandem-0"]["image"], format!("tandem:{version}"));
}
