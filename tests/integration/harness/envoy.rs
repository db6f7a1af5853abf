//! A real Envoy that runs the shipped file, with nothing but socket addresses replaced.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::eventually;
use super::http::{Call, base};
use super::process::{Process, Start, tool};

/// The file that users deploy.
pub const SHIPPED_FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/envoy/envoy.yaml");

/// The same with fail-over to other decode pods.
pub const FAILOVER_FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/envoy/envoy-failover.yaml");

/// Envoy's start on a busy machine.
const STARTUP: Duration = Duration::from_mins(1);

/// What stands behind Envoy.
#[derive(Clone, Debug)]
pub struct EnvoyOptions {
    /// ext_proc ports of the replicas.
    pub tandem_grpc: Vec<SocketAddr>,
    /// HTTP port of one replica.
    pub tandem_http: SocketAddr,
    /// Replicas that must have passed a health check before `start` returns; all of them by default.
    pub healthy: Option<usize>,
    /// An OTLP collector (gRPC): switches the file's tracing section on.
    pub otel: Option<SocketAddr>,
    /// Use the file with fail-over; these are the endpoints of its cluster of pods.
    pub failover: Option<Vec<SocketAddr>>,
    /// Further changes, for tests of timers that would take too long at their shipped values.
    pub edit: Option<fn(&mut Value)>,
}

/// A running Envoy; dropping it kills it.
#[derive(Debug)]
pub struct Envoy {
    process: Process,
    admin: SocketAddr,
    listener: SocketAddr,
}

impl Envoy {
    /// Starts it before these replicas and waits until it serves and sees them all healthy.
    pub async fn start(tandem_grpc: &[SocketAddr], tandem_http: SocketAddr) -> Envoy {
        let tandem_grpc = tandem_grpc.to_vec();
        Envoy::start_with(EnvoyOptions {
            failover: None,
            tandem_grpc,
            tandem_http,
            healthy: None,
            otel: None,
            edit: None,
        })
        .await
    }

    /// Starts it with options.
    pub async fn start_with(options: EnvoyOptions) -> Envoy {
        let mut start = Start::new("envoy", tool("TANDEM_TEST_ENVOY", "envoy"));
        let config = start.directory().join("envoy.json");
        std::fs::write(&config, shipped_config(&options).to_string()).expect("write the configuration");
        let admin_file = start.directory().join("admin-address");
        start.arg("-c").arg(&config).arg("--admin-address-path").arg(&admin_file);
        // Tests run side by side: no shared memory segment in common, and two workers, as on a small machine.
        start.args(["--use-dynamic-base-id", "--concurrency", "2"]);
        // The access log is read by tests; by default it is written every ten seconds.
        start.args(["--file-flush-interval-msec", "20"]);
        let process = start.spawn();

        let wanted = options.healthy.unwrap_or(options.tandem_grpc.len());
        let (admin, listener) = started(&process, &admin_file).await;
        let envoy = Envoy { process, admin, listener };
        eventually(STARTUP, "the replicas are healthy", async || {
            (envoy.healthy_replicas().await >= wanted).then_some(())
        })
        .await;
        envoy
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.listener
    }

    /// The same as a URL.
    pub fn base(&self) -> String {
        base(self.listener)
    }

    /// The admin interface.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// The process, for its logs and signals.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// How many replicas Envoy would send a request to.
    pub async fn healthy_replicas(&self) -> usize {
        let clusters = admin_json(self.admin, "/clusters?format=json").await.unwrap_or_default();
        let statuses = clusters["cluster_statuses"].as_array().cloned().unwrap_or_default();
        let tandem = statuses.into_iter().find(|cluster| cluster["name"] == "tandem").unwrap_or_default();
        let hosts = tandem["host_statuses"].as_array().cloned().unwrap_or_default();
        let healthy = |host: &&Value| {
            let status = &host["health_status"];
            let bad = ["failed_active_health_check", "failed_outlier_check", "pending_active_hc"];
            status["eds_health_status"] == "HEALTHY" && bad.iter().all(|flag| status[flag] != true)
        };
        hosts.iter().filter(healthy).count()
    }

