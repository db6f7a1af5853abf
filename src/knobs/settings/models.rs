//! Models without pods.

use super::{Group, one};

pub(super) const MODELS: Group = Group {
    title: "Models without pods",
    settings: &[
        one(
            "TANDEM_MODEL_MEMORY_SECONDS",
            "86400",
            "seconds",
            "",
            "A model whose last pod went is known for so long: requests for it get 503 with `Retry-After`, not 400 (see [models](models.md)). 0: it is unknown at once.",
        ),
        one(
            "TANDEM_WAKE_SLEEPING_MODELS",
            "true",
            "boolean",
            "",
            "A request for a model whose claims sleep tells the runtime in one of their pods to wake it, as the reference gateway does.",
        ),
        one("TANDEM_MODEL_RUNTIME_PORT", "8080", "port", "", "The port of that runtime."),
    ],
};
