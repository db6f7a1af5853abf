//! A server, its replicas, and a network that loses, repeats, delays and reorders calls. Each call that reaches the server is
//! carried out by the model as well, and the server's memory is compared with the model's.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tandem::clock::Tick;
use tandem::load::Share;
use tandem::rng::Rng;
use tandem::state::keys::ModelKeys;
use tandem::state::ledger::{LedgerConfig, Next, Pace, SharedLedger};
use tandem::state::scripts::{CLAIM, LEDGER_REAP, LEDGER_SYNC, Script};
use tandem::state::wire::{ClaimCall, ClaimReply, News, ReapCall, ReapReply, SyncCall, SyncReply};

use super::model::Model;
use super::resp::{Connection, Reply};

pub const PODS: u64 = 6;

/// Ids beyond what a double can hold.
pub fn pod(index: u64) -> u64 {
    u64::MAX - index * 0x0100_0000_0000_0001
}

/// A call that may arrive late, or once more.
#[derive(Clone, Debug)]
pub enum Late {
    Sync(SyncCall),
    Claim(ClaimCall),
}

/// One replica: its ledger, its cells, and how wrong its clock is.
pub struct Replica {
    pub ledger: SharedLedger,
    pub cells: BTreeMap<u64, Share>,
    skew: Duration,
}

pub struct World {
    pub redis: Connection,
    pub news: Connection,
    pub model: Model,
    pub replicas: Vec<Replica>,
    pub late: Vec<Late>,
    pub rng: Rng,
    pub steps: u64,
    pub calls: u64,
    keys: ModelKeys,
    digests: BTreeMap<&'static str, String>,
    began: Instant,
    saved: Option<(Vec<Reply>, Model)>,
}

/// Nothing waits in these tests.
fn config() -> LedgerConfig {
    LedgerConfig {
        lease: Duration::from_mins(10),
        idle_poll: Duration::ZERO,
        pace: Pace { least: Duration::ZERO, cost: Duration::ZERO, cost_per_member: Duration::ZERO, ..Pace::default() },
        reap_delay: Duration::ZERO,
        reap_spread: Duration::ZERO,
        first_backoff: Duration::ZERO,
        ..LedgerConfig::default()
    }
}

impl World {
    pub fn new(address: SocketAddr, replicas: usize, seed: u64) -> World {
        let mut world = World {
            redis: Connection::open(address),
            news: Connection::open(address),
            model: Model::default(),
            replicas: Vec::new(),
            late: Vec::new(),
            rng: Rng::new(seed),
            steps: 0,
            calls: 0,
            keys: ModelKeys::new("exact"),
            digests: BTreeMap::new(),
            began: Instant::now(),
            saved: None,
        };
        world.listen();
        for _ in 0..replicas {
            let replica = world.replica();
            world.replicas.push(replica);
        }
        world
    }

    /// A process starts: no share, no membership, a clock that is up to 5 s wrong either way.
    pub fn replica(&mut self) -> Replica {
        let skew = Duration::from_millis(self.rng.below(10_000) as u64);
        Replica { ledger: SharedLedger::new(config(), self.rng.next_u64()), cells: BTreeMap::new(), skew }
    }

    fn listen(&mut self) {
        let channel = self.keys.news().as_bytes().to_vec();
        self.news.ask(&[b"SUBSCRIBE", &channel]);
    }

    /// The server is another one at the same address, without data.
    pub fn moved(&mut self, address: SocketAddr) {
        self.redis = Connection::open(address);
        self.news = Connection::open(address);
        self.listen();
        self.model = Model::default();
        self.saved = None;
        self.replicas.iter_mut().for_each(|replica| replica.ledger.reconnected());
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.rng.below(100) < percent
    }

    /// What this replica's clock shows. Zero skew is 5 s after the origin, so that a slow clock can show less.
    pub fn now(&self, replica: usize) -> Tick {
        Tick::default().plus(self.began.elapsed() + self.replicas[replica].skew)
    }

    /// Runs a script with the model's memory of the pods looked up right behind it.
    fn run(&mut self, script: Script, arguments: &[Vec<u8>]) -> (Vec<u8>, Vec<Reply>) {
        self.calls += 1;
        let digest = self.digests.entry(script.name).or_insert_with(|| {
            let digest = self.redis.ask(&[b"SCRIPT", b"LOAD", script.text.as_bytes()]).text();
            assert_eq!(digest.len(), 40);
            digest
        });
        let (digest, keys) = (digest.clone(), self.keys.ledger());
        let send = |redis: &mut Connection, command: &[u8], body: &[u8]| {
            let mut words: Vec<&[u8]> = vec![command, body, b"5"];
            words.extend(keys.iter().map(|key| key.as_bytes()));
            words.extend(arguments.iter().map(Vec::as_slice));
            words.push(b"PUBLISH");
            redis.queue(&words);
            let ids: Vec<[u8; 8]> = (0..PODS).map(|index| pod(index).to_le_bytes()).collect();
            let mut words: Vec<&[u8]> = vec![b"HMGET", keys[2].as_bytes()];
            words.extend(ids.iter().map(<[u8; 8]>::as_slice));
            redis.queue(&words);
            redis.flush()
        };
        let mut replies = send(&mut self.redis, b"EVALSHA", digest.as_bytes());
        if matches!(&replies[0], Reply::Error(text) if text.starts_with("NOSCRIPT")) {
            replies = send(&mut self.redis, b"EVAL", script.text.as_bytes());
        }
        let pods = replies.pop().expect("pods").list();
        (replies.pop().expect("the script's reply").bytes(), pods)
    }

