//! Discovery from the Kubernetes API.

use super::{Group, one};

pub(super) const KUBERNETES: Group = Group {
    title: "Discovery from Kubernetes",
    settings: &[
        one(
            "TANDEM_KUBERNETES_NAMESPACES",
            "unset",
            "names, comma-separated",
            "",
            "Namespaces whose pods and adapters are watched; at most 64. Unset: all of them (see [discovery from Kubernetes](kubernetes.md)).",
        ),
        one(
            "TANDEM_KUBERNETES_POD_SELECTOR",
            "unset",
            "label selector",
            "",
            "Pods that the API server sends at all. Unset, it sends every pod, and those that name no model are dropped on arrival; in a big cluster, `model.aibrix.ai/name` saves that, unless pods name their models only in annotations.",
        ),
        one(
            "TANDEM_KUBERNETES_WORKLOADS",
            "false",
            "boolean",
            "",
            "Watch Deployments, StatefulSets, StormServices and RayClusterFleets too, so that the models that they name are known while they are scaled to zero (see [models](models.md)). AIBrix's routes tell the same without it. Needs the right to list and watch them.",
        ),
        one(
            "TANDEM_KUBERNETES_STALL_SECONDS",
            "120",
            "seconds",
            "",
            "A watch that says nothing for so long is given up, and the list is read again. Each watch is asked to end well before: after at most three quarters of this.",
        ),
        one(
            "TANDEM_KUBERNETES_RELIST_SECONDS",
            "900",
            "seconds",
            "",
            "The list is read again after so long, whatever the watch says.",
        ),
    ],
};
