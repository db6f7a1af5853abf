//! From PEM bytes to what rustls needs. Pure: files are read elsewhere.

use std::sync::Arc;

use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::{Error, RootCertStore, ServerConfig};

use super::certificate::{Facts, facts};
use super::files::{Pem, ServerPem};
use super::{Listener, TlsError, provider};

/// A configuration and what is worth telling about it.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// For the handshakes.
    pub config: Arc<ServerConfig>,
    /// Of the listener's own certificate; `None` when its form is unusual (which does no harm).
    pub facts: Option<Facts>,
}

/// TLS 1.2 and 1.3 for a listener. With authorities of clients, only clients with a certificate of theirs come in, and
/// each connection shows it: sessions are not resumed, since a resumed one is not checked again.
pub fn server(pem: &ServerPem, listener: Listener) -> Result<Loaded, TlsError> {
    let chain = certificates(&pem.cert)?;
    let key = private_key(&pem.key)?;
    let facts = chain.first().and_then(|leaf| facts(leaf));
    let other = |error: Error| TlsError::Other(error.to_string());
    let builder =
        ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().map_err(other)?;
    let builder = match &pem.client_ca {
        None => builder.with_no_client_auth(),
        Some(authorities) => {
            let roots = Arc::new(roots(authorities)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
            builder.with_client_cert_verifier(verifier.build().map_err(|error| bad_certificate(authorities, &error))?)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| blame(&error, &pem.cert, &pem.key))?;
    config.alpn_protocols = vec![listener.protocol().to_vec()];
    if pem.client_ca.is_some() {
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    Ok(Loaded { config: Arc::new(config), facts })
}

/// Every certificate of a file; at least one. A damaged section fails the file.
pub(super) fn certificates(pem: &Pem) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    // The parser's errors may quote a line of the file.
    let none = || TlsError::NoCertificate { file: pem.file.clone() };
    let found: Vec<_> = CertificateDer::pem_slice_iter(&pem.bytes).collect::<Result<_, _>>().map_err(|_| none())?;
    if found.is_empty() { Err(none()) } else { Ok(found) }
}

/// The first private key of a file.
pub(super) fn private_key(pem: &Pem) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&pem.bytes).map_err(|_| TlsError::NoKey { file: pem.file.clone() })
}

/// The authorities of a file, each of which must be usable.
pub(super) fn roots(pem: &Pem) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(pem)? {
        roots.add(certificate).map_err(|error| bad_certificate(pem, &error))?;
    }
    Ok(roots)
}

/// Which of the two files is at fault when certificate and key are not taken together.
pub(super) fn blame(error: &Error, cert: &Pem, key: &Pem) -> TlsError {
    match error {
        Error::InconsistentKeys(_) => TlsError::Mismatch { cert: cert.file.clone(), key: key.file.clone() },
        Error::InvalidCertificate(_) | Error::NoCertificatesPresented => bad_certificate(cert, error),
        _ => TlsError::BadKey { file: key.file.clone() },
    }
}

fn bad_certificate(pem: &Pem, error: &dyn std::fmt::Display) -> TlsError {
    TlsError::BadCertificate { file: pem.file.clone(), reason: error.to_string() }
}
