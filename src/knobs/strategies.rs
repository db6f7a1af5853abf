//! What single-pod strategies and the steps before them go by (reference gateway, section 10).

use std::time::Duration;

use super::parse;
use super::read::Reader;

/// The knobs of strategies other than `pd`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StrategyKnobs {
    /// When only the least busy pods compete.
    pub gate: GateKnobs,
    /// `vtc-basic`.
    pub vtc: VtcKnobs,
    /// `prefix-cache-preble`.
    pub preble: PrebleKnobs,
    /// `AIBRIX_LORA_AFFINITY_THRESHOLD` (0.999, 0 to 1): how often `lora-affinity` prefers pods that have the adapter over
    /// those that could load it.
    pub lora_threshold: LoraThreshold,
    /// Profile field `requestsInflight`: requests that a pod may have at a time. `None` = any number.
    pub requests_inflight: Option<u64>,
}

/// A share with the reference's default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraThreshold(pub f64);

impl Default for LoraThreshold {
    fn default() -> LoraThreshold {
        LoraThreshold(0.999)
    }
}

/// The load-imbalance gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GateKnobs {
    /// `AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT` (8, requests): the gate acts when requests in flight
    /// differ by *more* than this.
    pub spread: u64,
    /// `AIBRIX_LOAD_BALANCE_IMBALANCE_FACTOR` (unset): of three pods or more, the busiest must also have more than this
    /// factor times (the mean of the others + 1). `None` = that is not asked.
    pub factor: Option<f64>,
}

impl Default for GateKnobs {
    fn default() -> GateKnobs {
        GateKnobs { spread: 8, factor: None }
    }
}

/// The score of `vtc-basic` and what it counts of a user.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VtcKnobs {
    /// `AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD` (100, requests): the load of a pod that is fully used.
    pub max_pod_load: f64,
    /// `AIBRIX_ROUTER_VTC_BASIC_FAIRNESS_WEIGHT` (1).
    pub fairness_weight: f64,
    /// `AIBRIX_ROUTER_VTC_BASIC_UTILIZATION_WEIGHT` (1).
    pub utilization_weight: f64,
    /// `AIBRIX_ROUTER_VTC_BASIC_INPUT_TOKEN_WEIGHT` (1): of a token of the prompt.
    pub input_weight: f64,
    /// `AIBRIX_ROUTER_VTC_BASIC_OUTPUT_TOKEN_WEIGHT` (2): of a token of the answer.
    pub output_weight: f64,
    /// `AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE` (5) in units of `AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT`
    /// (`minutes`): how long a token counts.
    pub window: Duration,
    /// `AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS` (1000): the step of users' tokens is at least this.
    pub min_tokens: f64,
}

impl Default for VtcKnobs {
    fn default() -> VtcKnobs {
        VtcKnobs {
            max_pod_load: 100.0,
            fairness_weight: 1.0,
            utilization_weight: 1.0,
            input_weight: 1.0,
            output_weight: 2.0,
            window: Duration::from_mins(5),
            min_tokens: 1000.0,
        }
    }
}

/// The cost model of `prefix-cache-preble`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrebleKnobs {
    /// `AIBRIX_ROUTER_PREBLE_TARGET_GPU` (`V100`): whose prefill times the cost is made of.
    pub gpu: Gpu,
    /// `AIBRIX_ROUTER_PREBLE_DECODING_LENGTH` (45, tokens): what an answer is expected to have.
    pub decoding_length: u64,
    /// `AIBRIX_ROUTER_PREBLE_SLIDING_WINDOW_PERIOD` (3 minutes): how long a request counts.
    pub window: Duration,
}

impl Default for PrebleKnobs {
    fn default() -> PrebleKnobs {
        PrebleKnobs { gpu: Gpu::V100, decoding_length: 45, window: Duration::from_mins(3) }
    }
}

/// The two GPUs for which the reference has times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gpu {
    /// `V100`
    V100,
    /// `A6000`
    A6000,
}

