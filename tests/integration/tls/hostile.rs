//! Clients that connect and say nothing.

use tokio::net::TcpStream;

use super::{authority, chat, complete, variables};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::base;
use crate::harness::{SOON, within};

#[tokio::test(flavor = "multi_thread")]
async fn silent_clients_keep_nobody_out() {
    const SILENT: usize = 200;
    let Some((_directory, authority)) = authority() else { return };
    let env = variables("FRONT", &authority.cert("tandem"), &authority.key("tandem"), None);
    let fleet = FleetOptions { replicas: 1, envoy: false, env, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let tandem = &sandbox.fleet.tandems[0];
    let front = tandem.front().expect("a front");
    let client = authority.client(None, "http/1.1");
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(TcpStream::connect(front).await.expect("connect"));
    }
    for _ in 0..5 {
        let served = within("an answer", complete(chat(&base(front), 2).over(&client))).await;
        assert_eq!(served, Ok(()));
    }
    // They are cut off one after the other, and counted.
    tandem
        .wait_metrics(SOON, "all are cut off", |metrics| {
            let labels = [("listener", "front"), ("reason", "timeout")];
            metrics.sum("tandem_tls_handshake_failures_total", &labels) >= SILENT as f64
        })
        .await;
    drop(silent);
    sandbox.close().await;
}
