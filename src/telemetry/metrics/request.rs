//! A request enters and ends.

use std::sync::Arc;
use std::time::Duration;

use super::prefill::status_code;
use super::{Metrics, UNKNOWN_MODEL};
use crate::telemetry::buckets::Buckets;
use crate::telemetry::durations::{Durations, millis};
use crate::telemetry::family::Cell;
use crate::telemetry::names::{Metric, Part};
use crate::telemetry::{Outcome, RequestRecord, SampledTrace};

/// One request in flight: the gauges go up on creation and down on drop.
#[derive(Debug)]
pub struct InFlight {
    metrics: Arc<Metrics>,
    all: Cell,
    model: Option<Cell>,
}

impl InFlight {
    /// The request turned out to be for this model, which the fleet knows. Only the first call counts.
    pub fn set_model(&mut self, model: &str) {
        if self.model.is_none() {
            let cell = self.metrics.series(Metric::ModelInFlight, &[model]);
            cell.add(1);
            self.model = Some(cell);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.all.subtract(1);
        if let Some(model) = &self.model {
            model.subtract(1);
        }
    }
}

impl Metrics {
    /// A request enters. `model` only if the fleet knows it; it can be told later.
    pub fn enter(self: &Arc<Self>, model: Option<&str>) -> InFlight {
        let all = self.series(Metric::InFlight, &[]);
        all.add(1);
        let mut in_flight = InFlight { metrics: Arc::clone(self), all, model: None };
        if let Some(model) = model {
            in_flight.set_model(model);
        }
        in_flight
    }

    /// A request ended: counters, buckets and its one log line. Called once per request. With `trace`, it becomes the
    /// exemplar of its buckets.
    pub fn finish(&self, record: &RequestRecord, trace: Option<SampledTrace>) {
        // As the reference: what names no model is no request to one. Envoy has its own account of it.
        if record.outcome == Outcome::Passed {
            tracing::debug!(target: "tandem::request", request_id = record.request_id.as_str(), "passed to Envoy's routes");
            return;
        }
        let durations = Durations::of(record);
        let model = record.model.as_deref().unwrap_or(UNKNOWN_MODEL);
        self.count_request(record, model);
        if record.outcome == Outcome::Success {
            let told = self.told_apart(record, model);
            self.count_usage(record, &told);
            self.count_durations(&durations, model, record.ttft_threshold, &told, trace);
        }
        if !record.handoff.is_empty() {
            self.count(Metric::Handoff, &[model, record.handoff], 1);
        }
        log(record, &durations);
    }

    fn count_request(&self, record: &RequestRecord, model: &str) {
        let replica = &*self.gateway_pod;
        match record.target_pod.as_deref() {
            Some(pod) => self.count(
                Metric::RequestTotal,
                &[
                    replica,
                    &pod.namespace,
                    &pod.pod,
                    &pod.model,
                    &pod.engine_type,
                    &pod.roleset,
                    &pod.role,
                    &pod.role_replica_index,
                ],
                1,
            ),
            None => self.count(Metric::RequestTotal, &[replica, "", "", model, "", "", "", ""], 1),
        }
        let metric = if record.outcome == Outcome::Success { Metric::ModelSuccess } else { Metric::ModelFail };
        let code = match record.outcome {
            Outcome::ClientGone => "499".into(),
            Outcome::Shutdown => "503".into(),
            Outcome::EngineStatus(code) => status_code(code),
            _ => status_code(record.status),
        };
        self.count(metric, &[model, replica, record.outcome.label(), &code], 1);
    }

    /// What tells the token and time counters of a request apart, before the last label: the model that was asked for, or
    /// with it the labels of the pod that answered; empty when that is not known.
    fn told_apart<'a>(&self, record: &'a RequestRecord, model: &'a str) -> Vec<&'a str> {
        if !self.labels.per_pod() {
            return vec![model];
        }
        match record.target_pod.as_deref() {
            Some(pod) => {
                vec![
                    &pod.namespace,
                    &pod.pod,
                    model,
                    &pod.engine_type,
                    &pod.roleset,
                    &pod.role,
                    &pod.role_replica_index,
                ]
            }
            None => vec!["", "", model, "", "", "", ""],
        }
    }

