//! A modelled prefill engine: one prompt at a time, first come, first served, with a prefix cache.

use std::collections::VecDeque;
use std::sync::Arc;

use super::cache::PrefixCache;
use super::model::EngineModel;
use crate::clock::Tick;
use crate::scrape::Page;

/// A prompt to compute.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    /// The request's place in the trace.
    pub(super) request: usize,
    /// Its length.
    pub(super) tokens: u64,
    /// Chained hashes of its full blocks; empty = nothing is known about prefixes.
    pub(super) hashes: Arc<[u64]>,
    /// Tokens of one block.
    pub(super) block_tokens: u64,
}

/// The prompt that is being computed.
#[derive(Clone, Debug)]
pub(super) struct Serving {
    pub(super) prompt: Prompt,
    pub(super) started: Tick,
    pub(super) ends: Tick,
    /// Tokens found in the cache.
    pub(super) cached: u64,
}

/// The engine. The caller calls [`PrefillEngine::finish`] at [`Serving::ends`].
#[derive(Debug)]
pub(super) struct PrefillEngine {
    model: Arc<EngineModel>,
    cache: PrefixCache,
    queue: VecDeque<Prompt>,
    serving: Option<Serving>,
    /// Prompt tokens queued or being computed.
    outstanding: u64,
    computed_prompts: u64,
    computed_tokens: u64,
    seconds: f64,
}

impl PrefillEngine {
    /// An idle engine with an empty cache for blocks of `block_tokens` tokens.
    pub(super) fn new(model: Arc<EngineModel>, block_tokens: u64) -> PrefillEngine {
        let blocks = model.prefix_cache_tokens / block_tokens.max(1) as f64;
        PrefillEngine {
            cache: PrefixCache::new(blocks as usize),
            model,
            queue: VecDeque::new(),
            serving: None,
            outstanding: 0,
            computed_prompts: 0,
            computed_tokens: 0,
            seconds: 0.0,
        }
    }

    /// Puts a prompt at the end of the queue.
    pub(super) fn offer(&mut self, prompt: Prompt) {
        self.outstanding += prompt.tokens;
        self.queue.push_back(prompt);
    }

    /// Starts the next prompt if the engine is free; when it ends.
    pub(super) fn start(&mut self, now: Tick) -> Option<Tick> {
        if self.serving.is_some() {
            return None;
        }
        let prompt = self.queue.pop_front()?;
        let leading = self.cache.leading(&prompt.hashes) as u64;
        // The last token is always computed, so a cached whole prompt counts one block less.
        let usable = prompt.tokens.saturating_sub(1) / prompt.block_tokens.max(1);
        let cached = leading.min(usable) * prompt.block_tokens;
        let ends = now.plus(self.model.prefill(prompt.tokens - cached, prompt.tokens));
        self.serving = Some(Serving { prompt, started: now, ends, cached });
        Some(ends)
    }

    /// Ends the prompt that is being computed.
    pub(super) fn finish(&mut self) -> Option<Serving> {
        let done = self.serving.take()?;
        self.outstanding = self.outstanding.saturating_sub(done.prompt.tokens);
        self.computed_prompts += 1;
        self.computed_tokens += done.prompt.tokens;
        self.seconds += done.ends.since(done.started).as_secs_f64();
        self.cache.put(&done.prompt.hashes);
        Some(done)
    }

    /// The caller of `request` gave up. True when it was being computed, so that the engine is free now.
    pub(super) fn cancel(&mut self, request: usize) -> bool {
        if let Some(position) = self.queue.iter().position(|prompt| prompt.request == request) {
            let gone = self.queue.remove(position);
            self.outstanding = self.outstanding.saturating_sub(gone.map_or(0, |prompt| prompt.tokens));
        }
        let Some(gone) = self.serving.take_if(|serving| serving.prompt.request == request) else { return false };
        self.outstanding = self.outstanding.saturating_sub(gone.prompt.tokens);
        true
    }

    /// Prompt tokens queued or being computed.
    pub(super) fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// What its metrics page says. Nothing in it changes between two events of the engine.
    pub(super) fn page(&self) -> Page {
        let prompts = self.computed_prompts as f64;
        Page {
            running: Some(f64::from(u8::from(self.serving.is_some()))),
            waiting: Some(self.queue.len() as f64),
            kv_usage: Some(0.0),
            generation_tokens: Some(0.0),
            prompt_tokens: Some(self.computed_tokens as f64),
            prefill_seconds_mean: (self.computed_prompts > 0).then(|| self.seconds / prompts),
            ..Page::default()
        }
    }
}
