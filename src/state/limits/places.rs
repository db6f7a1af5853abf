//! The places of an admitted request: guards that give them back.

use std::sync::Arc;

use super::SharedLimits;
use super::users::{LocalPlace, User};
use crate::load::RateCharge;
use crate::state::redis::Quota;

/// More tokens than any answer has: what an engine says is not believed beyond this.
const MAX_TOKENS: u64 = u32::MAX as u64;

/// What a user has been charged in the present minute, by all replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserCounts {
    /// Requests, this one included.
    pub requests: u64,
    /// Tokens of answers that have ended.
    pub tokens: u64,
}

/// All places of one request; given back on drop unless they are [kept](Places::keep).
#[derive(Debug, Default)]
pub struct Places {
    pub(super) user: Option<UserPlace>,
    pub(super) model: Option<ModelPlace>,
}

impl From<RateCharge> for Places {
    /// Of a model whose requests this replica counts alone.
    fn from(charge: RateCharge) -> Places {
        Places { user: None, model: Some(ModelPlace::Local(charge)) }
    }
}

#[cfg(test)]
impl Places {
    /// Of a user with this record, which nobody counts.
    pub(crate) fn of_user(record: &'static str, counts: Option<UserCounts>) -> Places {
        let users = super::users::Users::default();
        let record = Ok(Some(bytes::Bytes::from_static(record.as_bytes())));
        let user = users.keep(&"u".into(), record, crate::clock::Tick(0)).unwrap();
        Places { user: Some(UserPlace { user, count: UserCount::Uncounted, counts }), model: None }
    }
}

impl Places {
    /// The request is served: its places stay taken.
    pub fn keep(&mut self) {
        match self.model.take() {
            Some(ModelPlace::Local(charge)) => charge.keep(),
            Some(ModelPlace::Shared(mut place)) => place.kept = true,
            Some(ModelPlace::Uncounted) | None => {}
        }
        match self.user.as_mut().map(|user| &mut user.count) {
            Some(UserCount::Shared(place)) => place.kept = true,
            Some(UserCount::Local(place)) => place.keep(),
            Some(UserCount::Uncounted) | None => {}
        }
    }

    /// The user's record limits tokens: their usage has to be known.
    pub fn counts_tokens(&self) -> bool {
        let user = self.user.as_ref().and_then(|place| place.user.as_ref());
        user.is_some_and(|user| user.record.limits_tokens())
    }

    /// What the user has been charged by now, where that is known.
    pub fn user_counts(&self) -> Option<UserCounts> {
        self.user.as_ref()?.counts
    }

    /// Charges the tokens of the answer to the user, and waits for nothing.
    pub fn spend(&self, tokens: u64) {
        let Some(UserPlace { user: Some(user), count, .. }) = &self.user else { return };
        let tokens = tokens.min(MAX_TOKENS);
        match count {
            _ if tokens == 0 => {}
            UserCount::Shared(place) => place.limits.spend(user.keys.tokens().to_owned(), tokens),
            UserCount::Local(place) => place.spend(tokens),
            UserCount::Uncounted => {}
        }
    }
}

/// The place of a request in its model's second.
#[derive(Debug)]
pub(super) enum ModelPlace {
    /// Counted by this replica.
    Local(RateCharge),
    /// Counted by all.
    Shared(SharedPlace),
    /// Nobody counts.
    Uncounted,
}

/// The place of a request in its user's minute.
#[derive(Debug)]
pub(super) struct UserPlace {
    /// The user, when the record is known.
    pub(super) user: Option<Arc<User>>,
    pub(super) count: UserCount,
    pub(super) counts: Option<UserCounts>,
}

/// Who counts it.
#[derive(Debug)]
pub(super) enum UserCount {
    /// All replicas.
    Shared(SharedPlace),
    /// This one.
    Local(LocalPlace),
    /// Nobody.
    Uncounted,
}

/// A place that all replicas see.
#[derive(Debug)]
pub(super) struct SharedPlace {
    limits: Arc<SharedLimits>,
    key: String,
    window: u64,
    quota: Quota,
    kept: bool,
}

impl SharedPlace {
    /// What was charged to `key` in this window of the server.
    pub(super) fn new(limits: Arc<SharedLimits>, key: String, window: u64, quota: Quota) -> SharedPlace {
        SharedPlace { limits, key, window, quota, kept: false }
    }
}

impl Drop for SharedPlace {
    fn drop(&mut self) {
        if !self.kept {
            self.limits.refund(std::mem::take(&mut self.key), self.window, self.quota);
        }
    }
}
