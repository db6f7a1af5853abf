//! An engine as a program.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::config::{
    Capacity, Connector, Dialect, EngineConfig, KvLoadFailure, MetricNames, OnViolation, Role, StreamHead,
};
use crate::engine::start;
use crate::timing::Timing;

const POD: &str = r#"The engine's first line of output says where it listens:
  {"event":"listening","address":"127.0.0.1:8000",...}

A Pod manifest for it, for a gateway that reads pods from a file:

  apiVersion: v1
  kind: Pod
  metadata:
    name: decode-0
    namespace: default
    labels:
      model.aibrix.ai/name: sim
      model.aibrix.ai/engine: vllm
      model.aibrix.ai/port: "8000"
      roleset-name: roleset-0
      role-name: decode
  status:
    podIP: 127.0.0.1

A disaggregated pair is two of them. For SGLang the prefill pod also carries the annotation
model.aibrix.ai/sglang-bootstrap-port with the "bootstrap_port" of its first line; the label engine is sglang or trtllm.

Control: GET /sim/records, /sim/stats, /sim/violations; POST /sim/faults, /sim/hold, /sim/release, /sim/kill."#;

/// Options of the simulated engine.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = POD)]
pub struct SimArgs {
    /// Engine whose protocol is spoken
    #[arg(long, value_enum, default_value = "vllm")]
    pub engine: Dialect,
    /// Part in disaggregated serving
    #[arg(long, value_enum, default_value = "combined")]
    pub role: Role,
    /// Served model name
    #[arg(long, default_value = "sim")]
    pub model: String,
    /// Further names for the model
    #[arg(long = "alias")]
    pub aliases: Vec<String>,
    /// Address to bind
    #[arg(long, default_value = "127.0.0.1")]
    pub bind: IpAddr,
    /// Port; 0 takes a free one
    #[arg(long, default_value_t = 0)]
    pub port: u16,
    /// How many times faster than the time model
    #[arg(long, default_value_t = 1.0)]
    pub speed: f64,
    /// Take no time at all
    #[arg(long, conflicts_with = "speed")]
    pub instant: bool,
    /// Prefill speed, tokens per second
    #[arg(long, default_value_t = Timing::typical().prefill_tokens_per_second)]
    pub prefill_tokens_per_second: f64,
    /// Milliseconds of a decode step with one running sequence
    #[arg(long, default_value_t = 12.0)]
    pub decode_ms: f64,
    /// Milliseconds that each further running sequence adds to a decode step
    #[arg(long, default_value_t = 0.15)]
    pub decode_ms_per_sequence: f64,
    /// Milliseconds of KV transfer per 1,000 tokens
    #[arg(long, default_value_t = 6.0)]
    pub transfer_ms_per_1k: f64,
    /// KV cache size, tokens
    #[arg(long, default_value_t = 400_000)]
    pub kv_tokens: u64,
    /// Longest prompt plus output, tokens
    #[arg(long, default_value_t = 131_072)]
    pub max_model_len: u32,
    /// Most sequences admitted at once
    #[arg(long, default_value_t = 256)]
    pub max_running: usize,
    /// Seconds that unread blocks stay pinned [default: 30; Mooncake 480, TensorRT-LLM 60]
    #[arg(long)]
    pub lease_seconds: Option<f64>,
    /// Seconds after which idle connections are closed
    #[arg(long, default_value_t = 5.0)]
    pub keep_alive_seconds: f64,
    /// Mean length after which the model stops by itself
    #[arg(long)]
    pub natural_stop: Option<u32>,
    /// Accept what the real engine would refuse
    #[arg(long)]
    pub lenient: bool,
    /// What breaking the hand-off protocol leads to
    #[arg(long, value_enum, default_value = "reject")]
    pub on_violation: OnViolation,
    /// vLLM: how KV is handed over
    #[arg(long, value_enum, default_value = "nixl")]
    pub connector: Connector,
    /// Port of a prefill engine's KV side channel; 0 takes a free one [default: 8998 for SGLang and Mooncake, else free]
    #[arg(long)]
    pub bootstrap_port: Option<u16>,
    /// Seconds that one leg waits for the other where both run at once
    #[arg(long, default_value_t = 300.0)]
    pub meeting_seconds: f64,
    /// Seconds that a generation survives its client [default: 4 for SGLang, 1 for TensorRT-LLM, 0 for vLLM]
    #[arg(long)]
    pub disconnect_lag_seconds: Option<f64>,
    /// SGLang: data-parallel ranks
    #[arg(long, default_value_t = 1)]
    pub dp_size: u32,
    /// SGLang: when streams send their head
    #[arg(long, value_enum, default_value = "at-once")]
    pub stream_head: StreamHead,
    /// TensorRT-LLM: `/server_info` names no endpoint
    #[arg(long)]
    pub cpp_transceiver: bool,
    /// What a failed KV transfer leads to
    #[arg(long, value_enum, default_value = "fail")]
    pub kv_load_failure: KvLoadFailure,
    /// Generation of the metric names
    #[arg(long, value_enum, default_value = "newest")]
    pub metric_names: MetricNames,
    /// Most requests kept for /sim/records
    #[arg(long, default_value_t = 10_000)]
    pub records: usize,
    /// Seconds that running requests get after SIGTERM before they are reset
    #[arg(long, default_value_t = 3.0)]
    pub grace_seconds: f64,
}

