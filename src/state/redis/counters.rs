//! Request-rate limits, users, and the number and the identities of replicas.

use std::time::Duration;

use bytes::Bytes;
use fred::interfaces::ClientLike;
use fred::types::{ClusterHash, CustomCommand, Value};

use super::{Plane, RedisError, bytes, failure, options};
use crate::state::codec::CodecError;
use crate::state::identity::{Identity, IdentityCall, NUMBERS};
use crate::state::keys::{self, ModelKeys};
use crate::state::scripts;

/// The answer of `rate.lua` about one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Charged, or given back.
    pub granted: bool,
    /// The window that was counted; to be named when the charge is given back.
    pub window: u64,
    /// What is charged in it by now.
    pub charged: u64,
    /// When it ends.
    pub ends_in: Duration,
}

/// What is charged to one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// How much; 0 = the limit is only looked at, and refuses when it is reached.
    pub amount: u64,
    /// The limit, per window.
    pub most: u64,
    /// Length of the window.
    pub window: Duration,
}

/// The answer about several limits that were charged in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charged {
    /// The first limit, by its place, that refused; then nothing was charged.
    pub refused_by: Option<usize>,
    /// About each limit.
    pub each: Vec<Rate>,
}

impl Plane {
    /// Charges all of these limits, or none when one of them refuses. The keys share a slot.
    pub async fn charge_rates(&self, limits: &[(&str, Quota)], deadline: Duration) -> Result<Charged, RedisError> {
        let numbers = limits.iter().map(|(key, quota)| (*key, [quota.amount, quota.most, millis(quota.window)]));
        let (refused_by, mut each) = self.rates("charge", numbers, deadline).await?;
        for rate in &mut each {
            rate.granted = refused_by.is_none();
        }
        Ok(Charged { refused_by, each })
    }

    /// Charges `amount` to the limit called `limit` of the model, if `most` per `window` allow it.
    pub async fn charge_rate(
        &self,
        keys: &ModelKeys,
        limit: &str,
        amount: u64,
        most: u64,
        window: Duration,
        deadline: Duration,
    ) -> Result<Rate, RedisError> {
        let charged = self.charge_rates(&[(&keys.rate(limit), Quota { amount, most, window })], deadline).await?;
        charged.each.first().copied().ok_or_else(unreadable)
    }

    /// Gives `amount` back to the window that it was charged to, if that has not ended.
    pub async fn refund_rate(
        &self,
        keys: &ModelKeys,
        limit: &str,
        amount: u64,
        charged: Rate,
        window: Duration,
        deadline: Duration,
    ) -> Result<Rate, RedisError> {
        self.refund(&keys.rate(limit), amount, charged.window, window, deadline).await
    }

    /// The same for a limit by its key, and a window by its number.
    pub async fn refund(
        &self,
        key: &str,
        amount: u64,
        charged_in: u64,
        window: Duration,
        deadline: Duration,
    ) -> Result<Rate, RedisError> {
        let numbers = std::iter::once((key, [amount, charged_in, millis(window)]));
        let (over, each) = self.rates("refund", numbers, deadline).await?;
        let rate = each.first().copied().ok_or_else(unreadable)?;
        Ok(Rate { granted: over.is_none(), ..rate })
    }

    async fn rates<'k>(
        &self,
        what: &str,
        limits: impl Iterator<Item = (&'k str, [u64; 3])>,
        deadline: Duration,
    ) -> Result<(Option<usize>, Vec<Rate>), RedisError> {
        let mut keys = Vec::new();
        let mut arguments = vec![what.as_bytes().to_vec()];
        for (key, numbers) in limits {
            keys.push(key);
            arguments.extend(numbers.map(|number| number.to_string().into_bytes()));
        }
        read_rates(&self.call(scripts::RATE, &keys, &arguments, deadline).await?, keys.len())
    }

