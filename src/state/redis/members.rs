//! Who is a member of a ledger: a question of people, not of the protocol.

use std::time::Duration;

use fred::interfaces::ClientLike;
use fred::types::{ClusterHash, CustomCommand, Value};

use super::counters::unreadable;
use super::{Plane, RedisError, failure, options};
use crate::state::keys::ModelKeys;

/// Members that are listed at most.
const MAX_LISTED: i64 = 64;

impl Plane {
    /// The members that end first, with the time in ms until their lease ends on the server's clock.
    pub async fn ledger_members(&self, keys: &ModelKeys, deadline: Duration) -> Result<Vec<(u32, i64)>, RedisError> {
        let [_, leases, ..] = keys.ledger();
        let client = self.client.with_options(&options(deadline));
        let ask = |command: &'static str, words: Vec<Value>, hash: ClusterHash| {
            let client = client.clone();
            async move {
                let command = CustomCommand::new_static(command, hash, false);
                client.custom::<Value, Value>(command, words).await.map_err(|error| failure(&error))
            }
        };
        let words = vec![leases.into(), 0.into(), (MAX_LISTED - 1).into(), "WITHSCORES".into()];
        let Value::Array(found) = ask("ZRANGE", words, ClusterHash::FirstKey).await? else { return Err(unreadable()) };
        let slot = ClusterHash::Custom(fred::util::redis_keyslot(leases.as_bytes()));
        let Value::Array(time) = ask("TIME", Vec::new(), slot).await? else { return Err(unreadable()) };
        let part = |at: usize| time.get(at).and_then(Value::as_i64).ok_or_else(unreadable);
        let now = part(0)? * 1_000 + part(1)? / 1_000;
        let mut members = Vec::with_capacity(found.len() / 2);
        for pair in found.chunks(2) {
            let [member, ends] = pair else { return Err(unreadable()) };
            let member = member.as_bytes().and_then(|bytes| bytes.try_into().ok()).ok_or_else(unreadable)?;
            let ends = ends.as_f64().ok_or_else(unreadable)?;
            members.push((u32::from_le_bytes(member), ends as i64 - now));
        }
        Ok(members)
    }
}
