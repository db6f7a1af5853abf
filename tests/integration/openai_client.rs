//! The official OpenAI client against the gateway. The script beside this file does the talking.

use std::time::Duration;

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::pods::PodManifest;
use crate::harness::process::{Start, tool};
use crate::harness::{SOON, eventually};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/openai_client.py");
const TOKEN: &str = "sk-of-this-test";

/// The script starts an interpreter and makes some twenty calls.
const PATIENCE: Duration = Duration::from_mins(2);

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_client_works_and_raises_the_right_errors() {
    let mut options = SandboxOptions::default();
    options.fleet.env.push(("AIBRIX_AUTH_BEARER_TOKEN".to_owned(), TOKEN.to_owned()));
    let mut sandbox = Sandbox::start(options).await;
    let unready = PodManifest::new("unready-0", "unready", sandbox.decode[0].address()).ready(false);
    sandbox.fleet.pods.put([unready]);
    for tandem in &sandbox.fleet.tandems {
        eventually(SOON, "the new pod is seen", async || {
            tandem.admin_json("/debug/fleet").await.to_string().contains("unready-0").then_some(())
        })
        .await;
    }
    for path in sandbox.paths() {
        let mut start = Start::new("openai-client", tool("TANDEM_TEST_PYTHON", "python"));
        start.arg(SCRIPT).args([path.as_str(), TOKEN, "unready"]);
        let process = start.spawn();
        let status = process.exited(PATIENCE).await;
        assert!(status.success(), "{path}: {}", process.logs());
        assert!(process.stdout().contains("all is well"));
    }
    for tandem in &sandbox.fleet.tandems {
        let logs = tandem.process().stdout() + &tandem.process().stderr();
        assert!(!logs.contains(TOKEN), "the key is in the log");
    }
    sandbox.close().await;
}
