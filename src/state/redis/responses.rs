//! Where stored responses are: a string for each, `SET` and `GETEX`.
//!
//! The value is the pod's number in sixteen hexadecimal digits, then the model's name.

use std::time::Duration;

use fred::interfaces::ClientLike;
use fred::types::{ClusterHash, CustomCommand, Value};

use super::counters::unreadable;
use super::{Plane, RedisError, bytes, failure, options};
use crate::state::keys;
use crate::state::responses::Home;

/// Longest value that is read, bytes.
const MAX_VALUE: usize = 4096;

impl Plane {
    /// Tells the others where a response is, for as long as `ttl`.
    pub async fn keep_response(
        &self,
        id: &str,
        home: &Home,
        ttl: Duration,
        deadline: Duration,
    ) -> Result<(), RedisError> {
        let key = keys::response(id);
        let value = encode(home);
        let words = [key.as_str(), value.as_str(), "PX", &millis(ttl)].map(Value::from);
        self.plain("SET", &key, words.to_vec(), deadline).await.map(|_| ())
    }

    /// Where a response is, for all that the others have told; a look renews it.
    pub async fn find_response(&self, id: &str, ttl: Duration, deadline: Duration) -> Result<Option<Home>, RedisError> {
        let key = keys::response(id);
        let words = [key.as_str(), "PX", &millis(ttl)].map(Value::from);
        match self.plain("GETEX", &key, words.to_vec(), deadline).await? {
            Value::Null => Ok(None),
            value => decode(&bytes(value)?).map(Some).ok_or_else(unreadable),
        }
    }

    async fn plain(
        &self,
        command: &'static str,
        key: &str,
        words: Vec<Value>,
        deadline: Duration,
    ) -> Result<Value, RedisError> {
        let node = ClusterHash::Custom(fred::util::redis_keyslot(key.as_bytes()));
        let command = CustomCommand::new_static(command, node, false);
        let client = self.client.with_options(&options(deadline));
        match tokio::time::timeout(deadline, client.custom::<Value, Value>(command, words)).await {
            Err(_) => Err(RedisError::Late),
            Ok(Err(error)) => Err(failure(&error)),
            Ok(Ok(value)) => Ok(value),
        }
    }
}

fn millis(time: Duration) -> String {
    // Redis refuses 0.
    time.as_millis().max(1).to_string()
}

fn encode(home: &Home) -> String {
    format!("{:016x}{}", home.pod, home.model)
}

fn decode(value: &[u8]) -> Option<Home> {
    let text = std::str::from_utf8(value).ok().filter(|text| text.len() <= MAX_VALUE)?;
    let (pod, model) = text.split_at_checked(16)?;
    Some(Home { pod: u64::from_str_radix(pod, 16).ok()?, model: model.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_and_foreign_ones_are_none() {
        for home in [Home { pod: 0, model: "".into() }, Home { pod: u64::MAX, model: "org/llama 3 é".into() }] {
            assert_eq!(decode(encode(&home).as_bytes()), Some(home));
        }
        let long = format!("{:016x}{}", 1, "m".repeat(MAX_VALUE));
        for foreign in
            [&b""[..], b"abc", b"000000000000000g", b"\xff\xff", "00000000000000é".as_bytes(), long.as_bytes()]
        {
            assert_eq!(decode(foreign), None);
        }
    }
}
