//! One model's link to the plane: a task that owns the model's [`SharedLedger`] and is the only one that touches it.
//!
//! It takes the pods whose own work has changed from the model's port, publishes them as the ledger's pace allows, and
//! writes what others publish into the pods' load cells, where selections read it. Claims of requests go through it,
//! so that calls leave in the order of their numbers.

mod shown;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::StreamExt;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::FuturesUnordered;
use tokio::sync::oneshot;

use super::Terms;
use super::breaker::Breaker;
use super::inbox::{Back, ClaimRequest, Inbox, Unanswered};
use crate::clock::Tick;
use crate::fleet::{Fleet, Model, PodState};
use crate::load::{FADES_AFTER, Heard, PeerCell, PlanePort, Share};
use crate::state::keys::ModelKeys;
use crate::state::ledger::{Claimed, Next, SharedLedger};
use crate::state::plane::ModelStatus;
use crate::state::redis::{Plane, RedisError};
use crate::state::wire::{News, ReapCall, SyncReply};
use crate::telemetry::{ClaimFallback, SyncOutcome, SyncTracer};

/// How often shares that do not change are confirmed, so that they do not fade.
const CONFIRM: Duration = Duration::from_millis(500);
/// A charge that is about to be claimed is not published before the claim is: if that is turned down, nobody was misled.
const CLAIM_GRACE: Duration = Duration::from_millis(1);
/// Pods taken from the port at a time.
const BATCH: usize = 4_096;
/// Multiplying a member's number by this undoes what `ledger_sync.lua` does to spread it (modulo 2^32).
const UNSPREAD: u32 = 244_002_641;

/// See the module.
pub(super) struct Link {
    name: Arc<str>,
    keys: Arc<ModelKeys>,
    plane: Plane,
    fleet: Arc<Fleet>,
    terms: Terms,
    status: Arc<ArcSwap<ModelStatus>>,
    unanswered: Arc<Unanswered>,
    tracer: SyncTracer,
    ledger: SharedLedger,
    /// A number of this link's own.
    task: u64,
    port: Arc<PlanePort>,
    peers: Arc<PeerCell>,
    /// Pods of the model by the number that replicas know them by.
    pods: HashMap<u64, Arc<PodState>>,
    /// Pods on which this replica has work, those that left the fleet included.
    charged: HashMap<u64, Arc<PodState>>,
    /// Decode requests that others have per pod, as last heard.
    heard: HashMap<u64, u64>,
    breaker: Breaker,
    calls: FuturesUnordered<BoxFuture<'static, Back>>,
    reaping: bool,
    confirmed: Tick,
    last_sync: Option<Duration>,
    /// When people were last told how it goes.
    shown: Tick,
    /// Changes are not looked at before this.
    hold: Option<Tick>,
    /// The clock of the shares is another one than before: what was told in the old one has to be told again.
    retell: bool,
    leaving: bool,
}

impl Link {
    #[allow(clippy::too_many_arguments, reason = "called once, by the supervisor")]
    pub(super) fn new(
        model: &Model,
        keys: Arc<ModelKeys>,
        plane: Plane,
        fleet: Arc<Fleet>,
        terms: Terms,
        status: Arc<ArcSwap<ModelStatus>>,
        unanswered: Arc<Unanswered>,
        tracer: SyncTracer,
        seed: u64,
    ) -> Link {
        Link {
            name: Arc::clone(&model.name),
            keys,
            plane,
            fleet,
            ledger: SharedLedger::new(terms.ledger, seed),
            task: seed.max(1),
            terms,
            status,
            unanswered,
            tracer,
            port: Arc::clone(&model.port),
            peers: Arc::clone(&model.peers),
            pods: HashMap::new(),
            charged: HashMap::new(),
            heard: HashMap::new(),
            breaker: Breaker::default(),
            calls: FuturesUnordered::new(),
            reaping: false,
            confirmed: Tick(0),
            last_sync: None,
            shown: Tick(0),
            hold: None,
            retell: false,
            leaving: false,
        }
    }

