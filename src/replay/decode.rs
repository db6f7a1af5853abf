//! A modelled decode engine: continuous batching, simulated from one change of the batch to the next.
//!
//! Every running sequence gets one token per step. Steps between two changes of the batch are not simulated one by one:
//! the k-th of them takes `first + growth · (k − 1)`, so that k steps take `k · first + growth · k(k − 1)/2`. Who joins
//! waits for the end of the step that runs. A sequence is admitted when room for its prompt and its whole output is
//! left, and never preempted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::model::EngineModel;
use crate::clock::Tick;
use crate::scrape::Page;

/// A request to generate for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    /// The request's place in the trace.
    pub(super) request: usize,
    /// Prompt tokens.
    pub(super) prompt: u64,
    /// Tokens to generate, at least 1.
    pub(super) output: u64,
}

impl Sequence {
    fn tokens(self) -> u64 {
        self.prompt + self.output
    }
}

#[derive(Clone, Copy, Debug)]
struct Running {
    sequence: Sequence,
    /// The engine's step count when it joined.
    joined: u64,
    first_token: Option<Tick>,
}

impl Running {
    fn last_step(&self) -> u64 {
        self.joined + self.sequence.output
    }
}

/// A sequence that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) sequence: Sequence,
    pub(super) first_token: Tick,
}

/// So many gaps between two tokens of a sequence, and how long they were on average, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gaps {
    pub(super) nanos: f64,
    pub(super) count: u64,
}

/// The engine. The caller schedules: what [`DecodeEngine::admit`] returns is transferred for so long, and
/// [`DecodeEngine::change`] is called at [`DecodeEngine::next_change`].
#[derive(Debug)]
pub(super) struct DecodeEngine {
    model: Arc<EngineModel>,
    waiting: VecDeque<Sequence>,
    /// Admitted; their KV cache is on its way.
    transferring: Vec<Sequence>,
    /// There, waiting for the end of the step.
    joining: Vec<Sequence>,
    running: Vec<Running>,
    /// Tokens admitted, planned output included.
    reserved: u64,
    /// KV tokens of the running sequences at `since`.
    kv: u64,
    /// Steps done at `since`, which is the end of one of them.
    steps: u64,
    since: Tick,
    generated: u64,
    gaps: Vec<Gaps>,
}

impl DecodeEngine {
    /// An idle engine.
    pub(super) fn new(model: Arc<EngineModel>) -> DecodeEngine {
        DecodeEngine {
            model,
            waiting: VecDeque::new(),
            transferring: Vec::new(),
            joining: Vec::new(),
            running: Vec::new(),
            reserved: 0,
            kv: 0,
            steps: 0,
            since: Tick(0),
            generated: 0,
            gaps: Vec::new(),
        }
    }

    /// Puts a sequence at the end of the queue; false when it can never fit.
    pub(super) fn offer(&mut self, sequence: Sequence) -> bool {
        let fits = sequence.tokens() as f64 <= self.model.kv_tokens;
        if fits {
            self.waiting.push_back(sequence);
        }
        fits
    }

    /// Admits the head of the queue if there is room: its KV cache arrives after the returned time.
    pub(super) fn admit(&mut self) -> Option<(Sequence, Duration)> {
        let head = *self.waiting.front()?;
        let admitted = self.running.len() + self.joining.len() + self.transferring.len();
        let full = (self.reserved + head.tokens()) as f64 > self.model.kv_tokens;
        if full || admitted as f64 + 1.0 > self.model.max_batch {
            return None;
        }
        self.waiting.pop_front();
        self.reserved += head.tokens();
        self.transferring.push(head);
        Some((head, self.model.transfer(head.prompt)))
    }

    /// The KV cache of `request` is there.
    pub(super) fn transferred(&mut self, request: usize) {
        if let Some(place) = self.transferring.iter().position(|sequence| sequence.request == request) {
            self.joining.push(self.transferring.remove(place));
        }
    }

    /// When the batch changes next, as things are: the end of the step in which a sequence ends, or of the present one
    /// when somebody wants to join. `None` while nothing runs or joins.
    pub(super) fn next_change(&self, now: Tick) -> Option<Tick> {
        if self.running.is_empty() {
            return (!self.joining.is_empty()).then_some(now);
        }
        if self.joining.is_empty() {
            return Some(self.end_of(self.steps_left()));
        }
        let done = self.steps_by(now);
        let end = self.end_of(done);
        Some(if end >= now { end } else { self.end_of(done + 1) })
    }

