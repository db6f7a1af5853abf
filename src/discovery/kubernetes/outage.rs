//! Whether the API server is there at all, told once for all watches: one line when it is lost, one when it is back.

use std::sync::{Arc, Mutex, PoisonError};

use crate::clock::Tick;

/// What all watches together see of the API server.
#[derive(Debug, Default)]
pub(super) struct ApiServer {
    away: Mutex<Away>,
}

#[derive(Debug, Default)]
struct Away {
    /// Watches that do without it.
    watches: usize,
    since: Option<Tick>,
}

impl ApiServer {
    /// Watches that do without it at present.
    #[cfg(test)]
    pub(super) fn watches_without(&self) -> usize {
        self.away.lock().unwrap_or_else(PoisonError::into_inner).watches
    }
}

/// What one watch sees of it.
#[derive(Debug)]
pub(super) struct Outage {
    server: Arc<ApiServer>,
    /// What it last failed to do.
    verb: Option<&'static str>,
}

impl Outage {
    pub(super) fn new(server: Arc<ApiServer>) -> Outage {
        Outage { server, verb: None }
    }

    /// This watch could not `verb`, for want of an API server. `sentence` says what, and why.
    pub(super) fn began(&mut self, verb: &'static str, sentence: &str, now: Tick) {
        if self.verb.replace(verb).is_some() {
            return;
        }
        let mut away = self.server.away.lock().unwrap_or_else(PoisonError::into_inner);
        away.watches += 1;
        if away.since.is_none() {
            away.since = Some(now);
            drop(away);
            tracing::warn!("the API server does not serve this replica; what was known stays in force: {sentence}");
        }
    }

    /// This watch can `verb` again. An open watch says more than a list: who cannot watch may be able to list.
    pub(super) fn over(&mut self, verb: &'static str, now: Tick) {
        if self.verb != Some(verb) && verb != "watch" || self.verb.take().is_none() {
            return;
        }
        let mut away = self.server.away.lock().unwrap_or_else(PoisonError::into_inner);
        away.watches = away.watches.saturating_sub(1);
        if away.watches == 0
            && let Some(since) = away.since.take()
        {
            drop(away);
            let seconds = now.since(since).as_secs_f64();
            tracing::info!("the API server serves this replica again, after {seconds:.1} s");
        }
    }
}
