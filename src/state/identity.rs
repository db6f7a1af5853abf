//! What the replicas of one Redis agree on: a number for each, which no other one has, and one random seed.
//!
//! The number goes into the ids of TensorRT-LLM requests, which workers must never see twice. The seed makes replicas hash
//! prompts alike, so that what one finds helps the others; it is random, so that hashes say nothing about any credential.
//! A replica that is silent loses its number after [`LEASE`] only: longer than a pause or a partition that it survives.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::redis::Plane;

/// How many numbers there are: what the ids of TensorRT-LLM requests have room for.
pub const NUMBERS: u16 = 1024;
/// For how long a silent replica keeps its number.
pub const LEASE: Duration = Duration::from_mins(10);
/// How often a replica renews it.
const BEAT: Duration = Duration::from_secs(10);
/// How soon it tries again after a failure.
const RETRY: Duration = Duration::from_millis(500);
/// A call is given up after this.
const CALL: Duration = Duration::from_secs(1);

/// What a replica is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its number, below [`NUMBERS`]; `None` when all are taken.
    pub number: Option<u16>,
    /// The seed of all replicas.
    pub seed: u64,
}

/// What a replica asks for.
#[derive(Clone, Debug)]
pub struct IdentityCall {
    /// Names this process among all that ever ask.
    pub replica: String,
    /// The number that it would like.
    pub number: u16,
    /// The seed that holds if there is none yet: random bits.
    pub seed: u64,
    /// For how long it keeps its number; zero: it leaves.
    pub lease: Duration,
}

/// The identity of this replica.
#[derive(Debug)]
pub struct ReplicaIdentity {
    plane: Plane,
    /// Names this process among all that ever ask.
    replica: String,
    leaving: CancellationToken,
}

impl ReplicaIdentity {
    /// The identity of the process that `replica` names, and no other that ever asks.
    pub fn new(plane: Plane, replica: String) -> ReplicaIdentity {
        ReplicaIdentity { plane, replica, leaving: CancellationToken::new() }
    }

    /// Asks for an identity and renews it until the stop; `listener` hears of each answer. `own` is what this replica goes
    /// by until then: its number is asked for, and its seed becomes everybody's if there is none yet.
    ///
    /// After Redis has lost its data the first replica that asks brings its own number and seed back.
    pub async fn keep(&self, own: Identity, listener: impl Fn(Identity) + Send, stop: CancellationToken) {
        let renew = async {
            let mut call = self.call(own, LEASE);
            loop {
                let pause = match self.plane.identity(&call, CALL).await {
                    Ok(identity) => {
                        call.seed = identity.seed;
                        call.number = identity.number.unwrap_or(call.number);
                        listener(identity);
                        BEAT
                    }
                    Err(_) => RETRY,
                };
                tokio::time::sleep(pause).await;
            }
        };
        tokio::select! {
            () = renew => {}
            () = stop.cancelled() => {}
            () = self.leaving.cancelled() => {}
        }
    }

    /// Gives the number back. If that does not arrive, the lease ends.
    pub async fn leave(&self) {
        self.leaving.cancel();
        let _ = self.plane.identity(&self.call(Identity { number: None, seed: 0 }, Duration::ZERO), CALL).await;
    }

    fn call(&self, own: Identity, lease: Duration) -> IdentityCall {
        IdentityCall { replica: self.replica.clone(), number: own.number.unwrap_or(0), seed: own.seed, lease }
    }
}
