//! Waking sleeping models: the runtime in the pod of a model claim is told that somebody asks for the model, as the
//! reference gateway tells it. Nobody waits for that; the request was answered with `Retry-After`.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};

use super::Driver;
use crate::engines::leg::{LegOutcome, LegRequest};
use crate::exchange::WakeCall;

const PATH: &str = "/v1/runtime/models/wake";
/// Waking loads a model's weights back into a GPU.
const TIMEOUT: Duration = Duration::from_mins(2);
/// A pod and model that was told is not told again for so long, however soon it answers.
const PAUSE: Duration = Duration::from_secs(1);
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// Calls under way at once.
const MAX_CALLS: usize = 64;

/// The calls under way: a model of a pod is told once, however many ask for it.
#[derive(Debug, Default)]
pub(super) struct Wakes(Mutex<HashSet<(Arc<str>, Arc<str>)>>);

impl Wakes {
    /// `None`: there is no room. `Some(false)`: it is being told already.
    fn begin(&self, call: &WakeCall) -> Option<bool> {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (Arc::clone(&call.pod), Arc::clone(&call.model));
        if calls.contains(&key) {
            return Some(false);
        }
        (calls.len() < MAX_CALLS).then(|| calls.insert(key))
    }
}

/// A call under way.
struct Call {
    wakes: Arc<Wakes>,
    call: WakeCall,
}

impl Drop for Call {
    fn drop(&mut self) {
        let key = (Arc::clone(&self.call.pod), Arc::clone(&self.call.model));
        self.wakes.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
    }
}

impl Driver {
    /// Makes the call in a task of its own, unless it is under way.
    pub(super) fn wake(&self, call: WakeCall) {
        match self.wakes.begin(&call) {
            Some(true) => {}
            Some(false) => return,
            None => return self.world.metrics.model_woken("limit"),
        }
        let (client, world) = (self.client.clone(), Arc::clone(&self.world));
        let under_way = Call { wakes: Arc::clone(&self.wakes), call };
        let cut = self.stops.cut.child_token();
        self.tasks.spawn(async move {
            let told = async {
                let call = &under_way.call;
                let outcome = client.prefill(request(call)).await;
                let error = match outcome {
                    LegOutcome::Answered { status, .. } if status.is_success() => None,
                    LegOutcome::Answered { status, .. } => Some(format!("status {}", status.as_u16())),
                    LegOutcome::Failed { detail, .. } => Some(detail),
                };
                world.metrics.model_woken(if error.is_some() { "error" } else { "ok" });
                let model = &*call.model;
                if let Some(error) = error {
                    tracing::warn!(model, error, "a sleeping model could not be woken");
                } else {
                    tracing::info!(model, "a sleeping model was woken");
                }
                tokio::time::sleep(PAUSE).await;
            };
            tokio::select! {
                () = told => {}
                () = cut.cancelled() => {}
            }
            drop(under_way);
        });
    }
}

/// The call. Its operation id is new each time, so that a later sleep can be ended too.
fn request(call: &WakeCall) -> LegRequest {
    let operation = format!("gateway-wake/{}/{}/{}", call.pod, call.model, uuid::Uuid::new_v4());
    let body = serde_json::json!({"model_name": &*call.model, "operation_id": operation});
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    LegRequest {
        address: Arc::from(call.address.as_str()),
        path: PATH.to_owned(),
        headers,
        body: Bytes::from(body.to_string()),
        timeout: TIMEOUT,
        max_answer_bytes: MAX_ANSWER_BYTES,
    }
}
