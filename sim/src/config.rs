//! What an engine can be told at its start. Every limit is named here and has a default.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::prompt::BLOCK_TOKENS;
use crate::timing::Timing;

/// The engine whose protocol is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// vLLM 0.32.
    Vllm,
    /// SGLang 0.5.23.
    Sglang,
    /// TensorRT-LLM of the 1.3 release candidates.
    Trtllm,
}

/// vLLM's KV connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Connector {
    /// NIXL: prefill first, its answer carries the hand-off.
    Nixl,
    /// Mooncake: both legs at once, matched by `transfer_id`.
    Mooncake,
    /// AIBrix's own, over its KVCacheManager: prefill first; KV goes through shared storage and is found by content.
    Aibrix,
}

/// When SGLang's chat and completion streams send their head. `/generate` always sends it at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum StreamHead {
    /// Before the first token, as up to 0.5.9.
    AtOnce,
    /// With the first token, as 0.5.23: a failure before it is an ordinary error answer.
    WithFirstToken,
}

/// The engine's part in disaggregated serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes prompts and hands their KV over (vLLM: `kv_producer`).
    Prefill,
    /// Pulls KV from a prefill engine and generates (vLLM: `kv_consumer`).
    Decode,
    /// Has no KV connector: does both itself. Also what a plain engine is.
    Combined,
}

/// What happens when a request breaks the hand-off protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OnViolation {
    /// The request gets a 500, the violation is listed, the engine lives on.
    Reject,
    /// As vLLM 0.32 was seen to do: the violation is listed, and the engine dies or the request hangs.
    AsReal,
}

/// vLLM's `kv_load_failure_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KvLoadFailure {
    /// A failed transfer ends the request with an error.
    Fail,
    /// A failed transfer makes the decode engine compute the prompt itself.
    Recompute,
}

/// Which generation's metric names `/metrics` serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MetricNames {
    /// vLLM 0.19 and later.
    Newest,
    /// vLLM 0.8 and earlier (`gpu_cache_usage_perc`, `time_per_output_token_seconds`, `gpu_prefix_cache_*`).
    Legacy,
    /// Both at once, as 0.9 to 0.11 did.
    Both,
}

/// What fits into the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// KV cache size in tokens.
    pub kv_tokens: u64,
    /// Longest prompt plus output, tokens.
    pub max_model_len: u32,
    /// Sequences that may be admitted at once; more wait.
    pub max_running: usize,
    /// Whether full prompt blocks are kept for reuse.
    pub prefix_cache: bool,
}

/// Bounds on what the engine keeps in memory and accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest request body, bytes; longer is answered 413.
    pub body_bytes: usize,
    /// Records kept; the oldest go first.
    pub records: usize,
    /// A longer body is recorded as its length and hash only, unless [`EngineConfig::keep_bodies`] is set.
    pub recorded_body_bytes: usize,
    /// Bytes of bodies kept over all records; beyond it the oldest records lose their bodies.
    pub recorded_bytes_total: usize,
    /// Open connections; more wait in the accept queue.
    pub connections: usize,
    /// Sequences one request may ask for (`n` times prompts).
    pub sequences: usize,
    /// Violations kept.
    pub violations: usize,
    /// Finished hand-offs remembered, to tell a reused one from an unknown one.
    pub finished_handoffs: usize,
    /// Scripted faults waiting for a request.
    pub faults: usize,
}

