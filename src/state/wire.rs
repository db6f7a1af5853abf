//! Arguments and replies of the ledger's scripts, packed as the scripts' headers say.

use serde::{Deserialize, Serialize};

use super::codec::{CodecError, finished, pack, unpack};
use crate::load::Share;

/// Names a ledger from its first member to the loss of its data.
pub type Epoch = [u8; 8];

/// Pods that one call may publish; more would hold up the server.
pub const MAX_PUBLISHED: usize = 1_000;

/// The scripts count in doubles. With every field below this, sums over 64 replicas are exact.
const MAX_FIELD: u64 = (1 << 47) - 1;

/// A share as the scripts see it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Packed {
    running: u32,
    pending: u32,
    prefills: u32,
    decode_open: u32,
    decode_tokens: u64,
    decode_start_sum_ms: u64,
    prefill_tokens: u64,
    kv_tokens: u64,
}

impl From<Share> for Packed {
    fn from(share: Share) -> Packed {
        Packed {
            running: share.running,
            pending: share.pending,
            prefills: share.prefills,
            decode_open: u32::try_from(share.decode_open).unwrap_or(u32::MAX),
            decode_tokens: share.decode_tokens.min(MAX_FIELD),
            decode_start_sum_ms: share.decode_start_sum_ms.min(MAX_FIELD),
            prefill_tokens: share.prefill_tokens.min(MAX_FIELD),
            kv_tokens: share.kv_tokens.min(MAX_FIELD),
        }
    }
}

impl From<Packed> for Share {
    fn from(packed: Packed) -> Share {
        Share {
            running: packed.running,
            pending: packed.pending,
            prefills: packed.prefills,
            decode_open: u64::from(packed.decode_open),
            decode_tokens: packed.decode_tokens,
            decode_start_sum_ms: packed.decode_start_sum_ms,
            prefill_tokens: packed.prefill_tokens,
            kv_tokens: packed.kv_tokens,
        }
    }
}

/// A share as it comes back from the plane.
pub(super) fn as_stored(share: Share) -> Share {
    Packed::from(share).into()
}

/// A difference of shares: as [`Packed`], with signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    counts: [i32; 4],
    amounts: [i64; 4],
}

impl Difference {
    /// The share with the difference applied; `None` when it does not fit, so something was missed.
    pub fn on(self, share: Share) -> Option<Share> {
        let [running, pending, prefills, decode_open] = self.counts;
        let [decode_tokens, decode_start_sum_ms, prefill_tokens, kv_tokens] = self.amounts;
        Some(Share {
            running: share.running.checked_add_signed(running)?,
            pending: share.pending.checked_add_signed(pending)?,
            prefills: share.prefills.checked_add_signed(prefills)?,
            decode_tokens: share.decode_tokens.checked_add_signed(decode_tokens)?,
            decode_open: share.decode_open.checked_add_signed(i64::from(decode_open))?,
            decode_start_sum_ms: share.decode_start_sum_ms.checked_add_signed(decode_start_sum_ms)?,
            prefill_tokens: share.prefill_tokens.checked_add_signed(prefill_tokens)?,
            kv_tokens: share.kv_tokens.checked_add_signed(kv_tokens)?,
        })
    }
}

/// What a sync is for, beside publishing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// A member goes on.
    #[default]
    Stay,
    /// A replica becomes a member.
    Join,
    /// A member goes: its lease ends now.
    Leave,
}

/// One call of `ledger_sync.lua`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SyncCall {
    /// The epoch that the member knows.
    pub epoch: Epoch,
    /// The epoch that would follow.
    pub nonce: Epoch,
    /// The member's number; 0 when it joins.
    pub member: u32,
    /// What it is for.
    pub purpose: Purpose,
    /// Counts the member's calls.
    pub sequence: u64,
    /// The highest sequence that the server has confirmed.
    pub acknowledged: u64,
    /// The version of the member's view; 0 = it has none.
    pub since: u64,
    /// How long the member counts as alive after this call, in ms.
    pub lease_ms: u32,
    /// How many changed pods to return.
    pub limit: u32,
    /// What to publish: absolute shares, each pod once.
    pub shares: Vec<(u64, Share)>,
}

