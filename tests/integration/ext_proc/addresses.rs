//! Which address is dialled: the pod's, in either address family, and never one that a client names.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use serde_json::json;

use super::{CHAT, chat, chat_head, fleet_shows, pods, routed};
use crate::harness::engines::{Sandbox, SandboxOptions, only, start_engine};
use crate::harness::ext_proc::ExtProcClient;
use crate::harness::fleet::FleetOptions;
use crate::harness::http::Call;
use crate::harness::pods::PodManifest;
use crate::harness::raw::RawServer;

#[tokio::test(flavor = "multi_thread")]
async fn r79_pods_with_ipv6_addresses() {
    let local = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
    if std::net::TcpListener::bind(local).is_err() {
        eprintln!("skipped: this machine has no ::1");
        return;
    }
    let sandbox = Sandbox::start(SandboxOptions {
        engine: |config| config.at(IpAddr::V6(Ipv6Addr::LOCALHOST), 0),
        fleet: FleetOptions { replicas: 1, ..FleetOptions::default() },
        ..SandboxOptions::default()
    })
    .await;
    let address = format!("[::1]:{}", sandbox.decode[0].address().port());
    for path in sandbox.paths() {
        sandbox.clear();
        let answer = Call::post(&path, CHAT, chat(false)).send().await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("target-pod-ip"), address);
        assert_eq!(answer.header("prefill-target-pod-ip"), "::1");
        assert_eq!(answer.json().await["usage"]["completion_tokens"], 8);
        only(&sandbox.prefill[0]);
        assert_eq!(only(&sandbox.decode[0]).json()["kv_transfer_params"]["remote_host"], "::1");
    }
    let tandem = &sandbox.fleet.tandems[0];
    let client = ExtProcClient::connect(tandem.grpc()).await;
    let (stream, mutation) = routed(&client, chat_head(), &chat(false)).await;
    assert_eq!(mutation.header("target-pod").as_deref(), Some(address.as_str()));
    stream.reset();
    fleet_shows(tandem, "both pods are scraped", |page| {
        assert!(pods(page).iter().all(|pod| pod["metric_address"].as_str().is_some_and(|at| at.starts_with("[::1]:"))));
        pods(page).iter().all(|pod| pod["signals"]["fresh"] == true && pod["signals"]["kv_usage"].is_number())
    })
    .await;
    sandbox.close().await;
}

/// Headers by which a client might try to choose.
const FORGED: [&str; 10] = [
    "target-pod",
    "Target-Pod",
    "target-pod-ip",
    "prefill-target-pod",
    "prefill-target-pod-ip",
    "x-gateway-destination-endpoint",
    "x-data-parallel-rank",
    "x-override-rid",
    "x-override-target-pod",
    "x-trtllm-disagg-auth",
];

#[tokio::test(flavor = "multi_thread")]
async fn clients_cannot_choose_the_dialled_address() {
    let secret = RawServer::answering("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    let fleet = FleetOptions { replicas: 1, ..FleetOptions::default() };
    let mut sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let plain = start_engine(tandem_sim::EngineConfig::combined("plain")).await;
    // A model without any strategy: its requests end at Envoy's own routes.
    sandbox.fleet.pods.put([PodManifest::new("plain-0", "plain", plain.address())]);
    fleet_shows(&sandbox.fleet.tandems[0], "the second model", |page| page["models"]["plain"].is_object()).await;
    let target = secret.address().to_string();
    let forge = |call: Call| FORGED.iter().fold(call, |call, name| call.header(name, &target));
    let plain_chat = json!({"model": "plain", "messages": [{"role": "user", "content": "x"}]}).to_string();
    for (index, path) in sandbox.paths().into_iter().enumerate() {
        let through_envoy = index == 0;
        for strategy in [None, Some("pd"), Some("least-request")] {
            let with =
                |call: Call| strategy.iter().fold(forge(call), |call, name| call.header("routing-strategy", name));
            sandbox.clear();
            let answer = with(Call::post(&path, CHAT, chat(true))).send().await;
            assert_eq!(answer.status, 200, "{strategy:?}");
            let (chosen, events) = (answer.header("target-pod-ip").to_owned(), answer.events().collect().await);
            assert!(events.1);
            let served = sandbox.engines().find(|engine| engine.address().to_string() == chosen);
            assert_eq!(served.expect("one of ours").records().len(), 1);
            for record in sandbox.engines().flat_map(tandem_sim::Engine::records) {
                // `target-pod` itself is how Envoy is told; then it holds the pod's own address.
                let leaked = record.headers.iter().find(|(_, value)| value.contains(&target));
                assert_eq!(leaked, None);
                let foreign = record.headers.iter().find(|(name, _)| FORGED[1..].contains(&name.as_str()));
                assert_eq!(foreign, None);
            }
            // Refusals, requests without a body, and the list of models.
            // Through Envoy, those without a body end at its last route.
            for (call, status) in [
                (Call::get(&path, CHAT), if through_envoy { 404 } else { 405 }),
                (Call::get(&path, "/"), if through_envoy { 404 } else { 501 }),
                (Call::get(&path, "/admin"), if through_envoy { 404 } else { 501 }),
                (Call::post(&path, CHAT, ""), 400),
                (Call::post(&path, "/v1/nothing", chat(true)), 501),
                (Call::get(&path, "/v1/models"), 200),
            ] {
                assert_eq!(with(call).send().await.status, status, "{strategy:?}");
            }
        }
        let answer = forge(Call::post(&path, CHAT, plain_chat.clone())).send().await;
        assert_eq!(answer.status, if through_envoy { 404 } else { 200 });
    }
    assert!(secret.connections().is_empty(), "the forged address was dialled");
    sandbox.close().await;
}
