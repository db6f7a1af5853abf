//! `/debug/decisions`: the last selections and why they came out as they did.

use std::collections::HashMap;

use axum::Json;
use axum::extract::{Query, State};
use serde::Deserialize;
use serde_json::{Value, json};

use super::AdminState;
use crate::clock::Tick;
use crate::routing::{Considered, Decision, DecisionRecord, PromptLength, Target, Terms};

/// Names of living incarnations by slot.
type Names = HashMap<u32, String>;

/// What is asked for; nothing asks for everything.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Wanted {
    /// At most so many, the newest first.
    limit: Option<usize>,
    /// Those of one request only.
    request_id: Option<String>,
    /// Without the pods that were considered, which in a large fleet are nearly all there is to say.
    brief: bool,
}

pub(super) async fn decisions(State(state): State<AdminState>, Query(wanted): Query<Wanted>) -> Json<Value> {
    let snapshot = state.fleet.load();
    let names: Names = snapshot.pods().map(|pod| (pod.state.slot, pod.spec.key.to_string())).collect();
    let now = state.clock.now();
    let latest = state.journal.latest();
    let records: Vec<Value> = latest
        .iter()
        .filter(|record| wanted.request_id.as_ref().is_none_or(|id| *id == record.request_id))
        .take(wanted.limit.unwrap_or(usize::MAX))
        .map(|record| show_record(record, now, (!wanted.brief).then_some(&names), state.max_metric_age))
        .collect();
    Json(json!({"snapshot_version": snapshot.version, "decisions": records}))
}

/// Without `names`, the pods that were considered are left out.
fn show_record(record: &DecisionRecord, now: Tick, names: Option<&Names>, max_age: std::time::Duration) -> Value {
    let mut shown = json!({
        "age_ms": now.since(record.at).as_secs_f64() * 1000.0,
        "request_id": record.request_id,
        "model": &*record.model,
        "profile": record.profile.as_deref(),
        "snapshot_version": record.snapshot_version,
        "prompt_length": match record.length {
            PromptLength::Exactly(tokens) => json!({"tokens": tokens}),
            PromptLength::MoreThan(tokens) => json!({"more_than_tokens": tokens}),
            PromptLength::Unknown => Value::Null,
        },
        "prompt_tokens_by_size": record.prompt_tokens,
        "conflicts": record.conflicts,
        "charged_without_check": record.blind,
        "max_metrics_age_ms": max_age.as_secs_f64() * 1000.0,
    });
    let outcome = match &record.outcome {
        Ok(decision) => show_decision(decision, names),
        Err(error) => json!({"error": error.to_string()}),
    };
    if let (Some(shown), Value::Object(outcome)) = (shown.as_object_mut(), outcome) {
        shown.extend(outcome);
    }
    shown
}

fn show_decision(decision: &Decision, names: Option<&Names>) -> Value {
    let target = match &decision.target {
        Target::Pair { prefill, decode } => json!({
            "prefill": prefill.spec.key.to_string(),
            "decode": decode.spec.key.to_string(),
            "roleset": prefill.spec.roleset.as_deref(),
        }),
        Target::Single { pod, reason } => json!({"pod": pod.spec.key.to_string(), "reason": reason.name()}),
    };
    let explanation = &decision.explanation;
    let mut shown = json!({
        "strategy": decision.strategy.name(),
        "policies": decision.policies.map(|(prefill, decode)| json!({"prefill": prefill.name(), "decode": decode.name()})),
        "target": target,
        "steps": decision.steps(),
        "ejections_ignored": decision.ejections_ignored,
        "band": decision.band.as_ref().map(|band| json!({"roleset": &*band.roleset, "applied": band.applied})),
        "candidates": {"prefill": decision.candidates.0, "decode": decision.candidates.1},
        "scores": {
            "prefill": decision.scores.prefill,
            "decode": decision.scores.decode,
            "total": decision.scores.total,
            "prefill_divided_by": explanation.maxima.0,
            "decode_divided_by": explanation.maxima.1,
        },
        "ties": {
            "prefill": explanation.ties.prefill,
            "decode": explanation.ties.decode,
            "total": explanation.ties.total,
        },
        "assumed_ahead": explanation.ahead,
        "charged_tokens": {"prefill": decision.tokens.prefill, "decode": decision.tokens.decode},
        "missing_signals": decision.missing.names().collect::<Vec<_>>(),
    });
    if let (Some(names), Some(shown)) = (names, shown.as_object_mut()) {
        let considered = |list: &[Considered]| list.iter().map(|one| show_considered(one, names)).collect::<Value>();
        shown.insert("prefill_pods".to_owned(), considered(&explanation.prefills));
        shown.insert("decode_pods".to_owned(), considered(&explanation.decodes));
    }
    shown
}

fn show_considered(one: &Considered, names: &Names) -> Value {
    let mut shown = json!({
        "pod": names.get(&one.slot).cloned().unwrap_or_else(|| format!("gone (slot {})", one.slot)),
        "fate": one.fate.name(),
        "score": one.score,
        "requests": one.count,
        "metrics_age_ms": one.metrics_age.map(|age| age.as_secs_f64() * 1000.0),
        "ledger_age_ms": one.ledger_age.map(|age| age.as_secs_f64() * 1000.0),
    });
    let terms = match one.terms {
        Terms::Prefill { match_pct, active_tokens, kv_tokens, mean_prefill_seconds } => json!({
            "prefix_match_pct": match_pct,
            "active_tokens": active_tokens,
            "kv_tokens": kv_tokens,
            "mean_prefill_seconds": mean_prefill_seconds,
        }),
        Terms::Decode { throughput, drain, free_pct, tokens, generated, cold_start } => json!({
            "tokens_per_second": throughput,
            "drain_per_second": drain,
            "free_kv_pct": free_pct,
            "charged_tokens": tokens,
            "generated_tokens": generated,
            "cold_start": cold_start,
        }),
    };
    if let (Some(shown), Value::Object(terms)) = (shown.as_object_mut(), terms) {
        shown.extend(terms);
    }
    shown
}
