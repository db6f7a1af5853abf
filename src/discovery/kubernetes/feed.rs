//! One resource of one scope: list it, watch it, and begin again as needed.
//!
//! - A list is put in force when its last page is there, and holds for all that is not on it: that has gone.
//! - A watch goes on where the last one ended. After 410, after silence, and from time to time, a list is taken again.
//! - Whatever goes wrong, there is a wait before the next request, and what is known stays in force.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::Watched;
use super::api::{ApiError, Lines, Resource};
use super::backoff::Backoff;
use super::status::FeedStatus;
use super::store::Store;
use super::wire::{Event, Objects, Refusal, read_line};
use crate::clock::{Clock, Tick};
use crate::rng::Rng;
use crate::telemetry::Metrics;

/// The times that a feed keeps.
#[derive(Clone, Debug)]
pub struct Pace {
    /// A watch that says nothing for so long is given up (`TANDEM_KUBERNETES_STALL_SECONDS`).
    pub stall: Duration,
    /// A list is taken again after so long, whatever the watch says (`TANDEM_KUBERNETES_RELIST_SECONDS`).
    pub relist: Duration,
    /// How long one answer (a page, the head of a watch) may take.
    pub answer: Duration,
    /// The first wait after a failure.
    pub retry: Duration,
    /// The longest, once there was a list.
    pub retry_max: Duration,
    /// The longest before that: somebody waits for this replica.
    pub first_retry_max: Duration,
    /// How long until a resource that the API server did not know is looked for again.
    pub absent: Duration,
    /// A watch that lived for so long has worked, even if nothing happened.
    pub worked: Duration,
    /// The time between two snapshots, at least.
    pub gather: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            stall: Duration::from_mins(2),
            relist: Duration::from_mins(15),
            answer: Duration::from_secs(30),
            retry: Duration::from_millis(200),
            retry_max: Duration::from_secs(10),
            first_retry_max: Duration::from_secs(3),
            absent: Duration::from_mins(1),
            worked: Duration::from_secs(5),
            gather: Duration::from_millis(20),
        }
    }
}

/// The longest life of a watch, seconds: what the client libraries of Kubernetes ask for, at most.
const WATCH_SECONDS: f64 = 290.0;
/// Failures of a watch in a row after which a list is taken.
const WATCH_TRIES: u32 = 5;

/// Why a list is taken, as metrics label it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    First,
    Gone,
    Stall,
    Periodic,
    Failed,
}

impl Why {
    fn label(self) -> &'static str {
        match self {
            Why::First => "first",
            Why::Gone => "gone",
            Why::Stall => "stall",
            Why::Periodic => "periodic",
            Why::Failed => "failed",
        }
    }
}

/// How a watch ended.
enum Ended {
    /// In time, or after it had worked.
    Well,
    /// Without a word, and soon.
    Early,
    /// It said nothing for too long.
    Stalled,
    /// With an error.
    Failed(ApiError),
}

/// One resource of one scope.
pub(super) struct Feed<T> {
    pub(super) resource: Resource,
    /// The number of the scope in the store.
    pub(super) scope: usize,
    pub(super) store: Arc<Store<T>>,
    pub(super) status: Arc<FeedStatus>,
    pub(super) pace: Pace,
    pub(super) rng: Rng,
    pub(super) clock: Clock,
    pub(super) metrics: Arc<Metrics>,
}

impl<T: Watched> Feed<T> {
    /// Lists and watches for ever.
    pub(super) async fn run(mut self) {
        let mut why = Why::First;
        let mut backoff = Backoff::new(self.pace.retry);
        loop {
            let version = self.listed(why).await;
            why = self.watched(version, &mut backoff).await;
        }
    }

    /// Takes a list, as often as it takes, and returns its version.
    async fn listed(&mut self, why: Why) -> String {
        let mut backoff = Backoff::new(self.pace.retry);
        let mut longest = if why == Why::First { self.pace.first_retry_max } else { self.pace.retry_max };
        loop {
            self.metrics.kubernetes_listed(T::PLURAL, why.label());
            let wait = match self.list().await {
                Ok((version, objects, unreadable)) => {
                    self.status.listed(unreadable);
                    self.store.replace(self.scope, objects);
                    return version;
                }
                Err(error) if T::OPTIONAL && error.code() == Some(404) => {
                    if self.status.absent() {
                        tracing::info!(
                            resource = T::PLURAL,
                            "the API server does not know the resource; going on without"
                        );
                    }
                    self.status.hear(self.clock.now());
                    self.store.forget(self.scope);
                    self.pace.absent.mul_f64(0.75 + self.rng.unit() / 2.0)
                }
                Err(error) => {
                    self.metrics.kubernetes_failed(T::PLURAL, "list", error.label());
                    self.store.unavailable(self.scope);
                    if T::OPTIONAL && error.code() == Some(403) {
                        longest = self.pace.absent;
                    }
                    let asked = error.retry_after();
                    let sentence = self.status.sentence("list", &error);
                    if self.status.list_failed(error) {
                        tracing::warn!("{sentence}");
                    }
                    backoff.next(longest, asked, &mut self.rng)
                }
            };
            sleep(wait).await;
        }
    }