impl SimArgs {
    /// The engine these options describe.
    ///
    /// # Errors
    /// A duration that is negative or not a number.
    pub fn config(&self) -> io::Result<EngineConfig> {
        let millis = |value: f64| seconds(value / 1_000.0);
        let typical = Timing::typical();
        let timing = Timing {
            prefill_tokens_per_second: self.prefill_tokens_per_second,
            decode_base: millis(self.decode_ms)?,
            decode_per_sequence: millis(self.decode_ms_per_sequence)?,
            transfer_per_1k_tokens: millis(self.transfer_ms_per_1k)?,
            speed: self.speed,
            ..typical
        };
        let mooncake = self.engine == Dialect::Vllm && self.connector == Connector::Mooncake;
        let (lease, lag) = match self.engine {
            Dialect::Vllm if mooncake => (480.0, 0.0),
            Dialect::Vllm => (30.0, 0.0),
            Dialect::Sglang => (30.0, 4.0),
            Dialect::Trtllm => (60.0, 1.0),
        };
        let usual_port = if mooncake || self.engine == Dialect::Sglang { 8998 } else { 0 };
        let mut config = EngineConfig {
            dialect: self.engine,
            connector: self.connector,
            bootstrap_port: self.bootstrap_port.unwrap_or(usual_port),
            meeting_timeout: seconds(self.meeting_seconds)?,
            disconnect_lag: seconds(self.disconnect_lag_seconds.unwrap_or(lag))?,
            dp_size: self.dp_size,
            stream_head: self.stream_head,
            cpp_transceiver: self.cpp_transceiver,
            role: self.role,
            model: self.model.clone(),
            aliases: self.aliases.clone(),
            bind: self.bind,
            port: self.port,
            strict: !self.lenient,
            on_violation: self.on_violation,
            kv_load_failure: self.kv_load_failure,
            timing: if self.instant { Timing::instant() } else { timing },
            capacity: Capacity {
                kv_tokens: self.kv_tokens,
                max_model_len: self.max_model_len,
                max_running: self.max_running,
                prefix_cache: true,
            },
            lease: seconds(self.lease_seconds.unwrap_or(lease))?,
            keep_alive: seconds(self.keep_alive_seconds)?,
            natural_stop: self.natural_stop,
            metric_names: self.metric_names,
            ..EngineConfig::default()
        };
        config.limits.records = self.records;
        Ok(config)
    }
}

fn seconds(value: f64) -> io::Result<Duration> {
    Duration::try_from_secs_f64(value).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// The first line of output.
#[derive(Serialize)]
struct Listening<'a> {
    event: &'a str,
    address: SocketAddr,
    engine: Dialect,
    bootstrap_port: u16,
    role: Role,
    model: &'a str,
}

/// Runs an engine until SIGINT or SIGTERM, or until it dies.
///
/// # Errors
/// Options that cannot work, an address that cannot be bound, or a closed standard output.
pub async fn run(args: SimArgs) -> io::Result<()> {
    let grace = seconds(args.grace_seconds)?;
    let engine = start(args.config()?).await?;
    let line = Listening {
        event: "listening",
        address: engine.address(),
        engine: args.engine,
        bootstrap_port: engine.bootstrap_port(),
        role: args.role,
        model: &args.model,
    };
    let line = serde_json::to_string(&line)?;
    {
        let mut out = io::stdout().lock();
        writeln!(out, "{line}")?;
        out.flush()?;
    }
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        _ = terminate.recv() => (),
        () = engine.ended() => return Ok(()),
    }
    engine.terminate(grace).await;
    Ok(())
}
