//! Runs a generation request and answers it, whole or as a stream.

use std::sync::Arc;

use futures_util::future::{join, join_all, try_join_all};
use http::request::Parts;
use tokio::sync::mpsc;

use super::call::{self, Api, Call};
use super::failure::Failure;
use super::handoff;
use super::shape::{Shape, Usage};
use crate::answer::{Ended, Outlet, Reply};
use crate::fault::Fault;
use crate::sequence::{self, Broken, Emitted, Finished};
use crate::state::Core;

/// Tokens that may wait for a slow reader before generation waits too.
const TOKENS_AHEAD: usize = 1_024;

/// Answers a generation request.
pub(crate) async fn answer(
    core: &Arc<Core>,
    api: Api,
    head: &Parts,
    body: &[u8],
    seq: u64,
    fault: Option<&Fault>,
) -> Result<Reply, Failure> {
    let call = call::read(core, api, head, body, seq).await?;
    let shape = Shape::new(core, &call);
    if call.stream {
        let core = core.clone();
        return Ok(Reply::Stream(Box::new(move |mut outlet| {
            Box::pin(async move {
                // An injected end has sent everything there is to send.
                if stream(&core, &call, &shape, &mut outlet).await.is_ok() {
                    outlet.finish().await;
                }
            })
        })));
    }
    let results = try_join_all(call.jobs.iter().map(|job| sequence::run(core, job, None))).await;
    let results = results.map_err(failure)?;
    // With several samples the last child's hand-off comes back, with several prompts the first prompt's.
    let handed = results.get(call.samples as usize - 1).and_then(|result| result.produced.as_ref());
    let offered = handoff::offered(core, handed, fault);
    Ok(Reply::json(200, shape.whole(&call, &results, &usage(&call, &results), offered.as_deref())))
}

fn failure(broken: Broken) -> Failure {
    match broken {
        Broken::EngineDead => Failure::engine_dead(),
        Broken::KvLoad | Broken::Unheard => Failure::internal(),
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

async fn stream(core: &Arc<Core>, call: &Call, shape: &Shape, outlet: &mut Outlet) -> Result<(), Ended> {
    let (sender, tokens) = mpsc::channel(TOKENS_AHEAD);
    let work = async move {
        let sender = sender;
        join_all(call.jobs.iter().map(|job| sequence::run(core, job, Some(&sender)))).await
    };
    let (results, written) = join(work, write(call, shape, tokens, outlet)).await;
    let opened = written?;
    let results: Result<Vec<_>, _> = results.into_iter().collect();
    match results {
        Ok(results) => {
            for event in shape.closing(&usage(call, &results)) {
                outlet.chunk(event).await?;
            }
        }
        Err(broken) => {
            if !opened {
                for event in shape.opening(call, 0) {
                    outlet.chunk(event).await?;
                }
            }
            outlet.chunk(failure(broken).event()).await?;
        }
    }
    if shape.ends_with_done() { outlet.done().await } else { Ok(()) }
}

/// Writes tokens as they come; says whether any came.
async fn write(
    call: &Call,
    shape: &Shape,
    mut tokens: mpsc::Receiver<Emitted>,
    outlet: &mut Outlet,
) -> Result<bool, Ended> {
    let mut opened = vec![false; call.jobs.len()];
    while let Some(token) = tokens.recv().await {
        let index = token.index as usize;
        if let Some(opened) = opened.get_mut(index).filter(|opened| !**opened) {
            *opened = true;
            for event in shape.opening(call, index) {
                outlet.chunk(event).await?;
            }
        }
        for event in shape.token(call, &token) {
            outlet.chunk(event).await?;
        }
    }
    Ok(opened.contains(&true))
}