impl SyncCall {
    /// ARGV 1 and 2.
    pub fn arguments(&self) -> Result<[Vec<u8>; 2], CodecError> {
        let flags: u32 = match self.purpose {
            Purpose::Stay => 0,
            Purpose::Join => 1,
            Purpose::Leave => 2,
        };
        let mut head = Vec::with_capacity(56);
        pack(&(self.epoch, self.nonce, self.member, flags), &mut head)?;
        pack(&(self.sequence, self.acknowledged, self.since, self.lease_ms, self.limit), &mut head)?;
        Ok([head, packed_shares(&self.shares)?])
    }
}

fn packed_shares(shares: &[(u64, Share)]) -> Result<Vec<u8>, CodecError> {
    let mut bytes = Vec::with_capacity(shares.len() * 56);
    for (pod, share) in shares {
        pack(&(pod, Packed::from(*share)), &mut bytes)?;
    }
    Ok(bytes)
}

fn unpacked_shares(bytes: &mut &[u8], count: u32) -> Result<Vec<(u64, Share)>, CodecError> {
    let mut shares = Vec::new();
    for _ in 0..count {
        let (pod, share): (u64, Packed) = unpack(bytes)?;
        shares.push((pod, share.into()));
    }
    Ok(shares)
}

/// What became of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncStatus {
    /// Done.
    Done,
    /// The caller is no member (any more); it has to join.
    Stranger,
    /// A later call came first; nothing was done.
    Overtaken,
}

/// The reply of `ledger_sync.lua`.
#[derive(Clone, Debug, PartialEq)]
pub struct SyncReply {
    /// What became of the call.
    pub status: SyncStatus,
    /// There are more changes: ask again.
    pub more: bool,
    /// Everything seen before this does not count any more.
    pub reset: bool,
    /// The epoch of the ledger.
    pub epoch: Epoch,
    /// The member's number.
    pub member: u32,
    /// How many members there are, the expired included; 0 = this call did not look.
    pub members: u32,
    /// The highest sequence that the server has written for this member.
    pub sequence: u64,
    /// The version of the view that has these changes.
    pub version: u64,
    /// The server's clock, in ms since the Unix epoch.
    pub now_ms: u64,
    /// Members whose lease is over.
    pub expired: Vec<u32>,
    /// Pods that others have changed, with the sum of the others' shares.
    pub changes: Vec<(u64, Share)>,
}

impl SyncReply {
    /// Reads a reply.
    pub fn read(mut bytes: &[u8]) -> Result<SyncReply, CodecError> {
        let (status, flags, epoch, member, members): (u32, u32, Epoch, u32, u32) = unpack(&mut bytes)?;
        let (sequence, version, now_ms, expired, changed): (u64, u64, u64, u32, u32) = unpack(&mut bytes)?;
        let status = match status {
            0 => SyncStatus::Done,
            1 => SyncStatus::Stranger,
            2 => SyncStatus::Overtaken,
            other => return Err(CodecError::Malformed(format!("status {other}"))),
        };
        let expired = (0..expired).map(|_| unpack(&mut bytes)).collect::<Result<Vec<u32>, CodecError>>()?;
        let changes = unpacked_shares(&mut bytes, changed)?;
        finished(bytes)?;
        let (more, reset) = (flags & 1 != 0, flags & 2 != 0);
        Ok(SyncReply { status, more, reset, epoch, member, members, sequence, version, now_ms, expired, changes })
    }
}

/// One call of `ledger_reap.lua`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReapCall {
    /// The epoch in which the member was seen to be dead.
    pub epoch: Epoch,
    /// Its number.
    pub member: u32,
    /// Where to go on; 0 at first.
    pub cursor: u64,
    /// Pods to look at in this step.
    pub limit: u32,
}

impl ReapCall {
    /// ARGV 1.
    pub fn argument(&self) -> Result<Vec<u8>, CodecError> {
        let mut head = Vec::with_capacity(24);
        pack(&(self.epoch, self.member, self.cursor, self.limit), &mut head)?;
        Ok(head)
    }
}

