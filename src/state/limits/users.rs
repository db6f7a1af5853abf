//! Users: their records, for a second each, and what this replica counts for them when it has to count alone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use super::{MINUTE, part};
use crate::clock::Tick;
use crate::state::keys::UserKeys;
use crate::state::redis::RedisError;

/// The longest name of a user, bytes. Nobody has a longer one.
pub const MAX_USER_NAME: usize = 256;
/// For how long a record is taken for what Redis would say.
const FRESH: Duration = Duration::from_secs(1);
/// Records kept: up to twice as many. Only users that exist have one.
const MAX_USERS: usize = 4096;
/// A longer record is none, bytes.
const MAX_RECORD: usize = 4096;
/// Requests per minute of a user whose record says 0 (the reference gateway, section 8.4).
const DEFAULT_RPM: i64 = 100;
/// Tokens per minute for each request per minute, when the record says 0 (the same section).
const TOKENS_PER_REQUEST: i64 = 1000;

/// What is stored about a user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UserRecord {
    rpm: i64,
    tpm: i64,
}

impl UserRecord {
    /// From JSON. Names of fields are taken in any case, as the reference does.
    pub(super) fn read(json: &[u8]) -> Option<UserRecord> {
        if json.len() > MAX_RECORD {
            return None;
        }
        let object: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(json).ok()?;
        let mut record = UserRecord::default();
        for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
            if name.eq_ignore_ascii_case("rpm") {
                record.rpm = value.as_i64()?;
            } else if name.eq_ignore_ascii_case("tpm") {
                record.tpm = value.as_i64()?;
            }
        }
        Some(record)
    }

    fn rpm(self) -> i64 {
        if self.rpm == 0 { DEFAULT_RPM } else { self.rpm }
    }

    /// Requests per minute; a negative number lets none pass.
    pub(super) fn requests(self) -> u64 {
        u64::try_from(self.rpm()).unwrap_or(0)
    }

    /// Tokens per minute; a negative number lets none pass.
    pub(super) fn tokens(self) -> u64 {
        let tpm = if self.tpm == 0 { self.rpm().saturating_mul(TOKENS_PER_REQUEST) } else { self.tpm };
        u64::try_from(tpm).unwrap_or(0)
    }

    /// Says itself how many tokens the user may have.
    pub(super) fn limits_tokens(self) -> bool {
        self.tpm > 0
    }
}

/// A user whose record was read.
#[derive(Debug)]
pub(super) struct User {
    pub(super) record: UserRecord,
    pub(super) keys: UserKeys,
    read_at: Tick,
    local: Arc<Mutex<Minute>>,
}

/// What this replica alone has counted in one minute.
#[derive(Debug, Default)]
struct Minute {
    number: u64,
    requests: u64,
    tokens: u64,
}

/// A place in it; given back on drop unless it is kept.
#[derive(Debug)]
pub(super) struct LocalPlace {
    minute: Arc<Mutex<Minute>>,
    number: u64,
    kept: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one can panic halfway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl User {
    /// Takes a place in this replica's part of the user's limits, which is one of so many. Else whether it is the requests
    /// (or the tokens) that are used up, and for how long.
    pub(super) fn take_place(&self, members: u64, now: Tick) -> Result<LocalPlace, (bool, Duration)> {
        let number = now.0 / nanos(MINUTE);
        let ends_in = Duration::from_nanos(nanos(MINUTE) - now.0 % nanos(MINUTE));
        let mut minute = lock(&self.local);
        if minute.number != number {
            *minute = Minute { number, ..Minute::default() };
        }
        if minute.requests >= part(self.record.requests(), members) {
            return Err((true, ends_in));
        }
        if minute.tokens >= part(self.record.tokens(), members) {
            return Err((false, ends_in));
        }
        minute.requests += 1;
        Ok(LocalPlace { minute: Arc::clone(&self.local), number, kept: false })
    }
}

impl LocalPlace {
    /// The request is served.
    pub(super) fn keep(&mut self) {
        self.kept = true;
    }

