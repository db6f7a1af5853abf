//! What a replica finds out and the others can use: who holds which prefix, how long a session's prompt was, who fails.
//!
//! None of it has to be exact or soon, so it travels in a capped stream that everybody follows: what is lost is found out
//! again.

use serde::{Deserialize, Serialize};

use super::codec::{CodecError, Versioned, decode_payload};
use super::payload::PrefixUpdate;

/// Blocks of one prompt that are told at most: the first 256 KiB with blocks of 128 bytes.
pub const MAX_TOLD_BLOCKS: usize = 2_048;

/// One thing that a replica found out. Pods are named by [`crate::load::pod_id`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finding {
    /// A pod has these blocks from now on.
    Prefix {
        /// The pod.
        pod: u64,
        /// Chained hashes of the blocks, from the beginning of the prompt.
        blocks: Vec<u64>,
    },
    /// The prompt of a session has so many tokens.
    Session {
        /// [`crate::load::Sessions::hash`] of its key.
        session: u64,
        /// Tokens.
        tokens: u64,
    },
    /// A pod has failed again and again.
    PodFails {
        /// The pod.
        pod: u64,
    },
    /// Two pods have failed together.
    PairFails {
        /// The prefill pod.
        prefill: u64,
        /// The decode pod.
        decode: u64,
    },
    /// A user was given so many weighted tokens. (A replica that does not know this kind yet drops what is told with it.)
    User {
        /// [`crate::load::Users::number`] of its name.
        user: u64,
        /// Tokens.
        tokens: u64,
    },
}

impl Finding {
    /// What it costs to keep, bytes, about.
    pub fn size(&self) -> usize {
        size_of::<Finding>() + if let Finding::Prefix { blocks, .. } = self { size_of_val::<[u64]>(blocks) } else { 0 }
    }
}

/// What one replica tells at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// Who says so, so that it can skip what it reads of itself.
    pub replica: u64,
    /// What it found out.
    pub findings: Vec<Finding>,
}

impl Versioned for Told {
    const VERSION: u8 = 2;

    /// Replicas of the version before told prefixes only, one at a time.
    fn read_previous(payload: &[u8]) -> Option<Result<Told, CodecError>> {
        Some(decode_payload::<PrefixUpdate>(payload).map(|update| Told {
            replica: update.replica,
            findings: vec![Finding::Prefix { pod: update.pod, blocks: update.blocks }],
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::codec::{decode, encode};

    #[test]
    fn golden_bytes() {
        let told = Told {
            replica: 1,
            findings: vec![
                Finding::Prefix { pod: 2, blocks: vec![3, 4] },
                Finding::Session { session: 5, tokens: 6 },
                Finding::PodFails { pod: 7 },
                Finding::PairFails { prefill: 8, decode: 9 },
                Finding::User { user: 10, tokens: 11 },
            ],
        };
        let bytes = encode(&told).unwrap();
        assert_eq!(bytes, [0xd7, 2, 1, 5, 0, 2, 2, 3, 4, 1, 5, 6, 2, 7, 3, 8, 9, 4, 10, 11]);
        assert_eq!(decode::<Told>(&bytes), Ok(told));
    }

    #[test]
    fn replicas_of_two_versions_share_a_stream() {
        let old = PrefixUpdate { replica: 1, pod: 2, blocks: vec![3] };
        let read = decode::<Told>(&encode(&old).unwrap());
        assert_eq!(read, Ok(Told { replica: 1, findings: vec![Finding::Prefix { pod: 2, blocks: vec![3] }] }));
        // The old one does not misread the new: it skips it.
        let new = encode(&Told::default()).unwrap();
        assert!(decode::<PrefixUpdate>(&new).is_err());
    }
}
