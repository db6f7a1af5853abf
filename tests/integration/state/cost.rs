//! What the ledger costs Redis: time that grows with what changed and not with the fleet, no command over everything, and
//! memory within its bounds.

use std::collections::BTreeMap;

use tandem::load::Share;
use tandem::rng::Rng;
use tandem::state::keys::ModelKeys;
use tandem::state::scripts::LEDGER_SYNC;
use tandem::state::wire::{Epoch, Purpose, SyncCall, SyncReply, SyncStatus};

use super::resp::Connection;
use crate::harness::redis::Redis;

/// Redis with a ledger of some members that all have work on all pods.
struct Fleet {
    redis: Connection,
    keys: ModelKeys,
    digest: String,
    pods: Vec<u64>,
    members: Vec<u32>,
    epoch: Epoch,
    sequence: u64,
    version: u64,
    rng: Rng,
}

impl Fleet {
    fn new(redis: &Redis, pods: usize, members: usize) -> Fleet {
        let mut redis = Connection::open(redis.address());
        redis.say("FLUSHALL");
        let digest = redis.ask(&[b"SCRIPT", b"LOAD", LEDGER_SYNC.text.as_bytes()]).text();
        let mut rng = Rng::new(1);
        let pods = (0..pods).map(|_| rng.next_u64()).collect();
        let keys = ModelKeys::new("cost");
        let mut fleet = Fleet {
            redis,
            keys,
            digest,
            pods,
            members: Vec::new(),
            epoch: Epoch::default(),
            sequence: 0,
            version: 0,
            rng,
        };
        for _ in 0..members {
            let call = SyncCall { purpose: Purpose::Join, ..fleet.call(0, Vec::new()) };
            let reply = fleet.send(&call);
            fleet.epoch = reply.epoch;
            fleet.members.push(reply.member);
        }
        for member in fleet.members.clone() {
            for from in (0..fleet.pods.len()).step_by(500) {
                let to = fleet.pods.len().min(from + 500);
                let shares = (from..to).map(|pod| (fleet.pods[pod], fleet.share())).collect();
                let call = fleet.call(member, shares);
                fleet.send(&call);
            }
        }
        fleet
    }

    /// One open charge.
    fn share(&mut self) -> Share {
        let tokens = 1 + self.rng.below(1 << 40) as u64;
        Share { running: 1, decode_tokens: tokens, decode_open: 1, decode_start_sum_ms: tokens, ..Share::ZERO }
    }

    fn call(&mut self, member: u32, shares: Vec<(u64, Share)>) -> SyncCall {
        self.sequence += 1;
        SyncCall {
            epoch: self.epoch,
            nonce: *b"an epoch",
            member,
            sequence: self.sequence,
            since: self.version,
            lease_ms: 600_000,
            limit: 1,
            shares,
            ..SyncCall::default()
        }
    }

    fn send(&mut self, call: &SyncCall) -> SyncReply {
        let keys = self.keys.ledger();
        let arguments = call.arguments().expect("arguments");
        let mut words: Vec<&[u8]> = vec![b"EVALSHA", self.digest.as_bytes(), b"5"];
        words.extend(keys.iter().map(|key| key.as_bytes()));
        words.extend(arguments.iter().map(Vec::as_slice));
        words.push(b"PUBLISH");
        let reply = SyncReply::read(&self.redis.ask(&words).bytes()).expect("a reply");
        assert_eq!(reply.status, SyncStatus::Done);
        if !reply.more {
            self.version = reply.version;
        }
        reply
    }