/// The reply of `ledger_reap.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReapReply {
    /// The member is gone.
    Gone {
        /// Shares that left in this step.
        shares: u32,
    },
    /// Call again.
    GoOn {
        /// With this cursor.
        cursor: u64,
        /// Shares that left in this step.
        shares: u32,
    },
    /// It lives, or nobody knows it, or the epoch is another one.
    NotDead,
}

impl ReapReply {
    /// Reads a reply.
    pub fn read(mut bytes: &[u8]) -> Result<ReapReply, CodecError> {
        let (status, cursor, shares): (u32, u64, u32) = unpack(&mut bytes)?;
        finished(bytes)?;
        match status {
            0 => Ok(ReapReply::Gone { shares }),
            1 => Ok(ReapReply::GoOn { cursor, shares }),
            2 => Ok(ReapReply::NotDead),
            other => Err(CodecError::Malformed(format!("status {other}"))),
        }
    }
}

/// One call of `claim.lua`.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimCall {
    /// The epoch that the member knows.
    pub epoch: Epoch,
    /// The member's number.
    pub member: u32,
    /// Counts the member's calls, and names the grant.
    pub sequence: u64,
    /// The version of the view that the decision was made on.
    pub since: u64,
    /// How many changed pods to return.
    pub limit: u32,
    /// The member's shares of the charged pods, the charge included.
    pub shares: Vec<(u64, Share)>,
    /// The pods that the decision rested on; empty = every pod.
    pub rested_on: Vec<u64>,
}

impl ClaimCall {
    /// ARGV 1 to 3.
    pub fn arguments(&self) -> Result<[Vec<u8>; 3], CodecError> {
        let mut head = Vec::with_capacity(32);
        pack(&(self.epoch, self.member, self.sequence, self.since, self.limit), &mut head)?;
        let mut rested_on = Vec::with_capacity(self.rested_on.len() * 8);
        for pod in &self.rested_on {
            pack(pod, &mut rested_on)?;
        }
        Ok([head, packed_shares(&self.shares)?, rested_on])
    }
}

/// What became of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimStatus {
    /// The charge is made.
    Granted,
    /// The ledger is not what the member thinks; a sync will find out what happened.
    Unsure,
    /// A later call came first; nothing was done.
    Overtaken,
    /// Something that the decision rested on has changed; nothing was done.
    Changed,
}

/// The reply of `claim.lua`.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimReply {
    /// What became of the claim.
    pub status: ClaimStatus,
    /// There are more changes than were asked for.
    pub more: bool,
    /// The version of the view that has these changes.
    pub version: u64,
    /// The server's clock, in ms since the Unix epoch.
    pub now_ms: u64,
    /// Pods that others have changed, with the sum of the others' shares.
    pub changes: Vec<(u64, Share)>,
}

impl ClaimReply {
    /// Reads a reply.
    pub fn read(mut bytes: &[u8]) -> Result<ClaimReply, CodecError> {
        let (status, flags, version, now_ms, changed): (u32, u32, u64, u64, u32) = unpack(&mut bytes)?;
        let status = match status {
            0 => ClaimStatus::Granted,
            1 => ClaimStatus::Unsure,
            2 => ClaimStatus::Overtaken,
            3 => ClaimStatus::Changed,
            other => return Err(CodecError::Malformed(format!("status {other}"))),
        };
        let changes = unpacked_shares(&mut bytes, changed)?;
        finished(bytes)?;
        Ok(ClaimReply { status, more: flags & 1 != 0, version, now_ms, changes })
    }
}

/// An announcement: one call has changed something.
#[derive(Clone, Debug, PartialEq)]
pub struct News {
    /// The epoch of the ledger.
    pub epoch: Epoch,
    /// The version after the change; the one before is one less.
    pub version: u64,
    /// Who has changed its share, or whose share was taken away.
    pub member: u32,
    /// What has changed; empty = too much to tell.
    pub differences: Vec<(u64, Difference)>,
}