/// An engine's configuration. Fields are public; the setters are for the ones that tests change most.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Protocol.
    pub dialect: Dialect,
    /// Part in disaggregated serving.
    pub role: Role,
    /// Served model name.
    pub model: String,
    /// Further names for the same model.
    pub aliases: Vec<String>,
    /// Address to bind; also where the side channel listens.
    pub bind: IpAddr,
    /// Port; 0 takes a free one.
    pub port: u16,
    /// Whether requests are validated as the real engine validates them.
    pub strict: bool,
    /// What breaking the hand-off protocol leads to.
    pub on_violation: OnViolation,
    /// What a failed KV transfer leads to.
    pub kv_load_failure: KvLoadFailure,
    /// Time model.
    pub timing: Timing,
    /// Sizes.
    pub capacity: Capacity,
    /// Memory bounds.
    pub limits: Limits,
    /// How long a prefill engine keeps blocks that nobody pulls (vLLM: `kv_lease_duration`, 30 s; Mooncake 480 s;
    /// TensorRT-LLM `kv_transfer_timeout_ms`, 60 s).
    pub lease: Duration,
    /// Idle time after which a used connection is closed (uvicorn: 5 s).
    pub keep_alive: Duration,
    /// How long a decode engine tries to reach a side channel.
    pub handshake_timeout: Duration,
    /// How long one leg waits for the other where both run at once (SGLang: 300 s for the bootstrap).
    pub meeting_timeout: Duration,
    /// Time that a generation lives on after its client left: SGLang looks for disconnects every 4 s (2 s for streams),
    /// TensorRT-LLM every second, vLLM at once. Zero by default, so that tests need not wait.
    pub disconnect_lag: Duration,
    /// vLLM's KV connector.
    pub connector: Connector,
    /// Port of the KV side channel of a prefill engine (the bootstrap port of SGLang and Mooncake); 0 takes a free one.
    /// A decode engine of SGLang assumes it where a request names none.
    pub bootstrap_port: u16,
    /// Data-parallel ranks (SGLang).
    pub dp_size: u32,
    /// When streams send their head (SGLang).
    pub stream_head: StreamHead,
    /// Whether `/server_info` names no endpoint, as with TensorRT-LLM's C++ transceiver.
    pub cpp_transceiver: bool,
    /// Whether `/prometheus/metrics` is served (TensorRT-LLM: `return_perf_metrics`).
    pub perf_metrics: bool,
    /// `remote_host` of prefill answers. The real default is `localhost`, which the gateway must replace.
    pub advertised_host: String,
    /// Generated tokens of a chat that names no limit.
    pub chat_tokens: u32,
    /// Mean length after which the model stops by itself; `None` makes it always use its whole limit.
    pub natural_stop: Option<u32>,
    /// Whether `usage.prompt_tokens_details` is filled (vLLM: `--enable-prompt-tokens-details`).
    pub prompt_tokens_details: bool,
    /// Metric names.
    pub metric_names: MetricNames,
    /// Whether metrics carry the `engine` label (absent before 0.10).
    pub engine_label: bool,
    /// Whether probes (`/metrics`, `/health`, `/ping`) are recorded too.
    pub record_probes: bool,
    /// Whether long bodies are recorded whole.
    pub keep_bodies: bool,
    /// Makes generated ids repeatable.
    pub seed: Option<u64>,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            dialect: Dialect::Vllm,
            role: Role::Combined,
            model: "sim".to_owned(),
            aliases: Vec::new(),
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 0,
            strict: true,
            on_violation: OnViolation::Reject,
            kv_load_failure: KvLoadFailure::Fail,
            timing: Timing::instant(),
            capacity: Capacity { kv_tokens: 1 << 20, max_model_len: 131_072, max_running: 256, prefix_cache: true },
            limits: Limits {
                body_bytes: 64 << 20,
                records: 10_000,
                recorded_body_bytes: 64 << 10,
                recorded_bytes_total: 256 << 20,
                connections: 16_384,
                sequences: 128,
                violations: 1_000,
                finished_handoffs: 10_000,
                faults: 1_000,
            },
            lease: Duration::from_secs(30),
            keep_alive: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(5),
            meeting_timeout: Duration::from_mins(5),
            disconnect_lag: Duration::ZERO,
            connector: Connector::Nixl,
            bootstrap_port: 0,
            dp_size: 1,
            stream_head: StreamHead::AtOnce,
            cpp_transceiver: false,
            perf_metrics: true,
            advertised_host: "localhost".to_owned(),
            chat_tokens: 64,
            natural_stop: None,
            prompt_tokens_details: true,
            metric_names: MetricNames::Newest,
            engine_label: true,
            record_probes: false,
            keep_bodies: false,
            seed: None,
        }
    }
}

impl EngineConfig {
    /// A strict prefill engine on a free local port that takes no time.
    pub fn prefill(model: &str) -> EngineConfig {
        EngineConfig { role: Role::Prefill, model: model.to_owned(), ..EngineConfig::default() }
    }

    /// A strict decode engine on a free local port that takes no time.
    pub fn decode(model: &str) -> EngineConfig {
        EngineConfig { role: Role::Decode, model: model.to_owned(), ..EngineConfig::default() }
    }

    /// A strict engine without a KV connector on a free local port that takes no time.
    pub fn combined(model: &str) -> EngineConfig {
        EngineConfig { role: Role::Combined, model: model.to_owned(), ..EngineConfig::default() }
    }

    /// Makes it an SGLang engine.
    #[must_use]
    pub fn sglang(mut self) -> EngineConfig {
        self.dialect = Dialect::Sglang;
        self
    }

    /// Makes it a TensorRT-LLM engine, whose hand-offs live for 60 s.
    #[must_use]
    pub fn trtllm(mut self) -> EngineConfig {
        self.dialect = Dialect::Trtllm;
        self.lease = Duration::from_mins(1);
        self
    }

