//! How a sequence gets its prompt KV: it meets its decode engine, waits for a slot and for room, then computes or pulls.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::ambient;
use crate::config::{Dialect, KvLoadFailure, OnViolation};
use crate::handoff::{NoPull, Pulled};
use crate::kv::KvLease;
use crate::meeting::Seat;
use crate::prompt::Prompt;
use crate::report::ViolationKind;
use crate::sequence::{Broken, Handover, Job, Source};
use crate::side_channel::{Claim, PullError};
use crate::state::{Core, Counted};

/// How late a timer may fire.
const TIMER_TICKS: Duration = Duration::from_millis(3);

/// A sequence whose prompt KV is in place.
pub(crate) struct Admitted {
    /// Its blocks; taken when they are handed over.
    pub lease: Option<KvLease>,
    pub cached_tokens: u32,
    pub corrupt: bool,
    pub at: Instant,
    /// Its place at the meeting with its decode engine.
    pub seat: Option<Seat>,
    _slot: tokio::sync::OwnedSemaphorePermit,
    _running: Counted,
}

/// Waits for everything the sequence needs before its first token.
pub(crate) async fn admit(core: &Arc<Core>, job: &Job, output_tokens: u32) -> Result<Admitted, Broken> {
    let arrived = ambient::now();
    let waiting = Counted::waiting(core);
    let seat = meet(core, job).await?;
    let preallocating =
        matches!(job.source, Source::Remote(_) | Source::Faked).then(|| Counted::new(core, |load| &load.preallocating));
    // The semaphore is never closed; were it, the request would be refused like one of a dead engine.
    let slot = core.slots.clone().acquire_owned().await.map_err(|_| Broken::EngineDead)?;
    let asked = ambient::now();
    let mut turn = match job.source {
        Source::Local => Some(core.compute.lock().await),
        Source::Remote(_) | Source::Told | Source::Faked => None,
    };
    let lease = tokio::select! {
        lease = take_blocks(core, &job.prompt, output_tokens) => lease,
        never = heartbeat(&job.source) => match never {},
    };
    drop(preallocating);
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
        Source::Faked => {
            drop(waiting);
            (Counted::running(core), true)
        }
        Source::Remote(claim) => {
            let receiving = Counted::new(core, |load| &load.receiving);
            let outcome = pull(core, job, claim, missing, at).await?;
            drop((waiting, receiving));
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
    Ok(Admitted { lease: Some(lease), cached_tokens, corrupt, at, seat, _slot: slot, _running: running })
}

/// Takes the prefill request's seat, and waits there for the decode engine where the protocol says so.
async fn meet(core: &Arc<Core>, job: &Job) -> Result<Option<Seat>, Broken> {
    let Handover::Met { id, first } = &job.handover else { return Ok(None) };
    let _bootstrapping = first.then(|| Counted::new(core, |load| &load.bootstrapping));
    let seated = core.meetings.give(id);
    let meeting = async {
        match &seated {
            Some(seat) if *first => seat.until_wanted().await,
            Some(_) => (),
            // Another request has this room: nobody will ever come for this one.
            None => std::future::pending().await,
        }
    };
    if tokio::time::timeout(core.config.meeting_timeout, meeting).await.is_err() {
        core.meters.count(|counts| counts.failed_meetings += 1);
        return Err(Broken::Alone);
    }
    Ok(seated)
}

/// Waits until the KV pinned under `id` was taken. A decode engine that was there and left gets its KV all the same: the
/// prefill engine writes it into the void, and reports success.
pub(crate) async fn given(core: &Core, job: &Job, id: &str, seat: Option<&Seat>) -> Result<(), Broken> {
    let Some(seat) = seat else { return Ok(()) };
    let came_first = matches!(job.handover, Handover::Met { first: true, .. });
    let taken = async {
        loop {
            let bell = seat.bell.notified();
            if !core.handoffs.is_live(id) || (came_first && !seat.wanted()) {
                return;
            }
            bell.await;
        }
    };
    let result = tokio::time::timeout(core.config.meeting_timeout, taken).await;
    core.handoffs.free(id);
    core.changed();
    if result.is_err() {
        core.meters.count(|counts| counts.failed_meetings += 1);
        return Err(Broken::Alone);
    }
    ambient::pause(core.config.timing.transfer(job.prompt.tokens)).await;
    Ok(())
}

/// First come, first served: whoever waits for room keeps the others waiting behind it.
async fn take_blocks(core: &Core, prompt: &Prompt, output_tokens: u32) -> KvLease {
    let _first = core.admission.lock().await;
    core.kv.take(prompt, output_tokens).await
}

async fn heartbeat(source: &Source) -> std::convert::Infallible {
    match source {
        Source::Remote(claim) => claim.keep_alive().await,
        Source::Local | Source::Told | Source::Faked => std::future::pending().await,
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
    match claim.pull(core.config.timing.transfer(missing)).await {
        Ok(pulled) => {
            transferred(core, missing, began);
            judge(core, job, &pulled)
        }
        Err(PullError::Refused(why)) if why != NoPull::WrongEngine => {
            let kind = match why {
                NoPull::AlreadyPulled => ViolationKind::HandoffReused,
                NoPull::Unknown | NoPull::WrongEngine => ViolationKind::HandoffUnknown,
                NoPull::Expired | NoPull::Freed => ViolationKind::HandoffStale,
            };
            core.violate(Some(job.seq), kind, format!("the prefill engine says: {why:?}"));
            // vLLM reads whatever is in those blocks now; TensorRT-LLM's transceiver names its requests and finds none.
            if core.config.dialect == Dialect::Trtllm {
                failed(core, missing, Broken::KvLoad)
            } else {
                Ok(Loaded::Corrupt)
            }
        }
        Err(PullError::Refused(_) | PullError::Lost) => failed(core, missing, Broken::KvLoad),
        Err(PullError::Unreachable) => {
            core.meters.count(|counts| counts.failed_meetings += 1);
            failed(core, missing, Broken::Unreachable)
        }
        Err(PullError::Alone) => {
            core.meters.count(|counts| counts.failed_meetings += 1);
            failed(core, missing, Broken::Alone)
        }
    }
}

/// What a failed transfer leads to.
fn failed(core: &Core, missing: u32, broken: Broken) -> Result<Loaded, Broken> {
    core.meters.count(|counts| {
        counts.failed_transfers += 1;
        counts.external_queries += u64::from(missing);
        counts.external_hits += u64::from(missing);
    });
    match core.config.kv_load_failure {
        KvLoadFailure::Recompute if core.config.dialect == Dialect::Vllm => Ok(Loaded::Nothing),
        KvLoadFailure::Fail | KvLoadFailure::Recompute => Err(broken),
    }
}

/// Compares what was pulled with what was asked for.
fn judge(core: &Core, job: &Job, pulled: &Pulled) -> Result<Loaded, Broken> {
    let violate = |kind, detail: String| core.violate(Some(job.seq), kind, detail);
    if pulled.prompt_hash == job.prompt.hash {
        if core.config.strict && job.sampling != pulled.sampling && job.sampling != 0 && pulled.sampling != 0 {
            let detail = "the legs do not sample alike, and the first token is the prefill leg's".to_owned();
            violate(ViolationKind::SamplingMismatch, detail);
        }
        return Ok(Loaded::Right);
    }
    let sizes = format!("prefilled {} tokens, asked to decode {}", pulled.tokens, job.prompt.tokens);
    if job.prompt.blocks() > pulled.blocks && core.config.dialect == Dialect::Vllm {
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
