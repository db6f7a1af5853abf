//! Runs the sequences of a request and answers whole or as a stream, in whatever shape the dialect gives them.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all, try_join_all};
use tokio::sync::mpsc;

use crate::answer::{Ended, Outlet};
use crate::linger::lingering;
use crate::sequence::{self, Broken, Emitted, Finished, Job};
use crate::state::Core;

/// Tokens that may wait for a slow reader before generation waits too.
const TOKENS_AHEAD: usize = 1_024;

type Results = Vec<Result<Finished, Broken>>;

/// The events of one stream.
pub(crate) trait Frames: Send + Sync {
    /// Before the first token of choice `index`.
    fn opening(&self, index: usize) -> Vec<String>;
    /// One token.
    fn token(&self, token: &Emitted) -> Vec<String>;
    /// After the last token, `[DONE]` left out.
    fn closing(&self, results: &[Finished]) -> Vec<String>;
    /// When it broke; `opened` says whether any choice was opened.
    fn failed(&self, broken: Broken, opened: bool) -> Ending;
    /// Whether the stream ends with `[DONE]`.
    fn ends_with_done(&self) -> bool {
        true
    }
}

/// How a broken stream ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// With these events, then `[DONE]`.
    Events(Vec<String>),
    /// With nothing: the connection is closed in the middle.
    Cut,
}

/// Runs `jobs` to their end. `keep` lives as long as the work does, which may be longer than the client.
///
/// # Errors
/// The first sequence that broke.
pub(crate) async fn whole(
    core: &Arc<Core>,
    jobs: Vec<Job>,
    keep: impl Send + 'static,
) -> Result<Vec<Finished>, Broken> {
    let work = {
        let core = core.clone();
        async move {
            let _keep = keep;
            try_join_all(jobs.iter().map(|job| sequence::run(&core, job, None))).await
        }
        .boxed()
    };
    lingering(core, core.config.disconnect_lag, work).await.unwrap_or(Err(Broken::EngineDead))
}

/// The sequences of a stream, at work.
pub(crate) struct Running {
    count: usize,
    work: Option<BoxFuture<'static, Option<Results>>>,
    results: Option<Results>,
    tokens: mpsc::Receiver<Emitted>,
    first: Option<Emitted>,
}

/// Starts `jobs`; nothing happens until the result is polled, unless the engine lets work linger.
pub(crate) fn start(core: &Arc<Core>, jobs: Vec<Job>, keep: impl Send + 'static) -> Running {
    let (sender, tokens) = mpsc::channel(TOKENS_AHEAD);
    let count = jobs.len();
    let work = {
        let core = core.clone();
        async move {
            let _keep = keep;
            let sender = sender;
            join_all(jobs.iter().map(|job| sequence::run(&core, job, Some(&sender)))).await
        }
        .boxed()
    };
    let work = lingering(core, core.config.disconnect_lag, work);
    Running { count, work: Some(work), results: None, tokens, first: None }
}

impl Running {
    /// Waits for the first token, for streams whose head waits for it.
    ///
    /// # Errors
    /// What broke before there was one.
    pub async fn first_token(&mut self) -> Result<(), Broken> {
        self.first = self.next().await;
        let broken = self.results.as_ref().and_then(|results| results.iter().find_map(|result| result.as_ref().err()));
        match broken {
            Some(broken) if self.first.is_none() => Err(*broken),
            _ => Ok(()),
        }
    }

    /// The next token, while the work goes on; `None` when all is done.
    async fn next(&mut self) -> Option<Emitted> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        loop {
            let Some(work) = &mut self.work else { return self.tokens.recv().await };
            tokio::select! {
                biased;
                Some(token) = self.tokens.recv() => return Some(token),
                results = work => {
                    let died = || std::iter::repeat_n(Err(Broken::EngineDead), self.count).collect();
                    self.results = Some(results.unwrap_or_else(died));
                    // With it goes the sender, so that the channel ends after what is in it.
                    self.work = None;
                }
            }
        }
    }

    /// Writes the stream to its end, `[DONE]` included.
    pub async fn write(mut self, frames: &dyn Frames, outlet: &mut Outlet) -> Result<(), Ended> {
        let mut opened = vec![false; self.count];
        while let Some(token) = self.next().await {
            let index = token.index as usize;
            if let Some(opened) = opened.get_mut(index).filter(|opened| !**opened) {
                *opened = true;
                for event in frames.opening(index) {
                    outlet.chunk(event).await?;
                }
            }
            for event in frames.token(&token) {
                outlet.chunk(event).await?;
            }
        }
        let results: Result<Vec<_>, _> = self.results.unwrap_or_default().into_iter().collect();
        let events = match results {
            Ok(results) => frames.closing(&results),
            Err(broken) => match frames.failed(broken, opened.contains(&true)) {
                Ending::Events(events) => events,
                Ending::Cut => return outlet.cut_off().await,
            },
        };
        for event in events {
            outlet.chunk(event).await?;
        }
        if frames.ends_with_done() { outlet.done().await } else { Ok(()) }
    }
}
