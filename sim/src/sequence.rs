//! The life of one sequence: queue, KV, prefill or transfer, then token after token.
//!
//! Everything a sequence holds is held by its future, so cancelling it at any await gives all of it back.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::ambient;
use crate::config::{KvLoadFailure, OnViolation};
use crate::handoff::{NoPull, Pinned};
use crate::kv::KvLease;
use crate::prompt::{Finish, Output, OutputRules, Prompt, plan_output};
use crate::report::ViolationKind;
use crate::side_channel::{Claim, PullError};
use crate::state::{Core, Counted};

/// How late a timer may fire.
const TIMER_TICKS: Duration = Duration::from_millis(3);

/// Where a sequence's prompt KV comes from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Computed here.
    Local,
    /// Pulled from a prefill engine.
    Remote(Arc<Claim>),
    /// Told by a whole prefill answer (Neuron); the transfer itself is only timed.
    Told,
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
    /// Pin the prompt's blocks under this id at the end.
    pub pin_as: Option<String>,
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
    /// The KV transfer failed.
    KvLoad,
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
    let arrived = ambient::now();
    let mut output = plan(job, false);
    let admitted = core.abort.run_until_cancelled(admit(core, job, output.ids.len() as u32)).await;
    let Some(admitted) = admitted else { return aborted(core, job, 0, output, tokens).await };
    let admitted = admitted.inspect_err(|_| core.meters.count(|counts| counts.finished_error += 1))?;
    if admitted.corrupt {
        output = plan(job, true);
    }
    let started = ambient::now();
    let mut due = started;
    let mut first_at = started;
    let mut last_at = started;
    for (place, (piece, id)) in output.pieces.iter().zip(&output.ids).enumerate() {
        // A local prefill ends with its first token; after a transfer the last prompt position is computed first.
        if place > 0 || !matches!(job.source, Source::Local) {
            due += core.config.timing.decode_step(core.load.running());
            if core.abort.run_until_cancelled(tokio::time::sleep_until(due)).await.is_none() {
                return aborted(core, job, place, output, tokens).await;
            }
        }
        let now = ambient::now();
        if place == 0 {
            first_at = now;
            core.meters.count(|counts| counts.first_token.time(now - arrived));
        } else {
            core.meters.count(|counts| counts.token_gap.time(now - last_at));
        }
        last_at = now;
        core.meters.count(|counts| counts.generated_tokens += 1);
        let last = place + 1 == output.ids.len();
        let finish = last.then(|| (output.finish, output.stop_reason.clone()));
        emit(tokens, job, *id, piece.clone(), place, finish).await?;
    }
    let generated = output.ids.len() as u32;
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
    let produced = job.pin_as.clone().map(|id| pin(core, job, id, cached_tokens, admitted.lease));
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
    place: usize,
    finish: Option<(Finish, Option<String>)>,
) -> Result<(), Broken> {
    let Some(tokens) = tokens else { return Ok(()) };
    let token = Emitted { index: job.index, id, piece, position: place as u32 + 1, finish };
    tokens.send(token).await.map_err(|_| Broken::Unheard)
}

/// Ends a sequence because the engine stops: what was made so far, and `finish_reason: "abort"`.
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
    core.meters.count(|counts| counts.finished_abort += 1);
    if let Some(tokens) = tokens {
        let finish = Some((Finish::Abort, None));
        let token = Emitted { index: job.index, id: 0, piece: String::new(), position: made as u32, finish };
        tokens.send(token).await.map_err(|_| Broken::Unheard)?;
    }
    Ok(Finished { index: job.index, prompt: job.prompt.clone(), output, cached_tokens: 0, produced: None })
}

fn pin(core: &Core, job: &Job, request_id: String, cached_tokens: u32, lease: KvLease) -> Produced {
    let (tokens, blocks) = (job.prompt.tokens, job.prompt.blocks());
    let produced = Produced { request_id: request_id.clone(), blocks: core.block_ids(blocks), tokens, cached_tokens };
    let pinned = Pinned { prompt_hash: job.prompt.hash, tokens, blocks, lease };
    core.handoffs.pin(request_id, pinned, ambient::now());
    core.changed();
    produced
}

/// A sequence whose prompt KV is in place.
struct Admitted {
    lease: KvLease,
    cached_tokens: u32,
    corrupt: bool,
    at: Instant,
    _slot: tokio::sync::OwnedSemaphorePermit,
    _running: Counted,
}