    /// A counter or gauge of Envoy; `None` when it does not exist.
    pub async fn stat(&self, name: &str) -> Option<u64> {
        let answer = Call::get(&base(self.admin), "/stats").send().await.body().await;
        let text = String::from_utf8_lossy(&answer.bytes).into_owned();
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")?.parse().ok())
    }

    /// The access log so far.
    pub fn access_log(&self) -> Vec<Value> {
        self.process.stdout().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

/// Waits until the process serves; the addresses of its admin interface and of its listener.
async fn started(process: &Process, admin_file: &Path) -> (SocketAddr, SocketAddr) {
    eventually(STARTUP, "envoy serves", async || {
        if let Some(status) = process.status() {
            panic!("envoy ended with {status}\n{}", process.logs());
        }
        let admin: SocketAddr = std::fs::read_to_string(admin_file).ok()?.trim().parse().ok()?;
        let ready = Call::get(&base(admin), "/ready").try_send().await.ok()?;
        if ready.status != 200 {
            return None;
        }
        let listeners = admin_json(admin, "/listeners?format=json").await?;
        let socket = &listeners["listener_statuses"][0]["local_address"]["socket_address"];
        let listener = format!("{}:{}", socket["address"].as_str()?, socket["port_value"].as_u64()?);
        Some((admin, listener.parse().ok()?))
    })
    .await
}

async fn admin_json(admin: SocketAddr, path: &str) -> Option<Value> {
    let answer = Call::get(&base(admin), path).try_send().await.ok()?;
    serde_json::from_slice(&answer.body().await.bytes).ok()
}

/// The text of a shipped file, with its tracing section switched on if asked for.
pub fn shipped_text(file: &str, tracing: bool) -> String {
    let text = std::fs::read_to_string(file).expect("read the shipped file");
    if tracing { text.replace("#otel# ", "") } else { text }
}

/// The shipped configuration with the addresses of a test.
pub fn shipped_config(options: &EnvoyOptions) -> Value {
    let file = if options.failover.is_some() { FAILOVER_FILE } else { SHIPPED_FILE };
    let mut config: Value =
        serde_saphyr::from_str(&shipped_text(file, options.otel.is_some())).expect("parse the YAML");
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    set_address(&mut config["admin"]["address"], any_port);
    for listener in config["static_resources"]["listeners"].as_array_mut().expect("listeners") {
        set_address(&mut listener["address"], any_port);
    }
    for cluster in config["static_resources"]["clusters"].as_array_mut().expect("clusters") {
        let addresses = match cluster["name"].as_str() {
            Some("tandem") => options.tandem_grpc.clone(),
            Some("tandem_http") => vec![options.tandem_http],
            Some("model_pods") => options.failover.clone().unwrap_or_default(),
            Some("otel_collector") => options.otel.into_iter().collect(),
            _ => continue,
        };
        let endpoints = &mut cluster["load_assignment"]["endpoints"][0]["lb_endpoints"];
        let template = endpoints[0].clone();
        *endpoints = addresses
            .into_iter()
            .map(|address| {
                let mut endpoint = template.clone();
                set_address(&mut endpoint["endpoint"]["address"], address);
                endpoint
            })
            .collect();
    }
    if let Some(edit) = options.edit {
        edit(&mut config);
    }
    config
}

fn set_address(address: &mut Value, to: SocketAddr) {
    assert!(address["socket_address"].is_object(), "no socket address to replace in {address}");
    address["socket_address"] = json!({"address": to.ip().to_string(), "port_value": to.port()});
}

/// `envoy --mode validate` on a file: whether it is accepted, and what was printed.
pub fn validate(file: &Path) -> (bool, String) {
    let output = std::process::Command::new(tool("TANDEM_TEST_ENVOY", "envoy"))
        .args(["--mode", "validate", "--use-dynamic-base-id", "-c"])
        .arg(file)
        .output()
        .expect("run envoy");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}
