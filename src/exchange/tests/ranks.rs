//! Data-parallel endpoints, and pods that drain.

use super::legs::{STREAM, fleet_of};
use super::*;
use crate::engines::lookup::{LookedUp, LookupKind};
use crate::engines::vllm::mooncake::engine_of;
use crate::knobs::KvConnector;

/// `p` serves two ranks behind one Mooncake bootstrap server.
fn two_ranks() -> Vec<PodSpec> {
    let mut specs = fleet_of(Engine::Vllm, 1);
    let second = specs.iter().find(|pod| pod.role == Role::Prefill).cloned().unwrap();
    let key = crate::fleet::PodKey { name: Arc::from("p/8001"), ..second.key.clone() };
    specs.push(PodSpec { key, uid: Arc::from("u/8001"), port: 8001, rank: 1, ..second });
    specs
}

#[test]
fn mooncake_computes_on_the_rank_that_the_decode_side_asks() {
    let answer = br#"{"0":{"engine_id":"e0"},"1":{"engine_id":"e1"}}"#;
    let world = world_with(&two_ranks(), |knobs| {
        Arc::make_mut(&mut knobs.pd).kv_connector = KvConnector::Mooncake;
    });
    let mut runs = Vec::new();
    // Both at once, so that the second one takes the idle rank.
    for _ in 0..2 {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head(PD)).feed(body(STREAM));
        let kinds = run.effects.iter().filter_map(|effect| match effect {
            Effect::LookUp(call) => Some(call.kind),
            _ => None,
        });
        let Some(LookupKind::MooncakeQuery { rank, .. }) = kinds.last() else { panic!("{:?}", run.names()) };
        run.feed(Event::LookedUp(Ok(Arc::new(LookedUp::Engine(engine_of(answer, rank).unwrap())))));
        let call = run.effects.iter().find_map(|effect| match effect {
            Effect::StartPrefill(call) => Some(call),
            _ => None,
        });
        let call = call.expect("a prefill leg");
        assert_eq!(&*call.address, format!("10.0.0.5:{}", 8000 + rank));
        assert_eq!(call.headers["x-data-parallel-rank"], rank.to_string());
        let plan = run.effects.iter().find_map(|effect| match effect {
            Effect::Route(plan) => Some(plan),
            _ => None,
        });
        let plan = plan.expect("a decode leg");
        let params = serde_json::from_slice::<serde_json::Value>(&plan.body).unwrap()["kv_transfer_params"].clone();
        assert_eq!(params["remote_engine_id"], format!("e{rank}"));
        assert!(!plan.headers.contains_key("x-data-parallel-rank"), "the decode side chooses its own");
        run.feed(stream_head());
        let Some(Effect::ForwardHead(add)) = run.effects.iter().find(|effect| names::of(effect) == "head") else {
            panic!("{:?}", run.names())
        };
        assert_eq!(add["prefill-target-pod"], "p", "the name of the pod");
        runs.push((rank, run));
    }
    let mut ranks: Vec<u16> = runs.iter().map(|(rank, _)| *rank).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1], "each rank has a load of its own");
    for (_, mut run) in runs {
        run.feed(Event::Gone);
        drop(run);
    }
    assert_clean(&world);
}

#[test]
fn who_drains_gets_nothing_new_and_ends_what_it_has() {
    let mut slots = 0;
    let world = world_with(&[], |_| {});
    let plain = |draining: bool| [spec("a", Role::Other, None), PodSpec { draining, ..spec("b", Role::Other, None) }];
    let put = |specs: &[PodSpec], slots: &mut u32| {
        let next = build(&world.fleet.load(), specs, slots);
        world.fleet.store(next);
    };
    let least = &[("routing-strategy", "least-request")];
    put(&[plain(false)[1].clone()], &mut slots);
    let mut running = Run::new(Arc::clone(&world));
    running.feed(head(least)).feed(body(BODY)).feed(answer_head(200));
    put(&plain(true), &mut slots);
    for _ in 0..8 {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head(least)).feed(body(BODY)).feed(answer_head(200));
        assert_eq!(run.exchange.record().target_pod.as_ref().unwrap().pod, "a");
        run.feed(Event::Gone);
    }
    running.feed(chunk(r#"{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}"#, true));
    assert_eq!(running.record().outcome, Outcome::Success);
    assert_eq!(running.record().target_pod.as_ref().unwrap().pod, "b");
    // Nobody is left: the model is known, and has no pod.
    put(&plain(true)[1..], &mut slots);
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(least)).feed(body(BODY));
    assert_eq!((run.refusal().status.as_u16(), run.refusal().reason), (503, Reason::NoRoutablePods));
    drop((run, running));
    assert_clean(&world);
}
