//! Tokens per user within a sliding window, for `vtc-basic`.
//!
//! A table of fixed size like that of sessions, so that clients, who can invent users, cannot make it grow: a new user in
//! a full set replaces the one that asked longest ago. Nothing here waits or locks. Replicas tell one another what they
//! count ([`crate::state::findings`]), so that a user is the same everywhere.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::window::Window;
use crate::clock::Tick;
use crate::knobs::VtcKnobs;

/// Users that are remembered.
pub const MAX_USERS: usize = 4096;
/// A longer name is that of no user, bytes.
const MAX_NAME: usize = 256;
const WAYS: usize = 8;

/// Tokens are kept in thousandths, since their weights may have decimals.
const UNIT: f64 = 1000.0;

/// What a selection wants to know of its user.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UserTokens {
    /// Weighted tokens within the window.
    pub tokens: f64,
    /// The smallest and the largest count of a user that has any; `None` = no user has.
    pub bounds: Option<(f64, f64)>,
}

/// The table.
#[derive(Debug)]
pub struct Users {
    /// Made when the first user is counted: most gateways count none.
    entries: OnceLock<Box<[Entry]>>,
    least: AtomicU64,
    most: AtomicU64,
    /// The second in which the bounds were last looked for, plus one.
    looked: AtomicU64,
}

#[derive(Debug, Default)]
struct Entry {
    /// 0 = free.
    user: AtomicU64,
    /// When it was last added to, in seconds.
    last: AtomicU64,
    window: Window,
}

const NOBODY: u64 = u64::MAX;

impl Default for Users {
    /// An empty table.
    fn default() -> Users {
        Users {
            entries: OnceLock::new(),
            least: AtomicU64::new(NOBODY),
            most: AtomicU64::new(0),
            looked: AtomicU64::new(0),
        }
    }
}

impl Users {
    /// The number of a user; replicas with the same seed know it by the same one. `None` for a name that is none.
    pub fn number(name: &[u8], seed: u64) -> Option<u64> {
        let name = name.trim_ascii();
        let usable = !name.is_empty() && name.len() <= MAX_NAME;
        // 0 stands for a free place.
        usable.then(|| xxhash_rust::xxh64::xxh64(name, seed).max(1))
    }

    /// The user's tokens, and the bounds of all users'. These are exact once a second; in between, they take in what grows
    /// beyond them.
    pub fn look(&self, user: u64, now: Tick, knobs: &VtcKnobs) -> UserTokens {
        self.look_for_bounds(now, knobs);
        let entries = self.entries();
        let count = set(entries, user).iter().find(|entry| entry.user.load(Ordering::Relaxed) == user);
        let tokens = count.map_or(0, |entry| entry.window.sum(now, knobs.window));
        let (least, most) = (self.least.load(Ordering::Relaxed), self.most.load(Ordering::Relaxed));
        let scaled = |amount: u64| amount as f64 / UNIT;
        UserTokens { tokens: scaled(tokens), bounds: (least <= most).then(|| (scaled(least), scaled(most))) }
    }

    /// The user is given so many weighted tokens.
    pub fn add(&self, user: u64, tokens: f64, now: Tick, knobs: &VtcKnobs) {
        let amount = (tokens * UNIT) as u64;
        let second = now.0 / 1_000_000_000;
        let entries = self.entries.get_or_init(|| (0..MAX_USERS).map(|_| Entry::default()).collect());
        let Some(entry) = place(set(entries, user), user) else { return };
        entry.last.store(second, Ordering::Relaxed);
        entry.window.add(amount, now, knobs.window);
        let sum = entry.window.sum(now, knobs.window);
        if sum > 0 {
            self.least.fetch_min(sum, Ordering::Relaxed);
            self.most.fetch_max(sum, Ordering::Relaxed);
        }
    }

    fn entries(&self) -> &[Entry] {
        self.entries.get().map_or(&[], |entries| entries)
    }

