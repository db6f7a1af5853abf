//! The front and the admin port over TLS, and files that refuse the start.

use super::{authority, chat, complete, foreign, variables};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, base};
use crate::harness::pods::PodsFile;
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::{SOON, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn the_front_serves_over_tls() {
    let Some((directory, authority)) = authority() else { return };
    let stranger = foreign(directory.path());
    let [anonymous, known, unknown] = [None, Some((&authority, "client")), Some((&stranger, "stranger"))]
        .map(|identity| authority.client(identity, "http/1.1"));
    for client_ca in [None, Some(authority.ca())] {
        let env = variables("FRONT", &authority.cert("tandem"), &authority.key("tandem"), client_ca.as_deref());
        let fleet = FleetOptions { replicas: 1, envoy: false, env, ..FleetOptions::default() };
        let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
        let front = base(sandbox.fleet.tandems[0].front().expect("a front"));
        let mut served = Vec::new();
        for client in [&anonymous, &known, &unknown] {
            served.push(complete(chat(&front, 4).over(client)).await.is_ok());
        }
        assert_eq!(served, if client_ca.is_some() { [false, true, false] } else { [true; 3] });
        assert_eq!(Call::get(&front, "/v1/models").over(&known).send().await.status, 200);
        // In the clear nothing is answered.
        assert!(chat(&front, 4).try_send().await.is_err());
        let served = served.iter().filter(|served| **served).count();
        assert_eq!(sandbox.prefill[0].records().len(), served);
        sandbox.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_admin_port_serves_over_tls() {
    let Some((directory, authority)) = authority() else { return };
    let stranger = foreign(directory.path());
    let [anonymous, known, unknown] = [None, Some((&authority, "client")), Some((&stranger, "stranger"))]
        .map(|identity| authority.client(identity, "http/1.1"));
    let pods = PodsFile::file([]);
    for client_ca in [None, Some(authority.ca())] {
        let env = variables("HTTP", &authority.cert("tandem"), &authority.key("tandem"), client_ca.as_deref());
        let tandem = Tandem::start(TandemOptions { pods: pods.path(), env, ..TandemOptions::default() }).await;
        let admin = base(tandem.http());
        for path in ["/metrics", "/healthz", "/v1/models", "/debug/fleet"] {
            let mut served = Vec::new();
            for client in [&anonymous, &known, &unknown] {
                let answer = Call::get(&admin, path).over(client).try_send().await;
                served.push(answer.is_ok_and(|answer| answer.status == 200));
            }
            assert_eq!(served, if client_ca.is_some() { [false, true, false] } else { [true; 3] }, "{path}");
        }
        assert!(Call::get(&admin, "/healthz").try_send().await.is_err());
        let page = Call::get(&admin, "/metrics").over(&known).send().await.body().await;
        let page = String::from_utf8_lossy(&page.bytes).into_owned();
        let expiry = "tandem_tls_certificate_expiry_timestamp_seconds{listener=\"http\"} ";
        let expiry: f64 = page.lines().find_map(|line| line.strip_prefix(expiry)?.parse().ok()).expect("the gauge");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("time").as_secs_f64();
        assert!((expiry - now - 2.0 * 86_400.0).abs() < 600.0, "{expiry} {now}");
        // Established connections do not hold the process.
        tandem.sigterm();
        assert!(tandem.exited(SOON).await.success());
    }
}

/// One sentence that names the file, says what is wrong, and holds nothing of what is in it.
#[tokio::test(flavor = "multi_thread")]
async fn files_that_cannot_be_used_refuse_the_start() {
    let Some((directory, authority)) = authority() else { return };
    let secret = directory.path().join("secret.pem");
    let frame = "-----BEGIN PRIVATE KEY-----\naHVudGVyMg==\n-----END PRIVATE KEY-----\n";
    std::fs::write(&secret, frame).expect("write");
    let (cert, key, nowhere) = (authority.cert("tandem"), authority.key("tandem"), directory.path().join("nowhere"));
    let pods = PodsFile::file([]);
    for (listener, files, expected) in [
        ("GRPC", [&nowhere, &key], "nowhere cannot be read"),
        ("HTTP", [&cert, &authority.key("client")], "does not belong to the certificate in"),
        ("FRONT", [&cert, &secret], "secret.pem holds a private key that cannot be used"),
        ("GRPC", [&cert, &cert], "holds no unencrypted private key"),
    ] {
        let env = variables(listener, files[0], files[1], None);
        let options = TandemOptions { pods: pods.path(), env, front: true, ..TandemOptions::default() };
        let failure = Tandem::try_start(options).await.expect_err("no start");
        assert!(failure.contains(expected), "{failure}");
        assert!(!failure.contains("aHVudGVy") && !failure.contains("panicked"), "{failure}");
    }
    let env = vec![("TANDEM_GRPC_TLS_CERT".to_owned(), cert.display().to_string())];
    let failure = Tandem::try_start(TandemOptions { pods: pods.path(), env, ..TandemOptions::default() }).await;
    assert!(failure.expect_err("no start").contains("TANDEM_GRPC_TLS_CERT is set, but not TANDEM_GRPC_TLS_KEY"));
}

/// A front that is not open needs no files.
#[tokio::test(flavor = "multi_thread")]
async fn files_of_a_front_that_is_not_open_are_told_of() {
    let pods = PodsFile::file([]);
    let nowhere = std::path::Path::new("/nowhere");
    let env = variables("FRONT", nowhere, nowhere, None);
    let tandem = Tandem::start(TandemOptions { pods: pods.path(), env, ..TandemOptions::default() }).await;
    eventually(SOON, "a warning", async || {
        tandem.process().logs().contains("TLS is set up for the front, which is not open").then_some(())
    })
    .await;
}
