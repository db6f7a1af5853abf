//! The HTTP port of operators: metrics, health, the list of models, and what the gateway believes about the fleet.
//!
//! Read-only, and without secrets: nothing here changes the gateway, and no client request comes this way. It may be
//! reached by anything in the cluster, unless `TANDEM_ADMIN_TOKEN` asks for a token.

mod accept;
mod debug;
mod decisions;
mod engines;
mod page;
mod ready;
mod state;
mod token;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::http::header::{CONTENT_TYPE, VARY};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router, middleware};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

pub use ready::Readiness;

use crate::clock::{Clock, Tick};
use crate::discovery::kubernetes::Cluster;
use crate::fleet::{Fleet, Model, Role, Snapshot};
use crate::knobs::{Report, Secret};
use crate::load::TokenLoad;
use crate::panics::guarded;
use crate::routing::Journal;
use crate::state::plane::StatePlane;
use crate::telemetry::{EjectedGauge, FleetGauges, Metrics, ModelGauge, PodGauge, PodLabels, TokenGauge};

/// Lists what is wrong with the fleet's manifests, one sentence each.
pub type Problems = Arc<dyn Fn() -> Vec<String> + Send + Sync>;

/// Brings those metrics up to date that others keep (prefix index, buffered bytes, dropped spans).
pub type BeforeMetrics = Arc<dyn Fn(&Metrics) + Send + Sync>;

/// What the pages show.
#[derive(Clone)]
pub struct AdminState {
    /// This replica's name.
    pub replica: Arc<str>,
    /// What operators must know (`TANDEM_ADMIN_TOKEN`).
    pub token: Option<Secret>,
    /// The fleet.
    pub fleet: Arc<Fleet>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Whether this replica wants traffic.
    pub readiness: Arc<Readiness>,
    /// Problems of the fleet's manifests.
    pub problems: Problems,
    /// The last decisions.
    pub journal: Arc<Journal>,
    /// How the configuration was read.
    pub report: Arc<Report>,
    /// For ages.
    pub clock: Clock,
    /// Age beyond which a pod's metrics count as unknown.
    pub max_metric_age: Duration,
    /// What this replica shares with others.
    pub plane: Arc<dyn StatePlane>,
    /// The Kubernetes cluster, where pods come from one.
    pub cluster: Option<Arc<Cluster>>,
    /// Called before each exposition.
    pub before_metrics: BeforeMetrics,
    /// One exposition at a time: a second look waits for the first.
    pub exposing: Arc<Semaphore>,
}

impl std::fmt::Debug for AdminState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdminState").finish_non_exhaustive()
    }
}

/// The pages.
pub fn router(state: AdminState) -> Router {
    let guarded = Router::new()
        .route("/metrics", get(metrics))
        .route("/debug/fleet", get(page::fleet))
        .route("/debug/decisions", get(decisions::decisions))
        .route("/debug/state", get(state::state))
        .route_layer(middleware::from_fn_with_state(state.clone(), token::guard));
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(ready::readyz))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .merge(guarded)
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .layer(middleware::from_fn(one_page_at_most))
        .with_state(state)
}

