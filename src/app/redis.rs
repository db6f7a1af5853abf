//! From settings to a connection.

use anyhow::Result;

use crate::knobs::{RedisTarget, Secret};
use crate::state::redis::RedisConfig;

/// How to reach the Redis that the settings name. The error does not repeat the address, which may hold a password.
pub(super) fn redis_config(target: &RedisTarget) -> Result<RedisConfig> {
    Ok(match target {
        RedisTarget::Url(url) => RedisConfig::from_url(url.expose())?,
        RedisTarget::Parts { host, port, password } => {
            RedisConfig::from_parts(host, *port, password.as_ref().map(Secret::expose))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_cannot_be_used_is_an_error_that_keeps_its_secret() {
        let url = |text: &str| redis_config(&RedisTarget::Url(Secret::new(text)));
        assert!(url("rediss://:hunter2@h:1").is_ok());
        let error = url("redis://:hunter2@h:port").unwrap_err();
        assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        let parts = RedisTarget::Parts { host: "h".to_owned(), port: 7, password: Some(Secret::new("hunter2")) };
        let config = format!("{:?}", redis_config(&parts).unwrap());
        assert!(config.contains("h:7") && !config.contains("hunter2"), "{config}");
    }
}
