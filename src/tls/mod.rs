//! TLS: certificates from PEM files, handshakes that cannot hold anybody up, and new certificates without a restart.
//!
//! - [`Server`] holds what a listener presents and whom it lets in. [`watch`] looks at its files and exchanges both when
//!   they change; connections that are there go on as they began.
//! - [`Incoming`] is a listener with or without TLS. A handshake has a task of its own, a deadline, and one of a bounded
//!   number of places; when these are all taken, the oldest one has to go, so that silent clients keep nobody out.
//! - [`client`] is the other side, for collectors of spans and for engines, to which a [`Dialer`] connects.
//!
//! All cryptography is ring's, through [`provider`]; no other provider is linked, so that libraries that ask for "the"
//! provider (Redis, Kubernetes) find the same. No error and no log line holds anything of a file but its name.

mod accept;
mod certificate;
mod client;
mod dial;
mod files;
mod load;
mod reload;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::rustls::crypto::{CryptoProvider, ring};

pub use accept::{Connection, Incoming};
pub use certificate::Facts;
pub use client::{ClientFiles, client};
pub use dial::{DialError, Dialer, Dialled, EngineTls};
pub use files::{Pem, ServerPem};
pub use load::{Loaded, server};
pub use reload::{LOOK_INTERVAL, Server, watch};

/// The cryptography of every TLS connection that this program sets up itself.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// A place where connections arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    /// ext_proc.
    Grpc,
    /// Admin.
    Http,
    /// The HTTP front.
    Front,
}

impl Listener {
    /// The name in labels and logs, as in its variables and flags.
    pub fn name(self) -> &'static str {
        match self {
            Listener::Grpc => "grpc",
            Listener::Http => "http",
            Listener::Front => "front",
        }
    }

    /// What it speaks, as ALPN spells it.
    fn protocol(self) -> &'static [u8] {
        match self {
            Listener::Grpc => b"h2",
            Listener::Http | Listener::Front => b"http/1.1",
        }
    }
}

/// Files that TLS cannot be had from. The text names the file and says what is wrong; it holds nothing of the content.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// The file is missing, or not ours to read.
    #[error("{} cannot be read: {reason}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The system's words.
        reason: String,
    },
    /// Certificates and keys are short; this is something else.
    #[error("{} is longer than {limit} bytes", file.display())]
    TooLong {
        /// The file.
        file: PathBuf,
        /// The bound.
        limit: u64,
    },
    /// No section `CERTIFICATE`, or a section that is broken off.
    #[error("{} holds no certificate in PEM form, or one that is damaged", file.display())]
    NoCertificate {
        /// The file.
        file: PathBuf,
    },
    /// A certificate that cannot be understood or used.
    #[error("{} holds a certificate that cannot be used: {reason}", file.display())]
    BadCertificate {
        /// The file.
        file: PathBuf,
        /// What the library says.
        reason: String,
    },
    /// No private key, or only an encrypted one.
    #[error("{} holds no unencrypted private key in PEM form", file.display())]
    NoKey {
        /// The file.
        file: PathBuf,
    },
    /// A key of a kind that is not supported, or a damaged one.
    #[error("{} holds a private key that cannot be used (RSA, ECDSA P-256/P-384 and Ed25519 can)", file.display())]
    BadKey {
        /// The file.
        file: PathBuf,
    },
    /// The key is another certificate's.
    #[error("the private key in {} does not belong to the certificate in {}", key.display(), cert.display())]
    Mismatch {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// A client certificate for a collector without its key, or the other way round.
    #[error("{} has no counterpart: a client certificate and its key are given together", file.display())]
    NotAPair {
        /// The file that is there.
        file: PathBuf,
    },
    /// The machine trusts nobody.
    #[error("no certificate authorities were found on this machine")]
    NoAuthorities,
    /// Not a matter of the files.
    #[error("TLS cannot be set up: {0}")]
    Other(String),
}