async fn admit(core: &Arc<Core>, job: &Job, output_tokens: u32) -> Result<Admitted, Broken> {
    let arrived = ambient::now();
    let waiting = Counted::waiting(core);
    // The semaphore is never closed; were it, the request would be refused like one of a dead engine.
    let slot = core.slots.clone().acquire_owned().await.map_err(|_| Broken::EngineDead)?;
    let asked = ambient::now();
    let mut turn = match job.source {
        Source::Local => Some(core.compute.lock().await),
        Source::Remote(_) | Source::Told => None,
    };
    let lease = tokio::select! {
        lease = take_blocks(core, &job.prompt, output_tokens) => lease,
        never = heartbeat(&job.source) => match never {},
    };
    let at = ambient::now();
    let cached_tokens = lease.cached_tokens();
    let missing = job.prompt.tokens - cached_tokens.min(job.prompt.tokens);
    core.meters.count(|counts| {
        counts.queue.time(at - arrived);
        counts.prefix_queries += u64::from(job.prompt.tokens);
        counts.prefix_hits += u64::from(cached_tokens);
    });
    let (running, corrupt) = match &job.source {
        Source::Local => {
            drop(waiting);
            let running = Counted::running(core);
            if let Some(turn) = &mut turn {
                compute(core, missing, asked, turn).await;
            }
            (running, false)
        }
        Source::Told => {
            ambient::pause(core.config.timing.transfer(missing)).await;
            transferred(core, missing, at);
            drop(waiting);
            (Counted::running(core), false)
        }
        Source::Remote(claim) => {
            let outcome = pull(core, job, claim, missing, at).await?;
            drop(waiting);
            let running = Counted::running(core);
            if outcome == Loaded::Nothing {
                let asked = ambient::now();
                compute(core, missing, asked, &mut *core.compute.lock().await).await;
            }
            (running, outcome == Loaded::Corrupt)
        }
    };
    drop(turn);
    if !corrupt {
        lease.mark_computed();
    }
    core.meters.count(|counts| {
        counts.prompt_tokens += u64::from(job.prompt.tokens);
        counts.cache_hit_tokens += u64::from(cached_tokens);
    });
    Ok(Admitted { lease, cached_tokens, corrupt, at, _slot: slot, _running: running })
}

/// First come, first served: whoever waits for room keeps the others waiting behind it.
async fn take_blocks(core: &Core, prompt: &Prompt, output_tokens: u32) -> KvLease {
    let _first = core.admission.lock().await;
    core.kv.take(prompt, output_tokens).await
}

async fn heartbeat(source: &Source) -> std::convert::Infallible {
    match source {
        Source::Remote(claim) => claim.keep_alive().await,
        Source::Local | Source::Told => std::future::pending().await,
    }
}

/// Timers tick in milliseconds. A prompt that was queued therefore starts when the one before it was due to end, not when
/// its timer fired, so that a row of short computations takes as long as their sum.
async fn compute(core: &Core, tokens: u32, asked: Instant, previous_due: &mut Instant) {
    let began = ambient::now();
    let queued = asked < *previous_due && began.saturating_duration_since(*previous_due) < TIMER_TICKS;
    let due = if queued { *previous_due } else { began } + core.config.timing.prefill(tokens);
    if due > began {
        tokio::time::sleep_until(due).await;
    }
    *previous_due = due;
    core.meters.count(|counts| {
        counts.prefill.time(ambient::now() - began);
        counts.computed_tokens += u64::from(tokens);
    });
}

fn transferred(core: &Core, tokens: u32, began: Instant) {
    core.meters.count(|counts| {
        counts.external_queries += u64::from(tokens);
        counts.external_hits += u64::from(tokens);
        counts.transferred_tokens += u64::from(tokens);
        counts.transfer.time(ambient::now() - began);
    });
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loaded {
    /// The right KV.
    Right,
    /// Somebody else's.
    Corrupt,
    /// None; compute it.
    Nothing,
}

async fn pull(core: &Arc<Core>, job: &Job, claim: &Claim, missing: u32, began: Instant) -> Result<Loaded, Broken> {
    let violate = |kind, detail: String| core.violate(Some(job.seq), kind, detail);
    let pulled = match claim.pull(core.config.timing.transfer(missing)).await {
        Ok(pulled) => pulled,
        Err(PullError::Refused(why)) if why != NoPull::WrongEngine => {
            let kind = match why {
                NoPull::AlreadyPulled => ViolationKind::HandoffReused,
                NoPull::Unknown | NoPull::WrongEngine => ViolationKind::HandoffUnknown,
                NoPull::Expired | NoPull::Freed => ViolationKind::HandoffStale,
            };
            violate(kind, format!("the prefill engine says: {why:?}"));
            // The real engine reads whatever is in those blocks now.
            return Ok(Loaded::Corrupt);
        }
        Err(_) => {
            core.meters.count(|counts| {
                counts.failed_transfers += 1;
                counts.external_queries += u64::from(missing);
                counts.external_hits += u64::from(missing);
            });
            return match core.config.kv_load_failure {
                KvLoadFailure::Fail => Err(Broken::KvLoad),
                KvLoadFailure::Recompute => Ok(Loaded::Nothing),
            };
        }
    };
    transferred(core, missing, began);
    if pulled.prompt_hash == job.prompt.hash {
        return Ok(Loaded::Right);
    }
    let sizes = format!("prefilled {} tokens, asked to decode {}", pulled.tokens, job.prompt.tokens);
    if job.prompt.blocks() > pulled.blocks {
        violate(ViolationKind::PromptLongerThanKv, sizes);
        if core.config.on_violation == OnViolation::AsReal {
            core.crash();
            return Err(Broken::EngineDead);
        }
    } else {
        violate(ViolationKind::PromptMismatch, sizes);
    }
    Ok(Loaded::Corrupt)
}
