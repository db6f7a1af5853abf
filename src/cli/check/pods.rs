//! Lints of pod manifests: what routing would skip, and why.

use std::path::Path;
use std::sync::Arc;

use super::Finding;
use crate::discovery::PodFiles;
use crate::fleet::{Model, Snapshot, build_all};
use crate::knobs::Knobs;

/// Reads the manifests as `serve` would and looks at the fleet they make.
pub fn check(path: &Path, knobs: &Knobs) -> Vec<Finding> {
    let Some(found) = PodFiles::new(path, Arc::clone(&knobs.pd)).poll_once() else {
        return vec![Finding::error("cannot be read")];
    };
    let mut findings: Vec<Finding> = found.problems.into_iter().map(Finding::error).collect();
    if found.specs.is_empty() {
        findings.push(Finding::error("no pod has the label model.aibrix.ai/name"));
    }
    let snapshot = build_all(&Snapshot::default(), &found.specs, &found.adapters, &mut 0);
    findings.extend(snapshot.problems.iter().map(Finding::error));
    let mut models: Vec<_> = snapshot.models.values().collect();
    models.sort_by_key(|model| Arc::clone(&model.name));
    for model in models {
        check_model(model, &mut findings);
    }
    findings
}

fn check_model(model: &Model, findings: &mut Vec<Finding>) {
    let name = &model.name;
    if model.is_alias() && model.routable.is_empty() {
        findings.push(Finding::error(format!("model {name}: no pod that serves this adapter is routable")));
        return;
    }
    for part in &model.partial {
        findings.push(Finding::warning(format!(
            "model {name}: roleset {} is skipped: {} routable prefill pods, {} routable decode pods",
            part.name, part.prefill, part.decode
        )));
    }
    if model.engines_mixed {
        findings.push(Finding::error(format!("model {name}: pods run different engines; pd requests will get 503")));
    }
    if model.config_disagreements > 0 {
        findings.push(Finding::warning(format!(
            "model {name}: {} pods carry another model.aibrix.ai/config than the one in force, which is that of pod {}: {}",
            model.config_disagreements,
            model.config_pod.as_ref().map(ToString::to_string).unwrap_or_default(),
            model.config_differing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        )));
    }
    if model.config.is_none() && !model.rolesets.is_empty() {
        findings.push(Finding::warning(format!(
            "model {name}: has rolesets but no model.aibrix.ai/config: requests use pd only if they ask for it"
        )));
    }
    if model.routable.is_empty() {
        findings.push(Finding::error(format!("model {name}: no pod is routable (address, Ready, not terminating)")));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;
    use crate::knobs::Environment;

    struct Nothing;

    impl Environment for Nothing {
        fn get(&self, _name: &str) -> Option<String> {
            None
        }
    }

    fn findings(text: &str) -> Vec<Finding> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pods.yaml");
        std::fs::write(&path, text).unwrap();
        check(&path, &Knobs::read(&Nothing).unwrap().0)
    }

    fn pod(name: &str, role: &str) -> String {
        format!(
            "---\nmetadata:\n  name: {name}\n  labels: {{model.aibrix.ai/name: m, role-name: {role}, roleset-name: r}}\n\
             status: {{podIP: 10.0.0.1}}\n"
        )
    }

    #[test]
    fn a_prefill_without_its_decode_is_named() {
        let found = findings(&pod("p", "prefill"));
        assert!(found.iter().any(|f| f.text.contains("roleset r is skipped: 1 routable prefill pods, 0")), "{found:?}");
    }

    #[test]
    fn a_whole_pair_only_lacks_its_annotation() {
        let found = findings(&(pod("p", "prefill") + &pod("d", "decode")));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].level, Level::Warning);
    }

    #[test]
    fn broken_manifests_are_errors() {
        assert!(findings("metadata: [").iter().any(|found| found.level == Level::Error));
    }
}
