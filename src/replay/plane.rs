//! The state plane of a virtual fleet: what Redis does for a real one, without the network.
//!
//! It keeps each gateway's share of each pod and their sums, answers with what changed since a version, and grants
//! claims. A publication holds absolute shares, so one that is repeated changes nothing.

use crate::load::Share;

/// One pod in the plane.
#[derive(Clone, Debug)]
struct PodLedger {
    /// By gateway.
    shares: Vec<Share>,
    sum: Share,
    /// Version of the last change.
    version: u64,
    /// By gateway: version at which it last charged something.
    charged: Vec<u64>,
}

/// Absolute shares of one gateway: (slot, share).
pub(super) type Shares = Vec<(usize, Share)>;

/// What a gateway hears.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Answer {
    /// The plane's version; the next question names it.
    pub(super) version: u64,
    /// What all other gateways have on the pods that changed.
    pub(super) others: Shares,
    /// False for a claim that was turned down.
    pub(super) granted: bool,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Plane {
    pods: Vec<PodLedger>,
    version: u64,
}

/// Whether `new` holds work that `old` did not.
fn charges(old: &Share, new: &Share) -> bool {
    new.prefills > old.prefills
        || new.running + new.pending > old.running + old.pending
        || new.decode_tokens > old.decode_tokens
        || new.kv_tokens > old.kv_tokens
}

impl Plane {
    /// Of so many pods and gateways, all idle.
    pub(super) fn new(pods: usize, gateways: usize) -> Plane {
        let idle =
            PodLedger { shares: vec![Share::ZERO; gateways], sum: Share::ZERO, version: 0, charged: vec![0; gateways] };
        Plane { pods: vec![idle; pods], version: 0 }
    }

    /// Takes in what `gateway` publishes and says what has changed since version `seen`.
    pub(super) fn publish(&mut self, gateway: usize, seen: u64, shares: &Shares) -> Answer {
        for (slot, share) in shares {
            self.put(gateway, *slot, *share);
        }
        self.answer(gateway, seen, true)
    }

    /// The same, if nobody else has charged one of these pods since `seen`.
    pub(super) fn claim(&mut self, gateway: usize, seen: u64, shares: &Shares) -> Answer {
        let free = |slot: &usize| {
            self.pods.get(*slot).is_none_or(|pod| {
                pod.charged.iter().enumerate().all(|(other, charged)| other == gateway || *charged <= seen)
            })
        };
        if shares.iter().all(|(slot, _)| free(slot)) {
            self.publish(gateway, seen, shares)
        } else {
            self.answer(gateway, seen, false)
        }
    }

    /// What `gateway` has to hear of the changes since version `before`.
    pub(super) fn changed(&self, gateway: usize, before: u64) -> Answer {
        self.answer(gateway, before, true)
    }

    /// Everything that is charged, summed up.
    pub(super) fn charged(&self) -> u64 {
        let of = |pod: &PodLedger| {
            let Share { running, pending, prefills, decode_tokens, decode_open, kv_tokens, .. } = pod.sum;
            u64::from(running) + u64::from(pending) + u64::from(prefills) + decode_tokens + decode_open + kv_tokens
        };
        self.pods.iter().map(of).sum()
    }

    /// The present version.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    fn put(&mut self, gateway: usize, slot: usize, share: Share) {
        let Some(pod) = self.pods.get_mut(slot) else { return };
        let Some(old) = pod.shares.get_mut(gateway) else { return };
        let old = std::mem::replace(old, share);
        if old == share {
            return;
        }
        self.version += 1;
        pod.sum = pod.sum.minus(old).plus(share);
        pod.version = self.version;
        if let Some(charged) = pod.charged.get_mut(gateway).filter(|_| charges(&old, &share)) {
            *charged = self.version;
        }
    }

    fn answer(&self, gateway: usize, seen: u64, granted: bool) -> Answer {
        let changed = self.pods.iter().enumerate().filter(|(_, pod)| pod.version > seen);
        let others = changed
            .map(|(slot, pod)| (slot, pod.sum.minus(pod.shares.get(gateway).copied().unwrap_or(Share::ZERO))))
            .collect();
        Answer { version: self.version, others, granted }
    }
}