impl News {
    /// Reads an announcement.
    pub fn read(mut bytes: &[u8]) -> Result<News, CodecError> {
        let (epoch, version, member): (Epoch, u64, u32) = unpack(&mut bytes)?;
        let mut differences = Vec::new();
        while !bytes.is_empty() {
            differences.push(unpack(&mut bytes)?);
        }
        Ok(News { epoch, version, member, differences })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: Share = Share {
        running: 1,
        pending: 2,
        prefills: 3,
        decode_tokens: 5,
        decode_open: 4,
        decode_start_sum_ms: 6,
        prefill_tokens: 7,
        kv_tokens: 8,
    };

    #[test]
    fn golden_arguments() {
        let call = SyncCall {
            epoch: *b"epochnow",
            nonce: *b"epochnew",
            member: 9,
            purpose: Purpose::Leave,
            sequence: 10,
            acknowledged: 11,
            since: 12,
            lease_ms: 3000,
            limit: 500,
            shares: vec![(0x0102_0304_0506_0708, SHARE)],
        };
        let [head, shares] = call.arguments().unwrap();
        let mut expected = b"epochnowepochnew\x09\0\0\0\x02\0\0\0".to_vec();
        expected.extend([10u64, 11, 12].map(u64::to_le_bytes).concat());
        expected.extend([3000u32, 500].map(u32::to_le_bytes).concat());
        assert_eq!(head, expected);
        let mut expected = vec![8, 7, 6, 5, 4, 3, 2, 1];
        expected.extend([1u32, 2, 3, 4].map(u32::to_le_bytes).concat());
        expected.extend([5u64, 6, 7, 8].map(u64::to_le_bytes).concat());
        assert_eq!(shares, expected);
    }

    #[test]
    fn fields_stay_where_doubles_are_exact() {
        let huge = Share { decode_tokens: u64::MAX, decode_open: u64::MAX, ..SHARE };
        let stored = as_stored(huge);
        assert_eq!((stored.decode_tokens, stored.decode_open), (MAX_FIELD, u64::from(u32::MAX)));
        assert_eq!(as_stored(SHARE), SHARE);
    }

    #[test]
    fn replies_are_read_whole_or_not_at_all() {
        let mut bytes = Vec::new();
        pack(&(0u32, 3u32, *b"epochnow", 9u32, 2u32, 10u64, 12u64, 1000u64, 1u32, 1u32), &mut bytes).unwrap();
        pack(&77u32, &mut bytes).unwrap();
        bytes.extend(packed_shares(&[(5, SHARE)]).unwrap());
        let reply = SyncReply::read(&bytes).unwrap();
        assert_eq!((reply.status, reply.more, reply.reset, reply.member), (SyncStatus::Done, true, true, 9));
        assert_eq!((reply.expired.as_slice(), reply.changes.as_slice()), (&[77][..], &[(5, SHARE)][..]));
        for end in 0..bytes.len() {
            assert!(SyncReply::read(&bytes[..end]).is_err(), "cut at {end}");
        }
        bytes.push(0);
        assert_eq!(SyncReply::read(&bytes), Err(CodecError::Trailing(1)));
        bytes[0] = 9;
        assert!(SyncReply::read(&bytes).is_err());
        // Counts that promise more than there is are no reason to allocate.
        let mut hollow = Vec::new();
        pack(&(0u32, 0u32, [0u8; 8], 0u32, 0u32, 0u64, 0u64, 0u64, u32::MAX, u32::MAX), &mut hollow).unwrap();
        assert!(SyncReply::read(&hollow).is_err());
    }

    #[test]
    fn differences_apply_or_say_that_they_do_not_fit() {
        let minus = Difference { counts: [-1, -2, -3, -4], amounts: [-5, -6, -7, -8] };
        assert_eq!(minus.on(SHARE), Some(Share::ZERO));
        assert_eq!(minus.on(Share::ZERO), None);
        let plus = Difference { counts: [1, 2, 3, 4], amounts: [5, 6, 7, 8] };
        assert_eq!(plus.on(Share::ZERO), Some(SHARE));
    }
}