impl Gpu {
    /// The name in `AIBRIX_ROUTER_PREBLE_TARGET_GPU`.
    pub fn name(self) -> &'static str {
        match self {
            Gpu::V100 => "V100",
            Gpu::A6000 => "A6000",
        }
    }

    /// The GPU of that name.
    pub fn parse(text: &str) -> Option<Gpu> {
        [Gpu::V100, Gpu::A6000].into_iter().find(|gpu| gpu.name() == text)
    }
}

/// The longest window: what its clock can tell apart.
const MAX_WINDOW: Duration = Duration::from_hours(24);

pub(super) fn read(reader: &mut Reader<'_>) -> StrategyKnobs {
    let default = StrategyKnobs::default();
    StrategyKnobs {
        gate: read_gate(reader, default.gate),
        vtc: read_vtc(reader, default.vtc),
        preble: read_preble(reader, default.preble),
        lora_threshold: LoraThreshold(reader.value(
            "AIBRIX_LORA_AFFINITY_THRESHOLD",
            default.lora_threshold.0,
            parse::share,
            f64::to_string,
        )),
        requests_inflight: None,
    }
}

/// Later releases of the reference have a gap, which is inclusive, in place of the count.
fn read_gate(reader: &mut Reader<'_>, default: GateKnobs) -> GateKnobs {
    const COUNT: &str = "AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT";
    let count = reader.value(COUNT, default.spread, parse::positive_integer, u64::to_string);
    let gap = reader.optional("AIBRIX_LOAD_BALANCE_IMBALANCE_MIN_GAP", parse::positive_integer, u64::to_string);
    GateKnobs {
        spread: gap.map_or(count, |gap| gap - 1),
        factor: reader.optional("AIBRIX_LOAD_BALANCE_IMBALANCE_FACTOR", parse::positive_number, f64::to_string),
    }
}

fn read_vtc(reader: &mut Reader<'_>, default: VtcKnobs) -> VtcKnobs {
    let weight = |reader: &mut Reader<'_>, name, default| reader.value(name, default, parse::weight, f64::to_string);
    let positive =
        |reader: &mut Reader<'_>, name, default| reader.value(name, default, parse::positive_number, f64::to_string);
    let size = reader.value("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE", 5, parse::positive_integer, u64::to_string);
    let unit = reader.choice(
        "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT",
        Duration::from_mins(1),
        &[
            ("minutes", Duration::from_mins(1)),
            ("seconds", Duration::from_secs(1)),
            ("milliseconds", Duration::from_millis(1)),
        ],
    );
    VtcKnobs {
        max_pod_load: positive(reader, "AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD", default.max_pod_load),
        fairness_weight: weight(reader, "AIBRIX_ROUTER_VTC_BASIC_FAIRNESS_WEIGHT", default.fairness_weight),
        utilization_weight: weight(reader, "AIBRIX_ROUTER_VTC_BASIC_UTILIZATION_WEIGHT", default.utilization_weight),
        input_weight: weight(reader, "AIBRIX_ROUTER_VTC_BASIC_INPUT_TOKEN_WEIGHT", default.input_weight),
        output_weight: weight(reader, "AIBRIX_ROUTER_VTC_BASIC_OUTPUT_TOKEN_WEIGHT", default.output_weight),
        window: window(size, unit),
        min_tokens: positive(reader, "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS", default.min_tokens),
    }
}

fn read_preble(reader: &mut Reader<'_>, default: PrebleKnobs) -> PrebleKnobs {
    const WINDOW: &str = "AIBRIX_ROUTER_PREBLE_SLIDING_WINDOW_PERIOD";
    PrebleKnobs {
        gpu: reader.choice(
            "AIBRIX_ROUTER_PREBLE_TARGET_GPU",
            default.gpu,
            &[(Gpu::V100.name(), Gpu::V100), (Gpu::A6000.name(), Gpu::A6000)],
        ),
        decoding_length: reader.value(
            "AIBRIX_ROUTER_PREBLE_DECODING_LENGTH",
            default.decoding_length,
            parse::positive_integer,
            u64::to_string,
        ),
        window: window(reader.value(WINDOW, 3, parse::positive_integer, u64::to_string), Duration::from_mins(1)),
    }
}

fn window(size: u64, unit: Duration) -> Duration {
    unit.saturating_mul(u32::try_from(size).unwrap_or(u32::MAX)).min(MAX_WINDOW)
}
