//! What an engine can be told at its start. Every limit is named here and has a default.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::prompt::BLOCK_TOKENS;

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

/// How long work takes. A model with a handful of parameters, not a claim about hardware.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Fixed cost of a prefill.
    pub prefill_base: Duration,
    /// Linear part of a prefill, tokens per second; infinite means free.
    pub prefill_tokens_per_second: f64,
    /// Quadratic part of a prefill: seconds per (1,000 tokens) squared.
    pub prefill_quadratic: f64,
    /// One decode step with one running sequence.
    pub decode_base: Duration,
    /// What each further running sequence adds to a decode step.
    pub decode_per_sequence: Duration,
    /// Fixed cost of a KV transfer.
    pub transfer_base: Duration,
    /// KV transfer time per 1,000 tokens.
    pub transfer_per_1k_tokens: Duration,
    /// Divides every duration above; 10 makes the engine ten times as fast.
    pub speed: f64,
}

impl Timing {
    /// Everything takes no time: for tests of the protocol.
    pub const fn instant() -> Timing {
        Timing {
            prefill_base: Duration::ZERO,
            prefill_tokens_per_second: f64::INFINITY,
            prefill_quadratic: 0.0,
            decode_base: Duration::ZERO,
            decode_per_sequence: Duration::ZERO,
            transfer_base: Duration::ZERO,
            transfer_per_1k_tokens: Duration::ZERO,
            speed: 1.0,
        }
    }

    /// Figures of the order of a 7B model on one accelerator.
    pub const fn typical() -> Timing {
        Timing {
            prefill_base: Duration::from_millis(12),
            prefill_tokens_per_second: 8_000.0,
            prefill_quadratic: 0.0005,
            decode_base: Duration::from_millis(12),
            decode_per_sequence: Duration::from_micros(150),
            transfer_base: Duration::from_millis(3),
            transfer_per_1k_tokens: Duration::from_millis(6),
            speed: 1.0,
        }
    }

    /// The same model, `speed` times as fast.
    #[must_use]
    pub fn faster(mut self, speed: f64) -> Timing {
        self.speed *= speed;
        self
    }

    /// Time to compute `tokens` prompt tokens.
    pub fn prefill(&self, tokens: u32) -> Duration {
        let tokens = f64::from(tokens);
        let thousands = tokens / 1_000.0;
        self.scaled(
            self.prefill_base.as_secs_f64()
                + tokens / self.prefill_tokens_per_second
                + self.prefill_quadratic * thousands * thousands,
        )
    }

    /// Time of one decode step while `running` sequences share the batch.
    pub fn decode_step(&self, running: usize) -> Duration {
        let others = running.saturating_sub(1) as f64;
        self.scaled(self.decode_base.as_secs_f64() + self.decode_per_sequence.as_secs_f64() * others)
    }

    /// Time to pull the KV of `tokens` tokens.
    pub fn transfer(&self, tokens: u32) -> Duration {
        self.scaled(
            self.transfer_base.as_secs_f64() + self.transfer_per_1k_tokens.as_secs_f64() * f64::from(tokens) / 1_000.0,
        )
    }

    fn scaled(&self, seconds: f64) -> Duration {
        Duration::try_from_secs_f64(seconds / self.speed).unwrap_or(Duration::ZERO)
    }
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
    /// How long a prefill engine keeps blocks that nobody pulls (vLLM: `kv_lease_duration`).
    pub lease: Duration,
    /// Idle time after which a used connection is closed (uvicorn: 5 s).
    pub keep_alive: Duration,
    /// How long a decode engine tries to reach a side channel.
    pub handshake_timeout: Duration,
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
    fn durations_follow_the_formulas() {
        let timing = Timing {
            prefill_base: Duration::from_millis(10),
            prefill_tokens_per_second: 1_000.0,
            prefill_quadratic: 0.5,
            decode_base: Duration::from_millis(20),
            decode_per_sequence: Duration::from_millis(1),
            transfer_base: Duration::from_millis(2),
            transfer_per_1k_tokens: Duration::from_millis(8),
            speed: 2.0,
        };
        assert_eq!(timing.prefill(0), Duration::from_millis(5));
        assert_eq!(timing.prefill(2_000), Duration::from_millis(2_005));
        assert_eq!(timing.decode_step(0), Duration::from_millis(10));
        assert_eq!(timing.decode_step(1), Duration::from_millis(10));
        assert_eq!(timing.decode_step(11), Duration::from_millis(15));
        assert_eq!(timing.transfer(500), Duration::from_millis(3));
        assert_eq!(Timing::instant().prefill(u32::MAX), Duration::ZERO);
        assert_eq!(timing.faster(10.0).transfer(500), Duration::from_micros(300));
    }

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
