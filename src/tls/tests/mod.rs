//! TLS with certificates that `openssl` makes anew for each test; without it, tests say so and pass.

mod handshakes;
mod loading;
mod reloading;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use tempfile::TempDir;

use super::*;
use crate::clock::Clock;
use crate::knobs::TlsFiles;
use crate::telemetry::{FleetGauges, Metrics};

/// A directory of certificates.
struct Made(TempDir);

impl Made {
    /// With an authority `ca`, and certificates `server` and `client` of it. `None` when there is no `openssl` here.
    fn new() -> Option<Made> {
        if Command::new("openssl").arg("version").output().is_err() {
            println!("skipped: no openssl to make certificates with");
            return None;
        }
        let made = Made(tempfile::tempdir().unwrap());
        made.authority("ca");
        made.certificate("server", "ca");
        made.certificate("client", "ca");
        Some(made)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `openssl`; what it printed.
    fn openssl(&self, words: &str) -> String {
        let done = Command::new("openssl").args(words.split(' ')).current_dir(self.0.path()).output().unwrap();
        assert!(done.status.success(), "{words}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    fn authority(&self, name: &str) {
        let new = "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -x509 -days 2";
        self.openssl(&format!("{new} -subj /CN={name} -keyout {name}.key -out {name}.crt"));
    }

    fn certificate(&self, name: &str, authority: &str) {
        self.certificate_with(name, authority, "ec -pkeyopt ec_paramgen_curve:P-256");
    }

    fn certificate_with(&self, name: &str, authority: &str, kind: &str) {
        std::fs::write(self.path("names"), "subjectAltName=DNS:localhost,IP:127.0.0.1\n").unwrap();
        self.openssl(&format!("req -newkey {kind} -nodes -new -subj /CN={name} -keyout {name}.key -out {name}.csr"));
        self.openssl(&format!(
            "x509 -req -in {name}.csr -CA {authority}.crt -CAkey {authority}.key -CAcreateserial -days 2 -extfile names \
             -out {name}.crt"
        ));
    }

    /// The files of a listener.
    fn files(&self, name: &str, client_ca: Option<&str>) -> TlsFiles {
        TlsFiles {
            cert: self.path(&format!("{name}.crt")),
            key: self.path(&format!("{name}.key")),
            client_ca: client_ca.map(|name| self.path(&format!("{name}.crt"))),
        }
    }

    /// A client that believes `ca`, with the certificate of that name.
    fn client(&self, cert: Option<&str>) -> ClientFiles {
        let file = |end: &str| cert.map(|name| self.path(&format!("{name}.{end}")));
        let authorities = Some(self.path("ca.crt"));
        ClientFiles { authorities, cert: file("crt"), key: file("key"), skip_verify: false }
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::copy(from, to).unwrap();
}

fn metrics() -> Arc<Metrics> {
    Arc::new(Metrics::new("gateway"))
}

/// The value of a series; `None` when it does not exist.
fn value(metrics: &Metrics, series: &str) -> Option<i64> {
    let page = metrics.render(&FleetGauges::default(), Clock::system().now());
    page.lines().find_map(|line| line.strip_prefix(series)?.trim().parse::<f64>().ok()).map(|value| value as i64)
}

/// Whatever asks for "the" provider gets one: exactly one is linked.
#[test]
fn there_is_one_provider() {
    let linked = rustls_default();
    let names = |suites: &[tokio_rustls::rustls::SupportedCipherSuite]| {
        suites.iter().map(|suite| format!("{:?}", suite.suite())).collect::<Vec<_>>()
    };
    assert_eq!(names(&linked.cipher_suites), names(&provider().cipher_suites));
}

fn rustls_default() -> Arc<CryptoProvider> {
    // Panics when none, or more than one, is linked.
    Arc::clone(tokio_rustls::rustls::ClientConfig::builder().crypto_provider())
}
