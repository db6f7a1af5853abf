//! How the watches fare, in words for readiness and in numbers for metrics.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Watched;
use super::api::ApiError;
use crate::clock::Tick;

/// What one watch is doing.
#[derive(Debug)]
pub struct FeedStatus {
    /// `pods`, `modeladapters`, ….
    pub plural: &'static str,
    group: &'static str,
    optional: bool,
    namespace: Option<Arc<str>>,
    inner: Mutex<Inner>,
}

#[derive(Clone, Debug, Default)]
struct Inner {
    /// A list was complete once.
    listed: bool,
    /// The API server does not know the resource.
    absent: bool,
    /// Why it could not be listed, since the last time it could.
    list: Option<ApiError>,
    /// Why it cannot be watched.
    watch: Option<WatchFailure>,
    /// Objects that could not be read.
    unreadable: usize,
    heard: Option<Tick>,
}

/// How a watch fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchFailure {
    /// It cannot be opened, or breaks off; over as soon as one is open.
    Error(String),
    /// It ends as soon as it is open; over when one has lived for a while.
    Early,
}

impl std::fmt::Display for WatchFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WatchFailure::Error(text) => f.write_str(text),
            WatchFailure::Early => f.write_str("it ends as soon as it is open"),
        }
    }
}

/// What one watch has to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// Readiness waits for this.
    Reason(String),
    /// The gateway serves, but somebody should know.
    Note(String),
}

impl FeedStatus {
    pub(super) fn new<T: Watched>(namespace: Option<Arc<str>>) -> FeedStatus {
        FeedStatus {
            plural: T::PLURAL,
            group: if T::GROUP.is_empty() { "core" } else { T::GROUP },
            optional: T::OPTIONAL,
            namespace,
            inner: Mutex::default(),
        }
    }

    /// The API server has said something.
    pub(super) fn hear(&self, now: Tick) {
        self.lock().heard = Some(now);
    }

    /// A list is complete.
    pub(super) fn listed(&self, unreadable: usize) {
        let mut inner = self.lock();
        (inner.listed, inner.absent, inner.list, inner.unreadable) = (true, false, None, unreadable);
    }

    /// The API server does not know the resource. True when that is news.
    pub(super) fn absent(&self) -> bool {
        let mut inner = self.lock();
        // What was known is forgotten with it.
        (inner.listed, inner.list, inner.watch) = (false, None, None);
        !std::mem::replace(&mut inner.absent, true)
    }

    /// A list failed. True when that is news.
    pub(super) fn list_failed(&self, error: ApiError) -> bool {
        let error = Some(error);
        let mut inner = self.lock();
        let news = inner.list != error;
        inner.list = error;
        news
    }

    /// A watch failed, in this way. True when that is news.
    pub(super) fn watch_failed(&self, failure: WatchFailure) -> bool {
        let failure = Some(failure);
        let mut inner = self.lock();
        let news = inner.watch != failure;
        inner.watch = failure;
        news
    }

    /// The API server has opened a watch. Whether it stays open is seen later.
    pub(super) fn opened(&self) {
        let mut inner = self.lock();
        inner.watch.take_if(|failure| *failure != WatchFailure::Early);
    }

    /// The watch works.
    pub(super) fn watched(&self) {
        self.lock().watch = None;
    }

    /// Time since the API server said anything about this resource; `None` = it never did.
    pub fn age(&self, now: Tick) -> Option<Duration> {
        self.lock().heard.map(|heard| now.since(heard))
    }

    /// What it has to say at `now`.
    pub fn word(&self, now: Tick) -> Option<Word> {
        let inner = self.lock().clone();
        let failed = match (&inner.list, &inner.watch) {
            (Some(error), _) => Some(self.sentence("list", error)),
            (None, Some(text)) => Some(self.sentence("watch", text)),
            (None, None) => None,
        };
        match failed {
            Some(text) if inner.listed => {
                let age = inner.heard.map(|heard| now.since(heard)).unwrap_or_default().as_secs();
                Some(Word::Note(format!("{text}; serving on what was known {age} s ago")))
            }
            Some(text) if self.optional => Some(Word::Note(format!("{text}; the gateway serves without them"))),
            Some(text) => Some(Word::Reason(text)),
            None if !inner.listed && !inner.absent && !self.optional => {
                Some(Word::Reason(format!("the first list of {} {} is not complete", self.plural, self.place())))
            }
            None if inner.unreadable > 0 => {
                Some(Word::Note(format!("{} of the {} cannot be read", inner.unreadable, self.plural)))
            }
            None => None,
        }
    }

    /// What cannot be done, as RBAC names it.
    pub(super) fn sentence(&self, verb: &str, error: &dyn std::fmt::Display) -> String {
        format!("cannot {verb} {} (API group {}) {}: {error}", self.plural, self.group, self.place())
    }

    fn place(&self) -> String {
        self.namespace.as_ref().map_or_else(|| "in all namespaces".to_owned(), |name| format!("in namespace {name}"))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