    /// Runs until it is told to go, and has said goodbye.
    pub(super) async fn run(mut self, mut inbox: Inbox) {
        self.port.listen(self.task);
        self.look_at_fleet();
        // What has ended has nothing to say any more, and would say so at once, again and again.
        let (mut claims_open, mut news_open, mut fleet_open, mut reconnects_open) = (true, true, true, true);
        while !(self.leaving && self.ledger.has_left()) {
            if self.leaving && (self.ledger.member().is_none() || !self.plane.is_connected()) {
                // Nobody to say goodbye to.
                break;
            }
            let due = self.act();
            // What waits to be told, or cannot be told yet, need not be looked at again and again.
            let listening = self.hold.is_none() && !self.leaving && !self.ledger.has_changes() && self.told_time();
            let port = Arc::clone(&self.port);
            tokio::select! {
                biased;
                Some(back) = self.calls.next(), if !self.calls.is_empty() => self.on_back(back),
                news = inbox.news.recv(), if news_open => match news {
                    Some(news) => self.on_news(&news),
                    None => news_open = false,
                },
                request = inbox.claims.recv(), if claims_open => match request {
                    Some(request) => self.start_claim(request),
                    None => claims_open = false,
                },
                () = std::future::poll_fn(|context| port.poll_changed(context)), if listening => {
                    if self.port.claim_since().is_some() {
                        self.hold = Some(self.terms.clock.now().plus(CLAIM_GRACE));
                    }
                }
                () = inbox.missed.notified() => self.ledger.missed_news(),
                changed = inbox.snapshots.changed(), if fleet_open && !self.leaving => match changed {
                    // The model may be back already, with another link.
                    Ok(()) if inbox.gone.is_cancelled() => {}
                    Ok(()) => self.look_at_fleet(),
                    Err(_) => fleet_open = false,
                },
                reconnect = inbox.reconnects.next(), if reconnects_open => match reconnect {
                    Some(()) => {
                        self.ledger.reconnected();
                        self.retell = true;
                    }
                    None => reconnects_open = false,
                },
                () = inbox.gone.cancelled(), if !self.leaving => self.leave(),
                () = tokio::time::sleep_until(self.terms.clock.instant_at(due)) => {}
            }
        }
        if self.port.ignore(self.task) {
            self.port.set_claims(None);
            self.peers.join(0, 1);
        }
    }

    /// Starts what is due; returns when to look again.
    fn act(&mut self) -> Tick {
        let now = self.terms.clock.now();
        self.hold = self.hold.filter(|until| now < *until);
        if self.hold.is_none() {
            self.take_changes(now);
        }
        let due = self.start_what_is_due(now);
        self.hold.map_or(due, |until| until.min(due))
    }

    fn start_what_is_due(&mut self, now: Tick) -> Tick {
        loop {
            match self.ledger.next(now) {
                Next::Sync => self.start_sync(now),
                Next::Reap(call) if !self.reaping => self.start_reap(call),
                // One step after the other: the reply says where to go on.
                Next::Reap(_) => return now.plus(self.terms.ledger.idle_poll),
                Next::At(due) => return due,
            }
        }
    }

    /// The server has said what time it is. Before that no share can be made, for it tells times.
    fn told_time(&self) -> bool {
        self.ledger.clock().ms_at(Tick(0)).is_some()
    }

    /// Takes what has changed here into the ledger.
    fn take_changes(&mut self, now: Tick) {
        let Some(fleet_now) = self.ledger.clock().ms_at(now) else { return };
        if std::mem::take(&mut self.retell) {
            let again: Vec<_> = self.charged.values().cloned().collect();
            for pod in &again {
                self.set(pod, now, fleet_now);
            }
        }
        for _ in 0..if self.leaving { 0 } else { BATCH } {
            let Some(pod) = self.port.take() else { break };
            self.set(&pod, now, fleet_now);
        }
    }

    fn set(&mut self, pod: &Arc<PodState>, now: Tick, fleet_now: u64) {
        let share = pod.load.share(now, fleet_now);
        if share.is_zero() {
            self.charged.remove(&pod.id);
        } else {
            self.charged.entry(pod.id).or_insert_with(|| Arc::clone(pod));
        }
        self.ledger.set(pod.id, share);
    }

    fn start_sync(&mut self, now: Tick) {
        let call = self.ledger.start_sync(now);
        let (plane, keys, deadline) = (self.plane.clone(), Arc::clone(&self.keys), self.terms.ledger.deadline);
        let selections = self.peers.selections();
        let span = self.span_of(&call, now);
        self.calls.push(
            async move {
                let reply = plane.ledger_sync(&keys, &call, deadline).await;
                Back::Sync { reply, sent: now, selections, span }
            }
            .boxed(),
        );
    }

