//! The last prompt size of every session, for the session-delta charge (the PD document, "Token Load Scoring Policy").
//!
//! A table of fixed size, so clients cannot make it grow. It is set-associative: a key belongs to one set of eight
//! places, and a new key in a full set replaces the one that was used longest ago. (The reference stops taking new keys
//! when its table is full, so that whoever fills it starves all others until the janitor comes.) An entry is one atomic
//! word, so there is nothing to lock and nothing that can be read half.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Tick;

/// A longer key is ignored, bytes.
pub const MAX_SESSION_KEY: usize = 256;

const WAYS: usize = 8;

// The word: 22 bits of the key's hash, 24 bits of prompt tokens, 18 bits of the time in seconds. Zero = free.
const TIME_BITS: u32 = 18;
const TOKEN_BITS: u32 = 24;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;
const MAX_TOKENS: u64 = (1 << TOKEN_BITS) - 1;

/// Longest time that an entry counts: half of what its clock can tell apart, 36 hours.
const MAX_TTL: Duration = Duration::from_secs(1 << (TIME_BITS - 1));

/// The session table.
#[derive(Debug)]
pub struct Sessions {
    words: Box<[AtomicU64]>,
}

fn seconds(now: Tick) -> u64 {
    now.0 / 1_000_000_000
}

fn age(word: u64, now: u64) -> u64 {
    now.wrapping_sub(word) & TIME_MASK
}

impl Sessions {
    /// Room for `capacity` sessions, rounded up to a whole number of sets, eight bytes each.
    pub fn new(capacity: usize) -> Sessions {
        let sets = capacity.div_ceil(WAYS).max(1);
        Sessions { words: (0..sets * WAYS).map(|_| AtomicU64::new(0)).collect() }
    }

    /// [`Sessions::grow`] for the session with this key.
    #[cfg(test)]
    pub(crate) fn grow_by_key(&self, model: &str, key: &[u8], tokens: u64, ttl: Duration, now: Tick) -> Option<u64> {
        self.grow(Sessions::number(model, key, 7)?, tokens, ttl, now)
    }

    /// Notes that the session's prompt now has `tokens` tokens, and returns by how many it grew since it was last seen
    /// no longer than `ttl` ago. `None`: not seen, or not grown; the note is made in any case. A `ttl` of zero turns the
    /// rule off.
    pub fn grow(&self, session: u64, tokens: u64, ttl: Duration, now: Tick) -> Option<u64> {
        if ttl.is_zero() {
            return None;
        }
        let (previous, idle) = self.note(session, tokens, now)?;
        let (fresh, tokens) = (idle <= ttl.min(MAX_TTL).as_secs(), tokens.min(MAX_TOKENS));
        (fresh && tokens > previous).then(|| tokens - previous)
    }

    /// The number by which replicas with the same seed know a session; `None` for a key that is ignored: an empty or
    /// over-long one. The seed keeps clients from choosing keys that share a set.
    pub fn number(model: &str, key: &[u8], seed: u64) -> Option<u64> {
        let usable = !key.is_empty() && key.len() <= MAX_SESSION_KEY;
        usable.then(|| xxhash_rust::xxh64::xxh64(key, xxhash_rust::xxh64::xxh64(model.as_bytes(), seed)))
    }

    /// Another replica saw a session's prompt have so many tokens.
    pub fn learn(&self, session: u64, tokens: u64, now: Tick) {
        self.note(session, tokens, now);
    }

    /// Notes a session's tokens; what they were before, and how many seconds ago that was.
    fn note(&self, hash: u64, tokens: u64, now: Tick) -> Option<(u64, u64)> {
        let fingerprint = hash >> (TIME_BITS + TOKEN_BITS);
        let tokens = tokens.min(MAX_TOKENS);
        let now = seconds(now);
        let sets = self.words.len() / WAYS;
        let set = self.words.chunks_exact(WAYS).nth(usize::try_from(hash % sets as u64).ok()?)?;
        // Fingerprint, tokens and time may all be 0, and then the entry reads as free: a session forgotten once is no harm.
        let entry = fingerprint << (TIME_BITS + TOKEN_BITS) | tokens << TIME_BITS | now & TIME_MASK;
        let mut oldest: Option<(&AtomicU64, u64, u64)> = None;
        for place in set {
            let word = place.load(Ordering::Relaxed);
            if word != 0 && word >> (TIME_BITS + TOKEN_BITS) == fingerprint {
                place.store(entry, Ordering::Relaxed);
                return Some((word >> TIME_BITS & MAX_TOKENS, age(word, now)));
            }
            let idle = if word == 0 { u64::MAX } else { age(word, now) };
            if oldest.is_none_or(|(_, _, most)| idle > most) {
                oldest = Some((place, word, idle));
            }
        }
        if let Some((place, word, _)) = oldest {
            // Somebody else may have taken the place meanwhile; then this key is not remembered this time.
            let _ = place.compare_exchange(word, entry, Ordering::Relaxed, Ordering::Relaxed);
        }
        None
    }

    /// Forgets entries too old to count. To be called now and then, before their clock comes round.
    pub fn sweep(&self, now: Tick) {
        let now = seconds(now);
        for place in &self.words {
            let word = place.load(Ordering::Relaxed);
            if word != 0 && age(word, now) > MAX_TTL.as_secs() {
                // One that was renewed meanwhile stays.
                let _ = place.compare_exchange(word, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// Sessions that the table has an entry of.
    pub fn len(&self) -> usize {
        self.words.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count()
    }

    /// No session is remembered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
