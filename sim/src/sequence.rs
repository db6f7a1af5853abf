//! The life of one sequence: queue, KV, prefill or transfer, then token after token.
//!
//! Everything a sequence holds is held by its future, so cancelling it at any await gives all of it back.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::admission::{self, admit};
use crate::ambient;
use crate::config::{Connector, Dialect};
use crate::handoff::Pinned;
use crate::kv::KvLease;
use crate::prompt::{Finish, Output, OutputRules, Prompt, plan_output};
use crate::side_channel::Claim;
use crate::state::{Core, Counted};

/// Where a sequence's prompt KV comes from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Computed here.
    Local,
    /// Pulled from a prefill engine.
    Remote(Arc<Claim>),
    /// Told by a whole prefill answer (Neuron); the transfer itself is only timed.
    Told,
    /// SGLang's fake transfer: there is no KV at all.
    Faked,
}

/// What becomes of a sequence's prompt KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Handover {
    /// Nothing.
    Nothing,
    /// It stays pinned under this id after the answer.
    Pinned(String),
    /// It is written to shared storage before the answer, and freed here.
    Stored,
    /// It is given to a decode engine before the answer.
    Met {
        /// The id both legs know.
        id: String,
        /// Whether nothing is computed before the decode engine is there.
        first: bool,
    },
}

/// One sequence to run.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// The request it belongs to.
    pub seq: u64,
    /// Its place among the answer's choices.
    pub index: u32,
    /// Its number among the samples of one prompt.
    pub sample: u32,
    pub prompt: Arc<Prompt>,
    pub rules: OutputRules,
    pub source: Source,
    pub handover: Handover,
    /// What the sampling of the first token depends on, where the prefill engine samples it; 0 where it does not.
    pub sampling: u64,
    /// Ends this sequence, with the engine's own end or alone.
    pub abort: CancellationToken,
    /// Whether it goes on when nobody reads its tokens any more.
    pub lingers: bool,
}

/// A token on its way to a stream.
#[derive(Clone, Debug)]
pub(crate) struct Emitted {
    pub index: u32,
    pub id: u32,
    pub piece: String,
    /// Tokens of this choice so far, this one included.
    pub position: u32,
    /// Set with the last token.
    pub finish: Option<(Finish, Option<String>)>,
}

/// A hand-off produced by a prefill.
#[derive(Clone, Debug)]
pub(crate) struct Produced {
    pub request_id: String,
    pub blocks: Vec<u64>,
    pub tokens: u32,
    pub cached_tokens: u32,
}

/// A finished sequence.
#[derive(Clone, Debug)]
pub(crate) struct Finished {
    pub index: u32,
    pub prompt: Arc<Prompt>,
    pub output: Output,
    /// Prompt tokens found in this engine's own prefix cache.
    pub cached_tokens: u32,
    pub produced: Option<Produced>,
}

/// Why a sequence ended without an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// The prefill engine could not be reached.
    Unreachable,
    /// The KV transfer failed.
    KvLoad,
    /// The other leg did not come in time.
    Alone,
    /// It was aborted by its id before it ran.
    Aborted,
    /// The hand-off broke the engine.
    EngineDead,
    /// Nobody listens any more.
    Unheard,
}

/// Runs `job` to its end; tokens go to `tokens` as they are made.
pub(crate) async fn run(
    core: &Arc<Core>,
    job: &Job,
    tokens: Option<&mpsc::Sender<Emitted>>,
) -> Result<Finished, Broken> {
    let result = live(core, job, tokens).await;
    if result.as_ref().is_err_and(|broken| !matches!(broken, Broken::Unheard | Broken::Aborted)) {
        core.meters.count(|counts| counts.finished_error += 1);
    }
    result
}

