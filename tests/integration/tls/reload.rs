//! New certificates without a restart.

use super::{Files, at_a_speaking_pace, authority, chat, complete, foreign};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, base};
use crate::harness::tls::{in_file, presented};
use crate::harness::{SOON, eventually};

fn options(files: &Files, client_ca: bool) -> SandboxOptions {
    let env = files.variables("FRONT", client_ca);
    let fleet = FleetOptions { replicas: 1, envoy: false, env, ..FleetOptions::default() };
    SandboxOptions { engine: at_a_speaking_pace, fleet, ..SandboxOptions::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn new_connections_see_the_new_certificate_and_streams_go_on() {
    let Some((directory, authority)) = authority() else { return };
    let authority = authority.issue("next", "tandem").issue("last", "tandem");
    let files = Files::new(directory.path());
    files.put(&authority, "tandem");
    let sandbox = Sandbox::start(options(&files, false)).await;
    let tandem = &sandbox.fleet.tandems[0];
    let front = tandem.front().expect("a front");
    let client = authority.client(None, "http/1.1");
    let shown = async || presented(front, &client).await.expect("a handshake");
    let reloads = async |result: &str| {
        tandem.metrics().await.sum("tandem_tls_reloads_total", &[("listener", "front"), ("result", result)])
    };
    assert_eq!(shown().await, in_file(&authority.cert("tandem")));

    // 10 s: longer than all that follows needs, unless the machine is very busy.
    let mut running = chat(&base(front), 100).over(&client).send().await.events();
    assert!(running.next().await.is_some());
    files.put(&authority, "next");
    eventually(SOON, "the new certificate", async || (shown().await == in_file(&authority.cert("next"))).then_some(()))
        .await;
    assert!((reloads("done").await - 1.0).abs() < 0.5 && reloads("failed").await < 0.5);

    // What cannot be used is told, and changes nothing.
    std::fs::write(&files.key, "no key\n").expect("write");
    eventually(SOON, "a complaint", async || (reloads("failed").await > 0.5).then_some(())).await;
    assert_eq!(shown().await, in_file(&authority.cert("next")));
    let page = tandem.metrics().await;
    assert!(page.sum("tandem_config_errors", &[]) > 0.5);
    let ready = Call::get(&base(tandem.http()), "/readyz").send().await;
    assert_eq!(ready.status, 200);
    let logs = tandem.process().logs();
    assert!(logs.contains("tls.key holds no unencrypted private key in PEM form"), "{logs}");

    // And what can be used again is.
    files.put(&authority, "last");
    eventually(SOON, "the last certificate", async || {
        (shown().await == in_file(&authority.cert("last"))).then_some(())
    })
    .await;
    assert!(tandem.metrics().await.sum("tandem_config_errors", &[]) < 0.5);
    let (events, whole) = running.collect().await;
    assert!(whole && events.last().is_some_and(|event| event == "[DONE]"), "{} events", events.len());
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_authority_of_clients_takes_over() {
    let Some((directory, authority)) = authority() else { return };
    let stranger = foreign(directory.path());
    let files = Files::new(directory.path());
    files.put(&authority, "tandem");
    let sandbox = Sandbox::start(options(&files, true)).await;
    let front = base(sandbox.fleet.tandems[0].front().expect("a front"));
    let [known, unknown] =
        [(&authority, "client"), (&stranger, "stranger")].map(|identity| authority.client(Some(identity), "http/1.1"));
    let served = async || {
        let mut served = Vec::new();
        for client in [&known, &unknown] {
            served.push(complete(chat(&front, 1).over(client)).await.is_ok());
        }
        served
    };
    assert_eq!(served().await, [true, false]);
    // The server's own certificate stays; a client that was let in before is not let in by its old session either.
    std::fs::copy(stranger.ca(), &files.ca).expect("copy");
    eventually(SOON, "the other authority", async || (served().await == [false, true]).then_some(())).await;
    assert_eq!(served().await, [false, true]);
    sandbox.close().await;
}
