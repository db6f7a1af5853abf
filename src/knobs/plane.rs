//! Where the replicas meet, what they share, and how they commit decisions.

use std::time::Duration;

use super::read::{Reader, millis};
use super::{Secret, inert, parse};

/// How the decisions of a fleet of replicas are committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grade {
    /// Nothing waits: a replica's view of the others is a few milliseconds old.
    Paced,
    /// A decision is committed by one call to the server, or made again. Bounded by a deadline.
    Claim,
}

impl Grade {
    /// The name in `TANDEM_STATE_PLANE_GRADE`.
    pub fn name(self) -> &'static str {
        match self {
            Grade::Paced => "paced",
            Grade::Claim => "claim",
        }
    }
}

/// What happens to a request that a limit counts while Redis cannot be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateFallback {
    /// Each replica counts for itself, with its part of the limit.
    Local,
    /// It passes.
    Open,
    /// It is refused.
    Closed,
}

/// Where Redis is.
#[derive(Clone, Debug)]
pub enum RedisTarget {
    /// `REDIS_URL`.
    Url(Secret),
    /// `REDIS_HOST`, `REDIS_PORT`, `REDIS_PASSWORD`.
    Parts {
        /// Name or address.
        host: String,
        /// Port.
        port: u16,
        /// Password, if any.
        password: Option<Secret>,
    },
}

/// The state plane.
#[derive(Clone, Debug)]
pub struct PlaneKnobs {
    /// `REDIS_URL`, or `REDIS_HOST` and its like (unset): without one, replicas share nothing.
    pub redis: Option<RedisTarget>,
    /// `TANDEM_STATE_PLANE_GRADE` (`paced`).
    pub grade: Grade,
    /// `TANDEM_STATE_PLANE_PACE_MS` (5): the time between two publications, at least.
    pub pace: Duration,
    /// `TANDEM_STATE_PLANE_BUDGET` (0.2): the part of one core of the server that all replicas' publications of one model
    /// may take.
    pub budget: f64,
    /// `TANDEM_CLAIM_DEADLINE_MS` (5): how long a request waits for its claim.
    pub claim_deadline: Duration,
    /// `AIBRIX_TOKEN_LOAD_SHARED_LEDGER` (true): the decode token ledger of the others counts.
    pub share_decode_ledger: bool,
    /// `TANDEM_SHARED_PREFILL` (true): so do their prefill legs and the prefill token ledger.
    pub share_prefill: bool,
    /// `TANDEM_SHARED_PREFIXES` (true): replicas tell one another which prefixes pods hold.
    pub share_prefixes: bool,
    /// `AIBRIX_STATESYNC_SYNC_PERIOD` (100 ms): how often that is told, and session sizes.
    pub findings_period: Duration,
    /// `TANDEM_RATE_LIMIT_FALLBACK` (`local`).
    pub rate_fallback: RateFallback,
    /// `TANDEM_RATE_LIMIT_WAIT_MS` (50): how long a request waits to be counted.
    pub rate_wait: Duration,
}

impl Default for PlaneKnobs {
    fn default() -> PlaneKnobs {
        PlaneKnobs {
            redis: None,
            grade: Grade::Paced,
            pace: Duration::from_millis(5),
            budget: 0.2,
            claim_deadline: Duration::from_millis(5),
            share_decode_ledger: true,
            share_prefill: true,
            share_prefixes: true,
            findings_period: Duration::from_millis(100),
            rate_fallback: RateFallback::Local,
            rate_wait: Duration::from_millis(50),
        }
    }
}

pub(super) fn read(reader: &mut Reader<'_>) -> PlaneKnobs {
    let default = PlaneKnobs::default();
    let url = reader.secret("REDIS_URL");
    let host = reader.text("REDIS_HOST");
    // Kubernetes puts the URL of a service called `redis` into REDIS_PORT.
    let port = |text: &str| if inert::is_service_url(text) { Ok(6379) } else { parse::port(text) };
    let port = reader.value("REDIS_PORT", 6379, port, u16::to_string);
    let password = reader.secret("REDIS_PASSWORD");
    let parts = host.map(|host| RedisTarget::Parts { host, port, password });
    let switch = |reader: &mut Reader<'_>, name, default| reader.value(name, default, parse::boolean, bool::to_string);
    let time = |reader: &mut Reader<'_>, name, default| reader.value(name, default, parse::milliseconds, millis);
    PlaneKnobs {
        redis: url.map(RedisTarget::Url).or(parts),
        grade: reader.choice(
            "TANDEM_STATE_PLANE_GRADE",
            default.grade,
            &[(Grade::Paced.name(), Grade::Paced), (Grade::Claim.name(), Grade::Claim)],
        ),
        pace: time(reader, "TANDEM_STATE_PLANE_PACE_MS", default.pace),
        budget: reader.value("TANDEM_STATE_PLANE_BUDGET", default.budget, parse::share, f64::to_string),
        claim_deadline: time(reader, "TANDEM_CLAIM_DEADLINE_MS", default.claim_deadline),
        share_decode_ledger: switch(reader, "AIBRIX_TOKEN_LOAD_SHARED_LEDGER", default.share_decode_ledger),
        share_prefill: switch(reader, "TANDEM_SHARED_PREFILL", default.share_prefill),
        share_prefixes: switch(reader, "TANDEM_SHARED_PREFIXES", default.share_prefixes),
        findings_period: reader.value(
            "AIBRIX_STATESYNC_SYNC_PERIOD",
            default.findings_period,
            parse::go_duration,
            |period| format!("{}ms", period.as_millis()),
        ),
        rate_fallback: reader.choice(
            "TANDEM_RATE_LIMIT_FALLBACK",
            default.rate_fallback,
            &[("local", RateFallback::Local), ("open", RateFallback::Open), ("closed", RateFallback::Closed)],
        ),
        rate_wait: time(reader, "TANDEM_RATE_LIMIT_WAIT_MS", default.rate_wait),
    }
}
