//! Request-rate limits that all replicas share: requests per second of a model, requests and tokens per minute of a user
//! (the reference gateway, sections 1.3, 1.5 and 8.4).
//!
//! - The limits of a model are charged in one step by one script, and so are those of a user; in fixed windows on the
//!   server's clock. However many replicas ask at once, no more pass than the limit says.
//! - A place that is not used goes back: the guard's drop sends it, also when the request is gone before the answer comes,
//!   or the answer comes too late for it. What could not be given back is counted.
//! - A request waits for its places for `TANDEM_RATE_LIMIT_WAIT_MS` at most. Then, and while there is no connection,
//!   `TANDEM_RATE_LIMIT_FALLBACK` decides. After a few waits in vain nobody waits for a second.
//! - A user's name is in no metric and in no log.

mod places;
#[cfg(test)]
mod tests;
mod users;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use places::{Places, UserCounts};
pub use users::MAX_USER_NAME;

use self::places::{ModelPlace, SharedPlace, UserCount, UserPlace};
use self::users::{Loaded, Look, Trouble, User, Users};
use super::keys::ModelKeys;
use super::redis::{Charged, Plane, Quota, Rate, RedisError};
use crate::clock::{Clock, Tick};
use crate::knobs::RateFallback;
use crate::load::RateWindow;
use crate::telemetry::Metrics;

/// A call is given up after this, or when a request would. Nobody may wait for it any more by then, but what it charged
/// has to be given back.
const CALL: Duration = Duration::from_secs(1);
/// The window of a model's limit.
const SECOND: Duration = Duration::from_secs(1);
/// The window of a user's limits.
const MINUTE: Duration = Duration::from_mins(1);
/// How often a replica says that it lives.
const CENSUS_BEAT: Duration = Duration::from_secs(1);
/// For how long it counts after that.
const CENSUS_LEASE: Duration = Duration::from_secs(5);
/// So many requests in a row that got no answer in time, and for a while none waits.
const PATIENCE: u32 = 3;
/// The while.
const PAUSE: Duration = Duration::from_secs(1);

/// What a request is limited by.
#[derive(Debug, Default)]
pub struct LimitCall {
    /// Its user.
    pub user: Option<Arc<str>>,
    /// Its model's limit.
    pub model: Option<ModelLimit>,
}

impl LimitCall {
    /// Nothing limits it.
    pub fn is_empty(&self) -> bool {
        self.user.is_none() && self.model.is_none()
    }
}

/// The limit of a model.
#[derive(Debug)]
pub struct ModelLimit {
    /// The model.
    pub model: Arc<str>,
    /// Requests per second, of all replicas together.
    pub per_second: u32,
    /// What this replica has admitted by itself.
    pub window: Arc<RateWindow>,
}

/// Why a request may not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitRefusal {
    /// There is no such user.
    UserUnknown,
    /// The user's record cannot be read, or says nothing.
    UserUnreadable,
    /// The user's requests cannot be counted.
    UserUncountable,
    /// The user has had these requests per minute; more in so long.
    UserRequests(u64, Duration),
    /// The user has used up these tokens per minute; more in so long.
    UserTokens(u64, Duration),
    /// The model has had these requests per second.
    Model(u32),
    /// The model's requests cannot be counted.
    ModelUncountable,
}

/// The places of a request, or why it gets none.
pub type LimitVerdict = Result<Places, LimitRefusal>;

/// What [`SharedLimits`] are made of, beside the connection.
#[derive(Debug)]
pub struct LimitParts {
    /// What happens while Redis cannot be asked.
    pub fallback: RateFallback,
    /// How long a request waits for its places.
    pub wait: Duration,
    /// Names this process among all that ever count with it.
    pub replica: String,
    /// The clock.
    pub clock: Clock,
    /// Counts verdicts and fallbacks.
    pub metrics: Arc<Metrics>,
    /// Calls run here, so that a shutdown waits for what is to be given back. Each ends within a second, or the wait.
    pub tasks: TaskTracker,
}