    /// The server's memory is that of the model.
    fn compare(&self, pods: Vec<Reply>) {
        for (index, value) in (0..PODS).zip(pods) {
            let mut entries = BTreeMap::new();
            let mut sum = Share::ZERO;
            if let Reply::Bytes(value) = value {
                assert_eq!((value.len() - 72) % 52, 0, "a pod's value has whole entries");
                sum = share(&value[24..72]);
                for entry in value[72..].chunks(52) {
                    let member = u32::from_le_bytes(entry[..4].try_into().expect("4 bytes"));
                    assert!(entries.insert(member, share(&entry[4..])).is_none(), "one entry per member");
                }
            }
            let expected = self.model.entries(pod(index));
            assert_eq!(entries, expected, "step {}: shares of pod {index}", self.steps);
            let total = expected.values().fold(Share::ZERO, |sum, share| sum.plus(*share));
            assert_eq!(sum, total, "step {}: sum of pod {index}", self.steps);
        }
    }

    /// A sync reaches the server.
    pub fn carry_sync(&mut self, call: &SyncCall) -> SyncReply {
        let (reply, pods) = self.run(LEDGER_SYNC, &call.arguments().expect("arguments"));
        let reply = SyncReply::read(&reply).expect("a sync's reply");
        self.model.sync(call, &reply);
        self.compare(pods);
        reply
    }

    /// A claim reaches the server.
    pub fn carry_claim(&mut self, call: &ClaimCall) -> ClaimReply {
        let (reply, pods) = self.run(CLAIM, &call.arguments().expect("arguments"));
        let reply = ClaimReply::read(&reply).expect("a claim's reply");
        self.model.claim(call, &reply);
        self.compare(pods);
        reply
    }

    /// A reap reaches the server.
    pub fn carry_reap(&mut self, call: &ReapCall) -> ReapReply {
        let (reply, pods) = self.run(LEDGER_REAP, &[call.argument().expect("argument")]);
        let reply = ReapReply::read(&reply).expect("a reap's reply");
        self.model.reap(call, reply);
        self.compare(pods);
        reply
    }

    /// One turn of a replica: what its ledger wants, over a network that fails in `fails` of 100 cases.
    pub fn turn(&mut self, index: usize, fails: usize) {
        let now = self.now(index);
        match self.replicas[index].ledger.next(now) {
            Next::At(_) => {}
            Next::Reap(call) => {
                let reply = self.carry_reap(&call);
                let now = self.now(index);
                let lost = self.chance(fails);
                self.replicas[index].ledger.finish_reap(&call, (!lost).then_some(reply), now);
            }
            Next::Sync => {
                let call = self.replicas[index].ledger.start_sync(now);
                if self.chance(fails) {
                    // Never sent, or late, or done without an answer.
                    match self.rng.below(3) {
                        0 => {}
                        1 => self.late.push(Late::Sync(call)),
                        _ => drop(self.carry_sync(&call)),
                    }
                    let now = self.now(index);
                    self.replicas[index].ledger.fail_sync(now);
                    return;
                }
                let reply = self.carry_sync(&call);
                let now = self.now(index);
                self.replicas[index].ledger.finish_sync(&reply, now);
                if self.chance(fails) {
                    self.late.push(Late::Sync(call));
                }
            }
        }
    }

    /// A request claims its charge.
    pub fn claim(&mut self, index: usize, fails: usize) {
        let now = self.now(index);
        let since = self.replicas[index].ledger.view().version();
        let [one, two] = [0; 2].map(|_| pod(self.rng.below(PODS as usize) as u64));
        let mut charged: Vec<(u64, Share)> = Vec::new();
        for name in [one, two].into_iter().take(1 + usize::from(one != two)) {
            let cell = self.replicas[index].cells.entry(name).or_default();
            *cell = cell.plus(Share { running: 1, decode_tokens: 100, decode_open: 1, ..Share::ZERO });
            charged.push((name, *cell));
        }
        let rested_on = match self.rng.below(3) {
            0 => Vec::new(),
            1 => vec![one, two],
            _ => (0..PODS).map(pod).collect(),
        };
        let Some(call) = self.replicas[index].ledger.start_claim(&charged, rested_on, since, now) else {
            // Then it goes as paced.
            for (name, share) in charged {
                self.replicas[index].ledger.set(name, share);
            }
            return;
        };
        if self.chance(fails) {
            match self.rng.below(3) {
                0 => {}
                1 => self.late.push(Late::Claim(call.clone())),
                _ => drop(self.carry_claim(&call)),
            }
            self.replicas[index].ledger.fail_claim(call.sequence);
            return;
        }
        let reply = self.carry_claim(&call);
        let now = self.now(index);
        self.replicas[index].ledger.finish_claim(call.sequence, &reply, now);
        if self.chance(fails) {
            self.late.push(Late::Claim(call));
        }
    }