    fn start_reap(&mut self, call: ReapCall) {
        self.reaping = true;
        let (plane, keys, deadline) = (self.plane.clone(), Arc::clone(&self.keys), self.terms.ledger.deadline);
        self.calls.push(
            async move {
                let reply = plane.ledger_reap(&keys, &call, deadline).await;
                Back::Reap { call, reply }
            }
            .boxed(),
        );
    }

    /// The charge is in the pods' cells already; now the plane is asked whether it stands.
    fn start_claim(&mut self, request: ClaimRequest) {
        let order = &request.order;
        let now = self.terms.clock.now();
        let Some(fleet_now) = self.ledger.clock().ms_at(now) else {
            self.fall_back(ClaimFallback::NotMember, request.answer);
            return;
        };
        let mut shares = Vec::with_capacity(order.pods.len());
        for pod in &order.pods {
            self.charged.entry(pod.id).or_insert_with(|| Arc::clone(pod));
            shares.push((pod.id, pod.load.share(now, fleet_now)));
        }
        let rested_on = order.pods.iter().map(|pod| pod.id).collect();
        let Some(call) = self.ledger.start_claim(&shares, rested_on, order.since, now) else {
            self.fall_back(ClaimFallback::NotMember, request.answer);
            return;
        };
        let (plane, keys, deadline) = (self.plane.clone(), Arc::clone(&self.keys), self.terms.claim_deadline);
        let selections = self.peers.selections();
        self.calls.push(
            async move {
                let reply = plane.claim(&keys, &call, deadline).await;
                Back::Claim { sequence: call.sequence, reply, request, selections }
            }
            .boxed(),
        );
    }

    fn fall_back(&self, why: ClaimFallback, answer: oneshot::Sender<Claimed>) {
        self.terms.metrics.claim_fell_back(why);
        // Whoever asked may be gone.
        let _ = answer.send(Claimed::Unsure);
    }

    fn on_back(&mut self, back: Back) {
        let now = self.terms.clock.now();
        match back {
            Back::Sync { reply, sent, selections, span } => {
                shown::end(span, &reply);
                self.on_sync(reply, sent, selections, now);
            }
            Back::Reap { call, reply } => {
                self.reaping = false;
                self.ledger.finish_reap(&call, reply.ok(), now);
            }
            Back::Claim { sequence, reply, request, selections } => match reply {
                Ok(reply) => {
                    self.breaker.answered();
                    let (claimed, changes) = self.ledger.finish_claim(sequence, &reply, now);
                    self.apply(changes, selections, now);
                    match claimed {
                        // A server that had to be sent a script anew takes calls in another order.
                        Claimed::Unsure if !request.repeated => {
                            self.start_claim(ClaimRequest { repeated: true, ..request });
                        }
                        Claimed::Unsure => self.fall_back(ClaimFallback::Overtaken, request.answer),
                        claimed => {
                            self.terms.metrics.claimed(claimed == Claimed::Granted);
                            let _ = request.answer.send(claimed);
                        }
                    }
                }
                Err(error) => {
                    self.ledger.fail_claim(sequence);
                    let why = if error == RedisError::Late { ClaimFallback::Late } else { ClaimFallback::Failed };
                    // Who waited for the whole deadline has counted that already.
                    if !request.answer.is_closed() {
                        self.fall_back(why, request.answer);
                    }
                    if self.breaker.missed() {
                        self.terms.metrics.claims_stopped();
                        tracing::warn!(model = &*self.name, %error, "claims are not answered in time: going on without them");
                    }
                }
            },
        }
        self.publish_state(now);
    }

