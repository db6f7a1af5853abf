//! The last decisions of this replica, for `/debug/decisions`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwapOption;

use super::DecisionRecord;

/// Decisions that are kept.
const KEPT: usize = 256;

/// A ring of the last decisions. Writers and readers neither lock nor wait; the memory is bounded by what [`KEPT`]
/// decisions describe.
#[derive(Debug)]
pub struct Journal {
    places: Box<[ArcSwapOption<DecisionRecord>]>,
    written: AtomicUsize,
}

impl Default for Journal {
    fn default() -> Self {
        Journal { places: (0..KEPT).map(|_| ArcSwapOption::empty()).collect(), written: AtomicUsize::new(0) }
    }
}

impl Journal {
    /// Notes a decision; the oldest one goes.
    pub fn push(&self, record: Arc<DecisionRecord>) {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        if let Some(place) = self.places.get(number % KEPT) {
            place.store(Some(record));
        }
    }

    /// The decisions kept, the newest first.
    pub fn latest(&self) -> Vec<Arc<DecisionRecord>> {
        let written = self.written.load(Ordering::Relaxed);
        let places = (1..=KEPT).filter_map(|back| self.places.get(written.wrapping_sub(back) % KEPT));
        places.filter_map(ArcSwapOption::load_full).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Tick;
    use crate::routing::{PromptLength, RoutingError};

    fn record(at: u64) -> Arc<DecisionRecord> {
        Arc::new(DecisionRecord {
            at: Tick::from_millis(at),
            request_id: at.to_string(),
            model: "m".into(),
            snapshot_version: 1,
            profile: None,
            length: PromptLength::Unknown,
            prompt_tokens: 0,
            conflicts: 0,
            blind: false,
            outcome: Err(RoutingError::NoPods),
        })
    }

    #[test]
    fn the_last_ones_are_kept_newest_first() {
        let journal = Journal::default();
        assert!(journal.latest().is_empty());
        for at in 0..3 {
            journal.push(record(at));
        }
        let ids = |journal: &Journal| journal.latest().iter().map(|r| r.request_id.clone()).collect::<Vec<_>>();
        assert_eq!(ids(&journal), ["2", "1", "0"]);
        // Order is that of writing, also within one tick.
        journal.push(Arc::new(DecisionRecord { request_id: "2b".into(), ..(*record(2)).clone() }));
        assert_eq!(ids(&journal), ["2b", "2", "1", "0"]);
        for at in 3..1000 {
            journal.push(record(at));
        }
        let ids = ids(&journal);
        assert_eq!(
            (ids.len(), ids.first().map(String::as_str), ids.last().map(String::as_str)),
            (KEPT, Some("999"), Some("744"))
        );
    }
}
