//! A Redis Cluster of three nodes: models spread over it, and a slot that moves while it is used.

use std::time::{Duration, Instant};

use tandem::fleet::{PodSpec, Role};
use tandem::knobs::Grade;
use tandem::load::DecodeCharge;
use tokio_util::sync::CancellationToken;

use super::replicas::{MEET, Replica, fleet, leave, met, pairs};
use super::resp::Connection;
use super::under_load::{agree, bound, busy_bound, drive, idle, percentile};
use crate::harness::eventually;
use crate::harness::processor::closed_port;
use crate::harness::redis::Redis;

const MODELS: usize = 64;
/// The slots of each node.
const SLOTS: [(u16, u16); 3] = [(0, 5_460), (5_461, 10_922), (10_923, 16_383)];

fn name(model: usize) -> String {
    format!("model-{model}")
}

fn decode(model: usize) -> String {
    format!("d-of-{model}")
}

/// Pods of one model. No two pods have the same name, whatever their model.
fn pods(model: usize) -> Vec<PodSpec> {
    let mut pods = pairs(&name(model), 1);
    for pod in &mut pods {
        let name = if pod.role == Role::Decode { decode(model) } else { format!("p-of-{model}") };
        pod.key.name = name.into();
    }
    pods
}

fn number(reply: &str) -> u64 {
    reply.trim_start_matches(':').parse().unwrap_or_else(|_| panic!("a number expected: {reply}"))
}

/// Three nodes that know one another and have all slots.
async fn nodes() -> Vec<Redis> {
    let mut nodes = Vec::new();
    for (first, last) in SLOTS {
        let more = || {
            let bus = closed_port().port().to_string();
            let words = ["--cluster-enabled", "yes", "--cluster-port", &bus, "--cluster-node-timeout", "2000"];
            words.map(str::to_owned).to_vec()
        };
        let node = Redis::start_with(more).await;
        let range = [first.to_string(), last.to_string()];
        assert_eq!(node.command(&["CLUSTER", "ADDSLOTSRANGE", &range[0], &range[1]]).await, "+OK");
        nodes.push(node);
    }
    let (first, others) = nodes.split_first().expect("nodes");
    for other in others {
        let (port, bus) = (other.address().port().to_string(), bus_port(other));
        assert_eq!(first.command(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]).await, "+OK");
    }
    for node in &nodes {
        eventually(MEET, "the nodes to meet", async || {
            let info = node.command(&["CLUSTER", "INFO"]).await;
            (info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3")).then_some(())
        })
        .await;
    }
    nodes
}

/// The port on which nodes talk to one another.
fn bus_port(node: &Redis) -> String {
    let port = Connection::open(node.address()).say("CONFIG GET cluster-port").list().pop().expect("a value");
    port.text()
}

