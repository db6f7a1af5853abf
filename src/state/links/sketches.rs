//! Prompt lengths that all replicas observed: each tells what it saw since the last time, and adds up what the others saw.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::bands::{HALF_LIFE, Increments, Observed};
use crate::clock::Tick;
use crate::fleet::Snapshot;
use crate::state::codec::{decode, encode};
use crate::state::keys::ModelKeys;
use crate::state::payload::{Batch, Bin};
use crate::state::redis::{Plane, SketchCall, StreamId};

/// How often a sketch is told: as often as plans look at it.
const PERIOD: Duration = Duration::from_secs(1);
/// What is older weighs less than a thousandth.
const KEEP: Duration = Duration::from_secs(10 * HALF_LIFE.as_secs());
/// Batches read at a time.
const READ: u32 = 256;
/// The name of the sketch in keys.
const NAME: &str = "prompt-lengths";

/// The state of one model's sketch.
#[derive(Debug, Default)]
struct Sketching {
    sequence: u64,
    /// A batch whose telling nobody has confirmed. It is told again as it is: the server adds it once.
    unconfirmed: Option<Vec<u8>>,
    after: StreamId,
}

/// The sketches of all models.
#[derive(Debug)]
pub(super) struct Sketches {
    replica: [u8; 8],
    models: HashMap<Arc<str>, Sketching>,
    next: Tick,
}

impl Sketches {
    pub(super) fn new(replica: u64) -> Sketches {
        Sketches { replica: replica.to_le_bytes(), models: HashMap::new(), next: Tick(0) }
    }

    /// Tells and reads those of models that keep one, when it is time.
    pub(super) async fn sync(&mut self, plane: &Plane, snapshot: &Snapshot, now: Tick, deadline: Duration) {
        if now < self.next {
            return;
        }
        self.next = now.plus(PERIOD);
        self.models.retain(|name, _| snapshot.home(name).is_some_and(|model| model.bands.is_on()));
        for model in snapshot.homes().filter(|model| model.bands.is_on()) {
            let name = &model.name;
            model.bands.share();
            let sketching = self.models.entry(Arc::clone(name)).or_default();
            if sketching.unconfirmed.is_none()
                && let Some(observed) = model.bands.take_observed()
            {
                sketching.sequence += 1;
                sketching.unconfirmed = encode(&batch(&observed)).ok();
            }
            let call = SketchCall {
                replica: self.replica,
                sequence: sketching.sequence,
                batch: sketching.unconfirmed.clone().unwrap_or_default(),
                after: sketching.after.clone(),
                limit: READ,
                keep: KEEP,
            };
            let Ok(reply) = plane.sketch_sync(&ModelKeys::new(name), NAME, &call, deadline).await else { continue };
            sketching.unconfirmed = None;
            sketching.after = reply.after;
            for (id, bytes) in reply.batches {
                // A replica of another version; its batches are not counted here.
                let Ok(batch) = decode::<Batch>(&bytes) else { continue };
                let age = Duration::from_millis(reply.now_ms.saturating_sub(id.written_ms().unwrap_or(reply.now_ms)));
                model.bands.hear(Observed { increments: increments(&batch), age });
            }
        }
    }
}

fn batch(increments: &Increments) -> Batch {
    let bins = increments.bins().map(|((first, last), tally)| Bin {
        first,
        last,
        requests: tally.requests,
        tokens: tally.tokens,
    });
    Batch { bins: bins.collect() }
}

fn increments(batch: &Batch) -> Increments {
    let bins: BTreeMap<(u64, u64), (u64, u64)> =
        batch.bins.iter().map(|bin| ((bin.first, bin.last.max(bin.first)), (bin.requests, bin.tokens))).collect();
    Increments::of(bins)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_says_what_was_observed() {
        let observed = Increments::of(BTreeMap::from([((0, 255), (3, 400)), ((256, u64::MAX), (1, 9_000))]));
        assert_eq!(increments(&batch(&observed)), observed);
        // A bin that ends before it begins comes from nobody of ours; it counts where it begins.
        let odd = Batch { bins: vec![Bin { first: 9, last: 3, requests: 1, tokens: 9 }] };
        assert_eq!(increments(&odd), Increments::of(BTreeMap::from([((9, 9), (1, 9))])));
    }
}