async fn live(core: &Arc<Core>, job: &Job, tokens: Option<&mpsc::Sender<Emitted>>) -> Result<Finished, Broken> {
    let arrived = ambient::now();
    let mut output = plan(job, false);
    let Some(admitted) = job.abort.run_until_cancelled(admit(core, job, output.ids.len() as u32)).await else {
        if core.abort.is_cancelled() {
            return aborted(core, job, 0, output, tokens).await;
        }
        core.meters.count(|counts| counts.aborted_on_demand += 1);
        return Err(Broken::Aborted);
    };
    let mut admitted = admitted?;
    if admitted.corrupt {
        output = plan(job, true);
    }
    let first_token = output.ids.first().copied().unwrap_or_default();
    if let Handover::Met { id, .. } = &job.handover
        && let Some(lease) = admitted.lease.take()
    {
        let inflight = Counted::new(core, |load| &load.inflight);
        pin(core, job, id, first_token, lease);
        let given = job.abort.run_until_cancelled(admission::given(core, job, id, admitted.seat.as_ref())).await;
        drop(inflight);
        let Some(given) = given else {
            core.handoffs.free(id);
            core.meters.count(|counts| counts.aborted_on_demand += 1);
            return Err(Broken::Aborted);
        };
        given?;
    }
    let started = ambient::now();
    let mut due = started;
    let mut first_at = started;
    let mut last_at = started;
    for (place, (piece, id)) in output.pieces.iter().zip(&output.ids).enumerate() {
        // A local prefill ends with its first token; after a transfer the last prompt position is computed first.
        if place > 0 || !matches!(job.source, Source::Local) {
            due += core.config.timing.decode_step(core.load.running());
            if job.abort.run_until_cancelled(tokio::time::sleep_until(due)).await.is_none() {
                return aborted(core, job, place, output, tokens).await;
            }
        }
        let now = ambient::now();
        if place == 0 {
            first_at = now;
            core.meters.count(|counts| {
                counts.first_token.time(now - arrived);
                counts.step_tokens.tokens(if matches!(job.source, Source::Local) { job.prompt.tokens } else { 1 });
            });
        } else {
            core.meters.count(|counts| {
                counts.token_gap.time(now - last_at);
                counts.step_tokens.tokens(1);
            });
        }
        last_at = now;
        core.meters.count(|counts| counts.generated_tokens += 1);
        let last = place + 1 == output.ids.len();
        let finish = last.then(|| (output.finish, output.stop_reason.clone()));
        emit(tokens, job, *id, piece.clone(), place as u32 + 1, finish).await?;
    }
    let generated = output.ids.len() as u32;
    if generated == 0 {
        // A limit of nothing, which SGLang accepts, still has an end.
        emit(tokens, job, 0, String::new(), 0, Some((output.finish, None))).await?;
    }
    core.meters.count(|counts| {
        match output.finish {
            Finish::Stop => counts.finished_stop += 1,
            Finish::Length => counts.finished_length += 1,
            Finish::Abort => counts.finished_abort += 1,
        }
        counts.whole.time(last_at - arrived);
        counts.inference.time(last_at.saturating_duration_since(admitted.at));
        counts.decode.time(last_at - first_at);
        if generated > 1 {
            counts.mean_token_time.time((last_at - first_at) / (generated - 1));
        }
        counts.prompt_length.tokens(job.prompt.tokens);
        counts.output_length.tokens(generated);
    });
    let cached_tokens = admitted.cached_tokens;
    // A prompt whose answer ended by itself needs no decode. vLLM keeps its blocks with NIXL all the same.
    let nixl = core.config.dialect == Dialect::Vllm && core.config.connector == Connector::Nixl;
    let capped = nixl || output.finish == Finish::Length;
    let produced = match (&job.handover, admitted.lease.take()) {
        (Handover::Pinned(id), Some(lease)) if capped => {
            let (tokens, blocks) = (job.prompt.tokens, core.block_ids(job.prompt.blocks()));
            pin(core, job, id, first_token, lease);
            Some(Produced { request_id: id.clone(), blocks, tokens, cached_tokens })
        }
        (Handover::Stored, Some(_)) if output.finish == Finish::Length => {
            Some(Produced { request_id: String::new(), blocks: Vec::new(), tokens: job.prompt.tokens, cached_tokens })
        }
        _ => None,
    };
    Ok(Finished { index: job.index, prompt: job.prompt.clone(), output, cached_tokens, produced })
}

fn plan(job: &Job, corrupt: bool) -> Output {
    plan_output(job.prompt.hash, job.sample, corrupt, &job.rules)
}

async fn emit(
    tokens: Option<&mpsc::Sender<Emitted>>,
    job: &Job,
    id: u32,
    piece: String,
    position: u32,
    finish: Option<(Finish, Option<String>)>,
) -> Result<(), Broken> {
    let Some(tokens) = tokens else { return Ok(()) };
    let sent = tokens.send(Emitted { index: job.index, id, piece, position, finish }).await;
    if sent.is_err() && !job.lingers { Err(Broken::Unheard) } else { Ok(()) }
}

/// Ends a sequence that was told to stop: what was made so far, and `finish_reason: "abort"`.
async fn aborted(
    core: &Core,
    job: &Job,
    made: usize,
    mut output: Output,
    tokens: Option<&mpsc::Sender<Emitted>>,
) -> Result<Finished, Broken> {
    output.ids.truncate(made);
    output.pieces.truncate(made);
    output.finish = Finish::Abort;
    let alone = !core.abort.is_cancelled();
    core.meters.count(|counts| {
        counts.finished_abort += 1;
        counts.aborted_on_demand += u64::from(alone);
    });
    emit(tokens, job, 0, String::new(), made as u32, Some((Finish::Abort, None))).await?;
    Ok(Finished { index: job.index, prompt: job.prompt.clone(), output, cached_tokens: 0, produced: None })
}

fn pin(core: &Core, job: &Job, id: &str, first_token: u32, lease: KvLease) {
    let (tokens, blocks, sampling) = (job.prompt.tokens, job.prompt.blocks(), job.sampling);
    let pinned = Pinned { prompt_hash: job.prompt.hash, tokens, blocks, sampling, first_token, lease };
    core.handoffs.pin(id.to_owned(), pinned, ambient::now());
    core.meetings.ring(id);
    core.changed();
}
