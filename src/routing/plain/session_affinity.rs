//! `session-affinity`: the pod that served the session before (reference gateway, section 10).
//!
//! An address from a client (`x-session-id`) is compared with the candidates' and is good for nothing else. A key
//! (`x-aibrix-session-key`) is hashed together with each candidate's address, and the highest hash wins: rendezvous
//! hashing, so that when a pod comes or goes only its own share of the keys moves. The hash is the reference's, so that
//! both kinds of gateway send a session to the same pod.

use std::sync::Arc;

use super::Affinity;
use crate::fleet::Pod;

/// Longest key that counts, bytes.
const MAX_KEY_BYTES: usize = 256;

/// The candidate of the session; `None` when nothing names one.
pub(super) fn find<'a>(pods: impl IntoIterator<Item = &'a Arc<Pod>> + Clone, affinity: Affinity<'_>) -> Option<usize> {
    if let Some(address) = affinity.address
        && let Some(index) = pods.clone().into_iter().position(|pod| &*pod.address == address)
    {
        return Some(index);
    }
    let key = affinity.key.filter(|key| !key.is_empty() && key.len() <= MAX_KEY_BYTES)?;
    let start = fnv1a(fnv1a(OFFSET, key), &[0]);
    let hashed = pods.into_iter().enumerate().map(|(index, pod)| (fnv1a(start, pod.address.as_bytes()), pod, index));
    // The highest hash, of equal ones the lower address.
    hashed.max_by(|a, b| a.0.cmp(&b.0).then_with(|| b.1.address.cmp(&a.1.address))).map(|(_, _, index)| index)
}

const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

/// FNV-1a, 64 bits, going on from `hash`.
fn fnv1a(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values published with the algorithm.
    #[test]
    fn fnv1a_is_the_published_one() {
        for (text, expected) in
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)]
        {
            assert_eq!(fnv1a(OFFSET, text.as_bytes()), expected, "{text}");
        }
        assert_eq!(fnv1a(fnv1a(OFFSET, b"foo"), b"bar"), 0x8594_4171_f739_67e8);
    }
}
