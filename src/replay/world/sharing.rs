//! What gateways of the virtual world tell each other, and how a claim goes.

use std::time::Duration;

use super::super::gateway::Gateway;
use super::super::link::Link;
use super::super::options::{ReplayOptions, SNAPSHOT_PERIOD, Sharing};
use super::super::plane::{Answer, Plane, Shares};
use super::{BTreeMap, Event, Open, START, World};
use crate::clock::Tick;
use crate::load::{PeerCell, Peers, Scope};
use crate::state::ledger::Pace;

/// A claim that was turned down so often is not made again: its request goes on as if it were paced.
const MAX_CLAIMS: u32 = 16;
/// What a gateway has heard is confirmed this often.
const CONFIRM: Duration = Duration::from_millis(500);

/// A message on its way to the plane or back.
#[derive(Debug)]
struct Message {
    gateway: usize,
    /// The version that the gateway had heard.
    seen: u64,
    shares: Shares,
    /// The request and how often it was turned down, for a claim.
    claim: Option<(usize, u32)>,
    /// The gateway's selections when it was sent.
    selections: u64,
    answer: Answer,
}

/// Everything between the gateways.
#[derive(Debug)]
pub(super) struct Fleet {
    kind: Sharing,
    round_trip: Duration,
    plane: Plane,
    links: Vec<Link>,
    confirmed: Vec<Tick>,
    messages: BTreeMap<usize, Message>,
    announcements: BTreeMap<usize, Vec<(usize, Answer)>>,
    sent: usize,
    /// Requests whose claim is on its way.
    claiming: BTreeMap<usize, Open>,
}

impl Fleet {
    pub(super) fn new(options: &ReplayOptions, pods: usize) -> Fleet {
        let gateways = options.gateways.max(1);
        let kind = if gateways > 1 { options.sharing } else { Sharing::None };
        let pace = Pace { least: options.pace, ..Pace::default() }.interval(gateways as u32);
        let scope = Scope { prefill: kind != Sharing::Snapshots, ..Scope::default() };
        Fleet {
            kind,
            round_trip: options.round_trip,
            plane: Plane::new(pods, gateways),
            links: (0..gateways).map(|_| Link::new(pods, pace, scope)).collect(),
            confirmed: vec![START; gateways],
            messages: BTreeMap::new(),
            announcements: BTreeMap::new(),
            sent: 0,
            claiming: BTreeMap::new(),
        }
    }

    /// Selections are committed in the plane.
    pub(super) fn claims(&self) -> bool {
        self.kind == Sharing::Claim
    }

    /// A selection's peers: nobody, where equal views do no harm or are none.
    pub(super) fn peers(&self, cell: &PeerCell) -> Peers {
        if self.kind == Sharing::Paced { cell.view() } else { Peers::ALONE }
    }

    /// What is left in the plane.
    pub(super) fn charged(&self) -> u64 {
        self.plane.charged() + self.messages.len() as u64
    }
}

