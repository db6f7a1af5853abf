//! Values that replicas tell one another and no script opens.

use serde::{Deserialize, Serialize};

use super::codec::{CodecError, Versioned};

/// One bin of a batch of observed prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bin {
    /// Shortest prompt of the bin, in tokens.
    pub first: u64,
    /// Longest prompt of the bin.
    pub last: u64,
    /// How many prompts.
    pub requests: u64,
    /// The sum of their tokens.
    pub tokens: u64,
}

/// What one replica observed since its last batch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// By bins, whatever layout the replica has.
    pub bins: Vec<Bin>,
}

/// Blocks of a prompt that a pod has from now on: what [`super::findings::Told`] was before its present version.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixUpdate {
    /// Who says so, so that it can skip what it reads of itself.
    pub replica: u64,
    /// The pod, by [`crate::load::pod_id`].
    pub pod: u64,
    /// Chained hashes of the blocks, from the beginning of the prompt.
    pub blocks: Vec<u64>,
}

impl Versioned for Batch {
    const VERSION: u8 = 1;

    fn read_previous(_: &[u8]) -> Option<Result<Batch, CodecError>> {
        None
    }
}

impl Versioned for PrefixUpdate {
    const VERSION: u8 = 1;

    fn read_previous(_: &[u8]) -> Option<Result<PrefixUpdate, CodecError>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::codec::{decode, encode};

    #[test]
    fn golden_bytes() {
        let batch = Batch { bins: vec![Bin { first: 0, last: 255, requests: 3, tokens: 400 }] };
        let bytes = encode(&batch).unwrap();
        assert_eq!(bytes, [0xd7, 1, 1, 0, 251, 255, 0, 3, 251, 144, 1]);
        assert_eq!(decode::<Batch>(&bytes), Ok(batch));
        let update = PrefixUpdate { replica: 1, pod: 2, blocks: vec![3, u64::MAX] };
        let bytes = encode(&update).unwrap();
        assert_eq!(bytes, [0xd7, 1, 1, 2, 2, 3, 253, 255, 255, 255, 255, 255, 255, 255, 255]);
        assert_eq!(decode::<PrefixUpdate>(&bytes), Ok(update));
    }
}
