//! Starts a link for every model of the fleet, ends those of models that are gone, and hands announcements out.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::inbox::{Inbox, Unanswered};
use super::link::Link;
use super::{Handle, Links, MAX_CLAIMS, Terms};
use crate::fleet::Fleet;
use crate::rng::Rng;
use crate::state::keys::ModelKeys;
use crate::state::plane::ModelStatus;
use crate::state::redis::{FeedEvent, NewsFeed, Plane};
use crate::state::wire::News;
use crate::telemetry::{LeftCharges, SyncTracer};

/// Announcements that may wait for a model's task; more are missed, which it makes good.
const MAX_NEWS: usize = 1_024;

/// Unanswered syncs in a row of one model after which the connection is taken for dead. Each waits for a second.
const SILENT: u32 = 3;
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// What the supervisor works with.
pub(super) struct Supervisor {
    pub(super) fleet: Arc<Fleet>,
    pub(super) snapshots: watch::Receiver<u64>,
    pub(super) plane: Plane,
    pub(super) feed: NewsFeed,
    pub(super) terms: Terms,
    pub(super) links: Arc<ArcSwap<Links>>,
    /// Everybody says goodbye.
    pub(super) leaving: CancellationToken,
    pub(super) tasks: TaskTracker,
    pub(super) seed: u64,
}

/// How announcements reach a link.
struct Wire {
    model: Arc<str>,
    news: mpsc::Sender<News>,
    /// Told when announcements were missed.
    missed: Arc<Notify>,
    unanswered: Arc<Unanswered>,
    gone: CancellationToken,
}

/// Runs until everybody leaves.
pub(super) async fn run(mut this: Supervisor) {
    let mut rng = Rng::new(this.seed);
    let mut wires: HashMap<String, Wire> = HashMap::new();
    let leaving = this.leaving.clone();
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    this.meet(&mut wires, &mut rng).await;
    loop {
        tokio::select! {
            () = leaving.cancelled() => break,
            changed = this.snapshots.changed() => match changed {
                Ok(()) => this.meet(&mut wires, &mut rng).await,
                Err(_) => break,
            },
            _ = look.tick() => {
                if this.plane.has_ended() || wires.values().any(|wire| wire.unanswered.reached(SILENT)) {
                    tracing::warn!("nothing is heard of the state plane: making another connection");
                    // One new connection is enough for all of them.
                    for wire in wires.values() {
                        wire.unanswered.synced(false);
                    }
                    this.plane.reconnect();
                }
            }
            event = this.feed.next() => match event {
                Some(FeedEvent::News(channel, news)) => {
                    if let Some(wire) = wires.get(&channel)
                        && wire.news.try_send(news).is_err()
                    {
                        wire.missed.notify_one();
                    }
                }
                Some(FeedEvent::Gap) => wires.values().for_each(|wire| wire.missed.notify_one()),
                None => break,
            },
        }
    }
    leaving.cancelled().await;
    this.feed.close().await;
}

impl Supervisor {
    /// Brings the links in line with the models of the fleet.
    async fn meet(&mut self, wires: &mut HashMap<String, Wire>, rng: &mut Rng) {
        let snapshot = self.fleet.load();
        let known = self.links.load();
        // Aliases have no pods of their own to tell of.
        let same = known.len() == snapshot.homes().count() && known.keys().all(|name| snapshot.home(name).is_some());
        if same {
            return;
        }
        let mut links: Links = HashMap::clone(&known);
        wires.retain(|_, wire| {
            let stays = snapshot.home(&wire.model).is_some();
            if !stays {
                wire.gone.cancel();
                links.remove(&wire.model);
            }
            stays
        });
        let mut fresh = Vec::new();
        for model in snapshot.homes() {
            let name = &model.name;
            if links.contains_key(name) {
                continue;
            }
            let keys = Arc::new(ModelKeys::new(name));
            let (claims, claim_requests) = mpsc::channel(MAX_CLAIMS);
            let (news, heard) = mpsc::channel(MAX_NEWS);
            let missed = Arc::new(Notify::new());
            let unanswered = Arc::new(Unanswered::default());
            let gone = self.leaving.child_token();
            let left = Arc::new(LeftCharges::default());
            let status =
                Arc::new(ArcSwap::from_pointee(ModelStatus { model: Arc::clone(name), ..ModelStatus::default() }));
            let inbox = Inbox {
                claims: claim_requests,
                news: heard,
                missed: Arc::clone(&missed),
                snapshots: self.snapshots.clone(),
                reconnects: self.plane.reconnects(),
                gone: gone.clone(),
            };
            let link = Link::new(
                model,
                Arc::clone(&keys),
                self.plane.clone(),
                Arc::clone(&self.fleet),
                self.terms.clone(),
                Arc::clone(&status),
                Arc::clone(&unanswered),
                SyncTracer::new(self.terms.tracer.clone(), Arc::clone(&left)),
                rng.next_u64(),
            );
            self.tasks.spawn(link.run(inbox));
            wires.insert(keys.news().to_owned(), Wire { model: Arc::clone(name), news, missed, unanswered, gone });
            fresh.push(Arc::clone(&keys));
            links.insert(Arc::clone(name), Handle { keys, claims, status, left });
        }
        drop(known);
        self.links.store(Arc::new(links));
        self.feed.add(fresh.iter().map(|keys| &**keys)).await;
    }
}
