//! Envoy with the section of its README that puts TLS between it and the replicas.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use super::{at_a_speaking_pace, chat, complete, foreign, variables};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::envoy::{Envoy, EnvoyOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::Call;
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::tls::{Authority, presented};
use crate::harness::{SOON, eventually, within};

/// The certificates of all tests here: a change to Envoy's file is a function without memory.
static SHARED: OnceLock<Option<Authority>> = OnceLock::new();

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("envoy-tls")
}

fn shared() -> Option<&'static Authority> {
    let make = || {
        let authority = Authority::new(&directory())?;
        Some(authority.issue("tandem", "tandem").issue("envoy", "envoy").issue("other", "other"))
    };
    SHARED.get_or_init(make).as_ref()
}

/// The snippet of the README, with its files replaced by those of the tests.
fn snippet() -> Value {
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/envoy/README.md");
    let text = std::fs::read_to_string(readme).expect("read the README");
    let section = text.split_once("\n## TLS").expect("a section").1;
    let yaml = section.split_once("```yaml\n").expect("a snippet").1.split_once("```").expect("its end").0;
    let authority = shared().expect("made before");
    let mut yaml = yaml.to_owned();
    for (in_the_readme, here) in [
        ("/etc/envoy/tls/ca.crt", authority.ca()),
        ("/etc/envoy/tls/tls.crt", authority.cert("envoy")),
        ("/etc/envoy/tls/tls.key", authority.key("envoy")),
    ] {
        assert!(yaml.contains(in_the_readme), "{in_the_readme}");
        yaml = yaml.replace(in_the_readme, &here.display().to_string());
    }
    serde_saphyr::from_str(&yaml).expect("parse the snippet")
}

fn over_tls(config: &mut Value) {
    let clusters = config["static_resources"]["clusters"].as_array_mut().expect("clusters");
    let tandem = clusters.iter_mut().find(|cluster| cluster["name"] == "tandem").expect("the cluster");
    tandem["transport_socket"] = snippet()["transport_socket"].take();
}

fn fleet(authority: &Authority, replicas: usize) -> FleetOptions {
    let env = variables("GRPC", &authority.cert("tandem"), &authority.key("tandem"), Some(&authority.ca()));
    FleetOptions { replicas, edit_envoy: Some(over_tls), env, ..FleetOptions::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_and_replicas_know_one_another() {
    let Some(authority) = shared() else { return };
    let options = SandboxOptions { fleet: fleet(authority, 2), ..SandboxOptions::default() };
    let sandbox = Sandbox::start(options).await;
    let envoy = sandbox.fleet.envoy.as_ref().expect("envoy").base();
    for _ in 0..6 {
        assert_eq!(complete(chat(&envoy, 4)).await, Ok(()));
    }
    // Both legs, over both replicas.
    assert_eq!((sandbox.prefill[0].records().len(), sandbox.decode[0].records().len()), (6, 6));
    let tandem = &sandbox.fleet.tandems[0];
    let failures = |reason: &'static str| async move {
        let labels = [("listener", "grpc"), ("reason", reason)];
        tandem.metrics().await.sum("tandem_tls_handshake_failures_total", &labels)
    };
    assert!(failures("client_certificate").await < 1.0);

    // Nobody else gets in: neither in the clear, nor without a certificate, nor with another authority's.
    let stranger = foreign(&directory());
    let clients = [None, Some((&stranger, "stranger"))].map(|identity| authority.client(identity, "h2"));
    for (index, client) in clients.iter().enumerate() {
        // The client's part is over before the server has seen its certificate; the failure is the server's to tell.
        let _ = presented(tandem.grpc(), client).await;
        eventually(SOON, "a refusal", async || (failures("client_certificate").await > index as f64).then_some(()))
            .await;
    }
    let plain = Call::get(&crate::harness::http::base(tandem.grpc()), "/").try_send().await;
    assert!(plain.is_err());
    assert!(failures("protocol").await > 0.0);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_refuses_a_replica_with_another_name() {
    let Some(authority) = shared() else { return };
    let options =
        SandboxOptions { fleet: FleetOptions { envoy: false, ..fleet(authority, 1) }, ..SandboxOptions::default() };
    let mut sandbox = Sandbox::start(options).await;
    // The same authority, but not the name that the snippet asks for.
    let tandem = Tandem::start(TandemOptions {
        pods: sandbox.fleet.pods.path(),
        env: variables("GRPC", &authority.cert("other"), &authority.key("other"), Some(&authority.ca())),
        front: true,
        args: Vec::new(),
    })
    .await;
    tandem.wait_ready().await;
    let envoy = Envoy::start_with(EnvoyOptions {
        tandem_grpc: vec![tandem.grpc()],
        tandem_http: tandem.http(),
        healthy: Some(0),
        otel: None,
        failover: None,
        edit: Some(over_tls),
    })
    .await;
    tandem
        .wait_metrics(SOON, "Envoy's refusal", |metrics| {
            metrics.sum("tandem_tls_handshake_failures_total", &[("listener", "grpc"), ("reason", "refused")]) > 0.0
        })
        .await;
    let answer = chat(&envoy.base(), 4).send().await;
    assert_eq!(answer.status, 503);
    assert_eq!(envoy.healthy_replicas().await, 0);
    assert_eq!(sandbox.prefill[0].records().len(), 0);
    drop(envoy);
    sandbox.fleet.tandems.push(tandem);
    sandbox.close().await;
}

/// As in the clear: readiness first, then GOAWAY, and running streams may end.
#[tokio::test(flavor = "multi_thread")]
async fn r91_a_replica_behind_tls_leaves_without_a_failed_request() {
    let Some(authority) = shared() else { return };
    let options =
        SandboxOptions { engine: at_a_speaking_pace, fleet: fleet(authority, 2), ..SandboxOptions::default() };
    let sandbox = Sandbox::start(options).await;
    let envoy = sandbox.fleet.envoy.as_ref().expect("envoy").base();
    let load = tokio::spawn(async move {
        let mut beat = tokio::time::interval(Duration::from_millis(100));
        let mut requests = tokio::task::JoinSet::new();
        // For longer than the replica takes to leave: 5 s of propagation, and its last answers.
        for _ in 0..100 {
            beat.tick().await;
            requests.spawn(complete(chat(&envoy, 6)));
        }
        requests.join_all().await
    });
    let leaving = &sandbox.fleet.tandems[0];
    leaving
        .wait_metrics(SOON, "streams on the replica", |metrics| metrics.sum("gateway_in_flight_requests", &[]) >= 2.0)
        .await;
    leaving.sigterm();
    assert!(leaving.exited(SOON).await.success());
    let results = within("the last answers", load).await.expect("the load");
    let failed: Vec<_> = results.iter().filter(|result| result.is_err()).collect();
    assert!(failed.is_empty(), "{} of {}: {failed:?}", failed.len(), results.len());
    let engines: Vec<_> = sandbox.engines().map(|engine| engine as &dyn crate::harness::engines::Backend).collect();
    crate::harness::oracle::oracle(&sandbox.fleet.tandems[1..], &engines).await;
}
