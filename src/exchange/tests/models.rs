//! Adapters, claims on pods, and requests that Envoy's own routes serve.

use super::*;
use crate::fleet::{AdapterSpec, ClaimState, RouteParent, RouteTable, build_all};
use crate::knobs::PrefillPolicy;
use crate::state::plane::Claimed;

/// A world in which the adapter `lora` is on these pods of namespace `ns`.
fn adapted(specs: &[PodSpec], instances: &[&str], change: impl FnOnce(&mut Knobs)) -> Arc<World> {
    let world = world_with(&[], change);
    let adapter = AdapterSpec {
        namespace: "ns".into(),
        name: "lora".into(),
        instances: instances.iter().map(|name| Arc::from(*name)).collect(),
    };
    world.fleet.store(build_all(&Snapshot::default(), specs, &[adapter], &mut 0));
    world
}

/// Two pairs: `p`, `d` of `rs` and `p2`, `d2` of `rs2`, each at an address of its own.
fn two_pairs() -> Vec<PodSpec> {
    let of = |name: &str, role, roleset, host: &str| PodSpec { host: host.into(), ..spec(name, role, Some(roleset)) };
    vec![
        of("p", Role::Prefill, "rs", "10.0.0.1"),
        of("d", Role::Decode, "rs", "10.0.0.2"),
        of("p2", Role::Prefill, "rs2", "10.0.0.3"),
        of("d2", Role::Decode, "rs2", "10.0.0.4"),
    ]
}

