//! `tandem check`: says what will bite before it does.

mod envoy;
mod pods;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;

use crate::knobs::{Knobs, ProcessEnvironment};

/// Lint an Envoy configuration and pod manifests against what this gateway, with this environment, needs. Exits 1 when
/// it found an error.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// An Envoy bootstrap file (YAML or JSON).
    #[arg(long, value_name = "FILE")]
    envoy: Option<PathBuf>,
    /// A file or directory of Pod manifests.
    #[arg(long, value_name = "FILE-or-DIR")]
    pods: Option<PathBuf>,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Requests will fail, or the configuration is unsafe.
    Error,
    /// Something works less well than it could, or may surprise.
    Warning,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad.
    pub level: Level,
    /// Where, and what to do about it.
    pub text: String,
}

impl Finding {
    fn error(text: impl Into<String>) -> Finding {
        Finding { level: Level::Error, text: text.into() }
    }

    fn warning(text: impl Into<String>) -> Finding {
        Finding { level: Level::Warning, text: text.into() }
    }
}

/// Checks what was named and prints the findings.
pub fn run(args: &CheckArgs) -> Result<()> {
    ensure!(args.envoy.is_some() || args.pods.is_some(), "nothing to check: name --envoy FILE or --pods FILE-or-DIR");
    let (knobs, report) = Knobs::read(&ProcessEnvironment)?;
    let mut findings: Vec<Finding> = report.warnings.iter().cloned().map(Finding::warning).collect();
    if let Some(path) = &args.envoy {
        findings.extend(located(path, envoy::check(&read(path)?, &knobs)));
    }
    if let Some(path) = &args.pods {
        findings.extend(located(path, pods::check(path, &knobs)));
    }
    for Finding { level, text } in &findings {
        let level = if *level == Level::Error { "error" } else { "warning" };
        println!("{level}: {text}");
    }
    let errors = findings.iter().filter(|finding| finding.level == Level::Error).count();
    println!("{errors} errors, {} warnings", findings.len() - errors);
    if errors > 0 {
        bail!("the configuration will not work as it is");
    }
    Ok(())
}

fn located(path: &Path, findings: Vec<Finding>) -> Vec<Finding> {
    let place = path.display();
    findings.into_iter().map(|found| Finding { text: format!("{place}: {}", found.text), ..found }).collect()
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
