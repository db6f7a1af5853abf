//! Adapters in the state plane: their pods are told of once, under their home; what is found out about prompts is told
//! under the adapter's own name.

use std::sync::Arc;
use std::time::Duration;

use tandem::fleet::AdapterSpec;
use tandem::knobs::Grade;
use tandem::load::DecodeCharge;
use tandem::state::findings::Finding;
use tandem::state::plane::StatePlane;

use super::replicas::{MEET, Replica, fleet, leave, met, pairs};
use crate::harness::eventually;
use crate::harness::redis::Redis;

fn adapter(instances: &[&str]) -> AdapterSpec {
    AdapterSpec {
        namespace: "ns".into(),
        name: "lora".into(),
        instances: instances.iter().map(|name| Arc::from(*name)).collect(),
    }
}

/// The models whose loads the replica shares.
fn shared(replica: &Replica) -> Vec<String> {
    replica.plane.status(replica.clock.now()).models.iter().map(|status| status.model.to_string()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adapters_pods_are_told_of_once_and_its_prompts_under_its_name() {
    let redis = Redis::start().await;
    let specs = pairs("m", 2);
    let mut replicas = fleet(&redis.url(), Grade::Paced, 2, &specs).await;
    for replica in &mut replicas {
        replica.discover_all(&specs, &[adapter(&["p-0", "d-0"])]);
    }
    met(&replicas, "m").await;
    let [here, there] = &replicas[..] else { panic!("two replicas") };

    // Charged under the adapter's name, seen under both, counted once.
    let charges: Vec<DecodeCharge> = (0..3).map(|_| DecodeCharge::open(&here.pod("lora", "d-0"))).collect();
    let one = DecodeCharge::open(&here.pod("m", "d-0"));
    for model in ["m", "lora"] {
        eventually(MEET, "the loads", async || (there.sees(model, "d-0").pending == 4).then_some(())).await;
    }
    assert_eq!((shared(here), shared(there)), (vec!["m".to_owned()], vec!["m".to_owned()]));
    drop((charges, one));
    eventually(MEET, "the releases", async || (there.sees("lora", "d-0").pending == 0).then_some(())).await;

    let (blocks, slot) = ([11, 22, 33], there.pod("m", "p-0").slot);
    here.plane.tell(&Arc::from("lora"), Finding::Prefix { pod: here.pod("lora", "p-0").id, blocks: blocks.to_vec() });
    let matched = |model: &str| {
        while there.prefix.drain(there.clock.now()).more {}
        there.prefix.match_percents(model, &blocks, &[slot])
    };
    eventually(MEET, "the prefix", async || (matched("lora") == [100]).then_some(())).await;
    assert_eq!(matched("m"), [0], "engines keep an adapter's blocks apart");

    // The base model's pods leave while the adapter stays: nobody to tell of, and nothing goes wrong.
    for replica in &mut replicas {
        replica.discover_all(&[], &[adapter(&["p-0", "d-0"])]);
    }
    for replica in &replicas {
        eventually(MEET, "the link to end", async || shared(replica).is_empty().then_some(())).await;
    }
    for replica in &mut replicas {
        replica.discover_all(&specs, &[adapter(&["p-0", "d-0"])]);
    }
    met(&replicas, "m").await;
    let charge = DecodeCharge::open(&replicas[0].pod("lora", "d-0"));
    eventually(MEET, "the load", async || (replicas[1].sees("m", "d-0").pending == 1).then_some(())).await;
    drop(charge);
    tokio::time::timeout(Duration::from_secs(10), leave(replicas)).await.expect("all leave");
}
