//! In-flight work per pod incarnation - this replica's own, and what the others last said of theirs - and the commit
//! step that makes "select" and "charge" one.
//!
//! Every count that goes up is tied to a guard whose drop takes it down, exactly once, on the incarnation that was
//! charged. Nothing here blocks.

mod cell;
mod claim;
mod commit;
mod health;
mod ledger;
mod peers;
mod port;
mod rate;
mod remote;
mod sessions;
mod share;
mod starts;
mod sync;
#[cfg(test)]
mod tests;
mod tokens;
mod unserved;
mod users;
mod window;

pub use cell::{DecodeCharge, LoadCell, LoadView, PrefillCharge};
pub use claim::{SweepReason, TokenLoad, TokenView};
pub use commit::{Commit, CommitToken};
pub use health::{
    EjectionPolicy, Ejections, Health, HealthView, MAX_PAIRS, PairHealth, Pairs, Probe, Probes, Report, Settled,
    Verdicts,
};
pub use ledger::{Ledger, Swept, TokenCharges};
pub use peers::{Heard, PeerCell, Peers};
pub use port::{Mark, PlanePort};
pub use rate::{RateCharge, RateWindow};
pub use remote::{FADES_AFTER, FADES_OVER, Remote, Scope};
pub use sessions::{MAX_SESSION_KEY, Sessions};
pub use share::{SHARE_TIME_ZERO_MS, Share, pod_id};
pub use tokens::TokenCharge;
pub use unserved::{UNSERVED_WINDOW, Unserved};
pub use users::{MAX_USERS, UserTokens, Users};
pub use window::{RecentWork, Window};
