//! Certificates of an authority of one's own, and both ends of TLS.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::within;

/// An authority, and the directory in which it and its certificates are.
#[derive(Debug)]
pub struct Authority {
    directory: PathBuf,
}

impl Authority {
    /// Makes one in `directory`, which is made too; `None`, with a word about it, when there is no `openssl` here.
    pub fn new(directory: &Path) -> Option<Authority> {
        if Command::new("openssl").arg("version").output().is_err() {
            println!("skipped: no openssl to make certificates with");
            return None;
        }
        std::fs::create_dir_all(directory).expect("a directory");
        let authority = Authority { directory: directory.to_owned() };
        let name = format!("ca-{}", directory.file_name().expect("a name").display());
        authority.openssl(&format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -x509 -days 2 -subj /CN={name} -keyout ca.key -out ca.crt"
        ));
        Some(authority)
    }

    /// Makes a certificate for `localhost`, this address, and the name `host`; its files are called `name`.
    #[must_use]
    pub fn issue(self, name: &str, host: &str) -> Authority {
        let names = format!("subjectAltName=DNS:{host},DNS:localhost,IP:127.0.0.1\n");
        std::fs::write(self.directory.join("names"), names).expect("write");
        self.openssl(&format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -new -subj /CN={name} -keyout {name}.key -out {name}.csr"
        ));
        self.openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out {name}.crt"
        ));
        self
    }

    fn openssl(&self, words: &str) {
        let done =
            Command::new("openssl").args(words.split(' ')).current_dir(&self.directory).output().expect("openssl");
        assert!(done.status.success(), "{words}: {}", String::from_utf8_lossy(&done.stderr));
    }

    /// Its own certificate.
    pub fn ca(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// A certificate.
    pub fn cert(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.crt"))
    }

    /// Its key.
    pub fn key(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.key"))
    }

    /// A client that believes this authority and shows the certificate of that name, of whichever authority it is.
    pub fn client(&self, identity: Option<(&Authority, &str)>, protocol: &str) -> Arc<ClientConfig> {
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(self.roots());
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some((authority, name)) => {
                let (cert, key) = authority.identity(name);
                builder.with_client_auth_cert(cert, key).expect("a client certificate")
            }
        };
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        Arc::new(config)
    }

    /// A server with the certificate of that name, for clients with one of this authority.
    pub fn server(&self, name: &str) -> Arc<ServerConfig> {
        let provider = Arc::new(default_provider());
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(self.roots()), Arc::clone(&provider));
        let (cert, key) = self.identity(name);
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_client_cert_verifier(clients.build().expect("a verifier"))
            .with_single_cert(cert, key)
            .expect("a certificate");
        Arc::new(config)
    }

    /// A server with the certificate of that name, for anybody.
    pub fn open_server(&self, name: &str) -> Arc<ServerConfig> {
        let (cert, key) = self.identity(name);
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(cert, key)
            .expect("a certificate");
        Arc::new(config)
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.ca()).expect("the authority")).expect("an authority");
        roots
    }

    fn identity(&self, name: &str) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let cert = CertificateDer::from_pem_file(self.cert(name)).expect("the certificate");
        (vec![cert], PrivateKeyDer::from_pem_file(self.key(name)).expect("the key"))
    }
}

/// Connects, and returns the certificate that the server shows.
pub async fn presented(address: SocketAddr, config: &Arc<ClientConfig>) -> io::Result<Vec<u8>> {
    let name = ServerName::try_from("localhost").expect("a name");
    let handshake = async {
        let stream = TcpStream::connect(address).await?;
        TlsConnector::from(Arc::clone(config)).connect(name, stream).await
    };
    let stream = within("TLS handshake", handshake).await?;
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
    Ok(chain.first().map(|leaf| leaf.to_vec()).unwrap_or_default())
}

/// The certificate in a file, in the form of [`presented`].
pub fn in_file(file: &Path) -> Vec<u8> {
    CertificateDer::from_pem_file(file).expect("a certificate").to_vec()
}

/// A listener for axum that makes one handshake after the other.
pub struct SecureListener {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl SecureListener {
    /// Puts TLS before a listener.
    pub fn new(listener: TcpListener, config: Arc<ServerConfig>) -> SecureListener {
        SecureListener { listener, acceptor: TlsAcceptor::from(config) }
    }
}

impl axum::serve::Listener for SecureListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let (stream, peer) = self.listener.accept().await.expect("accept");
            if let Ok(stream) = self.acceptor.accept(stream).await {
                return (stream, peer);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}