    /// Counts tokens, in the minute that the request began in, or the one after it.
    pub(super) fn spend(&self, tokens: u64) {
        let mut minute = lock(&self.minute);
        minute.tokens = minute.tokens.saturating_add(tokens);
    }
}

impl Drop for LocalPlace {
    fn drop(&mut self) {
        let mut minute = lock(&self.minute);
        if !self.kept && minute.number == self.number {
            minute.requests = minute.requests.saturating_sub(1);
        }
    }
}

/// Why there is no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Redis cannot be asked.
    Redis,
    /// What it said is no record.
    Unusable,
}

/// What came of reading a record; `None`: there is no such user.
pub(super) type Loaded = Result<Option<Arc<User>>, Trouble>;
type Answer = Option<Loaded>;

/// How to come by a user.
#[derive(Debug)]
pub(super) enum Look {
    /// Known.
    Fresh(Arc<User>),
    /// Somebody asks already.
    Wait(watch::Receiver<Answer>),
    /// To be asked, and the answer to be told.
    Load(watch::Sender<Answer>, watch::Receiver<Answer>),
}

/// The records that were read lately.
#[derive(Debug, Default)]
pub(super) struct Users(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    young: HashMap<Arc<str>, Arc<User>>,
    /// Those that were young when there were too many; gone the next time, unless read again before.
    old: HashMap<Arc<str>, Arc<User>>,
    loading: HashMap<Arc<str>, watch::Receiver<Answer>>,
}

impl Table {
    fn get(&self, name: &str) -> Option<&Arc<User>> {
        self.young.get(name).or_else(|| self.old.get(name))
    }
}

impl Users {
    /// A record that is no older than a second, or how to come by it: one at a time asks.
    pub(super) fn look(&self, name: &Arc<str>, now: Tick) -> Look {
        let mut table = lock(&self.0);
        if let Some(user) = table.get(name).filter(|user| now.since(user.read_at) < FRESH) {
            return Look::Fresh(Arc::clone(user));
        }
        // A task that was given up leaves a closed channel.
        if let Some(answer) = table.loading.get(name).filter(|answer| answer.has_changed().is_ok()) {
            return Look::Wait(answer.clone());
        }
        let (tell, answer) = watch::channel(None);
        table.loading.insert(Arc::clone(name), answer.clone());
        Look::Load(tell, answer)
    }

    /// The last record that was read, however old.
    pub(super) fn last_known(&self, name: &str) -> Option<Arc<User>> {
        lock(&self.0).get(name).cloned()
    }

    /// Takes in what Redis said when it was asked at `asked`.
    pub(super) fn keep(&self, name: &Arc<str>, record: Result<Option<Bytes>, RedisError>, asked: Tick) -> Loaded {
        let mut table = lock(&self.0);
        table.loading.remove(name);
        let record = record.map_err(|error| {
            tracing::debug!(%error, "the record of a user cannot be read");
            Trouble::Redis
        })?;
        let read = record.map(|json| UserRecord::read(&json).ok_or(Trouble::Unusable)).transpose();
        let Ok(Some(record)) = read else {
            table.young.remove(name);
            table.old.remove(name);
            return read.map(|_| None);
        };
        let local = table.get(name).map(|user| Arc::clone(&user.local)).unwrap_or_default();
        let user = Arc::new(User { record, keys: UserKeys::new(name), read_at: asked, local });
        if table.young.len() >= MAX_USERS && !table.young.contains_key(name) {
            table.old = std::mem::take(&mut table.young);
        }
        table.young.insert(Arc::clone(name), Arc::clone(&user));
        Ok(Some(user))
    }

    /// Records held.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let table = lock(&self.0);
        table.young.len() + table.old.len() + table.loading.len()
    }
}
