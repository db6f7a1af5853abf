//! The settings of TLS.

use super::{Described, Group, one};

const CERT: &str = "Certificate of this listener, its issuers after it. With it, the listener speaks TLS only. Needs \
                    the key. Files are looked at every second; new ones hold for new connections.";
const KEY: &str = "The certificate's private key, not encrypted.";
const CLIENT_CA: &str = "Authorities of client certificates: only clients that show one of theirs come in.";
const ENGINE_CA: &str = "Authorities of the certificates of engines whose pods have the annotation \
                         `model.aibrix.ai/scheme: https`. Unset: those of the machine. Read once, at the start.";

const fn file(name: &'static str, meaning: &'static str) -> Described {
    one(name, "unset", "path of a PEM file", "", meaning)
}

/// TLS of the listeners, and towards engines.
pub(super) const TLS: Group = Group {
    title: "TLS",
    settings: &[
        file("TANDEM_GRPC_TLS_CERT", CERT),
        file("TANDEM_GRPC_TLS_KEY", KEY),
        file("TANDEM_GRPC_TLS_CLIENT_CA", CLIENT_CA),
        file("TANDEM_HTTP_TLS_CERT", CERT),
        file("TANDEM_HTTP_TLS_KEY", KEY),
        file("TANDEM_HTTP_TLS_CLIENT_CA", CLIENT_CA),
        file("TANDEM_FRONT_TLS_CERT", CERT),
        file("TANDEM_FRONT_TLS_KEY", KEY),
        file("TANDEM_FRONT_TLS_CLIENT_CA", CLIENT_CA),
        file("TANDEM_ENGINE_TLS_CA", ENGINE_CA),
        one(
            "TANDEM_ENGINE_TLS_SERVER_NAME",
            "unset",
            "host name",
            "",
            "The name that engines' certificates have to hold. Unset: the address of the pod.",
        ),
        one(
            "TANDEM_ENGINE_TLS_INSECURE_SKIP_VERIFY",
            "false",
            "boolean",
            "",
            "Believe any engine. Traffic is encrypted, but to whom nobody knows.",
        ),
    ],
};