/// Moves a slot from one node to another, with everybody at work.
async fn migrate(nodes: &[Redis], slot: &str, from: &Redis, to: &Redis) {
    let [source, target] = [from.command(&["CLUSTER", "MYID"]).await, to.command(&["CLUSTER", "MYID"]).await];
    assert_eq!(to.command(&["CLUSTER", "SETSLOT", slot, "IMPORTING", &source]).await, "+OK");
    assert_eq!(from.command(&["CLUSTER", "SETSLOT", slot, "MIGRATING", &target]).await, "+OK");
    let port = to.address().port().to_string();
    loop {
        // One key at a time, so that scripts find some of theirs on either side.
        let keys = Connection::open(from.address()).say(&format!("CLUSTER GETKEYSINSLOT {slot} 1")).list();
        let Some(key) = keys.into_iter().next() else { break };
        let moved = from.command(&["MIGRATE", "127.0.0.1", &port, &key.text(), "0", "5000"]).await;
        assert!(moved == "+OK" || moved == "+NOKEY", "{moved}");
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    // The new owner first, as the documentation of Redis wants it.
    for node in std::iter::once(to).chain([from]).chain(nodes) {
        assert_eq!(node.command(&["CLUSTER", "SETSLOT", slot, "NODE", &target]).await, "+OK");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r68_models_spread_over_a_cluster_and_a_slot_moves_under_load() {
    let nodes = nodes().await;
    let url = format!("redis-cluster://{}", nodes[0].address());
    let specs: Vec<PodSpec> = (0..MODELS).flat_map(pods).collect();
    let replicas = fleet(&url, Grade::Paced, 2, &specs).await;
    for model in 0..MODELS {
        met(&replicas, &name(model)).await;
    }
    // Every model's work reaches the other replica.
    let hold = |replica: &Replica, model: usize| DecodeCharge::open(&replica.pod(&name(model), &decode(model)));
    let held: Vec<DecodeCharge> = (0..MODELS).map(|model| hold(&replicas[model % 2], model)).collect();
    for model in 0..MODELS {
        let other = &replicas[1 - model % 2];
        let seen = async || (other.sees(&name(model), &decode(model)).pending == 1).then_some(());
        eventually(MEET, &format!("the charge of {}", name(model)), seen).await;
    }
    let mut keys = Vec::new();
    for node in &nodes {
        keys.push(number(&node.command(&["DBSIZE"]).await));
        let errors = node.command(&["INFO", "errorstats"]).await;
        assert!(!errors.contains("CROSSSLOT"), "{errors}");
    }
    println!("{MODELS} models on three nodes: {keys:?} keys");
    let (most, least) = (keys.iter().max().expect("nodes"), keys.iter().min().expect("nodes"));
    assert!(*least > 0 && most < &(2 * least), "{keys:?}");
    drop(held);

    let model = name(7);
    let slot = number(&nodes[0].command(&["CLUSTER", "KEYSLOT", &format!("tandem:{{{model}}}:ledger1:control")]).await);
    let owner = SLOTS.iter().position(|(_, last)| slot <= u64::from(*last)).expect("an owner");
    let (from, to) = (&nodes[owner], &nodes[(owner + 1) % 3]);
    let failures = |model: usize| -> u64 {
        replicas.iter().filter_map(|replica| replica.status(&name(model))).map(|status| status.counts.failures).sum()
    };
    let undisturbed = failures(0);
    let stop = CancellationToken::new();
    let script = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let before = hold(&replicas[0], 7);
        migrate(&nodes, &slot.to_string(), from, to).await;
        let moved = Instant::now();
        drop(before);
        let held = hold(&replicas[1], 7);
        tokio::time::sleep(Duration::from_millis(300)).await;
        stop.cancel();
        (moved, held)
    };
    let (measured, (moved, held)) = tokio::join!(drive(&replicas, &model, 100, &stop), script);
    eventually(MEET, "everybody to see everything", async || agree(&replicas, &model).then_some(())).await;
    let took = moved.elapsed();
    let counts: Vec<_> =
        replicas.iter().filter_map(|replica| replica.status(&model)).map(|status| status.counts).collect();
    println!("slot {slot} moved: exact {took:?} later; {}; {counts:?}", measured.summary());
    assert!(took < bound(Duration::from_secs(3), 5), "{took:?}");
    assert!(
        measured.selected.len() > 30 && percentile(&measured.selected, 0.99) < busy_bound(Duration::from_millis(1), 40)
    );
    let here = number(&to.command(&["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()]).await);
    let there = number(&from.command(&["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()]).await);
    assert!(here > 0 && there == 0, "{here} {there}");
    drop(held);
    eventually(MEET, "nothing to be left", async || idle(&replicas, &model).then_some(())).await;
    // Calls to nodes that had nothing to do with it may have waited for the client to look where the slots are.
    let disturbed = failures(0).saturating_sub(undisturbed);
    assert!(disturbed <= 4, "{disturbed} syncs of another model failed");
    eventually(MEET, "the subscriptions to move along", async || {
        let channels =
            Connection::open(to.address()).say(&format!("PUBSUB SHARDNUMSUB tandem:{{{model}}}:ledger1:news"));
        (channels.list().pop().expect("a count").number() == 2).then_some(())
    })
    .await;
    super::announcements::come_at_once(&replicas, &model).await;
    leave(replicas).await;
}