    /// Makes it a vLLM engine with the Mooncake connector, whose hand-offs live for 480 s.
    #[must_use]
    pub fn mooncake(mut self) -> EngineConfig {
        self.connector = Connector::Mooncake;
        self.lease = Duration::from_mins(8);
        self
    }

    /// Makes it a vLLM engine with AIBrix's connector, which keeps nothing for a decode engine.
    #[must_use]
    pub fn aibrix(mut self) -> EngineConfig {
        self.connector = Connector::Aibrix;
        self
    }

    /// Sets the port of the side channel.
    #[must_use]
    pub fn bootstrap_port(mut self, port: u16) -> EngineConfig {
        self.bootstrap_port = port;
        self
    }

    /// Sets how long one leg waits for the other.
    #[must_use]
    pub fn meeting_timeout(mut self, timeout: Duration) -> EngineConfig {
        self.meeting_timeout = timeout;
        self
    }

    /// Sets when streams send their head.
    #[must_use]
    pub fn stream_head(mut self, head: StreamHead) -> EngineConfig {
        self.stream_head = head;
        self
    }

    /// Sets how long a generation survives its client.
    #[must_use]
    pub fn disconnect_lag(mut self, lag: Duration) -> EngineConfig {
        self.disconnect_lag = lag;
        self
    }

    /// Sets the address and port.
    #[must_use]
    pub fn at(mut self, bind: IpAddr, port: u16) -> EngineConfig {
        self.bind = bind;
        self.port = port;
        self
    }

    /// Sets the time model.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> EngineConfig {
        self.timing = timing;
        self
    }

    /// Sets the sizes.
    #[must_use]
    pub fn capacity(mut self, capacity: Capacity) -> EngineConfig {
        self.capacity = capacity;
        self
    }

    /// Sets how long unread blocks stay pinned.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> EngineConfig {
        self.lease = lease;
        self
    }

    /// Sets the idle time of used connections.
    #[must_use]
    pub fn keep_alive(mut self, keep_alive: Duration) -> EngineConfig {
        self.keep_alive = keep_alive;
        self
    }

    /// Sets what breaking the hand-off protocol leads to.
    #[must_use]
    pub fn on_violation(mut self, on_violation: OnViolation) -> EngineConfig {
        self.on_violation = on_violation;
        self
    }

    /// Sets what a failed KV transfer leads to.
    #[must_use]
    pub fn kv_load_failure(mut self, policy: KvLoadFailure) -> EngineConfig {
        self.kv_load_failure = policy;
        self
    }

    /// Refuses what cannot work, as the real engine does at its start.
    pub(crate) fn check(&self) -> io::Result<()> {
        let refuse = |text: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, text.to_owned()));
        let timing = &self.timing;
        if self.model.is_empty() {
            return refuse("the model name is empty");
        }
        if !(timing.speed > 0.0 && timing.speed.is_finite()) {
            return refuse("speed must be a positive number");
        }
        // NaN lies in no range.
        let speed_known = (f64::MIN_POSITIVE..=f64::INFINITY).contains(&timing.prefill_tokens_per_second);
        if !speed_known || !(0.0..f64::INFINITY).contains(&timing.prefill_quadratic) {
            return refuse("prefill speed must be positive and its quadratic part not negative");
        }
        if self.capacity.max_running == 0 || self.capacity.max_model_len < 2 {
            return refuse("an engine needs room for one sequence of two tokens");
        }
        if self.capacity.kv_tokens < u64::from(self.capacity.max_model_len) + u64::from(BLOCK_TOKENS) {
            return refuse("the KV cache must hold one sequence of the maximum model length");
        }
        if self.dp_size == 0 {
            return refuse("there is at least one data-parallel rank");
        }
        if self.lease.is_zero() || self.keep_alive.is_zero() {
            return refuse("lease and keep-alive must be longer than zero");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_configurations_are_refused() {
        let with = |change: fn(&mut EngineConfig)| {
            let mut config = EngineConfig::default();
            change(&mut config);
            config.check().is_ok()
        };
        assert!(with(|_| ()));
        assert!(!with(|c| c.model.clear()));
        assert!(!with(|c| c.timing.speed = 0.0));
        assert!(!with(|c| c.timing.speed = f64::NAN));
        assert!(!with(|c| c.timing.prefill_tokens_per_second = f64::NAN));
        assert!(!with(|c| c.capacity.max_running = 0));
        assert!(!with(|c| c.capacity.kv_tokens = u64::from(c.capacity.max_model_len) + 15));
        assert!(with(|c| c.capacity.kv_tokens = u64::from(c.capacity.max_model_len) + 16));
        assert!(!with(|c| c.lease = Duration::ZERO));
    }
}
