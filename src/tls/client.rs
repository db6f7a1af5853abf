//! The client's side, for collectors of spans and for engines.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use super::files::Pem;
use super::load::{blame, certificates, private_key, roots};
use super::{TlsError, provider};

/// What a client believes, and who it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientFiles {
    /// Authorities of the server's certificate; `None` = those of the machine.
    pub authorities: Option<PathBuf>,
    /// Its own certificate.
    pub cert: Option<PathBuf>,
    /// The key of it.
    pub key: Option<PathBuf>,
    /// Believe any server.
    pub skip_verify: bool,
}

/// TLS 1.2 and 1.3 towards a server that speaks `protocol` (as ALPN spells it). Reads the files.
pub fn client(files: &ClientFiles, protocol: &[u8]) -> Result<Arc<ClientConfig>, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::Other(error.to_string()))?;
    let builder = if files.skip_verify {
        builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyServer(provider())))
    } else {
        let roots = match &files.authorities {
            Some(file) => roots(&Pem::read(file)?)?,
            None => machine_roots()?,
        };
        builder.with_root_certificates(roots)
    };
    let mut config = match (&files.cert, &files.key) {
        (None, None) => builder.with_no_client_auth(),
        (Some(cert), Some(key)) => {
            let (cert, key) = (Pem::read(cert)?, Pem::read(key)?);
            builder
                .with_client_auth_cert(certificates(&cert)?, private_key(&key)?)
                .map_err(|error| blame(&error, &cert, &key))?
        }
        (Some(file), None) | (None, Some(file)) => return Err(TlsError::NotAPair { file: file.clone() }),
    };
    config.alpn_protocols = vec![protocol.to_vec()];
    Ok(Arc::new(config))
}

/// Whom the machine trusts (`SSL_CERT_FILE` and `SSL_CERT_DIR` say otherwise).
fn machine_roots() -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if added == 0 { Err(TlsError::NoAuthorities) } else { Ok(roots) }
}

/// Believes every certificate. The server still has to own the key of the one that it shows.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
