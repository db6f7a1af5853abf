//! Telling engines that nobody waits for a request any more (`engine-protocols`, section 3.6).

use std::sync::Arc;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, StatusCode};
use http_body_util::{BodyExt, Limited};
use opentelemetry::trace::SpanContext;

use super::Driver;
use crate::engines::leg::EngineClient;
use crate::exchange::AbortPlan;
use crate::telemetry::{AbortResult, Branch, LegSpan};

const PATH: &str = "/abort_request";

/// Longest answer to an abort that is read. SGLang answers with an empty body.
const MAX_ABORT_ANSWER_BYTES: usize = 4096;

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
                        let key = world.knobs.engine_auth.authorization.as_ref();
                        let call = call(&client, &target, &mut span, key, body.clone());
                        let call = tokio::time::timeout(timeout, call);
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
async fn call(
    client: &EngineClient,
    target: &str,
    span: &mut LegSpan,
    authorization: Option<&HeaderValue>,
    body: Bytes,
) -> Result<(), &'static str> {
    let mut headers = span.headers().clone();
    headers.extend(authorization.map(|value| (AUTHORIZATION, value.clone())));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let response = client.post(target, PATH, headers, body).await.map_err(|_| "transport")?;
    let status = response.status();
    span.answered(status.as_u16());
    if status != StatusCode::OK {
        return Err("http_status");
    }
    // Read to its end, so that the connection can be used again; what is longer than any answer costs the connection.
    let body = Limited::new(response.into_body(), MAX_ABORT_ANSWER_BYTES);
    #[expect(clippy::disallowed_methods, reason = "limited above")]
    body.collect().await.map(|_| ()).map_err(|_| "bad_response")
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// What a pod that answers without an end got rid of.
    #[tokio::test]
    async fn an_answer_without_an_end_is_left_unread() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target: Arc<str> = listener.local_addr().unwrap().to_string().into();
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = [0; 4096];
            let _ = stream.read(&mut head).await.unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
            let chunk = [b"4000\r\n".as_slice(), &[b'x'; 0x4000], b"\r\n"].concat();
            let mut written = 0usize;
            while stream.write_all(&chunk).await.is_ok() {
                written += chunk.len();
            }
            written
        };
        let client = EngineClient::new();
        let mut span = Branch::default().abort(&target, PATH, 0, None);
        let both = async { tokio::join!(call(&client, &target, &mut span, None, Bytes::from_static(b"{}")), serve) };
        let (result, written) = tokio::time::timeout(std::time::Duration::from_secs(30), both).await.unwrap();
        assert_eq!(result, Err("bad_response"));
        // What the kernel takes for the two of them.
        assert!(written < 64 << 20, "{written}");
    }
}
