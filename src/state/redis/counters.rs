//! Request-rate limits.

use std::time::Duration;

use fred::types::Value;

use super::{Plane, RedisError};
use crate::state::codec::CodecError;
use crate::state::keys::ModelKeys;
use crate::state::scripts;

/// The answer of `rate.lua`.
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

impl Plane {
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
        self.rate(keys, limit, ["charge".to_owned(), amount.to_string(), most.to_string()], window, deadline).await
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
        let what = ["refund".to_owned(), amount.to_string(), charged.window.to_string()];
        self.rate(keys, limit, what, window, deadline).await
    }

    async fn rate(
        &self,
        keys: &ModelKeys,
        limit: &str,
        what: [String; 3],
        window: Duration,
        deadline: Duration,
    ) -> Result<Rate, RedisError> {
        let mut arguments = what.map(String::into_bytes).to_vec();
        arguments.push(window.as_millis().to_string().into_bytes());
        let reply = self.call(scripts::RATE, &[&keys.rate(limit)], &arguments, deadline).await?;
        let Value::Array(fields) = reply else { return Err(unreadable()) };
        let fields: Vec<u64> = fields.iter().filter_map(Value::as_u64).collect();
        let [granted, window, charged, left] = fields[..] else { return Err(unreadable()) };
        Ok(Rate { granted: granted == 1, window, charged, ends_in: Duration::from_millis(left) })
    }
}

pub(super) fn unreadable() -> RedisError {
    RedisError::Unreadable(CodecError::Foreign)
}
