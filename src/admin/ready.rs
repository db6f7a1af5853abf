//! Whether this replica wants traffic.

use std::sync::atomic::{AtomicBool, Ordering};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Value, json};

use super::AdminState;
use crate::fleet::Snapshot;

/// Set once, when the replica begins to go away. The gRPC health service follows it as well.
#[derive(Debug, Default)]
pub struct Readiness {
    draining: AtomicBool,
}

impl Readiness {
    /// The replica goes away: it wants no new traffic.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// True from [`Readiness::drain`] on.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

/// Whether [`readyz`] says yes.
pub(super) fn wants_traffic(readiness: &Readiness, snapshot: &Snapshot) -> bool {
    !readiness.is_draining() && snapshot.version != 0
}

/// 503 while draining and before the first snapshot of the fleet. An empty fleet and configuration errors are listed,
/// but are no reason to refuse traffic: then this replica answers requests with an error that says what is missing,
/// which is more than the proxy in front of it could.
pub(super) async fn readyz(State(state): State<AdminState>) -> (StatusCode, Json<Value>) {
    let snapshot = state.fleet.load();
    let routable: usize = snapshot.homes().map(|model| model.routable.len()).sum();
    let draining = state.readiness.is_draining();
    let mut reasons = Vec::new();
    if draining {
        reasons.push("draining".to_owned());
    }
    if snapshot.version == 0 {
        reasons.push("no snapshot of the fleet yet".to_owned());
    }
    let words = state.cluster.as_ref().map(|cluster| cluster.words()).unwrap_or_default();
    // Once there was a snapshot, this replica serves on it, whatever becomes of the API server.
    if snapshot.version == 0 {
        reasons.extend(words.reasons);
    }
    let mut notes: Vec<String> = Vec::new();
    if snapshot.version != 0 && routable == 0 {
        notes.push("no routable pods".to_owned());
    }
    let problems = (state.problems)();
    if state.report.config_errors > 0 || !problems.is_empty() {
        notes.push("configuration errors".to_owned());
    }
    notes.extend(words.notes);
    notes.extend(super::state::notes(&state.plane.status(state.clock.now())));
    let ready = wants_traffic(&state.readiness, &snapshot);
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let detail = json!({
        "ready": ready,
        "reasons": reasons,
        "notes": notes,
        "draining": draining,
        "snapshot_version": snapshot.version,
        "models": snapshot.models.len(),
        "routable_pods": routable,
        "config_errors": state.report.config_errors,
        "config_warnings": state.report.warnings,
        "problems": problems,
    });
    (status, Json(detail))
}
