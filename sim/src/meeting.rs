//! Where the two legs of a hand-off meet when both run at once: who waits for which KV.
//!
//! A decode engine that asks for KV that is not there yet takes a seat under its id; so does the prefill engine's own
//! request. Whoever waits listens to the bell of the id, which rings whenever something about it changed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// Which side of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Giver,
    Taker,
}

#[derive(Debug, Default)]
struct Meeting {
    givers: usize,
    takers: usize,
    bell: Arc<Notify>,
}

/// The meetings at one prefill engine. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meetings {
    table: Arc<Mutex<HashMap<String, Meeting>>>,
}

impl Meetings {
    /// A decode engine wants the KV of `id`.
    pub fn take(&self, id: &str) -> Seat {
        self.sit(id, Side::Taker)
    }

    /// A prefill request will make the KV of `id`; `None` when another one is already about to.
    pub fn give(&self, id: &str) -> Option<Seat> {
        if self.lock().get(id).is_some_and(|meeting| meeting.givers > 0) {
            return None;
        }
        Some(self.sit(id, Side::Giver))
    }

    /// Tells everybody who waits for `id` to look again.
    pub fn ring(&self, id: &str) {
        if let Some(meeting) = self.lock().get(id) {
            meeting.bell.notify_waiters();
        }
    }

    fn sit(&self, id: &str, side: Side) -> Seat {
        let mut table = self.lock();
        let meeting = table.entry(id.to_owned()).or_default();
        *count(meeting, side) += 1;
        meeting.bell.notify_waiters();
        Seat { meetings: self.clone(), id: id.to_owned(), side, bell: meeting.bell.clone() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Meeting>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn count(meeting: &mut Meeting, side: Side) -> &mut usize {
    match side {
        Side::Giver => &mut meeting.givers,
        Side::Taker => &mut meeting.takers,
    }
}

/// A place at a meeting, until it drops.
#[derive(Debug)]
pub(crate) struct Seat {
    meetings: Meetings,
    id: String,
    side: Side,
    /// Rings when something about the id changed. Take a `notified()` before looking.
    pub bell: Arc<Notify>,
}

impl Seat {
    /// Whether a decode engine waits now.
    pub fn wanted(&self) -> bool {
        self.meetings.lock().get(&self.id).is_some_and(|meeting| meeting.takers > 0)
    }

    /// Waits until a decode engine waits.
    pub async fn until_wanted(&self) {
        loop {
            let bell = self.bell.notified();
            if self.wanted() {
                return;
            }
            bell.await;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut table = self.meetings.lock();
        let Some(meeting) = table.get_mut(&self.id) else { return };
        let left = count(meeting, self.side);
        *left = left.saturating_sub(1);
        meeting.bell.notify_waiters();
        if meeting.givers + meeting.takers == 0 {
            table.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_giver_waits_for_a_taker_and_seats_are_given_back() {
        let meetings = Meetings::default();
        let giver = meetings.give("a").expect("the first");
        assert!(meetings.give("a").is_none(), "one prefill request per id");
        assert!(meetings.give("b").is_some(), "ids do not matter to each other");
        let waiting = tokio::spawn(async move {
            giver.until_wanted().await;
            giver
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        let taker = meetings.take("a");
        let giver = waiting.await.expect("ends");
        drop(taker);
        assert!(!giver.wanted(), "the taker left");
        drop(giver);
        assert!(meetings.lock().is_empty());
    }
}