/// The limits that this replica shares with the others.
#[derive(Debug)]
pub struct SharedLimits {
    plane: Plane,
    parts: LimitParts,
    runtime: Handle,
    users: Users,
    /// Replicas that count, this one included.
    members: AtomicU64,
    /// Requests in a row that got no answer in time.
    misses: AtomicU32,
    /// Until then nobody waits, ticks.
    paused_until: AtomicU64,
    /// The last request had to do without Redis.
    alone: AtomicBool,
    /// The census is over.
    leaving: CancellationToken,
}

/// The answer to a charge.
enum Taken {
    /// The place of the first limit, and what is charged to each by now.
    Granted(SharedPlace, Vec<Rate>),
    /// The first limit, by its place, that refused, and when its window ends.
    Refused(usize, Duration),
}

impl SharedLimits {
    /// Limits over this connection. To be called within a runtime.
    pub fn new(plane: Plane, parts: LimitParts) -> Arc<SharedLimits> {
        Arc::new(SharedLimits {
            plane,
            parts,
            runtime: Handle::current(),
            users: Users::default(),
            members: AtomicU64::new(1),
            misses: AtomicU32::new(0),
            paused_until: AtomicU64::new(0),
            alone: AtomicBool::new(false),
            leaving: CancellationToken::new(),
        })
    }

    /// How many replicas divide a limit among themselves when each counts alone: those that were alive when Redis last
    /// answered, at least 1.
    pub fn members(&self) -> u64 {
        self.members.load(Ordering::Relaxed)
    }

    /// How long a request waits for its places.
    pub fn wait(&self) -> Duration {
        self.parts.wait
    }

    /// Says once a second that this replica lives, and hears how many do, until the stop.
    pub async fn keep_census(self: Arc<Self>, stop: CancellationToken) {
        let mut beat = tokio::time::interval(CENSUS_BEAT);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let count = async {
            loop {
                beat.tick().await;
                // Without an answer the last one holds.
                if let Ok(members) = self.plane.census(&self.parts.replica, CENSUS_LEASE, CALL).await {
                    self.members.store(members.max(1), Ordering::Relaxed);
                }
            }
        };
        tokio::select! {
            () = count => {}
            () = stop.cancelled() => {}
            () = self.leaving.cancelled() => {}
        }
    }

    /// Ends that, and says goodbye. If it does not arrive, the lease ends.
    pub async fn leave(&self) {
        self.leaving.cancel();
        let _ = self.plane.census(&self.parts.replica, Duration::ZERO, CALL).await;
    }

    /// Takes the places of a request, the user's first. What was taken goes back when a later limit refuses.
    pub async fn charge(self: &Arc<Self>, call: LimitCall) -> LimitVerdict {
        let until = self.parts.clock.now().plus(self.parts.wait);
        let mut places = Places::default();
        if let Some(name) = call.user {
            places.user = Some(self.charge_user(&name, until).await?);
        }
        if let Some(limit) = call.model {
            places.model = Some(self.charge_model(&limit, until).await?);
        }
        Ok(places)
    }

    async fn charge_user(self: &Arc<Self>, name: &Arc<str>, until: Tick) -> Result<UserPlace, LimitRefusal> {
        let user = match self.user(name, until).await {
            Some(Ok(Some(user))) => user,
            Some(Ok(None)) => {
                self.parts.metrics.rate_limited("user", "unknown");
                return Err(LimitRefusal::UserUnknown);
            }
            Some(Err(Trouble::Unusable)) => {
                self.parts.metrics.rate_limited("user", "unusable");
                tracing::warn!(
                    "the record of a user is not usable: an object with the numbers rpm and tpm is expected"
                );
                return Err(LimitRefusal::UserUnreadable);
            }
            Some(Err(Trouble::Redis)) | None => return self.user_without(name, None),
        };
        let [requests, tokens] = user.keys.limits();
        let quota = |amount, most| Quota { amount, most, window: MINUTE };
        let limits = vec![
            (requests.to_owned(), quota(1, user.record.requests())),
            (tokens.to_owned(), quota(0, user.record.tokens())),
        ];
        match self.take(limits, until).await {
            Some(Taken::Granted(place, each)) => {
                self.parts.metrics.rate_limited("user_requests", "granted");
                let charged = |at: usize| each.get(at).map_or(0, |rate| rate.charged);
                let counts = UserCounts { requests: charged(0), tokens: charged(1) };
                Ok(UserPlace { user: Some(user), count: UserCount::Shared(place), counts: Some(counts) })
            }
            Some(Taken::Refused(by, ends_in)) => Err(self.user_refused(&user, by == 0, ends_in)),
            None => self.user_without(name, Some(user)),
        }
    }

