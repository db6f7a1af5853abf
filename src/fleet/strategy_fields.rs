//! Fields of `routingConfig` about strategies other than `pd`: groups by strategy, as later releases of the reference have
//! them.

use serde_json::Value;

use super::profile::Fields;
use super::values::{positive, positive_whole};
use crate::knobs::{Gpu, StrategyKnobs};

/// Fields of the reference that nothing here goes by, and why.
const WITHOUT_EFFECT: &[(&str, &[&str], &str)] = &[
    (
        "loadBalance",
        &["queuedWeight", "kvPressureAlpha", "kvCriticalFree"],
        "load-balance goes by running requests and the drain rate",
    ),
    (
        "autoBlend",
        &["loadBalanceWeight", "leastRequestWeight", "prefixCacheWeight", "prefixCacheLoadBalanceWeight"],
        "a strategy is what its name says, nothing is blended in; a list like prefix-cache:5,load-balance:4 is",
    ),
    (
        "vtc",
        &["tokenTrackerWindowSize", "tokenTrackerTimeUnit", "tokenTrackerMaxTokens"],
        "the window of users' tokens is the gateway's, and their maximum counts only while no user has any",
    ),
];

impl Fields<'_> {
    /// What the profile says of strategies, over the gateway's own.
    pub(super) fn strategies(&mut self, knobs: &mut StrategyKnobs) {
        let (above, weight) = ("a number above 0", "a number, 0 or more");
        if let Some(gap) = self.take(&["loadBalance"], "imbalanceMinGap", "a whole number above 0", positive_whole) {
            knobs.gate.spread = gap - 1;
        }
        if let Some(factor) = self.take(&["loadBalance"], "imbalanceFactor", above, positive) {
            knobs.gate.factor = Some(factor);
        }
        let vtc = &mut knobs.vtc;
        for (field, expected, read, target) in [
            ("maxPodLoad", above, positive as fn(&Value) -> Option<f64>, &mut vtc.max_pod_load),
            ("fairnessWeight", weight, not_negative, &mut vtc.fairness_weight),
            ("utilizationWeight", weight, not_negative, &mut vtc.utilization_weight),
            ("inputTokenWeight", weight, not_negative, &mut vtc.input_weight),
            ("outputTokenWeight", weight, not_negative, &mut vtc.output_weight),
            ("tokenTrackerMinTokens", above, positive, &mut vtc.min_tokens),
        ] {
            if let Some(value) = self.take(&["vtc"], field, expected, read) {
                *target = value;
            }
        }
        let gpu = |value: &Value| Gpu::parse(value.as_str()?);
        if let Some(gpu) = self.take(&["preble"], "targetGPU", "V100 or A6000", gpu) {
            knobs.preble.gpu = gpu;
        }
        let length = self.take(&["preble"], "decodingLength", "a whole number above 0", positive_whole);
        knobs.preble.decoding_length = length.unwrap_or(knobs.preble.decoding_length);
        for (group, fields, why) in WITHOUT_EFFECT {
            let set = |field: &&&str| self.config.get(*group).and_then(|group| group.get(**field)).is_some();
            if let Some(field) = fields.iter().find(set) {
                self.warnings.push(format!("{}routingConfig.{group}.{field} has no effect here: {why}", self.place));
            }
        }
    }
}

fn not_negative(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.is_finite() && *number >= 0.0)
}
