//! `/debug/state`: what replicas tell one another, as this one sees it.

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::AdminState;
use crate::state::plane::{ModelMembers, ModelStatus, PlaneStatus};
use crate::telemetry::{Metrics, PlaneGauge};

pub(super) async fn state(State(state): State<AdminState>) -> Json<Value> {
    let members = state.plane.members().await;
    let status = state.plane.status(state.clock.now());
    Json(page(&status, &members))
}

fn page(status: &PlaneStatus, members: &[ModelMembers]) -> Value {
    let models: serde_json::Map<String, Value> = status
        .models
        .iter()
        .map(|model| {
            let members = members.iter().find(|members| members.model == model.model);
            (model.model.to_string(), show(model, members))
        })
        .collect();
    json!({
        "plane": status.kind,
        "grade": status.grade,
        "connected": status.connected,
        "sent_bytes": status.sent_bytes,
        "received_bytes": status.received_bytes,
        "models": models,
    })
}

fn show(model: &ModelStatus, members: Option<&ModelMembers>) -> Value {
    let leases: Vec<Value> = members
        .into_iter()
        .flat_map(|members| &members.leases)
        .map(|(member, left)| json!({"member": member, "lease_left_ms": left, "self": *member == model.member}))
        .collect();
    let counts = &model.counts;
    json!({
        "epoch": model.epoch,
        "member": model.member,
        "members": model.members,
        "leases": leases,
        "version": model.version,
        "view_age_ms": model.age.map(|age| age.as_millis()),
        "last_sync_us": model.last_sync.map(|took| took.as_micros()),
        "own_pods": model.own_pods,
        "remote_pods": model.remote_pods,
        "claiming": model.claiming,
        "syncs": counts.syncs,
        "failures": counts.failures,
        "joins": counts.joins,
        "resyncs": counts.resyncs,
        "published": counts.published,
        "received": counts.received,
        "missed_announcements": counts.gaps,
        "reaped": counts.reaped,
    })
}

/// Brings the metrics of the plane up to date.
pub(super) fn gauge(status: &PlaneStatus, metrics: &Metrics) {
    let models: Vec<PlaneGauge> = status
        .models
        .iter()
        .map(|model| PlaneGauge {
            model: model.model.clone(),
            staleness: model.age,
            members: u64::from(model.members),
            claiming: model.claiming,
            published: model.counts.published,
            received: model.counts.received,
            resyncs: model.counts.resyncs,
            reaped: model.counts.reaped,
            gaps: model.counts.gaps,
            joins: model.counts.joins,
        })
        .collect();
    metrics.set_plane(status.connected, [status.sent_bytes, status.received_bytes], &models);
}

/// What readiness has to say: a replica goes on without the plane, but somebody should know.
pub(super) fn notes(status: &PlaneStatus) -> Vec<String> {
    if status.kind != "redis" {
        return Vec::new();
    }
    let mut notes = Vec::new();
    if !status.connected {
        notes.push("no connection to Redis: balancing on what this replica knows itself".to_owned());
    }
    for model in &status.models {
        let old = model.age.is_none_or(|age| age > crate::load::FADES_AFTER);
        if old && status.connected {
            notes.push(format!("the view of the other replicas' work on model {} is out of date", model.model));
        }
    }
    notes
}