    /// Calls and microseconds of every command since the last reset.
    fn stats(&mut self) -> BTreeMap<String, (u64, u64)> {
        let text = self.redis.say("INFO commandstats").text();
        let number = |fields: &str, name: &str| {
            let field = fields.split(',').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
            field.and_then(|field| field.parse().ok()).unwrap_or(0)
        };
        let lines = text.lines().filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(':'));
        lines.map(|(name, fields)| (name.to_owned(), (number(fields, "calls"), number(fields, "usec")))).collect()
    }

    /// Processor time of the server so far, in microseconds. Unlike the time by the clock that it reports per command, this
    /// does not grow when the machine has other work.
    fn processor(&mut self) -> f64 {
        let text = self.redis.say("INFO cpu").text();
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).expect("a field");
            value.trim().parse::<f64>().expect("seconds")
        };
        (field("used_cpu_user") + field("used_cpu_sys")) * 1e6
    }

    /// Processor time of one sync with so many changed pods, in microseconds, the network's part included: the best of some
    /// batches.
    fn cost(&mut self, changed: usize) -> f64 {
        let member = self.members[0];
        let (batches, calls) = if changed >= 100 { (5, 10) } else { (5, 100) };
        let mut best = f64::INFINITY;
        for _ in 0..batches {
            let mut prepared = Vec::new();
            for _ in 0..calls {
                let mut pods = self.pods.clone();
                self.rng.shuffle(&mut pods);
                let shares = pods.into_iter().take(changed).map(|pod| (pod, self.share())).collect();
                prepared.push(self.call(member, shares));
            }
            let before = self.processor();
            for mut call in prepared {
                call.since = self.version;
                self.send(&call);
            }
            best = best.min((self.processor() - before) / f64::from(calls));
        }
        best
    }

    fn memory(&mut self) -> i64 {
        let keys: Vec<String> = self.keys.ledger()[..4].iter().map(|key| (*key).to_owned()).collect();
        let usage = |key: &String| self.redis.ask(&[b"MEMORY", b"USAGE", key.as_bytes(), b"SAMPLES", b"0"]).number();
        keys.iter().map(usage).sum()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r66_a_sync_costs_what_has_changed() {
    let redis = Redis::start().await;
    tokio::task::block_in_place(|| {
        let mut small = Fleet::new(&redis, 100, 1);
        let in_small = small.cost(10);
        let mut large = Fleet::new(&redis, 10_000, 1);
        large.redis.say("CONFIG RESETSTAT");
        let costs: Vec<(usize, f64)> =
            [0, 1, 10, 100, 1_000].into_iter().map(|changed| (changed, large.cost(changed))).collect();
        println!("changed pods of 10,000 and µs of processor time per sync: {costs:?}; 10 of 100: {in_small}");
        let at = |index: usize| costs[index].1;
        assert!(at(2) < 4.0 * in_small.max(50.0), "a hundred times the pods do not cost more");
        assert!(at(4) < 150.0 * at(2), "a hundred times the changes cost about that");
        assert!(at(1) < at(3) && at(3) < at(4), "the changes are what costs");
        let stats = large.stats();
        let fixed = ["evalsha", "time", "hmget", "hset", "zadd", "publish"];
        let calls = stats["evalsha"].0;
        for (name, (count, _)) in &stats {
            let few =
                ["config|resetstat", "info", "zrangebyscore", "zcard", "hget", "hlen", "pexpire", "zrange", "zscore"];
            assert!(
                fixed.contains(&name.as_str()) || few.contains(&name.as_str()),
                "{name} is not a command for a sync"
            );
            assert!(*count <= 2 * calls + 20, "{name}: {count} times in {calls} syncs");
        }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_stays_within_64_bytes_per_charge_and_256_per_pod() {
    let redis = Redis::start().await;
    tokio::task::block_in_place(|| {
        for (pods, members) in [(10_000, 1), (1_000, 4), (5_000, 16), (17, 3)] {
            let mut fleet = Fleet::new(&redis, pods, members);
            let bytes = fleet.memory();
            let charges = pods * members;
            // What one more member costs is not a matter of pods; nor is an empty ledger.
            let bound = i64::try_from(64 * charges + 256 * pods + 100 * members + 700).expect("small");
            println!("{pods} pods, {charges} charges: {bytes} bytes of {bound}");
            assert!(bytes <= bound, "{bytes} > {bound} for {pods} pods and {members} members");
        }
    });
}