    fn count_last(&self, metric: Metric, told: &[&str], last: &str) {
        // Seven labels of a pod at most.
        let mut values: [&str; 8] = [last; 8];
        if let Some(first) = values.get_mut(..told.len()) {
            first.copy_from_slice(told);
            self.count(metric, values.get(..=told.len()).unwrap_or_default(), 1);
        }
    }

    fn count_usage(&self, record: &RequestRecord, told: &[&str]) {
        let has_usage = if record.usage.is_some() { "true" } else { "false" };
        self.count_last(Metric::RequestsWithUsage, told, has_usage);
        let Some(usage) = record.usage else { return };
        self.count_last(Metric::PromptTokenBucket, told, Buckets::of_tokens(usage.prompt_tokens));
        self.count_last(Metric::CompletionTokenBucket, told, Buckets::of_tokens(usage.completion_tokens));
        self.count(Metric::InputTokens, told, usage.prompt_tokens);
        self.count(Metric::OutputTokens, told, usage.completion_tokens);
    }

    fn count_durations(
        &self,
        durations: &Durations,
        model: &str,
        threshold: Option<Duration>,
        told: &[&str],
        trace: Option<SampledTrace>,
    ) {
        let parts = [
            (Metric::RoutingTime, Part::Routing, durations.routing),
            (Metric::PrefillTime, Part::Prefill, durations.prefill),
            (Metric::KvTransferTime, Part::KvTransfer, durations.kv_transfer),
            (Metric::Ttft, Part::FirstToken, durations.ttft),
            (Metric::Tpot, Part::OutputToken, durations.tpot),
            (Metric::DecodeTime, Part::Decode, durations.decode),
        ];
        for (metric, part, duration) in parts {
            if let Some(duration) = duration {
                self.count_last(metric, told, Buckets::of_duration(duration));
                self.observe(part, model, duration, trace);
            }
        }
        if let Some(total) = durations.total {
            self.count_last(Metric::TotalTime, told, Buckets::of_total(total));
            self.observe(Part::Whole, model, total, trace);
        }
        let threshold = threshold.unwrap_or(self.ttft_threshold);
        if durations.ttft.is_some_and(|ttft| ttft > threshold) {
            self.count(Metric::SlowFirstToken, &[model], 1);
        }
    }

    fn observe(&self, part: Part, model: &str, duration: Duration, trace: Option<SampledTrace>) {
        // The histograms stand in the order of the enum, and all of them do.
        if let Some(histogram) = self.parts.get(part as usize) {
            histogram.observe(model, duration, trace);
        }
    }
}

/// The one log line of a request. Never a prompt, a token of an answer, or a secret.
fn log(record: &RequestRecord, durations: &Durations) {
    let name = |pod: &crate::telemetry::PodLabels| format!("{}/{}", pod.namespace, pod.pod);
    let round = |millis: f64| (millis * 1000.0).round() / 1000.0;
    tracing::info!(
        target: "tandem::request",
        request_id = record.request_id.as_str(),
        client_request_id = record.client_request_id.as_deref(),
        endpoint = record.endpoint,
        model = record.model.as_deref(),
        outcome = record.outcome.label(),
        status = record.status,
        strategy = record.strategy.as_deref(),
        prefill_policy = record.policies.map(|(prefill, _)| prefill),
        decode_policy = record.policies.map(|(_, decode)| decode),
        single_reason = record.single_reason,
        roleset = record.roleset.as_str(),
        prefill_pod = record.prefill_pod.as_deref().map(name),
        target_pod = record.target_pod.as_deref().map(name),
        handoff = record.handoff,
        stream = record.stream,
        body_bytes = record.body_bytes,
        answer_bytes = record.answer_bytes,
        prompt_tokens = record.usage.map(|usage| usage.prompt_tokens),
        completion_tokens = record.usage.map(|usage| usage.completion_tokens),
        routing_ms = millis(durations.routing).map(round),
        prefill_ms = millis(durations.prefill).map(round),
        kv_transfer_ms = millis(durations.kv_transfer).map(round),
        ttft_ms = millis(durations.ttft).map(round),
        tpot_ms = millis(durations.tpot).map(round),
        decode_ms = millis(durations.decode).map(round),
        total_ms = millis(durations.total).map(round),
        "request ended"
    );
}
