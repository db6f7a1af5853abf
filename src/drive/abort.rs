//! Telling engines that nobody waits for a request any more (`engine-protocols`, section 3.6).

use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body_util::BodyExt;

use super::Driver;
use crate::engines::leg::EngineClient;
use crate::exchange::AbortPlan;
use crate::telemetry::AbortResult;

const PATH: &str = "/abort_request";

impl Driver {
    /// Makes the calls in a task of their own: the request that they are about has ended, or is about to.
    pub(super) fn abort(&self, plan: AbortPlan) {
        let AbortPlan { targets, body, timeout, retry_delay, trigger } = plan;
        for target in targets {
            let (client, world) = (self.client.clone(), Arc::clone(&self.world));
            let (cut, body) = (self.stops.cut.child_token(), body.clone());
            self.tasks.spawn(async move {
                let calls = async {
                    for delay in std::iter::once(None).chain(retry_delay.map(Some)) {
                        if let Some(delay) = delay {
                            tokio::time::sleep(delay).await;
                        }
                        let call = tokio::time::timeout(timeout, call(&client, &target, body.clone()));
                        let result = if call.await == Ok(true) { AbortResult::Ok } else { AbortResult::Error };
                        world.metrics.decode_aborted(result, trigger);
                    }
                };
                tokio::select! {
                    () = calls => {}
                    () = cut.cancelled() => {}
                }
            });
        }
    }
}

/// Whether the pod took it. It says 200 also to an id that it does not know.
async fn call(client: &EngineClient, target: &str, body: Bytes) -> bool {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    match client.post(target, PATH, headers, body).await {
        Ok(response) => {
            let ok = response.status() == StatusCode::OK;
            // Read to its end, so that the connection can be used again.
            ok && response.into_body().collect().await.is_ok()
        }
        Err(_) => false,
    }
}
