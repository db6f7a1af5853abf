//! Runs a generation request and answers it, whole or as a stream.

use std::sync::Arc;

use super::call::{self, Api, Call};
use super::failure::Failure;
use super::handoff;
use super::shape::Shape;
use crate::answer::{DONE, Reply};
use crate::fault::Fault;
use crate::flow::{self, Ending, Frames};
use crate::sequence::{Broken, Emitted, Finished};
use crate::state::Core;

/// Answers a generation request.
pub(crate) async fn answer(
    core: &Arc<Core>,
    api: Api,
    body: &[u8],
    seq: u64,
    fault: Option<&Fault>,
) -> Result<Reply, Failure> {
    let mut call = call::read(core, api, body, seq, fault)?;
    let jobs = std::mem::take(&mut call.jobs);
    let shape = Shape::new(&call);
    let iteration = Iteration(core.clone());
    if !call.stream {
        let results = flow::whole(core, jobs, iteration).await.map_err(failure)?;
        let offered = results.first().and_then(|result| handoff::offered(core, &call.leg, result));
        return Ok(Reply::json(200, shape.whole(&call, &results, offered.as_deref())));
    }
    let running = flow::start(core, jobs, iteration);
    let frames = Stream { call, shape };
    Ok(Reply::Stream(Box::new(move |mut outlet| {
        Box::pin(async move {
            // An injected end has sent everything there is to send.
            if running.write(&frames, &mut outlet).await.is_ok() {
                outlet.finish().await;
            }
        })
    })))
}

/// Statistics are written when a request ends.
struct Iteration(Arc<Core>);

impl Drop for Iteration {
    fn drop(&mut self) {
        self.0.iterations.note(&self.0);
    }
}

/// Nearly every exception is a 400 here, also those that are not the client's fault.
fn failure(broken: Broken) -> Failure {
    match broken {
        Broken::KvLoad => Failure::meaning("Error in kv cache transfer for generation request"),
        Broken::Alone => Failure::internal("Request timed out while waiting for its KV cache transfer"),
        Broken::Unreachable => Failure::internal("Cannot connect to the context worker"),
        Broken::Aborted | Broken::EngineDead | Broken::Unheard => Failure::internal("The executor has shut down."),
    }
}

struct Stream {
    call: Call,
    shape: Shape,
}

impl Frames for Stream {
    fn opening(&self, index: usize) -> Vec<String> {
        if self.call.api == Api::Chat { vec![self.shape.role(index)] } else { Vec::new() }
    }

    fn token(&self, token: &Emitted) -> Vec<String> {
        vec![self.shape.token(self.call.api, token)]
    }

    fn closing(&self, results: &[Finished]) -> Vec<String> {
        if self.call.include_usage { vec![self.shape.usage_event(&self.call, results)] } else { Vec::new() }
    }

    fn failed(&self, broken: Broken, _opened: bool) -> Ending {
        if self.call.api == Api::Chat {
            return Ending::Cut;
        }
        let message = serde_json::to_string(failure(broken).text()).unwrap_or_default();
        let event =
            format!("data: {{\"error\": {{\"message\": {message}, \"type\": \"server_error\", \"code\": null}}}}\n\n");
        Ending::Events(vec![event, DONE.to_owned()])
    }
}