impl World<'_> {
    /// The gateways learn of each other.
    pub(super) fn meet(&mut self) {
        let count = self.gateways.len() as u32;
        for (rank, gateway) in (0..).zip(&self.gateways) {
            gateway.peers().join(rank, count);
        }
        if self.sharing.kind == Sharing::Snapshots {
            for gateway in 0..self.gateways.len() {
                let phase = SNAPSHOT_PERIOD.mul_f64(gateway as f64 / self.gateways.len() as f64);
                self.plan_snapshot(gateway, START.plus(phase));
            }
        }
    }

    fn plan_snapshot(&mut self, gateway: usize, at: Tick) {
        if let Some(at) = self.sharing.links.get_mut(gateway).and_then(|link| link.plan(at)) {
            self.schedule(at, Event::Publish(gateway));
        }
    }

    /// The own loads of a gateway have changed.
    pub(super) fn changed(&mut self, gateway: usize) {
        if !matches!(self.sharing.kind, Sharing::Paced | Sharing::Claim) {
            return;
        }
        let now = self.now;
        if let Some(at) = self.sharing.links.get_mut(gateway).and_then(|link| link.changed(now)) {
            self.schedule(at, Event::Publish(gateway));
        }
    }

    /// A gateway's turn: its changes go to the plane.
    pub(super) fn publish(&mut self, gateway: usize) {
        let now = self.now;
        let (Some(link), Some(own)) = (self.sharing.links.get_mut(gateway), self.gateways.get(gateway)) else { return };
        let Some((seen, shares)) = link.send(now, |slot| own.share(slot, now)) else { return };
        let selections = own.peers().selections();
        self.send(Message { gateway, seen, shares, claim: None, selections, answer: Answer::default() });
    }

    fn send(&mut self, message: Message) {
        self.sharing.sent += 1;
        let id = self.sharing.sent;
        self.sharing.messages.insert(id, message);
        self.schedule(self.now.plus(self.sharing.round_trip / 2), Event::AtPlane(id));
    }

    /// The selection is made; now the plane is asked whether it stands.
    pub(super) fn claim(&mut self, request: usize, open: Open, turned_down: u32) {
        let (gateway, now) = (open.gateway, self.now);
        let (Some(link), Some(own)) = (self.sharing.links.get(gateway), self.gateways.get(gateway)) else { return };
        let slots = own.slots_of(open.prefill, open.decode);
        let shares = slots.into_iter().flatten().map(|slot| (slot, own.share(slot, now))).collect();
        let (seen, selections) = (link.seen(), own.peers().selections());
        self.sharing.claiming.insert(request, open);
        let claim = Some((request, turned_down));
        self.send(Message { gateway, seen, shares, claim, selections, answer: Answer::default() });
    }

    /// The plane takes a message in.
    pub(super) fn at_plane(&mut self, id: usize) {
        let Fleet { kind, plane, messages, round_trip, .. } = &mut self.sharing;
        let Some(message) = messages.get_mut(&id) else { return };
        let before = plane.version();
        message.answer = if message.claim.is_some() {
            plane.claim(message.gateway, message.seen, &message.shares)
        } else {
            plane.publish(message.gateway, message.seen, &message.shares)
        };
        let announce = *kind != Sharing::Snapshots && plane.version() > before;
        let (source, back) = (message.gateway, *round_trip / 2);
        if announce {
            let others = (0..self.gateways.len()).filter(|gateway| *gateway != source);
            let news = others.map(|gateway| (gateway, plane.changed(gateway, before))).collect();
            self.sharing.announcements.insert(id, news);
            self.schedule(self.now.plus(back), Event::Announced(id));
        }
        self.schedule(self.now.plus(back), Event::Answered(id));
    }

    /// What another gateway has published is announced to all but it.
    pub(super) fn announced(&mut self, id: usize) {
        for (gateway, answer) in self.sharing.announcements.remove(&id).unwrap_or_default() {
            self.hear(gateway, answer, 0);
        }
    }

    /// An answer has come back.
    pub(super) fn answered(&mut self, id: usize) {
        let Some(Message { gateway, claim, selections, answer, .. }) = self.sharing.messages.remove(&id) else {
            return;
        };
        let granted = answer.granted;
        self.hear(gateway, answer, selections);
        match claim {
            Some((request, turned_down)) => {
                let Some(open) = self.sharing.claiming.remove(&request) else { return };
                if granted || turned_down >= MAX_CLAIMS {
                    return self.begin(request, open);
                }
                drop(open);
                match self.select(gateway, request) {
                    Some(open) => self.claim(request, open, turned_down + 1),
                    None => self.end(request, Some(super::Failure::NotRouted)),
                }
            }
            None => self.rest(gateway),
        }
    }

    fn hear(&mut self, gateway: usize, answer: Answer, selections: u64) {
        let now = self.now;
        let Some(own) = self.gateways.get(gateway) else { return };
        let Some(link) = self.sharing.links.get_mut(gateway) else { return };
        let news = link.take_in(answer, own.peers(), selections, now);
        own.apply(&news, now);
        self.confirm(gateway);
    }

    /// The plane is always there: what a gateway has heard still holds.
    pub(super) fn confirm(&mut self, gateway: usize) {
        let now = self.now;
        let Some(own) = self.gateways.get(gateway) else { return };
        if let Some(confirmed) = self.sharing.confirmed.get_mut(gateway).filter(|at| now.since(**at) >= CONFIRM) {
            *confirmed = now;
            own.confirm(now);
        }
    }

    /// A publication has been answered: plans the next, if there is anything to say or to hear.
    fn rest(&mut self, gateway: usize) {
        let now = self.now;
        let Some(own) = self.gateways.get(gateway) else { return };
        let Some(link) = self.sharing.links.get_mut(gateway) else { return };
        link.answered();
        let dirty = link.dirty(|slot| own.share(slot, now));
        if self.sharing.kind == Sharing::Snapshots {
            if dirty || self.ended < self.trace.requests.len() {
                self.plan_snapshot(gateway, now.plus(SNAPSHOT_PERIOD.saturating_sub(self.sharing.round_trip)));
            }
            return;
        }
        if dirty {
            self.changed(gateway);
        }
    }

    /// A request's prefix becomes known to the other gateways, where such things are shared.
    pub(super) fn spread(&mut self, gateway: usize, request: usize, prefill: usize) {
        if matches!(self.sharing.kind, Sharing::Paced | Sharing::Claim) {
            let at = self.now.plus(self.sharing.round_trip);
            self.schedule(at, Event::PrefixSpreads { gateway, request, prefill });
        }
    }

    /// The others learn of it.
    pub(super) fn prefix_spreads(&mut self, gateway: usize, request: usize, prefill: usize) {
        let Some(hashes) = self.trace.requests.get(request).map(|request| &request.hashes) else { return };
        let others = self.gateways.iter_mut().enumerate().filter(|(other, _)| *other != gateway);
        others.for_each(|(_, other): (usize, &mut Gateway)| other.learn(prefill, hashes));
    }
}
