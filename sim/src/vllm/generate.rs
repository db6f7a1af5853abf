//! Runs a generation request and answers it, whole or as a stream.

use std::sync::Arc;

use http::request::Parts;

use super::call::{self, Api, Call};
use super::failure::Failure;
use super::handoff;
use super::shape::{Shape, Usage};
use crate::answer::Reply;
use crate::fault::Fault;
use crate::flow::{self, Ending, Frames};
use crate::prompt::Natural;
use crate::sequence::{Broken, Emitted, Finished};
use crate::state::Core;

/// Answers a generation request.
pub(crate) async fn answer(
    core: &Arc<Core>,
    api: Api,
    head: &Parts,
    body: &[u8],
    seq: u64,
    fault: Option<&Fault>,
) -> Result<Reply, Failure> {
    let mut call = call::read(core, api, head, body, seq).await?;
    if fault.is_some_and(|fault| fault.ends_at_once) {
        for job in &mut call.jobs {
            (job.rules.limit, job.rules.natural) = (job.rules.limit.max(2), Natural::After(1));
        }
    }
    let shape = Shape::new(core, &call);
    let jobs = std::mem::take(&mut call.jobs);
    if call.stream {
        let running = flow::start(core, jobs, ());
        let frames = Stream { call, shape };
        return Ok(Reply::Stream(Box::new(move |mut outlet| {
            Box::pin(async move {
                // An injected end has sent everything there is to send.
                if running.write(&frames, &mut outlet).await.is_ok() {
                    outlet.finish().await;
                }
            })
        })));
    }
    let results = flow::whole(core, jobs, ()).await.map_err(failure)?;
    // With several samples the last child's hand-off comes back, with several prompts the first prompt's.
    let handed = results.get(call.samples as usize - 1).and_then(|result| result.produced.as_ref());
    let offered = handoff::offered(core, handed, fault);
    Ok(Reply::json(200, shape.whole(&call, &results, &usage(&call, &results), offered.as_deref())))
}

fn failure(broken: Broken) -> Failure {
    match broken {
        Broken::EngineDead => Failure::engine_dead(),
        Broken::Unreachable | Broken::KvLoad | Broken::Alone | Broken::Aborted | Broken::Unheard => Failure::internal(),
    }
}

fn usage(call: &Call, results: &[Finished]) -> Usage {
    let firsts = results.iter().step_by(call.samples.max(1) as usize);
    Usage {
        prompt: call.prompts.iter().map(|prompt| u64::from(prompt.tokens)).sum(),
        completion: results.iter().map(|result| result.output.ids.len() as u64).sum(),
        cached: firsts.map(|result| u64::from(result.cached_tokens)).sum(),
    }
}

struct Stream {
    call: Call,
    shape: Shape,
}

impl Frames for Stream {
    fn opening(&self, index: usize) -> Vec<String> {
        self.shape.opening(&self.call, index)
    }

    fn token(&self, token: &Emitted) -> Vec<String> {
        self.shape.token(&self.call, token)
    }

    fn closing(&self, results: &[Finished]) -> Vec<String> {
        self.shape.closing(&usage(&self.call, results))
    }

    fn failed(&self, broken: Broken, opened: bool) -> Ending {
        let mut events = if opened { Vec::new() } else { self.shape.opening(&self.call, 0) };
        events.push(failure(broken).event());
        Ending::Events(events)
    }

    fn ends_with_done(&self) -> bool {
        self.shape.ends_with_done()
    }
}
