//! TLS of the listeners.

use super::Metrics;
use crate::telemetry::names::Metric;

impl Metrics {
    /// A listener has TLS: its counters exist from now on.
    pub fn begin_tls(&self, listener: &'static str, reasons: &[&'static str]) {
        for result in ["done", "failed"] {
            self.series(Metric::TlsReloads, &[listener, result]);
        }
        for reason in reasons {
            self.series(Metric::TlsHandshakeFailures, &[listener, reason]);
        }
    }

    /// New files of a listener are in force, or cannot be used.
    pub fn tls_reloaded(&self, listener: &'static str, done: bool) {
        self.count(Metric::TlsReloads, &[listener, if done { "done" } else { "failed" }], 1);
    }

    /// When a listener's certificate ends, seconds since the Unix epoch.
    pub fn set_tls_expiry(&self, listener: &'static str, unix_seconds: i64) {
        self.series(Metric::TlsExpiry, &[listener]).set(unix_seconds.cast_unsigned());
    }

    /// A handshake failed; `reason` is one of those that `tls` tells apart.
    pub fn tls_handshake_failed(&self, listener: &'static str, reason: &'static str) {
        self.count(Metric::TlsHandshakeFailures, &[listener, reason], 1);
    }
}
