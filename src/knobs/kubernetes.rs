//! Which pods of a Kubernetes cluster are looked at, and how closely.

use std::time::Duration;

use super::parse;
use super::read::{Reader, secs};

/// Discovery from the Kubernetes API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesKnobs {
    /// `TANDEM_KUBERNETES_NAMESPACES` (empty = all): namespaces that are watched, each once.
    pub namespaces: Vec<String>,
    /// `TANDEM_KUBERNETES_POD_SELECTOR` (unset): a label selector that the API server applies to pods.
    pub pod_selector: Option<String>,
    /// `TANDEM_KUBERNETES_WORKLOADS` (false): workloads are watched too, so that their models are known without pods.
    pub workloads: bool,
    /// `TANDEM_KUBERNETES_STALL_SECONDS` (120 s): a watch that says nothing for so long is given up.
    pub stall: Duration,
    /// `TANDEM_KUBERNETES_RELIST_SECONDS` (900 s): everything is listed again after so long.
    pub relist: Duration,
}

impl Default for KubernetesKnobs {
    fn default() -> KubernetesKnobs {
        KubernetesKnobs {
            namespaces: Vec::new(),
            pod_selector: None,
            workloads: false,
            stall: Duration::from_mins(2),
            relist: Duration::from_mins(15),
        }
    }
}

pub(super) fn read(reader: &mut Reader<'_>) -> KubernetesKnobs {
    let default = KubernetesKnobs::default();
    KubernetesKnobs {
        namespaces: reader
            .optional("TANDEM_KUBERNETES_NAMESPACES", parse::namespaces, |names| names.join(","))
            .unwrap_or_default(),
        pod_selector: reader.text("TANDEM_KUBERNETES_POD_SELECTOR"),
        workloads: reader.value("TANDEM_KUBERNETES_WORKLOADS", default.workloads, parse::boolean, bool::to_string),
        stall: reader.value("TANDEM_KUBERNETES_STALL_SECONDS", default.stall, parse::seconds, secs),
        relist: reader.value("TANDEM_KUBERNETES_RELIST_SECONDS", default.relist, parse::seconds, secs),
    }
}
