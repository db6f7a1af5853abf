//! Redis behind TLS, with a certificate of an authority of one's own.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::processor::closed_port;
use crate::harness::redis::Redis;
use crate::harness::{SOON, eventually};

/// Makes an authority, and a certificate of it for this host; false when there is no `openssl` here.
fn certificates(directory: &Path) -> bool {
    std::fs::write(directory.join("names"), "subjectAltName=IP:127.0.0.1\n").expect("write");
    let new = "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    [
        format!("{new} -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.crt"),
        format!("{new} -new -subj /CN=redis -keyout redis.key -out redis.csr"),
        "x509 -req -in redis.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out redis.crt"
            .to_owned(),
    ]
    .iter()
    .all(|command| match Command::new("openssl").args(command.split(' ')).current_dir(directory).output() {
        Ok(done) => {
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            true
        }
        Err(_) => false,
    })
}

async fn gateway(url: &str, authority: Option<&Path>) -> Sandbox {
    let mut env = vec![("REDIS_URL".to_owned(), url.to_owned())];
    env.extend(authority.map(|file| ("SSL_CERT_FILE".to_owned(), file.display().to_string())));
    let fleet = FleetOptions { replicas: 1, envoy: false, env, ..FleetOptions::default() };
    Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await
}

async fn connected(sandbox: &Sandbox) -> bool {
    sandbox.fleet.tandems[0].metrics().await.sum("tandem_state_plane_connected", &[]) > 0.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_trusts_the_authorities_of_the_system_and_nobody_else() {
    let directory = tempfile::tempdir().expect("a directory");
    if !certificates(directory.path()) {
        println!("skipped: no openssl to make certificates with");
        return;
    }
    let file = |name: &str| directory.path().join(name).display().to_string();
    let port = closed_port().port();
    let redis = Redis::start_with(|| {
        let words = [
            ("--tls-port", port.to_string()),
            ("--tls-cert-file", file("redis.crt")),
            ("--tls-key-file", file("redis.key")),
            ("--tls-ca-cert-file", file("ca.crt")),
            ("--tls-auth-clients", "no".to_owned()),
        ];
        words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect()
    })
    .await;
    let url = format!("rediss://127.0.0.1:{port}");
    let trusts = gateway(&url, Some(&directory.path().join("ca.crt"))).await;
    let members = async || redis.command(&["EVAL", "return #redis.call('KEYS', '*:ledger1:leases')", "0"]).await;
    eventually(SOON, "a connection", async || connected(&trusts).await.then_some(())).await;
    eventually(SOON, "a member", async || (members().await == ":1").then_some(())).await;
    trusts.close().await;
    // Without that authority nothing is told.
    redis.command(&["FLUSHALL"]).await;
    let doubts = gateway(&url, None).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert!(!connected(&doubts).await && members().await == ":0");
    doubts.close().await;
}
