//! Telling engines that nobody waits for a request any more (`engine-protocols`, section 3.6).

use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};
use http_body_util::BodyExt;
use opentelemetry::trace::SpanContext;

use super::Driver;
use crate::engines::leg::EngineClient;
use crate::exchange::AbortPlan;
use crate::telemetry::{AbortResult, Branch, LegSpan};

const PATH: &str = "/abort_request";

impl Driver {
    /// Makes the calls in a task of their own: the request that they are about has ended, or is about to. Each call has a span under `branch`, linked to the leg that it is about.
    pub(super) fn abort(&self, plan: AbortPlan, branch: &Branch, legs: &[Option<SpanContext>]) {
        let AbortPlan { targets, body, timeout, retry_delay, trigger } = plan;
        for (index, target) in targets.into_iter().enumerate() {
            let (client, world) = (self.client.clone(), Arc::clone(&self.world));
            let (cut, body) = (self.stops.cut.child_token(), body.clone());
            let (branch, leg) = (branch.clone(), legs.get(index).cloned().flatten());
            self.tasks.spawn(async move {
                let calls = async {
                    for (resent, delay) in (0..).zip(std::iter::once(None).chain(retry_delay.map(Some))) {
                        if let Some(delay) = delay {
                            tokio::time::sleep(delay).await;
                        }
                        let mut span = branch.abort(&target, PATH, resent, leg.as_ref());
                        span.attribute("tandem.abort.trigger", trigger.label());
                        let call = tokio::time::timeout(timeout, call(&client, &target, &mut span, body.clone()));
                        let failure = call.await.unwrap_or(Err("timeout")).err();
                        let result = if failure.is_none() { AbortResult::Ok } else { AbortResult::Error };
                        match failure {
                            None => span.succeed(),
                            Some(reason) => span.fail(reason),
                        }
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

/// Whether the pod took it, or why not. It says 200 also to an id that it does not know.
async fn call(client: &EngineClient, target: &str, span: &mut LegSpan, body: Bytes) -> Result<(), &'static str> {
    let mut headers = span.headers().clone();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let response = client.post(target, PATH, headers, body).await.map_err(|_| "transport")?;
    let status = response.status();
    span.answered(status.as_u16());
    if status != StatusCode::OK {
        return Err("http_status");
    }
    // Read to its end, so that the connection can be used again.
    response.into_body().collect().await.map(|_| ()).map_err(|_| "bad_response")
}
