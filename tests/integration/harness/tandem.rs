//! The real gateway binary as a child process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::http::{Call, base};
use super::metrics::Metrics;
use super::oracle;
use super::process::{Process, Start};
use super::{Task, eventually};

/// The gateway's start on a busy machine, in a debug build.
const STARTUP: Duration = Duration::from_secs(30);

/// How often the background watch looks at the gauges.
const WATCH_PERIOD: Duration = Duration::from_millis(100);

/// How to start a replica.
#[derive(Clone, Debug, Default)]
pub struct TandemOptions {
    /// `--pods`: a file or a directory; empty when the arguments say where pods come from.
    pub pods: PathBuf,
    /// Environment variables; nothing is inherited.
    pub env: Vec<(String, String)>,
    /// Open the direct HTTP front as well.
    pub front: bool,
    /// Further arguments.
    pub args: Vec<String>,
}

/// A running replica; dropping it kills it.
#[derive(Debug)]
pub struct Tandem {
    process: Process,
    grpc: SocketAddr,
    http: SocketAddr,
    front: Option<SocketAddr>,
    negative: Arc<Mutex<Vec<String>>>,
    _watch: Task,
}

impl Tandem {
    /// Starts a replica and waits until it listens. It need not be ready yet: see [`Tandem::wait_ready`].
    pub async fn start(options: TandemOptions) -> Tandem {
        Tandem::try_start(options).await.unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// The same for replicas that are expected not to start; the error holds the end of the logs.
    pub async fn try_start(options: TandemOptions) -> Result<Tandem, String> {
        let mut start = Start::new("tandem", env!("CARGO_BIN_EXE_tandem"));
        start.args(["serve", "--http-bind-address", "127.0.0.1:0"]);
        // A replica that replaces another one takes its port.
        if !options.args.iter().any(|argument| argument == "--grpc-bind-address") {
            start.args(["--grpc-bind-address", "127.0.0.1:0"]);
        }
        if options.front {
            start.args(["--front-bind-address", "127.0.0.1:0"]);
        }
        if !options.pods.as_os_str().is_empty() {
            start.arg("--pods").arg(&options.pods);
        }
        start.args(&options.args);
        for (name, value) in &options.env {
            start.env(name, value);
        }
        let process = start.spawn();
        let listening = eventually(STARTUP, "tandem listens", async || {
            // Look at the status first: what was printed before the end is then in the file.
            let ended = process.status();
            match (listening(&process.stdout()), ended) {
                (_, Some(status)) => Some(Err(format!("tandem ended with {status}\n{}", process.logs()))),
                (Some(addresses), None) => Some(Ok(addresses)),
                (None, None) => None,
            }
        });
        let (grpc, http, front) = listening.await?;
        assert_eq!(front.is_some(), options.front, "the front listens when it was asked for");
        let negative = Arc::new(Mutex::new(Vec::new()));
        let watch = Task::spawn(watch_gauges(http, Arc::clone(&negative)));
        Ok(Tandem { process, grpc, http, front, negative, _watch: watch })
    }

    /// The ext_proc port.
    pub fn grpc(&self) -> SocketAddr {
        self.grpc
    }

    /// The admin port.
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// The HTTP front's port.
    pub fn front(&self) -> Option<SocketAddr> {
        self.front
    }

    /// The process, for its logs.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Scrapes `/metrics`.
    pub async fn metrics(&self) -> Metrics {
        let answer = Call::get(&base(self.http), "/metrics").send().await;
        assert_eq!(answer.status, 200, "/metrics");
        let page = answer.body().await.bytes;
        Metrics::parse(&String::from_utf8_lossy(&page)).unwrap_or_else(|line| panic!("not a metrics line: {line}"))
    }

    /// Waits until `/metrics` satisfies `condition`.
    pub async fn wait_metrics(&self, limit: Duration, what: &str, condition: impl Fn(&Metrics) -> bool) -> Metrics {
        eventually(limit, what, async || Some(self.metrics().await).filter(|metrics| condition(metrics))).await
    }

    /// The status of `/readyz`; `None` when the port does not answer.
    pub async fn readiness(&self) -> Option<u16> {
        let answer = Call::get(&base(self.http), "/readyz").try_send().await.ok()?;
        Some(answer.status.as_u16())
    }

    /// Waits until `/readyz` answers 200.
    pub async fn wait_ready(&self) {
        eventually(STARTUP, "tandem is ready", async || (self.readiness().await? == 200).then_some(())).await;
    }

    /// A page of the admin port as JSON.
    pub async fn admin_json(&self, path: &str) -> serde_json::Value {
        Call::get(&base(self.http), path).send().await.json().await
    }

    /// Asks it to stop.
    pub fn sigterm(&self) {
        self.process.signal("TERM");
    }

    /// Kills it.
    pub fn kill9(&self) {
        self.process.kill();
    }

    /// Freezes it.
    pub fn stop(&self) {
        self.process.signal("STOP");
    }

    /// Thaws it.
    pub fn cont(&self) {
        self.process.signal("CONT");
    }

    /// Waits for its end.
    pub async fn exited(&self, limit: Duration) -> ExitStatus {
        self.process.exited(limit).await
    }

    /// Gauges that were seen below zero since the start, as text.
    pub fn negative_gauges(&self) -> Vec<String> {
        self.negative.lock().expect("negative gauges").clone()
    }
}

type Addresses = (SocketAddr, SocketAddr, Option<SocketAddr>);

/// Finds the line of the event `listening`.
fn listening(stdout: &str) -> Option<Addresses> {
    // Only whole lines: the last one may still be being written.
    let complete = stdout.rsplit_once('\n')?.0;
    let mut lines = complete.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let line = lines.find(|line| line["event"] == "listening")?;
    let address = |field: &str| line[field].as_str()?.parse().ok();
    Some((address("grpc")?, address("http")?, address("front")))
}

async fn watch_gauges(http: SocketAddr, negative: Arc<Mutex<Vec<String>>>) {
    loop {
        tokio::time::sleep(WATCH_PERIOD).await;
        // A replica that is frozen or gone has nothing to say.
        let Ok(answer) = Call::get(&base(http), "/metrics").try_send().await else { continue };
        let body = answer.body().await;
        if let (true, Ok(metrics)) = (body.complete, Metrics::parse(&String::from_utf8_lossy(&body.bytes))) {
            negative.lock().expect("negative gauges").extend(oracle::below_zero(&metrics));
        }
    }
}

#[test]
fn the_listening_line_is_found_among_others_and_only_when_complete() {
    let line = r#"{"event":"listening","grpc":"127.0.0.1:1","http":"127.0.0.1:2","front":null}"#;
    assert_eq!(listening(line), None);
    let expected = ("127.0.0.1:1".parse().unwrap(), "127.0.0.1:2".parse().unwrap(), None);
    assert_eq!(listening(&format!("noise\n{{}}\n{line}\nmore")), Some(expected));
    let with_front = line.replace("null", "\"127.0.0.1:3\"") + "\n";
    assert_eq!(listening(&with_front).unwrap().2, Some("127.0.0.1:3".parse().unwrap()));
}