    /// The record of a user; `None` = there is none.
    pub async fn user_record(&self, name: &str, deadline: Duration) -> Result<Option<Bytes>, RedisError> {
        let command = CustomCommand::new_static("GET", ClusterHash::FirstKey, false);
        let client = self.client.with_options(&options(deadline));
        let asked = client.custom::<Value, Value>(command, vec![keys::user_record(name).into()]);
        match tokio::time::timeout(deadline, asked).await {
            Err(_) => Err(RedisError::Late),
            Ok(Err(error)) => Err(failure(&error)),
            Ok(Ok(Value::Null)) => Ok(None),
            Ok(Ok(value)) => bytes(value).map(Some),
        }
    }

    /// Says that this replica lives, for as long as `lease` (zero: that it leaves), and hears how many do.
    pub async fn census(&self, replica: &str, lease: Duration, deadline: Duration) -> Result<u64, RedisError> {
        let arguments = [replica.as_bytes().to_vec(), millis(lease).to_string().into_bytes()];
        let reply = self.call(scripts::CENSUS, &[keys::CENSUS], &arguments, deadline).await?;
        reply.as_u64().ok_or_else(unreadable)
    }

    /// Asks for a number and the common seed, or gives the number back.
    pub async fn identity(&self, call: &IdentityCall, deadline: Duration) -> Result<Identity, RedisError> {
        let arguments = [
            call.replica.clone(),
            millis(call.lease).to_string(),
            NUMBERS.to_string(),
            call.number.to_string(),
            call.seed.to_string(),
        ]
        .map(String::into_bytes);
        let reply = self.call(scripts::IDENTITY, &keys::IDENTITY, &arguments, deadline).await?;
        let Value::Array(fields) = reply else { return Err(unreadable()) };
        let [number, seed] = fields.as_slice() else { return Err(unreadable()) };
        let number = number.as_i64().ok_or_else(unreadable)?;
        let seed = seed.as_str().and_then(|text| text.parse().ok());
        Ok(Identity {
            number: u16::try_from(number).ok().filter(|number| *number < NUMBERS),
            seed: seed.or((call.lease.is_zero()).then_some(0)).ok_or_else(unreadable)?,
        })
    }
}

/// Reads the reply of `rate.lua` about so many limits.
fn read_rates(reply: &Value, limits: usize) -> Result<(Option<usize>, Vec<Rate>), RedisError> {
    let Value::Array(fields) = reply else { return Err(unreadable()) };
    let fields: Vec<u64> = fields.iter().filter_map(Value::as_u64).collect();
    let Some((stopped, fields)) = fields.split_first() else { return Err(unreadable()) };
    let (each, rest) = fields.as_chunks::<3>();
    let stopped = usize::try_from(*stopped).map_err(|_| unreadable())?;
    if each.len() != limits || !rest.is_empty() || stopped > limits {
        return Err(unreadable());
    }
    let rate = |&[window, charged, left]: &[u64; 3]| Rate {
        granted: true,
        window,
        charged,
        ends_in: Duration::from_millis(left),
    };
    Ok((stopped.checked_sub(1), each.iter().map(rate).collect()))
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn unreadable() -> RedisError {
    RedisError::Unreadable(CodecError::Foreign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_about_limits_are_read_whole_or_not_at_all() {
        let reply = |numbers: &[i64]| Value::Array(numbers.iter().map(|number| Value::Integer(*number)).collect());
        let (refused, each) = read_rates(&reply(&[2, 7, 60, 100, 8, 0, 5]), 2).unwrap();
        assert_eq!((refused, each.len(), each[0].charged, each[1].window), (Some(1), 2, 60, 8));
        assert_eq!(read_rates(&reply(&[0, 7, 1, 100]), 1).unwrap().0, None);
        for (numbers, limits) in
            [(&[][..], 0), (&[0, 1, 2], 1), (&[0, 1, 2, 3], 2), (&[0, 1, 2, 3, 4], 1), (&[3, 1, 2, 3], 1)]
        {
            assert!(read_rates(&reply(numbers), limits).is_err(), "{numbers:?}");
        }
        assert!(read_rates(&Value::Null, 1).is_err());
    }
}
