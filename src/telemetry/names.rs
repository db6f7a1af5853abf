//! Every metric that this process exports: name, kind, labels, meaning. The only place that spells metric names.
//!
//! Names without the prefix `tandem_` are those of the reference gateway (its section 9), so that its dashboards and
//! alerts go on working. Metrics of engines that are passed on have their names in [`engines`].

mod engines;

pub use engines::{EngineHistogram, EngineMetric, Join};

/// What a metric's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Only grows.
    Counter,
    /// A whole number that goes up and down.
    Gauge,
    /// A gauge with decimals.
    Decimal,
}

/// One metric.
#[derive(Debug)]
pub(super) struct Definition {
    /// Its name on the wire.
    pub(super) name: &'static str,
    /// Its kind.
    pub(super) kind: Kind,
    /// Its label names. [`GATEWAY_POD`] is filled in by the metrics themselves, the others by the caller in this order.
    /// Where [`Metric::per_pod`] has more, these are the ones of [`crate::knobs::MetricLabels::Lean`].
    pub(super) labels: &'static [&'static str],
    /// What it means.
    pub(super) help: &'static str,
}

/// The label that names this replica.
pub(super) const GATEWAY_POD: &str = "gateway_pod";

/// The pod label set of the reference gateway.
const POD: &[&str] =
    &[GATEWAY_POD, "namespace", "pod", "model", "engine_type", "roleset", "role", "role_replica_index"];
/// The same and one more, of counters that the reference keeps per pod.
const POD_BUCKET: &[&str] =
    &[GATEWAY_POD, "namespace", "pod", "model", "engine_type", "roleset", "role", "role_replica_index", "bucket"];
const POD_USAGE: &[&str] =
    &[GATEWAY_POD, "namespace", "pod", "model", "engine_type", "roleset", "role", "role_replica_index", "has_usage"];
const POD_MODEL: &[&str] =
    &[GATEWAY_POD, "namespace", "pod", "model", "engine_type", "roleset", "role", "role_replica_index", "model_name"];
const REPLICA: &[&str] = &[GATEWAY_POD];
const MODEL: &[&str] = &[GATEWAY_POD, "model"];
const MODEL_BUCKET: &[&str] = &[GATEWAY_POD, "model", "bucket"];
const MODEL_STATUS: &[&str] = &[GATEWAY_POD, "model", "status", "status_code"];
const POD_NAME: &[&str] = &["namespace", "pod_name"];

/// A distribution.
#[derive(Debug)]
pub(super) struct HistogramDefinition {
    /// Its name on the wire.
    pub(super) name: &'static str,
    /// Its label names: the replica's, and for those of requests the model's.
    pub(super) labels: &'static [&'static str],
    /// Labels whose value never changes.
    pub(super) constant: &'static [(&'static str, &'static str)],
    /// What it means.
    pub(super) help: &'static str,
    /// Upper borders of the buckets; a bucket holds its border.
    pub(super) buckets: &'static [f64],
}

/// Every distribution, in the order of `docs/metrics.md`.
pub(super) fn histograms() -> impl Iterator<Item = &'static HistogramDefinition> {
    REQUEST_HISTOGRAMS.into_iter().chain([&PREFIX_ROUTING_SECONDS, &SYNC_SECONDS, &VIEW_AGE_SECONDS])
}

/// How long a sync takes.
pub(super) const SYNC_SECONDS: HistogramDefinition = HistogramDefinition {
    name: "tandem_state_plane_sync_seconds",
    labels: REPLICA,
    constant: &[],
    help: "Time from a publication to its answer, failed ones included.",
    buckets: &[0.000_25, 0.000_5, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0],
};

