//! The servers of one engine: started and stopped by its script, or already running.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::{Call, base};
use crate::harness::metrics::Metrics;
use crate::harness::pods::PodManifest;

/// The name under which all servers serve the tiny model.
pub const MODEL: &str = "tiny";

/// What the script says of one server.
#[derive(Clone, Debug, Deserialize)]
pub struct Server {
    pub address: SocketAddr,
    /// The process, which leads a process group of its own.
    pub process: u32,
    pub log: PathBuf,
    /// Where decode servers ask for the KV of a prefill server, for engines that have such a port.
    pub bootstrap_port: Option<u16>,
}

/// A prefill and a decode server that can hand KV over, and a plain one.
#[derive(Debug, Deserialize)]
pub struct Servers {
    pub prefill: Server,
    pub decode: Server,
    pub plain: Server,
    /// The script that has to stop them.
    #[serde(skip)]
    script: Option<PathBuf>,
}

impl Servers {
    /// Starts the servers of `engine` with these variables, or takes those that `TANDEM_REAL_<ENGINE>_ADDRESSES` names
    /// (what the script's `start` printed): that saves minutes while a scenario is being written.
    pub async fn start(engine: &str, env: &[(&str, &str)]) -> Servers {
        let running = format!("TANDEM_REAL_{}_ADDRESSES", engine.to_uppercase());
        if let Ok(addresses) = std::env::var(running) {
            return serde_json::from_str(&addresses).expect("what the script's start printed");
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real").join(format!("{engine}.sh"));
        let mut command = Command::new(&script);
        command.arg("start").envs(env.iter().copied()).stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = tokio::task::spawn_blocking(move || command.output()).await.expect("the script's task");
        let output = output.expect("run the script");
        if !output.status.success() {
            stop(&script);
            panic!("{} start: {}", script.display(), output.status);
        }
        let mut servers: Servers = serde_json::from_slice(&output.stdout).expect("addresses as JSON");
        servers.script = Some(script);
        servers
    }

    /// Tandem before the pair, with the pods reached at these addresses (those of relays, where a scenario has some).
    /// Metrics are scraped past the relays.
    pub async fn fleet(
        &self,
        prefill: SocketAddr,
        decode: SocketAddr,
        change: impl Fn(PodManifest) -> PodManifest,
        options: FleetOptions,
    ) -> Fleet {
        let pod = |name: &str, address: SocketAddr, server: &Server| {
            let config = crate::harness::engines::pd_by_default();
            let metric_port = server.address.port().to_string();
            let pod = PodManifest::new(name, MODEL, address).role("rs0", name).config(&config);
            change(pod.label("model.aibrix.ai/metric-port", &metric_port))
        };
        Fleet::start([pod("prefill", prefill, &self.prefill), pod("decode", decode, &self.decode)], options).await
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        if let Some(script) = &self.script {
            stop(script);
        }
    }
}

fn stop(script: &Path) {
    let status = Command::new(script).arg("stop").status();
    if !status.as_ref().is_ok_and(std::process::ExitStatus::success) {
        eprintln!("{} stop: {status:?}", script.display());
    }
}

impl Server {
    /// `http://` and the address.
    pub fn base(&self) -> String {
        base(self.address)
    }

    /// Scrapes `/metrics`.
    pub async fn metrics(&self) -> Metrics {
        let page = Call::get(&self.base(), "/metrics").send().await.body().await.bytes;
        Metrics::parse(&String::from_utf8_lossy(&page)).unwrap_or_else(|line| panic!("not a metrics line: {line}"))
    }

    /// Asserts that it says it is healthy.
    pub async fn assert_healthy(&self) {
        assert_eq!(Call::get(&self.base(), "/health").send().await.status, 200, "{}", self.log.display());
    }

    /// Kills it with all its children, as a machine that fails does.
    pub fn kill9(&self) {
        // The number comes from the script that started the group.
        let status = Command::new("kill").args(["-KILL", "--", &format!("-{}", self.process)]).status();
        assert!(status.expect("run kill").success(), "kill process group {}", self.process);
    }
}
