//! Every call over the client library against a real Redis.

use std::time::Duration;

use tandem::load::Share;
use tandem::state::codec::{decode, encode};
use tandem::state::keys::ModelKeys;
use tandem::state::ledger::{LedgerConfig, Next, SharedLedger};
use tandem::state::payload::{Batch, Bin, PrefixUpdate};
use tandem::state::redis::{FeedEvent, NewsFeed, Plane, RedisConfig, RedisError, SketchCall, StreamId};
use tandem::state::wire::ReapReply;

use crate::harness::redis::Redis;
use crate::harness::{eventually, within};

const SOON: Duration = Duration::from_secs(5);

async fn connected(redis: &Redis) -> Plane {
    let plane = Plane::connect(&RedisConfig::from_url(&redis.url()).expect("a URL")).expect("a plane");
    eventually(SOON, "a connection", async || plane.is_connected().then_some(())).await;
    plane
}

/// One replica with a ledger, on real time.
struct Replica {
    plane: Plane,
    ledger: SharedLedger,
    clock: tandem::clock::Clock,
}

impl Replica {
    async fn new(redis: &Redis, seed: u64) -> Replica {
        let ledger = SharedLedger::new(LedgerConfig::default(), seed);
        Replica { plane: connected(redis).await, ledger, clock: tandem::clock::Clock::system() }
    }

    /// Lets the ledger do what it wants until it wants to wait.
    async fn run(&mut self, keys: &ModelKeys) {
        loop {
            match self.ledger.next(self.clock.now()) {
                Next::At(_) => return,
                Next::Sync => {
                    let call = self.ledger.start_sync(self.clock.now());
                    match self.plane.ledger_sync(keys, &call, SOON).await {
                        Ok(reply) => drop(self.ledger.finish_sync(&reply, self.clock.now())),
                        // The connection to a server that has just died may be noticed only now.
                        Err(_) => self.ledger.fail_sync(self.clock.now()),
                    }
                }
                Next::Reap(call) => {
                    let reply = self.plane.ledger_reap(keys, &call, SOON).await.expect("a reply");
                    self.ledger.finish_reap(&call, Some(reply), self.clock.now());
                }
            }
        }
    }