/// How long a selection by prefixes takes. Borders are those of the reference: from 10 µs on, each twice the one before.
pub(super) const PREFIX_ROUTING_SECONDS: HistogramDefinition = HistogramDefinition {
    name: "aibrix_prefix_cache_routing_latency_seconds",
    labels: &[GATEWAY_POD, "model", "using_kv_sync"],
    constant: &[("using_kv_sync", "false")],
    help: "Selections that went by prefixes: from the request at hand, its limits checked, to the choice; work on the prompt included.",
    buckets: &[
        0.000_01, 0.000_02, 0.000_04, 0.000_08, 0.000_16, 0.000_32, 0.000_64, 0.001_28, 0.002_56, 0.005_12, 0.010_24,
        0.020_48, 0.040_96, 0.081_92, 0.163_84,
    ],
};

/// How old the view of the others is when it is used.
pub(super) const VIEW_AGE_SECONDS: HistogramDefinition = HistogramDefinition {
    name: "tandem_state_plane_view_age_seconds",
    labels: REPLICA,
    constant: &[],
    help: "Age of the view of the other replicas' work at each selection.",
    buckets: &[0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0],
};

macro_rules! request_histograms {
    ($($id:ident $name:literal $buckets:expr, $help:literal;)*) => {
        /// Names a part of a request's life that has a distribution per model.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Part { $(#[doc = $help] $id,)* }

        /// Those of successful requests, in the order of [`Part`]. Their buckets carry exemplars.
        pub(super) const REQUEST_HISTOGRAMS: [&HistogramDefinition; [$(Part::$id),*].len()] = [
            $(&HistogramDefinition { name: $name, labels: MODEL, constant: &[], help: $help, buckets: &$buckets },)*
        ];
    };
}

request_histograms! {
    Routing "tandem_routing_seconds"
        [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0],
        "Successful requests: from their head to the start of the prefill leg, or to the choice of the only pod.";
    Prefill "tandem_prefill_seconds"
        [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0],
        "Successful requests: duration of the prefill leg.";
    KvTransfer "tandem_kv_transfer_seconds"
        [0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0],
        "Successful requests: from the end of the prefill leg to the first answer chunk.";
    FirstToken "tandem_time_to_first_token_seconds"
        [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0],
        "Successful requests: from their head to the first answer chunk (not streamed: to the last).";
    OutputToken "tandem_time_per_output_token_seconds"
        [0.001, 0.002_5, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0],
        "Successful streamed requests: decode time per completion token.";
    Decode "tandem_decode_seconds"
        [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0],
        "Successful requests: from the first to the last answer chunk (not streamed: from the hand-over).";
    Whole "tandem_request_seconds"
        [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0],
        "Successful requests: from their head to their end.";
}

impl Metric {
    /// The labels of the reference, where they tell more apart than ours need to.
    pub(super) fn per_pod(self) -> Option<&'static [&'static str]> {
        match self {
            Metric::PromptTokenBucket
            | Metric::CompletionTokenBucket
            | Metric::RoutingTime
            | Metric::PrefillTime
            | Metric::KvTransferTime
            | Metric::Ttft
            | Metric::Tpot
            | Metric::DecodeTime
            | Metric::TotalTime => Some(POD_BUCKET),
            Metric::InputTokens | Metric::OutputTokens => Some(POD),
            Metric::RequestsWithUsage => Some(POD_USAGE),
            Metric::ModelReplicas => Some(POD_MODEL),
            _ => None,
        }
    }

    /// Its labels: as the reference has them, or the lean ones.
    pub(super) fn labels(self, per_pod: bool) -> &'static [&'static str] {
        self.per_pod().filter(|_| per_pod).unwrap_or(self.definition().labels)
    }

    /// Those of the state plane that have a series per model.
    pub(super) const PLANE_BY_MODEL: &'static [Metric] = &[
        Metric::PlaneStaleness,
        Metric::PlaneMembers,
        Metric::PlaneClaiming,
        Metric::PlanePublished,
        Metric::PlaneReceived,
        Metric::PlaneResyncs,
        Metric::PlaneReaped,
        Metric::PlaneGaps,
        Metric::PlaneJoins,
    ];
}