    async fn list(&self) -> Result<(String, Objects<T>, usize), ApiError> {
        let mut objects = Objects::new();
        let (mut token, mut unreadable) = (None, 0);
        loop {
            let asked = self.resource.page(token, &mut objects);
            let page = timeout(self.pace.answer, asked).await.map_err(|_| ApiError::Late(self.pace.answer))??;
            self.status.hear(self.clock.now());
            unreadable += page.unreadable;
            token = page.next;
            if token.is_none() {
                return Ok((page.version, objects, unreadable));
            }
        }
    }

    /// Watches from `version` on, until a list is due.
    async fn watched(&mut self, mut version: String, backoff: &mut Backoff) -> Why {
        let listed = self.clock.now();
        let relist = self.pace.relist.mul_f64(0.9 + self.rng.unit() / 5.0);
        loop {
            let left = relist.saturating_sub(self.clock.now().since(listed)).as_secs_f64();
            if left <= 0.0 {
                return Why::Periodic;
            }
            let seconds = (WATCH_SECONDS * (0.8 + self.rng.unit() / 5.0)).min(left).max(1.0) as u32;
            let opened = self.clock.now();
            let (ended, spoke) = self.watch(&mut version, seconds).await;
            if spoke || self.clock.now().since(opened) >= self.pace.worked {
                backoff.reset();
            }
            let (label, text, why) = match &ended {
                Ended::Well => continue,
                Ended::Early => ("closed", "it ends as soon as it is open".to_owned(), None),
                Ended::Stalled => {
                    let text = format!("nothing was said for {} s", self.pace.stall.as_secs_f64());
                    ("stall", text, Some(Why::Stall))
                }
                Ended::Failed(error) => {
                    let why = match error.code() {
                        Some(410) => Some(Why::Gone),
                        // What was allowed a moment ago may not be now: a list tells.
                        Some(401 | 403 | 404) => Some(Why::Failed),
                        _ => None,
                    };
                    (error.label(), error.to_string(), why)
                }
            };
            self.metrics.kubernetes_failed(T::PLURAL, "watch", label);
            // That a version has become too old, or a connection silent, is in the nature of things.
            let natural = matches!(why, Some(Why::Gone | Why::Stall));
            if why == Some(Why::Failed) || (!natural && backoff.failures() > 0) {
                let sentence = self.status.sentence("watch", &text);
                if self.status.watch_failed(text) {
                    tracing::warn!("{sentence}");
                }
            } else {
                tracing::info!(resource = T::PLURAL, reason = label, "a watch has ended");
            }
            if why != Some(Why::Stall) {
                let asked = if let Ended::Failed(error) = &ended { error.retry_after() } else { Duration::ZERO };
                let wait = backoff.next(self.pace.retry_max, asked, &mut self.rng);
                sleep(wait).await;
            }
            match why {
                Some(why) => return why,
                None if backoff.failures() > WATCH_TRIES && !matches!(ended, Ended::Early) => return Why::Failed,
                None => {}
            }
        }
    }

    /// One watch from `version` on, which moves along; and whether it said anything.
    async fn watch(&mut self, version: &mut String, seconds: u32) -> (Ended, bool) {
        let opening = self.resource.watch(version, seconds);
        let mut lines = match timeout(self.pace.answer, opening).await {
            Ok(Ok(lines)) => lines,
            Ok(Err(error)) => return (Ended::Failed(error), false),
            Err(_) => return (Ended::Failed(ApiError::Late(self.pace.answer)), false),
        };
        let opened = self.clock.now();
        self.status.hear(opened);
        let mut spoke = false;
        let ended = self.follow(&mut lines, version, opened, &mut spoke).await;
        (ended, spoke)
    }

    async fn follow(&mut self, lines: &mut Lines, version: &mut String, opened: Tick, spoke: &mut bool) -> Ended {
        loop {
            let line = match timeout(self.pace.stall, lines.next()).await {
                Err(_) => return Ended::Stalled,
                Ok(Err(error)) => return Ended::Failed(error),
                Ok(Ok(None)) if self.clock.now().since(opened) >= self.pace.worked => {
                    self.status.watched();
                    return Ended::Well;
                }
                Ok(Ok(None)) => return Ended::Early,
                Ok(Ok(Some(line))) => line,
            };
            let (event, after) = read_line::<T>(&line);
            let kind = self.take(event);
            let kind = match kind {
                Ok(kind) => kind,
                Err(refusal) => return Ended::Failed(ApiError::Refused(refusal)),
            };
            if let Some(after) = after {
                *version = after;
            }
            *spoke = true;
            self.status.hear(self.clock.now());
            self.status.watched();
            self.metrics.kubernetes_event(T::PLURAL, kind);
        }
    }

    fn take(&self, event: Event<T>) -> Result<&'static str, Refusal> {
        match event {
            Event::There(key, uid, Some(object)) => {
                self.store.put(self.scope, key, uid, object);
                Ok("changed")
            }
            Event::There(key, _, None) => {
                self.store.remove(self.scope, &key, "");
                Ok("foreign")
            }
            Event::Gone(key, uid) => {
                self.store.remove(self.scope, &key, &uid);
                Ok("deleted")
            }
            Event::Bookmark => Ok("bookmark"),
            Event::Unreadable => Ok("unreadable"),
            Event::Error(refusal) => Err(refusal),
        }
    }
}
