//! `tandem serve`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::app::{Gateway, Options, Source};
use crate::knobs::{Knobs, ProcessEnvironment};
use crate::panics;
use crate::telemetry::{Tracing, init_logging};

/// How long the last spans may take to leave.
const LAST_SPANS: Duration = Duration::from_secs(5);

/// Flags of the reference gateway, plus `--pods`, `--kubeconfig` and `--front-bind-address`. All else is configured by environment
/// variables (docs/configuration.md).
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Address of the ext_proc gRPC server.
    #[arg(long, default_value = ":50052")]
    grpc_bind_address: String,
    /// Address of the admin HTTP server: /metrics, /healthz, /readyz, /v1/models, /debug/fleet.
    #[arg(long, alias = "metrics-bind-address", default_value = ":8080")]
    http_bind_address: String,
    /// Address of the OpenAI HTTP front, which needs no Envoy. Off unless given.
    #[arg(long)]
    front_bind_address: Option<String>,
    /// A file or directory of Kubernetes Pod manifests (YAML or JSON), watched for changes.
    #[arg(long, value_name = "FILE-or-DIR")]
    pods: Option<PathBuf>,
    /// Take pods from --endpoints-config.
    #[arg(long, requires = "endpoints_config")]
    standalone: bool,
    /// Find pods through the Kubernetes API of this file's cluster. Without it, --pods and --standalone: through that of
    /// `KUBECONFIG`, of `~/.kube/config`, or of the cluster that this process runs in.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pods", "standalone"])]
    kubeconfig: Option<PathBuf>,
    /// Endpoints file of the standalone mode.
    #[arg(long, value_name = "FILE", requires = "standalone")]
    endpoints_config: Option<PathBuf>,
}

impl ServeArgs {
    fn source(&self) -> Result<Source> {
        match (&self.pods, &self.endpoints_config) {
            (Some(_), Some(_)) => bail!("--pods and --standalone exclude each other"),
            (Some(pods), None) => Ok(Source::Pods(pods.clone())),
            (None, Some(file)) => Ok(Source::Standalone(file.clone())),
            (None, None) => Ok(Source::Kubernetes(self.kubeconfig.clone())),
        }
    }
}

/// Serves until SIGTERM or SIGINT, then drains. A second signal ends at once.
pub async fn run(args: ServeArgs) -> Result<()> {
    let source = args.source()?;
    let (knobs, report) = Knobs::read(&ProcessEnvironment)?;
    let tracing = Tracing::start(&knobs.otel)?;
    init_logging(&knobs.log, tracing.as_ref())?;
    report.log();
    let options =
        Options { grpc: args.grpc_bind_address, http: args.http_bind_address, front: args.front_bind_address, source };
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let gateway = Gateway::start(options, knobs, report, tracing.as_ref()).await?;
    let addresses = gateway.addresses();
    // One machine-readable line: with port 0, how else would a caller learn the ports?
    println!(
        "{}",
        serde_json::json!({
            "event": "listening",
            "grpc": addresses.grpc.to_string(),
            "http": addresses.http.to_string(),
            "front": addresses.front.map(|address| address.to_string()),
        })
    );
    let fatal = CancellationToken::new();
    panics::watch(Arc::clone(&gateway.world().metrics), fatal.clone());
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = fatal.cancelled() => {}
    }
    tokio::select! {
        () = gateway.drain() => {}
        _ = terminate.recv() => tracing::warn!("second signal: stopping at once"),
        _ = interrupt.recv() => tracing::warn!("second signal: stopping at once"),
    }
    if let Some(tracing) = tracing {
        tracing.shutdown(LAST_SPANS).await?;
    }
    if fatal.is_cancelled() {
        bail!("a background task panicked");
    }
    Ok(())
}