fn asking(model: &str) -> Event {
    sent(format!(r#"{{"model":"{model}","prompt":"{}","max_tokens":8}}"#, "word ".repeat(400)))
}

fn model_of(body: &[u8]) -> String {
    serde_json::from_slice::<serde_json::Value>(body).unwrap()["model"].as_str().unwrap().to_owned()
}

/// Address and model of the prefill leg, if there is one, and of what goes on to the pod that answers.
fn sent_to(run: &Run) -> Vec<(String, String)> {
    let of = |effect: &Effect| match effect {
        Effect::StartPrefill(call) => Some((call.address.to_string(), model_of(&call.body))),
        Effect::Route(plan) => Some((plan.address.as_deref().unwrap_or_default().to_owned(), model_of(&plan.body))),
        _ => None,
    };
    run.effects.iter().filter_map(of).collect()
}

#[test]
fn a_request_for_an_adapter_goes_to_its_instances_under_its_name() {
    let with = |engine: Engine| two_pairs().into_iter().map(|pod| PodSpec { engine, ..pod }).collect::<Vec<_>>();
    for (engine, instances, expected) in [
        (Engine::Vllm, ["p2", "d2"], ["10.0.0.3:8000", "10.0.0.4:8000"]),
        (Engine::Vllm, ["p", "d"], ["10.0.0.1:8000", "10.0.0.2:8000"]),
        (Engine::Sglang, ["p2", "d2"], ["10.0.0.3:8000", "10.0.0.4:8000"]),
    ] {
        let world = adapted(&with(engine), &instances, |_| {});
        for _ in 0..8 {
            let mut run = Run::new(Arc::clone(&world));
            run.feed(head(PD)).feed(asking("lora")).feed(prefill_ok());
            let both = expected.map(|address| (address.to_owned(), "lora".to_owned()));
            assert_eq!(sent_to(&run), both, "{engine:?}");
            let loads: u64 =
                world.fleet.load().model("m").unwrap().pods.iter().map(|p| p.state.load.view().running).sum();
            assert_eq!(loads, 1, "the base model's pods are loaded by it");
            run.feed(answer_head(200)).feed(chunk("{}", true));
            assert_eq!(run.record().model.as_deref(), Some("lora"));
            run.oracle();
        }
    }
}

#[test]
fn sglang_names_an_adapter_behind_its_base() {
    let pods = |engine: Engine| two_pairs().into_iter().map(|pod| PodSpec { engine, ..pod }).collect::<Vec<_>>();
    let world = adapted(&pods(Engine::Sglang), &["p2", "d2"], |_| {});
    // The name asked for, the model that it is, and the pods that may serve it.
    let second = [["10.0.0.3:8000", "10.0.0.4:8000"]];
    let any = [["10.0.0.1:8000", "10.0.0.2:8000"], ["10.0.0.3:8000", "10.0.0.4:8000"]];
    for (name, model, pairs) in [("m:lora", "lora", &second[..]), ("m:other", "m", &any), ("m:a:b", "m", &any)] {
        for _ in 0..8 {
            let mut run = Run::new(Arc::clone(&world));
            run.feed(head(PD)).feed(asking(name)).feed(prefill_ok());
            let sent = sent_to(&run);
            assert!(sent.iter().all(|(_, asked)| asked == name), "engines are told what the client wrote: {sent:?}");
            let addresses: Vec<&str> = sent.iter().map(|(address, _)| &**address).collect();
            assert!(pairs.iter().any(|pair| pair[..] == addresses[..]), "{name}: {addresses:?}");
            run.feed(answer_head(200)).feed(chunk("{}", true));
            assert_eq!(run.record().model.as_deref(), Some(model), "{name}");
            run.oracle();
        }
    }
    for (engine, name) in
        [(Engine::Sglang, "m:"), (Engine::Sglang, ":lora"), (Engine::Sglang, "x:lora"), (Engine::Vllm, "m:lora")]
    {
        let mut run = Run::new(adapted(&pods(engine), &["p2", "d2"], |_| {}));
        run.feed(head(PD)).feed(asking(name));
        assert_eq!(run.refusal().reason, Reason::ModelUnknown, "{engine:?} {name}");
        run.oracle();
    }
}

#[test]
fn the_kv_of_an_adapter_named_behind_its_base_is_its_own() {
    let pods: Vec<_> = two_pairs().into_iter().map(|pod| PodSpec { engine: Engine::Sglang, ..pod }).collect();
    let world = adapted(&pods, &[], |_| {});
    let matched = |name: &str| {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head(PD)).feed(asking(name)).feed(prefill_ok()).feed(answer_head(200)).feed(chunk("{}", true));
        world.prefix.drain(Tick::from_millis(1));
        let percent = run.record().decision.as_ref().expect("a decision").prefix_match_pct;
        run.oracle();
        percent
    };
    assert_eq!(matched("m"), Some(0));
    assert_eq!(matched("m:a"), Some(0), "the base model's blocks are no help");
    assert_eq!(matched("m:b"), Some(0), "nor those of another adapter");
    for name in ["m", "m:a", "m:b"] {
        assert!(matched(name) > Some(90), "{name}");
    }
}

#[test]
fn an_adapter_without_a_whole_roleset_or_without_instances_is_refused() {
    for (instances, reason) in [
        (vec!["p", "d2"], Reason::SelectionFailed),
        (vec!["p"], Reason::SelectionFailed),
        (vec![], Reason::NoRoutablePods),
        (vec!["elsewhere"], Reason::NoRoutablePods),
    ] {
        let mut run = Run::new(adapted(&two_pairs(), &instances, |_| {}));
        run.feed(head(PD)).feed(asking("lora"));
        assert_eq!(run.refusal().reason, reason, "{instances:?}");
        run.oracle();
    }
}

#[test]
fn a_claim_for_an_adapter_is_made_where_its_pods_are_told_of() {
    let world = adapted(&two_pairs(), &["p", "d"], |_| {});
    world.fleet.load().model("m").unwrap().port.set_claims(Some(3));
    let mut run = Run::new(world);
    run.feed(head(PD)).feed(asking("lora"));
    let Some(Effect::Claim(order)) = run.effects.last() else { panic!("{:?}", run.names()) };
    assert_eq!((&*order.model, order.since), ("m", 3));
    run.feed(Event::Claimed(Claimed::Granted)).feed(Event::Gone);
    run.oracle();
}

/// What the prefix index knows of the prompt for the prefill pod that a request for the model gets.
fn known(world: &Arc<World>, model: &str) -> Option<u8> {
    let mut run = Run::new(Arc::clone(world));
    run.feed(head(PD)).feed(asking(model)).feed(prefill_ok()).feed(answer_head(200)).feed(chunk("{}", true));
    let known = run.record().decision.as_ref().expect("a decision").prefix_match_pct;
    run.oracle();
    world.prefix.drain(Tick::from_millis(1_000));
    known
}

#[test]
fn the_prefixes_of_an_adapter_are_not_those_of_its_base_model() {
    let pair: Vec<PodSpec> = two_pairs().into_iter().take(2).collect();
    let world = adapted(&pair, &["p", "d"], |knobs| {
        Arc::make_mut(&mut knobs.pd).prefill_policy = PrefillPolicy::PrefixCache;
    });
    assert_ne!(known(&world, "m"), Some(100));
    assert_eq!(known(&world, "m"), Some(100));
    assert_ne!(known(&world, "lora"), Some(100), "the same prompt, but other blocks");
    assert_eq!(known(&world, "lora"), Some(100));
    assert_eq!(known(&world, "m"), Some(100));
}

#[test]
fn a_model_whose_engines_are_not_up_says_when_to_come_back() {
    for (claim, text, retry) in [
        (ClaimState::Activating, "activating", Some("10")),
        (ClaimState::Sleeping, "sleeping", Some("10")),
        (ClaimState::Failed, "failed", None),
    ] {
        let claimed = PodSpec { port: 0, ready: false, claim: Some(claim), ..spec("c", Role::Other, None) };
        for headers in [PD, &[]] {
            let mut run = Run::new(world_with(std::slice::from_ref(&claimed), |_| {}));
            run.feed(head(headers)).feed(body(BODY));
            let error = run.refusal();
            assert_eq!((error.status.as_u16(), error.param), (503, Some("model")));
            assert!(error.message.contains(text), "{}", error.message);
            let headers = error.headers();
            assert_eq!(headers["x-error-no-model-backends"], "m");
            assert_eq!(headers.get("retry-after").map(|value| value.to_str().unwrap()), retry);
            let body: serde_json::Value = serde_json::from_slice(&error.body()).unwrap();
            assert_eq!(
                (&body["error"]["code"], &body["error"]["type"]),
                (&"service_unavailable".into(), &"overloaded_error".into())
            );
            run.oracle();
        }
        // A pod that is up serves.
        let mut run = Run::new(world_with(&[claimed, spec("up", Role::Other, None)], |_| {}));
        run.feed(head(&[("routing-strategy", "least-request")])).feed(body(BODY));
        assert_eq!(run.names().last(), Some(&"route"));
        run.feed(Event::Gone);
        run.oracle();
    }
    // Not routable, and no claim says why.
    let mut run = Run::new(world_with(
        &[PodSpec { port: 0, claim: Some(ClaimState::Active), ..spec("c", Role::Other, None) }],
        |_| {},
    ));
    run.feed(head(PD)).feed(body(BODY));
    assert_eq!(run.refusal().headers()["x-error-no-model-backends"], "true");
    run.oracle();
}

#[test]
fn without_a_strategy_the_models_route_must_be_ready_where_routes_are_known() {
    let parent = |accepted, resolved_refs| RouteParent { accepted, resolved_refs };
    let known = |name: &str, parents: Vec<RouteParent>| RouteTable::Known([(Arc::from(name), parents)].into());
    for (table, missing) in [
        (RouteTable::Absent, None),
        (known("m-router", vec![parent(true, true)]), None),
        (RouteTable::Known([].into()), Some("aibrix-system/m-router does not exist")),
        (known("n-router", vec![parent(true, true)]), Some("aibrix-system/m-router does not exist")),
        (known("m-router", vec![]), Some("no status")),
        (known("m-router", vec![parent(false, true)]), Some("Accepted is not True")),
        (known("m-router", vec![parent(true, false)]), Some("ResolvedRefs is not True")),
    ] {
        let world = world();
        world.fleet.set_routes(table.clone());
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head(&[])).feed(body(BODY));
        match missing {
            None => {
                let Some(Effect::Route(plan)) = run.effects.last() else { panic!("{:?}", run.names()) };
                assert_eq!(plan.address, None);
                assert!(plan.set_headers.contains(&("model", "m".to_owned())), "{:?}", plan.set_headers);
                run.feed(Event::Gone);
            }
            Some(missing) => {
                let error = run.refusal();
                assert_eq!((error.status.as_u16(), error.reason.code()), (503, Some("service_unavailable")));
                assert_eq!(error.headers()["x-error-routing"], "true");
                assert!(error.message.contains(missing), "{} / {missing}", error.message);
            }
        }
        run.oracle();
        // With a strategy, and on the front, Envoy's routes do not matter.
        for (adapter, headers) in [(Adapter::Envoy, PD), (Adapter::Front, &[] as &[_])] {
            let mut run = Run::over(Arc::clone(&world), adapter);
            run.feed(head(headers)).feed(body(BODY));
            assert!(run.names().contains(&"prefill"), "{table:?}");
            run.feed(Event::Gone);
            run.oracle();
        }
    }
}