    fn on_sync(&mut self, reply: Result<SyncReply, RedisError>, sent: Tick, selections: u64, now: Tick) {
        let took = now.since(sent);
        let quick = reply.is_ok().then_some(took);
        self.unanswered.synced(reply.as_ref().err() == Some(&RedisError::Late));
        if self.breaker.synced(quick, self.terms.claim_deadline) {
            tracing::info!(model = &*self.name, "claims go on");
        }
        match reply {
            Ok(reply) => {
                self.last_sync = Some(took);
                let was = self.ledger.member().map(|(epoch, _)| epoch);
                let changes = self.ledger.finish_sync(&reply, now);
                let member = self.ledger.member();
                if member.is_some_and(|(epoch, _)| Some(epoch) != was) {
                    // The first reply, or a new beginning: everything is told, in the time that holds now.
                    self.retell = true;
                    if self.ledger.counts().joins > 1 {
                        tracing::warn!(
                            model = &*self.name,
                            "the shared ledger began anew, or took this replica for dead: publishing everything again"
                        );
                    }
                }
                self.terms.metrics.synced(SyncOutcome::Done, took);
                self.apply(changes, selections, now);
                self.confirm(now);
                if let Some((_, number)) = member {
                    // Members are numbered from 1, ranks from 0.
                    let rank = number.wrapping_mul(UNSPREAD).wrapping_sub(1);
                    self.peers.join(rank, self.ledger.members().max(1));
                }
            }
            Err(error) => {
                self.ledger.fail_sync(now);
                let outcome = if error == RedisError::Late { SyncOutcome::Late } else { SyncOutcome::Failed };
                self.terms.metrics.synced(outcome, took);
                tracing::debug!(model = &*self.name, %error, "a sync failed");
                if self.ledger.view().age(now).is_none_or(|age| age > FADES_AFTER) {
                    // Nobody knows any more who else is there.
                    self.peers.join(0, 1);
                }
            }
        }
    }

    fn on_news(&mut self, news: &News) {
        let now = self.terms.clock.now();
        let changes = self.ledger.hear(news, now);
        self.apply(changes, 0, now);
        self.publish_state(now);
    }

    /// Brings changes of others into the pods' cells.
    fn apply(&mut self, changes: Vec<(u64, Share)>, selections: u64, now: Tick) {
        let fleet_now = self.ledger.clock().ms_at(now).unwrap_or_default();
        let mut newcomers = 0;
        for (id, share) in changes {
            let share = self.terms.scope.of(share);
            let decodes = u64::from(share.running) + u64::from(share.pending);
            let before = if decodes == 0 { self.heard.remove(&id) } else { self.heard.insert(id, decodes) };
            newcomers += decodes.saturating_sub(before.unwrap_or_default());
            if let Some(pod) = self.pods.get(&id) {
                pod.load.remote.apply(&share, now, fleet_now);
            }
        }
        let version = self.ledger.view().version();
        self.peers.heard(Heard { answers: selections, newcomers, version }, now);
    }

    /// What has not changed still holds.
    fn confirm(&mut self, now: Tick) {
        let Some(as_of) = self.ledger.view().as_of().filter(|_| now.since(self.confirmed) >= CONFIRM) else { return };
        self.confirmed = now;
        self.pods
            .values()
            .filter(|pod| pod.load.remote.age(now).is_some())
            .for_each(|pod| pod.load.remote.confirm(as_of));
    }

    /// Other pods may be there, or the same ones in new cells.
    fn look_at_fleet(&mut self) {
        let now = self.terms.clock.now();
        let snapshot = self.fleet.load();
        let Some(model) = snapshot.home(&self.name) else { return };
        if !Arc::ptr_eq(&self.port, &model.port) {
            // The model was gone for a moment.
            self.port.ignore(self.task);
            (self.port, self.peers) = (Arc::clone(&model.port), Arc::clone(&model.peers));
            self.port.listen(self.task);
        }
        let fleet_now = self.ledger.clock().ms_at(now).unwrap_or_default();
        let mut pods = HashMap::with_capacity(model.pods.len());
        for pod in &model.pods {
            let (id, state) = (pod.state.id, &pod.state);
            if self.pods.get(&id).is_none_or(|known| !Arc::ptr_eq(known, state)) {
                let share = self.ledger.view().share(id);
                if !share.is_zero() {
                    state.load.remote.apply(&self.terms.scope.of(share), now, fleet_now);
                }
                // It may have been charged before anybody listened.
                self.port.mark(state);
            }
            pods.insert(id, Arc::clone(state));
        }
        self.pods = pods;
    }

    fn leave(&mut self) {
        self.leaving = true;
        self.port.set_claims(None);
        for id in std::mem::take(&mut self.charged).into_keys() {
            self.ledger.set(id, Share::ZERO);
        }
        self.ledger.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_members_rank_is_the_number_that_it_joined_as() {
        for number in [1u32, 2, 3, 77, 2_000_000] {
            let told = number.wrapping_mul(2_654_435_761);
            assert_eq!(told.wrapping_mul(UNSPREAD), number);
        }
    }
}
