//! The times and sizes of the protocol, and what it counts.

use std::time::Duration;

use super::Pace;

/// The times and sizes of the protocol.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LedgerConfig {
    /// How long a replica counts as alive after its last call.
    pub lease: Duration,
    /// How often an idle replica calls. Dead ones are noticed as often.
    pub idle_poll: Duration,
    /// How syncs are paced.
    pub pace: Pace,
    /// A sync without a reply is given up after this.
    pub deadline: Duration,
    /// Pods to publish in one call; at most 1,000.
    pub max_published: usize,
    /// Pods to read in one reply.
    pub max_returned: u32,
    /// A dead member is buried at the earliest this long after it was noticed. Longer than `idle_poll`, so that after a jump
    /// of the server's clock the living can show themselves first.
    pub reap_delay: Duration,
    /// Within this time after that, at random, so that not all replicas go at once.
    pub reap_spread: Duration,
    /// The first pause after a failed call; it doubles with each further one, and is shortened at random.
    pub first_backoff: Duration,
    /// The longest such pause.
    pub last_backoff: Duration,
}

impl Default for LedgerConfig {
    fn default() -> LedgerConfig {
        LedgerConfig {
            lease: Duration::from_secs(3),
            idle_poll: Duration::from_millis(250),
            pace: Pace::default(),
            deadline: Duration::from_secs(1),
            max_published: 500,
            max_returned: 500,
            reap_delay: Duration::from_millis(300),
            reap_spread: Duration::from_millis(300),
            first_backoff: Duration::from_millis(20),
            last_backoff: Duration::from_secs(1),
        }
    }
}

/// What has happened since the start; only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerCounts {
    /// Syncs that were answered.
    pub syncs: u64,
    /// Syncs that were not.
    pub failures: u64,
    /// Times that the replica became a member.
    pub joins: u64,
    /// Times that the view was read anew from the start.
    pub resyncs: u64,
    /// Pods published.
    pub published: u64,
    /// Pods whose remote share was told by replies and announcements.
    pub received: u64,
    /// Announcements that did not follow on the view.
    pub gaps: u64,
    /// Shares of dead members taken away by this replica.
    pub reaped: u64,
}