/// With hundreds of pods a page takes milliseconds, which no thread that serves requests has to spare.
async fn metrics(State(state): State<AdminState>, headers: HeaderMap) -> Response {
    let Ok(turn) = Arc::clone(&state.exposing).acquire_owned().await else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    let format = accept::wanted(&headers);
    let written = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        expose(&state, format)
    });
    match written.await {
        Ok(page) => ([(CONTENT_TYPE, format.content_type()), (VARY, "accept")], page).into_response(),
        Err(error) => {
            tracing::error!(%error, "the exposition failed");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

fn expose(state: &AdminState, format: accept::Format) -> String {
    (state.before_metrics)(&state.metrics);
    state::gauge(&state.plane.status(state.clock.now()), &state.metrics);
    state.metrics.set_config_errors(state.report.config_errors + (state.problems)().len());
    let snapshot = state.fleet.load();
    state.metrics.set_ready(ready::wants_traffic(&state.readiness, &snapshot));
    let mut gauges = gauges(&snapshot, state.clock);
    if state.metrics.labels().per_pod() {
        gauges.engines = engines::gauges(&snapshot, state.clock.now(), state.max_metric_age);
    }
    match format {
        accept::Format::Text => state.metrics.render(&gauges, state.clock.now()),
        accept::Format::OpenMetrics => state.metrics.render_openmetrics(&gauges, state.clock.now()),
    }
}

/// The fleet as the metrics show it.
fn gauges(snapshot: &Snapshot, clock: Clock) -> FleetGauges {
    let now = clock.now();
    let models = snapshot.models.values();
    let pods = snapshot.pods().filter_map(|pod| {
        let load = pod.state.load.view();
        // It ends, or has failed: once its requests are over, it has nothing to show.
        if pod.spec.terminating && load.in_flight() == 0 {
            return None;
        }
        // Whether anything is known of a pod matters where requests are sent to it.
        let looked_at = pod.spec.scraped() && pod.spec.routable();
        Some(PodGauge {
            namespace: Arc::clone(&pod.spec.key.namespace),
            name: Arc::clone(&pod.spec.key.name),
            prefills: load.prefills,
            running: load.running,
            pending: load.pending,
            tokens: token_gauge(pod.spec.role, &pod.state.load.tokens, now),
            metrics_age: pod.state.signals.load().at.filter(|_| looked_at).map(|at| now.since(at)),
        })
    });
    FleetGauges {
        snapshot_version: snapshot.version,
        pods: pods.collect(),
        engines: Vec::new(),
        rolesets: models
            .clone()
            .flat_map(|model| {
                model.rolesets.iter().map(|set| &set.name).chain(model.partial.iter().map(|set| &set.name))
            })
            .cloned()
            .collect(),
        models: models
            .map(|model| ModelGauge {
                name: Arc::clone(&model.name),
                // A pod counts once, however many data-parallel ranks it has.
                replicas: model.routable.iter().filter(|pod| pod.spec.rank == 0).count(),
                routable: routable_pods(model),
                rolesets_incomplete: model.partial.len(),
                config_disagreements: model.config_disagreements,
                // Of an alias they are counted with the model whose pods they are.
                ejected: (!model.is_alias()).then(|| EjectedGauge {
                    pods: model.pods.iter().filter(|pod| pod.state.health.ejected()).count(),
                    pairs: model.pairs.ejected(),
                }),
            })
            .collect(),
    }
}

/// The routable pods of a model that is their own, not another name for it.
fn routable_pods(model: &Model) -> Vec<PodLabels> {
    let pods = model.routable.iter().filter(|pod| pod.spec.rank == 0 && !model.is_alias());
    pods.map(|pod| pod.spec.metric_labels()).collect()
}

/// A pod without any charge for this long has no token series.
const TOKEN_SERIES_LINGER: Duration = Duration::from_mins(1);

fn token_gauge(role: Role, load: &TokenLoad, now: Tick) -> Option<TokenGauge> {
    let (view, touched) = (load.view(), load.touched()?);
    let shown = !view.is_zero() || now.since(touched) <= TOKEN_SERIES_LINGER;
    match role {
        Role::Prefill if shown => {
            Some(TokenGauge::Prefill { active: view.active, kv: view.kv, stranded: view.stranded })
        }
        Role::Decode if shown => Some(TokenGauge::Decode(view.decode)),
        _ => None,
    }
}

/// The process is alive; whether it wants traffic is [`ready::readyz`]'s business.
async fn healthz() -> &'static str {
    "ok\n"
}

async fn models(State(state): State<AdminState>) -> Json<Value> {
    Json(models_page(&state.fleet.load()))
}

async fn model(State(state): State<AdminState>, Path(id): Path<String>) -> impl IntoResponse {
    let (status, page) = model_page(&state.fleet.load(), &id);
    (status, Json(page))
}

/// The reference gateway's list of models (its section 1.1), which the HTTP front serves too.
pub fn models_page(snapshot: &Snapshot) -> Value {
    let names: BTreeSet<&str> = snapshot.models.keys().map(|name| &**name).collect();
    let data: Vec<Value> = names.into_iter().map(described).collect();
    json!({"object": "list", "data": data})
}

/// The same, or one model of it by its whole name: the answer of the HTTP front.
pub fn models_answer(snapshot: &Snapshot, id: Option<&str>) -> (StatusCode, Bytes) {
    let (status, page) = match id {
        None => (StatusCode::OK, models_page(snapshot)),
        Some(id) => model_page(snapshot, id),
    };
    (status, page.to_string().into())
}

fn model_page(snapshot: &Snapshot, id: &str) -> (StatusCode, Value) {
    if let Some((name, _)) = snapshot.models.get_key_value(id) {
        return (StatusCode::OK, described(name));
    }
    let shown: String = id.chars().take(128).collect();
    let message = format!("model {shown} does not exist");
    let error =
        json!({"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"});
    (StatusCode::NOT_FOUND, json!({"error": error}))
}

fn described(name: &str) -> Value {
    json!({"id": name, "object": "model", "created": 0, "owned_by": "aibrix"})
}

/// A page that panics costs just itself.
async fn one_page_at_most(request: Request, next: Next) -> Response {
    guarded(next.run(request)).await.unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

async fn method_not_allowed() -> impl IntoResponse {
    (StatusCode::METHOD_NOT_ALLOWED, Json(json!({"error": "method not allowed"})))
}

async fn not_found(uri: Uri) -> impl IntoResponse {
    let path: String = uri.path().chars().take(256).collect();
    (StatusCode::NOT_FOUND, Json(json!({"error": "not found", "path": path})))
}