    fn user_refused(&self, user: &User, by_requests: bool, ends_in: Duration) -> LimitRefusal {
        if by_requests {
            self.parts.metrics.rate_limited("user_requests", "refused");
            LimitRefusal::UserRequests(user.record.requests(), ends_in)
        } else {
            self.parts.metrics.rate_limited("user_tokens", "refused");
            LimitRefusal::UserTokens(user.record.tokens(), ends_in)
        }
    }

    /// What becomes of a user's request while Redis cannot be asked. The last record that was read still counts.
    fn user_without(&self, name: &str, user: Option<Arc<User>>) -> Result<UserPlace, LimitRefusal> {
        let was_read = user.is_some();
        let user = user.or_else(|| self.users.last_known(name));
        let uncounted = |user| UserPlace { user, count: UserCount::Uncounted, counts: None };
        match (self.parts.fallback, user) {
            (RateFallback::Closed, _) => {
                self.fall_back("user", "closed");
                Err(if was_read { LimitRefusal::UserUncountable } else { LimitRefusal::UserUnreadable })
            }
            (RateFallback::Open, user) => {
                self.fall_back("user", "open");
                Ok(uncounted(user))
            }
            // Nobody knows the limit: an unknown user cannot be told from one whose record is unread.
            (RateFallback::Local, None) => {
                self.fall_back("user", "uncounted");
                Ok(uncounted(None))
            }
            (RateFallback::Local, Some(user)) => {
                self.fall_back("user", "local");
                match user.take_place(self.members(), self.parts.clock.now()) {
                    Ok(place) => {
                        self.parts.metrics.rate_limited("user_requests", "granted");
                        Ok(UserPlace { user: Some(user), count: UserCount::Local(place), counts: None })
                    }
                    Err((by_requests, ends_in)) => Err(self.user_refused(&user, by_requests, ends_in)),
                }
            }
        }
    }

    async fn charge_model(self: &Arc<Self>, limit: &ModelLimit, until: Tick) -> Result<ModelPlace, LimitRefusal> {
        let quota = Quota { amount: 1, most: limit.per_second.into(), window: SECOND };
        let key = ModelKeys::new(&limit.model).rate("rps");
        let place = match self.take(vec![(key, quota)], until).await {
            Some(Taken::Granted(place, _)) => Some(ModelPlace::Shared(place)),
            Some(Taken::Refused(..)) => None,
            None => match self.parts.fallback {
                RateFallback::Closed => {
                    self.fall_back("model", "closed");
                    return Err(LimitRefusal::ModelUncountable);
                }
                RateFallback::Open => {
                    self.fall_back("model", "open");
                    return Ok(ModelPlace::Uncounted);
                }
                RateFallback::Local => {
                    self.fall_back("model", "local");
                    let part = u32::try_from(part(limit.per_second.into(), self.members())).unwrap_or(u32::MAX);
                    limit.window.admit(part, self.parts.clock.now()).map(ModelPlace::Local)
                }
            },
        };
        self.parts.metrics.rate_limited("model", if place.is_some() { "granted" } else { "refused" });
        place.ok_or(LimitRefusal::Model(limit.per_second))
    }

