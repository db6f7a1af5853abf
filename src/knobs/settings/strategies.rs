//! Strategies other than `pd`, and the gate before them.

use super::{Group, one};

pub(super) const STRATEGIES: Group = Group {
    title: "Strategies other than `pd`",
    settings: &[
        one(
            "AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT",
            "8",
            "requests",
            "",
            "When requests in flight of the candidates differ by more, only the pods with the fewest compete, whatever the \
             strategy.",
        ),
        one(
            "AIBRIX_LOAD_BALANCE_IMBALANCE_MIN_GAP",
            "unset",
            "requests",
            "loadBalance.imbalanceMinGap",
            "The same, as later releases of the reference spell it: this difference, or a larger one. Wins over the count.",
        ),
        one(
            "AIBRIX_LOAD_BALANCE_IMBALANCE_FACTOR",
            "unset",
            "factor",
            "loadBalance.imbalanceFactor",
            "Of three pods or more, the busiest must then also have more than this factor times (mean of the others + 1).",
        ),
        one(
            "AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD",
            "100",
            "requests",
            "vtc.maxPodLoad",
            "`vtc-basic`: the load of a pod that is fully used.",
        ),
        one(
            "AIBRIX_ROUTER_VTC_BASIC_FAIRNESS_WEIGHT",
            "1",
            "weight, 0 allowed",
            "vtc.fairnessWeight",
            "`vtc-basic`: weight of the distance between a pod's place and the user's.",
        ),
        one(
            "AIBRIX_ROUTER_VTC_BASIC_UTILIZATION_WEIGHT",
            "1",
            "weight, 0 allowed",
            "vtc.utilizationWeight",
            "`vtc-basic`: weight of a pod's load.",
        ),
        one(
            "AIBRIX_ROUTER_VTC_BASIC_INPUT_TOKEN_WEIGHT",
            "1",
            "weight, 0 allowed",
            "vtc.inputTokenWeight",
            "`vtc-basic`: what a token of the prompt counts for its user.",
        ),
        one(
            "AIBRIX_ROUTER_VTC_BASIC_OUTPUT_TOKEN_WEIGHT",
            "2",
            "weight, 0 allowed",
            "vtc.outputTokenWeight",
            "`vtc-basic`: what a token of the answer counts; 1.5 are expected for each of the prompt.",
        ),
        one(
            "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE",
            "5",
            "time units",
            "",
            "`vtc-basic`: how long a token counts; a day at most.",
        ),
        one(
            "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT",
            "minutes",
            "`minutes`, `seconds` or `milliseconds`",
            "",
            "The unit of that window.",
        ),
        one(
            "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS",
            "1000",
            "tokens",
            "vtc.tokenTrackerMinTokens",
            "`vtc-basic`: users' counts are compared in steps of at least so many.",
        ),
        one(
            "AIBRIX_ROUTER_PREBLE_TARGET_GPU",
            "V100",
            "`V100` or `A6000`",
            "preble.targetGPU",
            "`prefix-cache-preble`: whose prefill times the cost is made of.",
        ),
        one(
            "AIBRIX_ROUTER_PREBLE_DECODING_LENGTH",
            "45",
            "tokens",
            "preble.decodingLength",
            "`prefix-cache-preble`: what an answer is expected to have.",
        ),
        one(
            "AIBRIX_ROUTER_PREBLE_SLIDING_WINDOW_PERIOD",
            "3",
            "minutes",
            "",
            "`prefix-cache-preble`: how long a request counts for its pod; a day at most.",
        ),
        one(
            "AIBRIX_LORA_AFFINITY_THRESHOLD",
            "0.999",
            "0 to 1",
            "",
            "`lora-affinity`: how often pods that have the adapter win over those that could load it.",
        ),
    ],
};
