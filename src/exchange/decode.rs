//! Undoing the content codings of a body: as much work as its sender likes, up to the body limit, so never on the event loop.

use std::sync::Arc;

use bytes::Bytes;

use super::admission::{Budget, Reservation};
use crate::request::{Coding, DecodeError, decode};

/// What to decode.
#[derive(Debug)]
pub struct DecodeJob {
    /// The codings, the outermost first.
    pub codings: Vec<Coding>,
    /// The body as it was sent.
    pub body: Bytes,
    /// Longest body that may come of it, bytes.
    pub limit: usize,
    /// The request's share of the common budget; grows as the body does.
    pub reservation: Reservation,
}

/// What came of it.
#[derive(Debug)]
pub struct Decoded {
    /// The body.
    pub body: Result<Bytes, DecodeError>,
    /// The share of the budget that it holds now.
    pub reservation: Reservation,
}

impl DecodeJob {
    /// Does the work.
    pub fn run(self) -> Decoded {
        let DecodeJob { codings, body, limit, mut reservation } = self;
        let body = decode(&codings, &body, limit, &mut |bytes| reservation.grow(bytes));
        Decoded { body, reservation }
    }
}

impl Decoded {
    /// Of a job that was lost.
    pub fn lost(budget: &Arc<Budget>) -> Decoded {
        Decoded { body: Err(DecodeError::Corrupt("any more")), reservation: Reservation::empty(budget) }
    }
}