    /// Charges these limits in one step. `None`: Redis did not say in time.
    async fn take(self: &Arc<Self>, limits: Vec<(String, Quota)>, until: Tick) -> Option<Taken> {
        let this = Arc::clone(self);
        let call = async move {
            let borrowed: Vec<(&str, Quota)> = limits.iter().map(|(key, quota)| (key.as_str(), *quota)).collect();
            match this.plane.charge_rates(&borrowed, CALL.max(this.parts.wait)).await {
                Ok(Charged { refused_by: Some(by), each }) => {
                    Some(Taken::Refused(by, each.get(by).map(|rate| rate.ends_in).unwrap_or_default()))
                }
                Ok(Charged { refused_by: None, each }) => {
                    let window = each.first()?.window;
                    let (key, quota) = limits.into_iter().next()?;
                    Some(Taken::Granted(SharedPlace::new(this, key, window, quota), each))
                }
                Err(error) => {
                    // It may have run: then a place is lost until its window ends.
                    if error == RedisError::Late {
                        this.parts.metrics.rate_limit_settled("charge", "unknown");
                    }
                    tracing::debug!(%error, "limits cannot be charged");
                    None
                }
            }
        };
        if self.is_paused() {
            return None;
        }
        let (tell, told) = oneshot::channel();
        self.spawn(async move {
            // The request may not be there any more: the answer is then dropped, and that gives the place back.
            let _ = tell.send(call.await);
        });
        let taken = self.in_time(until, told).await?.ok()?;
        if taken.is_some() && self.alone.swap(false, Ordering::Relaxed) {
            tracing::info!("request-rate limits are shared again");
        }
        taken
    }

    /// The user's record, at most a second old. `None`: Redis did not say in time.
    async fn user(self: &Arc<Self>, name: &Arc<str>, until: Tick) -> Option<Loaded> {
        let now = self.parts.clock.now();
        let mut answer = match self.users.look(name, now) {
            Look::Fresh(user) => return Some(Ok(Some(user))),
            Look::Wait(answer) => answer,
            Look::Load(tell, answer) => {
                let (this, name) = (Arc::clone(self), Arc::clone(name));
                self.spawn(async move {
                    let record = this.plane.user_record(&name, CALL.max(this.parts.wait)).await;
                    let _ = tell.send(Some(this.users.keep(&name, record, now)));
                });
                answer
            }
        };
        if self.is_paused() {
            return None;
        }
        self.in_time(until, answer.wait_for(Option::is_some)).await?.ok()?.clone()
    }

    fn is_paused(&self) -> bool {
        self.parts.clock.now().0 < self.paused_until.load(Ordering::Relaxed)
    }

    /// Waits, but not longer than until then. After some misses in a row nobody waits for a while.
    async fn in_time<T>(&self, until: Tick, answer: impl Future<Output = T>) -> Option<T> {
        if let Ok(answer) = tokio::time::timeout_at(self.parts.clock.instant_at(until), answer).await {
            self.misses.store(0, Ordering::Relaxed);
            return Some(answer);
        }
        if self.misses.fetch_add(1, Ordering::Relaxed) + 1 >= PATIENCE {
            self.misses.store(0, Ordering::Relaxed);
            self.paused_until.store(self.parts.clock.now().plus(PAUSE).0, Ordering::Relaxed);
        }
        None
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        // By its handle: guards may be dropped where no runtime is entered.
        self.parts.tasks.spawn_on(task, &self.runtime);
    }

    fn fall_back(&self, limit: &'static str, action: &'static str) {
        self.parts.metrics.rate_limit_fallback(limit, action);
        if !self.alone.swap(true, Ordering::Relaxed) {
            tracing::warn!(limit, action, "Redis cannot be asked about request-rate limits");
        }
    }

    /// Gives a place back.
    fn refund(self: &Arc<Self>, key: String, window: u64, quota: Quota) {
        let this = Arc::clone(self);
        self.spawn(async move {
            let result = match this.plane.refund(&key, quota.amount, window, quota.window, CALL).await {
                Ok(rate) if rate.granted => "done",
                Ok(_) => "window_over",
                Err(_) => "failed",
            };
            this.parts.metrics.rate_limit_settled("refund", result);
        });
    }

    /// Counts the tokens of an answer.
    fn spend(self: &Arc<Self>, key: String, tokens: u64) {
        let this = Arc::clone(self);
        self.spawn(async move {
            let quota = Quota { amount: tokens, most: u64::MAX, window: MINUTE };
            let result = match this.plane.charge_rates(&[(&key, quota)], CALL).await {
                Ok(_) => "done",
                Err(_) => "failed",
            };
            this.parts.metrics.rate_limit_settled("tokens", result);
        });
    }
}

/// The part of a limit that one of so many replicas may use, rounded up.
fn part(limit: u64, members: u64) -> u64 {
    limit.div_ceil(members.max(1))
}
