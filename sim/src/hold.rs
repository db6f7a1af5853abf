//! Gates that stop requests before anything is done for them, so that tests need no sleeps.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{oneshot, watch};

#[derive(Debug, Default)]
struct Tickets {
    holds: usize,
    next: u64,
    waiting: BTreeMap<u64, oneshot::Sender<()>>,
}

/// The gate of one engine. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    tickets: Arc<Mutex<Tickets>>,
    waiting: Arc<watch::Sender<usize>>,
}

impl Gate {
    pub fn new() -> Gate {
        Gate { tickets: Arc::default(), waiting: Arc::new(watch::Sender::new(0)) }
    }

    /// Closes the gate until the returned hold is released or dropped.
    pub fn hold(&self) -> Hold {
        self.change(|tickets| tickets.holds += 1);
        Hold { gate: self.clone(), released: false }
    }

    /// Waits while the gate is closed. Cancelling leaves the queue.
    pub async fn pass(&self) {
        let (sender, receiver) = oneshot::channel();
        let ticket = self.change(|tickets| {
            if tickets.holds == 0 {
                return None;
            }
            tickets.next += 1;
            tickets.waiting.insert(tickets.next, sender);
            Some(tickets.next)
        });
        let Some(ticket) = ticket else { return };
        let _leave = Leave { gate: self, ticket };
        // An error means that the sender was dropped with the gate: nothing holds any more.
        let _ = receiver.await;
    }

    /// Requests that wait now.
    pub fn waiting(&self) -> usize {
        *self.waiting.borrow()
    }

    fn change<T>(&self, change: impl FnOnce(&mut Tickets) -> T) -> T {
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut tickets);
        self.waiting.send_replace(tickets.waiting.len());
        result
    }
}

struct Leave<'gate> {
    gate: &'gate Gate,
    ticket: u64,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.gate.change(|tickets| tickets.waiting.remove(&self.ticket));
    }
}

/// While this lives, inference requests that arrive stop before they are validated, queued or answered.
#[derive(Debug)]
pub struct Hold {
    gate: Gate,
    released: bool,
}

impl Hold {
    /// Requests that wait now. A request whose client left no longer counts.
    pub fn waiting(&self) -> usize {
        self.gate.waiting()
    }

    /// Waits until at least `count` requests wait at once.
    pub async fn wait_for(&self, count: usize) {
        let mut waiting = self.gate.waiting.subscribe();
        // The sender lives in `self`, so the channel cannot close under us.
        let _ = waiting.wait_for(|now| *now >= count).await;
    }

    /// Lets the `count` longest waiting requests pass; later ones still stop.
    pub fn release_first(&self, count: usize) {
        self.gate.change(|tickets| {
            for _ in 0..count {
                let Some((_, sender)) = tickets.waiting.pop_first() else { break };
                let _ = sender.send(());
            }
        });
    }

    /// Lets everybody pass.
    pub fn release(mut self) {
        self.open();
    }

    fn open(&mut self) {
        if !std::mem::replace(&mut self.released, true) {
            self.gate.change(|tickets| {
                tickets.holds = tickets.holds.saturating_sub(1);
                if tickets.holds == 0 {
                    for (_, sender) in std::mem::take(&mut tickets.waiting) {
                        let _ = sender.send(());
                    }
                }
            });
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.open();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn holds_in_order_and_releases() {
        let gate = Gate::new();
        gate.pass().await;
        let hold = gate.hold();
        let mut tasks: Vec<_> = (0..3)
            .map(|_| {
                let gate = gate.clone();
                tokio::spawn(async move { gate.pass().await })
            })
            .collect();
        hold.wait_for(3).await;
        assert_eq!(hold.waiting(), 3);
        tasks.pop().expect("three").abort();
        while hold.waiting() != 2 {
            tokio::task::yield_now().await;
        }
        hold.release_first(1);
        assert_eq!(hold.waiting(), 1);
        tasks.remove(0).await.expect("passes");
        hold.release();
        tasks.remove(0).await.expect("passes");
        gate.pass().await;
        assert_eq!(gate.waiting(), 0);
    }

    #[tokio::test]
    async fn two_holds_need_two_releases() {
        let gate = Gate::new();
        let (first, second) = (gate.hold(), gate.hold());
        let task = tokio::spawn({
            let gate = gate.clone();
            async move { gate.pass().await }
        });
        second.wait_for(1).await;
        drop(first);
        assert_eq!(second.waiting(), 1);
        drop(second);
        task.await.expect("passes");
    }
}
