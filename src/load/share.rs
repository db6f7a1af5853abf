//! What one gateway replica tells the others about its work on one pod, and the name of that pod across replicas.
//!
//! Everything in a [`Share`] is an additive integer, so that the work of a fleet of replicas is the sum of their shares
//! and a share can be taken out of a sum again without a trace. Nothing here depends on the order of the additions.

use xxhash_rust::xxh64::Xxh64;

/// The zero of [`Share::decode_start_sum_ms`]: 2026-01-01T00:00:00Z in milliseconds since the Unix epoch. A sum over
/// times since 1970 would leave the integers that a double holds exactly (2^53) at about 5,000 open requests per pod;
/// with this offset a pod may have some 20,000 open in 2040.
pub const SHARE_TIME_ZERO_MS: u64 = 1_767_225_600_000;

/// The work that one replica, or a sum of replicas, has on one pod incarnation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Share {
    /// Decode requests handed over.
    pub running: u32,
    /// Decode requests charged whose prefill leg still runs.
    pub pending: u32,
    /// Outstanding prefill legs.
    pub prefills: u32,
    /// Prompt tokens of the requests charged on the decode side.
    pub decode_tokens: u64,
    /// How many requests are charged on the decode side by the token ledger.
    pub decode_open: u64,
    /// Sum over those requests of the time of their charge, in ms since [`SHARE_TIME_ZERO_MS`] on the clock that all
    /// replicas agree on (that of Redis). A reader at `now` gets the sum of their ages as `decode_open × now − sum`.
    pub decode_start_sum_ms: u64,
    /// Prompt tokens being computed on the prefill side, request cost included.
    pub prefill_tokens: u64,
    /// The same of requests whose KV blocks the pod holds; includes `prefill_tokens`.
    pub kv_tokens: u64,
}

impl Share {
    /// Nothing outstanding.
    pub const ZERO: Share = Share {
        running: 0,
        pending: 0,
        prefills: 0,
        decode_tokens: 0,
        decode_open: 0,
        decode_start_sum_ms: 0,
        prefill_tokens: 0,
        kv_tokens: 0,
    };

    /// Nothing outstanding.
    pub fn is_zero(&self) -> bool {
        *self == Share::ZERO
    }

    /// The sum; a field that would overflow stays at its maximum.
    #[must_use]
    pub fn plus(self, other: Share) -> Share {
        Share {
            running: self.running.saturating_add(other.running),
            pending: self.pending.saturating_add(other.pending),
            prefills: self.prefills.saturating_add(other.prefills),
            decode_tokens: self.decode_tokens.saturating_add(other.decode_tokens),
            decode_open: self.decode_open.saturating_add(other.decode_open),
            decode_start_sum_ms: self.decode_start_sum_ms.saturating_add(other.decode_start_sum_ms),
            prefill_tokens: self.prefill_tokens.saturating_add(other.prefill_tokens),
            kv_tokens: self.kv_tokens.saturating_add(other.kv_tokens),
        }
    }

    /// What is left when `other` is taken out; a field that would go below zero is zero.
    #[must_use]
    pub fn minus(self, other: Share) -> Share {
        Share {
            running: self.running.saturating_sub(other.running),
            pending: self.pending.saturating_sub(other.pending),
            prefills: self.prefills.saturating_sub(other.prefills),
            decode_tokens: self.decode_tokens.saturating_sub(other.decode_tokens),
            decode_open: self.decode_open.saturating_sub(other.decode_open),
            decode_start_sum_ms: self.decode_start_sum_ms.saturating_sub(other.decode_start_sum_ms),
            prefill_tokens: self.prefill_tokens.saturating_sub(other.prefill_tokens),
            kv_tokens: self.kv_tokens.saturating_sub(other.kv_tokens),
        }
    }

    /// Sum of the ages in seconds, at `now_ms` (since [`SHARE_TIME_ZERO_MS`]), of the requests charged on the decode
    /// side; never negative, whatever the clocks say (the growth term of the reference gateway, section 8.2).
    pub fn decode_age_sum(&self, now_ms: u64) -> f64 {
        self.ages_at(now_ms) as f64 / 1000.0
    }

    /// The same in milliseconds; the largest number there is, if it would be more.
    pub fn decode_age_sum_ms(&self, now_ms: u64) -> u64 {
        u64::try_from(self.ages_at(now_ms)).unwrap_or(u64::MAX)
    }

    fn ages_at(&self, now_ms: u64) -> u128 {
        let at_now = u128::from(self.decode_open) * u128::from(now_ms);
        at_now.saturating_sub(u128::from(self.decode_start_sum_ms))
    }
}

/// The number by which all replicas know a pod incarnation: the same for the same UID and restart count, whatever
/// process computes it. Two of 10,000 pods share one with a probability of about 3e-12.
pub fn pod_id(uid: &str, restarts: u32) -> u64 {
    let mut hash = Xxh64::new(0);
    hash.update(uid.as_bytes());
    // A byte that no UTF-8 text contains keeps ("a", 1) apart from any other UID.
    hash.update(&[0xff]);
    hash.update(&restarts.to_le_bytes());
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(seed: u32) -> Share {
        let wide = u64::from(seed);
        Share {
            running: seed,
            pending: seed + 1,
            prefills: seed + 2,
            decode_tokens: wide + 3,
            decode_open: wide + 4,
            decode_start_sum_ms: wide + 5,
            prefill_tokens: wide + 6,
            kv_tokens: wide + 7,
        }
    }

    #[test]
    fn a_share_leaves_a_sum_without_a_trace() {
        let sum = share(10).plus(share(200)).plus(share(3000));
        assert_eq!(sum.minus(share(200)), share(10).plus(share(3000)));
        assert!(share(7).minus(share(7)).is_zero());
        assert!(!share(0).is_zero());
    }

    #[test]
    fn no_field_wraps() {
        let most = Share { running: u32::MAX, kv_tokens: u64::MAX, ..Share::ZERO };
        assert_eq!(most.plus(Share { running: 1, kv_tokens: 1, ..Share::ZERO }), most);
        assert_eq!(Share::ZERO.minus(share(1)), Share::ZERO);
    }

    #[test]
    fn ages_add_up_and_never_go_negative() {
        let two = Share { decode_open: 2, decode_start_sum_ms: 1_000 + 3_000, ..Share::ZERO };
        assert_eq!(two.decode_age_sum(5_000), 6.0);
        assert_eq!(two.decode_age_sum(2_000), 0.0);
        assert_eq!(two.decode_age_sum(0), 0.0);
        assert_eq!(Share::ZERO.decode_age_sum(u64::MAX), 0.0);
        let absurd = Share { decode_open: u64::MAX, ..Share::ZERO };
        assert!(absurd.decode_age_sum(u64::MAX).is_finite());
    }

    #[test]
    fn names_are_stable_and_differ() {
        // Golden: replicas of different versions must agree.
        assert_eq!(pod_id("8b8f2c3e-0000-4000-8000-000000000001", 0), 11_805_692_290_027_166_676);
        assert_ne!(pod_id("a", 0), pod_id("a", 1));
        assert_ne!(pod_id("a", 0), pod_id("b", 0));
        assert_ne!(pod_id("", 0), pod_id("a", 0));
    }
}
