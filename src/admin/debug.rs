//! `/debug/fleet` as JSON: what routing sees.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::AdminState;
use crate::bands::ProfilePlan;
use crate::clock::Tick;
use crate::fleet::{Home, Model, Pod, Role, Roleset};
use crate::load::HealthView;

pub(super) fn fleet(state: &AdminState) -> Value {
    let snapshot = state.fleet.load();
    let now = state.clock.now();
    let models: BTreeMap<&str, Value> =
        snapshot.models.iter().map(|(name, model)| (&**name, show_model(model, now, state))).collect();
    let settings: Vec<Value> = state
        .report
        .settings
        .iter()
        .map(|setting| json!({"name": setting.name, "value": setting.value, "origin": setting.origin.name()}))
        .collect();
    json!({
        "replica": &*state.replica,
        "version": env!("CARGO_PKG_VERSION"),
        "draining": state.readiness.is_draining(),
        "snapshot_version": snapshot.version,
        "models": models,
        "problems": (state.problems)(),
        "config": {
            "errors": state.report.config_errors,
            "warnings": state.report.warnings,
            "notes": state.report.notes,
            "settings": settings,
        },
    })
}

fn show_model(model: &Model, now: Tick, state: &AdminState) -> Value {
    let rolesets: Vec<Value> = model.rolesets.iter().map(show_roleset).collect();
    let partial: Vec<Value> = model
        .partial
        .iter()
        .map(|roleset| json!({"name": &*roleset.name, "prefill": roleset.prefill, "decode": roleset.decode}))
        .collect();
    // Each pod is shown once, with its home.
    let own: &[Arc<Pod>] = if model.is_alias() { &[] } else { &model.pods };
    let pods: Vec<Value> = own.iter().map(|pod| show_pod(pod, now, state)).collect();
    json!({
        "alias_of": if let Home::Of(home) = &model.home { Some(&**home) } else { None },
        "instances": model.is_alias().then(|| names(&model.pods)),
        "not_up": model.claim.map(|claim| format!("{claim:?}").to_lowercase()),
        "routable_pods": model.routable.len(),
        "rolesets": rolesets,
        "partial_rolesets": partial,
        "standalone": names(&model.standalone),
        "locked_strategy": model.config.as_ref().and_then(|config| config.locked_strategy.as_deref()),
        "profiles": model.config.as_ref().map(|config| config.profiles.keys().map(|name| &**name).collect::<Vec<_>>()),
        "bands": model.bands.plans().iter().map(show_bands).collect::<Vec<_>>(),
        "config_pod": model.config_pod.as_ref().map(ToString::to_string),
        "config_disagreements": model.config_disagreements,
        "config_differing_pods": model.config_differing.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "pods": pods,
        "failing_pairs": show_pairs(model, now),
    })
}

/// The pairs that have failed and have not made up for it.
fn show_pairs(model: &Model, now: Tick) -> Vec<Value> {
    let name = |slot: u32| {
        let pod = model.pods.iter().find(|pod| pod.state.slot == slot);
        pod.map_or_else(|| format!("gone (slot {slot})"), |pod| pod.spec.key.to_string())
    };
    let pairs = model.pairs.list(now);
    pairs
        .iter()
        .map(|pair| {
            let health = show_health(pair.health);
            json!({"prefill": name(pair.prefill), "decode": name(pair.decode), "health": health})
        })
        .collect()
}

/// `ejected_for_s` is null for who is not ejected, and 0 for one that waits for its probe, or for the probe's verdict.
fn show_health(health: HealthView) -> Value {
    json!({
        "consecutive_failures": health.failures,
        "ejected_for_s": health.ejected_for.map(|left| left.as_secs_f64()),
        "ejections_in_a_row": health.streak,
        "probing": health.probing,
    })
}

/// `max` is null for a band without end.
fn show_bands(live: &ProfilePlan) -> Value {
    let bands: Vec<Value> = live
        .plan
        .bands()
        .map(|band| json!({"roleset": &**band.roleset, "min": band.min, "max": (band.max < u64::MAX).then_some(band.max)}))
        .collect();
    json!({"profile": live.profile.as_deref(), "mode": live.plan.mode().name(), "bands": bands})
}

fn show_roleset(roleset: &Roleset) -> Value {
    json!({
        "name": &*roleset.name,
        "prefill": names(&roleset.prefill),
        "decode": names(&roleset.decode),
        "prefill_replicas": roleset.prefill_replicas,
        "decode_replicas": roleset.decode_replicas,
    })
}

fn names(pods: &[Arc<Pod>]) -> Vec<String> {
    pods.iter().map(|pod| pod.spec.key.to_string()).collect()
}

fn show_pod(pod: &Pod, now: Tick, state: &AdminState) -> Value {
    let spec = &pod.spec;
    let load = pod.state.load.view();
    let total = pod.state.load.total(now);
    let signals = pod.state.signals.load();
    let role = match spec.role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Other => "other",
    };
    json!({
        "name": spec.key.to_string(),
        "uid": &*spec.uid,
        "restarts": spec.restarts,
        "slot": pod.state.slot,
        "role": role,
        "roleset": spec.roleset.as_deref(),
        "replica_index": spec.replica_index.as_deref(),
        "engine": spec.engine.name(),
        "address": &*pod.address,
        "metric_address": spec.metric_address(),
        "ready": spec.ready,
        "terminating": spec.terminating,
        "draining": spec.draining,
        "rank": spec.rank,
        "tls": spec.tls,
        "pd": spec.pd,
        "routable": spec.routable() && spec.serves_http,
        "serves_http": spec.serves_http,
        "also_serves": spec.also.iter().map(|name| &**name).collect::<Vec<_>>(),
        "has_config": spec.config.is_some(),
        "in_flight": {
            "prefills": load.prefills,
            "decodes_pending": load.pending,
            "decodes_running": load.running,
            "completed": load.completed,
        },
        // What other replicas last told of theirs.
        "others": {
            "prefills": total.prefills.saturating_sub(load.prefills),
            "decodes_pending": total.pending.saturating_sub(load.pending),
            "decodes_running": total.running.saturating_sub(load.running),
            "age_ms": pod.state.load.remote.age(now).map(|age| age.as_secs_f64() * 1000.0),
        },
        "health": show_health(pod.state.health.view(now)),
        "signals": {
            "age_ms": signals.at.map(|at| now.since(at).as_secs_f64() * 1000.0),
            "fresh": signals.fresh(now, state.max_metric_age),
            "running": signals.running,
            "foreign_running": signals.foreign_running,
            "waiting": signals.waiting,
            "prefill_prealloc_queue": signals.prefill_prealloc_queue,
            "decode_prealloc_queue": signals.decode_prealloc_queue,
            "kv_usage": signals.kv_usage,
            "generation_tps": signals.generation_tps,
            "prompt_tps": signals.prompt_tps,
            "prefill_seconds_mean": signals.prefill_seconds_mean,
            "drain_rate": signals.drain_rate,
        },
    })
}
