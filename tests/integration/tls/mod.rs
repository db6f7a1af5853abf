//! TLS on every listener, through real Envoy where Envoy is the client, and towards engines and the collector of spans.

mod collector;
mod engines;
mod envoy;
mod hostile;
mod listeners;
mod reload;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tandem_sim::{EngineConfig, Timing};

use crate::harness::engines::MODEL;
use crate::harness::http::Call;
use crate::harness::tls::Authority;

const CHAT: &str = "/v1/chat/completions";

/// An authority with certificates `tandem` and `client`, in a directory that goes with the value.
fn authority() -> Option<(tempfile::TempDir, Authority)> {
    let directory = tempfile::tempdir().expect("a directory");
    let authority = Authority::new(&directory.path().join("own"))?;
    Some((directory, authority.issue("tandem", "tandem").issue("client", "client")))
}

/// Another authority in the same place, with a certificate `stranger`.
fn foreign(directory: &Path) -> Authority {
    Authority::new(&directory.join("foreign")).expect("openssl").issue("stranger", "stranger")
}

/// The variables of one listener (`GRPC`, `HTTP` or `FRONT`).
fn variables(listener: &str, cert: &Path, key: &Path, client_ca: Option<&Path>) -> Vec<(String, String)> {
    let files = [("CERT", Some(cert)), ("KEY", Some(key)), ("CLIENT_CA", client_ca)];
    let named = |(end, file): (&str, Option<&Path>)| {
        file.map(|file| (format!("TANDEM_{listener}_TLS_{end}"), file.display().to_string()))
    };
    files.into_iter().filter_map(named).collect()
}

/// Files of a listener that a test replaces.
struct Files {
    cert: PathBuf,
    key: PathBuf,
    ca: PathBuf,
}

impl Files {
    fn new(directory: &Path) -> Files {
        let directory = directory.join("in-use");
        std::fs::create_dir_all(&directory).expect("a directory");
        let file = |name: &str| directory.join(name);
        Files { cert: file("tls.crt"), key: file("tls.key"), ca: file("ca.crt") }
    }

    /// Puts a certificate of that authority in, and the authority as that of clients.
    fn put(&self, authority: &Authority, name: &str) {
        for (from, to) in
            [(authority.cert(name), &self.cert), (authority.key(name), &self.key), (authority.ca(), &self.ca)]
        {
            std::fs::copy(from, to).expect("copy");
        }
    }

    fn variables(&self, listener: &str, client_ca: bool) -> Vec<(String, String)> {
        variables(listener, &self.cert, &self.key, client_ca.then_some(self.ca.as_path()))
    }
}

/// A streamed chat of so many tokens.
fn chat(base: &str, tokens: usize) -> Call {
    let body = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": "in private"}],
        "max_tokens": tokens,
        "stream": true,
    });
    Call::post(base, CHAT, body.to_string())
}

/// Reads a streamed chat to its end.
async fn complete(call: Call) -> Result<(), String> {
    let answer = call.try_send().await.map_err(|error| format!("no answer: {error}"))?;
    if answer.status != 200 {
        return Err(format!("{}", answer.status));
    }
    let (events, whole) = answer.events().collect().await;
    let ended = events.last().is_some_and(|event| event == "[DONE]");
    if whole && ended { Ok(()) } else { Err(format!("cut after {} events", events.len())) }
}

/// A token every 100 ms.
fn at_a_speaking_pace(config: EngineConfig) -> EngineConfig {
    config.timing(Timing { decode_base: Duration::from_millis(100), ..Timing::instant() })
}