macro_rules! metrics {
    ($($id:ident $name:literal $kind:ident $labels:expr, $help:literal;)*) => {
        /// Names a metric inside the house.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Metric { $(#[doc = $help] $id,)* }

        impl Metric {
            /// Every metric, in the order of `docs/metrics.md`.
            pub(super) const ALL: &'static [Metric] = &[$(Metric::$id,)*];

            /// Its definition.
            pub(super) fn definition(self) -> &'static Definition {
                match self {
                    $(Metric::$id => {
                        const DEFINITION: Definition =
                            Definition { name: $name, kind: Kind::$kind, labels: $labels, help: $help };
                        &DEFINITION
                    })*
                }
            }
        }
    };
}

metrics! {
    RequestTotal "gateway_request_total" Counter
        &[GATEWAY_POD, "pod_name", "namespace", "pod", "model", "engine_type", "roleset", "role", "role_replica_index"],
        "Requests that ended. `pod_name` is this replica, the other labels are those of the decode, combined or only pod; empty when no pod was chosen.";
    InFlight "gateway_in_flight_requests" Gauge REPLICA,
        "Requests between their first byte and their end.";
    ModelInFlight "gateway_model_in_flight_requests" Gauge MODEL,
        "The same, per model.";
    ModelSuccess "gateway_request_model_success_total" Counter
        &[GATEWAY_POD, "model", "pod_name", "status", "status_code"],
        "Requests whose client got a complete 2xx answer. `pod_name` is this replica.";
    ModelFail "gateway_request_model_fail_total" Counter
        &[GATEWAY_POD, "model", "pod_name", "status", "status_code"],
        "All other requests. `status` is the reason, `status_code` what the client saw (499: it left). `pod_name` is this replica.";
    PromptTokenBucket "gateway_prompt_token_bucket_total" Counter MODEL_BUCKET,
        "Requests by prompt tokens, as the engine reports them.";
    CompletionTokenBucket "gateway_completion_token_bucket_total" Counter MODEL_BUCKET,
        "Requests by completion tokens, as the engine reports them.";
    InputTokens "gateway_input_tokens_total" Counter MODEL,
        "Prompt tokens, as the engine reports them.";
    OutputTokens "gateway_output_tokens_total" Counter MODEL,
        "Completion tokens, as the engine reports them.";
    RequestsWithUsage "gateway_requests_with_usage_total" Counter &[GATEWAY_POD, "model", "has_usage"],
        "Successful requests whose answer did (`true`) or did not (`false`) report token usage.";
    RoutingTime "gateway_routing_time_bucket_total" Counter MODEL_BUCKET,
        "Successful requests by time from their head to the start of the prefill leg, or to the choice of the only pod.";
    PrefillTime "gateway_prefill_time_bucket_total" Counter MODEL_BUCKET,
        "Successful requests by duration of the prefill leg.";
    KvTransferTime "gateway_kv_transfer_time_bucket_total" Counter MODEL_BUCKET,
        "Successful requests by time from the end of the prefill leg to the first answer chunk.";
    Ttft "gateway_ttft_bucket_total" Counter MODEL_BUCKET,
        "Successful requests by time from their head to the first answer chunk (not streamed: to the last).";
    Tpot "gateway_tpot_bucket_total" Counter MODEL_BUCKET,
        "Successful streamed requests by decode time per completion token.";
    DecodeTime "gateway_decode_time_bucket_total" Counter MODEL_BUCKET,
        "Successful requests by time from the first to the last answer chunk (not streamed: from the hand-over).";
    TotalTime "gateway_total_time_bucket_total" Counter MODEL_BUCKET,
        "Successful requests by time from their head to their end.";
    SlowFirstToken "gateway_first_token_delay_over_1s_total" Counter MODEL,
        "Successful requests whose first token took longer than `AIBRIX_TTFT_THRESHOLD_S`.";
    PrefillSuccess "gateway_prefill_request_success_total" Counter MODEL_STATUS,
        "Prefill legs that ended well.";
    PrefillFail "gateway_prefill_request_fail_total" Counter MODEL_STATUS,
        "Prefill legs that failed, once by HTTP result and once as `pd-do-prefill-request-error`; and selections without a pair (`pd-filter-prefill-decode-pods-fail`).";
    PrefillOutstanding "gateway_prefill_outstanding_requests" Gauge REPLICA,
        "Prefill legs under way.";
    SelectedPrefill "pd_selected_prefill_pod_total" Counter POD,
        "Pairs by chosen prefill pod.";
    SelectedDecode "pd_selected_decode_pod_total" Counter POD,
        "Pairs by chosen decode pod.";
    BandServed "pd_bucket_serve_band_total" Counter &["roleset"],
        "Requests that adaptive bucket serving sent to the roleset.";
    BandTokens "pd_bucket_serve_prompt_tokens_total" Counter &["roleset"],
        "Their prompt tokens, as the gateway counts them.";
    BandMax "pd_bucket_serve_band_max" Gauge &["roleset"],
        "The longest prompt, in tokens, in a band of the roleset; 2^63 - 1 without end. Absent while no live plan holds the roleset.";
    PdPrefillFailure "gateway_pd_prefill_failure_total" Counter &["class", "stage"],
        "Failed prefill legs by class, and by whether the decode pod had begun to answer.";
    PdDecodeAbort "gateway_pd_decode_abort_total" Counter &["result", "prefill_failure_class"],
        "Abort calls to SGLang pods by how they ended; the second label is the class of the prefill failure, or `watchdog_first_response`, `watchdog_response`, `watchdog_stream_idle`, `client_gone`, `decode_failed`.";
    PdDecodeWatchdog "gateway_pd_decode_watchdog_total" Counter &["phase"],
        "Requests that the decode watchdog ended: `first_response`, `response` or `stream_idle`.";
    Retries "tandem_retries_total" Counter &["reason"],
        "Requests that started over on other pods, at most once each: `prefill_unreachable`, `decode_unreachable`, `error_before_content` or `handoff_expired`.";
    DecodeFailovers "tandem_decode_failovers_total" Counter &[],
        "Decode requests whose pod could not be reached and that another decode pod of the roleset took over.";
    ModelReplicas "model_replicas" Gauge &["model"],
        "1 for each routable pod, under its own model. (`lean`: the number of routable pods per model.)";
    RoutablePods "tandem_routable_pods" Gauge &["model"],
        "Routable pods per model, also under the names of its adapters.";
    UnservedRequests "tandem_unserved_requests" Gauge &["model"],
        "Requests of the last minute that were refused because the model is known and has no ready pod: what an autoscaler can wait for. 0 once a minute has passed without one.";
    ModelWakes "tandem_model_wakes_total" Counter &["result"],
        "Calls to the runtime of a pod to wake a sleeping model: `ok`, `error`, or `limit`: not made because too many are under way.";
    ConfigDisagreements "tandem_config_disagreements" Gauge &["model"],
        "Pods whose `model.aibrix.ai/config` says something else about requests than the one in force.";
    RolesetsIncomplete "tandem_rolesets_incomplete" Gauge &["model"],
        "Rolesets of the model that lack a routable prefill pod or a routable decode pod, and so take no requests.";
    EngineQueryFail "llm_engine_metrics_query_fail" Counter POD,
        "Scrapes of a pod's engine metrics that failed.";
    Handoff "tandem_handoff_total" Counter &["model", "outcome"],
        "What became of the KV hand-off between the legs: `relayed`, `absent` from the prefill answer, or `unusable`.";
    SelectionConflicts "tandem_selection_conflicts_total" Counter &[],
        "Selections that decided again because another request was charged in between.";
    BlindCommits "tandem_selection_blind_commits_total" Counter &[],
        "Selections that lost so often that they charged without the check.";
    Ejected "tandem_ejected" Gauge &["model", "scope"],
        "Pods (`pod`) and pairs of a prefill and a decode pod (`pair`) that get no ordinary request because their last ones failed.";
    Ejections "tandem_ejections_total" Counter &["scope"],
        "Pods and pairs ejected, again after a failed probe included.";
    EjectionIgnored "tandem_ejection_ignored_total" Counter &[],
        "Selections that had nobody but ejected pods or pairs to choose from, and so paid no heed to ejections.";
    PrefixDecisions "aibrix_prefix_cache_routing_decisions_total" Counter &[GATEWAY_POD, "model", "match_percent_bucket", "using_kv_sync"],
        "Selections that went by prefixes, by how much of the prompt the chosen pod holds, percent: `0`, `1-25`, `26-50`, `51-75`, `76-100`. Those are of the strategy `prefix-cache`, alone or weighted, and of `pd` with a prefill policy that looks prefixes up. `using_kv_sync` is always `false`.";
    PrefixSelections "aibrix_prefix_cache_routing_selection_total" Counter &[GATEWAY_POD, "model", "selection", "using_kv_sync"],
        "The same by what made the choice: `prefix_match`, `prefix_match_skipped` (others hold more than the chosen pod, which holds nothing), `least_request_fallback` (nobody holds anything).";
    PrefixErrors "aibrix_prefix_cache_routing_errors_total" Counter &[GATEWAY_POD, "model", "reason", "using_kv_sync"],
        "Selections by prefixes that found no pod (`no_target_pod`).";
    PrefixImbalance "aibrix_prefix_cache_load_imbalance_total" Counter &[GATEWAY_POD, "model", "using_kv_sync"],
        "Selections by prefixes for which only the least busy pods competed, because loads were too far apart.";
    PrefixIndexer "aibrix_prefix_cache_indexer_status" Gauge &[GATEWAY_POD, "model", "indexer_type"],
        "1 for the index that is in use: `local`, never `sync`.";
    PrefixEntries "tandem_prefix_index_entries" Gauge &[],
        "Blocks in the prefix index.";
    PrefixBytes "tandem_prefix_index_bytes" Gauge &[],
        "Memory of the prefix index.";
    PrefixEvictions "tandem_prefix_index_evictions_total" Counter &[],
        "Blocks that left the prefix index for lack of memory or use.";
    PrefixDropped "tandem_prefix_index_dropped_updates_total" Counter &[],
        "Updates of the prefix index that found its queue full.";
    SnapshotVersion "tandem_snapshot_version" Gauge &[],
        "Version of the fleet snapshot in use; 0 before the first.";
    SnapshotAge "tandem_snapshot_age_seconds" Decimal &[],
        "Time since that snapshot was put in place.";
    Ready "tandem_ready" Gauge &[],
        "1 while `/readyz` asks for traffic: there is a snapshot of the fleet, and the replica is not draining.";
    ConfigErrors "tandem_config_errors" Gauge &[],
        "Settings that kept their default because the value is not usable, and problems of the pods' manifests.";
    Rejected "tandem_rejected_total" Counter &["limit"],
        "What this replica did not do for a client because of a limit: requests refused (`streams`, `buffered_bytes`, \
         `front_body_time`), connections to the front closed (`front_connections`, `front_stall`).";
    LimitSet "tandem_limit" Gauge &["limit"],
        "What this replica holds for its clients at most: requests in flight (`streams`), bytes of request bodies (`buffered_bytes`).";
    RateLimited "tandem_rate_limit_verdicts_total" Counter &["limit", "verdict"],
        "Verdicts of the limits that replicas share: `granted` or `refused`, by the `model`'s requests per second, the user's requests (`user_requests`) or tokens (`user_tokens`) per minute; of the `user`'s record, `unknown` or `unusable`.";
    RateLimitFallbacks "tandem_rate_limit_fallbacks_total" Counter &["limit", "action"],
        "Requests whose `model` or `user` limit had to do without Redis: counted by this replica alone (`local`), let pass (`open`; `uncounted`, where the user's record is not known), or refused (`closed`).";
    RateLimitSettled "tandem_rate_limit_settlements_total" Counter &["what", "result"],
        "What Redis is told while no request waits: the `refund` of a place that was not used (`done`; `window_over`: nothing to give back any more; `failed`: lost until its window ends), the `tokens` of an answer (`done`, `failed`), and a `charge` of which nobody knows whether it was made (`unknown`).";
    BufferedBytes "tandem_buffered_bytes" Gauge &[],
        "Bytes of request bodies held.";
    EngineMetricMissing "tandem_engine_metric_missing_total" Counter &["engine", "metric"],
        "Scrapes that were answered without a metric that routing needs, under any of its known names.";
    RoutingSignalMissing "tandem_routing_signal_missing_total" Counter &["model", "signal"],
        "Selections whose strategy wanted this signal while no candidate's engine had reported it lately: what is known decided without it, in the end the requests in flight.";
    Panics "tandem_panics_caught_total" Counter &[],
        "Panics: defects, please report. One in a background task ends the process.";
    SpansDropped "tandem_spans_dropped_total" Counter &[],
        "Spans that found the export queue full, or whose export failed.";
    EnginePagesDropped "tandem_engine_pages_dropped_total" Counter &[],
        "Engine metrics pages that were not passed on because they are longer than 1 MiB.";
    SeriesRejected "tandem_metric_series_rejected_total" Counter &[],
        "Samples that were not kept because their metric has too many series.";
    BuildInfo "tandem_build_info" Gauge &["version"],
        "Always 1.";
    PodPrefills "tandem_pod_prefill_outstanding" Gauge POD_NAME,
        "Prefill legs that this replica has under way, per pod.";
    PodRunning "tandem_pod_decode_running" Gauge POD_NAME,
        "Requests that this replica has handed over to the pod and that have not ended.";
    PodPending "tandem_pod_decode_pending" Gauge POD_NAME,
        "Requests charged to the pod whose prefill leg is under way.";
    TokenActive "pd_token_load_active_tokens" Gauge POD_NAME,
        "Prompt tokens (request cost included) of the prefill requests that the pod is computing, as charged by the policies that count tokens. Gone when the pod is, or had no charge for a minute.";
    TokenKv "pd_token_load_kv_tokens" Gauge POD_NAME,
        "The same of all requests whose KV blocks the prefill pod holds.";
    TokenDecode "pd_token_load_decode_tokens" Gauge POD_NAME,
        "Prompt tokens of the requests outstanding on the decode pod, as charged by `token_load`.";
    TokenStranded "tandem_token_load_stranded_tokens" Gauge POD_NAME,
        "The part of `pd_token_load_kv_tokens` whose request is over but whose decode pod never took the blocks: they stay until their lease ends.";
    TokenForced "tandem_token_load_forced_releases_total" Counter &["side"],
        "Token charges that the janitor took back because their request showed no activity for longer than the TTL.";
    TokenSessions "tandem_token_load_sessions" Gauge &[],
        "Sessions whose last prompt size is remembered.";
    PodMetricsAge "tandem_pod_metrics_age_seconds" Decimal POD_NAME,
        "Time since the pod's engine metrics were scraped; absent while they never were.";
    PlaneConnected "tandem_state_plane_connected" Gauge &[],
        "1 while there is a connection to Redis; 0 without one, and where Redis is not configured.";
    PlaneStaleness "tandem_state_plane_staleness_seconds" Decimal &["model"],
        "Time since this replica's view of the others' work was known to be whole; infinite before the first.";
    PlaneMembers "tandem_state_plane_members" Gauge &["model"],
        "Replicas that share the model's ledger, as last looked up; this one included.";
    PlaneClaiming "tandem_state_plane_claiming" Gauge &["model"],
        "1 while decisions are committed in Redis.";
    PlaneSyncs "tandem_state_plane_syncs_total" Counter &["outcome"],
        "Publications that were answered (`done`), not answered in time (`late`) or failed (`failed`).";
    PlaneBytes "tandem_state_plane_bytes_total" Counter &["direction"],
        "Bytes of keys and arguments sent to Redis with scripts, and of the ledger's answers received.";
    PlanePublished "tandem_state_plane_published_total" Counter &["model"],
        "Pods whose changed work this replica has published.";
    PlaneReceived "tandem_state_plane_received_total" Counter &["model"],
        "Pods whose changed work of others this replica was told.";
    PlaneResyncs "tandem_state_plane_resyncs_total" Counter &["model"],
        "Times that the view of the others was read anew from the start.";
    PlaneReaped "tandem_state_plane_reaped_total" Counter &["model"],
        "Shares of dead replicas that this one took out of the ledger.";
    PlaneGaps "tandem_state_plane_gaps_total" Counter &["model"],
        "Announcements that were missed; the next publication makes it good.";
    PlaneJoins "tandem_state_plane_joins_total" Counter &["model"],
        "Times that this replica became a member of the ledger.";
    KubernetesSilence "tandem_kubernetes_silence_seconds" Decimal &["resource"],
        "Time since the API server last said anything about the resource, bookmarks included; of several namespaces, the longest. Absent before the first word.";
    KubernetesObjects "tandem_kubernetes_objects" Gauge &["resource"],
        "Objects that are known: of pods, those that name a model.";
    KubernetesLists "tandem_kubernetes_lists_total" Counter &["resource", "reason"],
        "Lists that were begun: the `first`, after a version had `gone` (410) or the watch had been silent (`stall`), `periodic` ones, and after a list or a watch had `failed`. What is tried again is counted as `failed`, not a second time for its first reason.";
    KubernetesFailures "tandem_kubernetes_failures_total" Counter &["resource", "verb", "reason"],
        "Lists and watches that failed: `unauthorized` (401), `forbidden` (403), `absent` (404), `gone` (410), `throttled` (429), `refused` (any other status), `unreachable` (connection, TLS, credentials), `late`, `unreadable`; watches that were `closed` as soon as they were open, or silent (`stall`).";
    KubernetesEvents "tandem_kubernetes_events_total" Counter &["resource", "event"],
        "Lines of watches: objects that `changed` or were `deleted`, objects that are none of the gateway's business (`foreign`), `bookmark`s, and what is `unreadable`.";
    Findings "tandem_findings_total" Counter &["direction"],
        "Prefixes, session sizes and failing pods that this replica `told` others, or `heard` from them.";
    FindingsDropped "tandem_findings_dropped_total" Counter &[],
        "The same that could not be told, or not be read.";
    Claims "tandem_claims_total" Counter &["outcome"],
        "Claims that Redis answered: `granted`, or to be decided `again` because another replica had charged the same pod.";
    ClaimFallbacks "tandem_claim_fallbacks_total" Counter &["reason"],
        "Requests that went on without a claim: `late`, `failed`, `not_member`, `overtaken`, `queue_full` or `too_often`.";
    TlsReloads "tandem_tls_reloads_total" Counter &["listener", "result"],
        "Changes of a listener's TLS files: `done`, new connections get the new ones; `failed`, they cannot be used, and what was in force stays. Listeners are `grpc`, `http` and `front`.";
    TlsExpiry "tandem_tls_certificate_expiry_timestamp_seconds" Gauge &["listener"],
        "When the certificate that the listener presents ends, seconds since the Unix epoch.";
    TlsHandshakeFailures "tandem_tls_handshake_failures_total" Counter &["listener", "reason"],
        "TLS handshakes that came to nothing: `client_certificate` (none, or none of our authorities), `refused` (by the client, as a rule for our certificate), `protocol` (no TLS, or nothing in common), `closed` (by the client), `timeout` (10 s), `crowded` (the oldest of 512 at once makes room).";
    ClaimsStopped "tandem_claims_stopped_total" Counter &[],
        "Times that claims were given up until Redis was quick again.";
}
