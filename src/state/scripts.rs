//! The scripts that run inside Redis, with their texts compiled in.

/// One script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Script {
    /// The name of its file, for logs and metrics.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// Publishes shares, keeps a lease, returns what changed.
pub const LEDGER_SYNC: Script = Script {
    name: "ledger_sync",
    text: concat!(include_str!("../../lua/ledger_pods.lua"), include_str!("../../lua/ledger_sync.lua")),
};

/// Takes a dead member's shares away.
pub const LEDGER_REAP: Script = Script {
    name: "ledger_reap",
    text: concat!(include_str!("../../lua/ledger_pods.lua"), include_str!("../../lua/ledger_reap.lua")),
};

/// Commits a charge unless something has changed.
pub const CLAIM: Script = Script {
    name: "claim",
    text: concat!(include_str!("../../lua/ledger_pods.lua"), include_str!("../../lua/claim.lua")),
};

/// Shares what replicas observe.
pub const SKETCH_SYNC: Script = Script { name: "sketch_sync", text: include_str!("../../lua/sketch_sync.lua") };

/// Tells which blocks a pod has.
pub const PREFIX_APPEND: Script = Script { name: "prefix_append", text: include_str!("../../lua/prefix_append.lua") };

/// Charges limits per window.
pub const RATE: Script = Script { name: "rate", text: include_str!("../../lua/rate.lua") };

/// Counts the replicas that are alive.
pub const CENSUS: Script = Script { name: "census", text: include_str!("../../lua/census.lua") };

/// Numbers the replicas, and gives them one seed.
pub const IDENTITY: Script = Script { name: "identity", text: include_str!("../../lua/identity.lua") };

/// Every script.
pub const ALL: [Script; 8] = [LEDGER_SYNC, LEDGER_REAP, CLAIM, SKETCH_SYNC, PREFIX_APPEND, RATE, CENSUS, IDENTITY];