    /// Everybody hears what was announced, or most of it.
    pub fn spread_news(&mut self, lost: usize) {
        for message in self.news.messages() {
            let news = News::read(&message).expect("an announcement");
            for index in 0..self.replicas.len() {
                if !self.chance(lost) {
                    let now = self.now(index);
                    self.replicas[index].ledger.hear(&news, now);
                }
            }
        }
    }

    /// The lease of a member ends, as if its time had passed.
    pub fn expire(&mut self, member: u32) {
        if !self.model.member(member) {
            return;
        }
        let [control, leases, ..] = self.keys.ledger();
        let name = member.to_le_bytes();
        let mut record = self.redis.ask(&[b"HGET", control.as_bytes(), &name]).bytes();
        record[8..16].copy_from_slice(&1u64.to_le_bytes());
        self.redis.queue(&[b"HSET", control.as_bytes(), &name, &record]);
        self.redis.queue(&[b"ZADD", leases.as_bytes(), b"1", &name]);
        self.redis.flush();
        self.model.expire(member);
    }

    /// Members that no replica is any more die like others: their join was answered to nobody, or a server that took over
    /// knows them from before.
    pub fn bury_strangers(&mut self) {
        let mine: Vec<u32> =
            self.replicas.iter().filter_map(|replica| replica.ledger.member()).map(|(_, member)| member).collect();
        for member in self.model.members().filter(|member| !mine.contains(member)).collect::<Vec<_>>() {
            self.expire(member);
        }
    }

    /// Remembers what a follower of the server would have copied by now.
    pub fn copy(&mut self) {
        for key in &self.keys.ledger()[..4] {
            self.redis.queue(&[b"DUMP", key.as_bytes()]);
        }
        self.saved = Some((self.redis.flush(), self.model.clone()));
    }

    /// The follower takes over: everything since its copy is lost.
    pub fn fail_over(&mut self) {
        let Some((dumps, model)) = self.saved.take() else { return };
        self.redis.say("FLUSHALL");
        for (key, dump) in self.keys.ledger()[..4].iter().zip(dumps) {
            if let Reply::Bytes(dump) = dump {
                let restored = self.redis.ask(&[b"RESTORE", key.as_bytes(), b"600000", &dump]);
                assert_eq!(restored, Reply::Bytes(b"OK".to_vec()));
            }
        }
        self.model = model;
        self.replicas.iter_mut().for_each(|replica| replica.ledger.reconnected());
    }

    /// The network heals; everybody tells and reads until nothing is left to tell, and the dead are gone. Then everybody's
    /// view is the sum of the others' cells.
    pub fn settle(&mut self) {
        for late in std::mem::take(&mut self.late) {
            self.arrive(&late);
        }
        for round in 0..60 {
            if round == 20 {
                // By now everybody is what it will stay; a late call may have kept alive who is not.
                self.bury_strangers();
            }
            for index in 0..self.replicas.len() {
                self.turn(index, 0);
            }
            self.spread_news(0);
        }
        assert_eq!(self.model.expired().len(), 0, "the dead are gone");
        for (index, replica) in self.replicas.iter().enumerate() {
            assert!(replica.ledger.is_settled(), "replica {index} has told everything");
            for name in (0..PODS).map(pod) {
                let others = self.replicas.iter().enumerate().filter(|(other, _)| *other != index);
                let expected = others
                    .fold(Share::ZERO, |sum, (_, other)| sum.plus(other.cells.get(&name).copied().unwrap_or_default()));
                assert_eq!(replica.ledger.view().share(name), expected, "step {}: view of {index}", self.steps);
            }
        }
    }

    /// A late or repeated call arrives. Nobody waits for its reply.
    pub fn arrive(&mut self, late: &Late) {
        match late {
            Late::Sync(call) => drop(self.carry_sync(call)),
            Late::Claim(call) => drop(self.carry_claim(call)),
        }
    }
}

fn share(bytes: &[u8]) -> Share {
    let short = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    Share {
        running: short(0),
        pending: short(4),
        prefills: short(8),
        decode_open: u64::from(short(12)),
        decode_tokens: long(16),
        decode_start_sum_ms: long(24),
        prefill_tokens: long(32),
        kv_tokens: long(40),
    }
}
