//! The files of TLS, per listener.

use std::path::PathBuf;

use super::parse;
use super::read::Reader;

/// What one listener presents, and whom it lets in. All are PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, its issuers after it.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Authorities of client certificates, which clients then need.
    pub client_ca: Option<PathBuf>,
}

/// TLS towards engines whose pods ask for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineTlsKnobs {
    /// `TANDEM_ENGINE_TLS_CA` (unset): authorities of engines' certificates; `None` = those of the machine.
    pub ca: Option<PathBuf>,
    /// `TANDEM_ENGINE_TLS_SERVER_NAME` (unset): what these certificates have to name; `None` = the address that is dialled.
    pub server_name: Option<String>,
    /// `TANDEM_ENGINE_TLS_INSECURE_SKIP_VERIFY` (false): believe any engine.
    pub skip_verify: bool,
}

/// TLS of the listeners; `None` = in the clear.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsKnobs {
    /// Towards engines.
    pub engines: EngineTlsKnobs,
    /// `TANDEM_GRPC_TLS_CERT`, `…_KEY`, `…_CLIENT_CA` (unset): ext_proc.
    pub grpc: Option<TlsFiles>,
    /// `TANDEM_HTTP_TLS_CERT`, `…_KEY`, `…_CLIENT_CA` (unset): admin.
    pub http: Option<TlsFiles>,
    /// `TANDEM_FRONT_TLS_CERT`, `…_KEY`, `…_CLIENT_CA` (unset): the HTTP front.
    pub front: Option<TlsFiles>,
}

/// Half a configuration refuses the start: to serve in the clear instead is what nobody asked for.
pub(super) fn read(reader: &mut Reader<'_>, refusals: &mut Vec<String>) -> TlsKnobs {
    let mut listener = |[cert_name, key_name, ca_name]: [&'static str; 3]| {
        let [cert, key, client_ca] = [cert_name, key_name, ca_name].map(|name| path(reader, name));
        match (cert, key, client_ca) {
            (Some(cert), Some(key), client_ca) => Some(TlsFiles { cert, key, client_ca }),
            (None, None, None) => None,
            (None, None, Some(_)) => {
                refusals.push(format!("{ca_name} is set, but neither {cert_name} nor {key_name}"));
                None
            }
            (Some(_), None, _) => {
                refusals.push(format!("{cert_name} is set, but not {key_name}"));
                None
            }
            (None, Some(_), _) => {
                refusals.push(format!("{key_name} is set, but not {cert_name}"));
                None
            }
        }
    };
    let listeners = TlsKnobs {
        engines: EngineTlsKnobs::default(),
        grpc: listener(["TANDEM_GRPC_TLS_CERT", "TANDEM_GRPC_TLS_KEY", "TANDEM_GRPC_TLS_CLIENT_CA"]),
        http: listener(["TANDEM_HTTP_TLS_CERT", "TANDEM_HTTP_TLS_KEY", "TANDEM_HTTP_TLS_CLIENT_CA"]),
        front: listener(["TANDEM_FRONT_TLS_CERT", "TANDEM_FRONT_TLS_KEY", "TANDEM_FRONT_TLS_CLIENT_CA"]),
    };
    TlsKnobs { engines: engines(reader), ..listeners }
}

fn engines(reader: &mut Reader<'_>) -> EngineTlsKnobs {
    const SKIP: &str = "TANDEM_ENGINE_TLS_INSECURE_SKIP_VERIFY";
    let knobs = EngineTlsKnobs {
        ca: path(reader, "TANDEM_ENGINE_TLS_CA"),
        server_name: reader.text("TANDEM_ENGINE_TLS_SERVER_NAME"),
        skip_verify: reader.value(SKIP, false, parse::boolean, bool::to_string),
    };
    if knobs.skip_verify {
        reader.warn("TANDEM_ENGINE_TLS_INSECURE_SKIP_VERIFY is set: the certificates of engines are not checked");
    }
    knobs
}

/// The path of a file. Paths are no secrets.
pub(super) fn path(reader: &mut Reader<'_>, name: &'static str) -> Option<PathBuf> {
    reader.text(name).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::knobs::{Environment, Knobs, Refusal};

    struct Map(BTreeMap<&'static str, &'static str>);

    impl Environment for Map {
        fn get(&self, name: &str) -> Option<String> {
            self.0.get(name).map(|value| (*value).to_owned())
        }
    }

    fn read(pairs: &[(&'static str, &'static str)]) -> Result<TlsKnobs, Refusal> {
        Knobs::read(&Map(pairs.iter().copied().collect())).map(|(knobs, _)| knobs.tls)
    }

    #[test]
    fn each_listener_has_its_own_files() {
        assert_eq!(read(&[]).unwrap(), TlsKnobs::default());
        let files = |client_ca: Option<&str>| {
            Some(TlsFiles { cert: "/c".into(), key: "/k".into(), client_ca: client_ca.map(PathBuf::from) })
        };
        let grpc = [("TANDEM_GRPC_TLS_CERT", "/c"), ("TANDEM_GRPC_TLS_KEY", "/k"), ("TANDEM_GRPC_TLS_CLIENT_CA", "/a")];
        assert_eq!(read(&grpc).unwrap(), TlsKnobs { grpc: files(Some("/a")), ..TlsKnobs::default() });
        let http = [("TANDEM_HTTP_TLS_CERT", "/c"), ("TANDEM_HTTP_TLS_KEY", "/k")];
        assert_eq!(read(&http).unwrap(), TlsKnobs { http: files(None), ..TlsKnobs::default() });
        let front = [("TANDEM_FRONT_TLS_CERT", "/c"), ("TANDEM_FRONT_TLS_KEY", "/k")];
        assert_eq!(read(&front).unwrap(), TlsKnobs { front: files(None), ..TlsKnobs::default() });
    }

    #[test]
    fn half_a_configuration_refuses_the_start() {
        for (pairs, expected) in [
            (&[("TANDEM_GRPC_TLS_CERT", "/c")][..], "TANDEM_GRPC_TLS_CERT is set, but not TANDEM_GRPC_TLS_KEY"),
            (&[("TANDEM_HTTP_TLS_KEY", "/k")], "TANDEM_HTTP_TLS_KEY is set, but not TANDEM_HTTP_TLS_CERT"),
            (
                &[("TANDEM_FRONT_TLS_CLIENT_CA", "/a")],
                "TANDEM_FRONT_TLS_CLIENT_CA is set, but neither TANDEM_FRONT_TLS_CERT nor TANDEM_FRONT_TLS_KEY",
            ),
            // An empty variable is an unset one.
            (
                &[("TANDEM_FRONT_TLS_CERT", "/c"), ("TANDEM_FRONT_TLS_KEY", " "), ("TANDEM_FRONT_TLS_CLIENT_CA", "/a")],
                "TANDEM_FRONT_TLS_CERT is set, but not TANDEM_FRONT_TLS_KEY",
            ),
        ] {
            assert_eq!(read(pairs).unwrap_err().reasons, [expected], "{pairs:?}");
        }
    }
}