    /// Once a second: a look at all users, some ten microseconds.
    fn look_for_bounds(&self, now: Tick, knobs: &VtcKnobs) {
        let second = now.0 / 1_000_000_000 + 1;
        let looked = self.looked.load(Ordering::Relaxed);
        let ours = looked < second
            && self.looked.compare_exchange(looked, second, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !ours {
            return;
        }
        let known = self.entries().iter().filter(|entry| entry.user.load(Ordering::Relaxed) != 0);
        let sums = known.map(|entry| entry.window.sum(now, knobs.window)).filter(|sum| *sum > 0);
        let (least, most) = sums.fold((NOBODY, 0), |(least, most), sum| (least.min(sum), most.max(sum)));
        self.least.store(least, Ordering::Relaxed);
        self.most.store(most, Ordering::Relaxed);
    }

    /// Users that the table knows.
    pub fn len(&self) -> usize {
        self.entries().iter().filter(|entry| entry.user.load(Ordering::Relaxed) != 0).count()
    }

    /// No user is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn set(entries: &[Entry], user: u64) -> &[Entry] {
    let sets = (entries.len() / WAYS).max(1);
    let start = usize::try_from(user % sets as u64).unwrap_or(0) * WAYS;
    entries.get(start..start + WAYS).unwrap_or_default()
}

/// The user's entry of its set; the one that was not used for longest becomes it.
fn place(set: &[Entry], user: u64) -> Option<&Entry> {
    if let Some(entry) = set.iter().find(|entry| entry.user.load(Ordering::Relaxed) == user) {
        return Some(entry);
    }
    let idle = |entry: &&Entry| (entry.user.load(Ordering::Relaxed) != 0, entry.last.load(Ordering::Relaxed));
    let entry = set.iter().min_by_key(idle)?;
    let before = entry.user.load(Ordering::Relaxed);
    // If another user has taken the place meanwhile, this one is not counted this time.
    entry.user.compare_exchange(before, user, Ordering::Relaxed, Ordering::Relaxed).ok()?;
    entry.window.clear();
    Some(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Tick {
        Tick::from_millis(seconds * 1000)
    }

    #[test]
    fn counts_and_bounds() {
        let (users, knobs) = (Users::default(), VtcKnobs::default());
        let [alice, bob] = [b"alice", b"  bob"].map(|name| Users::number(name, 7).unwrap());
        assert_eq!(Users::number(b"bob ", 7), Some(bob));
        assert_eq!((Users::number(b" ", 7), Users::number(&[b'x'; 257], 7)), (None, None));
        assert_eq!(users.look(alice, at(1), &knobs), UserTokens { tokens: 0.0, bounds: None });
        users.add(alice, 400.0, at(1), &knobs);
        assert_eq!(users.look(alice, at(1), &knobs), UserTokens { tokens: 400.0, bounds: Some((400.0, 400.0)) });
        users.add(bob, 1000.5, at(2), &knobs);
        assert_eq!(users.look(alice, at(2), &knobs), UserTokens { tokens: 400.0, bounds: Some((400.0, 1000.5)) });
        users.add(alice, 800.0, at(3), &knobs);
        assert_eq!(users.look(alice, at(4), &knobs), UserTokens { tokens: 1200.0, bounds: Some((1000.5, 1200.0)) });
        // Five minutes after its first tokens, those have left; a little later everything has.
        assert_eq!(users.look(alice, at(330), &knobs).bounds, None);
        assert_eq!(users.look(alice, at(330), &knobs).tokens, 0.0);
    }

    #[test]
    fn invented_users_take_no_more_than_the_table() {
        let (users, knobs) = (Users::default(), VtcKnobs::default());
        let real = Users::number(b"real", 7).unwrap();
        for number in 0..100_000u64 {
            users.add(Users::number(format!("user {number}").as_bytes(), 7).unwrap(), 1.0, at(number / 100), &knobs);
            users.add(real, 1.0, at(number / 100), &knobs);
        }
        assert_eq!(users.len(), MAX_USERS);
        assert!(users.look(real, at(1000), &knobs).tokens > 20_000.0, "who asks all the time is remembered");
    }

    #[test]
    fn nothing_is_lost_when_many_count_at_once() {
        let (users, knobs) = (Users::default(), VtcKnobs::default());
        let user = Users::number(b"alice", 7).unwrap();
        users.add(user, 1.0, at(1), &knobs);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..1000).for_each(|_| users.add(user, 2.0, at(1), &knobs)));
            }
        });
        let expected = UserTokens { tokens: 16_001.0, bounds: Some((16_001.0, 16_001.0)) };
        assert_eq!(users.look(user, at(2), &knobs), expected);
    }
}
