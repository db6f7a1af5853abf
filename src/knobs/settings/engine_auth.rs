//! The settings of what engines are shown.

use super::{Group, one};

/// Credentials towards engines.
pub(super) const ENGINE_AUTH: Group = Group {
    title: "Credentials towards engines",
    settings: &[
        one(
            "TANDEM_ENGINE_API_KEY",
            "unset",
            "secret",
            "",
            "Sent to engines as a bearer token with every request, in place of what the client sent.",
        ),
        one(
            "TANDEM_FORWARD_AUTH_TOKEN",
            "false",
            "boolean",
            "",
            "Engines get `AIBRIX_AUTH_BEARER_TOKEN` as clients send it. Otherwise it ends here.",
        ),
    ],
};
