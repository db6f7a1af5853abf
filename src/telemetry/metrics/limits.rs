//! Request-rate limits that replicas share.

use super::Metrics;
use crate::telemetry::names::Metric;

impl Metrics {
    /// A limit (`model`, `user_requests`, `user_tokens`, or `user` for the record itself) has decided.
    pub fn rate_limited(&self, limit: &'static str, verdict: &'static str) {
        self.count(Metric::RateLimited, &[limit, verdict], 1);
    }

    /// A request was decided without Redis, in this way.
    pub fn rate_limit_fallback(&self, limit: &'static str, action: &'static str) {
        self.count(Metric::RateLimitFallbacks, &[limit, action], 1);
    }

    /// Something that nobody waits for was told to Redis, or was not.
    pub fn rate_limit_settled(&self, what: &'static str, result: &'static str) {
        self.count(Metric::RateLimitSettled, &[what, result], 1);
    }
}
