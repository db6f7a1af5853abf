//! One resource of one scope: list it, watch it, and begin again as needed.
//!
//! - A list is put in force when its last page is there, and holds for all that is not on it: that has gone.
//! - A watch goes on where the last one ended. After 410, after silence, and from time to time, a list is taken again.
//! - The API server is asked to end each watch well before it would pass for silent: of a kind that does not change, a real
//!   one says nothing at all, not even by bookmarks.
//! - Whatever goes wrong, there is a wait before the next request, and what is known stays in force.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::Watched;
use super::api::{ApiError, Lines, Patience, Resource};
use super::backoff::Backoff;
use super::outage::Outage;
use super::page::PageSize;
use super::status::{FeedStatus, WatchFailure};
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
    /// How long until the head of an answer is there, and from one piece of a page to the next.
    pub answer: Duration,
    /// How long one page may take in all. API servers end a request after 60 s, unless told otherwise.
    pub page: Duration,
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
            page: Duration::from_secs(90),
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
/// The longest life of a watch as a part of the silence at which it is given up: the end of one that says nothing else
/// is a sign of life that no API server leaves out.
const WATCH_PART: f64 = 0.75;
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
    /// It said nothing for too long, not even that it ends.
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
    pub(super) page: PageSize,
    pub(super) outage: Outage,
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
        let longest = if why == Why::First { self.pace.first_retry_max } else { self.pace.retry_max };
        // What came to pass once is counted once, however many lists it takes.
        let mut reason = why;
        let mut forbidden_since = None;
        loop {
            self.metrics.kubernetes_listed(T::PLURAL, reason.label());
            reason = Why::Failed;
            let listed = self.list().await;
            if !matches!(&listed, Err(error) if error.code() == Some(403)) {
                forbidden_since = None;
            }
            let wait = match listed {
                Ok((version, objects, unreadable)) => {
                    self.status.listed(unreadable);
                    self.outage.over("list", self.clock.now());
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
                    self.outage.over("list", self.clock.now());
                    self.store.forget(self.scope);
                    self.pace.absent.mul_f64(0.75 + self.rng.unit() / 2.0)
                }
                Err(error) => {
                    self.metrics.kubernetes_failed(T::PLURAL, "list", error.label());
                    self.store.unavailable(self.scope);
                    let asked = error.retry_after();
                    let mut longest = longest;
                    if T::OPTIONAL && error.code() == Some(403) {
                        // An API server that has just started refuses what it will grant a moment later. Only what stays
                        // forbidden is asked for more rarely.
                        let since = *forbidden_since.get_or_insert(self.clock.now());
                        if self.clock.now().since(since) >= self.pace.absent {
                            longest = self.pace.absent;
                        }
                    }
                    self.list_failed(error);
                    backoff.next(longest, asked, &mut self.rng)
                }
            };
            sleep(wait).await;
        }
    }

    /// Notes that there was no list, and tells it once.
    fn list_failed(&mut self, error: ApiError) {
        let sentence = self.status.sentence("list", &error);
        let outage = error.is_outage();
        let news = self.status.list_failed(error);
        self.tell("list", &sentence, outage, news);
    }

    /// One line of the log for what concerns this kind, and one for all kinds together when the API server is away.
    fn tell(&mut self, verb: &'static str, sentence: &str, outage: bool, news: bool) {
        let now = self.clock.now();
        if outage {
            self.outage.began(verb, sentence, now);
        } else {
            self.outage.over(verb, now);
            if news {
                tracing::warn!("{sentence}");
            }
        }
    }

    async fn list(&mut self) -> Result<(String, Objects<T>, usize), ApiError> {
        let patience = Patience { silence: self.pace.answer, whole: self.pace.page };
        let mut objects = Objects::new();
        let (mut token, mut unreadable) = (None::<String>, 0);
        loop {
            let (limit, asked) = (self.page.limit(), self.clock.now());
            let page = match self.resource.page(token.as_deref(), limit, patience, &mut objects).await {
                Ok(page) => page,
                // It came, but not fast enough: less of it does, from where this page began.
                Err(error @ (ApiError::Slow(_) | ApiError::Broken(_))) if self.page.shrink() => {
                    self.status.hear(self.clock.now());
                    self.metrics.kubernetes_failed(T::PLURAL, "list", error.label());
                    let of = self.page.limit();
                    tracing::info!(resource = T::PLURAL, %error, limit, of, "a page was too long; asking for less");
                    continue;
                }
                Err(error) => {
                    if matches!(error, ApiError::Late(_)) {
                        self.page.shrink();
                    }
                    return Err(error);
                }
            };
            let now = self.clock.now();
            self.page.came(now.since(asked), self.pace.answer);
            self.status.hear(now);
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
            let longest = WATCH_SECONDS.min(self.pace.stall.as_secs_f64() * WATCH_PART);
            let seconds = (longest * (0.8 + self.rng.unit() / 5.0)).min(left).max(1.0) as u32;
            let opened = self.clock.now();
            let (ended, spoke) = self.watch(&mut version, seconds).await;
            if spoke || self.clock.now().since(opened) >= self.pace.worked {
                backoff.reset();
            }
            let (label, failure, why) = match &ended {
                Ended::Well => continue,
                Ended::Early => ("closed", WatchFailure::Early, None),
                Ended::Stalled => {
                    let text = format!("nothing was said for {} s", self.pace.stall.as_secs_f64());
                    ("stall", WatchFailure::Error(text), Some(Why::Stall))
                }
                Ended::Failed(error) => {
                    let why = match error.code() {
                        Some(410) => Some(Why::Gone),
                        // What was allowed a moment ago may not be now: a list tells.
                        Some(401 | 403 | 404) => Some(Why::Failed),
                        _ => None,
                    };
                    (error.label(), WatchFailure::Error(error.to_string()), why)
                }
            };
            self.metrics.kubernetes_failed(T::PLURAL, "watch", label);
            // That a version has become too old, or a connection silent, is in the nature of things.
            let natural = matches!(why, Some(Why::Gone | Why::Stall));
            if why == Some(Why::Failed) || (!natural && backoff.failures() > 0) {
                let sentence = self.status.sentence("watch", &failure);
                let outage = matches!(&ended, Ended::Failed(error) if error.is_outage());
                let news = self.status.watch_failed(failure);
                self.tell("watch", &sentence, outage, news);
            } else {
                tracing::debug!(resource = T::PLURAL, reason = label, "a watch has ended");
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
        let mut lines = match self.resource.watch(version, seconds, self.pace.answer).await {
            Ok(lines) => lines,
            Err(error) => return (Ended::Failed(error), false),
        };
        let opened = self.clock.now();
        self.status.hear(opened);
        self.status.opened();
        self.outage.over("watch", opened);
        let mut spoke = false;
        let life = Duration::from_secs(seconds.into());
        let worked = self.pace.worked.min(life.mul_f64(0.9));
        // A watch that has something to say for ever, but never ends, is opened anew as well.
        let overdue = life + self.pace.stall;
        let following = self.follow(&mut lines, version, opened.plus(worked), &mut spoke);
        let ended = timeout(overdue, following).await.unwrap_or(Ended::Well);
        (ended, spoke)
    }

    /// Takes events until the watch ends. From `worked` on it has lived long enough, if nothing happened.
    async fn follow(&mut self, lines: &mut Lines, version: &mut String, worked: Tick, spoke: &mut bool) -> Ended {
        let mut silent = Duration::ZERO;
        loop {
            let left = self.pace.stall.saturating_sub(silent);
            let until = worked.since(self.clock.now());
            let patience = if until.is_zero() { left } else { until.min(left) };
            let line = match lines.next(patience).await {
                Err(ApiError::Late(_)) => {
                    silent += patience;
                    if silent >= self.pace.stall {
                        return Ended::Stalled;
                    }
                    self.status.watched();
                    continue;
                }
                Err(error) => return Ended::Failed(error),
                Ok(None) if self.clock.now() >= worked => {
                    self.status.watched();
                    return Ended::Well;
                }
                Ok(None) => return Ended::Early,
                Ok(Some(line)) => line,
            };
            silent = Duration::ZERO;
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