    async fn until(&mut self, keys: &ModelKeys, what: &str, holds: impl Fn(&SharedLedger) -> bool) {
        let loops = async {
            while !holds(&self.ledger) {
                self.run(keys).await;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        within(what, loops).await;
    }
}

const TWO: Share = Share { running: 2, decode_tokens: 700, decode_open: 2, ..Share::ZERO };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r63_replicas_see_one_another_and_forget_the_dead() {
    let redis = Redis::start().await;
    let keys = ModelKeys::new("m");
    let mut one = Replica::new(&redis, 1).await;
    let mut two = Replica::new(&redis, 2).await;
    let mut feed = NewsFeed::connect(&RedisConfig::from_url(&redis.url()).expect("a URL")).expect("a feed");
    assert_eq!(within("the feed's connection", feed.next()).await, Some(FeedEvent::Gap));
    feed.add(std::iter::once(&keys)).await;
    one.until(&keys, "to join", |ledger| ledger.member().is_some()).await;
    two.until(&keys, "to join", |ledger| ledger.member().is_some()).await;

    one.ledger.set(5, TWO);
    one.until(&keys, "to be told", SharedLedger::is_settled).await;
    // The announcement is enough.
    let heard = within("an announcement", async {
        loop {
            match feed.next().await {
                Some(FeedEvent::News(channel, news)) if channel == keys.news() => return news,
                Some(_) => {}
                None => panic!("the feed ended"),
            }
        }
    })
    .await;
    assert_eq!(two.ledger.hear(&heard, two.clock.now()), [(5, TWO)]);
    assert_eq!(two.ledger.view().share(5), TWO);

    // It stops without a word. Its lease of 3 s ends, and somebody takes its share away.
    let died = std::time::Instant::now();
    drop(one);
    two.until(&keys, "to forget", |ledger| ledger.view().is_empty() && ledger.counts().reaped == 1).await;
    let took = died.elapsed();
    assert!(took > Duration::from_millis(1_500) && took < Duration::from_secs(6), "{took:?}");
    feed.close().await;
    two.plane.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r67_scripts_that_were_flushed_are_sent_again_and_no_call_fails() {
    let redis = Redis::start().await;
    let keys = ModelKeys::new("m");
    let mut one = Replica::new(&redis, 1).await;
    for round in 0..50 {
        redis.command(&["SCRIPT", "FLUSH"]).await;
        one.ledger.set(round, TWO);
        let call = one.ledger.start_sync(one.clock.now());
        let reply = one.plane.ledger_sync(&keys, &call, SOON).await.expect("a reply");
        one.ledger.finish_sync(&reply, one.clock.now());
    }
    assert_eq!(one.ledger.counts().syncs, 50);
    assert_eq!(one.ledger.counts().failures, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r69_calls_fail_at_once_without_a_server_and_go_on_with_the_next() {
    let redis = Redis::start().await;
    let address = redis.address();
    let keys = ModelKeys::new("m");
    let mut one = Replica::new(&redis, 1).await;
    one.ledger.set(5, TWO);
    one.until(&keys, "to be told", SharedLedger::is_settled).await;
    let mut reconnects = one.plane.reconnects();
    drop(redis);
    let call = one.ledger.start_sync(one.clock.now());
    let began = std::time::Instant::now();
    let failed = one.plane.ledger_sync(&keys, &call, Duration::from_millis(500)).await;
    assert!(matches!(failed, Err(RedisError::Down(_) | RedisError::Late)), "{failed:?}");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    one.ledger.fail_sync(one.clock.now());
    // Another server at the same place, without data.
    // Another process may have the port for a moment.
    let redis = eventually(SOON, "Redis comes back", async || Redis::start_on(address).await).await;
    within("a reconnect", reconnects.next()).await;
    eventually(SOON, "a connection", async || one.plane.is_connected().then_some(())).await;
    one.ledger.reconnected();
    one.until(&keys, "to join the new one", |ledger| ledger.counts().joins == 2 && ledger.is_settled()).await;
    let mut two = Replica::new(&redis, 2).await;
    two.until(&keys, "to see", |ledger| ledger.view().share(5) == TWO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r71_a_rate_limit_is_exact_over_replicas() {
    let redis = Redis::start().await;
    let keys = ModelKeys::new("m");
    let hour = Duration::from_hours(1);
    let mut planes = Vec::new();
    for _ in 0..3 {
        planes.push(connected(&redis).await);
    }
    let charges = (0..500).map(|index| planes[index % 3].charge_rate(&keys, "rpm", 1, 60, hour, SOON));
    let granted: Vec<_> = futures_util::future::join_all(charges).await;
    let granted: Vec<_> = granted.into_iter().map(|rate| rate.expect("a reply")).filter(|rate| rate.granted).collect();
    assert_eq!(granted.len(), 60);
    // What was not served is given back, once, and to its own window only.
    let plane = &planes[0];
    let back = plane.refund_rate(&keys, "rpm", 1, granted[0], hour, SOON).await.expect("a reply");
    assert!(back.granted && back.charged == 59 && back.ends_in <= hour);
    let old = tandem::state::redis::Rate { window: granted[0].window - 1, ..granted[0] };
    assert!(!plane.refund_rate(&keys, "rpm", 1, old, hour, SOON).await.expect("a reply").granted);
    assert!(plane.charge_rate(&keys, "rpm", 1, 60, hour, SOON).await.expect("a reply").granted);
    assert!(!plane.charge_rate(&keys, "rpm", 1, 60, hour, SOON).await.expect("a reply").granted);
    // Another limit is another limit; one that is never reached counts.
    let other = plane.charge_rate(&keys, "tpm", 5_000, u64::MAX, hour, SOON).await.expect("a reply");
    assert_eq!((other.granted, other.charged), (true, 5_000));
    // Windows end.
    let short = Duration::from_millis(50);
    let first = plane.charge_rate(&keys, "rps", 1, 1, short, SOON).await.expect("a reply");
    tokio::time::sleep(first.ends_in + Duration::from_millis(1)).await;
    let next = plane.charge_rate(&keys, "rps", 1, 1, short, SOON).await.expect("a reply");
    assert!(first.granted && next.granted && next.window > first.window);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_and_findings_reach_everybody_once() {
    let redis = Redis::start().await;
    let keys = ModelKeys::new("m");
    let (one, two) = (connected(&redis).await, connected(&redis).await);
    let minute = Duration::from_mins(1);

    let batch = |requests| {
        let bins = vec![Bin { first: 0, last: 9, requests, tokens: 5 * requests }];
        encode(&Batch { bins }).expect("bytes")
    };
    let call = |replica: u8, sequence, batch, after: &StreamId| SketchCall {
        replica: [replica; 8],
        sequence,
        batch,
        after: after.clone(),
        limit: 3,
        keep: minute,
    };
    let start = StreamId::START;
    let first = one.sketch_sync(&keys, "arrivals", &call(1, 1, batch(1), &start), SOON).await.expect("a reply");
    assert!(first.added && first.batches.is_empty(), "the own batch is no news: {first:?}");
    // The same again, and an older one, are not added.
    for sequence in [1, 0] {
        let again = one.sketch_sync(&keys, "arrivals", &call(1, sequence, batch(1), &start), SOON).await;
        assert!(!again.expect("a reply").added);
    }
    for sequence in 2..=6 {
        one.sketch_sync(&keys, "arrivals", &call(1, sequence, batch(sequence), &first.after), SOON)
            .await
            .expect("a reply");
    }
    let (mut after, mut requests) = (StreamId::START, 0);
    for pages in 1.. {
        let page = two.sketch_sync(&keys, "arrivals", &call(2, 0, Vec::new(), &after), SOON).await.expect("a reply");
        assert!(page.batches.len() <= 3);
        for (id, bytes) in page.batches {
            let age = page.now_ms - id.written_ms().expect("a time");
            assert!(age < 60_000, "{age}");
            requests += decode::<Batch>(&bytes).expect("a batch").bins[0].requests;
        }
        if page.after == after {
            assert_eq!(pages, 3, "two pages, and one that is empty");
            break;
        }
        after = page.after;
    }
    assert_eq!(requests, 1 + 2 + 3 + 4 + 5 + 6);

    let update = |pod| encode(&PrefixUpdate { replica: 1, pod, blocks: vec![pod; 3] }).expect("bytes");
    one.prefix_append(&keys, &[update(1), update(2)], 1_000, minute, SOON).await.expect("a reply");
    let read = two.prefix_read(&keys, &StreamId::START, 1, SOON).await.expect("a reply");
    assert_eq!(read.entries, [update(1)]);
    let read = two.prefix_read(&keys, &read.after, 10, SOON).await.expect("a reply");
    assert_eq!(read.entries, [update(2)]);
    let end = two.prefix_read(&keys, &read.after, 10, SOON).await.expect("a reply");
    assert!(end.entries.is_empty() && end.after == read.after);
    // The stream has an end.
    for round in 0..60 {
        let updates: Vec<Vec<u8>> = (0..64).map(|index| update(round * 64 + index)).collect();
        one.prefix_append(&keys, &updates, 1_000, minute, SOON).await.expect("a reply");
    }
    let length: u64 = redis.command(&["XLEN", &keys.prefix()]).await.trim_start_matches(':').parse().expect("a number");
    assert!((1_000..1_200).contains(&length), "{length}");

    let [batches, seen] = keys.sketch("arrivals");
    for key in [keys.prefix(), batches, seen] {
        let ttl = redis.command(&["PTTL", &key]).await;
        assert!(ttl.trim_start_matches(':').parse::<i64>().expect("a number") > 0, "{key}: {ttl}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r72_planes_that_were_closed_leave_no_connection() {
    let redis = Redis::start().await;
    let connections = async || {
        let clients = redis.command(&["CLIENT", "LIST", "TYPE", "normal"]).await;
        clients.lines().count()
    };
    let before = connections().await;
    for _ in 0..20 {
        let plane = connected(&redis).await;
        let gone = tandem::state::wire::ReapCall { epoch: [0; 8], member: 1, cursor: 0, limit: 1 };
        assert_eq!(plane.ledger_reap(&ModelKeys::new("m"), &gone, SOON).await, Ok(ReapReply::NotDead));
        plane.close().await;
    }
    eventually(SOON, "as many connections as before", async || (connections().await == before).then_some(())).await;
}