    /// Changes the batch at `now`, which is what [`DecodeEngine::next_change`] said: who has its tokens leaves, who
    /// waits for the end of the step joins.
    pub(super) fn change(&mut self, now: Tick) -> Vec<Ended> {
        self.close(self.steps_by(now));
        self.since = now;
        let steps = self.steps;
        let mut ended = Vec::new();
        self.running.retain(|running| {
            let stays = running.last_step() > steps;
            if !stays {
                let first_token = running.first_token.unwrap_or(now);
                ended.push(Ended { sequence: running.sequence, first_token });
            }
            stays
        });
        for Ended { sequence, .. } in &ended {
            self.kv = self.kv.saturating_sub(sequence.tokens());
            self.reserved = self.reserved.saturating_sub(sequence.tokens());
        }
        for sequence in self.joining.drain(..) {
            self.kv += sequence.prompt;
            self.running.push(Running { sequence, joined: steps, first_token: None });
        }
        ended
    }

    /// Accounts for the `done` steps since `self.since`.
    fn close(&mut self, done: u64) {
        if done == 0 || self.running.is_empty() {
            return;
        }
        let first_end = self.end_of(1);
        let mean = self.nanos_of(done) / done as f64;
        let batch = self.running.len() as u64;
        let mut firsts = 0;
        for running in self.running.iter_mut().filter(|running| running.first_token.is_none()) {
            running.first_token = Some(first_end);
            firsts += 1;
        }
        self.gaps.push(Gaps { nanos: mean, count: (batch * done).saturating_sub(firsts) });
        self.generated += batch * done;
        self.kv += batch * done;
        self.steps += done;
    }

    /// Steps until the first of the running sequences ends.
    fn steps_left(&self) -> u64 {
        let last = self.running.iter().map(Running::last_step).min();
        last.map_or(0, |last| last.saturating_sub(self.steps))
    }

    /// Nanoseconds that the first `steps` steps since `self.since` take together.
    fn nanos_of(&self, steps: u64) -> f64 {
        let (first, growth, steps) =
            (self.first_step(), self.model.step_growth_nanos(self.running.len()), steps as f64);
        steps * first + growth * steps * (steps - 1.0) / 2.0
    }

    fn first_step(&self) -> f64 {
        self.model.step_nanos(self.running.len(), self.kv)
    }

    fn end_of(&self, steps: u64) -> Tick {
        self.since.plus(Duration::from_nanos(self.nanos_of(steps).round() as u64))
    }

    /// Steps since `self.since` that have ended at `at`. The positive root of the formula above, put right by at most
    /// one for what rounding did.
    fn steps_by(&self, at: Tick) -> u64 {
        if self.running.is_empty() || at <= self.since {
            return 0;
        }
        let elapsed = at.0 - self.since.0;
        let growth = self.model.step_growth_nanos(self.running.len());
        let linear = self.first_step() - growth / 2.0;
        let root = 2.0 * elapsed as f64 / (linear + (linear * linear + 2.0 * growth * elapsed as f64).sqrt());
        let steps = (root as u64).min(self.steps_left());
        if self.end_of(steps) > at {
            steps.saturating_sub(1)
        } else if steps < self.steps_left() && self.end_of(steps + 1) <= at {
            steps + 1
        } else {
            steps
        }
    }

    /// KV tokens at `at`, between the last change and the next: of running sequences and of those that have arrived or
    /// are on their way.
    pub(super) fn kv_tokens(&self, at: Tick) -> u64 {
        let coming = self.transferring.iter().chain(&self.joining).map(|sequence| sequence.prompt).sum::<u64>();
        self.kv + coming + self.running.len() as u64 * self.steps_by(at)
    }

    /// What its metrics page says at `at`, between the last change and the next.
    pub(super) fn page(&self, at: Tick) -> Page {
        let generated = self.generated + self.running.len() as u64 * self.steps_by(at);
        let waiting = self.waiting.len() + self.transferring.len() + self.joining.len();
        Page {
            running: Some(self.running.len() as f64),
            waiting: Some(waiting as f64),
            kv_usage: Some(self.kv_tokens(at) as f64 / self.model.kv_tokens),
            generation_tokens: Some(generated as f64),
            prompt_tokens: Some(0.0),
            ..Page::default()
        }
    }

    /// The gaps between tokens so far.
    pub(super) fn gaps(&self) -> &[Gaps] {
        &self.gaps
    }
}
