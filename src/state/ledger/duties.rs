//! Whom to bury, and when.

use std::collections::BTreeMap;
use std::time::Duration;

use super::LedgerConfig;
use crate::clock::Tick;
use crate::rng::Rng;
use crate::state::wire::ReapReply;

/// After a failed step.
const AGAIN: Duration = Duration::from_millis(500);

/// A dead member.
#[derive(Clone, Copy, Debug)]
pub(super) struct Duty {
    pub(super) due: Tick,
    pub(super) cursor: u64,
}

/// The dead that this replica knows of; a server names at most eight at a time.
#[derive(Debug, Default)]
pub(super) struct Duties(BTreeMap<u32, Duty>);

impl Duties {
    /// A reply named these members as expired, and no others.
    pub(super) fn seen(&mut self, expired: impl Iterator<Item = u32>, now: Tick, config: &LedgerConfig, rng: &mut Rng) {
        let mut kept = BTreeMap::new();
        for member in expired {
            let fresh = || {
                let delay = config.reap_delay + config.reap_spread.mul_f64(rng.unit());
                Duty { due: now.plus(delay), cursor: 0 }
            };
            kept.insert(member, self.0.remove(&member).unwrap_or_else(fresh));
        }
        self.0 = kept;
    }

    /// The most urgent one.
    pub(super) fn first(&self) -> Option<(u32, Duty)> {
        self.0.iter().min_by_key(|(_, duty)| duty.due).map(|(member, duty)| (*member, *duty))
    }

    /// A step was answered, or failed.
    pub(super) fn finish(&mut self, member: u32, reply: Option<ReapReply>, now: Tick) {
        match reply {
            Some(ReapReply::Gone { .. } | ReapReply::NotDead) => {
                self.0.remove(&member);
            }
            Some(ReapReply::GoOn { cursor, .. }) => {
                if let Some(duty) = self.0.get_mut(&member) {
                    duty.cursor = cursor;
                }
            }
            None => {
                if let Some(duty) = self.0.get_mut(&member) {
                    duty.due = now.plus(AGAIN);
                }
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
