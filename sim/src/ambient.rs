//! The only place of this crate that asks the machine for the time or for randomness.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// The current instant of tokio's clock.
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Wall-clock seconds since the epoch, for the `created` field of answers.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// A seed that differs from call to call and from process to process.
pub(crate) fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0_u8)
}

/// Sleeps for `pause`; returns at once, without a trip through the timer, when there is nothing to wait for.
pub(crate) async fn pause(pause: Duration) {
    if !pause.is_zero() {
        tokio::time::sleep(pause).await;
    }
}
