//! Reading PEM files. Nothing here looks into them.

use std::hash::{Hash, Hasher};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::TlsError;
use crate::knobs::TlsFiles;

/// A longer file is not read. Bundles of all public authorities have about 250 KB.
const MAX_BYTES: u64 = 1 << 20;

/// A file and what it holds; `Debug` shows no content.
#[derive(Clone, PartialEq, Eq)]
pub struct Pem {
    /// Its path, for messages.
    pub file: PathBuf,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl Pem {
    /// Reads a file, through symbolic links.
    pub fn read(path: &Path) -> Result<Pem, TlsError> {
        let unreadable =
            |error: std::io::Error| TlsError::Unreadable { file: path.to_owned(), reason: error.kind().to_string() };
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .map_err(unreadable)?
            .take(MAX_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(unreadable)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(TlsError::TooLong { file: path.to_owned(), limit: MAX_BYTES });
        }
        Ok(Pem { file: path.to_owned(), bytes })
    }
}

impl std::fmt::Debug for Pem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pem").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Hash for Pem {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
    }
}

/// The files of one listener, as they were at one look.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct ServerPem {
    /// The certificate, its issuers after it.
    pub cert: Pem,
    /// Its private key.
    pub key: Pem,
    /// Authorities of client certificates; `None` = clients need none.
    pub client_ca: Option<Pem>,
}

impl ServerPem {
    /// Reads all files of a listener.
    pub fn read(files: &TlsFiles) -> Result<ServerPem, TlsError> {
        Ok(ServerPem {
            cert: Pem::read(&files.cert)?,
            key: Pem::read(&files.key)?,
            client_ca: files.client_ca.as_deref().map(Pem::read).transpose()?,
        })
    }
}
